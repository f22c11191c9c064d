"""Quantize heads of KV whose vectors have a scale for each of their parts, and widen them again: for records
of the store, and for latents. By the CPU kernels or by torch, which give the same bits.

A part is quantized as a vector of any quantized KV is (`workers.model.attention.quantized_kv`). The kernels
run on the caller's thread alone and release the GIL."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.model import native
from workers.model.attention.quantized_kv import Quantized, elements_and_scales, widened

# The kernels' parts are so many elements, or a multiple.
_KERNEL_ELEMENTS = 16


class ScaledHeads:
    """Converts heads between `dtype` [..., block_tokens, width] and 8 bits, which are elements of
    `element_dtype` [..., block_tokens, width + SCALE_BYTES * len(parts)]; `parts` are the sizes of those that
    have a scale each. Both are contiguous in their last two dimensions."""

    def __init__(
        self, parts: Sequence[int], element_dtype: torch.dtype, dtype: torch.dtype, block_tokens: int
    ) -> None:
        self.element_dtype = element_dtype
        self._parts, self._block_tokens, self._dtype = list(parts), block_tokens, dtype
        self._arguments = _Arguments.of(parts, element_dtype, dtype, block_tokens)

    def quantize(self, heads: Tensor, out: Tensor) -> None:
        """Write heads in `dtype` to heads in 8 bits."""
        self._check(heads, out)
        if (kernels := self._kernels(heads)) is not None:
            for source, target in _contiguous(heads, out):
                kernels.library.tandem_quantize_heads(*self._call(source, target))
            return
        elements, scales = elements_and_scales(out, sum(self._parts))
        ends = itertools.accumulate(self._parts)
        for number, (end, size) in enumerate(zip(ends, self._parts, strict=True)):
            columns = slice(end - size, end)
            elements[..., columns], scales[..., number, :] = Quantized.of(heads[..., columns], out.dtype)

    def widen(self, scaled: Tensor, out: Tensor) -> None:
        """Write heads in 8 bits to heads in `dtype`."""
        self._check(out, scaled)
        if (kernels := self._kernels(out)) is not None:
            for source, target in _contiguous(scaled, out):
                kernels.library.tandem_widen_heads(*self._call(source, target))
            return
        out.copy_(widened(scaled, self._parts))

    def write(self, rows: Tensor, scaled: Tensor, heads: Tensor, offsets: Tensor) -> None:
        """Quantize `rows` [num_rows, width] to the tokens `offsets` of the `heads`, int64 [num_rows], of
        `scaled` [num_heads, block_tokens, ...], which is contiguous. A first part of zeros gets the scale of
        the second, which attention divides by it."""
        assert scaled.is_contiguous()
        assert rows.stride(1) == 1
        if (kernels := self._kernels(rows)) is not None:
            places = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (rows, heads, offsets, scaled))
            kernels.library.tandem_write_rows(
                ctypes.byref(self._form()), next(places), ctypes.c_int64(rows.stride(0)), next(places),
                next(places), ctypes.c_int64(len(rows)), next(places),
            )  # fmt: skip
            return
        elements, scales = elements_and_scales(scaled, sum(self._parts))
        parts = [Quantized.of(part, scaled.dtype) for part in torch.split(rows, self._parts, 1)]
        own = torch.stack([part.scales for part in parts], 1)
        if len(parts) > 1:
            own[:, 0] = torch.where(own[:, 0] == 0, own[:, 1], own[:, 0])
        written = torch.cat([part.elements.view(torch.uint8) for part in parts], 1)
        elements.view(torch.uint8)[heads, offsets] = written
        scales[heads, :, offsets] = own

    def _check(self, heads: Tensor, scaled: Tensor) -> None:
        assert heads.dtype == self._dtype
        assert scaled.dtype == self.element_dtype
        assert heads.shape[:-1] == scaled.shape[:-1]
        assert heads.shape[-2:] == (self._block_tokens, sum(self._parts))

    def _kernels(self, heads: Tensor) -> native.Kernels | None:
        serves = self._arguments is not None and native.serves(heads.device, heads.dtype)
        return native.load() if serves else None

    def _form(self) -> _Arguments:
        assert self._arguments is not None
        return self._arguments

    def _call(self, source: Tensor, target: Tensor) -> tuple[object, ...]:
        num_heads = source.shape[:-2].numel()
        addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (source, target))
        return ctypes.byref(self._form()), next(addresses), ctypes.c_int64(num_heads), next(addresses)


class _Arguments(ctypes.Structure):
    """`ScaledParts` of `scaled_heads.h`."""

    _fields_ = (
        ("parts", ctypes.POINTER(ctypes.c_int64)),
        *(
            (name, ctypes.c_int64)
            for name in ("num_parts", "block_tokens", "width", "is_bf16", "kv_elements")
        ),
    )

    @staticmethod
    def of(
        sizes: Sequence[int], element_dtype: torch.dtype, dtype: torch.dtype, block_tokens: int
    ) -> _Arguments | None:
        """Describe the form to the kernels; None where they do not serve it."""
        if any(size % _KERNEL_ELEMENTS for size in sizes):
            return None
        parts, is_bf16 = (ctypes.c_int64 * len(sizes))(*sizes), dtype == torch.bfloat16
        elements = native.KV_ELEMENTS[element_dtype]
        return _Arguments(parts, len(sizes), block_tokens, sum(sizes), is_bf16, elements)


def _contiguous(first: Tensor, second: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Divide two tensors of the same heads into as few pairs as possible that are contiguous."""
    if first.is_contiguous() and second.is_contiguous():
        return [(first, second)]
    assert first.ndim > 2, "heads are contiguous"
    pairs = (_contiguous(*pair) for pair in zip(first, second, strict=True))
    return list(itertools.chain.from_iterable(pairs))
