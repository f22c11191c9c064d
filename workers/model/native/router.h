// The choice of experts by the logits of a router, in float: `workers/model/experts/routing.py` in a kernel.
//
// A row's choice depends on its logits alone. Of equal scores it takes those that torch.topk takes on a CPU: the
// same algorithms of the standard library are run over the same values in the same order.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "layer_ops.h"

enum Scoring : int64_t { SOFTMAX = 0, SOFTMAX_CHOSEN = 1, SIGMOID = 2, SPARSEMIXER = 3 };

// `workers/model/experts/native_routing.py` has the same structure, and `router_rule.py` says what the fields mean.
struct RouterRule {
  int64_t num_experts, num_chosen, scoring, is_normalized, num_groups, num_chosen_groups, num_best_of_group;
  float sum_offset, least_sum, scale, jitter;
};

struct RankedScore {
  float score;
  int32_t number;
};

// Puts the `count` largest scores first; a NaN is larger than any number.
inline void rank_scores(std::vector<RankedScore>& scores, int64_t count) {
  auto is_before = [](const RankedScore& x, const RankedScore& y) {
    return (std::isnan(x.score) && !std::isnan(y.score)) || x.score > y.score;
  };
  auto begin = scores.begin(), end = scores.end();
  if (count * 64 <= int64_t(scores.size())) return std::partial_sort(begin, begin + count, end, is_before);
  std::nth_element(begin, begin + count - 1, end, is_before);
  std::sort(begin, begin + count - 1, is_before);
}

// Chooses the experts of one row after another, with scratch memory of its own.
class RowRouter {
 public:
  RowRouter(const RouterRule& rule, const float* bias)
      : rule_(rule), bias_(bias), scores_(rule.num_experts), choice_(rule.num_experts) {}

  // logits: [num_experts]; the numbers and weights of the chosen experts: [num_chosen].
  void choose(const float* logits, int32_t* experts, float* weights) {
    if (rule_.scoring == SPARSEMIXER) {
      mix(logits, experts, weights);
    } else if (rule_.scoring == SOFTMAX_CHOSEN) {
      take_best(logits, nullptr, experts);
      for (int64_t i = 0; i < rule_.num_chosen; i++) weights[i] = logits[experts[i]];
      softmax(weights, rule_.num_chosen, weights);
    } else {
      score(logits);
      take_best(scores_.data(), bias_, experts);
      for (int64_t i = 0; i < rule_.num_chosen; i++) weights[i] = scores_[experts[i]];
      if (rule_.is_normalized) normalize(weights);
    }
    if (rule_.scale != 1)
      for (int64_t i = 0; i < rule_.num_chosen; i++) weights[i] *= rule_.scale;
  }

 private:
  static Vec exponential(Vec x) { return x == x ? vexp(x) : x; }

  // to [count] may be `from`.
  static void softmax(const float* from, int64_t count, float* to) {
    float largest = *std::max_element(from, from + count);
    Vec sums = broadcast(0);
    for_vectors(count, [&](int64_t i, auto width) {
      store_part(exponential(load_part(from + i, width) - broadcast(largest)), to + i, width);
      sums = sums + load_part(to + i, width);
    });
    float sum = sum_lanes(sums);
    for_vectors(count, [&](int64_t i, auto width) {
      store_part(load_part(to + i, width) / broadcast(sum), to + i, width);
    });
  }

  void score(const float* logits) {
    float* scores = scores_.data();
    if (rule_.scoring == SOFTMAX) return softmax(logits, rule_.num_experts, scores);
    for_vectors(rule_.num_experts, [&](int64_t i, auto width) {
      Vec power = exponential(broadcast(0) - load_part(logits + i, width));
      store_part(broadcast(1) / (broadcast(1) + power), scores + i, width);
    });
  }

