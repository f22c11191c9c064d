"""Take the blocks of GGUF's quantized types apart: codes of 4 or 8 bits, and for each group of inputs a scale
and perhaps an offset, as `workers.model.quantization.quantized_weight` has them.

What these give, `decoded(code) * scale + offset` in 32-bit floats, is bit for bit what llama.cpp's own order
of operations gives: products of a scale of 11 bits, of that of its subblock and of a code have at most 24."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from workers.model.quantization.stored_format import CodeType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_NIBBLES = (0, 4)
_PAIRS = (0, 2, 4, 6)
_BITS = tuple(range(8))


class QuantizedRows(NamedTuple):
    """Rows of a matrix: `packed` [num_rows, num_bytes] holds a code for each input, two in a byte where they
    have 4 bits; `scales` and `offsets` are [num_rows, num_groups]."""

    packed: Bytes
    scales: Floats
    offsets: Floats | None


class _Parts(NamedTuple):
    """Blocks taken apart: a code in each byte, [num_blocks, block_items], and the values of their groups,
    [num_blocks, num_groups]."""

    codes: Bytes
    scales: Floats
    offsets: Floats | None = None


class BlockForm(NamedTuple):
    """What the blocks of a type are in memory: the codes, those of 4 bits without a sign; the inputs of a
    group; and whether groups have offsets."""

    codes: CodeType
    group: int
    has_offsets: bool
    take_apart: Callable[[Bytes], _Parts]


def quantized_rows(stored: Bytes, kind: GGMLQuantizationType) -> QuantizedRows:
    """Take rows of blocks [num_rows, num_stored_bytes] of a type that `FORMS` has apart."""
    form, (_, block_bytes) = FORMS[kind], GGML_QUANT_SIZES[kind]
    num_rows = len(stored)
    codes, scales, offsets = form.take_apart(np.ascontiguousarray(stored).reshape(-1, block_bytes))
    packed = codes if form.codes.num_bits == 8 else codes[:, ::2] | (codes[:, 1::2] << np.uint8(4))
    return QuantizedRows(
        packed.reshape(num_rows, -1),
        scales.reshape(num_rows, -1),
        None if offsets is None else offsets.reshape(num_rows, -1),
    )


def _q4_0(blocks: Bytes) -> _Parts:
    scale, codes = _split(blocks, 2)
    scales = _halves(scale)
    return _Parts(_planes(codes, 16, _NIBBLES), scales, scales * np.float32(-8))


def _q4_1(blocks: Bytes) -> _Parts:
    scale, least, codes = _split(blocks, 2, 2)
    return _Parts(_planes(codes, 16, _NIBBLES), _halves(scale), _halves(least))


def _q5_0(blocks: Bytes) -> _Parts:
    scale, high, low = _split(blocks, 2, 4)
    return _Parts(_five_bits(low, high) - np.uint8(16), _halves(scale))


def _q5_1(blocks: Bytes) -> _Parts:
    scale, least, high, low = _split(blocks, 2, 2, 4)
    return _Parts(_five_bits(low, high), _halves(scale), _halves(least))


def _five_bits(low: Bytes, high: Bytes) -> Bytes:
    bits = np.unpackbits(high, axis=-1, bitorder="little")
    return _planes(low, 16, _NIBBLES) | (bits << np.uint8(4))


def _q8_0(blocks: Bytes) -> _Parts:
    scale, codes = _split(blocks, 2)
    return _Parts(codes, _halves(scale))


def _q2_k(blocks: Bytes) -> _Parts:
    steps, codes, scale, least = _split(blocks, 16, 64, 2)
    scales = _halves(scale) * (steps & np.uint8(0xF))
    offsets = -(_halves(least) * (steps >> np.uint8(4)))
    return _Parts(_planes(codes, 32, _PAIRS), scales, offsets)


def _q3_k(blocks: Bytes) -> _Parts:
    high, low, steps, scale = _split(blocks, 32, 64, 12)
    step_low, step_high = _split(steps, 8)
    step = _planes(step_low, 8, _NIBBLES) | (_planes(step_high, 4, _PAIRS) << np.uint8(4))
    scales = _halves(scale) * (step.astype(np.int8) - np.int8(32))
    codes = _planes(low, 32, _PAIRS) | (_planes(high, 32, _BITS) << np.uint8(2))
    return _Parts(codes, scales, scales * np.float32(-4))


def _q4_k(blocks: Bytes) -> _Parts:
    scale, least, steps, codes = _split(blocks, 2, 2, 12)
    return _Parts(_planes(codes, 32, _NIBBLES), *_scales_and_offsets(scale, least, steps))


def _q5_k(blocks: Bytes) -> _Parts:
    scale, least, steps, high, low = _split(blocks, 2, 2, 12, 32)
    codes = _planes(low, 32, _NIBBLES) | (_planes(high, 32, _BITS) << np.uint8(4))
    return _Parts(codes, *_scales_and_offsets(scale, least, steps))


def _scales_and_offsets(scale: Bytes, least: Bytes, steps: Bytes) -> tuple[Floats, Floats]:
    """Return those of the eight groups of a block, whose steps of 6 bits are spread over 12 bytes."""
    first, second, third = _split(steps, 4, 4)
    low, high = np.uint8(0x3F), np.uint8(0x30)
    scale_steps = np.hstack((first & low, (third & np.uint8(0xF)) | (first >> np.uint8(2) & high)))
    least_steps = np.hstack((second & low, (third >> np.uint8(4)) | (second >> np.uint8(2) & high)))
    return _halves(scale) * scale_steps, -(_halves(least) * least_steps)


def _q6_k(blocks: Bytes) -> _Parts:
    low, high, steps, scale = _split(blocks, 128, 64, 16)
    codes = _planes(low, 64, _NIBBLES) | (_planes(high, 32, _PAIRS) << np.uint8(4))
    return _Parts(codes - np.uint8(32), _halves(scale) * steps.view(np.int8))


def _iq4_nl(blocks: Bytes) -> _Parts:
    scale, codes = _split(blocks, 2)
    return _Parts(_planes(codes, 16, _NIBBLES), _halves(scale))


def _iq4_xs(blocks: Bytes) -> _Parts:
    scale, step_high, step_low, codes = _split(blocks, 2, 2, 4)
    step = _planes(step_low, 1, _NIBBLES) | (_planes(step_high, 1, _PAIRS) << np.uint8(4))
    scales = _halves(scale) * (step.astype(np.int8) - np.int8(32))
    return _Parts(_planes(codes, 16, _NIBBLES), scales)


def _mxfp4(blocks: Bytes) -> _Parts:
    exponent, codes = _split(blocks, 1)
    scales = np.ldexp(np.float32(1), exponent.astype(np.int32) - 127)
    return _Parts(_planes(codes, 16, _NIBBLES), scales)


def _split(blocks: Bytes, *sizes: int) -> list[Bytes]:
    """Split each block, or part of one, after so many bytes each time."""
    return np.split(blocks, np.cumsum(sizes), axis=1)


def _halves(stored: Bytes) -> Floats:
    """Read 16-bit floats, [num_blocks, 2 * num_values] bytes."""
    found: Floats = np.ascontiguousarray(stored).view(np.float16).astype(np.float32)
    return found


def _planes(stored: Bytes, width: int, shifts: tuple[int, ...]) -> Bytes:
    """Read fields that lie beside each other in a byte, all as wide: of each `width` bytes first the fields
    at the first shift, then those at the next."""
    mask = np.uint8((1 << 8 // len(shifts)) - 1)
    runs: npt.NDArray[Any] = stored.reshape(len(stored), -1, 1, width)
    fields = runs >> np.array(shifts, np.uint8)[:, None] & mask
    return fields.reshape(len(stored), -1)


_Kind = GGMLQuantizationType
FORMS = {
    _Kind.Q4_0: BlockForm(CodeType.INT4, 32, True, _q4_0),
    _Kind.Q4_1: BlockForm(CodeType.INT4, 32, True, _q4_1),
    _Kind.Q5_0: BlockForm(CodeType.INT8, 32, False, _q5_0),
    _Kind.Q5_1: BlockForm(CodeType.INT8, 32, True, _q5_1),
    _Kind.Q8_0: BlockForm(CodeType.INT8, 32, False, _q8_0),
    _Kind.Q2_K: BlockForm(CodeType.INT4, 16, True, _q2_k),
    _Kind.Q3_K: BlockForm(CodeType.INT4, 16, True, _q3_k),
    _Kind.Q4_K: BlockForm(CodeType.INT4, 32, True, _q4_k),
    _Kind.Q5_K: BlockForm(CodeType.INT8, 32, True, _q5_k),
    _Kind.Q6_K: BlockForm(CodeType.INT8, 16, False, _q6_k),
    _Kind.IQ4_NL: BlockForm(CodeType.IQ4_NL, 32, False, _iq4_nl),
    _Kind.IQ4_XS: BlockForm(CodeType.IQ4_NL, 32, False, _iq4_xs),
    _Kind.MXFP4: BlockForm(CodeType.FP4, 32, False, _mxfp4),
}
