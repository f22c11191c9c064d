// What a decoder layer does beside products and attention, each in one pass over its data.
//
// Arithmetic is float; a value is rounded to T wherever transformers stores one.

#pragma once

#include "kv_elements.h"
#include "simd.h"

constexpr int64_t SERIAL_ITEMS = 16384;  // as many are computed faster by one thread than by several
constexpr int64_t MOST_HEAD_DIM = 1024;

// A norm of rows of some size. `workers/model/native` has the same structure.
struct Norm {
  const float* weight;  // [size]
  float eps;
  int32_t rounds_first;
};

// Calls at(i, width) for vectors of `count` items; the last may be narrower than LANES.
template <typename At>
INLINE void for_vectors(int64_t count, const At& at) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) at(i, std::integral_constant<int64_t, LANES>{});
  if (i < count) at(i, count - i);
}

template <typename T>
INLINE Vec load_part(const T* from, std::integral_constant<int64_t, LANES>) {
  return load(from);
}
template <typename T>
INLINE Vec load_part(const T* from, int64_t width) {
  return load(from, width);
}
template <typename T>
INLINE void store_part(Vec value, T* to, std::integral_constant<int64_t, LANES>) {
  store(value, to);
}
template <typename T>
INLINE void store_part(Vec value, T* to, int64_t width) {
  store(value, to, width);
}

// The factor that scales x [size] to unit mean square.
template <typename T>
INLINE float norm_factor(const T* x, int64_t size, float eps) {
  Vec even = broadcast(0), odd = broadcast(0);
  int64_t i = 0;
  for (; i + 2 * LANES <= size; i += 2 * LANES) {
    Vec first = load(x + i), second = load(x + i + LANES);
    even = fma(first, first, even);
    odd = fma(second, second, odd);
  }
  for (; i < size; i += LANES) {
    Vec value = load(x + i, size - i < LANES ? size - i : LANES);
    even = fma(value, value, even);
  }
  return 1.0f / std::sqrt(sum_lanes(even + odd) / float(size) + eps);
}

// Most families round before they multiply by the weight, some only after.
template <typename T>
INLINE Vec normed(Vec value, float factor, Vec weight, bool rounds_first) {
  Vec scaled = value * broadcast(factor);
  return (rounds_first ? rounded<T>(scaled) : scaled) * weight;
}

// x: [rows, size], rows `x_stride` apart; out: [rows, size], rows `out_stride` apart, may be x.
template <typename T>
void rms_norm(const T* x, int64_t x_stride, const Norm& norm, T* out, int64_t out_stride, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > SERIAL_ITEMS)
  for (int64_t row = 0; row < rows; row++) {
    const T* from = x + row * x_stride;
    T* to = out + row * out_stride;
    float factor = norm_factor(from, size, norm.eps);
    for_vectors(size, [&](int64_t i, auto width) {
      Vec weight = load_part(norm.weight + i, width);
      store_part(normed<T>(load_part(from + i, width), factor, weight, norm.rounds_first), to + i, width);
    });
  }
}

// x: [rows, size], contiguous; its norm is added to `to` [rows, size], rows `stride` apart.
template <typename T>
void add_normed(const T* x, const Norm& norm, T* to, int64_t stride, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > SERIAL_ITEMS)
  for (int64_t row = 0; row < rows; row++) {
    const T* from = x + row * size;
    T* target = to + row * stride;
    float factor = norm_factor(from, size, norm.eps);
    for_vectors(size, [&](int64_t i, auto width) {
      Vec weight = load_part(norm.weight + i, width);
      Vec value = rounded<T>(normed<T>(load_part(from + i, width), factor, weight, norm.rounds_first));
      store_part(load_part(target + i, width) + value, target + i, width);
    });
  }
}

// x: [rows, size], contiguous; it is added to `to` [rows, size], rows `stride` apart.
template <typename T>
void add_rows(const T* x, int64_t rows, int64_t size, T* to, int64_t stride) {
#pragma omp parallel for if (rows * size > SERIAL_ITEMS)
  for (int64_t row = 0; row < rows; row++) {
    const T* from = x + row * size;
    T* target = to + row * stride;
    for_vectors(size, [&](int64_t i, auto width) {
      store_part(load_part(target + i, width) + load_part(from + i, width), target + i, width);
    });
  }
}

// A layer of the KV, and the norms of its queries and keys, of head_dim; without weights if there are none.
struct RotatedLayer {
  Norm q_norm, k_norm;
  void* kv;  // the layer's part of the first block
  int64_t block_stride, kind_stride, head_stride, num_heads, num_kv_heads, head_dim, is_bf16, kv_elements, block_tokens;
};

// The tokens of a step: cosines and sines [rows, head_dim / 2], their blocks and their offsets in these.
struct RotatedTokens {
  const float *cos, *sin;
  const int32_t *blocks, *offsets;
  int64_t num_rows;
};

// Normalizes and rotates the pairs (i, i + half) of a head.
template <typename T>
INLINE void rotate_head(const T* from, const Norm& norm, const float* cos, const float* sin, int64_t half, T* to) {
  float factor = norm.weight ? norm_factor(from, 2 * half, norm.eps) : 0;
  for_vectors(half, [&](int64_t i, auto width) {
    Vec low = load_part(from + i, width), high = load_part(from + half + i, width);
    if (norm.weight) {
      low = rounded<T>(normed<T>(low, factor, load_part(norm.weight + i, width), norm.rounds_first));
      high = rounded<T>(normed<T>(high, factor, load_part(norm.weight + half + i, width), norm.rounds_first));
    }
    Vec c = load_part(cos + i, width), s = load_part(sin + i, width);
    store_part(rounded<T>(low * c) - rounded<T>(high * s), to + i, width);
    store_part(rounded<T>(high * c) + rounded<T>(low * s), to + half + i, width);
  });
}

