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
  INLINE void pair(const uint8_t* step, int p, int64_t v, Vec& first, Vec& second) const {
    __m512i items = _mm512_loadu_si512(step + v * 64);
    first = _mm512_permutexvar_ps(_mm512_srli_epi32(items, 4 * p), values);
    second = _mm512_permutexvar_ps(_mm512_srli_epi32(items, 16 + 4 * p), values);
  }
};

INLINE __m256i load_codes(const uint8_t* step, int p, int64_t v) {
  return _mm256_loadu_si256((const __m256i*)(step + p * 64 + v * 32));
}

template <>
struct FloatDecoder<INT8_CODES> {
  explicit FloatDecoder(const float*) {}
  INLINE void pair(const uint8_t* step, int p, int64_t v, Vec& first, Vec& second) const {
    __m512i wide = _mm512_cvtepi16_epi32(load_codes(step, p, v));
    first = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(wide, 24), 24));
    second = _mm512_cvtepi32_ps(_mm512_srai_epi32(wide, 8));
  }
};

template <>
struct FloatDecoder<E4M3_CODES> {
  explicit FloatDecoder(const float*) {}
  INLINE void pair(const uint8_t* step, int p, int64_t v, Vec& first, Vec& second) const {
    __m256i codes = load_codes(step, p, v), kept = _mm256_set1_epi16(short(0xBF80));
    __m256i moved = _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 1);
    first = _mm512_cvtph_ps(_mm256_and_si256(moved, kept));
    second = _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(codes, 1), kept));
  }
};

#else

// The values as bfloat16, which holds them exactly: a table of their high bytes and one of their low bytes.
template <>
struct FloatDecoder<NIBBLES> {
  __m256i high, low;

  explicit FloatDecoder(const float* table) {
    alignas(16) uint8_t bytes[2][16];
    for (int i = 0; i < 16; i++) {
      Bf16 value;
      store(table[i], &value);
      bytes[0][i] = uint8_t(value.bits >> 8), bytes[1][i] = uint8_t(value.bits);
    }
    high = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)bytes[0]));
    low = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)bytes[1]));
  }

  // The values of the nibbles at bits 0, 8, 16 and 24 of each item.
  INLINE void four(__m256i items, Vec (&found)[4]) const {
    const __m256i low_bytes = _mm256_set1_epi16(0xFF), first_half = _mm256_set1_epi32(int(0xFFFF0000));
    __m256i index = _mm256_and_si256(items, _mm256_set1_epi8(0xF));
    __m256i highs = _mm256_shuffle_epi8(high, index), lows = _mm256_shuffle_epi8(low, index);
    __m256i even = _mm256_or_si256(_mm256_slli_epi16(highs, 8), _mm256_and_si256(lows, low_bytes));
    __m256i odd = _mm256_or_si256(_mm256_andnot_si256(low_bytes, highs), _mm256_srli_epi16(lows, 8));
    found[0] = (Vec)_mm256_slli_epi32(even, 16), found[1] = (Vec)_mm256_slli_epi32(odd, 16);
    found[2] = (Vec)_mm256_and_si256(even, first_half), found[3] = (Vec)_mm256_and_si256(odd, first_half);
  }

  // All inputs of a step, of vector v of the outputs.
  INLINE void step(const uint8_t* from, int64_t v, Vec (&found)[STEP_INPUTS]) const {
    __m256i items = _mm256_loadu_si256((const __m256i*)(from + v * 32));
    Vec even[4], odd[4];  // pairs
    four(items, even), four(_mm256_srli_epi32(items, 4), odd);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      found[4 * i] = even[i], found[4 * i + 1] = even[i + 2];
      found[4 * i + 2] = odd[i], found[4 * i + 3] = odd[i + 2];
    }
  }

  INLINE void pair(const uint8_t* from, int p, int64_t v, Vec& first, Vec& second) const {
    Vec found[STEP_INPUTS];
    step(from, v, found);
    first = found[2 * p], second = found[2 * p + 1];
  }
};

INLINE __m128i load_codes(const uint8_t* step, int p, int64_t v) {
  return _mm_loadu_si128((const __m128i*)(step + p * 64 + v * 16));
}

template <>
struct FloatDecoder<INT8_CODES> {
  explicit FloatDecoder(const float*) {}
  INLINE void pair(const uint8_t* step, int p, int64_t v, Vec& first, Vec& second) const {
    __m256i wide = _mm256_cvtepi16_epi32(load_codes(step, p, v));
    first = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(wide, 24), 24));
    second = _mm256_cvtepi32_ps(_mm256_srai_epi32(wide, 8));
  }
};

template <>
struct FloatDecoder<E4M3_CODES> {
  explicit FloatDecoder(const float*) {}
  INLINE void pair(const uint8_t* step, int p, int64_t v, Vec& first, Vec& second) const {
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
  INLINE Vec pair(const uint8_t* step, int p, int64_t v) const {
    __m512i items = _mm512_loadu_si512(step + v * 64);
    return (Vec)_mm512_permutexvar_epi16(_mm512_srli_epi16(items, 4 * p), values);
  }
};

template <>
struct Bf16Decoder<INT8_CODES> {
  explicit Bf16Decoder(const float*) {}
  INLINE Vec pair(const uint8_t* step, int p, int64_t v) const {
    const __m128i* codes = (const __m128i*)(step + p * 64 + v * 32);
    Vec low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes)));
    Vec high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes + 1)));
    return (Vec)_mm512_cvtne2ps_pbh(high, low);
  }
};

