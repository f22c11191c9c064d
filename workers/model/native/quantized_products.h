// Linear products with quantized weights: those of `products.h`, whose panels hold codes in place of numbers.
//
// A panel is one stream of memory: for each group of inputs its codes (`quantized_codes.h`), the scales of the 32
// outputs, and their offsets if there are any. The products of a group's codes with the inputs are summed first, in
// the order of the inputs; then sums are added up over the groups, in their order: sum * scale and, with offsets,
// offset * the sum of the group's inputs. No weight is rounded, and what a row gives depends on nothing beside it:
// few rows take codes from registers, many take them from a block that is decoded once for all of them, and both
// compute the same.

#pragma once

#include "products.h"
#include "quantized_codes.h"

// `workers/model/quantization/packed_product.py` has the same structure.
struct QuantizedPanels {
  const float* table;    // [16]: the values of codes of 4 bits
  const int64_t* order;  // [num_inputs]: the input of each column, or null where they are in their order
  int64_t codes, group, scale_kind, offset_kind;  // CodeKind; inputs, a multiple of 8; ScaleKind, twice
};

// Where the parts of a panel lie.
struct PanelShape {
  int64_t num_groups, group, scale_kind, offset_kind, code_bytes, group_bytes, panel_bytes;

  PanelShape(const QuantizedPanels& panels, int64_t num_inputs)
      : num_groups((num_inputs + panels.group - 1) / panels.group),
        group(panels.group),
        scale_kind(panels.scale_kind),
        offset_kind(panels.offset_kind),
        code_bytes(group * PANEL / (panels.codes == NIBBLES ? 2 : 1)),
        group_bytes(code_bytes + scale_bytes(scale_kind) + scale_bytes(offset_kind)),
        panel_bytes(num_groups * group_bytes) {}

  int64_t padded_inputs() const { return num_groups * group; }
};

// Rows of A that are multiplied, and the sums of the inputs of each of their groups, if there are offsets.
template <typename A>
struct QuantizedRows {
  const A* inputs;
  int64_t stride;
  const float* group_sums;
  int64_t num_groups;

  QuantizedRows from(int64_t row) const {
    return {inputs + row * stride, stride, group_sums ? group_sums + row * num_groups : nullptr, num_groups};
  }
};

// Adds the sums of products of group `number` of M rows, of V vectors of outputs from `first` on, to their totals.
template <int M, int V, typename A>
INLINE void add_scaled(const Vec (&sums)[M][V], const PanelShape& shape, const uint8_t* scales, int64_t first,
                       const QuantizedRows<A>& rows, int64_t number, Vec (&totals)[M][V]) {
#pragma GCC unroll 4
  for (int v = 0; v < V; v++) {
    Vec scale = load_scales(scales, shape.scale_kind, first + v);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) totals[m][v] = fma(scale, sums[m][v], totals[m][v]);
  }
  if (!shape.offset_kind) return;
#pragma GCC unroll 4
  for (int v = 0; v < V; v++) {
    Vec offset = load_scales(scales + scale_bytes(shape.scale_kind), shape.offset_kind, first + v);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
      totals[m][v] = fma(offset, broadcast(rows.group_sums[m * rows.num_groups + number]), totals[m][v]);
  }
}

// The same with totals c[M, 32], for more of them than there are registers, where the compiler shall not keep them.
// Stores might change what references name: all that is needed is read first.
template <int M, int V, typename A>
INLINE void add_scaled(const Vec (&sums)[M][V], const PanelShape& shape, const uint8_t* scales, int64_t first,
                       const QuantizedRows<A>& rows, int64_t number, float* c) {
  __asm__ volatile("" ::: "memory");
  int64_t offset_kind = shape.offset_kind, num_groups = rows.num_groups;
  Vec scale[V], offset[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; v++) scale[v] = load_scales(scales, shape.scale_kind, first + v);
  if (offset_kind)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      offset[v] = load_scales(scales + scale_bytes(shape.scale_kind), offset_kind, first + v);
  const float* group_sums = rows.group_sums + number;
  c += first * LANES;
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      float* to = c + m * PANEL + v * LANES;
      Vec total = fma(scale[v], sums[m][v], load(to));
      if (offset_kind) total = fma(offset[v], broadcast(group_sums[m * num_groups]), total);
      store(total, to);
    }
  }
}

// ------------------------------------------------------------------------------------------ few rows

