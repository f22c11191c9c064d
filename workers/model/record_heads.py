"""Quantize heads of KV for records of the store, and widen them again, by the CPU kernels or by torch.

Both give the same bits, and those that a device's KV in 8 bits would have of the same vectors
(`workers.model.attention.quantized_kv`). The kernels run on the caller's thread alone and release the GIL."""

from __future__ import annotations

import ctypes
import itertools

import torch
from torch import Tensor

from workers.model import native
from workers.model.attention.quantized_kv import Quantized, elements_and_scales, kv_dtype, widened
from workers.model.kv_form import RecordForm

# The kernels' parts are so many elements, or a multiple.
_KERNEL_ELEMENTS = 16


class RecordHeads:
    """Converts heads [..., block_tokens, width] between KV in `dtype` and records of `form`, which have
    one-byte elements [..., block_tokens, width + SCALE_BYTES * len(form.parts)]. Both are contiguous in their
    last two dimensions."""

    def __init__(self, form: RecordForm, dtype: torch.dtype, block_tokens: int) -> None:
        self._parts, self._block_tokens, self._dtype = form.parts, block_tokens, dtype
        self.element_dtype = kv_dtype(form.kv_dtype, dtype)
        self._arguments = _Arguments.of(form, dtype, block_tokens, self.element_dtype)

    def quantize(self, kv: Tensor, out: Tensor) -> None:
        """Write heads of KV to heads of records."""
        self._check(kv, out)
        if (kernels := self._kernels(kv)) is not None:
            for source, target in _contiguous(kv, out):
                kernels.library.tandem_quantize_heads(*self._call(source, target))
            return
        elements, scales = elements_and_scales(out, sum(self._parts))
        ends = itertools.accumulate(self._parts)
        for number, (end, size) in enumerate(zip(ends, self._parts, strict=True)):
            columns = slice(end - size, end)
            elements[..., columns], scales[..., number, :] = Quantized.of(kv[..., columns], out.dtype)

    def widen(self, records: Tensor, out: Tensor) -> None:
        """Write heads of records to heads of KV."""
        self._check(out, records)
        if (kernels := self._kernels(out)) is not None:
            for source, target in _contiguous(records, out):
                kernels.library.tandem_widen_heads(*self._call(source, target))
            return
        out.copy_(widened(records, self._parts))

    def _check(self, kv: Tensor, records: Tensor) -> None:
        assert kv.dtype == self._dtype
        assert records.dtype == self.element_dtype
        assert kv.shape[:-1] == records.shape[:-1]
        assert kv.shape[-2:] == (self._block_tokens, sum(self._parts))

    def _kernels(self, kv: Tensor) -> native.Kernels | None:
        serves = self._arguments is not None and native.serves(kv.device, kv.dtype)
        return native.load() if serves else None

    def _call(self, source: Tensor, target: Tensor) -> tuple[object, ...]:
        assert self._arguments is not None
        num_heads = source.shape[:-2].numel()
        addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (source, target))
        return ctypes.byref(self._arguments), next(addresses), ctypes.c_int64(num_heads), next(addresses)


class _Arguments(ctypes.Structure):
    """`RecordForm` of `record_elements.h`."""

    _fields_ = (
        ("parts", ctypes.POINTER(ctypes.c_int64)),
        *(
            (name, ctypes.c_int64)
            for name in ("num_parts", "block_tokens", "width", "is_bf16", "kv_elements")
        ),
    )

    @staticmethod
    def of(
        form: RecordForm, dtype: torch.dtype, block_tokens: int, element_dtype: torch.dtype
    ) -> _Arguments | None:
        """Describe the form to the kernels; None where they do not serve it."""
        if any(size % _KERNEL_ELEMENTS for size in form.parts):
            return None
        parts = (ctypes.c_int64 * len(form.parts))(*form.parts)
        elements = native.KV_ELEMENTS[element_dtype]
        return _Arguments(parts, len(parts), block_tokens, sum(form.parts), dtype == torch.bfloat16, elements)


def _contiguous(first: Tensor, second: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Divide two tensors of the same heads into as few pairs as possible that are contiguous."""
    if first.is_contiguous() and second.is_contiguous():
        return [(first, second)]
    assert first.ndim > 2, "heads are contiguous"
    pairs = (_contiguous(*pair) for pair in zip(first, second, strict=True))
    return list(itertools.chain.from_iterable(pairs))
