// The states of Mamba-2 (`workers/model/state/mamba2.py`), token by token, and the norm of what heads give.
//
// A task is one head of one sequence. Its tokens follow one another: what is computed for a token, and in which
// order, depends neither on chunks of the sequence, nor on other sequences, nor on threads. A few inputs of the state
// at a time stay in registers for all tokens; the results of tokens are added up over them in their order.

#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "layer_ops.h"
#include "products.h"
#include "state_blocks.h"

// `workers/model/state/native_mamba2.py` has the same structure.
struct ScanLayer {
  const float *step_bias, *decay, *skip;  // [num_heads]
  const int32_t* groups;                  // [num_heads]
  int64_t num_heads, head_dim, state_size, num_groups, is_bf16;
  float least_step, most_step;
};

constexpr int64_t SCAN_TOKENS = 128;               // whose operands stay in the second cache
constexpr int64_t SCAN_VECS = 2;                   // of a head's columns at a time
constexpr int64_t SCAN_INPUTS = LANES == 16 ? 8 : 4;  // of the state at a time
constexpr int64_t SCAN_WIDTH = SCAN_VECS * LANES;

inline int64_t padded_to(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

template <typename T>
class Mamba2Scan {
  const ScanLayer& layer;
  const StateBlocks& blocks;
  const StateSequences& step;
  const T *convolved, *steps;  // [num_tokens, ...], rows their strides apart
  const int64_t stride, steps_stride, dim, size, padded_dim, padded_size, heads_per_part;
  float* out;  // [num_tokens, num_heads * head_dim]

  // The operands of some tokens of a head, padded with zeros.
  struct Operands {
    std::vector<float> state, b, c, x, y, decays;

    void resize(int64_t num_tokens, int64_t dim, int64_t size) {
      for (auto* of_states : {&b, &c}) of_states->assign(num_tokens * size, 0);
      for (auto* of_heads : {&x, &y}) of_heads->assign(num_tokens * dim, 0);
      state.assign(size * dim, 0);
      decays.resize(num_tokens);
    }
  };

 public:
  // The states of heads alone, [heads_per_part, state_size, head_dim], are in each part of `blocks`.
  Mamba2Scan(const ScanLayer& layer, const StateBlocks& blocks, const StateSequences& step, const T* convolved,
             int64_t stride, const T* steps, int64_t steps_stride, float* out)
      : layer(layer),
        blocks(blocks),
        step(step),
        convolved(convolved),
        steps(steps),
        stride(stride),
        steps_stride(steps_stride),
        dim(layer.head_dim),
        size(layer.state_size),
        padded_dim(padded_to(dim, SCAN_WIDTH)),
        padded_size(padded_to(size, SCAN_INPUTS)),
        heads_per_part(layer.num_heads / blocks.num_parts),
        out(out) {}

  void run() const {
    static thread_local std::vector<int64_t> kept;
    std::vector<int64_t>& firsts = kept;
    firsts.assign(1, 0);
    for (int64_t i = 0; i < step.num_sequences; i++) firsts.push_back(firsts.back() + step.lengths[i]);
    int64_t num_tasks = step.num_sequences * layer.num_heads, most = 0;
    for (int64_t i = 0; i < step.num_sequences; i++) most = std::max<int64_t>(most, step.lengths[i]);
#pragma omp parallel if (firsts.back() * layer.num_heads * dim * size > SERIAL_ITEMS)
    {
      Operands operands;
      operands.resize(std::min(most, SCAN_TOKENS), padded_dim, padded_size);
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < num_tasks; task++)
        scan(operands, task / layer.num_heads, task % layer.num_heads, firsts[task / layer.num_heads]);
    }
  }

 private:
  void scan(Operands& operands, int64_t sequence, int64_t head, int64_t first) const {
    int64_t read = step.reads[sequence], write = step.writes[sequence];
    // States whose sizes are those of registers are read and written where they lie.
    bool in_place = dim == padded_dim && size == padded_size;
    float* to = in_place ? state_of(write, head) : operands.state.data();
    const float* from = in_place ? read < 0 ? nullptr : state_of(read, head) : to;
    if (!in_place) load_state(to, read, head);
    for (int64_t done = 0; done < step.lengths[sequence]; done += SCAN_TOKENS, from = to) {
      int64_t count = std::min<int64_t>(SCAN_TOKENS, step.lengths[sequence] - done);
      prepare(operands, head, first + done, count);
      for (int64_t column = 0; column < padded_dim; column += SCAN_WIDTH)
        for (int64_t input = 0; input < padded_size; input += SCAN_INPUTS)
          advance(operands, from, to, column, input, count);
      finish(operands, head, first + done, count);
    }
    if (!in_place) store_state(to, write, head);
  }

  float* state_of(int64_t block, int64_t head) const {
    int64_t part = head / heads_per_part, place = head % heads_per_part;
    return blocks.states + block * blocks.block_stride + part * blocks.part_stride + place * size * dim;
  }

  void load_state(float* state, int64_t block, int64_t head) const {
    std::fill(state, state + padded_size * padded_dim, 0.0f);
    if (block < 0) return;
    const float* from = state_of(block, head);
    for (int64_t n = 0; n < size; n++) memcpy(state + n * padded_dim, from + n * dim, dim * sizeof(float));
  }

  void store_state(const float* state, int64_t block, int64_t head) const {
    float* to = state_of(block, head);
    for (int64_t n = 0; n < size; n++) memcpy(to + n * dim, state + n * padded_dim, dim * sizeof(float));
  }

  static void widen(const T* from, int64_t count, float* to) {
    for_vectors(count, [&](int64_t i, auto width) { store_part(load_part(from + i, width), to + i, width); });
  }

  float time_step(const T* at, int64_t head) const {
    float value = to_float(at[head]) + layer.step_bias[head];
    if (value <= 20.0f) value = std::log1p(std::exp(value));
    return std::min(std::max(value, layer.least_step), layer.most_step);
  }

  // Fills in the operands of `count` tokens: x is times the time step.
  void prepare(Operands& operands, int64_t head, int64_t first, int64_t count) const {
    int64_t num_inner = layer.num_heads * dim, group = layer.groups[head] * size;
    std::fill(operands.y.begin(), operands.y.begin() + count * padded_dim, 0.0f);
    for (int64_t token = 0; token < count; token++) {
      const T* row = convolved + (first + token) * stride;
      float width = time_step(steps + (first + token) * steps_stride, head);
      operands.decays[token] = std::exp(width * layer.decay[head]);
      widen(row + num_inner + group, size, &operands.b[token * padded_size]);
      widen(row + num_inner + layer.num_groups * size + group, size, &operands.c[token * padded_size]);
      float* x = &operands.x[token * padded_dim];
      for_vectors(dim, [&](int64_t i, auto part) {
        store_part(load_part(row + head * dim + i, part) * broadcast(width), x + i, part);
      });
    }
  }

  // Brings some columns of some inputs of the state behind `count` tokens, and adds what they give. Without a state to
  // begin `from`, it is zero.
  void advance(Operands& operands, const float* from, float* to, int64_t column, int64_t input, int64_t count) const {
    Vec state[SCAN_INPUTS][SCAN_VECS];
    int64_t at = input * padded_dim + column;
    for (int64_t n = 0; n < SCAN_INPUTS; n++)
      for (int64_t v = 0; v < SCAN_VECS; v++)
        state[n][v] = from ? load(from + at + n * padded_dim + v * LANES) : broadcast(0);
    const float *x = &operands.x[column], *b = &operands.b[input], *c = &operands.c[input];
    float* y = &operands.y[column];
    for (int64_t token = 0; token < count; token++) {
      Vec decay = broadcast(operands.decays[token]), added[SCAN_VECS], total[SCAN_VECS];
      for (int64_t v = 0; v < SCAN_VECS; v++) added[v] = load(x + v * LANES), total[v] = load(y + v * LANES);
      for (int64_t n = 0; n < SCAN_INPUTS; n++) {
        Vec into = broadcast(b[n]), out_of = broadcast(c[n]);
        for (int64_t v = 0; v < SCAN_VECS; v++) {
          state[n][v] = fma(added[v], into, state[n][v] * decay);
          total[v] = fma(state[n][v], out_of, total[v]);
        }
      }
      for (int64_t v = 0; v < SCAN_VECS; v++) store(total[v], y + v * LANES);
      x += padded_dim, y += padded_dim, b += padded_size, c += padded_size;
    }
    for (int64_t n = 0; n < SCAN_INPUTS; n++)
      for (int64_t v = 0; v < SCAN_VECS; v++) store(state[n][v], to + at + n * padded_dim + v * LANES);
  }

  // Adds what passes by the state, and writes the results of `count` tokens.
  void finish(const Operands& operands, int64_t head, int64_t first, int64_t count) const {
    Vec skip = broadcast(layer.skip[head]);
    for (int64_t token = 0; token < count; token++) {
      const T* x = convolved + (first + token) * stride + head * dim;
      const float* y = &operands.y[token * padded_dim];
      float* to = out + ((first + token) * layer.num_heads + head) * dim;
      for_vectors(dim, [&](int64_t i, auto part) {
        store_part(fma(load_part(x + i, part), skip, load_part(y + i, part)), to + i, part);
      });
    }
  }
};

