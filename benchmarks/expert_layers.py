"""Experts of a layer with random weights on a device, and steps of them as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.random_quantized import QuantizedForm, draw_quantized
from workers.model.experts.expert_products import Experts, ExpertWeights
from workers.model.experts.make_experts import make_experts, make_quantized_experts
from workers.model.experts.quantized_experts import QuantizedExpertWeights
from workers.model.experts.routing import Routing
from workers.model.experts.stack_weights import stack_weights
from workers.model.experts.stored_experts import ReadWhenTaken
from workers.model.quantization.quantized_weight import QuantizedWeight

DTYPE = torch.bfloat16


class RandomExperts:
    """The experts of a layer of a model, whose sizes are keys of config.json; without a `form` in
    bfloat16."""

    def __init__(self, sizes: dict[str, Any], form: QuantizedForm | None, device: torch.device) -> None:
        self._num_experts: int = sizes["num_experts"]
        self._num_chosen: int = sizes["num_experts_per_tok"]
        self._hidden_size: int = sizes["hidden_size"]
        self._size: int = sizes["moe_intermediate_size"]
        self._inner = self._size, self._hidden_size
        self._form, self._device = form, device
        self.experts: Experts = self._floats() if form is None else self._quantized(form)

    def _floats(self) -> Experts:
        def each(rows: int, columns: int) -> ReadWhenTaken[Tensor]:
            def draw(_: int) -> Tensor:
                return torch.randn(rows, columns, dtype=DTYPE, device=self._device).mul_(columns**-0.5)

            return ReadWhenTaken(self._num_experts, draw)

        return make_experts(ExpertWeights(each(*self._inner), each(*self._inner), each(*self._inner[::-1])))

    def _quantized(self, form: QuantizedForm) -> Experts:
        def each(rows: int, columns: int) -> ReadWhenTaken[QuantizedWeight]:
            return ReadWhenTaken(
                self._num_experts, lambda _: draw_quantized(form, rows, columns, self._device)
            )

        products = each(*self._inner), each(*self._inner), each(*self._inner[::-1])
        return make_quantized_experts(QuantizedExpertWeights(*products, dtype=DTYPE))

    @property
    def expert_bytes(self) -> int:
        """The size of one expert."""
        if self._form is None:
            return 3 * self._size * self._hidden_size * DTYPE.itemsize
        shapes = self._inner, self._inner, self._inner[::-1]
        stacks = [stack_weights(([draw_quantized(self._form, *it, self._device)],)) for it in shapes]
        return sum(it.num_bytes for it in stacks if it is not None)

    def draw_rows(self, num_tokens: int) -> tuple[Tensor, Routing]:
        """Draw hidden states, and the experts that they choose, all sets of them alike."""
        x = torch.randn(num_tokens, self._hidden_size, device=self._device).to(DTYPE)
        scores = torch.rand(num_tokens, self._num_experts, device=self._device)
        experts = scores.topk(self._num_chosen).indices.int().contiguous()
        return x, Routing(experts, torch.full(experts.shape, 1 / self._num_chosen, device=self._device))


def graph_of(steps: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Record the steps, one after another, as a CUDA graph, and return what replays it."""
    for step in steps:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    return graph.replay
