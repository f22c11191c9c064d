// Linear products with packed weights: out[rows, num_outputs] from x[rows, num_inputs].
//
// Weights are panels one after another (`panel.h`), [ceil(num_outputs / 32)] of them. A thread computes a range
// of panels for all rows, so that it reads one contiguous part of the weights; with few panels a thread, rows
// are split as well. What follows a product (`Epilogue`) is computed while its results are in cache.

#pragma once

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

#include "panel.h"

enum Epilogue : int64_t {
  STORE = 0,      // out = T(sum)
  ADD = 1,        // out = T(out + T(sum))
  GATED = 2,      // out[rows, num_outputs / 2] = T(T(silu(T(gate))) * T(up)); a panel is 16 gates and 16 ups
  STORE_FLOAT = 3,  // out = sum, float
  GATED_GELU = 4    // as GATED, with the approximation of GeLU by tanh
};

constexpr bool is_gated(Epilogue epilogue) { return epilogue == GATED || epilogue == GATED_GELU; }

struct QuantizedPanels;  // of `quantized_products.h`

struct LinearWeights {
  const void* panels;
  const void* bias;  // [num_outputs] in the order of the panels' outputs, or null
  int64_t num_outputs;
  int64_t num_inputs;
  int64_t is_bf16;  // of rows, and of panels unless these are quantized
  const QuantizedPanels* quantized;  // the form of panels of codes, or null
};

// Memory that grows to what was needed most, aligned to a cache line.
class Scratch {
 public:
  float* floats(int64_t count) {
    if (count > count_) {
      free(memory_);
      memory_ = static_cast<float*>(aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64));
      count_ = count;
    }
    return memory_;
  }
  ~Scratch() { free(memory_); }

 private:
  float* memory_ = nullptr;
  int64_t count_ = 0;
};

inline thread_local Scratch operand_scratch, sum_scratch, panel_scratch;

// Rows that take turns with a panel: their inputs stay in a core's second cache beside a panel and the next one.
// The sums of SUM_ROWS of them are kept before the epilogue.
#if defined(TANDEM_AMX)
constexpr int64_t GROUP_ROWS = 768;
constexpr int64_t GROUP_BYTES = 1 << 20;  // of 2 MiB; tiles are so fast that weights must be read few times
constexpr int64_t SUM_ROWS = 128;         // 16 KiB of the first cache
constexpr int64_t ROW_STEP = TILE_BLOCK_ROWS;
constexpr int64_t NEAR_BYTES = 2 << 10;
#else
constexpr int64_t GROUP_ROWS = 240;
constexpr int64_t GROUP_BYTES = 256 << 10;
constexpr int64_t SUM_ROWS = GROUP_ROWS;
constexpr int64_t ROW_STEP = 48;  // whole blocks of 6 and 12 rows
constexpr int64_t NEAR_BYTES = 64 << 10;
#endif
constexpr int64_t CHUNK_ROWS = 1024;
// More rows than these share a panel that is unpacked first, this many inputs at a time; fewer take it as it is.
constexpr int64_t MOST_PACKED_ROWS = LANES == 16 ? 96 : 42;
constexpr int64_t UNPACKED_INPUTS = LANES == 16 ? 512 : 256;

// x / (1 + exp(-z)); 0 for z below -86.6; NaN stays NaN. A value that becomes a bfloat16 takes the shorter way: its
// relative error is up to 1e-5 where it is least.
template <typename T>
INLINE Vec times_sigmoid(Vec x, Vec z) {
  constexpr float least = -86.6f;
  Vec power;
  if constexpr (sizeof(T) == 2) {
    Vec exponent = z * broadcast(-1.44269504f);
    power = exp2_normal(vmin(broadcast(-least * 1.44269504f), vmax(broadcast(-126.0f), exponent)));
  } else {
    power = vexp(broadcast(0) - z);
  }
  return zero_below(least, z, quotient(x, broadcast(1) + power));
}

template <typename T>
INLINE Vec silu(Vec x) {
  return times_sigmoid<T>(x, x);
}