// Rotates `count` heads, which lie `from_stride` and `to_stride` apart. The same as `rotate_head` for each, with
// what they share kept in registers: VECS vectors are half a head.
template <typename T, int VECS>
INLINE void rotate_heads(const T* from, int64_t from_stride, int64_t count, const Norm& norm, const float* cos,
                         const float* sin, T* to, int64_t to_stride) {
  constexpr int64_t half = VECS * LANES;
  Vec c[VECS], s[VECS], weights[2 * VECS];
  for (int v = 0; v < VECS; v++) c[v] = load(cos + v * LANES), s[v] = load(sin + v * LANES);
  for (int v = 0; v < 2 * VECS; v++) weights[v] = norm.weight ? load(norm.weight + v * LANES) : broadcast(1);
  for (int64_t head = 0; head < count; head++, from += from_stride, to += to_stride) {
    Vec values[2 * VECS];
    for (int v = 0; v < 2 * VECS; v++) values[v] = load(from + v * LANES);
    if (norm.weight) {
      float factor = norm_factor(from, 2 * half, norm.eps);
      for (int v = 0; v < 2 * VECS; v++)
        values[v] = rounded<T>(normed<T>(values[v], factor, weights[v], norm.rounds_first));
    }
    for (int v = 0; v < VECS; v++) {
      Vec low = values[v], high = values[VECS + v];
      store(rounded<T>(low * c[v]) - rounded<T>(high * s[v]), to + v * LANES);
      store(rounded<T>(high * c[v]) + rounded<T>(low * s[v]), to + half + v * LANES);
    }
  }
}

// qkv: [rows, num_heads + 2 * num_kv_heads, head_dim], rows `stride` apart. Normalizes and rotates the queries in
// place; writes the keys, normalized and rotated, and the values to their blocks as elements of type S. Where these
// have 8 bits, the keys in `qkv` are overwritten too.
template <typename T, typename S>
void rotate_and_write(const RotatedLayer& layer, const RotatedTokens& tokens, T* qkv, int64_t stride) {
  int64_t H = layer.num_heads, K = layer.num_kv_heads, D = layer.head_dim, half = D / 2;
#pragma omp parallel for if (tokens.num_rows * (H + 2 * K) * D > SERIAL_ITEMS)
  for (int64_t row = 0; row < tokens.num_rows; row++) {
    S* block = (S*)layer.kv + tokens.blocks[row] * layer.block_stride;
    int64_t offset = tokens.offsets[row];
    T* heads = qkv + row * stride;
    const float *cos = tokens.cos + row * half, *sin = tokens.sin + row * half;
    auto rotate = [&](const T* from, int64_t count, const Norm& norm, T* to, int64_t to_stride) {
      if (D == 128) return rotate_heads<T, 64 / LANES>(from, D, count, norm, cos, sin, to, to_stride);
      if (D == 64) return rotate_heads<T, 32 / LANES>(from, D, count, norm, cos, sin, to, to_stride);
      for (int64_t head = 0; head < count; head++)
        rotate_head(from + head * D, norm, cos, sin, half, to + head * to_stride);
    };
    rotate(heads, H, layer.q_norm, heads, D);
    if constexpr (IS_QUANTIZED<S>) {
      rotate(heads + H * D, K, layer.k_norm, heads + H * D, D);
      for (int64_t i = 0; i < 2 * K; i++) {
        S* to = block + i / K * layer.kind_stride + i % K * layer.head_stride;
        quantize(heads + (H + i) * D, D, to + offset * D, (float*)(to + layer.block_tokens * D) + offset);
      }
    } else {
      S *keys = block + offset * D, *values = keys + layer.kind_stride;
      rotate(heads + H * D, K, layer.k_norm, keys, layer.head_stride);
      for (int64_t head = 0; head < K; head++)
        memcpy(values + head * layer.head_stride, heads + (H + K + head) * D, D * sizeof(T));
    }
  }
}

// The same, with whatever elements the layer has.
template <typename T>
void write_tokens(const RotatedLayer& layer, const RotatedTokens& tokens, T* qkv, int64_t stride) {
  with_elements<T>(layer.kv_elements, [&](auto element) {
    rotate_and_write<T, decltype(element)>(layer, tokens, qkv, stride);
  });
}

extern "C" void tandem_rms_norm(const void* x, int64_t x_stride, const Norm* norm, void* out, int64_t out_stride,
                                int64_t rows, int64_t size, int64_t is_bf16) {
  if (is_bf16)
    rms_norm((const Bf16*)x, x_stride, *norm, (Bf16*)out, out_stride, rows, size);
  else
    rms_norm((const float*)x, x_stride, *norm, (float*)out, out_stride, rows, size);
}

extern "C" void tandem_rotate_and_write(const RotatedLayer* layer, const RotatedTokens* tokens, void* qkv,
                                        int64_t stride) {
  if (layer->is_bf16)
    write_tokens(*layer, *tokens, (Bf16*)qkv, stride);
  else
    write_tokens(*layer, *tokens, (float*)qkv, stride);
}
