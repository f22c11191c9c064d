// Decoding of quantized weights in their packed form, as `workers/model/quantization/packed_codes.py` lays it out.
//
// Eight inputs of a panel's 32 outputs are a step. Codes of 8 bits lie as bfloat16 does in a panel, [4][32][2] with
// the inputs of a pair side by side. Codes of 4 bits are 32-bit items [32], one for each output: nibble p of the low
// half is the first input of pair p, nibble p of the high half is the second. A vector of items, shifted, is thus
// the indices of a table, of 16-bit items for bfloat16 and of 32-bit items for float.
//
// What is decoded is exact, in bfloat16 too: an integer of 8 bits, or a number of e4m3 times 2^-8, which is what its
// bits are as a half-precision number. The scales hold the factor 2^8.

#pragma once

#include "panel.h"

enum CodeKind : int64_t { NIBBLES = 0, INT8_CODES = 1, E4M3_CODES = 2, INTEGERS = 3 };  // of `integer_products.h`
enum ScaleKind : int64_t { NO_SCALES = 0, FLOAT_SCALES = 1, BF16_SCALES = 2, F16_SCALES = 3 };

constexpr int64_t STEP_INPUTS = 8;

template <CodeKind KIND>
constexpr int64_t STEP_BYTES = STEP_INPUTS * PANEL / (KIND == NIBBLES ? 2 : 1);

constexpr int64_t scale_bytes(int64_t kind) {
  return kind == NO_SCALES ? 0 : PANEL * (kind == FLOAT_SCALES ? sizeof(float) : sizeof(uint16_t));
}

#if defined(__AVX512F__)
INLINE Vec widen_half(const uint8_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
#else
INLINE Vec widen_half(const uint8_t* from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
#endif

// The scales, or offsets, of vector v of a panel's outputs.
INLINE Vec load_scales(const uint8_t* from, int64_t kind, int64_t v) {
  if (kind == FLOAT_SCALES) return load(reinterpret_cast<const float*>(from) + v * LANES);
  if (kind == BF16_SCALES) return load(reinterpret_cast<const Bf16*>(from) + v * LANES);
  return widen_half(from + v * LANES * sizeof(uint16_t));
}

// ---------------------------------------------------------------------------------------- to float
// `pair` gives the first and the second inputs of pair `p` of a step, of vector v of the outputs.

template <CodeKind KIND>
struct FloatDecoder;

#if defined(__AVX512F__)

template <>
struct FloatDecoder<NIBBLES> {
  Vec values;
  explicit FloatDecoder(const float* table) : values(load(table)) {}
  INLINE void pair(const uint8_t* step, int p, int v, Vec& first, Vec& second) const {
    __m512i items = _mm512_loadu_si512(step + v * 64);
    first = _mm512_permutexvar_ps(_mm512_srli_epi32(items, 4 * p), values);
    second = _mm512_permutexvar_ps(_mm512_srli_epi32(items, 16 + 4 * p), values);
  }
};

INLINE __m256i load_codes(const uint8_t* step, int p, int v) {
  return _mm256_loadu_si256((const __m256i*)(step + p * 64 + v * 32));
}

template <>
struct FloatDecoder<INT8_CODES> {
  explicit FloatDecoder(const float*) {}
  INLINE void pair(const uint8_t* step, int p, int v, Vec& first, Vec& second) const {
    __m512i wide = _mm512_cvtepi16_epi32(load_codes(step, p, v));
    first = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(wide, 24), 24));
    second = _mm512_cvtepi32_ps(_mm512_srai_epi32(wide, 8));
  }
};

template <>
struct FloatDecoder<E4M3_CODES> {
  explicit FloatDecoder(const float*) {}
  INLINE void pair(const uint8_t* step, int p, int v, Vec& first, Vec& second) const {
    __m256i codes = load_codes(step, p, v), kept = _mm256_set1_epi16(short(0xBF80));
    __m256i moved = _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 1);
    first = _mm512_cvtph_ps(_mm256_and_si256(moved, kept));
    second = _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(codes, 1), kept));
  }
};

#else

template <>
struct FloatDecoder<NIBBLES> {
  Vec low, high;
  explicit FloatDecoder(const float* table) : low(load(table)), high(load(table + LANES)) {}

  INLINE Vec value(__m256i items, int shift) const {
    __m256i index = _mm256_srli_epi32(items, shift);
    Vec is_high = _mm256_castsi256_ps(_mm256_slli_epi32(items, 28 - shift));  // its highest bit is the sign
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index), is_high);
  }

  INLINE void pair(const uint8_t* step, int p, int v, Vec& first, Vec& second) const {
    __m256i items = _mm256_loadu_si256((const __m256i*)(step + v * 32));
    first = value(items, 4 * p), second = value(items, 16 + 4 * p);
  }
};

INLINE __m128i load_codes(const uint8_t* step, int p, int v) {
  return _mm_loadu_si128((const __m128i*)(step + p * 64 + v * 16));
}

template <>
struct FloatDecoder<INT8_CODES> {
  explicit FloatDecoder(const float*) {}
  INLINE void pair(const uint8_t* step, int p, int v, Vec& first, Vec& second) const {
    __m256i wide = _mm256_cvtepi16_epi32(load_codes(step, p, v));
    first = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(wide, 24), 24));
    second = _mm256_cvtepi32_ps(_mm256_srai_epi32(wide, 8));
  }
};