// x / 2 * (1 + tanh(y)) is x * sigmoid(2 * y).
template <typename T>
INLINE Vec gelu(Vec x) {
  constexpr float root = 0.7978845608f;  // of 2 / pi
  Vec cube = x * x * x;
  return times_sigmoid<T>(x, broadcast(2 * root) * fma(cube, broadcast(0.044715f), x));
}

// Writes combine(gate, up), for `columns` of the gates and ups among the sums c[rows, 32] of a panel; `bias` is the
// panel's, or null.
template <typename T, typename Combine>
INLINE void finish_gates(const float* c, int64_t rows, const T* bias, int64_t columns, T* out, int64_t out_stride,
                         const Combine& combine) {
  constexpr int64_t half = PANEL / 2;
  auto value = [&](const float* sums, int64_t v) {
    return rounded<T>(bias ? load(sums + v) + load(bias + v) : load(sums + v));
  };
  for (int64_t m = 0; m < rows; m++, c += PANEL) {
    T* to = out + m * out_stride;
    for (int64_t v = 0; v < half && v < columns; v += LANES) {
      Vec result = combine(value(c, v), value(c, v + half));
      if (columns - v >= LANES)
        store(result, to + v);
      else
        store(result, to + v, columns - v);
    }
  }
}

// The same with an activation of the gate, which is decided once: within the loop, several might be computed.
template <typename T>
void finish_gates(const float* c, int64_t rows, const T* bias, int64_t columns, T* out, int64_t out_stride,
                  bool is_gelu) {
  if (is_gelu)
    finish_gates(c, rows, bias, columns, out, out_stride,
                 [](Vec gate, Vec up) { return rounded<T>(gelu<T>(gate)) * up; });
  else
    finish_gates(c, rows, bias, columns, out, out_stride,
                 [](Vec gate, Vec up) { return rounded<T>(silu<T>(gate)) * up; });
}

// Writes sums c[rows, 32] of panel `number` to the output.
template <typename T>
void finish_panel(const float* c, int64_t rows, const LinearWeights& weights, int64_t number, Epilogue epilogue,
                  void* out, int64_t out_stride) {
  int64_t first = number * PANEL, left = weights.num_outputs - first;
  const T* bias = static_cast<const T*>(weights.bias);
  if (is_gated(epilogue)) {
    int64_t column = number * PANEL / 2;
    return finish_gates(c, rows, bias ? bias + first : nullptr, weights.num_outputs / 2 - column,
                        static_cast<T*>(out) + column, out_stride, epilogue == GATED_GELU);
  }
  auto value = [&](const float* row, int64_t v, int64_t width) {
    Vec sum = load(row + v);
    return bias ? sum + load(bias + first + v, width) : sum;
  };
  for (int64_t m = 0; m < rows; m++, c += PANEL) {
    for (int64_t v = 0; v < PANEL && v < left; v += LANES) {
      int64_t width = left - v < LANES ? left - v : LANES, at = m * out_stride + first + v;
      Vec result = value(c, v, width);
      if (epilogue == STORE_FLOAT) {
        store(result, static_cast<float*>(out) + at, width);
        continue;
      }
      T* to = static_cast<T*>(out) + at;
      if (epilogue == ADD) result = load(to, width) + rounded<T>(result);
      if (width == LANES)
        store(result, to);
      else
        store(result, to, width);
    }
  }
}

// c[rows, 32] = a[rows, k] x panel, as `multiply`; what many rows use is unpacked first.
template <typename A, typename W>
void multiply_group(const A* a, int64_t stride, int64_t rows, const W* panel, int64_t k, float* c, Ahead ahead) {
  constexpr bool is_narrow = sizeof(A) > sizeof(W);
  constexpr bool has_halves = LANES == 8 && sizeof(A) == 4;
  if ((is_narrow || has_halves) && rows > MOST_PACKED_ROWS) {
    float* unpacked = panel_scratch.floats(2 * PANEL * UNPACKED_INPUTS);
    float* halves = unpacked + PANEL * UNPACKED_INPUTS;
    for (int64_t begin = 0; begin < k; begin += UNPACKED_INPUTS) {
      int64_t count = k - begin < UNPACKED_INPUTS ? k - begin : UNPACKED_INPUTS;
      const float* block = unpacked;
      if constexpr (is_narrow)
        widen_panel(panel + begin * PANEL, count, unpacked);
      else
        block = reinterpret_cast<const float*>(panel) + begin * PANEL;
      const float* from = reinterpret_cast<const float*>(a) + begin;
      if constexpr (has_halves) {
        constexpr int64_t half = PANEL / 2;
        for (int64_t part = 0; part < PANEL; part += half) {
          for (int64_t i = 0; i < count; i++)
            for (int64_t v = 0; v < half; v += LANES) store(load(block + i * PANEL + part + v), halves + i * half + v);
          multiply_half_by_vectors(from, stride, rows, halves, count, c + part, PANEL, begin > 0);
        }
      } else {
        multiply(from, stride, rows, block, count, c, PANEL, begin > 0, ahead);
        ahead = {};
      }
    }
    return;
  }
  multiply(a, stride, rows, panel, k, c, PANEL, false, ahead);
}

