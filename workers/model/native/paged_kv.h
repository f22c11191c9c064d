// The keys and values of a step's sequences in their blocks: where they lie, and the panels that are packed of them.
//
// Elements of type S are those of activations, T, or have 8 bits and a scale for each token of a head. Panels hold
// these without scales, which products are multiplied with afterwards. Where the last columns of a vector (its tail)
// have a scale of their own, panels of keys hold them in units of the others' scale.

#pragma once

#include "kv_elements.h"
#include "panel.h"

constexpr int64_t PIECE = 512;  // keys
constexpr int64_t AHEAD = 32;   // keys whose memory is prefetched, a multiple of 16
constexpr int64_t MOST_DIM = 1024;

struct AttentionTask {
  int64_t cost;  // pairs of a token and a key
  int32_t sequence, token, position, num_tokens;
};

// One step over layers with one window. `workers/model/native` has the same structure.
struct AttentionStep {
  const int32_t* tables;  // [slots, table_stride]
  const int32_t *slots, *starts, *lengths;
  AttentionTask* tasks;  // sorted: the largest first
  void *kv, *host;       // blocks on the device, and those with ids from first_host on
  int64_t num_sequences, table_stride, num_tasks, num_split, window, block_stride, layer_stride, kind_stride,
      head_stride, first_host, num_heads, num_kv_heads, head_dim, block_tokens, is_invariant, kv_elements,
      tail_dim;  // the last columns of a vector, where elements of these have a scale of their own
  float scale, softcap;  // softcap 0: scores are not capped
};

// The KV of one layer.
template <typename T, typename S>
class PagedKv {
  static constexpr int64_t PAIR = 4 / sizeof(T);

  const AttentionStep& step;
  const int64_t dim;
  const S *kv, *host;

 public:
  PagedKv(const AttentionStep& step, int64_t layer)
      : step(step),
        dim(step.head_dim),
        kv((const S*)step.kv + layer * step.layer_stride),
        host((const S*)step.host + layer * step.layer_stride) {}

  // The 16 keys from `key` on, a multiple of 16: they are in one block.
  const S* keys_of(const AttentionTask& task, int64_t head, int64_t key) const {
    return head_of(task, head, key) + offset_of(key) * dim;
  }
  int64_t to_values() const { return step.kind_stride; }

  // The scales of keys or, after `to_values()` elements, of values, from `from` to `to`, multiples of 16, times
  // `unit`; 0 outside [first, end).
  void copy_scales(const AttentionTask& task, int64_t head, int64_t to_kind, int64_t from, int64_t to, int64_t first,
                   int64_t end, float unit, float* scales) const {
    if constexpr (IS_QUANTIZED<S>) {
      for (int64_t group = from; group < to; group += 16, scales += 16) {
        if (group >= end || group + 16 <= first) {
          memset(scales, 0, 16 * sizeof(float));
          continue;
        }
        const float* own = scales_of(task, head, group, to_kind);
        for (int64_t i = 0; i < 16; i += LANES) store(load(own + i) * broadcast(unit), scales + i);
        for (int64_t key = group; key < first; key++) scales[key - group] = 0;
        for (int64_t key = std::max(group, end); key < group + 16; key++) scales[key - group] = 0;
      }
    }
  }

  // Prefetches the scales of the 16 keys from `key` on, and of their values.
  INLINE void prefetch_scales(const AttentionTask& task, int64_t head, int64_t key) const {
    if constexpr (IS_QUANTIZED<S>) {
      const char* own = (const char*)scales_of(task, head, key, 0);
      prefetch(own);
      prefetch(own + to_values());
    }
  }

  // Packs the 32 keys from `begin` on as outputs of a panel; those outside [first, end) as zeros.
  void pack_keys(const AttentionTask& task, int64_t head, int64_t begin, int64_t first, int64_t end, T* panel) const {
    uint32_t* to = (uint32_t*)panel;
    int64_t items = dim / PAIR, whole = items / LANES * LANES;
    for (int64_t n = 0; n < PANEL; n += LANES) {
      int64_t key = begin + n, group_key = key / 16 * 16;
      bool seen = group_key < end && group_key + 16 > first;
      const T* rows = seen ? opened_keys(task, head, key) : nullptr;
      // After the last keys of a piece come its first values.
      const S* ahead = group_key + AHEAD < end ? keys_of(task, head, group_key + AHEAD)
                                               : keys_of(task, head, first / 16 * 16) + to_values();
      ahead += (key - group_key) * dim;
      const uint32_t* from[LANES];
      for (int64_t j = 0; j < LANES; j++) from[j] = seen && key + j < end ? (const uint32_t*)(rows + j * dim) : zeros();
      for (int64_t i = 0; i < whole; i += LANES) {
        for (int64_t j = 0; j < LANES; j++) prefetch((const char*)(ahead + j * dim + i * PAIR));
        transpose(from, to + i * PANEL + n, PANEL);
        for (int64_t j = 0; j < LANES; j++) from[j] += LANES;
      }
      for (int64_t i = whole; i < items; i++)
        for (int64_t j = 0; j < LANES; j++) to[i * PANEL + n + j] = from[j][i - whole];
    }
  }

