// Products of heads: each head of a token's inputs with a weight of its own.
//
// The panels of a head (`panel.h`) follow those of the head before. A row's result depends on nothing but its
// inputs, as in `products.h`. A thread takes some rows of one head at a time.

#pragma once

#include "products.h"

constexpr int64_t HEAD_ROWS = 240;  // rows of a head that a thread takes, whole blocks of 6 and 12

// Distances in elements from a token, and from a head, to the next.
struct HeadStrides {
  int64_t token, head;
};

// out[rows, heads, num_outputs] from x[rows, heads, num_inputs], where `weights` are those of the first head.
template <typename T>
void multiply_heads(const LinearWeights& weights, int64_t num_heads, const T* x, HeadStrides from, int64_t num_rows,
                    T* out, HeadStrides to) {
  using A = Operand<T>;
  constexpr bool widens = sizeof(A) != sizeof(T);
  int64_t num_panels = (weights.num_outputs + PANEL - 1) / PANEL, k = weights.num_inputs;
  int64_t num_parts = (num_rows + HEAD_ROWS - 1) / HEAD_ROWS;
#pragma omp parallel for schedule(dynamic)
  for (int64_t unit = 0; unit < num_heads * num_parts; unit++) {
    int64_t head = unit / num_parts, first = unit % num_parts * HEAD_ROWS;
    int64_t rows = std::min(HEAD_ROWS, num_rows - first);
    LinearWeights own = weights;
    own.panels = static_cast<const T*>(weights.panels) + head * num_panels * PANEL * k;
    const T* inputs = x + first * from.token + head * from.head;
    T* outputs = out + first * to.token + head * to.head;
    if constexpr (widens) {
      float* widened = operand_scratch.floats(rows * k);
      for (int64_t row = 0; row < rows; row++) widen_row(inputs + row * from.token, k, widened + row * k);
      multiply_part<T>(own, widened, k, rows, 0, num_panels, STORE, outputs, to.token);
    } else {
      multiply_part<T>(own, inputs, from.token, rows, 0, num_panels, STORE, outputs, to.token);
    }
  }
}

extern "C" void tandem_multiply_heads(const LinearWeights* weights, int64_t num_outputs, int64_t first_head,
                                      int64_t num_heads, const void* x, int64_t x_token, int64_t x_head,
                                      int64_t num_rows, void* out, int64_t out_token, int64_t out_head) {
  LinearWeights own = *weights;
  own.num_outputs = num_outputs;
  int64_t item = own.is_bf16 ? sizeof(Bf16) : sizeof(float);
  int64_t panels = (num_outputs + PANEL - 1) / PANEL * PANEL * own.num_inputs;
  own.panels = static_cast<const char*>(own.panels) + first_head * panels * item;
  HeadStrides from{x_token, x_head}, to{out_token, out_head};
  if (own.is_bf16)
    multiply_heads(own, num_heads, (const Bf16*)x, from, num_rows, (Bf16*)out, to);
  else
    multiply_heads(own, num_heads, (const float*)x, from, num_rows, (float*)out, to);
}
