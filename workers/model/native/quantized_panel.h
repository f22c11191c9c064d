// The product of rows with a panel of codes (`quantized_codes.h`).
//
// A panel is one stream of memory: for each group of inputs its codes, the scales of the 32 outputs, and their
// offsets if there are any. The products of a group's codes with the inputs are summed first, in the order of the
// inputs; then sums are added up over the groups, in their order: sum * scale and, with offsets, offset * the sum of
// the group's inputs. No weight is rounded, and what a row gives depends on nothing beside it.
//
// The first block of rows decodes codes between its products, while other units of the CPU than those that multiply
// have time for it. It keeps what it has decoded of a part of the inputs in the first cache, and the blocks after it
// take it from there.

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

// ------------------------------------------------------------------------------------ parts of a panel

// Inputs that are multiplied together: several groups, or a part of one.
struct InputPart {
  int64_t group, num_groups, num_inputs;  // the first group; whole groups, or 1; inputs of each of them
  int64_t begin;                          // the first input, of the first group
  int64_t number;                         // of the part
  bool starts, ends;                      // whether groups are all there at their start, and at their end

  static InputPart whole(const PanelShape& shape) { return {0, shape.num_groups, shape.group, 0, 0, true, true}; }

  // Calls compute(part) for all inputs, at most `most` of them at a time, a multiple of STEP_INPUTS.
  template <typename Compute>
  static INLINE void for_each(const PanelShape& shape, int64_t most, const Compute& compute) {
    int64_t together = most / shape.group, part = 0;
    if (together > 1) {
      for (int64_t group = 0; group < shape.num_groups; group += together)
        compute(InputPart{group, std::min(together, shape.num_groups - group), shape.group, 0, part++, true, true});
      return;
    }
    for (int64_t group = 0; group < shape.num_groups; group++)
      for (int64_t begin = 0; begin < shape.group; begin += most) {
        int64_t count = std::min(most, shape.group - begin);
        compute(InputPart{group, 1, count, begin, part++, begin == 0, begin + count == shape.group});
      }
  }

  template <CodeKind KIND>
  const uint8_t* codes(const PanelShape& shape, const uint8_t* panel, int64_t number) const {
    return panel + (group + number) * shape.group_bytes + begin / STEP_INPUTS * STEP_BYTES<KIND>;
  }

  const uint8_t* scales(const PanelShape& shape, const uint8_t* panel, int64_t number) const {
    return panel + (group + number) * shape.group_bytes + shape.code_bytes;
  }
};

// Inputs that are decoded together: 16 KiB of a panel.
template <typename A>
constexpr int64_t PART_INPUTS = 512 / sizeof(A);
// How far ahead of what few rows take memory is fetched. At half the distance one row waits for it: its products then
// take 5 to 10 % longer than a loop that only reads.
constexpr int64_t AHEAD_BYTES = 8 << 10;

// Rows as blocks of them are multiplied: [parts][num_rows][PACKED_STRIDE], so that one register points to all rows of
// a block, and they do not share sets of the cache. Few rows stay as they are: each block decodes in registers, which
// pays for two blocks where registers suffice for the most rows.
template <typename A>
constexpr int64_t PACKED_STRIDE = PART_INPUTS<A> + 64 / sizeof(A);
template <typename A>
constexpr int64_t FEW_ROWS = LANES == 16 ? (sizeof(A) == 2 ? 2 * MOST_ROWS : 4) : 2;

inline thread_local Scratch packed_scratch;

template <typename A>
struct PackedRows {
  const A* inputs;
  int64_t stride, num_rows;
  const float* group_sums;
  int64_t num_groups;

  PackedRows(const QuantizedRows<A>& rows, int64_t num_rows, const PanelShape& shape)
      : inputs(rows.inputs), stride(rows.stride), num_rows(num_rows), group_sums(rows.group_sums),
        num_groups(rows.num_groups) {
    if (num_rows <= FEW_ROWS<A>) return;
    int64_t num_parts = 0;
    InputPart::for_each(shape, PART_INPUTS<A>, [&](const InputPart&) { num_parts++; });
    stride = PACKED_STRIDE<A>;
    A* to = reinterpret_cast<A*>(packed_scratch.floats(num_parts * num_rows * stride * sizeof(A) / sizeof(float)));
    inputs = to;
    InputPart::for_each(shape, PART_INPUTS<A>, [&](const InputPart& part) {
      int64_t first = part.group * shape.group + part.begin, count = part.num_groups * part.num_inputs;
      for (int64_t row = 0; row < num_rows; row++, to += stride)
        memcpy(to, rows.inputs + row * rows.stride + first, count * sizeof(A));
    });
  }

