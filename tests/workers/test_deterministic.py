"""Deterministic mode: a sequence's logits are the same bits, whatever is computed beside it and however it is
cut into chunks; and where that cannot be had, a rank does not start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from optional_programs import needs_compiler
from torch import Tensor

from kvtransfer.common.clock import ManualClock
from workers.errors import WorkerError
from workers.model import native
from workers.model.attention.choice import choose_attention
from workers.model.attention.cpu_backend import CpuAttention
from workers.model.attention.interface import AttentionBackend, SequenceSpan, StepInput
from workers.model.decoder import Decoder, load_decoder
from workers.model.native.isa import Isa, available_isas
from workers.rank.model_runner import ModelRunner

BLOCK = 16
NUM_TOKENS = 90
BLOCKS = (31, 4, 12, 9, 2, 17)
FAMILIES = ("qwen3", "mistral")


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


class Model:
    """A decoder and its KV, with kernels for one instruction set."""

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        self.decoder: Decoder = load_decoder(model_dir, dtype, torch.device("cpu"))
        config = self.decoder.config
        self.tokens = torch.from_numpy(np.random.default_rng(5).integers(0, config.vocab_size, NUM_TOKENS))
        self._shape = (96, config.num_layers, 2, config.num_kv_heads, BLOCK, config.head_dim)
        self._dtype = dtype

    def attention(self) -> AttentionBackend:
        """Attention over stale memory."""
        kv = torch.full(self._shape, float("nan"), dtype=self._dtype)
        backend = choose_attention(self.decoder.attention_shape, kv, is_deterministic=True)
        assert isinstance(backend, CpuAttention)
        return backend

    def logits(self, chunks: Sequence[int], others: Sequence[int] = ()) -> Tensor:
        """Compute the sequence's logits in chunks of these lengths, each in a step beside other sequences of
        these lengths."""
        attention, rows, at = self.attention(), [], 0
        for length in chunks:
            span = SequenceSpan(at, length, BLOCKS)
            beside = [SequenceSpan(0, other, range(32 + 4 * n, 36 + 4 * n)) for n, other in enumerate(others)]
            middle = len(beside) // 2
            spans = [*beside[:middle], span, *beside[middle:]]
            parts = [self.tokens[s.start : s.start + s.num_tokens] for s in spans]
            first = sum(s.num_tokens for s in beside[:middle])
            hidden = self.decoder.forward(torch.cat(parts), StepInput.of(spans, BLOCK), attention)
            rows.append(self.decoder.logits(hidden)[first : first + length])
            at += length
        return torch.cat(rows)


@needs_compiler
@pytest.mark.parametrize("isa", available_isas(), ids=lambda isa: isa.value)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_same_bits(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype, isa: Isa
) -> None:
    kernels = native.compiled(isa)
    assert kernels is not None
    monkeypatch.setattr(native, "load", lambda: kernels)
    options = {"sliding_window": 40} if family == "mistral" else {}
    model = Model(make_checkpoint(family, seed=4, head_dim=32, **options), dtype)
    torch.set_num_threads(1)
    whole = model.logits([NUM_TOKENS])
    assert not bool(whole.isnan().any())
    torch.set_num_threads(2)
    chunked = [7, 33, 1, 24, 25]
    ways = {
        "by two threads": model.logits([NUM_TOKENS]),
        "in chunks": model.logits(chunked),
        "token by token": model.logits([40] + [1] * (NUM_TOKENS - 40)),
        "in a batch of 16": model.logits(chunked, others=[1, 5, 1, 17, 1, 1, 30, 2, 1, 1, 9, 1, 1, 3, 1]),
    }
    for name, logits in ways.items():
        assert torch.equal(logits, whole), name


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "broken", "remedy"),
    [
        (torch.float16, None, "set dtype: bf16 or fp32"),
        (torch.bfloat16, "load", "install a C\\+\\+ compiler"),
        (torch.bfloat16, "isa", "no AVX2"),
    ],
)
def test_a_rank_does_not_start_without_it(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, broken: str | None, remedy: str
) -> None:
    if broken == "load":
        monkeypatch.setattr(native, "load", lambda: None)
    if broken == "isa":
        monkeypatch.setattr("workers.model.products.chosen_isa", lambda: None)
    with pytest.raises(WorkerError, match=f"deterministic: .*{remedy}"):
        ModelRunner(
            model_dir=make_checkpoint("qwen3"),
            dtype=dtype,
            device=torch.device("cpu"),
            block_tokens=BLOCK,
            num_kv_tokens=8 * BLOCK,
            num_threads=1,
            clock=ManualClock(5.0),
            is_deterministic=True,
        )
