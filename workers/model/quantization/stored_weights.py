"""Read weights in the formats of published checkpoints into the one form that they have in memory."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from workers.errors import CheckpointError
from workers.model.quantization.quantized_weight import Codes, QuantizedWeight
from workers.model.quantization.stored_format import CodeType, Layout, StoredFormat, product_of
from workers.model.quantization.weight_parts import nibbles, packed_nibbles
from workers.model.tensor_files import TensorFiles

_FLOATS = ("F32", "F16", "BF16")
_SCALES = (*_FLOATS, "F8_E8M0", "F8_E4M3", "U8")
CODES = {
    CodeType.INT4: Codes.UINT4,
    CodeType.INT8: Codes.INT8,
    CodeType.FP8: Codes.E4M3,
    CodeType.FP4: Codes.E2M1,
    CodeType.IQ4_NL: Codes.IQ4_NL,
}
# What turns codes without a sign of 8 bits into those with one, and what zero is among codes of 4 bits.
_SIGN_BIT = 0x80
_MIDDLE = 8
# Where the codes of eight outputs, in their order, lie in a word of AWQ.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
_EXPONENT_BIAS = 127


class _Parts(NamedTuple):
    """Codes of rows as they lie in memory, uint8 [num_rows, num_inputs * num_bits / 8]; scales, and zero
    points on the scale of the decoded codes, float32 [num_rows, num_groups]; and the group of each input, if
    groups are not of neighbors."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    groups: Tensor | None = None


