"""Layers that the CPU kernels run in one call compute what their parts compute, bit for bit."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled_kernels import TILED_KERNELS, kernels_of
from dense_sinks import register
from optional_programs import needs_compiler
from slow_cases import slow_rows_but

from workers.model import native
from workers.model.attention.cpu_backend import CpuAttention
from workers.model.attention.interface import Marks, SequenceSpan, StepInput
from workers.model.decoder import Decoder, load_decoder

MakeCheckpoint = Callable[..., Path]

pytestmark = needs_compiler

BLOCK = 16
# Two sequences of one token, a chunk behind others, and a chunk of several tasks of attention.
SPANS = (
    SequenceSpan(17, 1, (3, 1)),
    SequenceSpan(0, 1, (0,)),
    SequenceSpan(40, 7, (2, 5, 4)),
    SequenceSpan(5, 300, tuple(range(6, 30))),
)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True, "head_dim": 128},
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 64},
    # Norms of what a layer adds, which round only after their weight; caps, a scale of scores, a GeLU.
    "gemma2": {
        "head_dim": 64,
        "sliding_window": 24,
        "query_pre_attn_scalar": 7,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 3.0,
    },
    # Each kind of layer rotates in its own way.
    "gemma3_text": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    # Norms of rows of queries and keys, and none of what a layer reads.
    "olmo2": {"num_attention_heads": 6, "head_dim": 16},
    "exaone4": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    "dense_sinks": {"sliding_window": 24, "head_dim": 64},
    # Experts in one layer of two; with some that all tokens share; and with biases and a clamped activation.
    "qwen3_moe": {
        "mlp_only_layers": [0],
        "moe_intermediate_size": 40,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        "moe_intermediate_size": 40,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
    },
    "qwen2_moe": {
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "num_experts": 7,
        "num_experts_per_tok": 3,
    },
    "gpt_oss": {"sliding_window": 24, "num_local_experts": 5, "num_experts_per_tok": 2},
}


class CountedLayers(Marks):
    """Notes how many pieces the kernels had counted at the end of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.at_ends: list[int] = []

    def mark_layer(self) -> None:
        self.at_ends.append(self.pieces.value)


def make_attention(decoder: Decoder, dtype: torch.dtype) -> CpuAttention:
    kernels = native.load()
    assert kernels is not None
    generator = torch.Generator().manual_seed(2)
    shape = (32, len(decoder.layers), 2, decoder.config.num_kv_heads, BLOCK, decoder.config.head_dim)
    return CpuAttention(decoder.attention_shape, torch.randn(shape, generator=generator).to(dtype), kernels)


def run(
    decoder: Decoder, spans: Sequence[SequenceSpan], dtype: torch.dtype, marks: Marks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states and KV after a step."""
    attention = make_attention(decoder, dtype)
    tokens = torch.arange(sum(span.num_tokens for span in spans)) % decoder.config.vocab_size
    plan = attention.plan(StepInput.of(spans, BLOCK, marks=marks))
    return decoder.run_layers(decoder.embed(tokens), plan), attention.kv


@pytest.fixture(autouse=True)
def family_with_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


@pytest.fixture(params=TILED_KERNELS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels_of(request.param)
    monkeypatch.setattr(native, "load", lambda: found)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("kernels", "threads")
@pytest.mark.parametrize(
    ("dtype", "threads"),
    slow_rows_but(
        itertools.product([torch.float32, torch.bfloat16], [1, 3]), (torch.float32, 1), (torch.bfloat16, 3)
    ),
    indirect=["threads"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_in_one_call_is_its_parts(
    family: str, dtype: torch.dtype, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_decoder(make_checkpoint(family, **FAMILIES[family]), dtype, torch.device("cpu"))
    assert all(layer.packed() is not None for layer in decoder.layers)
    for spans in (SPANS, SPANS[:1]):
        marks = CountedLayers()
        hidden, kv = run(decoder, spans, dtype, marks)
        pieces = np.diff([0, *marks.at_ends])
        assert len(pieces) == len(decoder.layers)
        assert (pieces >= 4).all(), "products and attention are pieces of progress"
        with monkeypatch.context() as patch:
            patch.setitem(decoder.__dict__, "_native_layers", None)
            by_parts, kv_by_parts = run(decoder, spans, dtype, Marks())
        assert torch.equal(hidden, by_parts)
        assert torch.equal(kv, kv_by_parts)
        assert not bool(hidden.isnan().any())


def test_layers_go_from_one_backend_to_another(make_checkpoint: MakeCheckpoint) -> None:
    """Each has a KV of its own; what the kernels take of one lives as long as it is used, and no longer."""
    decoder = load_decoder(make_checkpoint("qwen3"), torch.float32, torch.device("cpu"))
    first, second = (make_attention(decoder, torch.float32) for _ in range(2))
    expected = first.kv.clone()
    results = []
    for attention in (first, second, first):
        attention.kv.copy_(expected)
        layer = decoder.layers[0].packed()
        assert layer is not None
        attention.rotated(replace(layer.attention))  # another object for the same layer takes its place
        plan = attention.plan(StepInput.of(SPANS, BLOCK))
        num_tokens = sum(span.num_tokens for span in SPANS)
        results.append(decoder.run_layers(decoder.embed(torch.arange(num_tokens) % 100), plan))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert torch.equal(first.kv, second.kv)
    is_alive = weakref.ref(first)
    del first, attention, plan
    assert is_alive() is None


def test_a_step_of_another_length_is_refused(make_checkpoint: MakeCheckpoint) -> None:
    decoder = load_decoder(make_checkpoint("qwen3"), torch.float32, torch.device("cpu"))
    plan = make_attention(decoder, torch.float32).plan(StepInput.of(SPANS[:2], BLOCK))
    with pytest.raises(AssertionError):
        decoder.run_layers(decoder.embed(torch.arange(3)), plan)


def test_only_the_first_layers_are_run(make_checkpoint: MakeCheckpoint) -> None:
    decoder = load_decoder(make_checkpoint("qwen3", num_hidden_layers=3), torch.float32, torch.device("cpu"))
    attention, marks = make_attention(decoder, torch.float32), CountedLayers()
    plan = attention.plan(StepInput.of(SPANS[:2], BLOCK, marks=marks))
    decoder.run_layers(decoder.embed(torch.arange(2)), plan, 2)
    assert len(marks.at_ends) == 2


def test_progress_is_seen_within_a_layer(make_checkpoint: MakeCheckpoint) -> None:
    """The thread that reports progress reads the count while a call of the kernels is under way."""
    decoder = load_decoder(
        make_checkpoint("qwen3", num_hidden_layers=1, hidden_size=512, intermediate_size=8192),
        torch.float32,
        torch.device("cpu"),
    )
    marks, seen, is_over = CountedLayers(), set[int](), threading.Event()

    def read() -> None:
        while not is_over.is_set():
            seen.add(marks.pieces.value)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(20):
        run(decoder, SPANS, torch.float32, marks)
        if len(seen) > len(marks.at_ends) + 1:
            break
    is_over.set()
    thread.join()
    assert seen - set(marks.at_ends) - {0}, "counts between the ends of layers"


def test_products_that_are_padded_run_by_parts(make_checkpoint: MakeCheckpoint) -> None:
    """An odd number of inputs is padded in Python."""
    model_dir = make_checkpoint("llama", intermediate_size=101)
    decoder = load_decoder(model_dir, torch.bfloat16, torch.device("cpu"))
    assert decoder._native_layers is None
