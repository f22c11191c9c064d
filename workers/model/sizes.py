"""Sizes that follow from a model's shape: the part of every layer that a rank holds, and the work of a step.

Plain arithmetic, without torch. Parts differ by one at most where a size cannot be divided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from workers.errors import CheckpointError
from workers.model.model_config import ModelConfig

# On a CPU a chunk's attention is computed in pieces of about this many operations at most, half a second of
# one core: smaller pieces read keys and values too often.
ATTENTION_PIECE_FLOPS = 2e10


def part(size: int, index: int, num_parts: int) -> range:
    """Return the `index`-th of `num_parts` nearly equal, contiguous parts of range(size)."""
    return range(index * size // num_parts, (index + 1) * size // num_parts)


def kv_heads(num_kv_heads: int, tp_rank: int, tp: int) -> range:
    """Return the key-value heads of a rank. With more ranks than heads, several ranks hold a copy of one."""
    if tp <= num_kv_heads:
        return part(num_kv_heads, tp_rank, tp)
    head = tp_rank * num_kv_heads // tp
    return range(head, head + 1)


def query_heads(num_heads: int, num_kv_heads: int, tp_rank: int, tp: int) -> range:
    """Return the query heads of a rank: all of its key-value heads, or its part of those of a shared one. In
    rank order they follow one another and make range(num_heads)."""
    group = num_heads // num_kv_heads
    held = kv_heads(num_kv_heads, tp_rank, tp)
    if tp <= num_kv_heads:
        return range(held.start * group, held.stop * group)
    head = held.start
    # The first rank that holds a head is the smallest r with r * num_kv_heads // tp == head.
    first, after = -(-head * tp // num_kv_heads), -(-(head + 1) * tp // num_kv_heads)
    own = part(group, tp_rank - first, after - first)
    return range(head * group + own.start, head * group + own.stop)


def refuse_empty_parts(num_heads: int, intermediate_size: int, vocab_size: int, tp: int) -> None:
    """Raise CheckpointError if some rank would hold nothing of a layer."""
    sizes = {
        "num_attention_heads": num_heads,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
    }
    for name, size in sizes.items():
        if tp > size:
            raise CheckpointError(f"tp {tp} is more than {name} {size}: a rank would hold nothing")


class StepWork(NamedTuple):
    """The work of a step: floating point operations, and bytes read from device memory."""

    flops: float
    read_bytes: float


class ModelWork:
    """The least work in which a model's step can be done, all ranks together.

    Every product of a token with a weight counts as two operations, and so does every product of attention.
    All weights are read once a step, and so is the KV that each sequence attends to. Writes are not counted,
    nor are activations, which stay in caches."""

    def __init__(self, config: ModelConfig, item_bytes: int) -> None:
        """`item_bytes` is the size of one weight, and of one KV value."""
        projections = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
        num_inner = 2 if config.traits.is_gated else 1  # products of the hidden states in a feed-forward
        layer = config.hidden_size * (projections + (num_inner + 1) * config.intermediate_size)
        self._layer_weights = config.num_layers * layer
        self._head_weights = config.vocab_size * config.hidden_size
        self._widest_weights = config.hidden_size * max(projections, num_inner * config.intermediate_size)
        self._attention_flops = 4 * config.num_heads * config.head_dim
        self._kv_bytes = 2 * config.num_kv_heads * config.head_dim * item_bytes
        self._window_to_num_layers = Counter(config.sliding_windows)
        self.weight_bytes = (self._layer_weights + self._head_weights) * item_bytes

    def largest_piece_flops(self, num_rows: int, num_sampled: int, num_context: int, tp: int) -> float:
        """Return the most operations that one of `tp` ranks computes between two marks of progress, in steps
        of up to `num_rows` tokens of which `num_sampled` sample, in contexts of up to `num_context`
        tokens."""
        layer = num_rows * self._widest_weights
        attention = min(float(self._attention_flops) * num_rows * num_context, ATTENTION_PIECE_FLOPS)
        return max(2.0 * layer / tp, 2.0 * num_sampled * self._head_weights / tp, attention)

    def of(
        self, spans: Iterable[tuple[float, int]], num_sampled: int, decode_starts: Collection[int] = ()
    ) -> StepWork:
        """Count a step over `spans` (tokens before, tokens computed) of sequences, and over single tokens at
        `decode_starts` of others. `num_sampled` rows go through the head."""
        flops = 2.0 * self._head_weights * num_sampled
        read_bytes = float(self.weight_bytes)
        for start, num_tokens in spans:
            flops += 2.0 * self._layer_weights * num_tokens
            for window, num_layers in self._window_to_num_layers.items():
                flops += self._attention_flops * num_layers * _num_attended(start, num_tokens, window)
                num_read = start + num_tokens if window == 0 else min(start, window - 1) + num_tokens
                read_bytes += self._kv_bytes * num_layers * num_read
        flops += 2.0 * self._layer_weights * len(decode_starts)
        for window, num_layers in self._window_to_num_layers.items() if decode_starts else ():
            num_read = len(decode_starts) + (
                sum(decode_starts) if window == 0 else sum(min(start, window - 1) for start in decode_starts)
            )
            flops += self._attention_flops * num_layers * num_read
            read_bytes += self._kv_bytes * num_layers * num_read
        return StepWork(flops, read_bytes)


def _num_attended(start: float, num_tokens: int, window: int) -> float:
    """Count the pairs of a token of the span and a token that it sees: itself and those before it, at most
    `window` (0: all)."""
    end = start + num_tokens
    num_pairs = num_tokens * start + num_tokens * (num_tokens + 1) / 2
    if window == 0 or end <= window:
        return num_pairs
    first, last = max(start + 1 - window, 1), end - window
    return num_pairs - (first + last) * (last - first + 1) / 2