class StoredWeight:
    """One weight of `shape` [num_outputs, num_inputs], or of several experts [num_experts, num_outputs,
    num_inputs] of which one is read, in the files: `name` is its plain name."""

    def __init__(
        self, files: TensorFiles, name: str, stored: StoredFormat, shape: tuple[int, ...], expert: int | None
    ) -> None:
        self._files, self._name, self._stored = files, name, stored
        self._product = product_of(name)
        self._num_outputs, self._num_inputs = shape[-2:]
        self._before = shape[:-2]
        self._expert = () if expert is None else (slice(expert, expert + 1),)

    def rows(self, held: slice) -> QuantizedWeight:
        """Read a part of the outputs. Raises `CheckpointError`, naming the tensor, for one that does not fit
        the format."""
        start, stop, _ = held.indices(self._num_outputs)
        rows = slice(start, stop)
        if self._stored.layout is Layout.OWN:
            return self._own(rows)
        parts = {
            Layout.PLAIN: self._plain,
            Layout.PACKED: self._packed,
            Layout.GPTQ: self._gptq,
            Layout.AWQ: self._awq,
        }[self._stored.layout](rows)
        return self._weight(parts)

    def _own(self, rows: slice) -> QuantizedWeight:
        num_outputs, num_inputs, group = self._num_outputs, self._num_inputs, self._stored.group
        num_bytes = num_inputs * self._stored.codes.num_bits // 8
        of_groups, name = (num_outputs, num_inputs // group), self._name
        offsets = None
        if f"{name}_offsets" in self._files:
            offsets = self._mapped(f"{name}_offsets", of_groups, (rows,), ("F32",))
        return QuantizedWeight(
            CODES[self._stored.codes],
            self._mapped(f"{name}_codes", (num_outputs, num_bytes), (rows,), ("U8",)),
            self._mapped(f"{name}_scales", of_groups, (rows,), ("F32",)),
            group,
            offsets,
        )

    def _weight(self, parts: _Parts) -> QuantizedWeight:
        """Put together what was read, with whole groups."""
        num_groups, group = parts.scales.shape[1], self._stored.group or self._num_inputs
        group = self._num_inputs if num_groups == 1 else group
        offsets = None if parts.zeros is None else -parts.zeros * parts.scales
        order = None if parts.groups is None else self._order(parts.groups, group)
        packed = parts.packed.contiguous()
        if order is not None:
            packed = _reordered(packed, order, self._stored.codes.num_bits)
        scales = parts.scales
        if self._num_inputs % group:  # the last group is cut short
            finer = math.gcd(self._num_inputs, group)
            factor, num_kept = group // finer, self._num_inputs // finer
            scales = scales.repeat_interleave(factor, 1)[:, :num_kept]
            if offsets is not None:
                offsets = offsets.repeat_interleave(factor, 1)[:, :num_kept]
            group = finer
        return QuantizedWeight(
            CODES[self._stored.codes],
            packed,
            scales.contiguous(),
            group,
            None if offsets is None else offsets.contiguous(),
            order,
            self._stored.quantizes_inputs,
        )

    def _plain(self, rows: slice) -> _Parts:
        if self._stored.codes is CodeType.FP4:
            return self._fp4(self._name, rows)
        kind = "F8_E4M3" if self._stored.codes is CodeType.FP8 else "I8"
        codes = self._mapped(self._name, (self._num_outputs, self._num_inputs), (rows,), (kind,))
        packed = codes.view(torch.uint8)
        if self._stored.codes is CodeType.INT4:
            packed = packed_nibbles((codes + _MIDDLE).view(torch.uint8))
        name = f"{self._name}_scale"
        scales = self._scales(name if name in self._files else f"{self._name}_scale_inv", rows)
        return _Parts(packed, scales, self._plain_zeros(rows))

    def _plain_zeros(self, rows: slice) -> Tensor | None:
        """Read zero points that are stored one by one; of 4 bits, codes of zero if there are none."""
        name, middle = f"{self._name}_zero_point", _MIDDLE if self._stored.codes is CodeType.INT4 else 0
        shape = self._files.shape_of(name)
        if shape is None or self._stored.codes not in (CodeType.INT4, CodeType.INT8):
            return torch.full((1, 1), float(middle)) if middle else None
        zeros = self._files.mapped(name, shape, (), ("I8",)).float() + middle
        return self._spread(zeros, name, rows)

    def _packed(self, rows: slice) -> _Parts:
        name, num_bits = f"{self._name}_packed", self._stored.codes.num_bits
        if self._stored.codes is CodeType.FP4:
            return self._fp4(name, rows)
        words = self._mapped(
            name, (self._num_outputs, -(-self._num_inputs * num_bits // 32)), (rows,), ("I32",)
        )
        packed = words.contiguous().view(torch.uint8)[:, : self._num_inputs * num_bits // 8]
        scales = self._scales(f"{self._name}_scale", rows)
        return _Parts(
            self._signed(packed),
            scales,
            self._packed_zeros(rows, scales),
            self._groups(f"{self._name}_g_idx"),
        )

    def _packed_zeros(self, rows: slice, scales: Tensor) -> Tensor | None:
        """Read zero points of which those of several outputs share a word."""
        name, num_bits = f"{self._name}_zero_point", self._stored.codes.num_bits
        if name not in self._files:
            return torch.full((1, 1), float(_MIDDLE)) if num_bits == 4 else None
        shape = (-(-self._num_outputs * num_bits // 32), scales.shape[1])
        words = self._files.mapped(name, shape, (), ("I32",))
        return self._unpacked_zeros(words.t(), rows)

    def _fp4(self, name: str, rows: slice) -> _Parts:
        """Read codes of FP4, two in a byte. Scales of NVFP4 are small, and there is one of the whole weight,
        by which these are divided or multiplied."""
        codes = self._mapped(name, (self._num_outputs, self._num_inputs // 2), (rows,), ("U8",))
        scales, divisor, factor = (f"{self._name}_{it}" for it in ("scale", "global_scale", "scale_2"))
        of_rows = self._scales(scales, rows)
        if divisor in self._files:
            of_rows = of_rows / self._scalar(divisor)
        return _Parts(codes, of_rows * self._scalar(factor) if factor in self._files else of_rows, None)

    def _scalar(self, name: str) -> Tensor:
        shape = self._files.shape_of(name) or ()
        return self._files.mapped(name, shape, (), ("F32",)).reshape(())

    def _gptq(self, rows: slice) -> _Parts:
        num_bits = self._stored.codes.num_bits
        shape = (self._num_inputs * num_bits // 32, self._num_outputs)
        words = self._mapped(f"{self._product}.qweight", shape, (slice(None), rows), ("I32",))
        packed = self._signed(words.t().contiguous().view(torch.uint8))
        num_groups = -(-self._num_inputs // (self._stored.group or self._num_inputs))
        scales = self._files.mapped(
            f"{self._product}.scales", (num_groups, self._num_outputs), (slice(None), rows), _FLOATS
        )
        words = self._files.mapped(
            f"{self._product}.qzeros", (num_groups, -(-self._num_outputs * num_bits // 32)), (), ("I32",)
        )
        zeros = self._unpacked_zeros(words, rows)
        return _Parts(packed, scales.t().float(), zeros, self._groups(f"{self._product}.g_idx"))

    def _awq(self, rows: slice) -> _Parts:
        num_groups = -(-self._num_inputs // (self._stored.group or self._num_inputs))
        num_words = -(-self._num_outputs // 8)
        of_words = slice(rows.start // 8, -(-rows.stop // 8))
        wanted = slice(rows.start - 8 * of_words.start, rows.stop - 8 * of_words.start)

        def codes(name: str, num_rows: int) -> Tensor:
            words = self._files.mapped(name, (num_rows, num_words), (slice(None), of_words), ("I32",))
            each = nibbles(words.contiguous().view(torch.uint8)).view(num_rows, -1, 8)
            return each[..., _AWQ_PLACES].flatten(1)[:, wanted].t()

        scales = self._files.mapped(
            f"{self._product}.scales", (num_groups, self._num_outputs), (slice(None), rows), _FLOATS
        )
        packed = packed_nibbles(codes(f"{self._product}.qweight", self._num_inputs).contiguous())
        return _Parts(packed, scales.t().float(), codes(f"{self._product}.qzeros", num_groups).float())

    def _signed(self, packed: Tensor) -> Tensor:
        """Give codes of 8 bits, which are stored without a sign, one."""
        return packed ^ _SIGN_BIT if self._stored.codes is CodeType.INT8 else packed

    def _unpacked_zeros(self, words: Tensor, rows: slice) -> Tensor:
        """Return the zero points of rows, which lie in words [num_groups, num_words]."""
        num_bits = self._stored.codes.num_bits
        each = words.contiguous().view(torch.uint8)
        zeros = (nibbles(each) if num_bits == 4 else each).int()
        if self._stored.is_one_less:
            zeros = (zeros + 1) & ((1 << num_bits) - 1)
        middle = 0 if num_bits == 4 else _SIGN_BIT
        return zeros[:, rows].t().float() - middle

    def _groups(self, name: str) -> Tensor | None:
        """Read the group of each input; None where groups are of neighbors."""
        if name not in self._files:
            return None
        groups = self._files.mapped(name, (self._num_inputs,), (), ("I32", "I64")).long()
        neighbors = torch.arange(self._num_inputs) // (self._stored.group or self._num_inputs)
        return None if torch.equal(groups, neighbors) or bool((groups == -1).all()) else groups

    def _order(self, groups: Tensor, group: int) -> Tensor:
        order = torch.argsort(groups, stable=True)
        if not torch.equal(groups[order], torch.arange(self._num_inputs) // group):
            raise CheckpointError(
                f"{self._files.file_of(self._name)}: the inputs of {self._product} are not in groups of "
                f"{group}, as config.json says; take another revision of the checkpoint"
            )
        return order

    def _scales(self, name: str, rows: slice) -> Tensor:
        """Read scales of a tensor, of outputs, of groups or of blocks, float32 [num_rows, num_groups]."""
        shape = self._files.shape_of(name)
        if shape is None:
            raise CheckpointError(
                f"{self._files.file_of(self._name)}: tensor {name} is missing, which has the scales of "
                f"{self._product}"
            )
        stored = self._files.mapped(name, shape, self._expert if len(shape) == 3 else (), _SCALES)
        if stored.dtype == torch.uint8:
            scales = torch.ldexp(torch.ones(stored.shape), stored.int() - _EXPONENT_BIAS)
        else:
            scales = stored.float()
        return self._spread(scales, name, rows)

    def _spread(self, values: Tensor, name: str, rows: slice) -> Tensor:
        """Return scales or zero points, as they are stored, of rows, [num_rows, num_groups]."""
        num_rows = rows.stop - rows.start
        if self._before and values.dim() == 3:
            values = values[0]
        if values.numel() == 1:
            return values.reshape(1, 1).expand(num_rows, 1)
        if values.shape == (self._num_outputs,):
            values = values[:, None]
        num_groups = -(-self._num_inputs // (self._stored.group or self._num_inputs))
        in_blocks = (-(-self._num_outputs // self._stored.num_rows), num_groups)
        if values.shape == (self._num_outputs, 1):
            return values[rows]
        if values.shape != in_blocks:
            raise CheckpointError(
                f"{self._files.file_of(self._name)}: tensor {name} has shape {list(values.shape)}, and "
                f"{self._stored.name} of config.json is {list(in_blocks)}"
            )
        of_rows = torch.arange(rows.start, rows.stop) // self._stored.num_rows
        return values.index_select(0, of_rows)

    def _mapped(
        self, name: str, shape: tuple[int, int], slices: tuple[slice, ...], dtypes: tuple[str, ...]
    ) -> Tensor:
        """Map codes, of the expert where there are several."""
        mapped = self._files.mapped(name, (*self._before, *shape), (*self._expert, *slices), dtypes)
        return mapped[0] if self._before else mapped


def _reordered(packed: Tensor, order: Tensor, num_bits: int) -> Tensor:
    """Bring codes of rows into the order of their inputs' groups."""
    if num_bits == 8:
        return packed.index_select(1, order)
    return packed_nibbles(nibbles(packed).index_select(1, order))
