// The scores and the mixed values of a few rows that see the same keys, straight from where these lie.
//
// Panels (panel.h) pay where many rows share what is packed. A token that is decoded has as many rows as a
// key-value head has query heads: packing would cost it several times its products. Here a key's products
// are summed within a register and across its lanes, in another order than panels sum them: steps whose
// results must not depend on how many rows a task has use panels.

#pragma once

#include "kv_elements.h"
#include "panel.h"

constexpr int64_t MOST_FEW_ROWS = 4;
constexpr int64_t KEY_GROUP = 16;  // keys that lie together

#if defined(__AVX512F__)
// The sums of four vectors' lanes in each 128 bits, in their order.
INLINE Vec sum_fours(const Vec* from) {
  __m512 first = _mm512_add_ps(_mm512_unpacklo_ps(from[0], from[1]), _mm512_unpackhi_ps(from[0], from[1]));
  __m512 second = _mm512_add_ps(_mm512_unpacklo_ps(from[2], from[3]), _mm512_unpackhi_ps(from[2], from[3]));
  __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(first), _mm512_castps_pd(second));
  __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(first), _mm512_castps_pd(second));
  return _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
}

// The sums of the lanes of each of four vectors.
INLINE __m128 sum_lanes_of_four(const Vec* from) {
  Vec sums = sum_fours(from);
  __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(sums), 1));
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(sums), upper);
  return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}
#else
INLINE __m128 sum_lanes_of_four(const Vec* from) {
  __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(from[0], from[1]), _mm256_hadd_ps(from[2], from[3]));
  return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
}
#endif

// M rows of float with keys and values of T, which are widened in registers. The numbers of two vectors come in the
// order in which this is least work: of bfloat16, those at even places before those at odd ones.
template <typename T, int M, int DIM>
struct WideRows {
  static constexpr int TWO = 2 * LANES;
  static constexpr int LINE = 64 / sizeof(T);  // elements that are prefetched together
  // Whose products with M queries, and columns whose sums, are registers.
  static constexpr int KEYS = M == 1 ? 8 : LANES == 16 || M == 2 ? 4 : 2;
  static constexpr int MOST_COLUMNS = (LANES == 16 ? 16 : 8) * LANES / (M == 3 ? 4 : M);
  static constexpr int COLUMNS = MOST_COLUMNS < DIM ? MOST_COLUMNS : DIM;

  static INLINE void load_two(const T* from, Vec& first, Vec& second) {
    if constexpr (sizeof(T) == 2) {
      Vec bits = load_bits(from);
      first = even_inputs(bits), second = odd_inputs(bits);
    } else {
      first = load(from), second = load(from + LANES);
    }
  }

  // The place of an element among those of its two vectors.
  static constexpr int place(int i) { return sizeof(T) == 2 ? i / TWO * TWO + i % 2 * LANES + i % TWO / 2 : i; }

  // The queries in that order.
  struct Queries {
    alignas(64) float numbers[M * DIM];
    template <typename Q>
    explicit Queries(const Q* queries) {
      for (int m = 0; m < M; m++)
        for (int i = 0; i < DIM; i++) numbers[m * DIM + place(i)] = to_float(queries[m * DIM + i]);
    }
  };

