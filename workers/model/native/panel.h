// Panels, and the product of rows with a panel.
//
// A panel holds 32 outputs of a product over all of its k inputs: float [k][32], or bfloat16 [k/2][32][2] with
// the inputs of a pair side by side, as `vdpbf16ps` and AMX take them; k of a bfloat16 panel is even. Rows are
// float or bfloat16, one after another `stride` elements apart. `Operand<T>` is what products of T are computed
// from: bfloat16 where the CPU multiplies bfloat16, else float. A float row with a bfloat16 panel widens the
// panel in registers and gives what the widened panel gives, bit for bit.
//
// The accumulators of a row's 32 outputs run over the inputs in their order, whatever the number of rows: a
// row's result does not depend on the rows beside it, and cutting k anywhere (at even places; multiples of 32
// with AMX) with `accumulate` changes nothing.

#pragma once

#include <type_traits>

#include "simd.h"

#if defined(TANDEM_EMULATE_AMX)
#include "amx_emulation.h"
#define TANDEM_AMX
#elif defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#define TANDEM_AMX
#endif
#if defined(TANDEM_AMX) || defined(__AVX512BF16__)
#define TANDEM_BF16_PRODUCTS
#endif

template <typename T>
struct OperandOf {
  using type = T;
};
#if !defined(TANDEM_BF16_PRODUCTS)
template <>
struct OperandOf<Bf16> {
  using type = float;
};
#endif
template <typename T>
using Operand = typename OperandOf<T>::type;

// Memory to be prefetched during a product: `step` bytes from `at` on for each input or pair of inputs.
struct Ahead {
  const char* at = nullptr;
  int64_t step = 0;
};

// Into the second cache. The first one has so few outstanding misses that computing and reading hardly overlap:
// prefetched there, cached keys and values are read with 15 GB/s by two cores with AVX-512, and with 21 from the
// second (a Genoa; 28 and 35 GB/s for weights with AMX).
INLINE void prefetch(const char* at) { _mm_prefetch(at, _MM_HINT_T1); }

// Of weights that are multiplied with M rows at a time. For a few rows nothing is computed meanwhile, and the
// first cache is the nearest.
template <int M>
INLINE void prefetch_weights(const char* at) {
#if defined(TANDEM_AMX)
  prefetch(at);
#else
  _mm_prefetch(at, M > 4 ? _MM_HINT_T1 : _MM_HINT_T0);
#endif
}

// --------------------------------------------------------------------------------------- the kernels
// Each computes M rows, M a constant, so that the accumulators are registers.

#if defined(__AVX512F__)
constexpr int64_t MOST_ROWS = 12;
#else
constexpr int64_t MOST_ROWS = 6;
#endif

template <int M, int V>
INLINE void begin_sums(Vec (&sums)[M][V], const float* c, int64_t c_stride, bool accumulate) {
  for (int m = 0; m < M; m++)
    for (int v = 0; v < V; v++) sums[m][v] = accumulate ? load(c + m * c_stride + v * LANES) : broadcast(0);
}

template <int M, int V>
INLINE void end_sums(const Vec (&sums)[M][V], float* c, int64_t c_stride) {
  for (int m = 0; m < M; m++)
    for (int v = 0; v < V; v++) store(sums[m][v], c + m * c_stride + v * LANES);
}

