// A gate whose factors are two products: that of one product is a part of `products.h`.

#pragma once

#include "layer_ops.h"
#include "products.h"

// gate and up: [rows, size], rows their strides apart. The gate becomes T(activation(gate)) * up. A row's result does
// not depend on its place: the last values of a row are computed as all others are.
template <typename T>
void gate_mul(T* gate, int64_t gate_stride, const T* up, int64_t up_stride, int64_t rows, int64_t size, bool is_gelu) {
  auto multiply = [&](const auto& activation) {
#pragma omp parallel for if (rows * size > SERIAL_ITEMS)
    for (int64_t row = 0; row < rows; row++) {
      T* to = gate + row * gate_stride;
      const T* from = up + row * up_stride;
      for_vectors(size, [&](int64_t i, auto width) {
        Vec activated = rounded<T>(activation(load_part(to + i, width)));
        store_part(activated * load_part(from + i, width), to + i, width);
      });
    }
  };
  if (is_gelu)
    multiply([](Vec x) { return gelu<T>(x); });
  else
    multiply([](Vec x) { return silu<T>(x); });
}

extern "C" void tandem_gate_mul(void* gate, int64_t gate_stride, const void* up, int64_t up_stride, int64_t rows,
                                int64_t size, int64_t is_gelu, int64_t is_bf16) {
  if (is_bf16)
    gate_mul((Bf16*)gate, gate_stride, (const Bf16*)up, up_stride, rows, size, is_gelu);
  else
    gate_mul((float*)gate, gate_stride, (const float*)up, up_stride, rows, size, is_gelu);
}
