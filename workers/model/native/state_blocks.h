// Where the states of a layer lie, and which of them the sequences of a step continue.

#pragma once

#include <cstdint>

// `states` are those of a layer in the first block, of equal parts. `workers/model/state/native_states.py` has the same
// structures.
struct StateBlocks {
  float* states;
  int64_t block_stride, part_stride, num_parts;
};

// Sequences whose tokens follow one another: block `reads`, negative where a sequence begins, becomes block `writes`.
struct StateSequences {
  const int32_t *reads, *writes, *lengths;
  int64_t num_sequences;
};
