"""Codes of quantized weights in Triton: loaded, and decoded as `workers.model.quantization` defines them.

Decoding takes integer operations and no tables, so that every card can decode every format."""

from __future__ import annotations

import triton
import triton.language as tl

# Float32 numbers from here on are integers: the bits of a small one make this number that much larger.
_INTEGERS, _INTEGER_BITS = tl.constexpr(8388608.0), tl.constexpr(0x4B000000)
# The bits that float32 has of E4M3, as int32, and of E2M1 without its sign, with the factors that make up for
# the larger bias of exponents. Subnormal numbers are kept.
_E4M3_BITS, _E4M3_UNIT = tl.constexpr(0x87F00000 - (1 << 32)), tl.constexpr(2.0**120)
_E2M1_BITS, _E2M1_UNIT = tl.constexpr(0x01C00000), tl.constexpr(2.0**126)
# What the codes of NaN would be.
_E4M3_NAN = tl.constexpr(480.0)
# The sixteen values of IQ4_NL, four in a word, as int32.
_IQ4_NL_0, _IQ4_NL_4 = tl.constexpr(0xBFAD9881 - (1 << 32)), tl.constexpr(0xF6EADDCF - (1 << 32))
_IQ4_NL_8, _IQ4_NL_12 = tl.constexpr(0x26190D01), tl.constexpr(0x71594535)


@triton.jit
def loaded_codes(packed_rows, first, row_bytes, is_output, CODES: tl.constexpr, INPUTS: tl.constexpr):
    """Load the codes of INPUTS inputs from `first` on, which is even: uint8 [num_outputs, INPUTS], 0 behind
    the end of a row. `packed_rows` and `is_output` are [num_outputs, 1]."""
    is_byte: tl.constexpr = CODES == "int8" or CODES == "e4m3"
    num_bytes: tl.constexpr = INPUTS if is_byte else INPUTS // 2
    begin = first if is_byte else first // 2
    places = tl.arange(0, num_bytes)[None, :]
    packed = tl.load(packed_rows + begin + places, mask=is_output & (places < row_bytes - begin), other=0)
    if is_byte:
        return packed
    else:
        return tl.interleave(packed & 0xF, packed >> 4)


@triton.jit
def decoded(codes, CODES: tl.constexpr):
    """Return the values of codes, uint8, in float32. Those of every format are exact in 16 bits. "int4" are
    those of "uint4" of which 8 means zero."""
    if CODES == "int8":
        return ((codes ^ 0x80).to(tl.int32) | _INTEGER_BITS).to(tl.float32, bitcast=True) - (
            _INTEGERS + 128.0
        )
    elif CODES == "uint4":
        return (codes.to(tl.int32) | _INTEGER_BITS).to(tl.float32, bitcast=True) - _INTEGERS
    elif CODES == "int4":
        return (codes.to(tl.int32) | _INTEGER_BITS).to(tl.float32, bitcast=True) - (_INTEGERS + 8.0)
    elif CODES == "e4m3":
        bits = (codes.to(tl.int8, bitcast=True).to(tl.int32) << 20) & _E4M3_BITS
        values = bits.to(tl.float32, bitcast=True) * _E4M3_UNIT
        return tl.where(tl.abs(values) == _E4M3_NAN, float("nan"), values)
    elif CODES == "e2m1":
        wide = codes.to(tl.int32)
        bits = ((wide << 22) & _E2M1_BITS) | ((wide >> 3) << 31)
        return bits.to(tl.float32, bitcast=True) * _E2M1_UNIT
    else:
        tl.static_assert(CODES == "iq4_nl")
        low = tl.where(codes < 4, _IQ4_NL_0, _IQ4_NL_4)
        high = tl.where(codes < 12, _IQ4_NL_8, _IQ4_NL_12)
        word = tl.where(codes < 8, low, high)
        return (word >> ((codes & 3).to(tl.int32) * 8)).to(tl.int8).to(tl.float32)
