"""Experts of which the CPU computes some, by copies through pinned memory, against one set of experts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from workers.model.experts.expert_products import ExpertWeights, TorchExperts
from workers.model.experts.host_experts import split_experts
from workers.model.experts.routing import Routing

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
NUM_EXPERTS, HIDDEN_SIZE, SIZE = 8, 96, 48


@pytest.mark.parametrize("num_in_host", [0, 3, NUM_EXPERTS])
def test_the_parts_add_up_while_experts_change_places(num_in_host: int) -> None:
    """Calls and swaps follow one another as fast as they can be queued, so that copies that came too late or
    too early would be seen."""
    generator = torch.Generator().manual_seed(num_in_host)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator) / math.sqrt(sizes[-1])

    weights = ExpertWeights(
        list(drawn(NUM_EXPERTS, SIZE, HIDDEN_SIZE)),
        list(drawn(NUM_EXPERTS, SIZE, HIDDEN_SIZE)),
        list(drawn(NUM_EXPERTS, HIDDEN_SIZE, SIZE)),
        gate_up_bias=drawn(NUM_EXPERTS, 2 * SIZE),
        down_bias=drawn(NUM_EXPERTS, HIDDEN_SIZE),
    )
    whole, split = TorchExperts(weights), split_experts(weights, DEVICE, num_in_host)
    sums: list[tuple[Tensor, Tensor]] = []
    for number in range(40 if DEVICE.type == "cuda" else 6):
        x = drawn(1 + number % 7, HIDDEN_SIZE)
        experts = torch.rand(len(x), NUM_EXPERTS, generator=generator).argsort(1)[:, :3].int()
        routing = Routing(experts, torch.rand(len(x), 3, generator=generator))
        there = Routing(*(it.to(DEVICE) for it in routing))
        sums.append((split(x.to(DEVICE), there), whole(x, routing)))
        if 0 < num_in_host < NUM_EXPERTS:
            in_host, on_device = (split.places < 0).nonzero()[0], (split.places >= 0).nonzero()[0]
            split.swap(int(in_host[number % len(in_host)]), int(on_device[number % len(on_device)]))
    for actual, expected in sums:
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)