// How far ahead of what is decoded memory is fetched.
constexpr int64_t AHEAD_BYTES = 4 << 10;

// Adds the products of M rows with a panel, whose codes are decoded in registers, to c[M, 32].
template <CodeKind KIND, int M, typename A>
void multiply_few(const QuantizedPanels& panels, const PanelShape& shape, const QuantizedRows<A>& rows,
                  const uint8_t* at, float* c) {
  Decoder<KIND, A> decoder(panels.table);
  const A* inputs = rows.inputs;
  for (int64_t number = 0; number < shape.num_groups; number++) {
    Vec sums[M][PANEL_VECS];
    begin_sums(sums, c, PANEL, false);
    for (int64_t i = 0; i < shape.group; i += STEP_INPUTS) {
#pragma GCC unroll 4
      for (int64_t line = 0; line < STEP_BYTES<KIND>; line += 64) prefetch_weights<M>((const char*)at + AHEAD_BYTES + line);
#pragma GCC unroll 4
      for (int p = 0; p < STEP_INPUTS / 2; p++) {
        auto weights = decoder.weights(at, p);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) decoder.add(weights, inputs + m * rows.stride + 2 * p, sums[m]);
      }
      at += STEP_BYTES<KIND>, inputs += STEP_INPUTS;
    }
    for (int64_t line = 0; line < shape.group_bytes - shape.code_bytes; line += 64)
      prefetch_weights<M>((const char*)at + AHEAD_BYTES + line);
    add_scaled(sums, shape, at, 0, rows, number, c);
    at += shape.group_bytes - shape.code_bytes;
  }
}

// ----------------------------------------------------------------------------------------- many rows

constexpr int64_t DECODED_INPUTS = 256;  // 16 KiB of bfloat16, or 32 of float

// Inputs that are decoded together: several groups, or a part of one.
struct DecodedChunk {
  int64_t group, num_groups, num_inputs;  // the first group; whole groups, or 1; inputs of each of them
  int64_t begin;                          // the first input, of the first group
  bool starts, ends;                      // whether groups are all there at their start, and at their end

  template <typename Compute>
  static INLINE void for_each(const PanelShape& shape, const Compute& compute) {
    int64_t together = DECODED_INPUTS / shape.group;
    if (together > 1) {
      for (int64_t group = 0; group < shape.num_groups; group += together)
        compute(DecodedChunk{group, std::min(together, shape.num_groups - group), shape.group, 0, true, true});
      return;
    }
    for (int64_t group = 0; group < shape.num_groups; group++)
      for (int64_t begin = 0; begin < shape.group; begin += DECODED_INPUTS) {
        int64_t count = std::min(DECODED_INPUTS, shape.group - begin);
        compute(DecodedChunk{group, 1, count, begin, begin == 0, begin + count == shape.group});
      }
  }

  const uint8_t* scales(const PanelShape& shape, const uint8_t* panel, int64_t number) const {
    return panel + (group + number) * shape.group_bytes + shape.code_bytes;
  }
};

// Decodes a chunk of a panel to the panel of A that its codes are.
template <CodeKind KIND, typename A>
void decode_chunk(const QuantizedPanels& panels, const PanelShape& shape, const DecodedChunk& chunk,
                  const uint8_t* panel, A* to) {
  Decoder<KIND, A> decoder(panels.table);
  for (int64_t number = 0; number < chunk.num_groups; number++) {
    const uint8_t* at = panel + (chunk.group + number) * shape.group_bytes + chunk.begin / STEP_INPUTS * STEP_BYTES<KIND>;
    for (int64_t i = 0; i < chunk.num_inputs; i += STEP_INPUTS, at += STEP_BYTES<KIND>) {
#pragma GCC unroll 4
      for (int64_t line = 0; line < STEP_BYTES<KIND>; line += 64) prefetch((const char*)at + AHEAD_BYTES + line);
#pragma GCC unroll 4
      for (int p = 0; p < STEP_INPUTS / 2; p++, to += 2 * PANEL) decoder.store_pair(decoder.weights(at, p), to);
    }
    for (int64_t line = 0; line < shape.group_bytes - shape.code_bytes; line += 64)
      prefetch((const char*)at + AHEAD_BYTES + line);
  }
}

