"""What a step costs on this device, measured with random weights of the model's shape before it is loaded.

Called by a rank that joins its replica; from the figures of all stages the engine core decides their layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtransfer.common.clock import Clock
from workers.messages import StageCost
from workers.model.attention_batch import AttentionBatch, SequenceSpan
from workers.model.layers import DecoderLayer, Embedding, Linear, rms_norm, rope_frequencies, rope_table
from workers.model.model_config import ModelConfig
from workers.model.split import kv_heads, part, query_heads
from workers.model.weights import LayerWeights, LinearWeights

# How many earlier tokens the step for `attention_ratio` attends to, where the model's context allows.
_EARLIER_TOKENS = 2048
# The head, which can be as large as ten layers, is measured on a part of this size; its time is scaled.
_HEAD_ROWS = 8192
# Each of the four figures is the best of as many runs as fit, of two at least and `_MOST_RUNS` at most.
_BUDGET_S = 0.15
_MOST_RUNS = 8
_PATTERN_ITEMS = 1 << 20


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """`attention_ratio`: attending to one earlier token, in units of one token's products."""

    cost: StageCost
    attention_ratio: float


class Probe:
    """One layer, the embedding and the head, of `tp_rank`'s share of a model."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: int,
        tp_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        block_tokens: int,
        clock: Clock,
    ) -> None:
        self._config = config
        self._num_heads = len(query_heads(config.num_heads, config.num_kv_heads, tp_rank, tp))
        self._num_kv_heads = len(kv_heads(config.num_kv_heads, tp_rank, tp))
        self._intermediate_size = len(part(config.intermediate_size, tp_rank, tp))
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
        """The cost of a step of `num_rows` tokens, `num_sampled_rows` of which go through the head."""
        num_earlier = max(0, min(_EARLIER_TOKENS, self._config.max_context_tokens - num_rows))
        layer_s, later_s = self._layer_s(num_rows, num_earlier)
        cost = StageCost(layer_s, self._embedding_s(num_rows), self._head_s(num_sampled_rows))
        ratio = attention_ratio(layer_s, later_s, num_rows, num_earlier)
        return ProbeResult(cost, ratio)

    def _layer_s(self, num_rows: int, num_earlier: int) -> tuple[float, float]:
        """One layer over a sequence's first `num_rows` tokens, and over as many behind `num_earlier`."""
        config = self._config
        layer = DecoderLayer(self._layer_weights(), 0, config.head_dim, config.rms_norm_eps, 0)
        blocks = range(-(-(num_earlier + num_rows) // self._block_tokens))
        kv_shape = (len(blocks), 1, 2, self._num_kv_heads, self._block_tokens, config.head_dim)
        kv = torch.zeros(kv_shape, dtype=self._dtype, device=self._device)
        frequencies = rope_frequencies(config.rope, config.head_dim, self._device)

        def run(start: int) -> None:
            span = SequenceSpan(start, num_rows, blocks)
            batch = AttentionBatch.build([span], self._block_tokens, self._device)
            cos, sin = rope_table(batch.positions, frequencies, self._dtype)
            layer.forward(self._random(num_rows, config.hidden_size), cos, sin, kv, batch)

        return self._best_s(lambda: run(0)), self._best_s(lambda: run(num_earlier))

    def _embedding_s(self, num_rows: int) -> float:
        table = self._random(min(self._vocab_size, _HEAD_ROWS), self._config.hidden_size)
        tokens = torch.arange(num_rows, device=self._device) % len(table)
        embedding = Embedding(table)
        return self._best_s(lambda: embedding(tokens))

    def _head_s(self, num_rows: int) -> float:
        size = self._config.hidden_size
        num_measured = min(self._vocab_size, _HEAD_ROWS)
        head = Linear(LinearWeights(self._random(num_measured, size), None))
        norm, hidden = self._random(size), self._random(num_rows, size)
        measured_s = self._best_s(lambda: head(rms_norm(hidden, norm, self._config.rms_norm_eps)).float())
        return measured_s * self._vocab_size / num_measured

    def _layer_weights(self) -> LayerWeights:
        config, random = self._config, self._random
        hidden, head_dim = config.hidden_size, config.head_dim
        query_size, intermediate_size = self._num_heads * head_dim, self._intermediate_size
        qkv_size = query_size + 2 * self._num_kv_heads * head_dim
        return LayerWeights(
            input_norm=random(hidden),
            qkv=LinearWeights(random(qkv_size, hidden), random(qkv_size) if config.qkv_bias else None),
            q_norm=random(head_dim) if config.qk_norm else None,
            k_norm=random(head_dim) if config.qk_norm else None,
            output=LinearWeights(random(hidden, query_size), None),
            post_norm=random(hidden),
            gate_up=LinearWeights(random(2 * intermediate_size, hidden), None),
            down=LinearWeights(random(hidden, intermediate_size), None),
        )

    def _random(self, *shape: int) -> Tensor:
        """Repeats a drawn pattern: drawing each number of a large layer would take seconds."""
        num_items = torch.Size(shape).numel()
        whole = self._pattern.expand(-(-num_items // len(self._pattern)), -1)
        return whole.reshape(-1)[:num_items].clone().view(shape)

    def _best_s(self, work: Callable[[], object]) -> float:
        times: list[float] = []
        work()  # compiles, and touches the memory
        self._synchronize()
        while len(times) < 2 or (sum(times) < _BUDGET_S and len(times) < _MOST_RUNS):
            started_at = self._clock.now()
            work()
            self._synchronize()
            times.append(self._clock.now() - started_at)
        return min(times)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def attention_ratio(first_s: float, later_s: float, num_rows: int, num_earlier: int) -> float:
    """From the time of a chunk at the start of its prompt, in which a token attends to half a chunk on
    average, and of one behind `num_earlier` tokens."""
    if num_earlier == 0:
        return 0.0
    attend_s = max(0.0, later_s - first_s) / (num_rows * num_earlier)
    products_s = first_s / num_rows - attend_s * num_rows / 2
    return attend_s / products_s if products_s > 0 else 0.0
