// The tile instructions of AMX in plain C++, so that the kernels' use of them is tested on any CPU. Sums are
// added up in the order of the instruction's definition; speed is no aim.

#pragma once

#include "simd.h"

struct EmulatedTiles {
  uint8_t rows[8] = {};
  uint16_t row_bytes[8] = {};
  uint8_t bytes[8][16][64];
};

inline thread_local EmulatedTiles emulated_tiles;

inline void _emulated_loadconfig(const void* config) {
  const uint8_t* bytes = (const uint8_t*)config;
  for (int tile = 0; tile < 8; tile++) {
    memcpy(&emulated_tiles.row_bytes[tile], bytes + 16 + 2 * tile, 2);
    emulated_tiles.rows[tile] = bytes[48 + tile];
  }
  memset(emulated_tiles.bytes, 0xFF, sizeof emulated_tiles.bytes);  // NaN, until loaded or cleared
}

inline void _emulated_release() { emulated_tiles = EmulatedTiles{}; }

inline void _emulated_zero(int tile) {
  if (!emulated_tiles.rows[tile]) __builtin_trap();  // the instruction faults for a tile without rows
  memset(emulated_tiles.bytes[tile], 0, sizeof emulated_tiles.bytes[tile]);
}

inline void _emulated_loadd(int tile, const void* from, int64_t stride) {
  if (!emulated_tiles.rows[tile]) __builtin_trap();
  for (int row = 0; row < emulated_tiles.rows[tile]; row++)
    memcpy(emulated_tiles.bytes[tile][row], (const char*)from + row * stride, emulated_tiles.row_bytes[tile]);
}

inline void _emulated_stored(int tile, void* to, int64_t stride) {
  if (!emulated_tiles.rows[tile]) __builtin_trap();
  for (int row = 0; row < emulated_tiles.rows[tile]; row++)
    memcpy((char*)to + row * stride, emulated_tiles.bytes[tile][row], emulated_tiles.row_bytes[tile]);
}

inline void _emulated_dpbf16ps(int sums, int rows, int weights) {
  int num_rows = emulated_tiles.rows[sums], num_pairs = emulated_tiles.row_bytes[rows] / 4;
  if (!num_rows || num_rows != emulated_tiles.rows[rows] || num_pairs != emulated_tiles.rows[weights]) __builtin_trap();
  for (int m = 0; m < num_rows; m++) {
    for (int n = 0; n < emulated_tiles.row_bytes[weights] / 4; n++) {
      float even = 0, odd = 0, sum;
      for (int pair = 0; pair < num_pairs; pair++) {
        Bf16 a[2], b[2];
        memcpy(a, emulated_tiles.bytes[rows][m] + 4 * pair, 4);
        memcpy(b, emulated_tiles.bytes[weights][pair] + 4 * n, 4);
        even += to_float(a[0]) * to_float(b[0]);
        odd += to_float(a[1]) * to_float(b[1]);
      }
      memcpy(&sum, emulated_tiles.bytes[sums][m] + 4 * n, 4);
      sum += even + odd;
      memcpy(emulated_tiles.bytes[sums][m] + 4 * n, &sum, 4);
    }
  }
}

// Bytes of rows with a sign, bytes of weights without.
inline void _emulated_dpbsud(int sums, int rows, int weights) {
  int num_rows = emulated_tiles.rows[sums], num_quads = emulated_tiles.row_bytes[rows] / 4;
  if (!num_rows || num_rows != emulated_tiles.rows[rows] || num_quads != emulated_tiles.rows[weights]) __builtin_trap();
  for (int m = 0; m < num_rows; m++) {
    for (int n = 0; n < emulated_tiles.row_bytes[weights] / 4; n++) {
      int32_t sum;
      memcpy(&sum, emulated_tiles.bytes[sums][m] + 4 * n, 4);
      for (int quad = 0; quad < num_quads; quad++)
        for (int i = 0; i < 4; i++)
          sum += int8_t(emulated_tiles.bytes[rows][m][4 * quad + i]) * emulated_tiles.bytes[weights][quad][4 * n + i];
      memcpy(emulated_tiles.bytes[sums][m] + 4 * n, &sum, 4);
    }
  }
}

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig _emulated_loadconfig
#define _tile_release _emulated_release
#define _tile_zero _emulated_zero
#define _tile_loadd _emulated_loadd
#define _tile_stored _emulated_stored
#define _tile_dpbf16ps _emulated_dpbf16ps
#define _tile_dpbsud _emulated_dpbsud
