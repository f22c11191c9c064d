// A mixture of experts as a decoder layer runs it: the router's logits, its choice, and the experts.

#pragma once

#include "experts.h"
#include "router.h"

// `workers/model/experts/packed_mixture.py` has the same structure.
struct Mixture {
  const LinearWeights* router;  // of T, or float
  const float* choice_bias;     // [num_experts] or null: `bias` of `choose_experts`
  const RouterRule* rule;
  const Experts* experts;
  int64_t* counts;  // [num_experts] or null: increased by the rows of each expert
};

inline thread_local Scratch logit_scratch, choice_scratch, router_scratch;

// logits: [rows, num_experts]. Where the router is float and T is not, rows are widened for it.
template <typename T>
void route(const LinearWeights& router, const T* x, int64_t x_stride, int64_t rows, float* logits) {
  int64_t k = router.num_inputs;
  if (bool(router.is_bf16) == (sizeof(T) == sizeof(Bf16)))
    return linear(router, x, x_stride, rows, STORE_FLOAT, reinterpret_cast<T*>(logits), router.num_outputs);
  float* wide = router_scratch.floats(rows * k);
#pragma omp parallel for schedule(static) if (rows * k > SERIAL_ITEMS)
  for (int64_t row = 0; row < rows; row++) widen_row(x + row * x_stride, k, wide + row * k);
  linear(router, wide, k, rows, STORE_FLOAT, logits, router.num_outputs);
}

// x: [rows, num_inputs], rows `x_stride` apart, and what the router reads: the same rows. The mixture is written or, if
// `is_added`, added to `out` [rows, num_outputs].
template <typename T>
void run_mixture(const Mixture& mixture, const T* x, int64_t x_stride, int64_t num_rows, bool is_added, T* out,
                 int64_t out_stride) {
  int64_t num_chosen = mixture.rule->num_chosen;
  for (int64_t first = 0; first < num_rows; first += MIXTURE_ROWS) {
    int64_t rows = std::min(MIXTURE_ROWS, num_rows - first), num_places = rows * num_chosen;
    const T* from = x + first * x_stride;
    float* logits = logit_scratch.floats(rows * mixture.rule->num_experts);
    float* weights = choice_scratch.floats(2 * num_places);
    int32_t* chosen = reinterpret_cast<int32_t*>(weights + num_places);
    route(*mixture.router, from, x_stride, rows, logits);
    choose_experts(*mixture.rule, logits, mixture.choice_bias, rows, chosen, weights);
    run_experts(*mixture.experts, {chosen, weights, num_chosen}, from, x_stride, rows, is_added,
                out + first * out_stride, out_stride, mixture.counts);
  }
}

extern "C" void tandem_run_mixture(const Mixture* mixture, const void* x, int64_t x_stride, int64_t num_rows,
                                   int64_t is_added, void* out, int64_t out_stride) {
  if (mixture->experts->is_bf16)
    run_mixture(*mixture, (const Bf16*)x, x_stride, num_rows, is_added, (Bf16*)out, out_stride);
  else
    run_mixture(*mixture, (const float*)x, x_stride, num_rows, is_added, (float*)out, out_stride);
}