// x: [rows, columns], contiguous, becomes x * silu(gate), gates `stride` apart. Writes the sum of the squares of each
// group of columns, of these widths, to `squares` [rows, num_groups].
template <typename T>
void gate_and_square(float* x, const T* gate, int64_t stride, int64_t rows, const int64_t* widths, int64_t num_groups,
                     float* squares) {
  int64_t columns = 0;
  for (int64_t group = 0; group < num_groups; group++) columns += widths[group];
#pragma omp parallel for if (rows * columns > SERIAL_ITEMS)
  for (int64_t row = 0; row < rows; row++) {
    float* to = x + row * columns;
    const T* from = gate + row * stride;
    for (int64_t group = 0; group < num_groups; group++) {
      Vec sum = broadcast(0);
      for_vectors(widths[group], [&](int64_t i, auto width) {
        Vec value = load_part(to + i, width) * silu<float>(load_part(from + i, width));
        store_part(value, to + i, width);
        sum = fma(value, value, sum);
      });
      squares[row * num_groups + group] = sum_lanes(sum);
      to += widths[group], from += widths[group];
    }
  }
}

// x: [rows, columns], contiguous; each group of columns is scaled to unit mean square by the sums of squares, which are
// those of `group_size` columns, and then multiplied by the weight.
template <typename T>
void scale_groups(const float* x, const float* weight, const float* squares, float group_size, float eps, int64_t rows,
                  const int64_t* widths, int64_t num_groups, T* out) {
  int64_t columns = 0;
  for (int64_t group = 0; group < num_groups; group++) columns += widths[group];
#pragma omp parallel for if (rows * columns > SERIAL_ITEMS)
  for (int64_t row = 0; row < rows; row++) {
    int64_t first = row * columns;
    const float* factors = weight;
    for (int64_t group = 0; group < num_groups; group++) {
      Vec scale = broadcast(1.0f / std::sqrt(squares[row * num_groups + group] / group_size + eps));
      for_vectors(widths[group], [&](int64_t i, auto width) {
        Vec value = load_part(x + first + i, width) * scale;
        store_part(value * load_part(factors + i, width), out + first + i, width);
      });
      first += widths[group], factors += widths[group];
    }
  }
}

