// Linear products with quantized weights: those of `products.h`, whose panels hold codes in place of numbers
// (`quantized_panel.h`).

#pragma once

#include "products.h"
#include "quantized_panel.h"

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
    PackedRows<A> packed(rows.from(row), count, shape);
    for (int64_t number = begin; number < end; number++) {
      const uint8_t* panel = static_cast<const uint8_t*>(weights.panels) + number * shape.panel_bytes;
      multiply_panel(panels, shape, packed, panel, sums);
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

// Calls `multiply(rows, num_rows, first_panel, end_panel, out)` for a part of the rows and of the panels in each
// thread, after all have prepared the Inputs of a chunk of rows. `block_rows` rows are not divided.
template <typename Inputs, typename T, typename Multiply>
void multiply_by_parts(const LinearWeights& weights, const T* x, int64_t x_stride, int64_t num_rows,
                       int64_t block_rows, Epilogue epilogue, T* out, int64_t out_stride, Multiply multiply) {
  int64_t num_panels = (weights.num_outputs + PANEL - 1) / PANEL;
  int64_t item = epilogue == STORE_FLOAT ? sizeof(float) : sizeof(T);
  for (int64_t chunk = 0; chunk < num_rows; chunk += CHUNK_ROWS) {
    int64_t rows = std::min(CHUNK_ROWS, num_rows - chunk);
    Inputs inputs(weights, x + chunk * x_stride, x_stride, rows);
    char* to = reinterpret_cast<char*>(out) + chunk * out_stride * item;
#pragma omp parallel
    {
      int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
      inputs.prepare();
      Split split(rows, block_rows, num_panels, num_threads);
      if (thread < split.rows * split.panels) {
        int64_t part = thread / split.panels, column = thread % split.panels;
        int64_t first = split.row(part, rows), last = split.row(part + 1, rows);
        int64_t begin = num_panels * column / split.panels, end = num_panels * (column + 1) / split.panels;
        multiply(inputs.rows().from(first), last - first, begin, end,
                 reinterpret_cast<T*>(to + first * out_stride * item));
      }
    }
  }
}

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
  multiply_by_parts<QuantizedInputs<T>>(
      weights, x, x_stride, num_rows, BLOCK_ROWS<Operand<T>>, epilogue, out, out_stride,
      [&](const auto& rows, int64_t num, int64_t begin, int64_t end, T* to) {
        multiply_quantized_part(weights, rows, num, begin, end, epilogue, to, out_stride);
      });
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
