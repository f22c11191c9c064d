// Draw tokens from logits: sparse changes of a row (bias, penalties, minimum length, mask), then one pass over
// it for the likeliest token, for Gumbel noise or for the candidates of top-k, and a second pass for top-p.
//
// Tokens are those of `workers.rank.sampler`'s torch code. What is computed here differs from it in the last
// places of logarithms, exponentials and sums only, so that each row comes with whether rounding could have
// decided; the caller draws such a row again with the torch code, and rows that are no distribution.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <omp.h>

#include "simd.h"

namespace sampling {

// ------------------------------------------------------------------------------------ what a slot needs

// A row of `workers.rank.logits.SLOT`. Pointers are valid where `needs` has the bit of their use.
struct Slot {
  int64_t key;  // of the noise, without the output index
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* end_ids;
  int32_t* token_ids;  // distinct tokens of prompt (where they count) and output
  int32_t* counts;     // of each of them in the output
  int32_t num_bias, num_ends, num_tokens, token_capacity;
  int32_t num_output, min_tokens, top_k, num_logprobs;
  float temperature;  // 0: greedy
  float top_p, min_p, log_min_p;
  float repetition, presence, frequency;
  uint32_t needs;
};
static_assert(sizeof(Slot) == 112, "as workers.rank.logits.SLOT");

enum Needs : uint32_t { BIAS = 2, PENALTIES = 4, ENDS = 8 };

// What `sample_rows` reads and writes; R rows of V logits. `masks` may be null: R rows of (V + 31) / 32 words.
struct Step {
  const Slot* table;
  const int32_t* slots;
  float* logits;
  const uint32_t* masks;
  int32_t* tokens;
  uint8_t* is_sure;
  int64_t num_rows, vocab_size;
};

// ------------------------------------------------------------------------------------ changing logits

inline void change_row(const Slot& slot, float* x, int64_t V, const uint32_t* mask) {
  if (slot.needs & BIAS)
    for (int32_t i = 0; i < slot.num_bias; i++) x[slot.bias_ids[i]] += slot.bias_values[i];
  if (slot.needs & PENALTIES) {
    for (int32_t i = 0; i < slot.num_tokens; i++) {
      if (i + 64 < slot.num_tokens) __builtin_prefetch(x + slot.token_ids[i + 64], 1);
      float& to = x[slot.token_ids[i]];
      float lowered = to < 0 ? to * slot.repetition : to / slot.repetition;
      float count = float(slot.counts[i]), presence = slot.counts[i] ? slot.presence : 0.0f;
      to = lowered - count * slot.frequency - presence;
    }
  }
  if (slot.needs & ENDS && slot.num_output < slot.min_tokens)
    for (int32_t i = 0; i < slot.num_ends; i++) x[slot.end_ids[i]] = -INFINITY;
  if (mask == nullptr) return;
  for (int64_t begin = 0; begin < V; begin += 32) {
    uint32_t word = mask[begin / 32];
    if (word == 0xFFFFFFFFu) continue;
    int64_t size = std::min<int64_t>(32, V - begin);
    for (int64_t i = 0; i < size; i++) x[begin + i] = word >> i & 1 ? x[begin + i] : -INFINITY;
  }
}

// ------------------------------------------------------------------------------------------- vectors

constexpr int64_t BLOCK = 8 * LANES;

typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Unsigned __attribute__((vector_size(4 * LANES)));
typedef uint64_t Words __attribute__((vector_size(4 * LANES)));  // half as many

// A bit for each lane.
INLINE uint32_t bits_of(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
  return uint32_t(_mm256_movemask_ps((__m256)mask));
#endif
}

INLINE bool any(Ints mask) { return bits_of(mask) != 0; }

// The larger of each pair; `b` where one of them is no number.
INLINE Vec larger(Vec a, Vec b) { return vmax(a, b); }

// --------------------------------------------------------------------------------------------- noise

constexpr uint64_t WEYL = 0x9E3779B97F4A7C15u, MULTIPLY_1 = 0xBF58476D1CE4E5B9u, MULTIPLY_2 = 0x94D049BB133111EBu;

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * MULTIPLY_1;
  x = (x ^ (x >> 27)) * MULTIPLY_2;
  return x ^ (x >> 31);
}

