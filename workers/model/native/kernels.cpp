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
#include "products.h"

namespace {

// x: [rows, heads, size], rows `x_stride` elements apart; weight: [heads, size]; out: [rows, heads, size] with
// rows `out_stride` apart, may be x.
template <typename T>
void rms_norm(const T* x, int64_t x_stride, const T* weight, T* out, int64_t out_stride, int64_t rows,
              int64_t heads, int64_t size, float eps) {
#pragma omp parallel for if (rows * heads * size > 16384)
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t head = 0; head < heads; head++) {
      const T* from = x + row * x_stride + head * size;
      const T* scale = weight + head * size;
      T* to = out + row * out_stride + head * size;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < size; i++) sum += to_float(from[i]) * to_float(from[i]);
      float factor = 1.0f / std::sqrt(sum / float(size) + eps);
      for (int64_t i = 0; i < size; i++)
        store(rounded<T>(to_float(from[i]) * factor) * to_float(scale[i]), to + i);
    }
  }
}

// qkv: [rows, H + 2K, D]; cos, sin: [rows, D], sin signed for the pairs (d, d + D/2). Writes the rotated
// queries [rows, H, D] to `query`, rotated keys and the values into the blocks: block b starts at
// kv + b * block_stride, the layer's keys at + layer_offset, its values K * block_tokens * D later.
template <typename T>
void rotate_and_write(const T* qkv, const T* cos, const T* sin, const int64_t* blocks, const int64_t* offsets,
                      T* query, T* kv, int64_t block_stride, int64_t layer_offset, int64_t rows, int64_t H,
                      int64_t K, int64_t D, int64_t block_tokens) {
#pragma omp parallel for if (rows * (H + 2 * K) * D > 16384)
  for (int64_t row = 0; row < rows; row++) {
    T* keys = kv + blocks[row] * block_stride + layer_offset + offsets[row] * D;
    T* values = keys + K * block_tokens * D;
    for (int64_t head = 0; head < H + 2 * K; head++) {
      const T* from = qkv + (row * (H + 2 * K) + head) * D;
      if (head >= H + K) {
        __builtin_memcpy(values + (head - H - K) * block_tokens * D, from, D * sizeof(T));
        continue;
      }
      T* to = head < H ? query + (row * H + head) * D : keys + (head - H) * block_tokens * D;
      const T *c = cos + row * D, *s = sin + row * D;
      int64_t half = D / 2;
      for (int64_t i = 0; i < half; i++) {
        float low = to_float(from[i]), high = to_float(from[i + half]);
        store(rounded<T>(low * to_float(c[i])) + high * to_float(s[i]), to + i);
        store(rounded<T>(high * to_float(c[i + half])) + low * to_float(s[i + half]), to + i + half);
      }
    }
  }
}

// One new token each of B sequences. query, out: [B, H, D]; tables: [B, max_blocks] block ids, of which the
// keys [first, end) count, relative to the table's first block. Blocks from `first_host` on lie at `host`,
// `host_stride` apart, this layer only. One task a (sequence, key-value head).
template <typename T>
void decode_attention(const T* query, const T* kv, int64_t block_stride, int64_t layer_offset,
                      const int64_t* tables, const int64_t* firsts, const int64_t* ends, const T* host,
                      int64_t host_stride, int64_t first_host, T* out, int64_t B, int64_t H, int64_t K, int64_t D,
                      int64_t block_tokens, int64_t max_blocks, float scale) {
  int64_t G = H / K;
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int64_t b = 0; b < B; b++) {
    for (int64_t k = 0; k < K; k++) {
      int64_t first = firsts[b], end = ends[b], length = end - first;
      std::vector<float> scratch(G * length + 2 * G * D + D);
      float *scores = scratch.data(), *q = scores + G * length, *sums = q + G * D, *lane = sums + G * D;
      for (int64_t i = 0; i < G * D; i++) q[i] = to_float(query[(b * H + k * G) * D + i]) * scale;
      auto head = [&](int64_t position, int64_t offset) {
        int64_t block = tables[b * max_blocks + position / block_tokens];
        const T* layer = block < first_host ? kv + block * block_stride + layer_offset
                                            : host + (block - first_host) * host_stride;
        return layer + offset + (k * block_tokens + position % block_tokens) * D;
      };
      for (int64_t j = 0; j < length; j++) {
        const T* key = head(first + j, 0);
        for (int64_t i = 0; i < D; i++) lane[i] = to_float(key[i]);
        for (int64_t g = 0; g < G; g++) {
          float dot = 0;
#pragma omp simd reduction(+ : dot)
          for (int64_t i = 0; i < D; i++) dot += q[g * D + i] * lane[i];
          scores[g * length + j] = dot;
        }
      }
      for (int64_t g = 0; g < G; g++) {
        float *row = scores + g * length, top = row[0], total = 0;
        for (int64_t j = 1; j < length; j++) top = row[j] > top ? row[j] : top;
        for (int64_t j = 0; j < length; j++) total += row[j] = std::exp(row[j] - top);
        for (int64_t j = 0; j < length; j++) row[j] /= total;
      }
      for (int64_t j = 0; j < length; j++) {
        const T* value = head(first + j, K * block_tokens * D);
        for (int64_t i = 0; i < D; i++) lane[i] = to_float(value[i]);
        for (int64_t g = 0; g < G; g++) {
          float part = scores[g * length + j];
          for (int64_t i = 0; i < D; i++) sums[g * D + i] += part * lane[i];
        }
      }
      for (int64_t i = 0; i < G * D; i++) store(sums[i], out + (b * H + k * G) * D + i);
    }
  }
}

