// Vectors of float for the instruction set that this library is compiled for, and bfloat16.
//
// `Vec` is a GCC vector of LANES floats: + - * / and comparisons work on it. Nothing here or in the files that
// include this one may be reordered by the compiler (no -fassociative-math, no contraction), so that an
// element's result depends neither on its place in a vector nor on what is computed beside it.

#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))

struct Bf16 {
  uint16_t bits;
};

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
using Vec = __m512;
using IntVec = __m512i;
#else
constexpr int64_t LANES = 8;
using Vec = __m256;
using IntVec = __m256i;
#endif

constexpr int64_t PANEL = 32;                    // outputs of a panel of weights
constexpr int64_t PANEL_VECS = PANEL / LANES;

// ------------------------------------------------------------------------------------------- scalars

inline float to_float(float value) { return value; }

inline float to_float(Bf16 value) {
  uint32_t bits = uint32_t(value.bits) << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

inline void store(float value, float* to) { *to = value; }

inline void store(float value, Bf16* to) {  // round to nearest even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  to->bits = uint16_t((bits & 0x7FFFFFFF) > 0x7F800000 ? (bits >> 16) | 0x40 : rounded);
}

template <typename T>
inline float rounded(float value) {
  T stored;
  store(value, &stored);
  return to_float(stored);
}

// ------------------------------------------------------------------------------------------- vectors

#if defined(__AVX512F__)

INLINE Vec broadcast(float value) { return _mm512_set1_ps(value); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vec vmax(Vec a, Vec b) { return _mm512_max_ps(a, b); }
INLINE Vec vmin(Vec a, Vec b) { return _mm512_min_ps(a, b); }
INLINE Vec vsqrt(Vec a) { return _mm512_sqrt_ps(a); }

INLINE __mmask16 first_lanes(int64_t count) { return __mmask16((1u << count) - 1); }

INLINE Vec load(const float* from) { return _mm512_loadu_ps(from); }
INLINE Vec load(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), from); }
INLINE void store(Vec value, float* to) { _mm512_storeu_ps(to, value); }
INLINE void store(Vec value, float* to, int64_t count) {
  _mm512_mask_storeu_ps(to, first_lanes(count), value);
}

INLINE Vec widen(__m256i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)); }
INLINE Vec load(const Bf16* from) { return widen(_mm256_loadu_si256((const __m256i*)from)); }
INLINE Vec load(const Bf16* from, int64_t count) {
  return widen(_mm256_maskz_loadu_epi16(first_lanes(count), from));
}

// Rounds to nearest even; NaN stays NaN. The instruction takes what is smaller than 2^-126 for 0.
#if defined(__AVX512BF16__)
INLINE __m256i narrow(Vec value) { return (__m256i)_mm512_cvtneps_pbh(value); }
#else
INLINE __m256i narrow(Vec value) {
  __m512i bits = _mm512_castps_si512(value);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  sum = _mm512_mask_or_epi32(sum, is_nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16));
}
#endif
INLINE void store(Vec value, Bf16* to) { _mm256_storeu_si256((__m256i*)to, narrow(value)); }
INLINE void store(Vec value, Bf16* to, int64_t count) {
  _mm256_mask_storeu_epi16(to, first_lanes(count), narrow(value));
}
INLINE Vec rounded_bf16(Vec value) { return widen(narrow(value)); }

INLINE float sum_lanes(Vec value) {  // of a fixed order
  __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(value), 1));
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(value), upper);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
INLINE float max_lanes(Vec value) { return _mm512_reduce_max_ps(value); }

INLINE IntVec to_int(Vec value) { return _mm512_cvtps_epi32(value); }  // to nearest
INLINE Vec round_nearest(Vec value) { return _mm512_roundscale_ps(value, 0); }
// value * 2^exponent, an integer, where both are normal numbers.
INLINE Vec scaled(Vec value, Vec exponent) { return _mm512_scalef_ps(value, exponent); }
INLINE Vec zero_below(float least, Vec x, Vec value) {  // the value where x is at least so much or NaN, else 0
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, broadcast(least), _CMP_NLT_UQ), value);
}
// a / b within 2 units of the last place, where b and its reciprocal are normal numbers.
INLINE Vec quotient(Vec a, Vec b) {
  Vec near = _mm512_rcp14_ps(b);
  return a * fma(near, _mm512_fnmadd_ps(b, near, broadcast(1)), near);
}

#else