  // The products of M queries with `count` of 16 keys that lie together; those after them are `zeros`.
  static INLINE void score(const Queries& queries, const T* keys, int64_t count, const T* zeros, const T* ahead,
                           float* scores, int64_t stride) {
#pragma GCC unroll 1
    for (int begin = 0; begin < KEY_GROUP; begin += KEYS) {
      Vec sums[M][KEYS < 4 ? 4 : KEYS];
      const T* from[KEYS];
#pragma GCC unroll 8
      for (int j = 0; j < KEYS; j++) from[j] = begin + j < count ? keys + (begin + j) * DIM : zeros;
      for (auto& row : sums)
        for (Vec& sum : row) sum = broadcast(0);
#pragma GCC unroll 8
      for (int i = 0; i < DIM; i += TWO) {
        if (i % LINE == 0)
#pragma GCC unroll 8
          for (int j = 0; j < KEYS; j++)
            for (int line = i; line < i + TWO; line += LINE) prefetch((const char*)(ahead + (begin + j) * DIM + line));
#pragma GCC unroll 8
        for (int j = 0; j < KEYS; j++) {
          Vec first, second;
          load_two(from[j] + i, first, second);
#pragma GCC unroll 4
          for (int m = 0; m < M; m++) {
            const float* query = queries.numbers + m * DIM + i;
            sums[m][j] = fma(second, load(query + LANES), fma(first, load(query), sums[m][j]));
          }
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int j = 0; j < KEYS; j += 4) {
          __m128 four = sum_lanes_of_four(sums[m] + j);
          float* to = scores + m * stride + begin + j;
          if (KEYS < 4)
            _mm_storel_pi((__m64*)to, four);
          else
            _mm_storeu_ps(to, four);
        }
    }
  }

  // The values of the keys from `from` to `end`, weighted by probabilities. `values_of(key)` are those of 16 keys that
  // lie together, `ahead_of(key)` what is read after them.
  template <typename ValuesOf, typename AheadOf>
  static INLINE void mix(const float* probabilities, int64_t stride, int64_t from, int64_t end, const T*,
                         const ValuesOf& values_of, const AheadOf& ahead_of, float* mixed, int64_t mixed_stride) {
    alignas(64) float totals[M * DIM] = {};
    for (int64_t key = from; key < end; key += KEY_GROUP) {
      const T *values = values_of(key), *ahead = ahead_of(key);
      int64_t count = end - key < KEY_GROUP ? end - key : KEY_GROUP;
      for (int column = 0; column < DIM; column += COLUMNS)
        add_values(probabilities + key - from, stride, values + column, count, ahead ? ahead + column : nullptr,
                   totals + column);
    }
    for (int m = 0; m < M; m++)
      for (int i = 0; i < DIM; i++) mixed[m * mixed_stride + i] = totals[m * DIM + place(i)];
  }

 private:
  static INLINE void add_values(const float* probabilities, int64_t stride, const T* values, int64_t count,
                                const T* ahead, float* totals) {
    Vec sums[M][COLUMNS / LANES];
    begin_sums(sums, totals, DIM, true);
    for (int64_t key = 0; key < count; key++) {
      Vec weights[M];
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) weights[m] = broadcast(probabilities[m * stride + key]);
      if (ahead)
        for (int i = 0; i < COLUMNS; i += LINE) prefetch((const char*)(ahead + key * DIM + i));
#pragma GCC unroll 8
      for (int i = 0; i < COLUMNS / TWO; i++) {
        Vec first, second;
        load_two(values + key * DIM + i * TWO, first, second);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
          sums[m][2 * i] = fma(weights[m], first, sums[m][2 * i]);
          sums[m][2 * i + 1] = fma(weights[m], second, sums[m][2 * i + 1]);
        }
      }
    }
    end_sums(sums, totals, DIM);
  }
};

#if defined(__AVX512BF16__)

// The sums over the 128-bit parts of each of four vectors, side by side.
INLINE Vec sum_parts(const Vec* from) {
  auto halves = [](Vec a, Vec b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  };
  return halves(halves(from[0], from[1]), halves(from[2], from[3]));
}

// 32 numbers of a key or value as the CPU multiplies them.
INLINE Vec load_narrow(const Bf16* from) { return load_bits(from); }

// The exponents of bfloat16 have so large a bias that e4m3 becomes 2^-120 of its elements; those without a leading
// bit, at most 2^-15 of the largest, count as 0. The other operands are multiplied by half of that, and so are sums.
constexpr float HALF_BIAS = 0x1p60f;

INLINE Vec load_narrow(const E4m3* from) {
  __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
  return (Vec)_mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(short(0x87F0)));
}

// M rows of bfloat16 with keys and values of S, bfloat16 or e4m3, which the CPU multiplies.
template <typename S, int M, int DIM>
struct NarrowRows {
  static constexpr int STEPS = DIM / 32;
  static constexpr int LINE = 64 / sizeof(S);  // elements that are prefetched together
  static constexpr int COLUMNS = M > 2 || DIM < 128 ? 64 : 128;  // whose sums are registers

  struct Queries {
    alignas(64) Bf16 scaled[IS_QUANTIZED<S> ? M * DIM : 1];
    const Bf16* numbers;
    explicit Queries(const Bf16* queries) : numbers(queries) {
      if constexpr (IS_QUANTIZED<S>) {
        for (int i = 0; i < M * DIM; i++) store(to_float(queries[i]) * HALF_BIAS, scaled + i);
        numbers = scaled;
      }
    }
  };

