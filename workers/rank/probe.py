"""Measure a rank's device: what a step of the model costs, what the device can do, and how full its memory
is.

A rank that joins its replica measures, before it loads, with random weights of the model's shape and of the
form that weights of products will have. From the costs of all stages the engine core decides the layers of
each."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvtransfer.common.clock import Clock
from workers.messages.rank_channel import StageCost
from workers.model import native
from workers.model.apply_norm import apply_norm
from workers.model.attention.choice import choose_attention
from workers.model.attention.interface import AttentionShape, LayerAttention, SequenceSpan, StepInput
from workers.model.decoder_layer import DecoderLayer
from workers.model.embedding import Embedding
from workers.model.experts.expert_products import ExpertWeights
from workers.model.experts.mixture_shape import ExpertActivation, MixtureShape
from workers.model.experts.mixture_weights import MixtureWeights, SharedWeights
from workers.model.experts.quantized_experts import QuantizedExpertWeights
from workers.model.latent_shape import LatentShape
from workers.model.latent_weights import LatentWeights
from workers.model.linear_weights import LinearWeights, as_parts
from workers.model.make_linear import make_linear
from workers.model.model_config import ModelConfig
from workers.model.norm import Norm
from workers.model.products import Workspace
from workers.model.quantization.drawn_weight import drawn_weight
from workers.model.quantization.kept_forms import has_experts, has_products
from workers.model.quantization.quantized_weight import QuantizedWeight
from workers.model.quantization.stored_format import StoredFormat
from workers.model.quantization.weight_form import AS_STORED, WeightForm
from workers.model.rope import rotation_of
from workers.model.sizes import held_experts, layer_heads, mean_layer_share, part
from workers.model.weights import BlockNorms, LayerWeights
from workers.model.xielu import Xielu
from workers.stats_record import DeviceMemory

# The number of earlier tokens that the step for `attention_ratio` attends to, as far as the model's context
# allows.
_EARLIER_TOKENS = 2048
# The names of a head, and of an embedding that is the head too, as formats name products.
_TABLES = ("lm_head", "model.embed_tokens")
# The head, which can be as large as ten layers, is measured on a part of this size; its time is scaled.
_HEAD_ROWS = 8192
# Each of the four times is the best of the runs that fit into this time, at least two and at most
# `_MOST_RUNS`.
_BUDGET_S = 0.15
_MOST_RUNS = 8
_PATTERN_ITEMS = 1 << 20
_SMALL_GEMM = 256
# A kind of product this many times slower than the best on small matrices is not measured on large ones.
_HOPELESS = 3.0
_LINEAR_SIZE = 1024
_LINEAR_REPEAT = 3
_LINEAR_ROWS = 256
# The second number is how many pages of memory this process has in use.
_OWN_PAGES = Path("/proc/self/statm")


class MeasureSizes(NamedTuple):
    """Rows of a square matrix, bytes to read, and number of runs, of which the best counts."""

    gemm: int
    read_bytes: int
    repeat: int


# The sizes, by device type, that measure the device within a tenth of a second.
AT_START = {"cpu": MeasureSizes(768, 48 << 20, 3), "cuda": MeasureSizes(8192, 1 << 30, 5)}


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The measurements of a probe. `attention_ratio` is the cost of attending to one earlier token, in units
    of one token's products."""

    cost: StageCost
    attention_ratio: float


