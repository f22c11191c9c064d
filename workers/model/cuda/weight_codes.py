"""Codes of quantized weights in Triton: loaded, and decoded as `workers.model.quantization` defines them.

Decoding takes integer operations and no tables, so that every card can decode every format."""

from __future__ import annotations

import triton
import triton.language as tl

from workers.model.cuda.kv_elements import FP8, unit, widened

# Float32 numbers from here on are integers: the bits of a small one make this number that much larger.
_INTEGERS, _INTEGER_BITS = tl.constexpr(8388608.0), tl.constexpr(0x4B000000)
# Half precision has a larger bias of exponents than E2M1.
_E2M1_UNIT = tl.constexpr(16384.0)
# The sixteen values of IQ4_NL, four in a word, as int32.
_IQ4_NL_0, _IQ4_NL_4 = tl.constexpr(0xBFAD9881 - (1 << 32)), tl.constexpr(0xF6EADDCF - (1 << 32))
_IQ4_NL_8, _IQ4_NL_12 = tl.constexpr(0x26190D01), tl.constexpr(0x71594535)


@triton.jit
def loaded_codes(packed_rows, first, num_inputs, is_output, CODES: tl.constexpr, INPUTS: tl.constexpr):
    """Load the codes of INPUTS inputs from `first` on, which is even: uint8 [num_outputs, INPUTS], 0 where
    there are none. `packed_rows` and `is_output` are [num_outputs, 1]."""
    if CODES == "int8" or CODES == "e4m3":
        inputs = tl.arange(0, INPUTS)[None, :]
        return tl.load(packed_rows + first + inputs, mask=is_output & (inputs < num_inputs - first), other=0)
    else:
        pairs = tl.arange(0, INPUTS // 2)[None, :]
        is_there = is_output & (2 * pairs < num_inputs - first)
        packed = tl.load(packed_rows + first // 2 + pairs, mask=is_there, other=0)
        return tl.interleave(packed & 0xF, packed >> 4)


@triton.jit
def decoded(codes, CODES: tl.constexpr):
    """Return the values of codes, uint8, in float32. Those of every format are exact in 16 bits."""
    if CODES == "int8":
        return ((codes ^ 0x80).to(tl.int32) | _INTEGER_BITS).to(tl.float32, bitcast=True) - (_INTEGERS + 128.0)
    elif CODES == "uint4":
        return (codes.to(tl.int32) | _INTEGER_BITS).to(tl.float32, bitcast=True) - _INTEGERS
    elif CODES == "e4m3":
        values = widened(codes.to(tl.int8, bitcast=True), tl.float32, FP8) * unit(FP8)
        return tl.where((codes & 0x7F) == 0x7F, float("nan"), values)
    elif CODES == "e2m1":
        bits = ((codes & 0x8).to(tl.uint16) << 12) | ((codes & 0x7).to(tl.uint16) << 9)
        return bits.to(tl.float16, bitcast=True).to(tl.float32) * _E2M1_UNIT
    else:
        tl.static_assert(CODES == "iq4_nl")
        low = tl.where(codes < 4, _IQ4_NL_0, _IQ4_NL_4)
        high = tl.where(codes < 12, _IQ4_NL_8, _IQ4_NL_12)
        word = tl.where(codes < 8, low, high)
        return (word >> ((codes & 3).to(tl.int32) * 8)).to(tl.int8).to(tl.float32)
