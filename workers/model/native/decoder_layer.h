// A decoder layer in one call: a step of few tokens takes less time than the calls of its parts from Python.

#pragma once

#include "attention.h"
#include "gate.h"
#include "layer_ops.h"
#include "mixture.h"
#include "products.h"
#include "state_mixer.h"

// Norms without weights are left out. `workers/model/native_layers.py` has the same structures.
struct DecoderLayer {
  // A layer without a feed-forward has no `down`. One with a `mixture` has it in place of its feed-forward; `gate_up`
  // and `down` are then of the experts that all tokens share, or null, and the sigmoid of the product `shared_gate`, of
  // one output, multiplies their result, unless that is null.
  // `others` are further outputs behind those of `qkv`, of a form of their own, or null.
  const LinearWeights *qkv, *others, *output, *gate_up, *down, *shared_gate;
  const Mixture* mixture;
  const StateMixer* state;  // mixes tokens in place of attention, or null
  // Of what attention and feed-forward take from the hidden states, and of what they add to these: of hidden_size.
  Norm attention_input, attention_output, feed_forward_input, feed_forward_output;
  Norm query_rows, key_rows;  // of all queries, and of all keys, of a token
  const RotatedLayer* rotated;
  const float* sinks;  // of attention, or null
  int64_t index;       // in the rank's KV
  int64_t activation;  // an `Epilogue`
  int64_t is_gated;    // whether gates of what attention gives are behind queries, keys and values
};

// A step: what its layers share, and scratch memory for them. `pieces` counts what is done, for another thread.
struct LayerStep {
  const RotatedTokens* tokens;      // of the layer, if it attends
  const StateSequences* sequences;  // of layers with a state
  int64_t num_rows;
  void *normed, *qkv, *mixed, *gated, *sums, *convolved;  // a row for each token, of the width that the weights have
  int64_t* pieces;
  int64_t piece_tasks;  // tasks of attention that are one piece
};

inline void count_piece(int64_t* pieces) { __atomic_add_fetch(pieces, 1, __ATOMIC_RELAXED); }

// A product of hidden states [rows, num_inputs], rows `stride` apart, after their norm.
template <typename T>
void normed_product(const LinearWeights& weights, const Norm& norm, const T* hidden, int64_t stride, T* normed,
                    int64_t rows, Epilogue epilogue, T* out, int64_t out_stride) {
  int64_t size = weights.num_inputs;
  if (!norm.weight) return linear(weights, hidden, stride, rows, epilogue, out, out_stride);
  rms_norm(hidden, stride, norm, normed, size, rows, size);
  linear(weights, normed, size, rows, epilogue, out, out_stride);
}

// Adds a product of x [rows, num_inputs], or its norm, to hidden states.
template <typename T>
void add_product(const LinearWeights& weights, const Norm& norm, const T* x, T* scratch, int64_t rows, T* hidden,
                 int64_t stride) {
  if (!norm.weight) return linear(weights, x, weights.num_inputs, rows, ADD, hidden, stride);
  linear(weights, x, weights.num_inputs, rows, STORE, scratch, weights.num_outputs);
  add_normed(scratch, norm, hidden, stride, rows, weights.num_outputs);
}

inline thread_local Scratch gate_scratch;

// Adds the experts of hidden states [rows, hidden_size], and those that all tokens share, as `add_product` adds one.
template <typename T>
void add_mixture(const DecoderLayer& layer, const LayerStep& step, int64_t rows, T* hidden, int64_t stride) {
  T *normed = (T*)step.normed, *gated = (T*)step.gated, *sums = (T*)step.sums;
  const Norm &input = layer.feed_forward_input, &output = layer.feed_forward_output;
  int64_t size = layer.mixture->router->num_inputs, x_stride = size;
  const T* x = normed;
  if (input.weight)
    rms_norm(hidden, stride, input, normed, size, rows, size);
  else
    x = hidden, x_stride = stride;
  if (!layer.down && !output.weight) {
    run_mixture(*layer.mixture, x, x_stride, rows, true, hidden, stride);
    count_piece(step.pieces);
    return;
  }
  run_mixture(*layer.mixture, x, x_stride, rows, false, sums, size);
  count_piece(step.pieces);
  if (layer.down)
    linear(*layer.gate_up, x, x_stride, rows, Epilogue(layer.activation), gated, layer.down->num_inputs);
  if (layer.down && layer.shared_gate) {
    T* gates = reinterpret_cast<T*>(gate_scratch.floats(rows));
    linear(*layer.shared_gate, x, x_stride, rows, STORE, gates, 1);
    linear(*layer.down, gated, layer.down->num_inputs, rows, STORE, normed, size);
    scale_by_sigmoid(normed, size, gates, rows, size);
    add_rows(normed, rows, size, sums, size);
  } else if (layer.down) {
    linear(*layer.down, gated, layer.down->num_inputs, rows, ADD, sums, size);
  }
  if (output.weight)
    add_normed(sums, output, hidden, stride, rows, size);
  else
    add_rows(sums, rows, size, hidden, stride);
}