  // Takes the experts of the largest scores, with the bias added if there is one, out of the best groups.
  void take_best(const float* scores, const float* bias, int32_t* experts) {
    for (int64_t i = 0; i < rule_.num_experts; i++)
      choice_[i] = {bias ? scores[i] + bias[i] : scores[i], int32_t(i)};
    if (rule_.num_groups > 1 && rule_.scoring != SOFTMAX_CHOSEN) leave_best_groups();
    rank_scores(choice_, rule_.num_chosen);
    for (int64_t i = 0; i < rule_.num_chosen; i++) experts[i] = choice_[i].number;
  }

  // Gives all experts of groups that are not among the best a score of minus infinity.
  void leave_best_groups() {
    int64_t size = rule_.num_experts / rule_.num_groups;
    groups_.clear();
    for (int64_t group = 0; group < rule_.num_groups; group++) {
      auto first = choice_.begin() + group * size;
      members_.assign(first, first + size);
      rank_scores(members_, rule_.num_best_of_group);
      float sum = members_[0].score;
      for (int64_t i = 1; i < rule_.num_best_of_group; i++) sum += members_[i].score;
      groups_.push_back({sum, int32_t(group)});
    }
    rank_scores(groups_, rule_.num_chosen_groups);
    for (int64_t i = rule_.num_chosen_groups; i < rule_.num_groups; i++) {
      auto first = choice_.begin() + groups_[i].number * size;
      for (auto out = first; out < first + size; out++) out->score = -INFINITY;
    }
  }

  // Divides the weights by their sum.
  void normalize(float* weights) const {
    float sum = 0;
    for (int64_t i = 0; i < rule_.num_chosen; i++) sum += weights[i];
    sum += rule_.sum_offset;
    if (sum < rule_.least_sum) sum = rule_.least_sum;
    for (int64_t i = 0; i < rule_.num_chosen; i++) weights[i] /= sum;
  }

  // Chooses one expert after another by the logits that are left, each with its part of a softmax over those that
  // are not far below.
  void mix(const float* logits, int32_t* experts, float* weights) {
    std::copy(logits, logits + rule_.num_experts, scores_.begin());
    for (int64_t i = 0; i < rule_.num_chosen; i++) {
      int64_t best = 0;
      for (int64_t j = 1; j < rule_.num_experts; j++)
        if (scores_[j] > scores_[best] || (std::isnan(scores_[j]) && !std::isnan(scores_[best]))) best = j;
      experts[i] = int32_t(best);
      weights[i] = 1 / sum_near(logits, scores_[best]);
      scores_[best] = -INFINITY;
    }
  }

  float sum_near(const float* logits, float largest) const {
    Vec sums = broadcast(0), zero = broadcast(0), most = broadcast(2 * rule_.jitter), top = broadcast(largest);
    for_vectors(rule_.num_experts, [&](int64_t i, auto width) {
      Vec logit = load_part(logits + i, width), left = load_part(scores_.data() + i, width);
      Vec size = vmax(vmax(logit, zero - logit), top);
      Vec part = (top - logit) / size > most ? zero : exponential(left - top);
      alignas(64) float parts[LANES] = {};
      store_part(part, parts, width);
      sums = sums + load(parts);
    });
    return sum_lanes(sums);
  }

  const RouterRule& rule_;
  const float* bias_;
  std::vector<float> scores_;
  std::vector<RankedScore> choice_, members_, groups_;
};

constexpr int64_t SERIAL_SCORES = 4096;  // as many are ranked faster by one thread than by several

// logits: [rows, num_experts]; bias: [num_experts] or null; experts, weights: [rows, num_chosen].
inline void choose_experts(const RouterRule& rule, const float* logits, const float* bias, int64_t rows,
                           int32_t* experts, float* weights) {
#pragma omp parallel if (rows * rule.num_experts > SERIAL_SCORES)
  {
    RowRouter router(rule, bias);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++)
      router.choose(logits + row * rule.num_experts, experts + row * rule.num_chosen, weights + row * rule.num_chosen);
  }
}

extern "C" void tandem_choose_experts(const RouterRule* rule, const float* logits, const float* bias, int64_t rows,
                                      int32_t* experts, float* weights) {
  choose_experts(*rule, logits, bias, rows, experts, weights);
}
