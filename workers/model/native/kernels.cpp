// The small operations of a decoder layer on a CPU, each in one pass over its data: RMS norm, rotary embedding
// with the KV write, and decode attention that reads the paged blocks where they lie; and the draw of a token
// from a whole vocabulary. `workers/model/native`
// compiles and binds this file; without a compiler the torch code beside each call does the same.
//
// Elements are float or bfloat16 (kept as uint16_t); arithmetic is float. Rounding follows the torch code:
// a bfloat16 intermediate is rounded wherever torch would store one.

#include <cmath>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "layer_ops.h"
#include "products.h"

namespace {

// Counter noise as in `workers/rank/noise.py`.
inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

inline uint64_t hash_of(uint64_t key, int64_t token) { return mix(key + uint64_t(token + 1) * 0x9E3779B97F4A7C15u); }

inline float gumbel(uint64_t hash) {
  float uniform = float(int64_t((hash >> 10) | 1)) * 0x1p-54f;
  uniform = uniform > 1.0f - 0x1p-24f ? 1.0f - 0x1p-24f : uniform;
  return float(-std::log(-std::log1p(-double(uniform))));
}

// The best token of a row and the scores of it and of the next best; NaN where a logit is NaN. A token scores
// s = x / temperature + g with g = -log(-log(1 - u)), so that it beats a score b only when u < exp(s - g - b).
// That is tested first, for many tokens at once, with the 24 high bits of u and an exponential that is too
// large by up to 6 %: the logarithms are computed for a few tokens in ten thousand. Every token within `slack`
// of the best score is among them.
void gumbel_argmax_row(const float* x, int64_t V, float temperature, float least, uint64_t key, int64_t* token,
                       float* best_score, float* second_score) {
  constexpr int64_t most = 512;
  uint32_t high[most];
  uint8_t may_win[most];
  float best = -INFINITY, second = -INFINITY;
  int64_t best_token = 0;
  for (int64_t begin = 0, size; begin < V; begin += size) {
    size = begin < 64 ? 64 : begin < most ? begin : most;
    size = V - begin < size ? V - begin : size;
    float slack = (std::fabs(best) + 64) * 0x1p-19f;
    float bar = best == -INFINITY ? -INFINITY : best - slack;
    for (int64_t i = 0; i < size; i++) high[i] = uint32_t(hash_of(key, begin + i) >> 40);
    uint32_t any = 0;
    for (int64_t i = 0; i < size; i++) {
      float exponent = (x[begin + i] / temperature - bar) * 1.44269504f;
      exponent = exponent > 1.0f ? 1.0f : exponent;
      exponent = exponent < -126.0f ? -126.0f : exponent;
      int32_t bits = int32_t((exponent + 127.0f) * 0x1p23f);  // 2^n is exact, between them it is a line above
      float bound;
      __builtin_memcpy(&bound, &bits, 4);
      may_win[i] = (float(int32_t(high[i])) * 0x1p-24f <= bound * 1.0001f) | (x[begin + i] != x[begin + i]);
      any |= may_win[i];
    }
    if (!any) continue;
    for (int64_t i = 0; i < size; i++) {
      if (!may_win[i]) continue;
      float scaled = x[begin + i] / temperature;
      if (scaled < least) continue;
      float score = scaled + gumbel(hash_of(key, begin + i));
      if (score != score) {
        *token = begin + i, *best_score = *second_score = score;
        return;
      }
      if (score > best) {
        second = best, best = score, best_token = begin + i;
      } else if (score > second) {
        second = score;
      }
    }
  }
  *token = best_token, *best_score = best, *second_score = second;
}

}  // namespace

// x: [R, V]; the others: [R].
extern "C" void gumbel_argmax(const float* x, const float* temperature, const float* least, const int64_t* keys,
                              int64_t* tokens, float* best, float* second, int64_t R, int64_t V) {
#pragma omp parallel for schedule(dynamic) if (R > 1)
  for (int64_t row = 0; row < R; row++)
    gumbel_argmax_row(x + row * V, V, temperature[row], least[row], uint64_t(keys[row]), tokens + row, best + row,
                      second + row);
}