// Adds the products of an input of M rows, or of a pair of bfloat16, with V vectors of outputs.
template <int M, int V, typename A>
INLINE void multiply_inputs(const A* inputs, int64_t stride, const A* weights, Vec (&sums)[M][V]) {
  Vec loaded[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; v++) {
    if constexpr (sizeof(A) == 2)
      loaded[v] = load_bits(weights + v * 2 * LANES);
    else
      loaded[v] = load(weights + v * LANES);
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      if constexpr (sizeof(A) == 2)
        sums[m][v] = add_products(sums[m][v], loaded[v], inputs + m * stride);
      else
        sums[m][v] = fma(broadcast(inputs[m * stride]), loaded[v], sums[m][v]);
    }
}

// Adds the products of M rows with a decoded chunk, of V vectors of outputs from `first` on, to the totals c[M, 32].
// `partial` [M, 32] keeps the sums of a group that goes on in the next chunk.
template <int M, int V, typename A>
void multiply_chunk(const PanelShape& shape, const DecodedChunk& chunk, const QuantizedRows<A>& rows,
                    const uint8_t* panel, const A* decoded, int64_t first, float* partial, float* c) {
  constexpr int64_t together = sizeof(A) == 2 ? 2 : 1;
  const A* inputs = rows.inputs + chunk.group * shape.group + chunk.begin;
  const A* weights = decoded + first * LANES * together;
  for (int64_t number = 0; number < chunk.num_groups; number++) {
    Vec sums[M][V];
    if (chunk.starts)
      begin_sums(sums, partial, PANEL, false);
    else
      begin_sums(sums, partial + first * LANES, PANEL, true);
    for (int64_t i = 0; i < chunk.num_inputs; i += 4 * together) {
#pragma GCC unroll 4
      for (int turn = 0; turn < 4; turn++, weights += PANEL * together, inputs += together)
        multiply_inputs(inputs, rows.stride, weights, sums);
    }
    if (!chunk.ends) return end_sums(sums, partial + first * LANES, PANEL);
    add_scaled(sums, shape, chunk.scales(shape, panel, number), first, rows, chunk.group + number, c);
  }
}

// The same of several groups, for as few rows that their totals are registers: stores of them take longer than the
// products of small groups.
template <int M, typename A>
void multiply_groups(const PanelShape& shape, const DecodedChunk& chunk, const QuantizedRows<A>& rows,
                     const uint8_t* panel, const A* weights, float* c) {
  constexpr int64_t together = sizeof(A) == 2 ? 2 : 1;
  const A* inputs = rows.inputs + chunk.group * shape.group;
  Vec totals[M][PANEL_VECS];
  begin_sums(totals, c, PANEL, true);
  for (int64_t number = 0; number < chunk.num_groups; number++) {
    Vec sums[M][PANEL_VECS];
    begin_sums(sums, c, PANEL, false);
    for (int64_t i = 0; i < chunk.num_inputs; i += 4 * together) {
#pragma GCC unroll 4
      for (int turn = 0; turn < 4; turn++, weights += PANEL * together, inputs += together)
        multiply_inputs(inputs, rows.stride, weights, sums);
    }
    add_scaled(sums, shape, chunk.scales(shape, panel, number), 0, rows, chunk.group + number, totals);
  }
  end_sums(totals, c, PANEL);
}

constexpr int64_t MOST_GROUPED_ROWS = 6;  // of AVX-512: 12 sums and 12 totals of 32 registers
constexpr int64_t LARGE_GROUP = 128;      // where stores count for little

// The same of any number of rows, by vectors.
template <typename A>
__attribute__((noinline)) void multiply_chunk_by_vectors(const PanelShape& shape, const DecodedChunk& chunk, const QuantizedRows<A>& rows,
                               int64_t num_rows, const uint8_t* panel, const A* decoded, float* partial, float* c) {
  if constexpr (LANES == 16) {
    if (shape.group < LARGE_GROUP)
      return for_row_blocks<MOST_GROUPED_ROWS>(num_rows, [&](int64_t begin, auto count) {
        multiply_groups<count.value>(shape, chunk, rows.from(begin), panel, decoded, c + begin * PANEL);
      });
  }
  for_row_blocks(num_rows, [&](int64_t begin, auto count) {
    constexpr int M = count.value, V = LANES == 16 || M <= 2 ? PANEL_VECS : PANEL_VECS / 2;
    for (int64_t first = 0; first < PANEL_VECS; first += V)
      multiply_chunk<M, V>(shape, chunk, rows.from(begin), panel, decoded, first, partial + begin * PANEL,
                           c + begin * PANEL);
  });
}