// The upper 32 bits of `mix`, in the upper halves.
inline Words upper_mix(Words x) {
  x = (x ^ (x >> 30)) * MULTIPLY_1;
  return (x ^ (x >> 27)) * MULTIPLY_2;
}

inline uint64_t hash_of(uint64_t key, int64_t token) { return mix(key + uint64_t(token + 1) * WEYL); }

inline float gumbel(uint64_t hash) {
  float uniform = float(int64_t((hash >> 10) | 1)) * 0x1p-54f;
  uniform = uniform > 1.0f - 0x1p-24f ? 1.0f - 0x1p-24f : uniform;
  return float(-std::log(-std::log1p(-double(uniform))));
}

// More than ten times what two ways to compute logarithms make of a score.
inline float rounding(float best) { return (std::fabs(best) + 64.0f) * 0x1p-20f; }

// The best and second best of some tokens of a row. The row is broken if a logit is no number, or infinite.
struct Best {
  float best = -INFINITY, second = -INFINITY;
  int64_t token = 0;
  float most = -INFINITY;  // logit
  bool is_broken = false;

  void take(int64_t candidate, float score) {
    if (!(score < INFINITY)) {
      is_broken = true;
    } else if (score > best) {
      second = best, best = score, token = candidate;
    } else if (score > second) {
      second = score;
    }
  }

  void join(const Best& other) {  // of later tokens
    is_broken |= other.is_broken;
    most = other.most > most ? other.most : most;
    second = std::max(std::max(second, other.second), std::min(best, other.best));
    if (other.best > best) best = other.best, token = other.token;
  }

  bool is_sure() const { return !is_broken && best - second > rounding(best); }
};

INLINE Vec to_float(Ints values) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps((__m512i)values);
#else
  return _mm256_cvtepi32_ps((__m256i)values);
#endif
}

// A bound below which no token beats the best one yet. A token scores s + g with s = x / temperature and
// g = -log(-log(1 - u)), so that it beats a score b only when u < exp(s - b). That is tested first, with the 24
// high bits of u, a reciprocal for the division, and an exponential that is too large by up to 6 %: the
// logarithms are computed for a few tokens in ten thousand. All tokens within twice `rounding` of the best
// score pass.
struct Bar {
  static constexpr float LOG2_E = 1.44269504f, BIAS = 127.0f + 24.0f + 0.0002f;
  float per, offset = 1e30f;  // at first all win, but not -infinity

  explicit Bar(float temperature) : per(LOG2_E / temperature) {}

  void set(float best) {
    if (best > -INFINITY) offset = BIAS - (best - 2 * rounding(best)) * LOG2_E;
  }
  // log2 of 2^24 times the largest u that may win, plus 127.
  Vec exponents(Vec x) const { return fma(x, broadcast(per), broadcast(offset)); }
  // Whether none of these can win, whatever u: it is at least 2^-54.
  static Ints may_ever_win(Vec exponents) { return ~(Ints)(exponents < broadcast(BIAS - 55.0f)); }
  static Ints may_win(Vec exponents, Ints high) {
    Ints is_broken = (Ints)(exponents != exponents);
    exponents = vmin(vmax(exponents, broadcast(1.0f)), broadcast(153.0f));
    Vec bound = (Vec)to_int(exponents * broadcast(0x1p23f));  // exact at 2^n, a line above between them
    return (Ints)(to_float(high) <= bound) | is_broken;
  }
};

// The upper halves of the hashes of the tokens from `token` on, each 24 bits.
inline Ints high_bits(Words key, int64_t token) {
  Words steps;
  for (int64_t i = 0; i < LANES / 2; i++) steps[i] = uint64_t(2 * i + 1) * WEYL;
  Words even = key + (steps + uint64_t(token) * WEYL), odd = even + WEYL;
  Words both = (upper_mix(even) >> 32) | (upper_mix(odd) & 0xFFFFFFFF00000000u);
  return (Ints)((Unsigned)both >> 8);
}

