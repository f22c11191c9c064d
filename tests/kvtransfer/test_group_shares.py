"""What groups take of a memory, and who exceeds its share: against a naive count."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.common.group_shares import GroupShares, GroupUsage

CAPACITY = 1000
SHARES = GroupShares(0.5, {"a": 0.25, "b": 1.0})


def test_a_group_has_its_own_share_or_that_of_all_others() -> None:
    usage = GroupUsage(SHARES, CAPACITY)
    assert [usage.limit(group) for group in "abc"] == [250, 1000, 500]
    assert [usage.has_limit(group) for group in "abc"] == [True, False, True]
    assert not GroupUsage(GroupShares(), CAPACITY).is_limited
    assert GroupUsage(GroupShares(1.0, {"a": 0.9}), CAPACITY).is_limited


def test_who_exceeds_its_share_by_most_comes_first() -> None:
    usage = GroupUsage(SHARES, CAPACITY)
    for group, amount in (("a", 300), ("b", 999), ("c", 500), ("d", 560)):
        usage.take(group, amount)
    assert list(usage.greediest()) == ["d", "a"]
    assert usage.would_exceed("c", 1)
    assert not usage.would_exceed("new", 500)
    usage.take("d", -61)
    assert list(usage.greediest()) == ["a"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-400, 400)), max_size=40))
def test_the_count_equals_a_naive_one(changes: list[tuple[str, int]]) -> None:
    usage, naive = GroupUsage(SHARES, CAPACITY), Counter[str]()
    for group, wanted in changes:
        amount = max(wanted, -naive[group])
        usage.take(group, amount)
        naive[group] += amount
        over = {each for each in naive if naive[each] > CAPACITY * SHARES.of(each)}
        assert usage.taken == +naive
        assert set(usage.greediest()) == over == {each for each in "abc" if usage.exceeds(each)}
        for each in "abc":
            assert usage.would_exceed(each, 100) == (naive[each] + 100 > CAPACITY * SHARES.of(each))