extern "C" void tandem_scan_mamba2(const ScanLayer* layer, const StateBlocks* blocks, const StateSequences* step,
                                   const void* convolved, int64_t stride, const void* steps, int64_t steps_stride,
                                   float* out) {
  if (layer->is_bf16)
    Mamba2Scan<Bf16>(*layer, *blocks, *step, (const Bf16*)convolved, stride, (const Bf16*)steps, steps_stride, out)
        .run();
  else
    Mamba2Scan<float>(*layer, *blocks, *step, (const float*)convolved, stride, (const float*)steps, steps_stride, out)
        .run();
}

extern "C" void tandem_gate_and_square(float* x, const void* gate, int64_t stride, int64_t rows, const int64_t* widths,
                                       int64_t num_groups, float* squares, int64_t is_bf16) {
  if (is_bf16)
    gate_and_square(x, (const Bf16*)gate, stride, rows, widths, num_groups, squares);
  else
    gate_and_square(x, (const float*)gate, stride, rows, widths, num_groups, squares);
}

extern "C" void tandem_scale_groups(const float* x, const float* weight, const float* squares, float group_size,
                                    float eps, int64_t rows, const int64_t* widths, int64_t num_groups, void* out,
                                    int64_t is_bf16) {
  if (is_bf16)
    scale_groups(x, weight, squares, group_size, eps, rows, widths, num_groups, (Bf16*)out);
  else
    scale_groups(x, weight, squares, group_size, eps, rows, widths, num_groups, (float*)out);
}
