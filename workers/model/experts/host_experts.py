"""A layer's experts where they do not all fit on the device: the CPU computes the others where they lie.

Host memory has the weights of all experts, packed for the CPU kernels, and the device copies of some. To
exchange an expert of the device for another is then one copy to the device, and nothing is copied back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.model.experts.expert_products import (
    ExpertRows,
    Experts,
    ExpertWeights,
    ReadableExperts,
    ReplaceableExperts,
    TorchExperts,
)
from workers.model.experts.host_link import HostLink, host_link
from workers.model.experts.make_experts import make_experts
from workers.model.experts.routing import Routing
from workers.model.experts.stored_experts import ReadWhenTaken


class SplitExperts(Experts):
    """Experts of which some are computed on a `device`, and the others by the CPU at the same time.

    Each part rounds its sums to the dtype of x, and the two are then added and rounded once more: in float32
    the result is that of one set of experts but for the order of additions, in 16 bits it may differ in the
    last place. A token's result depends on where its experts are computed, but not on the other tokens of the
    call where neither part's does."""

    def __init__(self, device: ReplaceableExperts | None, host: ReadableExperts, link: HostLink) -> None:
        """Take all experts as `host`, and in the places of `device` copies of the first of them; None: it has
        no places."""
        self.num_experts, self.hidden_size = host.num_experts, host.hidden_size
        self._device, self._host, self._link = device, host, link
        # The tokens that each expert has had.
        self.counts = np.zeros(self.num_experts, np.int64)
        numbers = np.arange(self.num_experts, dtype=np.int32)
        self._places = np.where(numbers < self.num_places, numbers, np.int32(-1))
        # The same on the device, and last the place of an expert of -1.
        self._device_places = torch.from_numpy(np.append(self._places, np.int32(-1))).to(link.device)

    @property
    def num_places(self) -> int:
        """The number of experts of which the device has copies."""
        return 0 if self._device is None else self._device.num_experts

    @property
    def places(self) -> NDArray[np.int32]:
        """The place of each expert on the device, [num_experts]; -1 for those that the CPU computes."""
        return self._places.copy()

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        # All rows are copied: to wait for those that the CPU has to compute would take a second way.
        arrival = self._link.begin_out((x, *routing))
        on_device = self._on_device(x, routing)
        in_host = self._in_host(*arrival())
        if in_host is None:
            return torch.zeros_like(x) if on_device is None else on_device
        sums = self._link.pinned(in_host).to(x.device, non_blocking=True)
        return sums if on_device is None else on_device.add_(sums)

    def add_to(self, hidden: Tensor, x: Tensor, routing: Routing) -> None:
        hidden.add_(self(x, routing))

    def swap(self, incoming: int, outgoing: int) -> None:
        """Give the place of an expert of the device to one that has none. On CUDA the work that was queued
        before still finds the old one."""
        place = int(self._places[outgoing])
        assert self._device is not None
        assert place >= 0
        assert self._places[incoming] < 0
        rows = self._host.rows(incoming)
        pinned = self._link.pinned
        biases = (None if it is None else pinned(it) for it in (rows.gate_up_bias, rows.down_bias))
        self._device.replace(place, ExpertRows(pinned(rows.gate_up), pinned(rows.down), *biases))
        self._places[incoming], self._places[outgoing] = place, -1
        self._device_places[incoming] = place
        self._device_places[outgoing] = -1

    def _on_device(self, x: Tensor, routing: Routing) -> Tensor | None:
        """Queue the sums over the experts of the device; None if it has none."""
        if self._device is None:
            return None
        return self._device(x, routing._replace(experts=self._device_places[routing.experts]))

    def _in_host(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor | None:
        """Compute the sums over the other experts by the CPU; None if no token chose any."""
        numbers = experts.numpy()
        held = numbers[numbers >= 0]
        self.counts += np.bincount(held, minlength=self.num_experts)
        is_in_host = (numbers >= 0) & (self._places[numbers] < 0)
        if not is_in_host.any():
            return None
        others = torch.from_numpy(np.where(is_in_host, numbers, np.int32(-1)))
        return self._host(x, Routing(others, weights))


def split_experts(
    weights: ExpertWeights,
    device: torch.device,
    num_in_host: int,
    upload: Callable[[Tensor], Tensor] | None = None,
) -> SplitExperts:
    """Return experts with `weights` in host memory, of which `device` computes all but `num_in_host`: at
    first those of the lowest numbers. `upload` copies a tensor to the device; None: torch does. Weights on
    the device "meta" have no values, and the CPU computes nothing with them."""
    assert all(it[0].device.type in ("cpu", "meta") for it in (weights.ups, weights.downs))
    host = TorchExperts(weights) if weights.ups[0].is_meta else make_experts(weights)
    assert isinstance(host, ReadableExperts)
    num_places = host.num_experts - num_in_host
    assert 0 <= num_places <= host.num_experts, num_in_host
    upload = upload or (lambda tensor: tensor.to(device))
    copies = _device_experts(_copied(weights, num_places, upload)) if num_places else None
    return SplitExperts(copies, host, host_link(device))


def _copied(weights: ExpertWeights, count: int, upload: Callable[[Tensor], Tensor]) -> ExpertWeights:
    """Return the first `count` experts on the device, each copied when it is taken."""

    def on_device(of_all: Sequence[Tensor]) -> ReadWhenTaken[Tensor]:
        return ReadWhenTaken(count, lambda number: upload(of_all[number]))

    gate_up_bias, down_bias = (
        None if bias is None else upload(bias[:count].clone())
        for bias in (weights.gate_up_bias, weights.down_bias)
    )
    return dataclasses.replace(
        weights,
        gates=on_device(weights.gates) if weights.gates else (),
        ups=on_device(weights.ups),
        downs=on_device(weights.downs),
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )


def _device_experts(weights: ExpertWeights) -> ReplaceableExperts:
    """Return the experts of the device. On a CPU, which tests take for a device, packed ones could not be
    replaced."""
    if weights.ups[0].device.type == "cpu":
        return TorchExperts(weights)
    made = make_experts(weights)
    return made if isinstance(made, ReplaceableExperts) else TorchExperts(weights)
