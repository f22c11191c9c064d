"""The attention backend of a rank is the one that was fastest when it started."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_steps import unrotated
from optional_programs import needs_compiler
from torch import Tensor

from kvtransfer.common.clock import ManualClock
from workers.model.attention import choice
from workers.model.attention.choice import AttentionTimes, candidate_backends, choose_attention
from workers.model.attention.interface import (
    AttentionBackend,
    AttentionPlan,
    AttentionShape,
    LayerAttention,
    StepInput,
)

SHAPE = unrotated(4, 16)


class TimedPlan(AttentionPlan):
    def __init__(self, step: StepInput, backend: Timed) -> None:
        super().__init__(step)
        self._is_chunk = bool((step.lengths > 1).any())
        self._backend = backend

    def run(self, layer: LayerAttention, qkv: Tensor) -> Tensor:
        backend, times = self._backend, self._backend.times
        backend.seen_sinks.append(layer.sinks)
        backend.kv[:64] += 1  # of 1,024 tokens in blocks of 16
        backend.clock.advance((times.chunk_s if self._is_chunk else times.decode_s) * backend.slowdowns.pop())
        return qkv

    def attend(self, layer: LayerAttention, queries: Tensor) -> Tensor:
        raise NotImplementedError


class Timed(AttentionBackend):
    """Takes as long as it is told to; every other run, something else takes the CPU."""

    can_stage = True
    is_deterministic = False

    def __init__(self, name: str, kv: Tensor, clock: ManualClock, times: AttentionTimes) -> None:
        super().__init__(SHAPE, kv)
        self.name, self.clock, self.times = name, clock, times
        self.slowdowns = [1.0, 5.0] * 8
        self.seen_sinks: list[Tensor | None] = []

    def plan(self, step: StepInput) -> AttentionPlan:
        return TimedPlan(step, self)

    def over(self, shape: AttentionShape, kv: Tensor) -> AttentionBackend:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        (AttentionTimes(2.0, 9.0), AttentionTimes(1.0, 3.0), "second"),
        (AttentionTimes(1.0, 3.0), AttentionTimes(2.0, 9.0), "first"),
        (AttentionTimes(1.0, 1.0), AttentionTimes(0.81, 0.81), "first"),  # by less than a quarter
        (AttentionTimes(1.0, 1.0), AttentionTimes(0.79, 0.79), "second"),
        (AttentionTimes(1.0, 1.0), AttentionTimes(0.1, 5.0), "second"),  # of both kinds of steps together
    ],
)
def test_the_fastest_is_chosen(
    monkeypatch: pytest.MonkeyPatch, first: AttentionTimes, second: AttentionTimes, chosen: str
) -> None:
    kv, clock = torch.zeros(80, 1, 2, 2, 16, 16), ManualClock(5.0)
    backends = [Timed("first", kv, clock, first), Timed("second", kv, clock, second)]
    monkeypatch.setattr(choice, "candidate_backends", lambda *_, **__: backends)
    assert choose_attention(SHAPE, kv, clock).name == chosen
    assert not kv.any(), "what the measurement wrote is gone"
    assert choose_attention(SHAPE, kv).name == "first", "nothing is measured without a clock"


@pytest.mark.parametrize("has_sinks", [False, True])
def test_backends_are_compared_with_the_sinks_of_the_model(
    monkeypatch: pytest.MonkeyPatch, has_sinks: bool
) -> None:
    """Sinks take what is fastest in torch, its fused attention, out of the choice."""
    kv, clock = torch.zeros(80, 1, 2, 2, 16, 16), ManualClock(5.0)
    shape = dataclasses.replace(SHAPE, has_sinks=has_sinks)
    backends = [Timed(name, kv, clock, AttentionTimes(1.0, 1.0)) for name in ("first", "second")]
    for backend in backends:
        backend.shape = shape
    monkeypatch.setattr(choice, "candidate_backends", lambda *_, **__: backends)
    choose_attention(shape, kv, clock)
    for sinks in backends[0].seen_sinks + backends[1].seen_sinks:
        assert (sinks is not None) == has_sinks
        assert sinks is None or sinks.shape == (4,)


@needs_compiler
def test_kernels_serve_capped_scores() -> None:
    kv = torch.zeros(4, 1, 2, 2, 16, 16)
    capped = candidate_backends(unrotated(4, 16, softcap=30.0), kv)
    assert [it.name for it in capped] == [it.name for it in candidate_backends(SHAPE, kv)]
    assert capped[0].name.startswith("cpu")