#if defined(__AVX512VBMI__)

// The bytes of the numbers of e4m3 without their signs, as bfloat16 times 2^-8.
struct E4m3Bytes {
  uint8_t low[128] = {}, high[128] = {};
  uint8_t order[2][64] = {};  // of low and high bytes of a vector's pairs among those of a panel

  constexpr E4m3Bytes() {
    for (int code = 1; code < 128; code++) {
      int exponent = code >> 3, bits = exponent ? 8 | (code & 7) : code & 7;  // bits * 2^(exponent - 18)
      exponent = (exponent ? exponent : 1) + 127 - 18;
      for (; bits < 128; bits *= 2) exponent--;
      int value = ((exponent + 7) << 7) | (bits & 127);
      low[code] = uint8_t(value), high[code] = uint8_t(value >> 8);
    }
    for (int v = 0; v < 2; v++)
      for (int i = 0; i < 64; i++) order[v][i] = uint8_t(32 * v + i / 2 + i % 2 * 64);
  }
};
alignas(64) inline constexpr E4m3Bytes e4m3_bytes;

template <>
struct Bf16Decoder<E4M3_CODES> {
  explicit Bf16Decoder(const float*) {}
  INLINE Vec pair(const uint8_t* step, int p, int64_t v) const {
    __m512i codes = _mm512_loadu_si512(step + p * 64);
    __m512i low = value(e4m3_bytes.low, codes), high = value(e4m3_bytes.high, codes);
    high = _mm512_or_si512(high, _mm512_and_si512(codes, _mm512_set1_epi8(char(0x80))));
    return (Vec)_mm512_permutex2var_epi8(low, _mm512_loadu_si512(e4m3_bytes.order[v]), high);
  }

 private:
  static INLINE __m512i value(const uint8_t* bytes, __m512i codes) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(bytes), codes, _mm512_load_si512(bytes + 64));
  }
};

#else

template <>
struct Bf16Decoder<E4M3_CODES> {
  FloatDecoder<E4M3_CODES> floats;
  explicit Bf16Decoder(const float* table) : floats(table) {}
  INLINE Vec pair(const uint8_t* step, int p, int64_t v) const {
    Vec first, second;  // whose lower halves are 0
    floats.pair(step, p, v, first, second);
    return (Vec)_mm512_or_si512(_mm512_srli_epi32((__m512i)first, 16), (__m512i)second);
  }
};

#endif

#elif defined(TANDEM_BF16_PRODUCTS)  // only where AMX is emulated: for tests

template <CodeKind KIND>
struct Bf16Decoder {
  FloatDecoder<KIND> floats;
  explicit Bf16Decoder(const float* table) : floats(table) {}
  INLINE Vec pair(const uint8_t* step, int p, int64_t v) const {
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

// Decodes codes for operands of A, and adds the products of a step's weights with the inputs x of M rows, `stride`
// apart, to the sums of these: of V vectors of outputs, from `first` on where codes are decoded. Decoded steps that are
// stored have `width` outputs, and are laid out as panels are. The products of a row are added in the order of inputs.
template <CodeKind KIND, typename A>
struct Decoder;

template <CodeKind KIND>
struct Decoder<KIND, float> : FloatDecoder<KIND> {
  using FloatDecoder<KIND>::FloatDecoder;

  template <int M, int V>
  INLINE void add_step(const uint8_t* codes, int64_t first, const float* x, int64_t stride, Vec (&sums)[M][V]) const {
    if constexpr (KIND == NIBBLES && LANES == 8) {
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        Vec found[STEP_INPUTS];
        this->step(codes, first + v, found);
#pragma GCC unroll 8
        for (int i = 0; i < STEP_INPUTS; i++)
#pragma GCC unroll 4
          for (int m = 0; m < M; m++) sums[m][v] = fma(broadcast(x[m * stride + i]), found[i], sums[m][v]);
      }
    } else {
#pragma GCC unroll 4
      for (int p = 0; p < STEP_INPUTS / 2; p++) {
        Pair<V> pair = pair_of<V>(codes, p, first);
        add_input(pair.inputs[0], x + 2 * p, stride, sums);
        add_input(pair.inputs[1], x + 2 * p + 1, stride, sums);
      }
    }
  }

  template <int V>
  INLINE void store_step(const uint8_t* codes, int64_t first, float* to, int64_t width) const {
    if constexpr (KIND == NIBBLES && LANES == 8) {
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        Vec found[STEP_INPUTS];
        this->step(codes, first + v, found);
#pragma GCC unroll 8
        for (int i = 0; i < STEP_INPUTS; i++) store(found[i], to + i * width + v * LANES);
      }
    } else {
#pragma GCC unroll 4
      for (int p = 0; p < STEP_INPUTS / 2; p++) store_pair(pair_of<V>(codes, p, first), to + 2 * p * width, width);
    }
  }

