"""Attention over latents by Triton kernels against torch: both forms, pieces, what a result depends on."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from workers.model import cuda, native
from workers.model.attention.interface import (
    AttentionShape,
    LayerAttention,
    MakeBackend,
    Rotation,
    SequenceSpan,
    StepInput,
)
from workers.model.attention.latent_backend import LatentAttention
from workers.model.attention.torch_backend import TorchAttention
from workers.model.kv_form import SCALE_BYTES
from workers.model.latent_heads import LatentHeads
from workers.model.latent_shape import LatentShape
from workers.model.scaled_heads import ScaledHeads

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

from workers.model.attention.triton_latents import make_triton

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
BLOCK, NUM_BLOCKS = 16, 100
SMALL, PADDED = LatentShape(0, 32, 16, 16, 16), LatentShape(0, 26, 10, 6, 9)


@pytest.fixture(autouse=True)
def _use_triton(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton serve the device of the tests, and nothing else the CPU."""
    monkeypatch.setattr(cuda, "DEVICE_TYPES", {device.type})
    monkeypatch.setattr(native, "load", lambda: None)


class LatentStep:
    """A layer over latents, and a step of sequences that have (tokens before, new tokens)."""

    def __init__(
        self,
        device: torch.device,
        latent: LatentShape,
        num_heads: int,
        work: list[tuple[int, int]],
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """With a `kv_dtype` the KV has 8 bits."""
        draw = torch.Generator().manual_seed(num_heads)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(device, dtype)

        self.kv, self._dtype = normal(NUM_BLOCKS, 1, 1, 1, BLOCK, latent.width), dtype
        if kv_dtype is not None:
            self.kv[..., latent.kv_lora_rank :] *= 3
            drawn, width = self.kv, latent.width + 2 * SCALE_BYTES
            self.kv = torch.zeros(*drawn.shape[:-1], width, dtype=torch.uint8, device=device).view(kv_dtype)
            ScaledHeads(latent.parts, kv_dtype, dtype, BLOCK).quantize(drawn, self.kv)
        free = torch.randperm(NUM_BLOCKS, generator=draw).tolist()
        tables = [[free.pop() for _ in range(-(-sum(tokens) // BLOCK))] for tokens in work]
        self.spans = [SequenceSpan(*tokens, table) for tokens, table in zip(work, tables, strict=True)]
        num_rows = sum(count for _, count in work)
        self.qkv = normal(num_rows, num_heads * latent.head_dim + latent.width)
        rows = normal(num_heads * latent.expanded_dim, latent.kv_lora_rank) * latent.kv_lora_rank**-0.5
        self._rows, self._latent, self._num_heads = rows, latent, num_heads

    def run(self, make: MakeBackend, spans: list[SequenceSpan], rows: slice = slice(None)) -> Tensor:
        """Attend from some rows, which are those of `spans`."""
        frequencies = torch.zeros(self._latent.qk_rope_head_dim // 2, device=self.kv.device)
        scale = self._latent.head_dim**-0.5
        rotations, dtype = (Rotation(frequencies),), self._dtype
        shape = AttentionShape(self._num_heads, (0,), rotations, scale, latent=self._latent, dtype=dtype)
        backend = LatentAttention(shape, self.kv.clone(), make)
        heads = LatentHeads(self._rows, self._latent, is_deterministic=backend.is_deterministic)
        step = StepInput.of(spans, BLOCK)
        return backend.plan(step).run(LayerAttention(0, 0, latent=heads), self.qkv[rows].clone())


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=["auto", "int8", "fp8"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("latent", "num_heads", "work"),
    [
        (SMALL, 16, [(0, 20), (40, 1), (15, 1), (70, 5)]),
        (PADDED, 3, [(90, 2), (16, 1)]),
        (SMALL, 20, [(600, 1), (31, 1)]),
        (PADDED, 70, [(33, 1), (0, 3)]),
    ],
)
def test_it_equals_torch(
    device: torch.device,
    latent: LatentShape,
    num_heads: int,
    work: list[tuple[int, int]],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
) -> None:
    """Rows that decode, of one and several pieces and tiles of heads, beside chunks in both forms."""
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter multiplies bfloat16 wrongly")
    step = LatentStep(device, latent, num_heads, work, dtype, kv_dtype)
    expected = step.run(TorchAttention, step.spans)
    for is_deterministic in (False, True):
        make = functools.partial(make_triton, is_deterministic=is_deterministic)
        error = (step.run(make, step.spans) - expected).abs().max() / expected.abs().max()
        assert float(error) <= TOLERANCE[dtype]


def test_deterministic_rows_are_the_same_bits(device: torch.device) -> None:
    """Whatever is beside them, and in any chunks."""
    step = LatentStep(device, SMALL, 5, [(20, 9), (70, 1)])
    make = functools.partial(make_triton, is_deterministic=True)
    together = step.run(make, step.spans)
    chunk, decode = step.spans
    assert torch.equal(step.run(make, [decode], slice(9, None)), together[9:])
    # The tokens before are in the KV of a step that has them all.
    rows = torch.cat(
        [
            step.run(make, [chunk._replace(num_tokens=4)], slice(0, 4)),
            _after(step, make, chunk),
        ]
    )
    assert torch.equal(rows, together[:9])


def _after(step: LatentStep, make: MakeBackend, chunk: SequenceSpan) -> Tensor:
    """Attend from the chunk's rows after the fourth, whose latents the KV has by then."""
    width = SMALL.width
    for row in range(4):
        position = chunk.start + row
        step.kv[chunk.block_ids[position // BLOCK], 0, 0, 0, position % BLOCK] = step.qkv[row, -width:]
    return step.run(make, [chunk._replace(start=chunk.start + 4, num_tokens=5)], slice(4, 9))