template <>
struct FloatDecoder<E4M3_CODES> {
  explicit FloatDecoder(const float*) {}
  INLINE void pair(const uint8_t* step, int p, int v, Vec& first, Vec& second) const {
    __m128i codes = load_codes(step, p, v), kept = _mm_set1_epi16(short(0xBF80));
    __m128i moved = _mm_srai_epi16(_mm_slli_epi16(codes, 8), 1);
    first = _mm256_cvtph_ps(_mm_and_si128(moved, kept));
    second = _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(codes, 1), kept));
  }
};

#endif

// ------------------------------------------------------------------------------------- to bfloat16
// `pair` gives pair `p` of a step, of vector v of the outputs, as the CPU multiplies it.

#if defined(__AVX512BF16__)

template <CodeKind KIND>
struct Bf16Decoder;

template <>
struct Bf16Decoder<NIBBLES> {
  __m512i values;  // the table twice: indices have 5 bits, of which the highest is another code's
  explicit Bf16Decoder(const float* table) {
    __m256i narrowed = narrow(load(table));
    values = _mm512_inserti64x4(_mm512_castsi256_si512(narrowed), narrowed, 1);
  }
  INLINE Vec pair(const uint8_t* step, int p, int v) const {
    __m512i items = _mm512_loadu_si512(step + v * 64);
    return (Vec)_mm512_permutexvar_epi16(_mm512_srli_epi16(items, 4 * p), values);
  }
};

template <>
struct Bf16Decoder<INT8_CODES> {
  explicit Bf16Decoder(const float*) {}
  INLINE Vec pair(const uint8_t* step, int p, int v) const {
    const __m128i* codes = (const __m128i*)(step + p * 64 + v * 32);
    Vec low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes)));
    Vec high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes + 1)));
    return (Vec)_mm512_cvtne2ps_pbh(high, low);
  }
};

template <>
struct Bf16Decoder<E4M3_CODES> {
  FloatDecoder<E4M3_CODES> floats;
  explicit Bf16Decoder(const float* table) : floats(table) {}
  INLINE Vec pair(const uint8_t* step, int p, int v) const {
    Vec first, second;  // whose lower halves are 0
    floats.pair(step, p, v, first, second);
    return (Vec)_mm512_or_si512(_mm512_srli_epi32((__m512i)first, 16), (__m512i)second);
  }
};

#elif defined(TANDEM_BF16_PRODUCTS)  // only where AMX is emulated: for tests

template <CodeKind KIND>
struct Bf16Decoder {
  FloatDecoder<KIND> floats;
  explicit Bf16Decoder(const float* table) : floats(table) {}
  INLINE Vec pair(const uint8_t* step, int p, int v) const {
    Vec first, second;
    floats.pair(step, p, v, first, second);
    return (Vec)((IntVec)odd_inputs(second) | shifted(first));
  }

 private:
#if defined(__AVX512F__)
  static INLINE IntVec shifted(Vec value) { return _mm512_srli_epi32((IntVec)value, 16); }
#else
  static INLINE IntVec shifted(Vec value) { return _mm256_srli_epi32((IntVec)value, 16); }
#endif
};

#endif

// ----------------------------------------------------------------------------- weights as operands

// Decodes codes for operands of A: `Weights` are those of a pair of inputs of all outputs, and `add` adds their
// products with the inputs x of a row to its sums.
template <CodeKind KIND, typename A>
struct Decoder;

template <CodeKind KIND>
struct Decoder<KIND, float> : FloatDecoder<KIND> {
  using FloatDecoder<KIND>::FloatDecoder;
  struct Weights {
    Vec first[PANEL_VECS], second[PANEL_VECS];
  };

  INLINE Weights weights(const uint8_t* step, int p) const {
    Weights found;
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECS; v++) this->pair(step, p, v, found.first[v], found.second[v]);
    return found;
  }

  static INLINE void add(const Weights& weights, const float* x, Vec (&sums)[PANEL_VECS]) {
    Vec first = broadcast(x[0]), second = broadcast(x[1]);
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECS; v++) sums[v] = fma(first, weights.first[v], sums[v]);
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECS; v++) sums[v] = fma(second, weights.second[v], sums[v]);
  }

  static INLINE void store_pair(const Weights& weights, float* to) {
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECS; v++) {
      store(weights.first[v], to + v * LANES);
      store(weights.second[v], to + PANEL + v * LANES);
    }
  }
};

#if defined(TANDEM_BF16_PRODUCTS)
template <CodeKind KIND>
struct Decoder<KIND, Bf16> : Bf16Decoder<KIND> {
  using Bf16Decoder<KIND>::Bf16Decoder;
  struct Weights {
    Vec pairs[PANEL_VECS];
  };

  INLINE Weights weights(const uint8_t* step, int p) const {
    Weights found;
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECS; v++) found.pairs[v] = this->pair(step, p, v);
    return found;
  }

  static INLINE void add(const Weights& weights, const Bf16* x, Vec (&sums)[PANEL_VECS]) {
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECS; v++) sums[v] = add_products(sums[v], weights.pairs[v], x);
  }

  static INLINE void store_pair(const Weights& weights, Bf16* to) {
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECS; v++) store(weights.pairs[v], reinterpret_cast<float*>(to) + v * LANES);
  }
};
#endif
