"""The division of memory for KV among the replicas of a node."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.model.kv_division import KvDemand, divide_kv

demands = st.lists(
    st.builds(KvDemand, st.integers(0, 9), st.integers(0, 10**12)),
    min_size=1,
    max_size=5,
)


def naive_level(free_bytes: int, wanted: list[KvDemand]) -> int:
    """The largest size that every replica which can use it may have, found by bisection."""
    low, high = 0, max(demand.most_bytes for demand in wanted)
    while low < high:
        middle = (low + high + 1) // 2
        taken = sum(demand.num_replicas * min(demand.most_bytes, middle) for demand in wanted)
        low, high = (middle, high) if taken <= free_bytes else (low, middle - 1)
    return low


@given(st.integers(0, 10**13), demands)
def test_memory_is_divided_as_the_naive_search_divides_it(free_bytes: int, wanted: list[KvDemand]) -> None:
    shares = divide_kv(free_bytes, wanted)
    num_replicas = sum(demand.num_replicas for demand in wanted)
    assert (
        sum(demand.num_replicas * share for demand, share in zip(wanted, shares, strict=True)) <= free_bytes
    )
    level = naive_level(free_bytes, wanted)
    for demand, share in zip(wanted, shares, strict=True):
        if demand.num_replicas:
            # Rounding down leaves less than a byte for each replica, which nobody gets.
            assert abs(share - min(demand.most_bytes, level)) <= num_replicas


@given(st.integers(-(10**9), 10**13), demands, st.integers(0, 4), st.integers(1, 5))
def test_more_replicas_or_less_memory_never_raise_a_share(
    free_bytes: int, wanted: list[KvDemand], index: int, added: int
) -> None:
    index %= len(wanted)
    before = divide_kv(free_bytes, wanted)
    more = list(wanted)
    more[index] = more[index]._replace(num_replicas=more[index].num_replicas + added)
    rounding = sum(demand.num_replicas for demand in more)
    for after in (divide_kv(free_bytes, more), divide_kv(free_bytes - added, wanted)):
        for demand, earlier, later in zip(wanted, before, after, strict=True):
            assert later <= earlier + rounding or not demand.num_replicas
