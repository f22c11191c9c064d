// A depthwise convolution over the last tokens of each sequence, of which a state keeps the inputs
// (`workers/model/state/causal_conv.py`). Products are rounded before they are added, in the order of the tokens.

#pragma once

#include <omp.h>

#include <vector>

#include "layer_ops.h"
#include "products.h"

// `workers/model/state/native_conv.py` has the same structure.
struct ConvStep {
  const float *taps, *bias;  // [num_taps, num_channels], and [num_channels] or null
  int64_t num_taps, num_channels, is_bf16;
  int64_t is_activated;  // whether results become their SiLU
  // The layer's states in the first block: each part begins with [num_taps - 1, num_channels / num_parts].
  float* states;
  int64_t block_stride, part_stride, num_parts;
  // As in `DeltaStep`.
  const int32_t *reads, *writes, *lengths;
  int64_t num_sequences;
};

constexpr int64_t MOST_TAPS = 8;

template <typename T>
class CausalConv {
  const ConvStep& step;
  const T* x;
  const int64_t x_stride, out_stride, num_before, width;
  T* out;

  // A token: its sequence, and how many of this step are before it there.
  struct Token {
    int32_t sequence, place;
  };

  // Where an input of some channels comes from.
  struct Source {
    const T* row;
    const float* kept;  // null: it is the row
  };

 public:
  CausalConv(const ConvStep& step, const T* x, int64_t x_stride, T* out, int64_t out_stride)
      : step(step),
        x(x),
        x_stride(x_stride),
        out_stride(out_stride),
        num_before(step.num_taps - 1),
        width(step.num_channels / step.num_parts),
        out(out) {}

  void run() const {
    static thread_local std::vector<Token> listed;
    std::vector<Token>& tokens = listed;
    tokens.clear();
    for (int32_t i = 0; i < step.num_sequences; i++)
      for (int32_t place = 0; place < step.lengths[i]; place++) tokens.push_back({i, place});
    int64_t num_tokens = tokens.size();
#pragma omp parallel if (num_tokens * step.num_channels > SERIAL_ITEMS)
    {
#pragma omp for schedule(static)
      for (int64_t unit = 0; unit < num_tokens * step.num_parts; unit++)
        convolve(tokens[unit / step.num_parts], unit / step.num_parts, unit % step.num_parts);
      // Only now has no token a use for what was kept.
#pragma omp for schedule(static)
      for (int64_t token = 0; token < num_tokens; token++)
        if (tokens[token].place + 1 == step.lengths[tokens[token].sequence]) keep(tokens[token].sequence, token);
    }
  }

 private:
  float* state_of(int64_t block, int64_t part) const {
    return step.states + block * step.block_stride + part * step.part_stride;
  }

  // The input `back` tokens before a token, of the channels of a part; one before the sequence is null.
  Source source(Token at, int64_t token, int64_t part, int64_t back) const {
    if (back <= at.place) return {x + (token - back) * x_stride + part * width, nullptr};
    int64_t read = step.reads[at.sequence];
    if (read < 0) return {nullptr, nullptr};
    return {nullptr, state_of(read, part) + (num_before + at.place - back) * width};
  }

  template <typename W>
  static INLINE Vec load_source(const Source& from, int64_t i, W count) {
    if (from.kept) return load_part(from.kept + i, count);
    return from.row ? load_part(from.row + i, count) : broadcast(0);
  }

  void convolve(Token at, int64_t token, int64_t part) const {
    Source sources[MOST_TAPS];
    for (int64_t tap = 0; tap < step.num_taps; tap++) sources[tap] = source(at, token, part, num_before - tap);
    T* to = out + token * out_stride + part * width;
    const float* taps = step.taps + part * width;
    for_vectors(width, [&](int64_t i, auto count) {
      Vec sum = load_source(sources[0], i, count) * load_part(taps + i, count);
      for (int64_t tap = 1; tap < step.num_taps; tap++)
        sum = sum + load_source(sources[tap], i, count) * load_part(taps + tap * step.num_channels + i, count);
      if (step.bias) sum = sum + load_part(step.bias + part * width + i, count);
      if (step.is_activated) sum = silu<float>(rounded<T>(sum));
      store_part(sum, to + i, count);
    });
  }

  // Leaves the last inputs of a sequence, whose last token is `token`, in its block.
  void keep(int64_t sequence, int64_t token) const {
    Token last{int32_t(sequence), step.lengths[sequence] - 1};
    for (int64_t part = 0; part < step.num_parts; part++) {
      float* to = state_of(step.writes[sequence], part);
      for (int64_t row = 0; row < num_before; row++, to += width) {
        Source from = source(last, token, part, num_before - 1 - row);
        for_vectors(width, [&](int64_t i, auto count) { store_part(load_source(from, i, count), to + i, count); });
      }
    }
  }
};

extern "C" void tandem_convolve(const ConvStep* step, const void* x, int64_t x_stride, void* out, int64_t out_stride) {
  if (step->is_bf16)
    CausalConv<Bf16>(*step, (const Bf16*)x, x_stride, (Bf16*)out, out_stride).run();
  else
    CausalConv<float>(*step, (const float*)x, x_stride, (float*)out, out_stride).run();
}

extern "C" int64_t tandem_most_taps() { return MOST_TAPS; }