// Calls `look(at, values, size)` for vectors of the logits [begin, end) and `skip(at)` for blocks of them, which
// says whether the block's vectors need a look; the last vector is filled up with -infinity.
template <typename Skip, typename Look>
inline void for_vectors(const float* x, int64_t begin, int64_t end, Skip skip, Look look) {
  int64_t at = begin;
  while (at + LANES <= end) {
    if (at > begin && at + BLOCK <= end && skip(at)) {
      at += BLOCK;
      continue;
    }
    int64_t stop = std::min(at + (at > begin ? BLOCK : LANES), end);
    for (; at + LANES <= stop; at += LANES) look(at, load(x + at), LANES);
  }
  if (at == end) return;
  Vec last = broadcast(-INFINITY);
  for (int64_t i = 0; at + i < end; i++) last[i] = x[at + i];
  look(at, last, end - at);
}

// The best of the tokens [begin, end) whose scaled logit is at least `least`, with noise.
inline Best best_with_noise(const float* x, int64_t begin, int64_t end, float temperature, float least,
                            uint64_t key) {
  Best found;
  Bar bar(temperature);
  float around = std::fabs(least) * temperature;
  float floor = least * temperature - (least > -INFINITY ? around * 0x1p-20f + 1e-30f : 0.0f);
  Vec most = broadcast(-INFINITY);
  Words keys = Words{} + key;
  auto skip = [&](int64_t at) {
    Ints ever{}, now{};
    Vec exponents[8];
    for (int64_t i = 0; i < 8; i++) {
      Vec values = load(x + at + i * LANES);
      most = larger(values, most);
      exponents[i] = bar.exponents(values);
      ever |= Bar::may_ever_win(exponents[i]) & ~(Ints)(values < broadcast(floor));
    }
    if (!any(ever)) return true;
    for (int64_t i = 0; i < 8; i++) now |= Bar::may_win(exponents[i], high_bits(keys, at + i * LANES));
    return !any(now);
  };
  auto look = [&](int64_t at, Vec values, int64_t size) {
    most = larger(values, most);
    Ints mask = Bar::may_win(bar.exponents(values), high_bits(keys, at)) & ~(Ints)(values < broadcast(floor));
    uint32_t bits = bits_of(mask) & (~0u >> (32 - size));
    if (!bits) return;
    for (; bits; bits &= bits - 1) {
      int64_t token = at + __builtin_ctz(bits);
      float scaled = x[token] / temperature;
      if (scaled == -INFINITY || scaled < least) continue;
      found.take(token, scaled + gumbel(hash_of(key, token)));
    }
    bar.set(found.best);
  };
  for_vectors(x, begin, end, skip, look);
  found.most = max_lanes(most);
  return found;
}

// The likeliest of the tokens [begin, end), the first of equal ones.
inline Best likeliest(const float* x, int64_t begin, int64_t end) {
  Best found;
  Ints is_broken{};
  Vec bar = broadcast(-INFINITY);
  auto skip = [&](int64_t at) {
    Vec most = load(x + at);
    is_broken |= (Ints)(most != most);
    for (int64_t i = 1; i < 8; i++) {
      Vec values = load(x + at + i * LANES);
      is_broken |= (Ints)(values != values);
      most = larger(values, most);
    }
    return !any((Ints)(most > bar));
  };
  auto look = [&](int64_t at, Vec values, int64_t size) {
    is_broken |= (Ints)(values != values);
    if (!any((Ints)(values > bar))) return;
    for (int64_t i = 0; i < size; i++)
      if (values[i] > found.best) found.best = values[i], found.token = at + i;
    bar = broadcast(found.best);
  };
  for_vectors(x, begin, end, skip, look);
  found.is_broken = any(is_broken);
  return found;
}

// -------------------------------------------------------------------------------------------- filters

// Probabilities differ by less than this, relative to each other, however they are computed in float; as
// exponents too.
constexpr float RATIO_ERROR = 2e-6f;

// How far two ways to sum up probabilities in float are apart, with `num` sums in a row: each rounds once.
inline double mass_error(int64_t num) { return 1e-6 + double(num) * 0x1p-24; }

// Unnormalized probabilities: of all tokens, of those that are certainly likelier than one of them, and of those
// that may be.
struct Mass {
  double total = 0, certain = 0, possible = 0;
};