  // The inputs of the first row.
  const A* of(const InputPart& part, const PanelShape& shape) const {
    if (num_rows > FEW_ROWS<A>) return inputs + part.number * num_rows * stride;
    return inputs + part.group * shape.group + part.begin;
  }

  PackedRows from(int64_t row) const {
    PackedRows other = *this;
    other.inputs += row * stride;
    if (group_sums) other.group_sums += row * num_groups;
    return other;
  }
};

// ------------------------------------------------------------------------------------ blocks of rows

// Adds the sums of products of group `number` of M rows, of V vectors of outputs from `first` on, to their totals.
template <int M, int V, typename A>
INLINE void add_scaled(const Vec (&sums)[M][V], const PanelShape& shape, const uint8_t* scales, int64_t first,
                       const PackedRows<A>& rows, int64_t number, Vec (&totals)[M][V]) {
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
                       const PackedRows<A>& rows, int64_t number, float* c) {
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

// Where a block of rows has its weights from: it decodes them, decodes and keeps them, or takes what is kept.
enum WeightSource { DECODED, DECODED_AND_KEPT, KEPT };

// A part of a panel, and the memory of what is kept of it.
template <typename A>
struct PanelPart {
  const QuantizedPanels& panels;
  const PanelShape& shape;
  const InputPart& inputs;
  const uint8_t* panel;
  A* kept;
};

// Outputs that are kept together: all of a panel, or with AVX2 those of a block, which lie together so that they take
// no more of the first cache than they are.
template <typename A>
constexpr int64_t KEPT_VECS = LANES == 16 || sizeof(A) == 2 ? PANEL_VECS : PANEL_VECS / 2;

// Fetches the memory that comes a part after what is decoded, spread over all passes over a part.
struct PartAhead {
  const char* at;

  template <int M>
  INLINE void fetch(int64_t num_bytes) {
    for (int64_t line = 0; line < num_bytes; line += 64) prefetch_weights<M>(at + line);
    at += num_bytes;
  }
};

// Pointers that move on with the inputs: of rows, and of what is kept.
template <typename A>
struct StepPointers {
  const A* inputs;
  int64_t stride;
  A* kept;
};

// Adds the products of M rows with some steps of codes, of V vectors of outputs from `first` on, to their sums. AVX2
// lacks registers for weights that are decoded meanwhile.
template <CodeKind KIND, WeightSource SOURCE, typename A, int M, int V>
INLINE void add_steps(const Decoder<KIND, A>& decoder, const uint8_t* codes, const uint8_t* end, int64_t first,
                      StepPointers<A>& at, PartAhead& ahead, Vec (&sums)[M][V]) {
  constexpr int64_t width = KEPT_VECS<A> * LANES;
  do {  // at least once: the compiler would else store all sums for the case that there is no step
    if (SOURCE != KEPT) ahead.fetch<M>(STEP_BYTES<KIND> * V / PANEL_VECS);
    if constexpr (SOURCE == DECODED) {
      decoder.add_step(codes, first, at.inputs, at.stride, sums);
    } else if constexpr (SOURCE == DECODED_AND_KEPT && LANES == 16) {
      decoder.add_and_store_step(codes, first, at.kept, width, at.inputs, at.stride, sums);
    } else {
      if (SOURCE == DECODED_AND_KEPT) decoder.template store_step<V>(codes, first, at.kept, width);
      decoder.add_stored_step(at.kept, width, at.inputs, at.stride, sums);
    }
    codes += STEP_BYTES<KIND>, at.inputs += STEP_INPUTS, at.kept += STEP_INPUTS * width;
  } while (codes < end);
}

// Adds the products of M rows with a part of a panel, of V vectors of outputs from `first` on, to the totals
// c[M, 32]. `partial` [M, 32] keeps the sums of a group that goes on in the next part.
template <CodeKind KIND, WeightSource SOURCE, int M, int V, typename A>
void multiply_block(const PanelPart<A>& part, const PackedRows<A>& rows, int64_t first, float* partial, float* c) {
  constexpr bool keeps_totals = 2 * M * V <= (LANES == 16 ? 24 : 8);  // in registers
  constexpr bool is_packed = SOURCE != DECODED;
  alignas(64) static constexpr float zeros[M * PANEL] = {};
  const PanelShape& shape = part.shape;
  const InputPart& span = part.inputs;
  Decoder<KIND, A> decoder(part.panels.table);
  constexpr int64_t kept_outputs = KEPT_VECS<A> * LANES;
  A* kept = part.kept + first / KEPT_VECS<A> * kept_outputs * PART_INPUTS<A> +
            first % KEPT_VECS<A> * LANES * (sizeof(float) / sizeof(A));
  StepPointers<A> pointers{rows.of(span, shape), is_packed ? PACKED_STRIDE<A> : rows.stride, kept};
  const int64_t part_bytes = span.num_groups * span.num_inputs / STEP_INPUTS * STEP_BYTES<KIND>;
  PartAhead ahead{(const char*)span.template codes<KIND>(shape, part.panel, 0) +
                  (is_packed ? part_bytes + first * part_bytes / PANEL_VECS : AHEAD_BYTES)};
  const float* from = span.starts ? zeros : partial + first * LANES;
  Vec totals[M][V];
  if (keeps_totals) begin_sums(totals, c + first * LANES, PANEL, true);
  int64_t number = 0;
  do {
    const uint8_t* codes = span.template codes<KIND>(shape, part.panel, number);
    const uint8_t* end = codes + span.num_inputs / STEP_INPUTS * STEP_BYTES<KIND>;
    Vec sums[M][V];
    begin_sums(sums, from, PANEL, is_packed);
    add_steps<KIND, SOURCE>(decoder, codes, end, first, pointers, ahead, sums);
    if (is_packed && !span.ends) return end_sums(sums, partial + first * LANES, PANEL);
    const uint8_t* scales = span.scales(shape, part.panel, number);
    if (SOURCE != KEPT) ahead.fetch<M>((shape.group_bytes - shape.code_bytes) * V / PANEL_VECS);
    if constexpr (keeps_totals)
      add_scaled(sums, shape, scales, first, rows, span.group + number, totals);
    else
      add_scaled(sums, shape, scales, first, rows, span.group + number, c);
  } while (++number < span.num_groups);
  if (keeps_totals) end_sums(totals, c + first * LANES, PANEL);
}

// Vectors of outputs of a block. Sums and totals of 12 rows of one vector are registers of AVX-512; without registers
// for the totals, groups of 32 inputs take a quarter longer. Codes of e4m3 are decoded for two vectors at once, and
// have large groups.
template <CodeKind KIND, WeightSource SOURCE, int M>
constexpr int BLOCK_VECS = SOURCE == DECODED                    ? PANEL_VECS
                           : LANES == 8                         ? 2
                           : M <= 6 || KIND == E4M3_CODES ? 2 : 1;

// All 32 outputs of M rows.
template <CodeKind KIND, WeightSource SOURCE, int M, typename A>
void multiply_rows(const PanelPart<A>& part, const PackedRows<A>& rows, float* partial, float* c) {
  constexpr int V = BLOCK_VECS<KIND, SOURCE, M>;
  for (int64_t first = 0; first < PANEL_VECS; first += V)
    multiply_block<KIND, SOURCE, M, V>(part, rows, first, partial, c);
}

#if defined(TANDEM_AMX)
// Decodes a part of a panel to the panel of A that its codes are.
template <CodeKind KIND>
void decode(const QuantizedPanels& panels, const PanelShape& shape, const InputPart& part, const uint8_t* panel,
            Bf16* to) {
  Decoder<KIND, Bf16> decoder(panels.table);
  for (int64_t number = 0; number < part.num_groups; number++) {
    const uint8_t* at = part.codes<KIND>(shape, panel, number);
    for (int64_t i = 0; i < part.num_inputs; i += STEP_INPUTS, at += STEP_BYTES<KIND>) {
#pragma GCC unroll 4
      for (int64_t line = 0; line < STEP_BYTES<KIND>; line += 64) prefetch((const char*)at + AHEAD_BYTES + line);
      decoder.template store_step<PANEL_VECS>(at, 0, to, PANEL);
      to += STEP_INPUTS * PANEL;
    }
    for (int64_t line = 0; line < shape.group_bytes - shape.code_bytes; line += 64)
      prefetch((const char*)at + AHEAD_BYTES + line);
  }
}
#endif

// The rows of the smallest block of more than few rows.
template <typename A>
constexpr int64_t LEAST_KEPT = std::min(FEW_ROWS<A> + 1, MOST_ROWS / 2);

// Adds the products of rows, one block of them or several, to c[num_rows, 32].
template <CodeKind KIND, typename A>
void multiply_by_vectors(const QuantizedPanels& panels, const PanelShape& shape, const PackedRows<A>& rows,
                         const uint8_t* panel, float* c) {
  float* memory = panel_scratch.floats((PART_INPUTS<A> + rows.num_rows) * PANEL);
  float* partial = memory + PART_INPUTS<A> * PANEL;
  auto multiply = [&](const InputPart& inputs) {
    PanelPart<A> part{panels, shape, inputs, panel, reinterpret_cast<A*>(memory)};
    for_row_blocks(rows.num_rows, [&](int64_t begin, auto count) {
      constexpr int M = count.value;
      float *to = c + begin * PANEL, *partial_sums = partial + begin * PANEL;
      if constexpr (M <= FEW_ROWS<A>)
        if (rows.num_rows <= FEW_ROWS<A>)
          return multiply_rows<KIND, DECODED, M>(part, rows.from(begin), partial_sums, to);
      if constexpr (M >= LEAST_KEPT<A>) {
        if (begin == 0) return multiply_rows<KIND, DECODED_AND_KEPT, M>(part, rows, partial, c);
        multiply_rows<NIBBLES, KEPT, M>(part, rows.from(begin), partial_sums, to);
      }
    });
  };
  if (rows.num_rows <= FEW_ROWS<A>) return multiply(InputPart::whole(shape));
  InputPart::for_each(shape, PART_INPUTS<A>, multiply);
}

#if defined(TANDEM_AMX)
// The same by tiles, for which a part is decoded first.
template <CodeKind KIND>
void multiply_by_tiles(const QuantizedPanels& panels, const PanelShape& shape, const PackedRows<Bf16>& rows,
                       const uint8_t* panel, float* c) {
  int64_t num_rows = rows.num_rows;
  float* memory = panel_scratch.floats((PART_INPUTS<Bf16> / 2 + num_rows) * PANEL);
  Bf16* decoded = reinterpret_cast<Bf16*>(memory);
  float* partial = memory + PART_INPUTS<Bf16> * PANEL / 2;
  InputPart::for_each(shape, PART_INPUTS<Bf16>, [&](const InputPart& part) {
    decode<KIND>(panels, shape, part, panel, decoded);
    const Bf16* inputs = rows.of(part, shape);
    for (int64_t number = 0; number < part.num_groups; number++) {
      int64_t place = number * part.num_inputs;
      multiply(inputs + place, rows.stride, num_rows, decoded + place * PANEL, part.num_inputs, partial, PANEL,
               !part.starts);
      if (!part.ends) return;
      for (int64_t row = 0; row < num_rows; row++) {
        Vec sums[1][PANEL_VECS];
        begin_sums(sums, partial + row * PANEL, PANEL, true);
        add_scaled(sums, shape, part.scales(shape, panel, number), 0, rows.from(row), part.group + number,
                   c + row * PANEL);
      }
    }
  });
}
#endif

// c[num_rows, 32] of a panel.
template <CodeKind KIND, typename A>
void multiply_panel(const QuantizedPanels& panels, const PanelShape& shape, const PackedRows<A>& rows,
                    const uint8_t* panel, float* c) {
  memset(c, 0, rows.num_rows * PANEL * sizeof(float));
#if defined(TANDEM_AMX)
  if constexpr (sizeof(A) == 2)
    multiply_by_tiles<KIND>(panels, shape, rows, panel, c);
  else
#endif
    multiply_by_vectors<KIND>(panels, shape, rows, panel, c);
}

// Compiled once: it is large.
template <typename A>
__attribute__((noinline)) void multiply_panel(const QuantizedPanels& panels, const PanelShape& shape,
                                              const PackedRows<A>& rows, const uint8_t* panel, float* c) {
  if (panels.codes == NIBBLES) return multiply_panel<NIBBLES>(panels, shape, rows, panel, c);
  if (panels.codes == INT8_CODES) return multiply_panel<INT8_CODES>(panels, shape, rows, panel, c);
  multiply_panel<E4M3_CODES>(panels, shape, rows, panel, c);
}