// V vectors of outputs of a float panel whose inputs are `panel_stride` floats apart.
template <int M, int V>
void multiply_block(const float* a, int64_t stride, const float* panel, int64_t panel_stride, int64_t k, float* c,
                    int64_t c_stride, bool accumulate, Ahead ahead) {
  Vec sums[M][V];
  begin_sums(sums, c, c_stride, accumulate);
  for (int64_t i = 0; i < k; i++) {
    Vec weights[V];
    for (int v = 0; v < V; v++) weights[v] = load(panel + i * panel_stride + v * LANES);
    if (ahead.step) {
      prefetch_weights<M>(ahead.at + i * ahead.step);
      if (ahead.step > 64) prefetch_weights<M>(ahead.at + i * ahead.step + 64);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      Vec x = broadcast(a[m * stride + i]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[m][v] = fma(x, weights[v], sums[m][v]);
    }
  }
  end_sums(sums, c, c_stride);
}

#if defined(__AVX512F__)
INLINE Vec load_bits(const Bf16* from) { return (Vec)_mm512_loadu_si512(from); }

// The numbers of two vectors in turn: those of the first 16 columns, and of the last.
INLINE void interleave_inputs(Vec even, Vec odd, Vec& low, Vec& high) {
  alignas(64) static constexpr struct Indices {
    uint16_t low[32], high[32];
    constexpr Indices() : low(), high() {
      for (int i = 0; i < 32; i++) low[i] = uint16_t(i / 2 + i % 2 * 32), high[i] = uint16_t(low[i] + 16);
    }
  } indices;
  low = (Vec)_mm512_permutex2var_epi16((__m512i)even, _mm512_load_si512(indices.low), (__m512i)odd);
  high = (Vec)_mm512_permutex2var_epi16((__m512i)even, _mm512_load_si512(indices.high), (__m512i)odd);
}

INLINE Vec even_inputs(Vec pairs) { return (Vec)_mm512_slli_epi32((__m512i)pairs, 16); }
INLINE Vec odd_inputs(Vec pairs) {
  return (Vec)_mm512_and_si512((__m512i)pairs, _mm512_set1_epi32(int(0xFFFF0000)));
}
#else
INLINE Vec load_bits(const Bf16* from) { return (Vec)_mm256_loadu_si256((const __m256i*)from); }
INLINE Vec even_inputs(Vec pairs) { return (Vec)_mm256_slli_epi32((__m256i)pairs, 16); }
INLINE Vec odd_inputs(Vec pairs) {
  return (Vec)_mm256_and_si256((__m256i)pairs, _mm256_set1_epi32(int(0xFFFF0000)));
}
#endif

// V vectors of outputs of a bfloat16 panel, widened in registers.
template <int M, int V>
void multiply_block(const float* a, int64_t stride, const Bf16* panel, int64_t, int64_t k, float* c,
                    int64_t c_stride, bool accumulate, Ahead ahead) {
  Vec sums[M][V];
  begin_sums(sums, c, c_stride, accumulate);
  for (int64_t i = 0; i < k; i += 2) {
    const Bf16* pairs = panel + i * PANEL;
    if (ahead.step) {
      prefetch_weights<M>(ahead.at + i / 2 * ahead.step);
      if (ahead.step > 64) prefetch_weights<M>(ahead.at + i / 2 * ahead.step + 64);
    }
    Vec weights[V];
    for (int v = 0; v < V; v++) weights[v] = even_inputs(load_bits(pairs + v * 2 * LANES));
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      Vec x = broadcast(a[m * stride + i]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[m][v] = fma(x, weights[v], sums[m][v]);
    }
    for (int v = 0; v < V; v++) weights[v] = odd_inputs(load_bits(pairs + v * 2 * LANES));
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      Vec x = broadcast(a[m * stride + i + 1]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[m][v] = fma(x, weights[v], sums[m][v]);
    }
  }
  end_sums(sums, c, c_stride);
}

#if defined(TANDEM_BF16_PRODUCTS)
#if defined(__AVX512BF16__)
INLINE Vec add_products(Vec sums, Vec pairs, const Bf16* x) {
  int32_t bits;
  memcpy(&bits, x, 4);
  return _mm512_dpbf16_ps(sums, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(bits));
}
#else  // only where AMX is emulated: for tests
INLINE Vec add_products(Vec sums, Vec pairs, const Bf16* x) {
  sums = fma(odd_inputs(pairs), broadcast(to_float(x[1])), sums);
  return fma(even_inputs(pairs), broadcast(to_float(x[0])), sums);
}
#endif

// V vectors of outputs of a bfloat16 panel, multiplied as they are.
template <int M, int V>
void multiply_block(const Bf16* a, int64_t stride, const Bf16* panel, int64_t, int64_t k, float* c,
                    int64_t c_stride, bool accumulate, Ahead ahead) {
  Vec sums[M][V];
  begin_sums(sums, c, c_stride, accumulate);
  for (int64_t i = 0; i < k; i += 2) {
    const Bf16* pairs = panel + i * PANEL;
    Vec weights[V];
    for (int v = 0; v < V; v++) weights[v] = load_bits(pairs + v * 2 * LANES);
    if (ahead.step) {
      prefetch_weights<M>(ahead.at + i / 2 * ahead.step);
      if (ahead.step > 64) prefetch_weights<M>(ahead.at + i / 2 * ahead.step + 64);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[m][v] = add_products(sums[m][v], weights[v], a + m * stride + i);
  }
  end_sums(sums, c, c_stride);
}
#endif

// All 32 outputs of M rows; on AVX2, whose registers hold 6 rows of 16 outputs, in two halves if need be.
template <int M, typename A, typename W>
INLINE void multiply_rows(const A* a, int64_t stride, const W* panel, int64_t panel_stride, int64_t k, float* c,
                          int64_t c_stride, bool accumulate, Ahead ahead) {
  if constexpr (LANES == 16 || M <= 2) {
    multiply_block<M, PANEL_VECS>(a, stride, panel, panel_stride, k, c, c_stride, accumulate, ahead);
  } else {
    constexpr int64_t pair = sizeof(W) == 2 ? 2 : 1;
    constexpr int V = PANEL_VECS / 2;
    multiply_block<M, V>(a, stride, panel, panel_stride, k, c, c_stride, accumulate, ahead);
    multiply_block<M, V>(a, stride, panel + V * LANES * pair, panel_stride, k, c + V * LANES, c_stride, accumulate,
                         Ahead{});
  }
}

// Calls compute(begin, M) for blocks of M <= MOST rows, as equal as can be; M is a constant's type.
template <int64_t MOST = MOST_ROWS, typename Compute>
INLINE void for_row_blocks(int64_t rows, const Compute& compute) {
  int64_t blocks = (rows + MOST - 1) / MOST, begin = 0;
  for (int64_t block = 0; block < blocks; block++) {
    int64_t end = rows * (block + 1) / blocks;
    switch (end - begin) {
#define CASE(M)                                                                   \
  case M:                                                                         \
    if constexpr (M <= MOST) compute(begin, std::integral_constant<int, M>{});    \
    break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if defined(__AVX512F__)
      CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
    }
    begin = end;
  }
}

// c[rows, 32] = (accumulate ? c : 0) + a[rows, k] x panel, with vectors.
template <typename A, typename W>
void multiply_by_vectors(const A* a, int64_t stride, int64_t rows, const W* panel, int64_t k, float* c,
                         int64_t c_stride, bool accumulate, Ahead ahead) {
  int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
  ahead.step = blocks ? (ahead.step + blocks - 1) / blocks : 0;
  for_row_blocks(rows, [&](int64_t begin, auto count) {
    multiply_rows<count.value>(a + begin * stride, stride, panel, PANEL, k, c + begin * c_stride, c_stride,
                               accumulate, ahead);
    ahead.at += ahead.step * (k / (sizeof(W) == 2 ? 2 : 1));
  });
}

// c[rows, 16] = (accumulate ? c : 0) + a[rows, k] x half, half a float panel [k][16].
inline void multiply_half_by_vectors(const float* a, int64_t stride, int64_t rows, const float* half, int64_t k,
                                     float* c, int64_t c_stride, bool accumulate) {
  for_row_blocks(rows, [&](int64_t begin, auto count) {
    multiply_block<count.value, PANEL_VECS / 2>(a + begin * stride, stride, half, PANEL / 2, k,
                                                c + begin * c_stride, c_stride, accumulate, Ahead{});
  });
}

// -------------------------------------------------------------------------------------------- AMX tiles

#if defined(TANDEM_AMX)
constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_BLOCK_ROWS = 2 * TILE_ROWS;
constexpr int64_t TILE_INPUTS = 32;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

inline thread_local int64_t configured_rows = -1;

// Sets up the tiles for blocks of `rows` <= 32 rows: sums 0 to 3 (row half, output half), rows 4 and 5, weights
// 6 and 7.
inline void configure_tiles(int64_t rows) {
  if (configured_rows == rows) return;
  configured_rows = rows;
  int64_t upper = rows < TILE_ROWS ? rows : TILE_ROWS, lower = rows - upper;
  TileConfig config;
  uint8_t tile_rows[8] = {uint8_t(upper), uint8_t(upper), uint8_t(lower), uint8_t(lower),
                          uint8_t(upper), uint8_t(lower), TILE_ROWS,      TILE_ROWS};
  for (int tile = 0; tile < 8; tile++) {
    config.rows[tile] = tile_rows[tile];
    config.row_bytes[tile] = tile_rows[tile] ? 64 : 0;
  }
  _tile_loadconfig(&config);
}

// c[rows, 32] of a block of `rows` <= 32 rows. Prefetches `step` bytes for each 32 inputs, and moves `ahead` on.
INLINE void multiply_tile_block(const Bf16* a, int64_t stride, int64_t rows, const Bf16* panel, int64_t k, float* c,
                                int64_t c_stride, bool accumulate, const char*& ahead, int64_t step) {
  int64_t row_bytes = stride * 2, sum_bytes = c_stride * 4;
  bool has_lower = rows > TILE_ROWS;
  configure_tiles(rows);
  const Bf16* lower = a + TILE_ROWS * stride;
  float* lower_sums = c + TILE_ROWS * c_stride;
  if (accumulate) {
    _tile_loadd(0, c, sum_bytes);
    _tile_loadd(1, c + 16, sum_bytes);
    if (has_lower) {
      _tile_loadd(2, lower_sums, sum_bytes);
      _tile_loadd(3, lower_sums + 16, sum_bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (has_lower) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int64_t i = 0; i < k; i += TILE_INPUTS) {
    for (int64_t line = 0; line < step; line += 64) prefetch(ahead + line);
    ahead += step;
    _tile_loadd(6, panel + i * PANEL, 128);
    _tile_loadd(7, panel + i * PANEL + 32, 128);
    _tile_loadd(4, a + i, row_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (has_lower) {
      _tile_loadd(5, lower + i, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, sum_bytes);
  _tile_stored(1, c + 16, sum_bytes);
  if (has_lower) {
    _tile_stored(2, lower_sums, sum_bytes);
    _tile_stored(3, lower_sums + 16, sum_bytes);
  }
}

// Inputs whose part of a panel (32 KiB) stays in the first cache for all rows, which come from the second.
constexpr int64_t TILE_GROUP_INPUTS = 512;

inline void multiply_by_tiles(const Bf16* a, int64_t stride, int64_t rows, const Bf16* panel, int64_t k, float* c,
                              int64_t c_stride, bool accumulate, Ahead ahead) {
  int64_t whole = rows / TILE_BLOCK_ROWS * TILE_BLOCK_ROWS;
  int64_t blocks = (rows + TILE_BLOCK_ROWS - 1) / TILE_BLOCK_ROWS;
  int64_t step = blocks ? (ahead.step * (TILE_INPUTS / 2) + blocks - 1) / blocks : 0;
  for (int64_t i = 0; i < k; i += TILE_GROUP_INPUTS) {
    int64_t count = k - i < TILE_GROUP_INPUTS ? k - i : TILE_GROUP_INPUTS;
    for (int64_t row = 0; row < whole; row += TILE_BLOCK_ROWS)
      multiply_tile_block(a + row * stride + i, stride, TILE_BLOCK_ROWS, panel + i * PANEL, count, c + row * c_stride,
                          c_stride, accumulate || i > 0, ahead.at, step);
  }
  if (whole < rows)
    multiply_tile_block(a + whole * stride, stride, rows - whole, panel, k, c + whole * c_stride, c_stride,
                        accumulate, ahead.at, step);
}
#endif

// Rows that read a panel once: of vectors, or of tiles.
#if defined(TANDEM_AMX)
template <typename A>
constexpr int64_t BLOCK_ROWS = sizeof(A) == 2 ? TILE_BLOCK_ROWS : MOST_ROWS;
#else
template <typename A>
constexpr int64_t BLOCK_ROWS = MOST_ROWS;
#endif

// Asks the kernel for the tiles, once for a process. Returns whether they may be used; true without AMX.
#if defined(TANDEM_AMX) && !defined(TANDEM_EMULATE_AMX)
inline bool permit_tiles() {
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#else
inline bool permit_tiles() { return true; }
#endif

// Every thread that multiplies has one of these meanwhile: other code may have set up the AMX tiles.
struct TileScope {
#if defined(TANDEM_AMX)
  TileScope() { configured_rows = -1; }
  ~TileScope() {
    if (configured_rows >= 0) _tile_release();
    configured_rows = -1;
  }
#else
  TileScope() {}
#endif
};

// -------------------------------------------------------------------------------------------- the product

// c[rows, 32] = (accumulate ? c : 0) + a[rows, k] x panel.
template <typename A, typename W>
void multiply(const A* a, int64_t stride, int64_t rows, const W* panel, int64_t k, float* c, int64_t c_stride,
              bool accumulate, Ahead ahead = {}) {
#if defined(TANDEM_AMX)
  if constexpr (sizeof(A) == 2) {
    if (k % TILE_INPUTS == 0) {
      multiply_by_tiles(a, stride, rows, panel, k, c, c_stride, accumulate, ahead);
      return;
    }
  }
#endif
  multiply_by_vectors(a, stride, rows, panel, k, c, c_stride, accumulate, ahead);
}

// ------------------------------------------------------------------------------------------------ packing

// Transposes a square of 32-bit items: to[i * to_stride + j] = from[j], item i, for i < LANES; `from` are LANES
// pointers.
INLINE void transpose(const uint32_t* const* from, uint32_t* to, int64_t to_stride) {
#if defined(__AVX512F__)
  __m512i r[16], t[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from[i]);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    _mm512_storeu_si512(to + i * to_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_si512(to + (i + 4) * to_stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_storeu_si512(to + (i + 8) * to_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    _mm512_storeu_si512(to + (i + 12) * to_stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
  }
#else
  __m256 r[8], t[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps((const float*)from[i]);
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps((float*)to + i * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps((float*)to + (i + 4) * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
#endif
}

// Packs rows [count <= width, k], `stride` elements apart, as the outputs of a panel: output n < width of the
// panel is row n. Missing rows are zero, and so is the second input of the last pair when k is odd. `panel` holds
// the same type as the rows.
template <typename T>
void pack_outputs(const T* rows, int64_t stride, int64_t count, int64_t k, T* panel, int64_t width = PANEL) {
  constexpr int64_t pair = 4 / sizeof(T);
  alignas(64) static const uint32_t zeros[LANES] = {};
  uint32_t* to = reinterpret_cast<uint32_t*>(panel);
  int64_t items = k / pair, whole = items / LANES * LANES;
  for (int64_t n = 0; n < width; n += LANES) {
    for (int64_t i = 0; i < whole; i += LANES) {
      const uint32_t* from[LANES];
      for (int64_t j = 0; j < LANES; j++)
        from[j] = n + j < count ? reinterpret_cast<const uint32_t*>(rows + (n + j) * stride) + i : zeros;
      transpose(from, to + i * PANEL + n, PANEL);
    }
    for (int64_t j = n; j < n + LANES; j++) {
      for (int64_t i = whole * pair; i < (k + pair - 1) / pair * pair; i++)
        panel[(i / pair * PANEL + j) * pair + i % pair] = j < count && i < k ? rows[j * stride + i] : T{};
    }
  }
}

// Packs rows [count, columns <= 32], `stride` elements apart, as the inputs of a panel: input k of the panel is
// row k. Missing columns are zero, and so are the inputs from `count` up to `k`, which is even for bfloat16.
inline void pack_inputs(const Bf16* rows, int64_t stride, int64_t count, int64_t columns, int64_t k, Bf16* panel) {
  uint32_t* to = reinterpret_cast<uint32_t*>(panel);
  for (int64_t i = 0; i < k; i += 2, to += PANEL) {
    const Bf16 *even = rows + i * stride, *odd = even + stride;
    for (int64_t v = 0; v < PANEL; v += LANES) {
      int64_t width = columns - v < 0 ? 0 : columns - v < LANES ? columns - v : LANES;
      Vec low = i < count && width ? width == LANES ? load(even + v) : load(even + v, width) : broadcast(0);
      Vec high = i + 1 < count && width ? width == LANES ? load(odd + v) : load(odd + v, width) : broadcast(0);
#if defined(__AVX512F__)
      _mm512_storeu_si512(to + v, _mm512_or_si512(_mm512_srli_epi32((__m512i)low, 16), (__m512i)high));
#else
      _mm256_storeu_si256((__m256i*)(to + v), _mm256_or_si256(_mm256_srli_epi32((__m256i)low, 16), (__m256i)high));
#endif
    }
  }
}

template <typename T>
void pack_inputs(const T* rows, int64_t stride, int64_t count, int64_t columns, int64_t k, float* panel) {
  for (int64_t i = 0; i < k; i++, panel += PANEL) {
    for (int64_t v = 0; v < PANEL; v += LANES) {
      int64_t width = columns - v < 0 ? 0 : columns - v < LANES ? columns - v : LANES;
      const T* from = rows + i * stride + v;
      store(i < count && width ? width == LANES ? load(from) : load(from, width) : broadcast(0), panel + v);
    }
  }
}

// Widens a bfloat16 panel of k inputs.
inline void widen_panel(const Bf16* panel, int64_t k, float* to) {
  for (int64_t i = 0; i < k; i += 2, to += 2 * PANEL) {
    for (int64_t v = 0; v < PANEL; v += LANES) {
      Vec pairs = load_bits(panel + i * PANEL + v * 2);
      store(even_inputs(pairs), to + v);
      store(odd_inputs(pairs), to + PANEL + v);
    }
  }
}

// Converts a row of k elements.
template <typename T>
inline void widen_row(const T* from, int64_t k, float* to) {
  int64_t whole = k / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES) store(load(from + i), to + i);
  for (int64_t i = whole; i < k; i++) to[i] = to_float(from[i]);
}