#if defined(TANDEM_AMX)
// The same by tiles.
inline void multiply_chunk_by_tiles(const PanelShape& shape, const DecodedChunk& chunk, const QuantizedRows<Bf16>& rows,
                                    int64_t num_rows, const uint8_t* panel, const Bf16* decoded, float* partial,
                                    float* c) {
  const Bf16* inputs = rows.inputs + chunk.group * shape.group + chunk.begin;
  for (int64_t number = 0; number < chunk.num_groups; number++) {
    int64_t place = number * chunk.num_inputs;
    multiply(inputs + place, rows.stride, num_rows, decoded + place * PANEL, chunk.num_inputs, partial, PANEL,
             !chunk.starts);
    if (!chunk.ends) return;
    for (int64_t row = 0; row < num_rows; row++) {
      Vec sums[1][PANEL_VECS];
      begin_sums(sums, partial + row * PANEL, PANEL, true);
      add_scaled(sums, shape, chunk.scales(shape, panel, number), 0, rows.from(row), chunk.group + number,
                 c + row * PANEL);
    }
  }
}
#endif

// Adds the products of rows with a panel, which is decoded part by part, to c[num_rows, 32].
template <CodeKind KIND, typename A>
void multiply_many(const QuantizedPanels& panels, const PanelShape& shape, const QuantizedRows<A>& rows,
                   int64_t num_rows, const uint8_t* panel, float* c) {
  // One group of more inputs than a chunk has may be less than a chunk longer.
  float* memory = panel_scratch.floats(DECODED_INPUTS * PANEL + num_rows * PANEL);
  A* decoded = reinterpret_cast<A*>(memory);
  float* partial = memory + DECODED_INPUTS * PANEL;
  DecodedChunk::for_each(shape, [&](const DecodedChunk& chunk) {
    decode_chunk<KIND>(panels, shape, chunk, panel, decoded);
#if defined(TANDEM_AMX)
    if constexpr (sizeof(A) == 2)
      return multiply_chunk_by_tiles(shape, chunk, rows, num_rows, panel, decoded, partial, c);
#endif
    multiply_chunk_by_vectors(shape, chunk, rows, num_rows, panel, decoded, partial, c);
  });
}

// ----------------------------------------------------------------------------------------- the product

// Rows whose codes are decoded in registers, for every block of them; 0 where tiles sum products in their own way.
template <typename A>
constexpr int64_t MOST_FEW = LANES == 16 ? (sizeof(A) == 2 ? 2 * MOST_ROWS : 4) : 2;
#if defined(TANDEM_AMX)
template <>
constexpr int64_t MOST_FEW<Bf16> = 0;
#endif

// c[num_rows, 32] of a panel.
template <CodeKind KIND, typename A>
void multiply_panel(const QuantizedPanels& panels, const PanelShape& shape, const QuantizedRows<A>& rows,
                    int64_t num_rows, const uint8_t* panel, float* c) {
  memset(c, 0, num_rows * PANEL * sizeof(float));
  if (num_rows > MOST_FEW<A>) return multiply_many<KIND>(panels, shape, rows, num_rows, panel, c);
  for_row_blocks(num_rows, [&](int64_t begin, auto count) {
    if constexpr (count.value <= MOST_FEW<A>)
      multiply_few<KIND, count.value>(panels, shape, rows.from(begin), panel, c + begin * PANEL);
  });
}

// Compiled once: it is large.
template <typename A>
__attribute__((noinline)) void multiply_panel(const QuantizedPanels& panels, const PanelShape& shape,
                                              const QuantizedRows<A>& rows, int64_t num_rows, const uint8_t* panel,
                                              float* c) {
  if (panels.codes == NIBBLES) return multiply_panel<NIBBLES>(panels, shape, rows, num_rows, panel, c);
  if (panels.codes == INT8_CODES) return multiply_panel<INT8_CODES>(panels, shape, rows, num_rows, panel, c);
  multiply_panel<E4M3_CODES>(panels, shape, rows, num_rows, panel, c);
}

