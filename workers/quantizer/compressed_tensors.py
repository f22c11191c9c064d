"""The tensors that compressed-tensors stores for a quantized weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.safetensors_stream import StoredTensor
from workers.quantizer.rounding import Rounded
from workers.quantizer.target import QuantizationTarget

_WORD_BITS = 32


def stored_forms(
    name: str, shape: tuple[int, ...], scale_dtype: str, target: QuantizationTarget
) -> list[StoredTensor]:
    """Return what is stored for the weight `name` [num_outputs, num_inputs], in the order of
    `stored_tensors`."""
    num_outputs, num_inputs = shape
    scales = StoredTensor(f"{name}_scale", scale_dtype, (num_outputs, target.num_groups(num_inputs)))
    if not target.is_packed:
        return [StoredTensor(name, "F8_E4M3" if target.is_float else "I8", shape), scales]
    num_words = -(-num_inputs * target.num_bits // _WORD_BITS)
    packed = StoredTensor(f"{name}_packed", "I32", (num_outputs, num_words))
    forms = [packed, scales, StoredTensor(f"{name}_shape", "I64", (2,))]
    if target.is_asymmetric:
        num_words = -(-num_outputs * target.num_bits // _WORD_BITS)
        forms.append(StoredTensor(f"{name}_zero_point", "I32", (num_words, scales.shape[1])))
    return forms


def stored_tensors(rounded: Rounded, target: QuantizationTarget) -> list[Tensor]:
    """Return the tensors of `stored_forms`."""
    codes, scales = rounded.codes, rounded.scales
    if not target.is_packed:
        return [codes, scales]
    stored = [packed_words(codes, target.num_bits), scales, torch.tensor(codes.shape)]
    if rounded.zeros is not None:  # those of several outputs share a word
        stored.append(packed_words(rounded.zeros.t(), target.num_bits).t())
    return stored


def stored_values(tensors: Sequence[Tensor], target: QuantizationTarget) -> Tensor:
    """Return the values of a weight, float32, of which these are the `stored_tensors`."""
    stored, scales, *rest = tensors
    if not target.is_packed:
        return Rounded(stored, scales, 0.0, 0.0).values()
    shape, zeros = rest[0].tolist(), None
    codes = _unpacked(stored, target.num_bits)[:, : shape[1]]
    if target.is_asymmetric:
        zeros = _unpacked(rest[1].t(), target.num_bits)[:, : shape[0]].t()
    return Rounded(codes, scales, 0.0, 0.0, zeros).values()


def packed_words(codes: Tensor, num_bits: int) -> Tensor:
    """Pack codes int8 [num_outputs, num_inputs] into int32 [num_outputs, num_words], the first in the lowest
    bits; what is stored of a code is its distance from the smallest."""
    raised = codes.short().add_(1 << num_bits - 1).to(torch.uint8)
    raised = F.pad(raised, (0, -raised.shape[1] % (_WORD_BITS // num_bits)))
    if num_bits == 4:
        raised = raised[:, ::2] | raised[:, 1::2] << 4
    return raised.contiguous().view(torch.int32)


def _unpacked(words: Tensor, num_bits: int) -> Tensor:
    """Return the codes int8 [num_outputs, num_codes] in int32 words [num_outputs, num_words]."""
    raised = words.contiguous().view(torch.uint8)
    if num_bits == 4:
        raised = torch.stack((raised & 0xF, raised >> 4), -1).flatten(1)
    return raised.short().sub_(1 << num_bits - 1).to(torch.int8)
