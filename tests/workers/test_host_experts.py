"""Experts that are computed in two parts, with tensors of the CPU in place of the device's, whose copies
arrive only when they are waited for. Not yet validated on a card: streams and pinned memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optional_programs import needs_compiler
from slow_cases import examples
from torch import Tensor

from workers.model.experts.expert_products import ExpertWeights, TorchExperts
from workers.model.experts.host_experts import SplitExperts, split_experts
from workers.model.experts.host_link import Arrival, HostLink
from workers.model.experts.make_experts import make_experts
from workers.model.experts.mixture_shape import ExpertActivation
from workers.model.experts.packed_experts import PackedExperts
from workers.model.experts.routing import Routing

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
ACTIVATIONS: tuple[ExpertActivation, ...] = get_args(ExpertActivation)


def drawn_weights(
    num_experts: int,
    hidden_size: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    activation: ExpertActivation = "silu",
    *,
    has_bias: bool = False,
) -> ExpertWeights:
    generator = torch.Generator().manual_seed(hidden_size * 3 + size)

    def drawn(*sizes: int) -> Tensor:
        return (torch.randn(*sizes, generator=generator) / math.sqrt(sizes[-1])).to(dtype)

    is_gated = activation != "relu2"
    return ExpertWeights(
        list(drawn(num_experts, size, hidden_size)) if is_gated else (),
        list(drawn(num_experts, size, hidden_size)),
        list(drawn(num_experts, hidden_size, size)),
        activation,
        drawn(num_experts, 2 * size) if has_bias and is_gated else None,
        drawn(num_experts, hidden_size) if has_bias else None,
    )


def drawn_call(
    num_rows: int, hidden_size: int, num_experts: int, num_chosen: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Routing]:
    """Draw rows, and different experts for each."""
    generator = torch.Generator().manual_seed(num_rows)
    experts = torch.rand(num_rows, num_experts, generator=generator).argsort(1)[:, :num_chosen].int()
    weights = torch.rand(num_rows, num_chosen, generator=generator)
    return torch.randn(num_rows, hidden_size, generator=generator).to(dtype), Routing(experts, weights)


def check_equal(actual: Tensor, weights: ExpertWeights, x: Tensor, routing: Routing) -> None:
    """Compare with one set of experts; three roundings in place of one."""
    expected = TorchExperts(weights)(x, routing)
    assert actual.dtype == x.dtype
    unit = {torch.float32: 2e-6, torch.bfloat16: 2**-6}[x.dtype]
    scale = max([1.0, *expected.abs().flatten().tolist()])
    assert torch.allclose(actual.float(), expected.float(), rtol=0, atol=unit * scale)


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_the_parts_add_up_to_the_experts_wherever_each_is(data: st.DataObject) -> None:
    """With all on one side, experts of -1, and after swaps."""
    draw = data.draw
    num_experts, dtype = draw(st.integers(1, 7)), draw(st.sampled_from(DTYPES))
    hidden_size, size = draw(st.integers(1, 70)), draw(st.integers(1, 50))
    activation, has_bias = draw(st.sampled_from(ACTIVATIONS)), draw(st.booleans())
    weights = drawn_weights(num_experts, hidden_size, size, dtype, activation, has_bias=has_bias)
    split = split_experts(weights, CPU, draw(st.integers(0, num_experts)))
    counts = np.zeros(num_experts, np.int64)
    for _ in range(draw(st.integers(1, 3))):
        num_rows, num_chosen = draw(st.integers(0, 40)), draw(st.integers(1, num_experts))
        x, routing = drawn_call(num_rows, hidden_size, num_experts, num_chosen, dtype)
        routing.experts[torch.rand(routing.experts.shape) < draw(st.sampled_from([0, 0.3, 1]))] = -1
        check_equal(split(x, routing), weights, x, routing)
        hidden = torch.ones_like(x)
        split.add_to(hidden, x, routing)
        assert torch.equal(hidden, 1 + split(x, routing))
        counts += 3 * np.array([int((routing.experts == expert).sum()) for expert in range(num_experts)])
        assert split.counts.tolist() == counts.tolist()
        in_host, on_device = np.flatnonzero(split.places < 0), np.flatnonzero(split.places >= 0)
        if len(in_host) and len(on_device):
            split.swap(*(int(draw(st.sampled_from(list(side)))) for side in (in_host, on_device)))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("hidden_size", "size"), [(1, 1), (33, 47), (64, 32), (130, 16)])
def test_packed_weights_are_read_back_as_they_were(
    dtype: torch.dtype, has_bias: bool, hidden_size: int, size: int
) -> None:
    weights = drawn_weights(3, hidden_size, size, dtype, has_bias=has_bias)
    packed, plain = make_experts(weights), TorchExperts(weights)
    assert isinstance(packed, PackedExperts)
    for expert in range(3):
        for found, expected in zip(packed.rows(expert), plain.rows(expert), strict=True):
            assert (found is None) == (expected is None)
            assert found is None or expected is None or torch.equal(found, expected)


@needs_compiler
def test_what_the_cpu_computes_of_a_token_does_not_depend_on_the_others() -> None:
    weights = drawn_weights(5, 48, 33)
    x, routing = drawn_call(40, 48, 5, 3)
    split = split_experts(weights, CPU, 5)
    whole = split(x, routing)
    assert torch.equal(whole, make_experts(weights)(x, routing))
    for row in (0, 17, 39):
        alone = split(x[row : row + 1], Routing(*(it[row : row + 1] for it in routing)))
        assert torch.equal(alone[0], whole[row])


class LateLink(HostLink):
    """A link whose copies arrive when they are waited for, as those of CUDA may."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(CPU)
        self._events = events

    def begin_out(self, tensors: Sequence[Tensor]) -> Arrival:
        self._events.append("copy out")
        copies = [torch.full_like(it, 1 << 20) for it in tensors]

        def arrival() -> list[Tensor]:
            self._events.append("arrival")
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor)
            return copies

        return arrival

    def pinned(self, host: Tensor) -> Tensor:
        self._events.append("copy in")
        return host.clone()


class NotedExperts(TorchExperts):
    """Experts that note each call."""

    def __init__(self, weights: ExpertWeights, events: list[str], name: str) -> None:
        super().__init__(weights)
        self._events, self._name = events, name

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        self._events.append(self._name)
        return super().__call__(x, routing)


def test_the_device_has_its_part_before_the_cpu_waits_for_the_rows() -> None:
    """So that both compute at once; and the CPU computes nothing where no token chose one of its experts."""
    events: list[str] = []
    weights = drawn_weights(4, 20, 12)
    few = ExpertWeights(weights.gates[:2], weights.ups[:2], weights.downs[:2])
    split = SplitExperts(
        NotedExperts(few, events, "device"), NotedExperts(weights, events, "cpu"), LateLink(events)
    )
    x, routing = drawn_call(6, 20, 4, 4)
    check_equal(split(x, routing), weights, x, routing)
    assert events == ["copy out", "device", "arrival", "cpu", "copy in"]
    events.clear()
    near = routing._replace(experts=(routing.experts % 2))
    check_equal(split(x, near), weights, x, near)
    assert events == ["copy out", "device", "arrival"]
    events.clear()
    split.swap(3, 0)
    assert events == ["copy in", "copy in"]
    assert split.places.tolist() == [-1, 1, -1, 0]
    check_equal(split(x, routing), weights, x, routing)
