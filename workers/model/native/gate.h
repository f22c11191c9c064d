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

// x: [rows, size], rows `stride` apart, becomes T(x * sigmoid(gates)), with a gate for each row.
template <typename T>
void scale_by_sigmoid(T* x, int64_t stride, const T* gates, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > SERIAL_ITEMS)
  for (int64_t row = 0; row < rows; row++) {
    T* to = x + row * stride;
    Vec gate = broadcast(to_float(gates[row]));
    for_vectors(size, [&](int64_t i, auto width) {
      store_part(times_sigmoid<T>(load_part(to + i, width), gate), to + i, width);
    });
  }
}

// x: [rows, size], rows `stride` apart, becomes T(x * factors), of rows of the same size.
template <typename T>
void multiply_by(T* x, int64_t stride, const T* factors, int64_t factor_stride, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > SERIAL_ITEMS)
  for (int64_t row = 0; row < rows; row++) {
    T* to = x + row * stride;
    const T* from = factors + row * factor_stride;
    for_vectors(size, [&](int64_t i, auto width) {
      store_part(load_part(to + i, width) * load_part(from + i, width), to + i, width);
    });
  }
}

// x: [rows, size], rows `stride` apart, becomes T(x * T(sigmoid(gates))), with a gate for each value.
template <typename T>
void multiply_by_sigmoids(T* x, int64_t stride, const T* gates, int64_t gate_stride, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > SERIAL_ITEMS)
  for (int64_t row = 0; row < rows; row++) {
    T* to = x + row * stride;
    const T* from = gates + row * gate_stride;
    for_vectors(size, [&](int64_t i, auto width) {
      Vec factor = rounded<T>(times_sigmoid<T>(broadcast(1), load_part(from + i, width)));
      store_part(load_part(to + i, width) * factor, to + i, width);
    });
  }
}

extern "C" void tandem_multiply_by(void* x, int64_t stride, const void* factors, int64_t factor_stride, int64_t rows,
                                int64_t size, int64_t is_bf16) {
  if (is_bf16)
    multiply_by((Bf16*)x, stride, (const Bf16*)factors, factor_stride, rows, size);
  else
    multiply_by((float*)x, stride, (const float*)factors, factor_stride, rows, size);
}

extern "C" void tandem_multiply_by_sigmoids(void* x, int64_t stride, const void* gates, int64_t gate_stride,
                                            int64_t rows, int64_t size, int64_t is_bf16) {
  if (is_bf16)
    multiply_by_sigmoids((Bf16*)x, stride, (const Bf16*)gates, gate_stride, rows, size);
  else
    multiply_by_sigmoids((float*)x, stride, (const float*)gates, gate_stride, rows, size);
}

extern "C" void tandem_scale_by_sigmoid(void* x, int64_t stride, const void* gates, int64_t rows, int64_t size,
                                        int64_t is_bf16) {
  if (is_bf16)
    scale_by_sigmoid((Bf16*)x, stride, (const Bf16*)gates, rows, size);
  else
    scale_by_sigmoid((float*)x, stride, (const float*)gates, rows, size);
}

extern "C" void tandem_gate_mul(void* gate, int64_t gate_stride, const void* up, int64_t up_stride, int64_t rows,
                                int64_t size, int64_t is_gelu, int64_t is_bf16) {
  if (is_bf16)
    gate_mul((Bf16*)gate, gate_stride, (const Bf16*)up, up_stride, rows, size, is_gelu);
  else
    gate_mul((float*)gate, gate_stride, (const float*)up, up_stride, rows, size, is_gelu);
}
