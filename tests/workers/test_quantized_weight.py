"""The form of quantized weights in memory: what is read out of it is what was put in."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.model.quantization.quantized_weight import Codes, QuantizedWeight, decoded_values


def made(codes: Codes, seed: int, *, has_offsets: bool, has_order: bool) -> QuantizedWeight:
    drawn = torch.Generator().manual_seed(seed)
    num_outputs, num_inputs, group = 6, 64, 16
    width = num_inputs * codes.num_bits // 8
    return QuantizedWeight(
        codes,
        torch.randint(0, 0x78, (num_outputs, width), generator=drawn, dtype=torch.uint8),  # no NaN
        torch.rand(num_outputs, num_inputs // group, generator=drawn),
        group,
        torch.rand(num_outputs, num_inputs // group, generator=drawn) if has_offsets else None,
        torch.randperm(num_inputs, generator=drawn) if has_order else None,
    )


@given(st.sampled_from(Codes), st.integers(0, 99), st.booleans(), st.booleans())
def test_each_element_is_its_code_by_its_group(
    codes: Codes, seed: int, has_offsets: bool, has_order: bool
) -> None:
    weight = made(codes, seed, has_offsets=has_offsets, has_order=has_order)
    found = weight.dequantized()
    table = decoded_values(codes)
    for output in range(weight.num_outputs):
        for column in range(weight.num_inputs):
            byte = int(weight.packed[output, column * codes.num_bits // 8])
            code = byte if codes.num_bits == 8 else byte >> 4 * (column % 2) & 0xF
            value = table[code] * weight.scales[output, column // weight.group]
            if weight.offsets is not None:
                value = value + weight.offsets[output, column // weight.group]
            place = column if weight.order is None else int(weight.order[column])
            assert found[output, place] == value


@given(st.sampled_from(Codes), st.integers(0, 99), st.booleans(), st.booleans())
def test_parts_that_are_joined_are_rows(codes: Codes, seed: int, has_offsets: bool, has_order: bool) -> None:
    weight = made(codes, seed, has_offsets=has_offsets, has_order=has_order)
    joined = QuantizedWeight.joined([weight.rows(slice(0, 2)), weight.rows(slice(2, 6))])
    assert joined is not None
    assert torch.equal(joined.dequantized(), weight.dequantized())
    other = made(codes, seed, has_offsets=not has_offsets, has_order=has_order)
    assert QuantizedWeight.joined([weight, other]) is None
