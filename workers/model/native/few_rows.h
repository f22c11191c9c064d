// The scores and the mixed values of a few rows that see the same keys, straight from where these lie.
//
// Panels (panel.h) pay where many rows share what is packed. A token that is decoded has as many rows as a
// key-value head has query heads: packing would cost it several times its products. Here a key's products
// are summed within a register and across its lanes, in another order than panels sum them: steps whose
// results must not depend on how many rows a task has use panels.

#pragma once

#include "panel.h"

constexpr int64_t MOST_FEW_ROWS = 4;
constexpr int64_t KEY_GROUP = 16;  // keys that lie together

#if defined(__AVX512BF16__)

// The sums of four vectors' lanes in each 128 bits, in their order.
INLINE Vec sum_fours(const Vec* from) {
  __m512 first = _mm512_add_ps(_mm512_unpacklo_ps(from[0], from[1]), _mm512_unpackhi_ps(from[0], from[1]));
  __m512 second = _mm512_add_ps(_mm512_unpacklo_ps(from[2], from[3]), _mm512_unpackhi_ps(from[2], from[3]));
  __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(first), _mm512_castps_pd(second));
  __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(first), _mm512_castps_pd(second));
  return _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
}

// The sums over the 128-bit parts of each of four vectors, side by side.
INLINE Vec sum_parts(const Vec* from) {
  auto halves = [](Vec a, Vec b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  };
  return halves(halves(from[0], from[1]), halves(from[2], from[3]));
}

template <int M, int DIM>
struct FewRows {
  static constexpr int STEPS = DIM / 32;
  static constexpr int COLUMNS = M > 2 || DIM < 128 ? 64 : 128;  // whose sums are registers

  // The products of M queries with `count` of 16 keys that lie together; those after them are `zeros`.
  static INLINE void score(const Bf16* queries, const Bf16* keys, int64_t count, const Bf16* zeros, const Bf16* ahead,
                           float* scores, int64_t stride) {
    Vec fours[M][4];
#pragma GCC unroll 4
    for (int four = 0; four < 4; four++) {
      Vec sums[M][4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        int64_t key = four * 4 + j;
        const Bf16* from = key < count ? keys + key * DIM : zeros;
#pragma GCC unroll 8
        for (int i = 0; i < STEPS; i++) {
          prefetch((const char*)(ahead + key * DIM + i * 32));
          __m512bh pairs = (__m512bh)load_bits(from + i * 32);
#pragma GCC unroll 4
          for (int m = 0; m < M; m++) {
            Vec before = i ? sums[m][j] : broadcast(0);
            sums[m][j] = _mm512_dpbf16_ps(before, pairs, (__m512bh)load_bits(queries + m * DIM + i * 32));
          }
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) fours[m][four] = sum_fours(sums[m]);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) store(sum_parts(fours[m]), scores + m * stride);
  }

  // Adds `count` of 16 values that lie together, weighted by probabilities, to the sums of the columns from
  // `column` on; those after them are `zeros`.
  static INLINE void mix(Vec (&sums)[M][COLUMNS / LANES], const Bf16* probabilities, int64_t stride,
                         const Bf16* values, int64_t count, const Bf16* zeros, int column, const Bf16* ahead) {
    for (int64_t key = 0; key < count; key += 2) {
      const Bf16* even = values + key * DIM + column;
      const Bf16* odd = key + 1 < count ? even + DIM : zeros;
      Vec weights[M];
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        int32_t bits;
        memcpy(&bits, probabilities + m * stride + key, 4);
        weights[m] = (Vec)_mm512_set1_epi32(bits);
      }
#pragma GCC unroll 4
      for (int i = 0; i < COLUMNS / 32; i++) {
        if (ahead) {
          prefetch((const char*)(ahead + key * DIM + column + i * 32));
          prefetch((const char*)(ahead + (key + 1) * DIM + column + i * 32));
        }
        Vec low, high;
        interleave_inputs(load_bits(even + i * 32), load_bits(odd + i * 32), low, high);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
          sums[m][2 * i] = _mm512_dpbf16_ps(sums[m][2 * i], (__m512bh)low, (__m512bh)weights[m]);
          sums[m][2 * i + 1] = _mm512_dpbf16_ps(sums[m][2 * i + 1], (__m512bh)high, (__m512bh)weights[m]);
        }
      }
    }
  }
};

#endif