// Rows whose thread has them alone: they are many enough to be cut anywhere, not only between blocks. What is
// computed of them next, row by row, finds them in the caches of that thread's core. With tiles, or where panels are
// unpacked, fewer passes over the weights count for more.
#if defined(TANDEM_BF16_PRODUCTS) && !defined(TANDEM_AMX)
constexpr int64_t OWN_ROWS = 96;
#else
constexpr int64_t OWN_ROWS = INT64_MAX;
#endif

// How many threads share the rows, and how many the panels: the split with the least work for a thread.
struct Split {
  int64_t rows = 1, panels = 1;

  Split(int64_t num_rows, int64_t block_rows, int64_t num_panels, int64_t num_threads) {
    int64_t least = INT64_MAX;
    for (int64_t parts = 1; parts <= num_threads; parts++) {
      int64_t panel_parts = num_threads / parts < num_panels ? num_threads / parts : num_panels;
      bool is_own = parts > 1 && num_rows / parts >= OWN_ROWS;
      int64_t step = is_own ? 1 : block_rows, blocks = (num_rows + step - 1) / step;
      int64_t work = (blocks + parts - 1) / parts * step * ((num_panels + panel_parts - 1) / panel_parts);
      if (work < least || (work == least && is_own)) least = work, rows = parts, panels = panel_parts, step_ = step;
    }
  }

  // The first row of a part.
  int64_t row(int64_t part, int64_t num_rows) const {
    int64_t blocks = (num_rows + step_ - 1) / step_;
    return std::min(num_rows, blocks * part / rows * step_);
  }

 private:
  int64_t step_ = 1;
};

// The rows of a group, of so many with k inputs each: groups are as equal as can be.
template <typename T, typename A>
int64_t group_rows(int64_t rows, int64_t k) {
  // What is unpacked is read part of k by part of k, so that more rows fit.
  constexpr bool unpacks = sizeof(A) > sizeof(T) || (LANES == 8 && sizeof(A) == 4);
  int64_t most = unpacks ? GROUP_ROWS : GROUP_BYTES / (k * int64_t(sizeof(A))) / ROW_STEP * ROW_STEP;
  most = most < ROW_STEP ? ROW_STEP : most > GROUP_ROWS ? GROUP_ROWS : most;
  int64_t num_groups = (rows + most - 1) / most;
  return (rows + num_groups * ROW_STEP - 1) / (num_groups * ROW_STEP) * ROW_STEP;
}

