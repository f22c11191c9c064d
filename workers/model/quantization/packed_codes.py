"""Pack quantized weights into the panels of codes that the CPU kernels read.

A panel is one stream of bytes for 32 outputs: for each group of inputs the codes, in steps of 8 inputs as
`native/quantized_codes.h` describes them, the scales [32] and the offsets [32] if there are any. Scales and
offsets keep 16 bits where these hold all of them exactly."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.quantization.exact_scales import common_zero, exact_dtype
from workers.model.quantization.quantized_weight import Codes, QuantizedWeight, decoded_values

PANEL = 32
STEP_INPUTS = 8
_BLOCK_PANELS = 64  # that are packed together, which bounds the memory
# As half-precision numbers the bits of e4m3 mean this part of their values.
_E4M3_PART = 2.0**-8
_E4M3_NAN = 0x7F


class CodeKind(enum.IntEnum):
    """A way to decode: `CodeKind` of `native/quantized_codes.h`."""

    NIBBLES = 0
    INT8 = 1
    E4M3 = 2


class ScaleKind(enum.IntEnum):
    """The elements of scales or offsets: `ScaleKind` of `native/quantized_codes.h`."""

    NONE = 0
    FLOAT = 1
    BF16 = 2
    F16 = 3


_DTYPES = {ScaleKind.FLOAT: torch.float32, ScaleKind.BF16: torch.bfloat16, ScaleKind.F16: torch.float16}
_SCALE_KINDS = {dtype: kind for kind, dtype in _DTYPES.items()}
_KINDS = {Codes.INT8: CodeKind.INT8, Codes.E4M3: CodeKind.E4M3}


@dataclasses.dataclass(frozen=True, slots=True)
class PackedForm:
    """The form that all panels of a product share. `group` is a multiple of `STEP_INPUTS`, to which a group
    of a whole row is padded; `table` float32 [16] holds the values of codes of 4 bits."""

    kind: CodeKind
    group: int
    num_groups: int
    scales: ScaleKind
    offsets: ScaleKind
    table: Tensor

    @staticmethod
    def of(weights: Sequence[QuantizedWeight]) -> PackedForm | None:
        """Return the form for the parts of a product, which are of one form; None where there is none: groups
        that steps would cut, or codes of NaN."""
        first = weights[0]
        is_whole = first.group == first.num_inputs
        if first.group % STEP_INPUTS and not is_whole:
            return None
        if first.codes is Codes.E4M3 and any((it.packed & 0x7F).eq(_E4M3_NAN).any() for it in weights):
            return None
        kind = _KINDS.get(first.codes, CodeKind.NIBBLES)
        zero = _common_zero(weights)
        table = torch.zeros(16) if kind != CodeKind.NIBBLES else decoded_values(first.codes) - (zero or 0)
        offsets = [it.offsets for it in weights if it.offsets is not None]
        return PackedForm(
            kind,
            -(-first.group // STEP_INPUTS) * STEP_INPUTS,
            first.num_inputs // first.group,
            _scale_kind([_scales(it) for it in weights]),
            ScaleKind.NONE if not offsets or zero is not None else _scale_kind(offsets),
            table,
        )

    @property
    def num_panel_bytes(self) -> int:
        """The size of a panel."""
        scale_bytes = sum(_DTYPES[it].itemsize for it in (self.scales, self.offsets) if it)
        num_bits = 4 if self.kind == CodeKind.NIBBLES else 8
        return self.num_groups * (self.group * PANEL * num_bits // 8 + PANEL * scale_bytes)

    def pack(self, weight: QuantizedWeight, panels: Tensor, width: int = PANEL, offset: int = 0) -> None:
        """Write outputs to uint8 `panels` [num_panels, num_panel_bytes]. Each panel takes `width` of them, to
        its places from `offset` on, and zeros where there are no more; its other places stay as they are."""
        for begin in range(0, len(panels), _BLOCK_PANELS):
            block = panels[begin : begin + _BLOCK_PANELS]
            held = weight.rows(slice(begin * width, (begin + len(block)) * width))
            missing = len(block) * width - held.num_outputs
            at = block.view(len(block), self.num_groups, -1)
            codes = _items(self.kind, F.pad(held.packed, (0, 0, 0, missing)), len(block), self.num_groups)
            end = codes[0, 0].numel() * PANEL // width
            dtype = torch.int32 if self.kind == CodeKind.NIBBLES else torch.int16
            steps = at[..., :end].view(dtype).view(len(block), self.num_groups, -1, PANEL)
            steps[..., offset : offset + width] = codes.view(dtype).view(*steps.shape[:-1], width)
            for kind, given in ((self.scales, _scales(held)), (self.offsets, held.offsets)):
                if kind == ScaleKind.NONE or given is None:
                    continue
                item = _DTYPES[kind]
                there = at[..., end : end + PANEL * item.itemsize].view(item)
                padded = F.pad(given, (0, 0, 0, missing)).view(len(block), width, self.num_groups)
                there[..., offset : offset + width] = padded.transpose(1, 2).to(item)
                end += PANEL * item.itemsize


def _items(kind: CodeKind, packed: Tensor, num_panels: int, num_groups: int) -> Tensor:
    """Return the codes of `packed` [num_panels * width, num_bytes] in their order in the panels, uint8
    [num_panels, num_groups, num_bytes of a group]."""
    width = len(packed) // num_panels
    grouped = packed.view(num_panels, width, num_groups, -1)
    if kind != CodeKind.NIBBLES:
        pairs = _padded(grouped, STEP_INPUTS).view(num_panels, width, num_groups, -1, 2)
        return pairs.permute(0, 2, 3, 1, 4).reshape(num_panels, num_groups, -1)
    # A byte holds a pair. Pair p of a step goes to bits 4p of both halves of an item.
    step = STEP_INPUTS // 2
    pairs = _padded(grouped, step).view(num_panels, width, num_groups, -1, step).int()
    shifts = torch.arange(0, 16, 4, dtype=torch.int32)
    halves = [((nibbles & 0xF) << shifts).sum(-1, dtype=torch.int32) for nibbles in (pairs, pairs >> 4)]
    items = halves[0] | halves[1] << 16
    return items.permute(0, 2, 3, 1).contiguous().view(torch.uint8).view(num_panels, num_groups, -1)


def _padded(grouped: Tensor, step: int) -> Tensor:
    return F.pad(grouped, (0, -grouped.shape[-1] % step))


def _scales(weight: QuantizedWeight) -> Tensor:
    return weight.scales / _E4M3_PART if weight.codes is Codes.E4M3 else weight.scales


def _scale_kind(scales: Sequence[Tensor]) -> ScaleKind:
    """Return the smallest elements that hold all these numbers exactly."""
    return _SCALE_KINDS[exact_dtype(scales)]


def _common_zero(weights: Sequence[QuantizedWeight]) -> int | None:
    """Return the code that means 0 in all groups, where there is one of 4 bits: the table then holds what
    offsets would add."""
    offsets = [it.offsets for it in weights if it.offsets is not None]
    if len(offsets) < len(weights):
        return None
    return common_zero(weights[0].codes, [it.scales for it in weights], offsets)