  template <int M, int V>
  INLINE void add_and_store_step(const uint8_t* codes, int64_t first, float* to, int64_t width, const float* x,
                                 int64_t stride, Vec (&sums)[M][V]) const {
#pragma GCC unroll 4
    for (int p = 0; p < STEP_INPUTS / 2; p++) {
      Pair<V> pair = pair_of<V>(codes, p, first);
      store_pair(pair, to + 2 * p * width, width);
      add_input(pair.inputs[0], x + 2 * p, stride, sums);
      add_input(pair.inputs[1], x + 2 * p + 1, stride, sums);
    }
  }

  // With AVX2 the weights of an input are loaded after those before it are added: as the compiler sees it, another
  // pointer depends on that. It would else load some earlier, and keep sums in memory for want of registers.
  template <int M, int V>
  static INLINE void add_stored_step(const float* from, int64_t width, const float* x, int64_t stride,
                                     Vec (&sums)[M][V]) {
#pragma GCC unroll 8
    for (int i = 0; i < STEP_INPUTS; i++) {
      Vec weights[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) weights[v] = load(from + i * width + v * LANES);
      add_input(weights, x + i, stride, sums);
      if (LANES == 8) __asm__ volatile("" : "+r"(from), "+x"(sums[M - 1][V - 1]));
    }
  }

 private:
  template <int V>
  struct Pair {
    Vec inputs[2][V];
  };

  template <int V>
  INLINE Pair<V> pair_of(const uint8_t* codes, int p, int64_t first) const {
    Pair<V> found;
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) this->pair(codes, p, first + v, found.inputs[0][v], found.inputs[1][v]);
    return found;
  }

  template <int V>
  static INLINE void store_pair(const Pair<V>& pair, float* to, int64_t width) {
#pragma GCC unroll 2
    for (int input = 0; input < 2; input++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) store(pair.inputs[input][v], to + input * width + v * LANES);
  }

  template <int M, int V>
  static INLINE void add_input(const Vec (&weights)[V], const float* x, int64_t stride, Vec (&sums)[M][V]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      Vec input = broadcast(x[m * stride]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[m][v] = fma(input, weights[v], sums[m][v]);
    }
  }
};

#if defined(TANDEM_BF16_PRODUCTS)
template <CodeKind KIND>
struct Decoder<KIND, Bf16> : Bf16Decoder<KIND> {
  using Bf16Decoder<KIND>::Bf16Decoder;

  template <int M, int V>
  INLINE void add_step(const uint8_t* codes, int64_t first, const Bf16* x, int64_t stride, Vec (&sums)[M][V]) const {
#pragma GCC unroll 4
    for (int p = 0; p < STEP_INPUTS / 2; p++) {
      Vec pairs[V];
      decode(codes, p, first, pairs);
      add_pair(pairs, x + 2 * p, stride, sums);
    }
  }

  template <int V>
  INLINE void store_step(const uint8_t* codes, int64_t first, Bf16* to, int64_t width) const {
#pragma GCC unroll 4
    for (int p = 0; p < STEP_INPUTS / 2; p++) {
      Vec pairs[V];
      decode(codes, p, first, pairs);
      store_pair(pairs, to + 2 * p * width);
    }
  }

  template <int M, int V>
  INLINE void add_and_store_step(const uint8_t* codes, int64_t first, Bf16* to, int64_t width, const Bf16* x,
                                 int64_t stride, Vec (&sums)[M][V]) const {
#pragma GCC unroll 4
    for (int p = 0; p < STEP_INPUTS / 2; p++) {
      Vec pairs[V];
      decode(codes, p, first, pairs);
      store_pair(pairs, to + 2 * p * width);
      add_pair(pairs, x + 2 * p, stride, sums);
    }
  }

  template <int M, int V>
  static INLINE void add_stored_step(const Bf16* from, int64_t width, const Bf16* x, int64_t stride,
                                     Vec (&sums)[M][V]) {
#pragma GCC unroll 4
    for (int p = 0; p < STEP_INPUTS / 2; p++) {
      Vec pairs[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) pairs[v] = load_bits(from + 2 * p * width + v * 2 * LANES);
      add_pair(pairs, x + 2 * p, stride, sums);
    }
  }

 private:
  template <int V>
  INLINE void decode(const uint8_t* codes, int p, int64_t first, Vec (&pairs)[V]) const {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) pairs[v] = this->pair(codes, p, first + v);
  }

  template <int V>
  static INLINE void store_pair(const Vec (&pairs)[V], Bf16* to) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) store(pairs[v], reinterpret_cast<float*>(to) + v * LANES);
  }

  template <int M, int V>
  static INLINE void add_pair(const Vec (&pairs)[V], const Bf16* x, int64_t stride, Vec (&sums)[M][V]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[m][v] = add_products(sums[m][v], pairs[v], x + m * stride);
  }
};
#endif
