"""The limits of the machine: the roofline of a step, and the time of a chunk's products alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvtransfer.common.clock import Clock
from kvtransfer.common.host import cache_bytes
from workers.model.make_linear import make_linear
from workers.model.model_config import ModelConfig
from workers.model.sizes import ModelWork, attention_products
from workers.model.weight_bytes import WeightBytes
from workers.rank.probe import DeviceLimits, best_s

_CPU = torch.device("cpu")
_PACK_ROWS = 512
_TRIAL_ROWS = 16
# A kind of product this many times slower than the best at few rows, or at many, is not timed again.
_HOPELESS = 3.0
_CLOSE = 1.3
_NUM_RUNS = 3
# A process rarely has more of a large cache for itself.
_MOST_CACHE_BYTES = 64 << 20


class Roofline:
    """The roofline of a machine: the tokens a second that its arithmetic and memory allow. A model that fits
    the caches may exceed the memory bound."""

    def __init__(
        self, config: ModelConfig, item_bytes: int, machine: DeviceLimits, weights: WeightBytes | None = None
    ) -> None:
        """`item_bytes` are those of a KV value, and of a weight unless the form of `weights` is given."""
        self._work = ModelWork(config, item_bytes, weights=weights)
        self._flop_s, self._byte_s = machine

    def prefill_tok_s(self, num_tokens: int) -> float:
        """Bound one prompt: linear layers and causal attention for every token, the head once, weights read
        once."""
        flops = self._work.of([(0, num_tokens)], 1).flops
        return num_tokens / max(flops / self._flop_s, self._work.read_weight_bytes(num_tokens) / self._byte_s)

    def decode_tok_s(self, batch: int, mean_context: float) -> float:
        """Bound one decode step by the lower of arithmetic and memory; weights and all KV are read once."""
        work = self._work.of([(mean_context - 1, 1)] * batch, batch)
        return batch / max(work.read_bytes / self._byte_s, work.flops / self._flop_s)


class _Candidate(NamedTuple):
    """One way to compute a product; `run` takes rows and returns after all `num_copies` of the weight."""

    name: str
    run: Callable[[Tensor], None]
    num_copies: int


class _ChunkProduct(NamedTuple):
    """A product of a chunk: its outputs, its inputs, and its rows."""

    num_outputs: int
    num_inputs: int
    num_rows: int


class LayerProducts:
    """The linear products of a layer with random weights, by the fastest of what torch offers on a CPU
    (oneDNN and MKL, in the model's dtype or in float32) and of ours."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, num_rows: int, clock: Clock) -> None:
        self._clock = clock
        shapes: Counter[_ChunkProduct] = Counter()
        for layer in range(config.num_layers):
            shapes += _layer_shapes(config, layer, num_rows)
        # For each shape its number in all layers, its rows, and ways to compute it.
        self._products = []
        for (num_outputs, size, rows_of_each), count in shapes.items():
            rows = torch.randn(rows_of_each, size).to(dtype)
            self._products.append((count, rows, self._chosen(_candidates(num_outputs, size, dtype), rows)))

    @torch.inference_mode()
    def seconds(self) -> float:
        """Return the seconds of all layers' products of one chunk, each by the kind that is fastest now."""
        return sum(
            count * min(self._best_s(each, rows, _NUM_RUNS) for each in candidates)
            for count, rows, candidates in self._products
        )

    @torch.inference_mode()
    def _chosen(self, candidates: list[_Candidate], rows: Tensor) -> list[_Candidate]:
        for part, most in ((rows[:_TRIAL_ROWS], _HOPELESS), (rows, _CLOSE)):
            times = [self._best_s(each, part, 1) for each in candidates]
            candidates = [
                each for each, time_s in zip(candidates, times, strict=True) if time_s <= most * min(times)
            ]
        return candidates

    def _best_s(self, candidate: _Candidate, rows: Tensor, num_runs: int) -> float:
        return best_s(lambda: candidate.run(rows), self._clock, _CPU, num_runs) / candidate.num_copies


def _layer_shapes(config: ModelConfig, layer: int, num_rows: int) -> Counter[_ChunkProduct]:
    """Count the products of a layer for a chunk of `num_rows` tokens, which choose experts evenly."""
    hidden, intermediate = config.hidden_size, config.intermediate_size_of(layer)
    shapes = Counter(_ChunkProduct(*shape, num_rows) for shape in attention_products(config, layer))
    mixture = config.mixture if config.has_experts(layer) else None
    sizes = [intermediate] if mixture is None else [intermediate, mixture.shared_size]
    for size in filter(None, sizes):
        shapes[_ChunkProduct(2 * size, hidden, num_rows)] += 1
        shapes[_ChunkProduct(hidden, size, num_rows)] += 1
    if mixture is not None:
        num_experts, num_chosen = mixture.rule.num_experts, mixture.rule.num_chosen
        of_each = max(1, num_rows * num_chosen // num_experts)
        shapes[_ChunkProduct(2 * mixture.size, hidden, of_each)] += num_experts
        shapes[_ChunkProduct(hidden, mixture.size, of_each)] += num_experts
    return shapes


def _candidates(num_outputs: int, size: int, dtype: torch.dtype) -> list[_Candidate]:
    num_copies = num_weight_copies(num_outputs * size * dtype.itemsize, cache_bytes())
    weights = [torch.randn(num_outputs, size).to(dtype) * size**-0.5 for _ in range(num_copies)]
    ours = [make_linear(weight.clone()) for weight in weights]
    found: dict[str, Callable[[Tensor], None]] = {
        "ours": lambda rows: _each(ours, lambda product: product(rows)),
        "torch": lambda rows: _each(weights, lambda weight: F.linear(rows, weight)),
    }
    if dtype != torch.float32:
        wide = [weight.float() for weight in weights]
        found["torch float32"] = lambda rows: _each(
            wide, lambda weight: F.linear(rows.float(), weight).to(dtype)
        )
    if dtype == torch.bfloat16 and multiplies_bf16():
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS) for weight in weights]
        product = torch.ops.mkldnn._linear_pointwise
        found["oneDNN packed"] = lambda rows: _each(
            packed, lambda weight: product(rows, weight, None, "none", [], "")
        )
    return [_Candidate(name, run, num_copies) for name, run in found.items()]


def num_weight_copies(weight_bytes: int, cache_bytes: int) -> int:
    """Return how many weights do not fit into the cache together, or are a lot: a model's are read from
    memory too."""
    return max(2, 1 + -(-min(cache_bytes, _MOST_CACHE_BYTES) // weight_bytes))


def multiplies_bf16() -> bool:
    """Return whether oneDNN multiplies bf16 on this CPU; with AVX2 alone it refuses such weights."""
    # torch offers no public question.
    is_supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.backends.mkldnn.is_available() and is_supported  # type: ignore[no-untyped-call]


def _each(weights: list[Any], work: Callable[[Any], Tensor]) -> None:
    for weight in weights:
        work(weight)