// The part of a thread: panels from `begin` to `end` for rows of a product.
template <typename T, typename A>
void multiply_quantized_part(const LinearWeights& weights, const QuantizedRows<A>& rows, int64_t num_rows,
                             int64_t begin, int64_t end, Epilogue epilogue, T* out, int64_t out_stride) {
  const QuantizedPanels& panels = *weights.quantized;
  PanelShape shape(panels, weights.num_inputs);
  int64_t item = epilogue == STORE_FLOAT ? sizeof(float) : sizeof(T);
  float* sums = sum_scratch.floats(GROUP_ROWS * PANEL);
  TileScope tiles;
  for (int64_t row = 0; row < num_rows; row += GROUP_ROWS) {
    int64_t count = std::min(GROUP_ROWS, num_rows - row);
    T* rows_out = reinterpret_cast<T*>(reinterpret_cast<char*>(out) + row * out_stride * item);
    for (int64_t number = begin; number < end; number++) {
      const uint8_t* panel = static_cast<const uint8_t*>(weights.panels) + number * shape.panel_bytes;
      multiply_panel(panels, shape, rows.from(row), count, panel, sums);
      finish_panel<T>(sums, count, weights, number, epilogue, rows_out, out_stride);
    }
  }
}

// Copies a row to the order of the columns, with zeros after its end.
template <typename T, typename A>
INLINE void prepare_row(const T* from, const int64_t* order, int64_t count, int64_t padded, A* to) {
  if constexpr (sizeof(A) == sizeof(T)) {
    if (order)
      for (int64_t i = 0; i < count; i++) to[i] = from[order[i]];
    else
      memcpy(to, from, count * sizeof(T));
  } else {
    if (order)
      for (int64_t i = 0; i < count; i++) to[i] = to_float(from[order[i]]);
    else
      widen_row(from, count, to);
  }
  for (int64_t i = count; i < padded; i++) to[i] = A{};
}

// The sum of `count` inputs, a multiple of 8, in a fixed order.
template <typename A>
INLINE float sum_inputs(const A* from, int64_t count) {
  float sums[STEP_INPUTS] = {};
  for (int64_t i = 0; i < count; i += STEP_INPUTS)
    for (int64_t j = 0; j < STEP_INPUTS; j++) sums[j] += to_float(from[i + j]);
  for (int64_t width = STEP_INPUTS / 2; width; width /= 2)
    for (int64_t j = 0; j < width; j++) sums[j] += sums[j + width];
  return sums[0];
}

// The sums of the inputs of all groups.
template <typename A>
INLINE void sum_groups(const A* from, const PanelShape& shape, float* sums) {
  for (int64_t group = 0; group < shape.num_groups; group++)
    sums[group] = sum_inputs(from + group * shape.group, shape.group);
}

inline thread_local Scratch group_sum_scratch;

// The operands of some rows x, which are prepared in parallel by all threads of a team.
template <typename T>
class QuantizedInputs {
 public:
  using A = Operand<T>;

  QuantizedInputs(const LinearWeights& weights, const T* x, int64_t x_stride, int64_t num_rows)
      : order_(weights.quantized->order), shape_(*weights.quantized, weights.num_inputs), x_(x), x_stride_(x_stride) {
    num_inputs_ = weights.num_inputs, num_rows_ = num_rows;
    int64_t padded = shape_.padded_inputs();
    is_copied_ = sizeof(A) != sizeof(T) || order_ || padded != num_inputs_;
    if (is_copied_)
      copies_ = reinterpret_cast<A*>(operand_scratch.floats((num_rows * padded * sizeof(A) + 3) / 4));
    if (shape_.offset_kind) group_sums_ = group_sum_scratch.floats(num_rows * shape_.num_groups);
  }

  void prepare() const {
    if (!is_copied_ && !group_sums_) return;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows_; row++) {
      if (is_copied_)
        prepare_row(x_ + row * x_stride_, order_, num_inputs_, shape_.padded_inputs(),
                    copies_ + row * shape_.padded_inputs());
      if (!group_sums_) continue;
      sum_groups(rows().from(row).inputs, shape_, group_sums_ + row * shape_.num_groups);
    }
  }

  QuantizedRows<A> rows() const {
    if (is_copied_) return {copies_, shape_.padded_inputs(), group_sums_, shape_.num_groups};
    return {reinterpret_cast<const A*>(x_), x_stride_, group_sums_, shape_.num_groups};
  }

 private:
  const int64_t* order_;
  PanelShape shape_;
  const T* x_;
  int64_t x_stride_, num_inputs_, num_rows_;
  bool is_copied_;
  A* copies_ = nullptr;
  float* group_sums_ = nullptr;
};

