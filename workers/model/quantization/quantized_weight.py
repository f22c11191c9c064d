"""The one form in memory of a quantized weight, whatever format it was read from.

A weight is a code of 4 or 8 bits for each element and, for each group of inputs of an output, a scale and
perhaps an offset: `value = decoded(code) * scale + offset` in float32. That is exact for the formats that
people publish: a zero point z is the offset -z * scale, which has few bits; a scale of a tensor, of a row or
of a block is that of several groups; and the scales and minima of a superblock are products of few bits."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence

import torch
from torch import Tensor


class Codes(enum.Enum):
    """The meaning of a code. Codes of 4 bits lie two in a byte, that of the earlier input in the low half."""

    INT8 = "int8"  # two's complement
    UINT4 = "uint4"
    E4M3 = "e4m3"  # float8_e4m3fn
    E2M1 = "e2m1"  # the elements of MXFP4 and NVFP4
    IQ4_NL = "iq4_nl"

    @property
    def num_bits(self) -> int:
        """The bits of a code."""
        return 8 if self in (Codes.INT8, Codes.E4M3) else 4


_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@functools.cache
def decoded_values(codes: Codes) -> Tensor:
    """Return the values of all codes, float32 [2 ** num_bits]."""
    every = torch.arange(1 << codes.num_bits, dtype=torch.int32).to(torch.uint8)
    if codes is Codes.INT8:
        return every.view(torch.int8).float()
    if codes is Codes.E4M3:
        return every.view(torch.float8_e4m3fn).float()
    if codes is Codes.E2M1:
        return torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    return every.float() if codes is Codes.UINT4 else torch.tensor(_IQ4_NL, dtype=torch.float32)


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [num_outputs, num_inputs]: `packed` uint8 [num_outputs, num_inputs * num_bits / 8], and for
    each `group` of inputs the `scales` and, if there are any, `offsets`, float32 [num_outputs, num_inputs /
    group]. Column i is input `order[i]`, int64 [num_inputs], where groups are not of neighbors.

    With `quantizes_inputs` the checkpoint means products with inputs that are rounded to the kind of its
    codes, too, by a scale of each row."""

    codes: Codes
    packed: Tensor
    scales: Tensor
    group: int
    offsets: Tensor | None = None
    order: Tensor | None = None
    quantizes_inputs: bool = False

    def __post_init__(self) -> None:
        assert self.packed.dtype == torch.uint8, self.packed.dtype
        assert self.scales.dtype == torch.float32, self.scales.dtype
        assert self.scales.shape == (self.num_outputs, self.num_inputs // self.group), self.scales.shape
        assert self.num_inputs % self.group == 0, self.group
        assert self.offsets is None or self.offsets.shape == self.scales.shape

    @property
    def num_outputs(self) -> int:
        return self.packed.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.packed.shape[1] * 8 // self.codes.num_bits

    @property
    def shape(self) -> tuple[int, int]:
        """As of the weight."""
        return self.num_outputs, self.num_inputs

    @property
    def num_bytes(self) -> int:
        """The size of codes, scales and offsets."""
        parts = [self.packed, self.scales, self.offsets, self.order]
        return sum(part.nbytes for part in parts if part is not None)

    def rows(self, held: slice) -> QuantizedWeight:
        """Return a part of the outputs."""
        offsets = None if self.offsets is None else self.offsets[held]
        return dataclasses.replace(self, packed=self.packed[held], scales=self.scales[held], offsets=offsets)

    def at(self, ids: Tensor) -> QuantizedWeight:
        """Return the outputs `ids` [num_ids], in their order."""
        offsets = None if self.offsets is None else self.offsets[ids]
        return dataclasses.replace(self, packed=self.packed[ids], scales=self.scales[ids], offsets=offsets)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [num_outputs, num_inputs], rounded once to `dtype`."""
        packed = self.packed
        if self.codes.num_bits == 4:
            packed = torch.stack((packed & 0xF, packed >> 4), -1).flatten(1)
        values = decoded_values(self.codes).to(packed.device)[packed.int()]
        grouped = values.view(self.num_outputs, -1, self.group) * self.scales[..., None]
        if self.offsets is not None:
            grouped = grouped + self.offsets[..., None]
        weight = grouped.view(self.num_outputs, self.num_inputs)
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order.to(weight.device), weight)
        return weight.to(dtype)

    @staticmethod
    def joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
        """Return the weight whose outputs are those of the parts, one after another; None where they are of
        different forms."""
        if not are_alike(parts):
            return None
        first = parts[0]
        offsets = [it.offsets for it in parts if it.offsets is not None]
        return dataclasses.replace(
            first,
            packed=torch.cat([it.packed for it in parts]),
            scales=torch.cat([it.scales for it in parts]),
            offsets=torch.cat(offsets) if offsets else None,
        )


def are_alike(parts: Sequence[QuantizedWeight]) -> bool:
    """Whether the parts of a weight have one form, as `QuantizedWeight.joined` needs it. Orders of inputs
    that have no memory are taken for the same, as they are in products of the same inputs."""
    first = parts[0]
    forms = {(it.codes, it.group, it.num_inputs, it.quantizes_inputs, it.offsets is None) for it in parts}
    if len(forms) > 1 or any((it.order is None) != (first.order is None) for it in parts):
        return False
    return first.order is None or all(
        it.order is not None and (it.order.is_meta or torch.equal(it.order, first.order)) for it in parts
    )