class Probe:
    """Measures one layer, the embedding and the head of `tp_rank`'s share of a model. The layer attends; the
    others, which may keep a state or have another feed-forward, cost by their weights in proportion."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: int,
        tp_rank: int,
        ep: int = 1,
        dtype: torch.dtype,
        device: torch.device,
        block_tokens: int,
        clock: Clock,
        form: WeightForm = AS_STORED,
    ) -> None:
        self._config = config
        self._stored = _stored_format(config, form, device)
        self._table = _table_format(config, form, device)
        self._num_heads, self._num_kv_heads = map(len, layer_heads(config, 0, tp_rank, tp))
        self._head_dim = config.heads_of(0).head_dim
        # The layer that is measured: one with experts where there are any, as most layers are such then.
        self._layer = config.mixture.layers[0] if config.mixture is not None else 0
        self._tp_rank, self._tp, self._ep = tp_rank, tp, ep
        self._vocab_size = len(part(config.vocab_size, tp_rank, tp))
        self._dtype = dtype
        self._device = device
        self._block_tokens = block_tokens
        self._clock = clock
        generator = torch.Generator().manual_seed(0)
        pattern = torch.empty(_PATTERN_ITEMS).uniform_(-0.02, 0.02, generator=generator)
        self._pattern = pattern.to(device, dtype)

    @torch.inference_mode()
    def measure(self, num_rows: int, num_sampled_rows: int) -> ProbeResult:
        """Measure a step of `num_rows` tokens, `num_sampled_rows` of which go through the head."""
        num_earlier = max(0, min(_EARLIER_TOKENS, self._config.max_context_tokens - num_rows))
        layer_s, later_s = self._layer_s(num_rows, num_earlier)
        attending = [layer for layer in range(self._config.num_layers) if self._config.has_attention(layer)]
        share = mean_layer_share(self._config, attending[0], self._layer)
        cost = StageCost(layer_s * share, self._embedding_s(num_rows), self._head_s(num_sampled_rows))
        ratio = attention_ratio(layer_s, later_s, num_rows, num_earlier)
        return ProbeResult(cost, ratio * len(attending) / self._config.num_layers / share)

    def _layer_s(self, num_rows: int, num_earlier: int) -> tuple[float, float]:
        """Time one layer over a sequence's first `num_rows` tokens, and over as many after `num_earlier`."""
        config = self._config
        layer = DecoderLayer(
            self._layer_weights(), config, LayerAttention(0, 0), Workspace(), is_split=self._tp > 1
        )
        blocks = range(-(-(num_earlier + num_rows) // self._block_tokens))
        num_kinds = config.kv_cells.num_kinds
        kv_shape = (len(blocks), 1, num_kinds, self._num_kv_heads, self._block_tokens, self._head_dim)
        kv = torch.zeros(kv_shape, dtype=self._dtype, device=self._device)
        num_rotated = self._head_dim if config.latent is None else config.latent.qk_rope_head_dim
        rotation = rotation_of(config.ropes[0], num_rotated, self._device)
        scale, softcap = config.attention_scale or None, config.attention_softcap
        shape = AttentionShape(self._num_heads, (0,), (rotation,), scale, softcap, latent=config.latent)
        attention = choose_attention(shape, kv)

        def run(start: int) -> None:
            step = StepInput.of([SequenceSpan(start, num_rows, blocks)], self._block_tokens)
            layer.forward(self._random(num_rows, config.hidden_size), attention.plan(step))

        return self._best_s(lambda: run(0)), self._best_s(lambda: run(num_earlier))

    def _embedding_s(self, num_rows: int) -> float:
        table = self._random(min(self._vocab_size, _HEAD_ROWS), self._config.hidden_size)
        tokens = torch.arange(num_rows, device=self._device) % len(table)
        embedding = Embedding(table)
        return self._best_s(lambda: embedding(tokens))

    def _head_s(self, num_rows: int) -> float:
        size = self._config.hidden_size
        num_measured = min(self._vocab_size, _HEAD_ROWS)
        head = make_linear(as_parts((self._weight(self._table, num_measured, size),)))
        norm, hidden = self._hidden_norm(), self._random(num_rows, size)
        measured_s = self._best_s(lambda: head.floats(apply_norm(hidden, norm)))
        return measured_s * self._vocab_size / num_measured

    def _layer_weights(self) -> LayerWeights:
        config, random = self._config, self._random
        hidden, head_dim = config.hidden_size, self._head_dim
        query_size = self._num_heads * head_dim
        mixed_size = query_size if config.latent is None else self._num_heads * config.latent.v_head_dim
        num_queries = 1 + config.traits.has_output_gate
        qkv_size = num_queries * query_size + 2 * self._num_kv_heads * head_dim
        names = dataclasses.astuple(config.norm_names(self._layer))
        norm_sizes = (head_dim, head_dim) if config.qk_norm else (query_size, self._num_kv_heads * head_dim)
        has_qk_norms = config.qk_norm or config.qk_row_norm or config.qk_own_norms
        qk_norms = [self._norm(size) if has_qk_norms else None for size in norm_sizes]
        if config.qk_own_norms:
            qk_norms = [
                Norm(random(num_heads, head_dim).float(), config.rms_norm_eps, is_layer_norm=True)
                for num_heads in (self._num_heads, self._num_kv_heads)
            ]
        size = self._part(config.intermediate_size_of(self._layer))
        num_ups = 2 if config.traits.is_gated else 1
        mixture = config.mixture if config.has_experts(self._layer) else None
        return LayerWeights(
            norms=BlockNorms(*(self._hidden_norm() if name else None for name in names)),
            qkv=self._linear(qkv_size, hidden, has_bias=config.qkv_bias) if config.latent is None else None,
            q_norm=qk_norms[0],
            k_norm=qk_norms[1],
            output=self._linear(hidden, mixed_size),
            gate_up=self._linear(size, hidden, num_parts=num_ups) if size else None,
            down=self._linear(hidden, size) if size else None,
            sinks=random(self._num_heads).float() if config.traits.has_sinks else None,
            xielu=Xielu(1.0, 1.0, 0.5, -1e-6) if config.activation == "xielu" else None,
            mixture=None if mixture is None else self._mixture_weights(mixture),
            latent=None if config.latent is None else self._latent_weights(config.latent),
        )

    def _linear(
        self, num_outputs: int, num_inputs: int, *, num_parts: int = 1, has_bias: bool = False
    ) -> LinearWeights:
        bias = self._random(num_outputs) if has_bias else None
        part = self._weight(self._stored, num_outputs, num_inputs)
        return LinearWeights(as_parts((part,) * num_parts), bias)

    def _weight(
        self, stored: StoredFormat | None, num_outputs: int, num_inputs: int
    ) -> Tensor | QuantizedWeight:
        """Return a weight of this format, if there are products for it; else of floats."""
        quantized = None if stored is None else drawn_weight(stored, num_outputs, num_inputs, self._device)
        if quantized is not None and has_products(quantized):
            return quantized
        return self._random(num_outputs, num_inputs)

    def _latent_weights(self, shape: LatentShape) -> LatentWeights:
        latents, queries, expansion, _ = shape.products(self._config.hidden_size, self._num_heads)
        return LatentWeights(
            self._linear(*latents, has_bias=self._config.qkv_bias),
            self._norm(shape.q_lora_rank) if shape.q_lora_rank else None,
            self._linear(*queries),
            self._norm(shape.kv_lora_rank),
            LinearWeights((self._random(*expansion),), None),
        )

    def _part(self, size: int) -> int:
        return len(part(size, self._tp_rank, self._tp))

    def _mixture_weights(self, shape: MixtureShape) -> MixtureWeights:
        """Return experts of which all take the same pattern for weights, and a router that chooses evenly."""
        hidden, rule = self._config.hidden_size, shape.rule
        held = held_experts(shape, self._tp_rank, self._tp, self._ep)
        size, num_held = len(held.columns), len(held.experts)
        activation = self._config.activation if shape.clamp is None else "clamped_swiglu"
        assert activation in ("silu", "gelu_tanh", "clamped_swiglu", "relu2")
        shared = None
        if shape.shared_size:
            num_columns = self._part(shape.shared_size)
            gate_up = self._linear(num_columns, hidden, num_parts=1 + shape.is_gated)
            shared = SharedWeights(gate_up, self._linear(hidden, num_columns), None)
        router = torch.randn(rule.num_experts, hidden, generator=torch.Generator().manual_seed(0))
        weights = router.to(self._device, self._dtype)
        experts = self._experts(shape, size, num_held, activation)
        return MixtureWeights(LinearWeights((weights,), None), None, held.experts, experts, shared)

    def _experts(
        self, shape: MixtureShape, size: int, num_held: int, activation: ExpertActivation
    ) -> ExpertWeights | QuantizedExpertWeights:
        hidden = self._config.hidden_size
        up, down = self._weight(self._stored, size, hidden), self._weight(self._stored, hidden, size)
        if isinstance(up, QuantizedWeight) and isinstance(down, QuantizedWeight) and has_experts(up):
            parts, others = [up] * num_held, [down] * num_held
            return QuantizedExpertWeights(parts if shape.is_gated else [], parts, others, activation)
        ups, downs = (self._random(size, hidden),) * num_held, (self._random(hidden, size),) * num_held
        return ExpertWeights(ups if shape.is_gated else (), ups, downs, activation)

    def _norm(self, size: int) -> Norm:
        traits = self._config.traits
        return Norm(self._random(size).float(), self._config.rms_norm_eps, traits.is_norm_rounded_first)

    def _hidden_norm(self) -> Norm:
        is_layer_norm = self._config.traits.is_layer_norm
        return dataclasses.replace(self._norm(self._config.hidden_size), is_layer_norm=is_layer_norm)

    def _random(self, *shape: int) -> Tensor:
        """Repeat a drawn pattern: drawing each number of a large layer would take seconds."""
        num_items = torch.Size(shape).numel()
        whole = self._pattern.expand(-(-num_items // len(self._pattern)), -1)
        return whole.reshape(-1)[:num_items].clone().view(shape)

    def _best_s(self, work: Callable[[], object]) -> float:
        runs = itertools.islice(_run_times(work, self._clock, self._device), 1, None)
        times = [next(runs), next(runs)]
        while sum(times) < _BUDGET_S and len(times) < _MOST_RUNS:
            times.append(next(runs))
        return min(times)


def _stored_format(config: ModelConfig, form: WeightForm, device: torch.device) -> StoredFormat | None:
    """Return the format of the model's products on the device: that of the most names where there are
    several; None: floats."""
    kept = form.on(device.type)
    if kept.rounded is not None or not kept.keeps_stored or config.quantization is None:
        return kept.rounded
    formats = config.quantization.formats
    return max(formats, key=lambda it: (it.has_all, len(it.targets))).format if formats else None


def _table_format(config: ModelConfig, form: WeightForm, device: torch.device) -> StoredFormat | None:
    """Return the format of the model's head on the device, if the checkpoint names one; None: floats."""
    kept = form.on(device.type)
    if kept.rounded_table is not None or not kept.keeps_stored or config.quantization is None:
        return kept.rounded_table
    found = [it for it in config.quantization.formats if any(map(it.names, _TABLES))]
    return found[0].format if found else None


def attention_ratio(first_s: float, later_s: float, num_rows: int, num_earlier: int) -> float:
    """Compute `ProbeResult.attention_ratio` from the time of a chunk at the start of its prompt, in which a
    token attends to half a chunk on average, and of a chunk after `num_earlier` tokens."""
    if num_earlier == 0:
        return 0.0
    attend_s = max(0.0, later_s - first_s) / (num_rows * num_earlier)
    products_s = first_s / num_rows - attend_s * num_rows / 2
    return attend_s / products_s if products_s > 0 else 0.0


class DeviceLimits(NamedTuple):
    """Operations and bytes a second of one rank's share of its device, as measured along with other ranks
    that start with it."""

    flop_s: float
    byte_s: float


def measure_limits(
    device: torch.device, dtype: torch.dtype, clock: Clock, sizes: MeasureSizes
) -> DeviceLimits:
    """Measure the device with torch's number of threads.

    Arithmetic is that of the fastest kind of product of `dtype`, which need not be the kind that the engine
    uses: where a CPU emulates bf16, it is faster to compute in float32.
    """
    gemm_s = _fastest_gemm_s(device, dtype, clock, sizes)
    memory = torch.ones(sizes.read_bytes // 4, device=device)
    read_s = best_s(memory.sum, clock, device, sizes.repeat)
    if device.type == "cuda":
        del memory
        torch.cuda.empty_cache()
    return DeviceLimits(flop_s=2 * sizes.gemm**3 / gemm_s, byte_s=sizes.read_bytes / read_s)


def linear_flop_s(device: torch.device, dtype: torch.dtype, clock: Clock) -> float:
    """Measure the operations a second of a linear layer as the engine computes it, over a tile of a
    prompt."""
    size = _LINEAR_SIZE
    linear = make_linear(torch.randn(size, size, device=device).to(dtype))
    rows = torch.randn(_LINEAR_ROWS, size, device=device).to(dtype)
    return 2 * _LINEAR_ROWS * size**2 / best_s(lambda: linear(rows), clock, device, _LINEAR_REPEAT)


class ProductKind(NamedTuple):
    """A way to compute a product: in this dtype, with a packed weight or by torch."""

    dtype: torch.dtype
    is_packed: bool


def product_kinds(device: torch.device, dtype: torch.dtype) -> list[ProductKind]:
    """Return the kinds of products of `dtype` that lose no precision: in it, and on CPUs also in float32."""
    if device.type != "cpu":
        return [ProductKind(dtype, False)]
    dtypes = dict.fromkeys((torch.float32, dtype))
    found = [ProductKind(each, True) for each in dtypes if native.serves(device, each)]
    return found + [ProductKind(each, False) for each in dtypes]


def _fastest_gemm_s(device: torch.device, dtype: torch.dtype, clock: Clock, sizes: MeasureSizes) -> float:
    """Return the seconds of a product of square matrices by the fastest kind."""
    candidates = product_kinds(device, dtype)
    if len(candidates) > 1:
        small = min(_SMALL_GEMM, sizes.gemm)
        times = [best_s(_product(kind, small, device), clock, device, 1) for kind in candidates]
        candidates = [
            kind for kind, time_s in zip(candidates, times, strict=True) if time_s <= _HOPELESS * min(times)
        ]
    return min(best_s(_product(kind, sizes.gemm, device), clock, device, sizes.repeat) for kind in candidates)


def _product(kind: ProductKind, size: int, device: torch.device) -> Callable[[], object]:
    square = torch.randn(size, size, device=device).to(kind.dtype)
    if not kind.is_packed:
        return lambda: square @ square
    linear = make_linear(square)
    return lambda: linear(square)


def device_memory(device: torch.device) -> DeviceMemory:
    """Return a GPU's memory as its driver reports it; on a CPU the process's and the host's."""
    if device.type == "cuda":
        num_free, num_total = torch.cuda.mem_get_info(device)
        return DeviceMemory(num_total - num_free, num_total)
    num_pages = int(_OWN_PAGES.read_text().split()[1])
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return DeviceMemory(num_pages * page_bytes, os.sysconf("SC_PHYS_PAGES") * page_bytes)


def synchronize(device: torch.device) -> None:
    """Wait for all queued work of a CUDA device; a CPU's work is done when its calls return."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best_s(work: Callable[[], object], clock: Clock, device: torch.device, num_runs: int) -> float:
    """Return the seconds of the fastest of `num_runs` runs, after a first one that is dropped."""
    return min(itertools.islice(_run_times(work, clock, device), 1, 1 + num_runs))


def _run_times(work: Callable[[], object], clock: Clock, device: torch.device) -> Iterator[float]:
    """Yield the seconds of one run after the other. The first compiles, and touches the memory."""
    while True:
        started_at = clock.now()
        work()
        synchronize(device)
        yield clock.now() - started_at
