// Linear products in 8 bits: weights are int8, rows are rounded to int8, and sums of integers are exact.
//
// A row becomes int8 by a scale of its own, its greatest magnitude divided by 127, as a vector of quantized KV does
// (`kv_elements.h`). Products are summed in 32 bits over all inputs, and then: float(sum) * the output's scale, with
// offsets + offset * float(the sum of the row), * the row's scale, each rounded. As sums are exact, every instruction
// set and every number of rows gives the same bits, and so does `workers/model/quantization/integer_product.py`.
//
// Panels are those of `quantized_products.h`, of one group, whose codes lie four inputs of an output side by side,
// [num_inputs / 4][32][4]. A code is stored with 128 added, without a sign: instructions that multiply bytes take one
// factor with a sign and one without. What 128 adds to a product is 128 times the sum of the row.

#pragma once

#include "kv_elements.h"
#include "layer_ops.h"
#include "quantized_products.h"

#if defined(__AVX512VNNI__) && !defined(TANDEM_WITHOUT_VNNI)
#define TANDEM_VNNI
#if defined(__AMX_INT8__) || defined(TANDEM_EMULATE_AMX)
#define TANDEM_INTEGER_TILES
#endif
#endif

constexpr int32_t CODE_BIAS = 128;
constexpr int64_t QUAD = 4;  // inputs that lie side by side
constexpr int64_t QUAD_BYTES = QUAD * PANEL;

// ------------------------------------------------------------------------------------- products of quads
// Vectors of sums of a row and a panel: of each output one sum or, where bytes are widened to 16 bits, two.

#if defined(TANDEM_VNNI)
using RoundedInput = int8_t;
constexpr int SUM_VECS = 2, MOST_INTEGER_ROWS = 12;

INLINE IntVec load_quads(const uint8_t* codes) { return _mm512_loadu_si512(codes); }
INLINE IntVec broadcast_quad(const RoundedInput* inputs) {
  int32_t bits;
  memcpy(&bits, inputs, sizeof(bits));
  return _mm512_set1_epi32(bits);
}
INLINE IntVec add_quads(IntVec sums, IntVec codes, IntVec inputs) {
  return _mm512_dpbusd_epi32(sums, codes, inputs);
}
INLINE IntVec output_sums(IntVec sums, IntVec) { return sums; }
INLINE void store_rounded(IntVec value, RoundedInput* to) { store_low_bytes(value, to); }

#elif defined(__AVX512F__)
using RoundedInput = int16_t;
constexpr int SUM_VECS = 4, MOST_INTEGER_ROWS = 6;

INLINE IntVec load_quads(const uint8_t* codes) {
  return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)codes));
}
INLINE IntVec broadcast_quad(const RoundedInput* inputs) {
  int64_t bits;
  memcpy(&bits, inputs, sizeof(bits));
  return _mm512_set1_epi64(bits);
}
INLINE IntVec add_quads(IntVec sums, IntVec codes, IntVec inputs) {
  return _mm512_add_epi32(sums, _mm512_madd_epi16(codes, inputs));
}
INLINE IntVec output_sums(IntVec low, IntVec high) {
  __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_permutex2var_epi32(low, even, high), _mm512_permutex2var_epi32(low, odd, high));
}
INLINE void store_rounded(IntVec value, RoundedInput* to) {
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(value));
}

#else
using RoundedInput = int16_t;
constexpr int SUM_VECS = 8, MOST_INTEGER_ROWS = 3;

INLINE IntVec load_quads(const uint8_t* codes) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)codes));
}
INLINE IntVec broadcast_quad(const RoundedInput* inputs) {
  int64_t bits;
  memcpy(&bits, inputs, sizeof(bits));
  return _mm256_set1_epi64x(bits);
}
INLINE IntVec add_quads(IntVec sums, IntVec codes, IntVec inputs) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(codes, inputs));
}
INLINE IntVec output_sums(IntVec low, IntVec high) {
  return _mm256_permute4x64_epi64(_mm256_hadd_epi32(low, high), 0b11011000);
}
INLINE void store_rounded(IntVec value, RoundedInput* to) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(value, value), 0b1000);
  _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(words));
}
#endif