  // Packs the values of `count` keys from `begin` on, multiples of 16, as inputs of panels of PIECE inputs each;
  // those outside [first, end) as zeros. `next` is the end of the task's keys.
  void pack_values(const AttentionTask& task, int64_t head, int64_t begin, int64_t count, int64_t first, int64_t end,
                   int64_t next, T* panels) const {
    for (int64_t at = 0; at < count; at += 16) {
      int64_t key = begin + at;
      bool seen = key < end && key + 16 > first;
      const T* rows = seen ? opened(keys_of(task, head, key) + to_values(), 16) : nullptr;
      // After the last values of a piece come the keys of the next.
      const S* ahead = nullptr;
      if (key + AHEAD < end)
        ahead = keys_of(task, head, key + AHEAD) + to_values();
      else if (key + AHEAD < next)
        ahead = keys_of(task, head, key + AHEAD);
      for (int64_t row = 0; row < 16; row += PAIR) {
        const T* from[PAIR];
        for (int64_t j = 0; j < PAIR; j++) {
          from[j] = seen && key + row + j < end ? rows + (row + j) * dim : (const T*)zeros();
          if (ahead)
            for (int64_t i = 0; i < dim; i += 64 / sizeof(S))
              prefetch((const char*)(ahead + (row + j) * dim + i));
        }
        T* to = panels + (at + row) * PANEL;
        int64_t column = 0;
        for (; column + PANEL <= dim; column += PANEL, to += PIECE * PANEL) interleave(from, column, to);
        if (column < dim) {
          alignas(64) T parts[2][PANEL] = {};
          for (int64_t j = 0; j < PAIR; j++) {
            memcpy(parts[j], from[j] + column, (dim - column) * sizeof(T));
            from[j] = parts[j];
          }
          interleave(from, 0, to);
        }
      }
    }
  }

  static const uint32_t* zeros() {
    alignas(64) static const uint32_t none[MOST_DIM] = {};
    return none;
  }

 private:
  // Keys are fewer than 2^32, whose division takes less time than that of longer numbers.
  int64_t offset_of(int64_t key) const { return uint32_t(key) % uint32_t(step.block_tokens); }

  INLINE const S* head_of(const AttentionTask& task, int64_t head, int64_t key) const {
    int64_t place = uint32_t(key) / uint32_t(step.block_tokens);
    int64_t block = step.tables[step.slots[task.sequence] * step.table_stride + place];
    const S* layer = block < step.first_host ? kv + block * step.block_stride
                                             : host + (block - step.first_host) * step.block_stride;
    return layer + head * step.head_stride;
  }

  INLINE const float* scales_of(const AttentionTask& task, int64_t head, int64_t key, int64_t to_kind) const {
    const S* scales = head_of(task, head, key) + to_kind + step.block_tokens * dim;
    return (const float*)scales + offset_of(key);
  }

  // `count` <= 16 keys or values that lie together, as T: where they are, or widened in memory of the thread.
  const T* opened(const S* rows, int64_t count) const {
    if constexpr (IS_QUANTIZED<S>) {
      T* wide = wide_rows();
      widen_elements(rows, count * dim, wide);
      return wide;
    } else {
      return rows;
    }
  }

  // The LANES keys from `key` on, a multiple of LANES.
  const T* opened_keys(const AttentionTask& task, int64_t head, int64_t key) const {
    const T* rows = opened(head_of(task, head, key) + offset_of(key) * dim, LANES);
    if constexpr (IS_QUANTIZED<S>) {
      if (step.tail_dim) scale_tails(scales_of(task, head, key, 0));
    }
    return rows;
  }

  // Brings the tails of widened keys into units of their keys' `scales`, behind which are those of the tails.
  void scale_tails(const float* scales) const {
    T* tail = wide_rows() + dim - step.tail_dim;
    for (int64_t key = 0; key < LANES; key++, tail += dim) {
      float ratio = scales[step.block_tokens + key] / scales[key];
      int64_t i = 0;
      for (; i + LANES <= step.tail_dim; i += LANES) store(load(tail + i) * broadcast(ratio), tail + i);
      for (; i < step.tail_dim; i++) store(to_float(tail[i]) * ratio, tail + i);
    }
  }

  static T* wide_rows() {
    alignas(64) static thread_local T wide[16 * MOST_DIM];
    return wide;
  }

  // Writes 32 columns of PAIR rows side by side.
  static INLINE void interleave(const T* const* from, int64_t column, T* to) {
    if constexpr (sizeof(T) == 4) {
      for (int64_t i = 0; i < PANEL; i += LANES) store(load(from[0] + column + i), to + i);
    } else {
#if defined(__AVX512F__)
      Vec low, high;
      interleave_inputs(load_bits(from[0] + column), load_bits(from[1] + column), low, high);
      _mm512_storeu_si512(to, (__m512i)low);
      _mm512_storeu_si512(to + 32, (__m512i)high);
#else
      for (int64_t i = 0; i < PANEL; i += 16) {
        __m256i even = _mm256_loadu_si256((const __m256i*)(from[0] + column + i));
        __m256i odd = _mm256_loadu_si256((const __m256i*)(from[1] + column + i));
        __m256i low = _mm256_unpacklo_epi16(even, odd), high = _mm256_unpackhi_epi16(even, odd);
        _mm256_storeu_si256((__m256i*)(to + 2 * i), _mm256_permute2x128_si256(low, high, 0x20));
        _mm256_storeu_si256((__m256i*)(to + 2 * i + 16), _mm256_permute2x128_si256(low, high, 0x31));
      }
#endif
    }
  }
};
