"""The quantized types of GGUF taken apart: their values are, bit for bit, those of the package `gguf`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from workers.model.gguf.gguf_blocks import FORMS, QuantizedRows, quantized_rows
from workers.model.gguf.gguf_forms import rows_in_form
from workers.model.quantization.quantized_weight import Codes, QuantizedWeight
from workers.model.quantization.stored_format import CodeType, Layout, StoredFormat

NUM_ROWS, ROW_BLOCKS = 37, 3
CODES = {
    CodeType.INT4: Codes.UINT4,
    CodeType.INT8: Codes.INT8,
    CodeType.FP4: Codes.E2M1,
    CodeType.IQ4_NL: Codes.IQ4_NL,
}
# Where a block of each type has its 16-bit floats.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}


def _drawn(kind: GGMLQuantizationType, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Draw rows of blocks: any bytes, but floats that are finite, zero and subnormal ones among them."""
    _, block_bytes = GGML_QUANT_SIZES[kind]
    drawn = np.random.default_rng(seed)
    blocks = drawn.integers(0, 256, (NUM_ROWS * ROW_BLOCKS, block_bytes), dtype=np.uint8)
    for at in HALVES[kind.name]:
        halves = drawn.integers(0, 1 << 16, len(blocks), dtype=np.uint16).view(np.float16)
        halves[~np.isfinite(halves)] = 0.5
        blocks[:, at : at + 2] = halves[:, None].view(np.uint8)
    if kind == GGMLQuantizationType.MXFP4:
        blocks[:, 0] %= 250
    return blocks.reshape(NUM_ROWS, -1)


def _weight(rows: QuantizedRows, kind: GGMLQuantizationType) -> QuantizedWeight:
    form = FORMS[kind]
    offsets = None if rows.offsets is None else torch.from_numpy(rows.offsets)
    assert (offsets is not None) == form.has_offsets
    packed, scales = torch.from_numpy(rows.packed), torch.from_numpy(rows.scales)
    return QuantizedWeight(CODES[form.codes], packed, scales, form.group, offsets)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", list(FORMS), ids=lambda kind: str(kind.name))
def test_values_are_those_of_the_package(kind: GGMLQuantizationType, seed: int) -> None:
    stored = _drawn(kind, seed)
    found = _weight(quantized_rows(stored, kind), kind).dequantized()
    assert torch.equal(found, torch.from_numpy(dequantize(stored, kind)))
    assert found.std() > 0


@pytest.mark.parametrize("kind", list(FORMS), ids=lambda kind: str(kind.name))
def test_values_are_the_same_in_the_form_that_parts_of_a_product_share(kind: GGMLQuantizationType) -> None:
    stored, form = _drawn(kind, 6), StoredFormat(Layout.OWN, CodeType.INT8, 16, has_zeros=True)
    packed, scales, offsets = (
        torch.from_numpy(it) for it in rows_in_form(stored, kind, form) if it is not None
    )
    found = QuantizedWeight(Codes.INT8, packed, scales, 16, offsets).dequantized()
    assert torch.equal(found, torch.from_numpy(dequantize(stored, kind)))


def test_rows_that_are_picked_are_those_rows() -> None:
    """As the rows of queries and keys, which are in another order in a file."""
    kind, order = GGMLQuantizationType.Q4_K, np.random.default_rng(4).permutation(NUM_ROWS)
    stored = _drawn(kind, 5)
    picked, whole = quantized_rows(stored[order], kind), quantized_rows(stored, kind)
    assert whole.offsets is not None
    assert picked.offsets is not None
    assert np.array_equal(picked.packed, whole.packed[order])
    assert np.array_equal(picked.scales, whole.scales[order])
    assert np.array_equal(picked.offsets, whole.offsets[order])


def test_all_quantized_types_that_the_package_writes_have_a_form() -> None:
    named = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"}
    assert named <= {kind.name for kind in FORMS}