#if defined(__AVX512F__)
INLINE IntVec broadcast_int(int32_t value) { return _mm512_set1_epi32(value); }
INLINE IntVec add_ints(IntVec a, IntVec b) { return _mm512_add_epi32(a, b); }
INLINE Vec int_to_float(IntVec value) { return _mm512_cvtepi32_ps(value); }
INLINE IntVec load_ints(const int32_t* from) { return _mm512_loadu_si512(from); }
INLINE void store_ints(IntVec value, int32_t* to) { _mm512_storeu_si512(to, value); }
#else
INLINE IntVec broadcast_int(int32_t value) { return _mm256_set1_epi32(value); }
INLINE IntVec add_ints(IntVec a, IntVec b) { return _mm256_add_epi32(a, b); }
INLINE Vec int_to_float(IntVec value) { return _mm256_cvtepi32_ps(value); }
INLINE IntVec load_ints(const int32_t* from) { return _mm256_loadu_si256((const __m256i*)from); }
INLINE void store_ints(IntVec value, int32_t* to) { _mm256_storeu_si256((__m256i*)to, value); }
#endif

constexpr int SUMS_EACH = SUM_VECS / PANEL_VECS;  // vectors of sums of a vector of outputs

// -------------------------------------------------------------------------------------------- the kernel

// Rows of rounded inputs, the scale of each, and the sum of its inputs.
struct RoundedRows {
  const RoundedInput* inputs;
  int64_t stride;
  const float* scales;
  const int32_t* sums;

  RoundedRows from(int64_t row) const { return {inputs + row * stride, stride, scales + row, sums + row}; }
};

// c[num_rows, 32] of the exact sums of rows, SUM_VECS vectors of each.
inline void scale_sums(const int32_t* exact, int64_t num_rows, const PanelShape& shape, const uint8_t* scales,
                       const RoundedRows& rows, float* c) {
  const uint8_t* offsets = scales + scale_bytes(shape.scale_kind);
  for (int64_t v = 0; v < PANEL_VECS; v++) {
    Vec scale = load_scales(scales, shape.scale_kind, v), offset = broadcast(0);
    if (shape.offset_kind) offset = load_scales(offsets, shape.offset_kind, v);
    for (int64_t m = 0; m < num_rows; m++) {
      const int32_t* from = exact + (m * SUM_VECS + v * SUMS_EACH) * LANES;
      IntVec biased = output_sums(load_ints(from), load_ints(from + (SUMS_EACH - 1) * LANES));
      Vec result = int_to_float(add_ints(biased, broadcast_int(-CODE_BIAS * rows.sums[m]))) * scale;
      if (shape.offset_kind) result = result + offset * broadcast(float(rows.sums[m]));
      store(result * broadcast(rows.scales[m]), c + m * PANEL + v * LANES);
    }
  }
}

