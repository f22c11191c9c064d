"""KV of 8 bits by Triton kernels: the reference's bits are written, and attention reads them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from workers.messages.rank_channel import BlockCopy
from workers.model.attention.interface import (
    AttentionShape,
    LayerAttention,
    Rotation,
    SequenceSpan,
    StepInput,
)
from workers.model.attention.quantized_kv import quantized_parts
from workers.model.attention.torch_backend import TorchAttention
from workers.model.host_kv import MODES, HostKv, OffloadMode
from workers.model.kv_form import SCALE_BYTES

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

from workers.model.attention.triton_backend import TritonAttention

KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# bfloat16 is left to devices: the interpreter multiplies it wrongly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# Bytes that no one has written: as elements the largest, as a scale NaN.
STALE = 0x7F
GROUP, BLOCK = 2, 16
by_kv_dtype = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


def stale(device: torch.device, kv_dtype: str, num_kv_heads: int, head_dim: int) -> Tensor:
    shape = (8, 2, 2, num_kv_heads, BLOCK, head_dim + SCALE_BYTES)
    return torch.full(shape, STALE, dtype=torch.uint8, device=device).view(KV_DTYPES[kv_dtype])


def shape_of(device: torch.device, dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> AttentionShape:
    rotation = Rotation(torch.zeros(head_dim // 2, device=device))
    return AttentionShape(GROUP * num_kv_heads, (0, 20), (rotation,), dtype=dtype)


def draw(device: torch.device, dtype: torch.dtype, num_tokens: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((num_tokens, columns), generator=generator).to(device, dtype)


@by_kv_dtype
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(2, 16), (1, 40)])
def test_kernels_write_and_read_what_torch_does(
    device: torch.device, num_kv_heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: str
) -> None:
    """A prompt and a decoding sequence, in layers with and without a window; then both decode."""
    shape = shape_of(device, dtype, num_kv_heads, head_dim)
    columns = num_kv_heads * (GROUP + 2) * head_dim
    qkv, following = draw(device, dtype, 45, columns), draw(device, dtype, 2, columns, seed=1)
    # Zeros, and numbers of which float32 has no inverse.
    qkv[3, -head_dim:], qkv[4] = 0.0, qkv[4] * 1e-6
    prompts = [SequenceSpan(0, 40, (3, 0, 5)), SequenceSpan(0, 5, (1,))]
    decodes = [SequenceSpan(40, 1, (3, 0, 5)), SequenceSpan(5, 1, (1,))]
    found = []
    for make in (TritonAttention, TorchAttention):
        kv = stale(device, kv_dtype, num_kv_heads, head_dim)
        backend = make(shape, kv)
        results = []
        for spans, rows in ((prompts, qkv), (decodes, following)):
            plan = backend.plan(StepInput.of(spans, BLOCK))
            results += [plan.run(LayerAttention(it, (0, 20)[it]), rows.clone()) for it in range(2)]
        parts = quantized_parts(kv)
        elements = parts.elements.view(torch.uint8)
        written = [
            (elements[block, :, :, :, :count], parts.scales[block, :, :, :, :count])
            for block, count in ((3, 16), (0, 16), (5, 9), (1, 6))
        ]
        found.append((results, written))
    (results, written), (of_torch, written_by_torch) = found
    for result, expected in zip(results, of_torch, strict=True):
        torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype], rtol=0)
    for pair in zip(written, written_by_torch, strict=True):
        (own_elements, own_scales), (elements, scales) = pair
        assert torch.equal(own_elements, elements)
        assert torch.equal(own_scales, scales)


@by_kv_dtype
@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, in the interpreter
def test_what_is_not_finite_is_seen(device: torch.device, kv_dtype: str) -> None:
    for head, odd in ((GROUP, float("nan")), (GROUP + 1, float("inf"))):  # in the key, in the value
        qkv = draw(device, torch.float32, 40, (GROUP + 2) * 16)
        qkv[10, head * 16 + 3] = odd
        backend = TritonAttention(shape_of(device, torch.float32, 1, 16), stale(device, kv_dtype, 1, 16))
        spans = [SequenceSpan(0, 20, (0, 3)), SequenceSpan(0, 20, (1, 2))]
        result = backend.plan(StepInput.of(spans, BLOCK)).run(LayerAttention(0, 0), qkv)
        assert result[10:20].isnan().all()
        assert result[20:].isfinite().all()


@by_kv_dtype
@pytest.mark.parametrize("mode", MODES)
def test_blocks_in_host_memory_are_read_alike(device: torch.device, mode: OffloadMode, kv_dtype: str) -> None:
    shape = dataclasses.replace(shape_of(device, torch.float32, 1, 16), windows=(0, 0))
    kv = stale(device, kv_dtype, 1, 16)
    backend = TritonAttention(shape, kv)
    qkv, query = (draw(device, torch.float32, count, (GROUP + 2) * 16, seed=count) for count in (40, 1))
    backend.plan(StepInput.of([SequenceSpan(0, 40, (0, 1, 2))], BLOCK)).run(LayerAttention(0, 0), qkv)
    decode = SequenceSpan(40, 1, (0, 1, 2))
    expected = backend.plan(StepInput.of([decode], BLOCK)).run(LayerAttention(0, 0), query.clone())
    host = HostKv(kv, 4)
    host.copy([BlockCopy(0, 9), BlockCopy(1, 8)])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    kv.view(torch.uint8)[:2] = STALE
    host.use(mode)
    step = StepInput.of([decode._replace(block_ids=(9, 8, 2))], BLOCK, host.reader)
    assert torch.equal(backend.plan(step).run(LayerAttention(0, 0), query.clone()), expected)
    host.close()