// `most` is the largest scaled logit, `x_token` the logit of the token.
inline Mass mass_above(const float* x, int64_t begin, int64_t end, float temperature, float most, float x_token) {
  Mass mass;
  float near = temperature * (RATIO_ERROR + std::fabs(most) * 0x1p-21f) + std::fabs(x_token) * 0x1p-21f;
  Vec per = broadcast(1.0f / temperature), token = broadcast(x_token);
  Vec above = broadcast(x_token + near), below = broadcast(x_token - near);
  auto add = [&](Vec values, Vec sums[3]) {
    Vec p = vexp(fma(values, per, broadcast(-most)));
    Ints may_be = (Ints)(values > below) & (Ints)(values != token);
    sums[0] += p;
    sums[1] += (Vec)((Ints)p & (Ints)(values > above));
    sums[2] += (Vec)((Ints)p & may_be);
  };
  auto close = [&](const Vec sums[3]) {
    mass.total += double(sum_lanes(sums[0]));
    mass.certain += double(sum_lanes(sums[1]));
    mass.possible += double(sum_lanes(sums[2]));
  };
  auto block = [&](int64_t at) {
    Vec sums[3] = {};
    for (int64_t i = 0; i < 8; i++) add(load(x + at + i * LANES), sums);
    close(sums);
    return true;
  };
  auto rest = [&](int64_t, Vec values, int64_t) {
    Vec sums[3] = {};
    add(values, sums);
    close(sums);
  };
  for_vectors(x, begin, end, block, rest);
  return mass;
}

struct Candidate {
  float value;  // logit, then scaled logit
  int32_t token;
};

inline bool is_larger(const Candidate& a, const Candidate& b) { return a.value > b.value; }

// Keeps the k largest of more, and all that may equal the last of them when scaled.
inline float keep_largest(std::vector<Candidate>& kept, int64_t k, float temperature) {
  std::nth_element(kept.begin(), kept.begin() + (k - 1), kept.end(), is_larger);
  float last = kept[size_t(k - 1)].value;
  float bar = last - std::fabs(last) * 0x1p-20f - temperature * 1e-43f;
  kept.erase(std::remove_if(kept.begin() + k, kept.end(), [&](const Candidate& it) { return it.value < bar; }),
             kept.end());
  return bar;
}

// The candidates of a top-k among the tokens [begin, end). False: some logit is no number, or too many are equal.
inline bool collect(const float* x, int64_t begin, int64_t end, int64_t k, float temperature,
                    std::vector<Candidate>& kept) {
  const size_t capacity = size_t(2 * k + 2 * BLOCK);
  kept.clear();
  kept.reserve(capacity + size_t(LANES));
  float bar = std::numeric_limits<float>::lowest();  // tokens that are excluded need no candidates
  bool is_good = true;
  auto skip = [&](int64_t at) {
    Ints some{};
    for (int64_t i = 0; i < 8; i++) some |= ~(Ints)(load(x + at + i * LANES) < broadcast(bar));
    return !any(some);
  };
  auto look = [&](int64_t at, Vec values, int64_t size) {
    uint32_t bits = bits_of(~(Ints)(values < broadcast(bar))) & (~0u >> (32 - size));
    if (!bits || !is_good) return;
    for (; bits; bits &= bits - 1) {
      int64_t token = at + __builtin_ctz(bits);
      is_good &= x[token] == x[token];
      kept.push_back({x[token], int32_t(token)});
    }
    if (kept.size() < capacity) return;
    bar = keep_largest(kept, k, temperature);
    is_good &= kept.size() < capacity - size_t(BLOCK);
  };
  for_vectors(x, begin, end, skip, look);
  if (is_good && int64_t(kept.size()) > k) keep_largest(kept, k, temperature);
  return is_good;
}