// Of `integer_products.h`.
template <typename T>
void integer_linear(const LinearWeights& weights, const T* x, int64_t x_stride, int64_t num_rows, Epilogue epilogue,
                    T* out, int64_t out_stride);
template <typename T>
void dequantize_integers(const LinearWeights& weights, int64_t id, T* out);

template <typename T>
void quantized_linear(const LinearWeights& weights, const T* x, int64_t x_stride, int64_t num_rows, Epilogue epilogue,
                      T* out, int64_t out_stride) {
  if (weights.quantized->codes == INTEGERS)
    return integer_linear(weights, x, x_stride, num_rows, epilogue, out, out_stride);
  int64_t num_panels = (weights.num_outputs + PANEL - 1) / PANEL;
  int64_t item = epilogue == STORE_FLOAT ? sizeof(float) : sizeof(T);
  for (int64_t chunk = 0; chunk < num_rows; chunk += CHUNK_ROWS) {
    int64_t rows = std::min(CHUNK_ROWS, num_rows - chunk);
    QuantizedInputs<T> inputs(weights, x + chunk * x_stride, x_stride, rows);
    char* to = reinterpret_cast<char*>(out) + chunk * out_stride * item;
#pragma omp parallel
    {
      int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
      inputs.prepare();
      Split split(rows, BLOCK_ROWS<Operand<T>>, num_panels, num_threads);
      if (thread < split.rows * split.panels) {
        int64_t part = thread / split.panels, column = thread % split.panels;
        int64_t first = split.row(part, rows), last = split.row(part + 1, rows);
        int64_t begin = num_panels * column / split.panels, end = num_panels * (column + 1) / split.panels;
        multiply_quantized_part(weights, inputs.rows().from(first), last - first, begin, end, epilogue,
                                reinterpret_cast<T*>(to + first * out_stride * item), out_stride);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- lookup

INLINE float scale_at(const uint8_t* scales, int64_t kind, int64_t output) {
  float values[LANES];
  store(load_scales(scales, kind, output / LANES), values);
  return values[output % LANES];
}

// Writes output `id` of the weights as it is without quantization, rounded to T.
template <CodeKind KIND, typename T>
void dequantize_output(const LinearWeights& weights, const PanelShape& shape, int64_t id, T* out) {
  FloatDecoder<KIND> decoder(weights.quantized->table);
  int64_t output = id % PANEL, vector = output / LANES, lane = output % LANES;
  const uint8_t* panel = static_cast<const uint8_t*>(weights.panels) + id / PANEL * shape.panel_bytes;
  for (int64_t column = 0; column < weights.num_inputs; column += 2) {
    int64_t within = column % shape.group;
    const uint8_t *group = panel + column / shape.group * shape.group_bytes, *scales = group + shape.code_bytes;
    Vec pair[2];
    decoder.pair(group + within / STEP_INPUTS * STEP_BYTES<KIND>, within % STEP_INPUTS / 2, vector, pair[0], pair[1]);
    float scale = scale_at(scales, shape.scale_kind, output), offset = 0;
    if (shape.offset_kind) offset = scale_at(scales + scale_bytes(shape.scale_kind), shape.offset_kind, output);
    for (int64_t i = 0; i < 2 && column + i < weights.num_inputs; i++) {
      float values[LANES];
      store(pair[i], values);
      int64_t place = weights.quantized->order ? weights.quantized->order[column + i] : column + i;
      store(values[lane] * scale + offset, out + place);
    }
  }
}

template <typename T>
void gather_quantized(const LinearWeights& weights, const int64_t* ids, int64_t count, T* out, int64_t out_stride) {
  PanelShape shape(*weights.quantized, weights.num_inputs);
#pragma omp parallel for schedule(static) if (count > 4)
  for (int64_t i = 0; i < count; i++) {
    T* to = out + i * out_stride;
    if (weights.quantized->codes == NIBBLES)
      dequantize_output<NIBBLES>(weights, shape, ids[i], to);
    else if (weights.quantized->codes == INT8_CODES)
      dequantize_output<INT8_CODES>(weights, shape, ids[i], to);
    else if (weights.quantized->codes == INTEGERS)
      dequantize_integers(weights, ids[i], to);
    else
      dequantize_output<E4M3_CODES>(weights, shape, ids[i], to);
  }
}