INLINE Vec broadcast(float value) { return _mm256_set1_ps(value); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vec vmax(Vec a, Vec b) { return _mm256_max_ps(a, b); }
INLINE Vec vmin(Vec a, Vec b) { return _mm256_min_ps(a, b); }
INLINE Vec vsqrt(Vec a) { return _mm256_sqrt_ps(a); }

INLINE IntVec first_lanes(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE Vec load(const float* from) { return _mm256_loadu_ps(from); }
INLINE Vec load(const float* from, int64_t count) { return _mm256_maskload_ps(from, first_lanes(count)); }
INLINE void store(Vec value, float* to) { _mm256_storeu_ps(to, value); }
INLINE void store(Vec value, float* to, int64_t count) { _mm256_maskstore_ps(to, first_lanes(count), value); }

INLINE Vec widen(__m128i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)); }
INLINE Vec load(const Bf16* from) { return widen(_mm_loadu_si128((const __m128i*)from)); }
INLINE Vec load(const Bf16* from, int64_t count) {
  Bf16 part[LANES] = {};
  memcpy(part, from, count * sizeof(Bf16));
  return load(part);
}

// Rounds to nearest even; NaN stays NaN.
INLINE __m128i narrow(Vec value) {
  __m256i bits = _mm256_castps_si256(value);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  __m256 is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
  sum = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(sum), _mm256_castsi256_ps(quiet), is_nan));
  __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(sum, 16), _mm256_setzero_si256());
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
}
INLINE void store(Vec value, Bf16* to) { _mm_storeu_si128((__m128i*)to, narrow(value)); }
INLINE void store(Vec value, Bf16* to, int64_t count) {
  Bf16 part[LANES];
  store(value, part);
  memcpy(to, part, count * sizeof(Bf16));
}
INLINE Vec rounded_bf16(Vec value) { return widen(narrow(value)); }

INLINE float sum_lanes(Vec value) {  // of a fixed order
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
INLINE float max_lanes(Vec value) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

INLINE IntVec to_int(Vec value) { return _mm256_cvtps_epi32(value); }  // to nearest
INLINE Vec round_nearest(Vec value) {
  return _mm256_round_ps(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE Vec scaled(Vec value, Vec exponent) {
  return value * _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(to_int(exponent), _mm256_set1_epi32(127)), 23));
}
INLINE Vec zero_below(float least, Vec x, Vec value) {
  return _mm256_and_ps(value, _mm256_cmp_ps(x, broadcast(least), _CMP_NLT_UQ));
}
INLINE Vec quotient(Vec a, Vec b) { return a / b; }

#endif

// The value as it would be read back after a store as T.
template <typename T>
INLINE Vec rounded(Vec value);
template <>
INLINE Vec rounded<float>(Vec value) {
  return value;
}
template <>
INLINE Vec rounded<Bf16>(Vec value) {
  return rounded_bf16(value);
}

// 2^x within 2 units of the last place, where x and the result are normal numbers.
INLINE Vec exp2_normal(Vec x) {
  Vec n = round_nearest(x), r = x - n;
  Vec p = broadcast(1.535336188319500e-4f);
  p = fma(p, r, broadcast(1.339887440266574e-3f));
  p = fma(p, r, broadcast(9.618437357674640e-3f));
  p = fma(p, r, broadcast(5.550332471162809e-2f));
  p = fma(p, r, broadcast(2.402264791363012e-1f));
  p = fma(p, r, broadcast(6.931472028550421e-1f));
  p = fma(p, r, broadcast(1.0f));
  return scaled(p, n);
}

// 2^x for x <= 0 within 2 units of the last place, 0 below -126; NaN stays NaN.
INLINE Vec vexp2(Vec x) { return zero_below(-126.0f, x, exp2_normal(x)); }

// e^x within 2 units of the last place; 0 below -87.3, e^88 above 88. exp(0) is 1 exactly. NaN is not kept.
INLINE Vec vexp(Vec x) {
  Vec clamped = vmin(vmax(x, broadcast(-87.33f)), broadcast(88.0f));
  Vec n = round_nearest(clamped * broadcast(1.44269504088896341f));
  Vec r = fma(n, broadcast(-0.693359375f), clamped);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r) + broadcast(1.0f);
  Vec result = scaled(p, n);
  return (Vec)((IntVec)(x >= broadcast(-87.33f)) & (IntVec)result);
}

// tanh(x) within 4 units of the last place; NaN stays NaN. Near 0, where 1 - 2 / (e^2x + 1) would cancel, x times a
// polynomial of x * x.
INLINE Vec vtanh(Vec x) {
  Vec square = x * x, p = broadcast(-5.704986862838268e-3f);
  p = fma(p, square, broadcast(2.063908614218235e-2f));
  p = fma(p, square, broadcast(-5.373971536755562e-2f));
  p = fma(p, square, broadcast(1.3331441581249237e-1f));
  p = fma(p, square, broadcast(-3.333328068256378e-1f));
  Vec near = fma(p * square, x, x);
  Vec size = vmax(x, broadcast(0) - x);
  // Of this size on it is 1. The second operand is returned where one is NaN.
  Vec power = exp2_normal(vmin(broadcast(10.0f), size) * broadcast(2.88539008177792681f));
  Vec far = broadcast(1) - quotient(broadcast(2), power + broadcast(1));
  return size < broadcast(0.625f) ? near : x < broadcast(0) ? broadcast(0) - far : far;
}