template <typename T, typename A>
void multiply_part(const LinearWeights& weights, const A* a, int64_t stride, int64_t rows, int64_t begin,
                   int64_t end, Epilogue epilogue, T* out, int64_t out_stride) {
  int64_t k = weights.num_inputs, panel_size = k * PANEL, panel_bytes = panel_size * sizeof(T);
  int64_t pairs = sizeof(T) == 2 ? k / 2 : k;
  const T* panels = static_cast<const T*>(weights.panels);
  int64_t item = epilogue == STORE_FLOAT ? sizeof(float) : sizeof(T);
  float* sums = sum_scratch.floats(SUM_ROWS * PANEL);
  TileScope tiles;
  int64_t group = group_rows<T, A>(rows, k);
  for (int64_t row = 0; row < rows; row += group) {
    int64_t count = rows - row < group ? rows - row : group;
    for (int64_t number = begin; number < end; number++) {
      const T* panel = panels + number * panel_size;
      Ahead ahead;
      // One block of rows: its own stream, a fixed distance ahead. Several: the next panel, spread over them.
      int64_t distance = rows <= BLOCK_ROWS<A> && NEAR_BYTES < panel_bytes ? NEAR_BYTES : panel_bytes;
      if (number * panel_bytes + distance < end * panel_bytes)
        ahead = {reinterpret_cast<const char*>(panel) + distance, panel_bytes / pairs};
      for (int64_t first = row; first < row + count; first += SUM_ROWS) {
        int64_t part = row + count - first < SUM_ROWS ? row + count - first : SUM_ROWS;
        Ahead its = {ahead.at + (first - row) * panel_bytes / count, ahead.step * part / count};
        T* rows_out = reinterpret_cast<T*>(reinterpret_cast<char*>(out) + first * out_stride * item);
        if (part > BLOCK_ROWS<A>)
          for (int64_t m = 0; m < part; m++)
            __builtin_prefetch((char*)rows_out + (m * out_stride + number * (is_gated(epilogue) ? PANEL / 2 : PANEL)) * item, 1);
        multiply_group(a + first * stride, stride, part, panel, k, sums, its);
        finish_panel<T>(sums, part, weights, number, epilogue, rows_out, out_stride);
      }
    }
  }
}

template <typename T>
void quantized_linear(const LinearWeights& weights, const T* x, int64_t x_stride, int64_t num_rows, Epilogue epilogue,
                      T* out, int64_t out_stride);
template <typename T>
void gather_quantized(const LinearWeights& weights, const int64_t* ids, int64_t count, T* out, int64_t out_stride);

template <typename T>
void linear(const LinearWeights& weights, const T* x, int64_t x_stride, int64_t num_rows, Epilogue epilogue, T* out,
            int64_t out_stride) {
  if (weights.quantized) return quantized_linear(weights, x, x_stride, num_rows, epilogue, out, out_stride);
  using A = Operand<T>;
  constexpr bool widens = sizeof(A) != sizeof(T);
  int64_t num_panels = (weights.num_outputs + PANEL - 1) / PANEL, k = weights.num_inputs;
  int64_t item = epilogue == STORE_FLOAT ? sizeof(float) : sizeof(T);
  for (int64_t chunk = 0; chunk < num_rows; chunk += CHUNK_ROWS) {
    int64_t rows = num_rows - chunk < CHUNK_ROWS ? num_rows - chunk : CHUNK_ROWS;
    const T* from = x + chunk * x_stride;
    T* to = reinterpret_cast<T*>(reinterpret_cast<char*>(out) + chunk * out_stride * item);
    float* widened = widens ? operand_scratch.floats(rows * k) : nullptr;
#pragma omp parallel
    {
      int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
      if constexpr (widens) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) widen_row(from + row * x_stride, k, widened + row * k);
      }
      Split split(rows, BLOCK_ROWS<A>, num_panels, num_threads);
      if (thread < split.rows * split.panels) {
        int64_t part = thread / split.panels, column = thread % split.panels;
        int64_t first = split.row(part, rows), last = split.row(part + 1, rows);
        int64_t begin = num_panels * column / split.panels, end = num_panels * (column + 1) / split.panels;
        T* rows_out = reinterpret_cast<T*>(reinterpret_cast<char*>(to) + first * out_stride * item);
        if constexpr (widens)
          multiply_part<T>(weights, widened + first * k, k, last - first, begin, end, epilogue, rows_out, out_stride);
        else
          multiply_part<T>(weights, from + first * x_stride, x_stride, last - first, begin, end, epilogue, rows_out,
                           out_stride);
      }
    }
  }
}

// Packs rows [count, num_inputs] as the outputs from `first` on, a multiple of 32 or, when `half` is 16, of 16:
// then they become the first (`offset` 0) or second (`offset` 16) halves of the panels. T{} fills the rest.
template <typename T>
void pack_rows(const T* rows, int64_t row_stride, int64_t count, int64_t k, int64_t width, int64_t offset, T* panels) {
  constexpr int64_t pair = 4 / sizeof(T);
  int64_t padded = (k + pair - 1) / pair * pair, num_panels = (count + width - 1) / width;
#pragma omp parallel for schedule(static)
  for (int64_t number = 0; number < num_panels; number++) {
    int64_t left = count - number * width < width ? count - number * width : width;
    pack_outputs(rows + number * width * row_stride, row_stride, left, k, panels + number * padded * PANEL + offset * pair,
                 width);
  }
}