// Attends from `qkv` [num_rows, qkv_size], which is overwritten.
template <typename T>
void attend_tokens(const DecoderLayer& layer, const LayerStep& step, const AttentionStep& attention, T* qkv,
                   int64_t qkv_size, T* mixed) {
  int64_t rows = step.num_rows, num_mixed = layer.output->num_inputs;
  if (layer.query_rows.weight) {
    const RotatedLayer& heads = *layer.rotated;
    int64_t queries = heads.num_heads * heads.head_dim, keys = heads.num_kv_heads * heads.head_dim;
    rms_norm(qkv, qkv_size, layer.query_rows, qkv, qkv_size, rows, queries);
    rms_norm(qkv + queries, qkv_size, layer.key_rows, qkv + queries, qkv_size, rows, keys);
  }
  count_piece(step.pieces);
  write_tokens(*layer.rotated, *step.tokens, qkv, qkv_size);
  with_elements<T>(attention.kv_elements, [&](auto element) {
    Attention<T, decltype(element)> attend(attention, layer.index, qkv_size, layer.sinks);
    for (int64_t begin = 0; begin < attention.num_tasks; begin += step.piece_tasks) {
      attend.run(qkv, mixed, begin, std::min(begin + step.piece_tasks, attention.num_tasks));
      count_piece(step.pieces);
    }
  });
  if (layer.is_gated) multiply_by_sigmoids(mixed, num_mixed, qkv + qkv_size - num_mixed, qkv_size, rows, num_mixed);
}

// hidden: [rows, hidden_size], rows `stride` apart; what the layer mixes of tokens, and its feed-forward, are added to
// it. `attention` is null where a state mixes them.
template <typename T>
void run_layer(const DecoderLayer& layer, const LayerStep& step, const AttentionStep* attention, T* hidden,
               int64_t stride) {
  T *normed = (T*)step.normed, *qkv = (T*)step.qkv, *mixed = (T*)step.mixed, *gated = (T*)step.gated;
  const Norm& input = layer.attention_input;
  int64_t rows = step.num_rows, first_size = layer.qkv->num_outputs, size = layer.qkv->num_inputs;
  int64_t qkv_size = first_size + (layer.others ? layer.others->num_outputs : 0);

  normed_product(*layer.qkv, input, hidden, stride, normed, rows, STORE, qkv, qkv_size);
  if (layer.others && input.weight)
    linear(*layer.others, normed, size, rows, STORE, qkv + first_size, qkv_size);
  else if (layer.others)
    linear(*layer.others, hidden, stride, rows, STORE, qkv + first_size, qkv_size);
  if (layer.state) {
    count_piece(step.pieces);
    T* convolved = (T*)step.convolved;
    mix_by_state(*layer.state, *step.sequences, qkv, qkv_size, rows, convolved, mixed, layer.output->num_inputs);
    count_piece(step.pieces);
  } else {
    attend_tokens(layer, step, *attention, qkv, qkv_size, mixed);
  }
  add_product(*layer.output, layer.attention_output, mixed, normed, rows, hidden, stride);
  count_piece(step.pieces);
  if (layer.mixture) return add_mixture(layer, step, rows, hidden, stride);
  if (!layer.down) return;
  int64_t gated_size = layer.down->num_inputs;
  normed_product(*layer.gate_up, layer.feed_forward_input, hidden, stride, normed, rows, Epilogue(layer.activation),
                 gated, gated_size);
  count_piece(step.pieces);
  add_product(*layer.down, layer.feed_forward_output, gated, normed, rows, hidden, stride);
}

extern "C" void tandem_run_layer(const DecoderLayer* layer, const LayerStep* step, const AttentionStep* attention,
                                 void* hidden, int64_t stride) {
  if (layer->qkv->is_bf16)
    run_layer(*layer, *step, attention, (Bf16*)hidden, stride);
  else
    run_layer(*layer, *step, attention, (float*)hidden, stride);
}
