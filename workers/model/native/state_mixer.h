// What a layer with a state does between its two products, in one call.

#pragma once

#include "causal_conv.h"
#include "delta_rule.h"
#include "gate.h"
#include "mamba2.h"

// The norm of groups of columns, of these widths: `scale_groups`.
struct GroupNorm {
  const float* weight;  // [num_columns]
  const int64_t* widths;
  int64_t num_groups;
  float group_size, eps;
};

// Channels are convolved, and are then tokens of the delta rule, or of Mamba-2, whose results `norm` normalizes.
// Without either they are gated before and behind the convolution. `workers/model/state/packed_mixer.py` has the same
// structures.
struct StateMixer {
  const ConvLayer* conv;
  const DeltaLayer* delta;
  const ScanLayer* scan;
  const GroupNorm* norm;
  StateBlocks blocks;
  int64_t num_kept;  // elements of each part of a state that are the convolution's, before those of heads
};

inline thread_local Scratch scan_scratch;

// `projected` [rows, ...], rows `stride` apart, is the product of hidden states; `convolved` [rows, num_channels] is
// scratch memory; `mixed` [rows, num_mixed] is the result.
template <typename T>
void mix_by_state(const StateMixer& mixer, const StateSequences& step, T* projected, int64_t stride, int64_t rows,
                  T* convolved, T* mixed, int64_t num_mixed) {
  const StateBlocks& blocks = mixer.blocks;
  StateBlocks of_heads = blocks;
  of_heads.states += mixer.num_kept;
  int64_t channels = mixer.conv->num_channels;
  if (mixer.delta) {
    const T *gates = projected + channels, *betas = gates + num_mixed, *decays = betas + mixer.delta->num_value_heads;
    CausalConv<T>(*mixer.conv, blocks, step, projected, stride, convolved, channels).run();
    DeltaRows given{convolved, gates, betas, decays, channels, stride, stride, stride};
    DeltaRule<T>(*mixer.delta, given, of_heads, step, mixed, num_mixed).run();
  } else if (mixer.scan) {
    const GroupNorm& norm = *mixer.norm;
    const T *to_convolve = projected + num_mixed, *steps = to_convolve + channels;
    float *sums = scan_scratch.floats(rows * (num_mixed + norm.num_groups)), *squares = sums + rows * num_mixed;
    CausalConv<T>(*mixer.conv, blocks, step, to_convolve, stride, convolved, channels).run();
    Mamba2Scan<T>(*mixer.scan, of_heads, step, convolved, channels, steps, stride, sums).run();
    gate_and_square(sums, projected, stride, rows, norm.widths, norm.num_groups, squares);
    scale_groups(sums, norm.weight, squares, norm.group_size, norm.eps, rows, norm.widths, norm.num_groups, mixed);
  } else {
    multiply_by(projected, stride, projected + 2 * channels, stride, rows, channels);
    CausalConv<T>(*mixer.conv, blocks, step, projected, stride, mixed, num_mixed).run();
    multiply_by(mixed, num_mixed, projected + channels, stride, rows, channels);
  }
}