// tables: [B, n] block ids, in host memory from `first_host` on as above; out: [2, B, K, n, block_tokens * D].
template <typename T>
void gather_blocks(const T* kv, int64_t block_stride, int64_t layer_offset, const int64_t* tables, const T* host,
                   int64_t host_stride, int64_t first_host, T* out, int64_t B, int64_t K, int64_t n, int64_t size) {
#pragma omp parallel for collapse(2)
  for (int64_t row = 0; row < 2 * B * K; row++) {
    for (int64_t at = 0; at < n; at++) {
      int64_t part = row / (B * K), b = row / K % B, k = row % K, block = tables[b * n + at];
      const T* layer = block < first_host ? kv + block * block_stride + layer_offset
                                          : host + (block - first_host) * host_stride;
      __builtin_memcpy(out + (row * n + at) * size, layer + (part * K + k) * size, size * sizeof(T));
    }
  }
}

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

#define EXPORT(NAME, TYPE)                                                                                     \
  extern "C" void rms_norm_##NAME(const TYPE* x, int64_t x_stride, const TYPE* weight, TYPE* out,              \
                                  int64_t out_stride, int64_t rows, int64_t heads, int64_t size, float eps) {  \
    rms_norm<TYPE>(x, x_stride, weight, out, out_stride, rows, heads, size, eps);                              \
  }                                                                                                            \
  extern "C" void rotate_and_write_##NAME(const TYPE* qkv, const TYPE* cos, const TYPE* sin,                   \
                                          const int64_t* blocks, const int64_t* offsets, TYPE* query,          \
                                          TYPE* kv, int64_t block_stride, int64_t layer_offset, int64_t rows,  \
                                          int64_t H, int64_t K, int64_t D, int64_t block_tokens) {             \
    rotate_and_write<TYPE>(qkv, cos, sin, blocks, offsets, query, kv, block_stride, layer_offset, rows, H, K,  \
                           D, block_tokens);                                                                   \
  }                                                                                                            \
  extern "C" void decode_attention_##NAME(const TYPE* query, const TYPE* kv, int64_t block_stride,             \
                                          int64_t layer_offset, const int64_t* tables, const int64_t* firsts,  \
                                          const int64_t* ends, const TYPE* host, int64_t host_stride,          \
                                          int64_t first_host, TYPE* out, int64_t B, int64_t H, int64_t K,      \
                                          int64_t D, int64_t block_tokens, int64_t max_blocks, float scale) {  \
    decode_attention<TYPE>(query, kv, block_stride, layer_offset, tables, firsts, ends, host, host_stride,     \
                           first_host, out, B, H, K, D, block_tokens, max_blocks, scale);                      \
  }                                                                                                            \
  extern "C" void gather_blocks_##NAME(const TYPE* kv, int64_t block_stride, int64_t layer_offset,             \
                                       const int64_t* tables, const TYPE* host, int64_t host_stride,           \
                                       int64_t first_host, TYPE* out, int64_t B, int64_t K, int64_t n,         \
                                       int64_t size) {                                                         \
    gather_blocks<TYPE>(kv, block_stride, layer_offset, tables, host, host_stride, first_host, out, B, K, n,   \
                        size);                                                                                 \
  }

EXPORT(float32, float)
EXPORT(bfloat16, Bf16)
