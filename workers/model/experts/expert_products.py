"""The products of a layer's experts: the interface, and the experts in plain torch."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.experts.mixture_shape import DEFAULT_CLAMP, Clamp, ExpertActivation
from workers.model.experts.routing import Routing
from workers.model.relu2 import relu2


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of a layer's experts: of each expert the rows of its gate and of its up [size,
    hidden_size], and of its down [hidden_size, size], without `gates` where the activation is `relu2`; biases
    `gate_up_bias` [num_experts, 2 * size], those of gates first, and `down_bias` [num_experts, hidden_size],
    or None.

    Tensors may be views of a mapped checkpoint, to be packed or copied once, and have contiguous rows."""

    gates: Sequence[Tensor]
    ups: Sequence[Tensor]
    downs: Sequence[Tensor]
    activation: ExpertActivation = "silu"
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    clamp: Clamp = DEFAULT_CLAMP


class ExpertRows(NamedTuple):
    """The weights of one expert: the rows of its gate and then of its up [2 * size, hidden_size], or of its
    up alone, those of its down [hidden_size, size], and its biases [2 * size] and [hidden_size], or None."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Experts(ABC):
    """Computes, for each token, the weighted sum of the results of its experts.

    Weights and sums are float32; a sum is rounded to the dtype of x once. Experts are added in the order of
    their numbers, so that the order in which a router names them does not matter."""

    num_experts: int
    hidden_size: int

    @abstractmethod
    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """Compute the sums for x [num_tokens, hidden_size], which has contiguous rows; [num_tokens,
        hidden_size]."""

    @abstractmethod
    def add_to(self, hidden: Tensor, x: Tensor, routing: Routing) -> Tensor | None:
        """Add the sums to `hidden` [num_tokens, hidden_size] and return None; or return them, for the norm
        that follows to add, where that takes fewer kernels."""


class ReadableExperts(Experts):
    """Experts whose weights can be read back."""

    @abstractmethod
    def rows(self, expert: int) -> ExpertRows:
        """Return the weights of an expert, as they were given."""


class ReplaceableExperts(Experts):
    """Experts whose weights can be overwritten, one expert at a time."""

    @abstractmethod
    def replace(self, expert: int, rows: ExpertRows) -> None:
        """Overwrite the weights of an expert by those of another of the same shape, in host memory, which on
        CUDA is pinned: the copy takes its turn in the work of the current stream, without more memory."""


class CopyableExperts(Experts):
    """Experts whose memory can be copied over that of others of the same class and sizes, of another rank
    too."""

    @abstractmethod
    def memory(self, expert: int) -> list[Tensor]:
        """Return the contiguous tensors in which the weights of an expert are, in the kernels' own layout."""


class CountingExperts(Experts):
    """Experts that count the tokens of each, in int64 `counts` [num_experts]."""

    counts: Tensor


class TorchExperts(ReadableExperts, ReplaceableExperts, CopyableExperts):
    """Experts by torch, on any device and of any dtype, one after another."""

    def __init__(self, weights: ExpertWeights) -> None:
        inner = (weights.gates, weights.ups) if weights.gates else (weights.ups,)
        self._gate_up = torch.stack([torch.cat(parts) for parts in zip(*inner, strict=True)])
        self._down = torch.stack(list(weights.downs))
        self._weights = dataclasses.replace(weights, gates=(), ups=(), downs=())
        self.num_experts, self.hidden_size, _ = self._down.shape

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        sums = x.new_zeros(x.shape, dtype=torch.float32)
        for expert in range(self.num_experts):
            tokens, places = torch.where(routing.experts == expert)
            if not len(tokens):
                continue
            result = self._result(expert, x[tokens]).float()
            sums.index_add_(0, tokens, result.mul_(routing.weights[tokens, places, None]))
        return sums.to(x.dtype)

    def add_to(self, hidden: Tensor, x: Tensor, routing: Routing) -> None:
        hidden.add_(self(x, routing))

    def rows(self, expert: int) -> ExpertRows:
        biases = (self._weights.gate_up_bias, self._weights.down_bias)
        return ExpertRows(
            self._gate_up[expert], self._down[expert], *(None if it is None else it[expert] for it in biases)
        )

    def replace(self, expert: int, rows: ExpertRows) -> None:
        for own, new in zip(self.rows(expert), rows, strict=True):
            if own is not None:
                assert new is not None
                own.copy_(new, non_blocking=True)

    def memory(self, expert: int) -> list[Tensor]:
        return [it for it in self.rows(expert) if it is not None]

    def _result(self, expert: int, x: Tensor) -> Tensor:
        """Compute the result of one expert for x [num_rows, hidden_size]."""
        up_bias, down_bias = self._weights.gate_up_bias, self._weights.down_bias
        gate_up = F.linear(x, self._gate_up[expert], None if up_bias is None else up_bias[expert])
        activated = gated(gate_up, self._weights.activation, self._weights.clamp)
        return F.linear(activated, self._down[expert], None if down_bias is None else down_bias[expert])


def gated(gate_up: Tensor, activation: ExpertActivation, clamp: Clamp) -> Tensor:
    """Compute the activation of `gate_up` [num_rows, 2 * size], whose first half of columns is gate; with
    `relu2` of ups alone."""
    if activation == "relu2":
        return relu2(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * clamp.alpha))
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated * up
