// Elements of keys and values that are kept in 8 bits: int8, and e4m3 (fp8). Each token of a head has a float scale,
// the largest absolute value of its vector divided by the largest element.
//
// `workers/model/attention/quantized_kv.py` has the same arithmetic: both write the same bits. Elements are finite;
// the scale of a vector that is not is NaN.

#pragma once

#include "simd.h"

struct Int8 {
  int8_t bits;
  static constexpr float LARGEST = 127, UNIT = 1;
};

// e4m3 is read as half precision, whose exponents have a larger bias: times UNIT, these are the elements.
struct E4m3 {
  uint8_t bits;
  static constexpr float LARGEST = 448, UNIT = 256;
};

// The values of `kv_elements` of `AttentionStep` and `RotatedLayer`.
enum KvElements { AS_ACTIVATIONS, INT8, FP8 };

template <typename T>
constexpr bool IS_QUANTIZED = sizeof(T) == 1;

// Calls run with an element of the KV beside activations of type T.
template <typename T, typename Run>
inline void with_elements(int64_t kv_elements, const Run& run) {
  if (kv_elements == INT8) return run(Int8{});
  if (kv_elements == FP8) return run(E4m3{});
  run(T{});
}

// ------------------------------------------------------------------------------------------- vectors
// Elements are widened to what times UNIT they stand for; that is exact in bfloat16 too.

#if defined(__AVX512F__)
INLINE Vec load(const Int8* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
INLINE Vec load(const E4m3* from) {
  __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(short(0xBF80))));
}

INLINE IntVec magnitude_bits(Vec value) {
  return _mm512_and_si512((__m512i)value, _mm512_set1_epi32(0x7FFFFFFF));
}
INLINE IntVec int_max(IntVec a, IntVec b) { return _mm512_max_epi32(a, b); }
INLINE void store(Vec value, Int8* to) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(to_int(value))); }
INLINE void store_low_bytes(IntVec value, void* to) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(value)); }
INLINE IntVec shift_right(IntVec value, int count) { return _mm512_srli_epi32(value, count); }
#else
INLINE Vec load(const Int8* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}
INLINE Vec load(const E4m3* from) {
  __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)from));
  return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(short(0xBF80))));
}

INLINE IntVec magnitude_bits(Vec value) { return _mm256_and_si256((__m256i)value, _mm256_set1_epi32(0x7FFFFFFF)); }
INLINE IntVec int_max(IntVec a, IntVec b) { return _mm256_max_epi32(a, b); }
INLINE void store_low_bytes(IntVec value, void* to) {
  __m256i low = _mm256_and_si256(value, _mm256_set1_epi32(0xFF));
  __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(words, words));
}
INLINE void store(Vec value, Int8* to) { store_low_bytes(to_int(value), to); }
INLINE IntVec shift_right(IntVec value, int count) { return _mm256_srli_epi32(value, count); }
#endif

// The value, of at most 448, rounded to nearest even.
INLINE void store(Vec value, E4m3* to) {
  IntVec magnitude = magnitude_bits(value), sign = (IntVec)value ^ magnitude;
  // Below 2^-6 elements are multiples of 2^-9, the unit of the last place of 2^14.
  Vec grid = broadcast(0x1p14f);
  IntVec small = (IntVec)((Vec)magnitude + grid) ^ (IntVec)grid;
  IntVec bits = (IntVec)(magnitude);
#if defined(__AVX512F__)
  IntVec odd = _mm512_and_si512(shift_right(bits, 20), _mm512_set1_epi32(1));
  IntVec sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFFF)), odd);
  IntVec normal = _mm512_sub_epi32(shift_right(sum, 20), _mm512_set1_epi32(120 << 3));
  IntVec chosen = _mm512_mask_mov_epi32(normal, _mm512_cmplt_epi32_mask(bits, _mm512_set1_epi32(0x3C800000)), small);
#else
  IntVec odd = _mm256_and_si256(shift_right(bits, 20), _mm256_set1_epi32(1));
  IntVec sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFFF)), odd);
  IntVec normal = _mm256_sub_epi32(shift_right(sum, 20), _mm256_set1_epi32(120 << 3));
  IntVec chosen = _mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3C800000), bits));
#endif
  store_low_bytes(chosen | shift_right(sign, 24), to);
}

// The scale of the elements of a vector, and its inverse; the inverse is 0 where all elements are 0: those of very small
// numbers, whose scale is 0, and of numbers that are not all finite, whose scale is NaN.
struct ElementScale {
  float scale, inverse;
};

// The scale of a vector whose greatest magnitude is that of one of these lanes.
template <typename S>
INLINE ElementScale scale_of(IntVec most) {
  alignas(64) int32_t lanes[LANES];
  memcpy(lanes, &most, sizeof(lanes));
  int32_t bits = 0;
  for (int32_t lane : lanes) bits = lane > bits ? lane : bits;
  float largest;
  memcpy(&largest, &bits, 4);
  if (bits >= 0x7F800000) return {NAN, 0};
  if (largest < 0x1p-100f) return {0, 0};
  return {largest / S::LARGEST, S::LARGEST / largest};
}

// Quantizes a vector of `size` numbers, a multiple of LANES.
template <typename S, typename T>
INLINE void quantize(const T* from, int64_t size, S* to, float* scale) {
  IntVec most = {};
  for (int64_t i = 0; i < size; i += LANES) most = int_max(most, magnitude_bits(load(from + i)));
  ElementScale found = scale_of<S>(most);
  *scale = found.scale;
  if (!found.inverse) {
    memset(to, 0, size);
    return;
  }
  Vec inverse = broadcast(found.inverse);
  for (int64_t i = 0; i < size; i += LANES) store(load(from + i) * inverse, to + i);
}

// Widens `count` elements, a multiple of LANES.
template <typename S, typename T>
INLINE void widen_elements(const S* from, int64_t count, T* to) {
  for (int64_t i = 0; i < count; i += LANES) store(load(from + i), to + i);
}
