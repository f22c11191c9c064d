// A depthwise convolution over the last tokens of each sequence, of which a state keeps the inputs
// (`workers/model/state/causal_conv.py`). Products are rounded before they are added, in the order of the tokens.

#pragma once

#include <omp.h>

#include <vector>

#include "layer_ops.h"
#include "products.h"
#include "state_blocks.h"

// `width` channels from `channel` on, and where a block of states keeps their inputs: [num_taps - 1] rows, which are
// `row_stride` apart. A state may keep copies of channels. `workers/model/state/native_conv.py` has the same structure.
struct ConvSegment {
  int64_t channel, width, place, row_stride;
};

// `workers/model/state/native_conv.py` has the same structure.
struct ConvLayer {
  const float *taps, *bias;  // [num_taps, num_channels], and [num_channels] or null
  int64_t num_taps, num_channels, is_bf16;
  int64_t is_activated;  // whether results become their SiLU
  const ConvSegment* segments;  // those that are copies behind the others
  int64_t num_segments, num_computed;
};

constexpr int64_t MOST_TAPS = 8;

template <typename T>
class CausalConv {
  const ConvLayer& layer;
  const StateBlocks& blocks;
  const StateSequences& step;
  const T* x;
  const int64_t x_stride, out_stride, num_before;
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
  CausalConv(const ConvLayer& layer, const StateBlocks& blocks, const StateSequences& step, const T* x,
             int64_t x_stride, T* out, int64_t out_stride)
      : layer(layer),
        blocks(blocks),
        step(step),
        x(x),
        x_stride(x_stride),
        out_stride(out_stride),
        num_before(layer.num_taps - 1),
        out(out) {}

  void run() const {
    static thread_local std::vector<Token> listed;
    std::vector<Token>& tokens = listed;
    tokens.clear();
    for (int32_t i = 0; i < step.num_sequences; i++)
      for (int32_t place = 0; place < step.lengths[i]; place++) tokens.push_back({i, place});
    int64_t num_tokens = tokens.size();
    if (num_tokens == step.num_sequences) return run_single();
#pragma omp parallel if (num_tokens * layer.num_channels > SERIAL_ITEMS)
    {
#pragma omp for schedule(static)
      for (int64_t unit = 0; unit < num_tokens * layer.num_computed; unit++) {
        int64_t token = unit / layer.num_computed;
        convolve(tokens[token], token, layer.segments[unit % layer.num_computed]);
      }
      // Only now has no token a use for what was kept.
#pragma omp for schedule(static)
      for (int64_t token = 0; token < num_tokens; token++)
        if (tokens[token].place + 1 == step.lengths[tokens[token].sequence])
          for (int64_t i = 0; i < layer.num_segments; i++) keep(tokens[token].sequence, token, layer.segments[i]);
    }
  }

 private:
  // Where each sequence has one token.
  void run_single() const {
#pragma omp parallel for if (step.num_sequences * layer.num_channels > SERIAL_ITEMS)
    for (int64_t unit = 0; unit < step.num_sequences * layer.num_segments; unit++) {
      int64_t sequence = unit / layer.num_segments, number = unit % layer.num_segments;
      const ConvSegment& segment = layer.segments[number];
      if (number < layer.num_computed) convolve({int32_t(sequence), 0}, sequence, segment);
      keep(sequence, sequence, segment);
    }
  }

  float* state_of(int64_t block, const ConvSegment& segment) const {
    return blocks.states + block * blocks.block_stride + segment.place;
  }

  // The input `back` tokens before a token, of some channels; one before the sequence is null.
  Source source(Token at, int64_t token, const ConvSegment& segment, int64_t back) const {
    if (back <= at.place) return {x + (token - back) * x_stride + segment.channel, nullptr};
    int64_t read = step.reads[at.sequence];
    if (read < 0) return {nullptr, nullptr};
    return {nullptr, state_of(read, segment) + (num_before + at.place - back) * segment.row_stride};
  }

  template <typename W>
  static INLINE Vec load_source(const Source& from, int64_t i, W count) {
    if (from.kept) return load_part(from.kept + i, count);
    return from.row ? load_part(from.row + i, count) : broadcast(0);
  }

  void convolve(Token at, int64_t token, const ConvSegment& segment) const {
    const float* taps = layer.taps + segment.channel;
    auto tap_part = [&](int64_t tap, int64_t i, auto count) { return load_part(taps + tap * layer.num_channels + i, count); };
    if (layer.num_taps == 4 && at.place >= num_before) {
      const T* row = x + (token - num_before) * x_stride + segment.channel;
      return sum_up(token, segment, [&](int64_t i, auto count) {
        Vec sum = load_part(row + i, count) * tap_part(0, i, count);
#pragma GCC unroll 3
        for (int tap = 1; tap < 4; tap++) sum = sum + load_part(row + tap * x_stride + i, count) * tap_part(tap, i, count);
        return sum;
      });
    }
    Source sources[MOST_TAPS];
    for (int64_t tap = 0; tap < layer.num_taps; tap++) sources[tap] = source(at, token, segment, num_before - tap);
    sum_up(token, segment, [&](int64_t i, auto count) {
      Vec sum = load_source(sources[0], i, count) * tap_part(0, i, count);
      for (int64_t tap = 1; tap < layer.num_taps; tap++)
        sum = sum + load_source(sources[tap], i, count) * tap_part(tap, i, count);
      return sum;
    });
  }

  // Writes the results of a token, whose sums without a bias are sum_at(i, width) for vectors of channels.
  template <typename SumAt>
  INLINE void sum_up(int64_t token, const ConvSegment& segment, const SumAt& sum_at) const {
    T* to = out + token * out_stride + segment.channel;
    const float* bias = layer.bias ? layer.bias + segment.channel : nullptr;
    for_vectors(segment.width, [&](int64_t i, auto count) {
      Vec sum = sum_at(i, count);
      if (bias) sum = sum + load_part(bias + i, count);
      if (layer.is_activated) sum = silu<T>(rounded<T>(sum));
      store_part(sum, to + i, count);
    });
  }

  // Leaves the last inputs of a sequence, whose last token is `token`, in its block: those of a segment.
  void keep(int64_t sequence, int64_t token, const ConvSegment& segment) const {
    Token last{int32_t(sequence), step.lengths[sequence] - 1};
    float* to = state_of(step.writes[sequence], segment);
    for (int64_t row = 0; row < num_before; row++, to += segment.row_stride) {
      Source from = source(last, token, segment, num_before - 1 - row);
      for_vectors(segment.width, [&](int64_t i, auto count) { store_part(load_source(from, i, count), to + i, count); });
    }
  }
};

extern "C" void tandem_convolve(const ConvLayer* layer, const StateBlocks* blocks, const StateSequences* step,
                                const void* x, int64_t x_stride, void* out, int64_t out_stride) {
  if (layer->is_bf16)
    CausalConv<Bf16>(*layer, *blocks, *step, (const Bf16*)x, x_stride, (Bf16*)out, out_stride).run();
  else
    CausalConv<float>(*layer, *blocks, *step, (const float*)x, x_stride, (float*)out, out_stride).run();
}

extern "C" int64_t tandem_most_taps() { return MOST_TAPS; }
