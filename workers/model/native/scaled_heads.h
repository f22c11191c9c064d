// Heads of KV of elements of 8 bits with a scale for each part of a token's vector, made of activations and widened to
// them again (`workers/model/scaled_heads.py`): records of the store, and latents.
//
// A head's slice is [block_tokens, width] elements. Where elements have scales, these follow: [num_parts, block_tokens].

#pragma once

#include "kv_elements.h"

struct ScaledParts {
  const int64_t* parts;  // their sizes, multiples of 16, which add up to the width
  int64_t num_parts, block_tokens, width, is_bf16, kv_elements;
};

template <typename S, typename T>
void quantize_heads(const ScaledParts& form, const T* from, int64_t num_heads, S* to) {
  for (int64_t head = 0; head < num_heads; head++) {
    float* scales = (float*)(to + form.block_tokens * form.width);
    for (int64_t token = 0; token < form.block_tokens; token++)
      for (int64_t part = 0; part < form.num_parts; from += form.parts[part], to += form.parts[part], part++)
        quantize(from, form.parts[part], to, scales + part * form.block_tokens + token);
    to = (S*)(scales + form.num_parts * form.block_tokens);
  }
}

template <typename S, typename T>
void widen_heads(const ScaledParts& form, const S* from, int64_t num_heads, T* to) {
  for (int64_t head = 0; head < num_heads; head++) {
    const float* scales = (const float*)(from + form.block_tokens * form.width);
    for (int64_t token = 0; token < form.block_tokens; token++)
      for (int64_t part = 0; part < form.num_parts; part++) {
        Vec scale = broadcast(scales[part * form.block_tokens + token]);
        for (int64_t i = 0; i < form.parts[part]; i += LANES, from += LANES, to += LANES)
          store(load(from) * broadcast(S::UNIT) * scale, to);
      }
    from = (const S*)(scales + form.num_parts * form.block_tokens);
  }
}

// Quantizes rows, `stride` apart, to the tokens `offsets` of the slices `heads` of a KV. A first part of zeros has the
// scale of the second, which attention divides by it.
template <typename S, typename T>
void write_rows(const ScaledParts& form, const T* rows, int64_t stride, const int64_t* heads, const int64_t* offsets,
                int64_t num_rows, S* kv) {
  int64_t head_bytes = form.block_tokens * (form.width + form.num_parts * int64_t(sizeof(float)));
  for (int64_t row = 0; row < num_rows; row++) {
    const T* from = rows + row * stride;
    S* head = kv + heads[row] * head_bytes;
    S* to = head + offsets[row] * form.width;
    float* scales = (float*)(head + form.block_tokens * form.width) + offsets[row];
    for (int64_t part = 0; part < form.num_parts; from += form.parts[part], to += form.parts[part], part++)
      quantize(from, form.parts[part], to, scales + part * form.block_tokens);
    if (form.num_parts > 1 && scales[0] == 0) scales[0] = scales[form.block_tokens];
  }
}

// Calls run with an element of the form and a number of the activations' type.
template <typename Run>
void with_scaled_types(const ScaledParts& form, const Run& run) {
  auto with_activations = [&](auto number) {
    with_elements<decltype(number)>(form.kv_elements, [&](auto element) {
      if constexpr (IS_QUANTIZED<decltype(element)>) run(element, number);
    });
  };
  if (form.is_bf16) return with_activations(Bf16{});
  with_activations(float{});
}

extern "C" void tandem_quantize_heads(const ScaledParts* form, const void* from, int64_t num_heads, void* to) {
  with_scaled_types(*form, [&](auto element, auto number) {
    quantize_heads(*form, (const decltype(number)*)from, num_heads, (decltype(element)*)to);
  });
}

extern "C" void tandem_widen_heads(const ScaledParts* form, const void* from, int64_t num_heads, void* to) {
  with_scaled_types(*form, [&](auto element, auto number) {
    widen_heads(*form, (const decltype(element)*)from, num_heads, (decltype(number)*)to);
  });
}

extern "C" void tandem_write_rows(const ScaledParts* form, const void* rows, int64_t stride, const int64_t* heads,
                                  const int64_t* offsets, int64_t num_rows, void* kv) {
  with_scaled_types(*form, [&](auto element, auto number) {
    write_rows(*form, (const decltype(number)*)rows, stride, heads, offsets, num_rows, (decltype(element)*)kv);
  });
}
