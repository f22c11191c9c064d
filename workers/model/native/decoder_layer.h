// A decoder layer in one call: a step of few tokens takes less time than the calls of its parts from Python.

#pragma once

#include "attention.h"
#include "layer_ops.h"
#include "products.h"

// `workers/model/native_layers.py` has the same structures.
struct DecoderLayer {
  const LinearWeights *qkv, *output, *gate_up, *down;
  const void *input_norm, *post_norm;  // [hidden_size]
  const RotatedLayer* rotated;
  int64_t index;  // in the rank's KV
  float eps;
};

// A step: what its layers share, and scratch memory for them. `pieces` counts what is done, for another thread.
struct LayerStep {
  const RotatedTokens* tokens;
  void *normed, *qkv, *mixed, *gated;  // a row for each token, of the width that the weights have
  int64_t* pieces;
  int64_t piece_tasks;  // tasks of attention that are one piece
};

inline void count_piece(int64_t* pieces) { __atomic_add_fetch(pieces, 1, __ATOMIC_RELAXED); }

// hidden: [rows, hidden_size], rows `stride` apart; the layer's attention and feed-forward are added to it.
template <typename T>
void run_layer(const DecoderLayer& layer, const LayerStep& step, const AttentionStep& attention, T* hidden,
               int64_t stride) {
  T *normed = (T*)step.normed, *qkv = (T*)step.qkv, *mixed = (T*)step.mixed, *gated = (T*)step.gated;
  int64_t rows = step.tokens->num_rows, size = layer.qkv->num_inputs, qkv_size = layer.qkv->num_outputs;
  int64_t mixed_size = layer.output->num_inputs, gated_size = layer.down->num_inputs;

  rms_norm(hidden, stride, (const T*)layer.input_norm, normed, size, rows, size, layer.eps);
  linear(*layer.qkv, normed, size, rows, STORE, qkv, qkv_size);
  count_piece(step.pieces);
  rotate_and_write(*layer.rotated, *step.tokens, qkv, qkv_size);
  Attention<T> attend(attention, layer.index, qkv_size);
  for (int64_t begin = 0; begin < attention.num_tasks; begin += step.piece_tasks) {
    attend.run(qkv, mixed, begin, std::min(begin + step.piece_tasks, attention.num_tasks));
    count_piece(step.pieces);
  }
  linear(*layer.output, mixed, mixed_size, rows, ADD, hidden, stride);
  count_piece(step.pieces);
  rms_norm(hidden, stride, (const T*)layer.post_norm, normed, size, rows, size, layer.eps);
  linear(*layer.gate_up, normed, size, rows, GATED, gated, gated_size);
  count_piece(step.pieces);
  linear(*layer.down, gated, gated_size, rows, ADD, hidden, stride);
}

extern "C" void tandem_run_layer(const DecoderLayer* layer, const LayerStep* step, const AttentionStep* attention,
                                 void* hidden, int64_t stride) {
  if (layer->qkv->is_bf16)
    run_layer(*layer, *step, *attention, (Bf16*)hidden, stride);
  else
    run_layer(*layer, *step, *attention, (float*)hidden, stride);
}
