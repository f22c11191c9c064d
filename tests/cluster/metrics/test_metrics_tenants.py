"""Few tenants have series, the ones that matter, and no series ever shrinks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.metrics.tenant_usage import OTHERS, TenantUsageTable


def spend(book: TenantUsageTable, tenant: str, num_tokens: int) -> None:
    book.use(tenant).num_output_tokens += num_tokens
    book.used(tenant, num_tokens)


def tokens(book: TenantUsageTable) -> dict[str, int]:
    return {name: use.num_tokens for name, use in book.series().items()}


def test_the_first_ones_are_named_and_the_rest_are_together() -> None:
    book = TenantUsageTable(limit=2)
    for tenant, num in (("a", 10), ("b", 20), ("c", 3), ("d", 4)):
        spend(book, tenant, num)
    assert tokens(book) == {"a": 10, "b": 20, OTHERS: 7}


def test_a_tenant_that_uses_twice_as_much_takes_the_place_of_the_least() -> None:
    book = TenantUsageTable(limit=2)
    for tenant, num in (("a", 10), ("b", 20), ("c", 15), ("c", 15)):
        spend(book, tenant, num)
    assert tokens(book) == {"c": 0, "b": 20, OTHERS: 30}
    spend(book, "c", 5)
    spend(book, "a", 1)
    assert tokens(book) == {"c": 5, "b": 20, OTHERS: 31}


def test_one_that_comes_back_goes_on_where_it_was() -> None:
    book = TenantUsageTable(limit=1)
    spend(book, "a", 10)
    spend(book, "b", 21)
    spend(book, "b", 1)
    assert tokens(book) == {"b": 1, OTHERS: 21}
    spend(book, "a", 3)
    spend(book, "a", 4)
    assert tokens(book) == {"a": 14, OTHERS: 24}


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 100)), max_size=300), st.integers(1, 4))
def test_nothing_is_lost_nothing_shrinks_and_names_are_few(used: list[tuple[int, int]], limit: int) -> None:
    book = TenantUsageTable(limit)
    ever: dict[str, int] = {}
    for number, num in used:
        spend(book, f"t{number}", num)
        now = tokens(book)
        assert len(now) <= limit + 1
        assert all(now[name] >= ever.get(name, 0) for name in now)
        ever |= now
    assert sum(ever.values()) == sum(num for _, num in used)
    assert len(ever) <= 5 * limit + 1


def test_a_tenant_that_calls_itself_other_is_one_of_the_others() -> None:
    book = TenantUsageTable(limit=2)
    spend(book, OTHERS, 5)
    assert tokens(book) == {OTHERS: 5}
