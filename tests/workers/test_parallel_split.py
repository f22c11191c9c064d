"""Which heads, columns and ids a rank holds: everything once, key-value heads beside their queries."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.errors import CheckpointError
from workers.model.sizes import kv_heads, part, query_heads, refuse_empty_parts


@given(st.integers(1, 1000), st.integers(1, 40))
def test_parts_are_everything_once_and_nearly_equal(size: int, num_parts: int) -> None:
    parts = [part(size, index, num_parts) for index in range(num_parts)]
    assert [item for held in parts for item in held] == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_every_query_head_is_once_beside_its_key_value_head(
    num_kv_heads: int, group: int, data: st.DataObject
) -> None:
    num_heads = num_kv_heads * group
    tp = data.draw(st.integers(1, num_heads))
    queries = [query_heads(num_heads, num_kv_heads, rank, tp) for rank in range(tp)]
    keys = [kv_heads(num_kv_heads, rank, tp) for rank in range(tp)]
    assert [head for held in queries for head in held] == list(range(num_heads))
    for own_queries, own_keys in zip(queries, keys, strict=True):
        assert len(own_queries) > 0
        assert len(own_queries) % len(own_keys) == 0
        assert {head // group for head in own_queries} == set(own_keys)
    copies = Counter(head for held in keys for head in held)
    assert set(copies) == set(range(num_kv_heads))
    if tp <= num_kv_heads:
        assert set(copies.values()) == {1}
    else:
        assert sum(copies.values()) == tp
        for head, count in copies.items():
            shares = [len(own) for own, held in zip(queries, keys, strict=True) if held.start == head]
            assert len(shares) == count
            assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((4, 100, 256), "num_attention_heads 4"),
        ((8, 4, 256), "intermediate_size 4"),
        ((8, 8, 3), "vocab_size 3"),
    ],
)
def test_a_rank_without_a_part_is_refused(sizes: tuple[int, int, int], named: str) -> None:
    with pytest.raises(CheckpointError, match=f"tp 5 is more than {named}"):
        refuse_empty_parts(*sizes, 5)