// Sums the products of M rows exactly, V vectors from `first` on; `ahead.step` bytes are fetched for each step of
// inputs.
template <int M, int V>
INLINE void multiply_quads(const PanelShape& shape, const uint8_t* panel, int first, const RoundedRows& rows,
                           Ahead ahead, int32_t* exact) {
  IntVec sums[M][V];
  for (int m = 0; m < M; m++)
    for (int v = 0; v < V; v++) sums[m][v] = IntVec{};
  const uint8_t* codes = panel + first * (QUAD_BYTES / SUM_VECS);
  const RoundedInput* inputs = rows.inputs;
  for (int64_t i = 0; i < shape.group; i += STEP_INPUTS, inputs += STEP_INPUTS, ahead.at += ahead.step) {
    for (int64_t line = 0; line < ahead.step; line += 64) prefetch_weights<M>(ahead.at + line);
#pragma GCC unroll 2
    for (int quad = 0; quad < STEP_INPUTS; quad += QUAD, codes += QUAD_BYTES) {
      IntVec loaded[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) loaded[v] = load_quads(codes + v * (QUAD_BYTES / SUM_VECS));
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        IntVec quads = broadcast_quad(inputs + m * rows.stride + quad);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sums[m][v] = add_quads(sums[m][v], loaded[v], quads);
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < V; v++) store_ints(sums[m][v], exact + (m * SUM_VECS + first + v) * LANES);
}

// The exact sums of M rows and a panel, in as many parts as they need registers.
template <int M>
__attribute__((noinline)) void multiply_integers(const PanelShape& shape, const uint8_t* panel,
                                                 const RoundedRows& rows, Ahead ahead, int32_t* exact) {
  constexpr int V = LANES == 16 || M == 1 ? SUM_VECS : SUM_VECS / 2;
  for (int first = 0; first < SUM_VECS; first += V, ahead = {})
    multiply_quads<M, V>(shape, panel, first, rows, ahead, exact);
}

#if defined(TANDEM_INTEGER_TILES)
constexpr int64_t INTEGER_BLOCK_ROWS = TILE_BLOCK_ROWS;
constexpr int64_t TILE_BYTES = 64;  // inputs of a row of a tile

// The same of `num_rows` <= 32 rows by tiles; the number of inputs is a multiple of 64.
inline void multiply_integers_by_tiles(const PanelShape& shape, const uint8_t* panel, const RoundedRows& rows,
                                       int64_t num_rows, Ahead ahead, int32_t* exact) {
  bool has_lower = num_rows > TILE_ROWS;
  const RoundedInput *inputs = rows.inputs, *lower = inputs + TILE_ROWS * rows.stride;
  configure_tiles(num_rows);
  _tile_zero(0);
  _tile_zero(1);
  if (has_lower) {
    _tile_zero(2);
    _tile_zero(3);
  }
  int64_t step = ahead.step * (TILE_BYTES / STEP_INPUTS);
  for (int64_t i = 0; i < shape.group; i += TILE_BYTES, ahead.at += step) {
    for (int64_t line = 0; line < step; line += 64) prefetch(ahead.at + line);
    _tile_loadd(6, panel + i * PANEL, QUAD_BYTES);
    _tile_loadd(7, panel + i * PANEL + QUAD_BYTES / 2, QUAD_BYTES);
    _tile_loadd(4, inputs + i, rows.stride);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    if (has_lower) {
      _tile_loadd(5, lower + i, rows.stride);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
  }
  constexpr int64_t row_bytes = PANEL * sizeof(int32_t);
  _tile_stored(0, exact, row_bytes);
  _tile_stored(1, exact + PANEL / 2, row_bytes);
  if (has_lower) {
    _tile_stored(2, exact + TILE_ROWS * PANEL, row_bytes);
    _tile_stored(3, exact + TILE_ROWS * PANEL + PANEL / 2, row_bytes);
  }
}
#else
constexpr int64_t INTEGER_BLOCK_ROWS = MOST_INTEGER_ROWS;
#endif

// What is fetched while a block of rows is multiplied. One block reads its own stream, a fixed distance ahead. Of
// several, each fetches its part of the next panel, which is followed by all of them.
INLINE Ahead ahead_of_block(const PanelShape& shape, const uint8_t* panel, int64_t num_blocks, int64_t block) {
  constexpr int64_t step_bytes = STEP_INPUTS * PANEL;
  if (num_blocks == 1) return {(const char*)panel + AHEAD_BYTES, step_bytes};
  int64_t step = (step_bytes + num_blocks - 1) / num_blocks;
  return {(const char*)panel + shape.panel_bytes + block * step * (shape.group / STEP_INPUTS), step};
}

// Calls begin(first, size), and finish(first, size, exact) with the sums, for blocks of rows.
template <typename Begin, typename Finish>
INLINE void for_integer_blocks(const PanelShape& shape, const uint8_t* panel, const RoundedRows& rows,
                               int64_t num_rows, const Begin& begin, const Finish& finish) {
  alignas(64) int32_t exact[INTEGER_BLOCK_ROWS * SUM_VECS * LANES];
#if defined(TANDEM_INTEGER_TILES)
  if (shape.group % TILE_BYTES == 0) {
    int64_t num_tiles = (num_rows + TILE_BLOCK_ROWS - 1) / TILE_BLOCK_ROWS;
    for (int64_t number = 0; number < num_tiles; number++) {
      int64_t first = number * TILE_BLOCK_ROWS, size = std::min(TILE_BLOCK_ROWS, num_rows - first);
      begin(first, size);
      multiply_integers_by_tiles(shape, panel, rows.from(first), size, ahead_of_block(shape, panel, num_tiles, number),
                                 exact);
      finish(first, size, exact);
    }
    return;
  }
#endif
  int64_t num_blocks = (num_rows + MOST_INTEGER_ROWS - 1) / MOST_INTEGER_ROWS, block = 0;
  for_row_blocks<MOST_INTEGER_ROWS>(num_rows, [&](int64_t first, auto size) {
    begin(first, size.value);
    multiply_integers<size.value>(shape, panel, rows.from(first), ahead_of_block(shape, panel, num_blocks, block++),
                                  exact);
    finish(first, size.value, exact);
  });
}

// The rows that take turns with a panel, of so many: they and two panels stay in a core's second cache.
INLINE int64_t integer_group_rows(int64_t num_rows, int64_t stride) {
  constexpr int64_t step = 4 * INTEGER_BLOCK_ROWS;
  int64_t fitting = GROUP_BYTES / (stride * int64_t(sizeof(RoundedInput))) / step * step;
  int64_t most = std::max(fitting, step), num_groups = (num_rows + most - 1) / most;
  return (num_rows + num_groups * step - 1) / (num_groups * step) * step;
}

// The part of a thread: panels from `begin` to `end` for rows of a product.
template <typename T>
void multiply_integer_part(const LinearWeights& weights, const RoundedRows& rows, int64_t num_rows, int64_t begin,
                           int64_t end, Epilogue epilogue, T* out, int64_t out_stride) {
  PanelShape shape(*weights.quantized, weights.num_inputs);
  int64_t item = epilogue == STORE_FLOAT ? sizeof(float) : sizeof(T);
  int64_t columns = is_gated(epilogue) ? PANEL / 2 : PANEL;
  alignas(64) float sums[INTEGER_BLOCK_ROWS * PANEL];
  TileScope tiles;
  int64_t group = integer_group_rows(num_rows, rows.stride);
  for (int64_t row = 0; row < num_rows; row += group) {
    RoundedRows its = rows.from(row);
    char* rows_out = reinterpret_cast<char*>(out) + row * out_stride * item;
    for (int64_t number = begin; number < end; number++) {
      const uint8_t* panel = static_cast<const uint8_t*>(weights.panels) + number * shape.panel_bytes;
      auto fetch = [&](int64_t first, int64_t size) {
        for (int64_t m = first; m < first + size; m++)
          __builtin_prefetch(rows_out + (m * out_stride + number * columns) * item, 1);
      };
      auto finish = [&](int64_t first, int64_t size, const int32_t* exact) {
        scale_sums(exact, size, shape, panel + shape.code_bytes, its.from(first), sums);
        finish_panel<T>(sums, size, weights, number, epilogue, rows_out + first * out_stride * item, out_stride);
      };
      for_integer_blocks(shape, panel, its, std::min(group, num_rows - row), fetch, finish);
    }
  }
}

// ------------------------------------------------------------------------------------------ rounded rows

// Rounds `count` numbers to int8, with zeros from there to `padded`, and returns their sum. A row that is not finite
// becomes zeros with the scale NaN.
template <typename T>
INLINE int32_t round_row(const T* from, int64_t count, int64_t padded, RoundedInput* to, float* scale) {
  IntVec most = {}, sums = {};
  for_vectors(count, [&](int64_t i, auto width) { most = int_max(most, magnitude_bits(load_part(from + i, width))); });
  ElementScale found = scale_of<Int8>(most);
  *scale = found.scale;
  memset(to, 0, padded * sizeof(RoundedInput));
  if (!found.inverse) return 0;
  Vec inverse = broadcast(found.inverse);
  for_vectors(count, [&](int64_t i, auto width) {
    IntVec value = to_int(load_part(from + i, width) * inverse);
    sums = add_ints(sums, value);
    if (i + LANES <= padded) return store_rounded(value, to + i);
    RoundedInput last[LANES];
    store_rounded(value, last);
    memcpy(to + i, last, (padded - i) * sizeof(RoundedInput));
  });
  int32_t lanes[LANES], sum = 0;
  memcpy(lanes, &sums, sizeof(lanes));
  for (int32_t lane : lanes) sum += lane;
  return sum;
}

// Some rows x in their rounded form, which all threads of a team make together.
template <typename T>
class RoundedInputs {
 public:
  RoundedInputs(const LinearWeights& weights, const T* x, int64_t x_stride, int64_t num_rows)
      : order_(weights.quantized->order), x_(x), x_stride_(x_stride), num_rows_(num_rows) {
    num_inputs_ = weights.num_inputs;
    padded_ = PanelShape(*weights.quantized, num_inputs_).group;
    // An odd number of cache lines: rows that are many lines apart would share few places of the first cache.
    constexpr int64_t line = 64 / sizeof(RoundedInput);
    stride_ = ((padded_ + line - 1) / line | 1) * line;
    int64_t floats = num_rows * stride_ * sizeof(RoundedInput) / sizeof(float);
    float* memory = operand_scratch.floats(floats + 2 * num_rows);
    inputs_ = reinterpret_cast<RoundedInput*>(memory);
    scales_ = memory + floats;
    sums_ = reinterpret_cast<int32_t*>(scales_ + num_rows);
  }

  void prepare() const {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows_; row++) {
      const T* from = x_ + row * x_stride_;
      if (order_) {
        T* ordered = reinterpret_cast<T*>(panel_scratch.floats(num_inputs_));
        for (int64_t i = 0; i < num_inputs_; i++) ordered[i] = from[order_[i]];
        from = ordered;
      }
      sums_[row] = round_row(from, num_inputs_, padded_, inputs_ + row * stride_, scales_ + row);
    }
  }

  RoundedRows rows() const { return {inputs_, stride_, scales_, sums_}; }

 private:
  const int64_t* order_;
  const T* x_;
  int64_t x_stride_, num_rows_, num_inputs_, padded_, stride_;
  RoundedInput* inputs_;
  float* scales_;
  int32_t* sums_;
};

template <typename T>
void integer_linear(const LinearWeights& weights, const T* x, int64_t x_stride, int64_t num_rows, Epilogue epilogue,
                    T* out, int64_t out_stride) {
  multiply_by_parts<RoundedInputs<T>>(
      weights, x, x_stride, num_rows, INTEGER_BLOCK_ROWS, epilogue, out, out_stride,
      [&](const auto& rows, int64_t num, int64_t begin, int64_t end, T* to) {
        multiply_integer_part(weights, rows, num, begin, end, epilogue, to, out_stride);
      });
}

// Writes output `id` of the weights as it is without quantization, rounded to T.
template <typename T>
void dequantize_integers(const LinearWeights& weights, int64_t id, T* out) {
  PanelShape shape(*weights.quantized, weights.num_inputs);
  const int64_t* order = weights.quantized->order;
  int64_t output = id % PANEL;
  const uint8_t* panel = static_cast<const uint8_t*>(weights.panels) + id / PANEL * shape.panel_bytes;
  const uint8_t* scales = panel + shape.code_bytes;
  float scale = scale_at(scales, shape.scale_kind, output), offset = 0;
  if (shape.offset_kind) offset = scale_at(scales + scale_bytes(shape.scale_kind), shape.offset_kind, output);
  for (int64_t i = 0; i < weights.num_inputs; i++) {
    int32_t code = panel[i / QUAD * QUAD_BYTES + output * QUAD + i % QUAD] - CODE_BIAS;
    store(float(code) * scale + offset, out + (order ? order[i] : i));
  }
}