// Scales the candidates, applies top-k, top-p and min-p to them, and draws one.
inline Best best_of(std::vector<Candidate>& kept, const Slot& slot, int64_t k, uint64_t key) {
  Best found;
  if (kept.empty()) return found;
  for (Candidate& it : kept) it.value /= slot.temperature;
  std::sort(kept.begin(), kept.end(), is_larger);
  float most = kept[0].value;
  if (!(std::fabs(most) < INFINITY)) found.is_broken = true;
  size_t num = std::min(size_t(k), kept.size());
  while (num < kept.size() && kept[num].value == kept[num - 1].value) num++;
  if (slot.top_p < 1.0f && num > 1) {
    double total = 0, before = 0, error = mass_error(int64_t(num));
    for (size_t i = 0; i < num; i++) total += std::exp(double(kept[i].value - most));
    size_t in = 0;
    while (in < num && (in == 0 || before < slot.top_p * total)) {
      before += std::exp(double(kept[in++].value - most));
      if (in < num && std::fabs(before / total - slot.top_p) <= error) found.is_broken = true;
    }
    while (in < num && kept[in].value - most == kept[in - 1].value - most) in++;
    if (in < num && !(kept[in].value - most < kept[in - 1].value - most - RATIO_ERROR)) found.is_broken = true;
    num = in;
  }
  float least = most + slot.log_min_p;
  for (size_t i = 0; i < num && !(kept[i].value < least); i++) {
    uint64_t hash = hash_of(key, kept[i].token);
    // As `Bar`, with the start of a series for the exponential.
    float below = found.best - 2 * rounding(found.best) - kept[i].value;
    float inverse = 1.0f + below + 0.5f * below * below;
    if (below > 0 && float(int64_t(hash >> 40)) * 0x1p-24f * inverse > 1.0001f) continue;
    found.take(kept[i].token, kept[i].value + gumbel(hash));
  }
  return found;
}

// ------------------------------------------------------------------------------------------------ rows

// Calls work(part, begin, end) for the parts of a row: one, or several at once.
template <typename Work>
void in_parts(int64_t V, int64_t num_parts, Work work) {
  if (num_parts == 1) return work(0, 0, V);
  int64_t size = (V + num_parts - 1) / num_parts;
#pragma omp parallel for schedule(static, 1)
  for (int64_t part = 0; part < num_parts; part++)
    work(part, std::min(part * size, V), std::min((part + 1) * size, V));
}

template <typename Find>
Best find_in_parts(int64_t V, int64_t num_parts, Find find) {
  if (num_parts == 1) return find(0, V);
  std::vector<Best> found(static_cast<size_t>(num_parts));
  in_parts(V, num_parts, [&](int64_t part, int64_t begin, int64_t end) { found[size_t(part)] = find(begin, end); });
  for (int64_t part = 1; part < num_parts; part++) found[0].join(found[size_t(part)]);
  return found[0];
}

inline Best draw_counted(const Slot& slot, const float* x, int64_t V, uint64_t key, int64_t num_parts) {
  std::vector<std::vector<Candidate>> kept(static_cast<size_t>(num_parts));
  std::vector<uint8_t> is_good(static_cast<size_t>(num_parts));
  in_parts(V, num_parts, [&](int64_t part, int64_t begin, int64_t end) {
    is_good[size_t(part)] = collect(x, begin, end, slot.top_k, slot.temperature, kept[size_t(part)]);
  });
  for (int64_t part = 1; part < num_parts; part++)
    kept[0].insert(kept[0].end(), kept[size_t(part)].begin(), kept[size_t(part)].end());
  if (std::find(is_good.begin(), is_good.end(), 0) == is_good.end()) return best_of(kept[0], slot, slot.top_k, key);
  Best broken;
  broken.is_broken = true;
  return broken;
}