// out[i, num_inputs] = output ids[i] of the weights: an embedding that is tied to the head.
template <typename T>
void gather_outputs(const LinearWeights& weights, const int64_t* ids, int64_t count, T* out, int64_t out_stride) {
  if (weights.quantized) return gather_quantized(weights, ids, count, out, out_stride);
  constexpr int64_t pair = 4 / sizeof(T);
  const T* panels = static_cast<const T*>(weights.panels);
#pragma omp parallel for schedule(static) if (count > 4)
  for (int64_t i = 0; i < count; i++) {
    const T* from = panels + ids[i] / PANEL * PANEL * weights.num_inputs + ids[i] % PANEL * pair;
    for (int64_t k = 0; k < weights.num_inputs; k += pair)
      memcpy(out + i * out_stride + k, from + k * PANEL, sizeof(uint32_t));
  }
}

// Nanoseconds of a product in cache with bfloat16 operands, and of the same with operands widened to float: of
// each the least of several, which take turns. Both 0 where products have float operands anyway, or tiles.
#if defined(TANDEM_BF16_PRODUCTS) && !defined(TANDEM_AMX)
constexpr int64_t TIMED_ROWS = 192, TIMED_INPUTS = 512, TIMED_TURNS = 9;

template <typename A>
double timed_product(const A* a, const Bf16* panel, float* sums) {
  auto began_at = std::chrono::steady_clock::now();
  multiply_group<A, Bf16>(a, TIMED_INPUTS, TIMED_ROWS, panel, TIMED_INPUTS, sums, {});
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - began_at).count();
}

extern "C" void tandem_time_operands(double* bf16_ns, double* float_ns) {
  std::vector<float> rows(TIMED_ROWS * TIMED_INPUTS, 1), sums(TIMED_ROWS * PANEL);
  std::vector<Bf16> packed(TIMED_ROWS * TIMED_INPUTS, Bf16{0x3f80}), panel(PANEL * TIMED_INPUTS, Bf16{0x3f80});
  *bf16_ns = *float_ns = INFINITY;
  for (int64_t turn = 0; turn < TIMED_TURNS; turn++) {
    *bf16_ns = std::min(*bf16_ns, timed_product(packed.data(), panel.data(), sums.data()));
    *float_ns = std::min(*float_ns, timed_product(rows.data(), panel.data(), sums.data()));
  }
}
#else
extern "C" void tandem_time_operands(double* bf16_ns, double* float_ns) { *bf16_ns = *float_ns = 0; }
#endif

extern "C" void tandem_linear(const LinearWeights* weights, const void* x, int64_t x_stride, int64_t num_rows,
                              int64_t epilogue, void* out, int64_t out_stride) {
  if (weights->is_bf16)
    linear<Bf16>(*weights, (const Bf16*)x, x_stride, num_rows, Epilogue(epilogue), (Bf16*)out, out_stride);
  else
    linear<float>(*weights, (const float*)x, x_stride, num_rows, Epilogue(epilogue), (float*)out, out_stride);
}

extern "C" void tandem_pack_rows(const void* rows, int64_t row_stride, int64_t count, int64_t num_inputs,
                                 int64_t width, int64_t offset, int64_t is_bf16, void* panels) {
  if (is_bf16)
    pack_rows((const Bf16*)rows, row_stride, count, num_inputs, width, offset, (Bf16*)panels);
  else
    pack_rows((const float*)rows, row_stride, count, num_inputs, width, offset, (float*)panels);
}

extern "C" void tandem_gather_outputs(const LinearWeights* weights, const int64_t* ids, int64_t count, void* out,
                                      int64_t out_stride) {
  if (weights->is_bf16)
    gather_outputs(*weights, ids, count, (Bf16*)out, out_stride);
  else
    gather_outputs(*weights, ids, count, (float*)out, out_stride);
}