  // As those of `WideRows`.
  static INLINE void score(const Queries& queries, const S* keys, int64_t count, const S* zeros, const S* ahead,
                           float* scores, int64_t stride) {
    Vec fours[M][4];
#pragma GCC unroll 4
    for (int four = 0; four < 4; four++) {
      Vec sums[M][4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        int64_t key = four * 4 + j;
        const S* from = key < count ? keys + key * DIM : zeros;
#pragma GCC unroll 8
        for (int i = 0; i < STEPS; i++) {
          if (i * 32 % LINE == 0) prefetch((const char*)(ahead + key * DIM + i * 32));
          __m512bh pairs = (__m512bh)load_narrow(from + i * 32);
#pragma GCC unroll 4
          for (int m = 0; m < M; m++) {
            Vec before = i ? sums[m][j] : broadcast(0);
            sums[m][j] = _mm512_dpbf16_ps(before, pairs, (__m512bh)load_bits(queries.numbers + m * DIM + i * 32));
          }
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) fours[m][four] = sum_fours(sums[m]);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) store(sum_parts(fours[m]), scores + m * stride);
  }

  template <typename ValuesOf, typename AheadOf>
  static INLINE void mix(const Bf16* probabilities, int64_t stride, int64_t from, int64_t end, const S* zeros,
                         const ValuesOf& values_of, const AheadOf& ahead_of, float* mixed, int64_t mixed_stride) {
    for (int column = 0; column < DIM; column += COLUMNS) {
      Vec sums[M][COLUMNS / LANES];
      begin_sums(sums, mixed, mixed_stride, false);
      for (int64_t key = from; key < end; key += KEY_GROUP)
        add_values(sums, probabilities + key - from, stride, values_of(key),
                   end - key < KEY_GROUP ? end - key : KEY_GROUP, zeros, column, ahead_of(key));
      if constexpr (IS_QUANTIZED<S>)
        for (auto& row : sums)
          for (Vec& sum : row) sum = sum * broadcast(HALF_BIAS);
      end_sums(sums, mixed + column, mixed_stride);
    }
  }

 private:
  // Adds `count` of 16 values that lie together, weighted by probabilities, to the sums of the columns from
  // `column` on; those after them are `zeros`.
  static INLINE void add_values(Vec (&sums)[M][COLUMNS / LANES], const Bf16* probabilities, int64_t stride,
                                const S* values, int64_t count, const S* zeros, int column, const S* ahead) {
    for (int64_t key = 0; key < count; key += 2) {
      const S* even = values + key * DIM + column;
      const S* odd = key + 1 < count ? even + DIM : zeros;
      Vec weights[M];
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        int32_t bits;
        memcpy(&bits, probabilities + m * stride + key, 4);
        weights[m] = (Vec)_mm512_set1_epi32(bits);
      }
#pragma GCC unroll 4
      for (int i = 0; i < COLUMNS / 32; i++) {
        if (ahead && i * 32 % LINE == 0) {
          prefetch((const char*)(ahead + key * DIM + column + i * 32));
          prefetch((const char*)(ahead + (key + 1) * DIM + column + i * 32));
        }
        Vec low, high;
        interleave_inputs(load_narrow(even + i * 32), load_narrow(odd + i * 32), low, high);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
          sums[m][2 * i] = _mm512_dpbf16_ps(sums[m][2 * i], (__m512bh)low, (__m512bh)weights[m]);
          sums[m][2 * i + 1] = _mm512_dpbf16_ps(sums[m][2 * i + 1], (__m512bh)high, (__m512bh)weights[m]);
        }
      }
    }
  }
};

template <typename T, typename A, int M, int DIM>
using FewRows = std::conditional_t<sizeof(A) == 2, NarrowRows<T, M, DIM>, WideRows<T, M, DIM>>;
constexpr bool HAS_NARROW_ROWS = true;
template <typename S>
constexpr bool IS_NARROW = !std::is_same_v<S, Int8>;  // whether elements are multiplied as bfloat16
#else
template <typename T, typename A, int M, int DIM>
using FewRows = WideRows<T, M, DIM>;
constexpr bool HAS_NARROW_ROWS = false;
constexpr float HALF_BIAS = 1;
template <typename S>
constexpr bool IS_NARROW = !IS_QUANTIZED<S>;
#endif