// Draws from all tokens, and again among likelier ones while top-p or min-p drops the token. The best of all is
// the best of those that are kept if it is one of them; otherwise none as unlikely is kept.
inline Best draw_by_rejection(const Slot& slot, const float* x, int64_t V, uint64_t key, int64_t num_parts) {
  constexpr int most_tries = 16;
  float least = -INFINITY;
  Best found;
  for (int tries = 0; tries < most_tries; tries++) {
    found = find_in_parts(V, num_parts, [&](int64_t begin, int64_t end) {
      return best_with_noise(x, begin, end, slot.temperature, least, key);
    });
    if (found.is_broken || found.best == -INFINITY) return found;
    float scaled = x[found.token] / slot.temperature, most = found.most / slot.temperature;
    if (scaled < most + slot.log_min_p) {
      least = most + slot.log_min_p;
      continue;
    }
    if (!(slot.top_p < 1.0f) || scaled == most) return found;
    std::vector<Mass> parts(static_cast<size_t>(num_parts));
    in_parts(V, num_parts, [&](int64_t part, int64_t begin, int64_t end) {
      parts[size_t(part)] = mass_above(x, begin, end, slot.temperature, most, x[found.token]);
    });
    for (int64_t part = 1; part < num_parts; part++) {
      parts[0].total += parts[size_t(part)].total;
      parts[0].certain += parts[size_t(part)].certain;
      parts[0].possible += parts[size_t(part)].possible;
    }
    // Torch adds in at least eight lanes; a reciprocal stands for the division.
    double error = mass_error(V / 8) + (std::fabs(most) + 90) * 0x1p-22;
    if (parts[0].possible == 0 || parts[0].possible / parts[0].total < slot.top_p - error) return found;
    if (!(parts[0].certain / parts[0].total > slot.top_p + error)) break;
    least = std::nextafter(scaled, INFINITY);
  }
  found.is_broken = true;
  return found;
}

inline void sample_row(const Step& step, int64_t row, int64_t num_parts) {
  const Slot& slot = step.table[step.slots[row]];
  int64_t V = step.vocab_size;
  float* x = step.logits + row * V;
  change_row(slot, x, V, step.masks == nullptr ? nullptr : step.masks + row * ((V + 31) / 32));
  if (slot.temperature == 0.0f) {
    Best found = find_in_parts(V, num_parts, [&](int64_t begin, int64_t end) { return likeliest(x, begin, end); });
    if (found.is_broken) found.token = std::find_if(x, x + V, [](float it) { return it != it; }) - x;
    step.tokens[row] = int32_t(found.token), step.is_sure[row] = 1;
    return;
  }
  uint64_t key = mix(uint64_t(slot.key) + uint64_t(int64_t(slot.num_output)) * WEYL);
  Best found = slot.top_k ? draw_counted(slot, x, V, key, num_parts) : draw_by_rejection(slot, x, V, key, num_parts);
  step.tokens[row] = int32_t(found.token), step.is_sure[row] = found.is_sure();
}

}  // namespace sampling

// Changes the logits and draws a token for each row; `is_sure` says whether rounding cannot have decided. Rows are
// computed at once, and parts of a row if there are fewer rows than threads.
extern "C" void sample_rows(const sampling::Step* step) {
  constexpr int64_t least_part = 8192;
  int64_t num_rows = step->num_rows, num_threads = omp_get_max_threads();
  if (num_rows >= num_threads) {
#pragma omp parallel for schedule(dynamic)
    for (int64_t row = 0; row < num_rows; row++) sampling::sample_row(*step, row, 1);
    return;
  }
  int64_t num_parts = std::max<int64_t>(1, std::min(num_threads, step->vocab_size / least_part));
  for (int64_t row = 0; row < num_rows; row++) sampling::sample_row(*step, row, num_parts);
}

// Only changes the logits.
extern "C" void change_rows(const sampling::Step* step) {
  int64_t V = step->vocab_size;
  for (int64_t row = 0; row < step->num_rows; row++)
    sampling::change_row(step->table[step->slots[row]], step->logits + row * V, V,
                         step->masks == nullptr ? nullptr : step->masks + row * ((V + 31) / 32));
}

// Counts the drawn tokens as output of slots with penalties. Their tables have room for one more each.
extern "C" void count_tokens(sampling::Slot* table, const int32_t* slots, const int32_t* tokens, int64_t num_rows) {
  for (int64_t row = 0; row < num_rows; row++) {
    sampling::Slot& slot = table[slots[row]];
    if (!(slot.needs & sampling::PENALTIES)) continue;
    int32_t* end = slot.token_ids + slot.num_tokens;
    int32_t* found = std::find(slot.token_ids, end, tokens[row]);
    int64_t place = found - slot.token_ids;
    if (found == end) {
      *found = tokens[row], slot.counts[place] = 0;
      slot.num_tokens++;
    }
    slot.counts[place]++;
  }
}
