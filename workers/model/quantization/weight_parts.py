"""Pack codes, and take parts of quantized weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from workers.model.quantization.quantized_weight import QuantizedWeight

# A border between columns makes groups of no fewer inputs than this.
_LEAST_GROUP = 16


def nibbles(packed: Tensor) -> Tensor:
    """Return the codes of 4 bits in bytes [..., num_bytes], the low ones first, uint8 [..., num_bytes *
    2]."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


def packed_nibbles(codes: Tensor) -> Tensor:
    """Put codes of 4 bits, uint8 [..., num_codes], two in a byte, the first in the low half."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def with_finer_groups(weight: QuantizedWeight, group: int) -> QuantizedWeight:
    """Return the same weight with groups of so many inputs, which divide its own."""
    if group == weight.group:
        return weight
    factor = weight.group // group
    offsets = None if weight.offsets is None else weight.offsets.repeat_interleave(factor, 1)
    return dataclasses.replace(
        weight, scales=weight.scales.repeat_interleave(factor, 1), offsets=offsets, group=group
    )


def columns_of(weight: QuantizedWeight, held: slice) -> QuantizedWeight | None:
    """Return a part of the inputs; None where it is none of whole groups, however fine, or where groups are
    not of neighbors."""
    start, stop, _ = held.indices(weight.num_inputs)
    size = stop - start
    if size == weight.num_inputs:
        return weight
    if weight.order is not None or (weight.codes.num_bits == 4 and (start % 2 or size % 2)):
        return None
    if weight.group == weight.num_inputs:  # one scale for all
        packed = _packed_columns(weight, start, stop)
        return dataclasses.replace(weight, packed=packed, group=size)
    group = math.gcd(start, size, weight.group)
    if group < _LEAST_GROUP and group != weight.group:
        return None
    finer = with_finer_groups(weight, group)
    groups = slice(start // group, stop // group)
    return dataclasses.replace(
        finer,
        packed=_packed_columns(weight, start, stop),
        scales=finer.scales[:, groups].contiguous(),
        offsets=None if finer.offsets is None else finer.offsets[:, groups].contiguous(),
    )


def rows_at(weight: QuantizedWeight, rows: Tensor) -> QuantizedWeight:
    """Return the outputs `rows` [num_rows], in their order."""
    rows = rows.to(weight.packed.device)
    return dataclasses.replace(
        weight,
        packed=weight.packed.index_select(0, rows),
        scales=weight.scales.index_select(0, rows),
        offsets=None if weight.offsets is None else weight.offsets.index_select(0, rows),
    )


def are_equal(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    """Whether two weights have the same codes, scales and offsets, of the same form."""
    if (one.codes, one.group, one.shape) != (other.codes, other.group, other.shape):
        return False
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("packed", "scales", "offsets", "order")]
    return all(
        ours is theirs if ours is None or theirs is None else torch.equal(ours, theirs)
        for ours, theirs in pairs
    )


def scaled(weight: QuantizedWeight, factor: float) -> QuantizedWeight:
    """Return the weight times a factor."""
    if factor == 1:
        return weight
    offsets = None if weight.offsets is None else weight.offsets * factor
    return dataclasses.replace(weight, scales=weight.scales * factor, offsets=offsets)


def moved(weight: QuantizedWeight, move: Callable[[Tensor], Tensor]) -> QuantizedWeight:
    """Return the weight where `move` brings each of its tensors."""
    return dataclasses.replace(
        weight,
        packed=move(weight.packed),
        scales=move(weight.scales),
        offsets=None if weight.offsets is None else move(weight.offsets),
        order=None if weight.order is None else move(weight.order),
    )


def _packed_columns(weight: QuantizedWeight, start: int, stop: int) -> Tensor:
    num_bits = weight.codes.num_bits
    return weight.packed[:, start * num_bits // 8 : stop * num_bits // 8].contiguous()
