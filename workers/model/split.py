"""Which part of every layer a rank holds when `tp` ranks share it. Plain arithmetic, without torch.

Parts differ by one at most where a size cannot be divided. Letters: H query heads, K key-value heads,
G = H / K query heads that share a key-value head.
"""

from __future__ import annotations

from workers.errors import CheckpointError


def part(size: int, index: int, num_parts: int) -> range:
    """The `index`-th of `num_parts` nearly equal, contiguous parts of range(size)."""
    return range(index * size // num_parts, (index + 1) * size // num_parts)


def kv_heads(num_kv_heads: int, tp_rank: int, tp: int) -> range:
    """The key-value heads of a rank. With more ranks than heads, several ranks hold a copy of one."""
    if tp <= num_kv_heads:
        return part(num_kv_heads, tp_rank, tp)
    head = tp_rank * num_kv_heads // tp
    return range(head, head + 1)


def query_heads(num_heads: int, num_kv_heads: int, tp_rank: int, tp: int) -> range:
    """The query heads of a rank: all of its key-value heads, or its part of the G of a shared one. In rank
    order they follow one another and make range(H)."""
    group = num_heads // num_kv_heads
    held = kv_heads(num_kv_heads, tp_rank, tp)
    if tp <= num_kv_heads:
        return range(held.start * group, held.stop * group)
    head = held.start
    # The first rank that holds a head is the smallest r with r * K // tp == head.
    first, after = -(-head * tp // num_kv_heads), -(-(head + 1) * tp // num_kv_heads)
    own = part(group, tp_rank - first, after - first)
    return range(head * group + own.start, head * group + own.stop)


def refuse_empty_parts(num_heads: int, intermediate_size: int, vocab_size: int, tp: int) -> None:
    """Raise CheckpointError when some rank would hold nothing of a layer."""
    sizes = {
        "num_attention_heads": num_heads,
        "intermediate_size": intermediate_size,
        "vocab_size": vocab_size,
    }
    for name, size in sizes.items():
        if tp > size:
            raise CheckpointError(f"tp {tp} is more than {name} {size}: a rank would hold nothing")
