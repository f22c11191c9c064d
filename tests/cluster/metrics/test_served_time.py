"""The replicas' time that tenants and classes were given: what is counted and forgotten, and the bound."""

from __future__ import annotations

import math

import pytest

from cluster.metrics.admission_stats import FlowStats
from cluster.metrics.served_time import MOST_TENANTS, NUM_TENANTS, SERVED_S, ServedTime
from cluster.metrics.tenant_usage import OTHERS

# Clocks begin anywhere.
START_S = 1e6


def test_each_class_of_a_tenant_is_counted_and_the_largest_tenant_comes_first() -> None:
    served = ServedTime()
    served.add("small", "batch", 1.0, START_S)
    served.add("large", "interactive", 2.0, START_S)
    served.add("large", "batch", 3.0, START_S)
    served.add("", "standard", 0.5, START_S)
    assert served.stats(START_S) == (
        FlowStats("large", "interactive", 2.0),
        FlowStats("large", "batch", 3.0),
        FlowStats("small", "batch", 1.0),
        FlowStats("default", "standard", 0.5),
    )


def test_what_is_long_ago_counts_less_and_is_forgotten() -> None:
    served = ServedTime()
    served.add("a", "standard", 10.0, START_S)
    served.add("b", "standard", 1.0, START_S + SERVED_S)
    now = {it.tenant: it.served_s for it in served.stats(START_S + SERVED_S)}
    assert now == pytest.approx({"a": 10.0 / math.e, "b": 1.0})
    assert served.stats(START_S + 100 * SERVED_S) == ()
    served.add("c", "standard", 1.0, START_S + 100 * SERVED_S)
    assert len(served) == 1


def test_a_steady_rate_shows_the_same_however_long_it_lasts() -> None:
    served = ServedTime()
    for second in range(5000):
        served.add("a", "standard", 0.5, START_S + second)
    (flow,) = served.stats(START_S + 4999)
    assert flow.served_s == pytest.approx(0.5 * SERVED_S, rel=0.02)


def test_few_tenants_are_named_and_no_time_is_lost() -> None:
    served = ServedTime()
    num_tenants = 10 * MOST_TENANTS
    for number in range(num_tenants):
        served.add(f"t{number}", "batch", 1.0, START_S)
        served.add("greedy", "interactive", 1.0, START_S)
        assert len(served) <= MOST_TENANTS + 1
    flows = served.stats(START_S)
    assert len({it.tenant for it in flows}) == NUM_TENANTS + 1
    assert flows[0] == FlowStats("greedy", "interactive", num_tenants)
    assert flows[-1] == FlowStats(OTHERS, "batch", num_tenants - (NUM_TENANTS - 1))


def test_a_tenant_that_is_called_as_the_others_is_counted_with_them() -> None:
    served = ServedTime()
    served.add(OTHERS, "batch", 9.0, START_S)
    served.add("a", "batch", 1.0, START_S)
    assert [it.tenant for it in served.stats(START_S)] == ["a", OTHERS]


def test_nobody_has_a_share_of_a_minute_in_which_nothing_was_given() -> None:
    served = ServedTime()
    served.add("acme", "standard", 100.0, START_S)
    assert served.stats(START_S + SERVED_S) != ()
    assert served.stats(START_S + SERVED_S + 0.1) == ()
    served.add("other", "standard", 1.0, START_S + 2 * SERVED_S)
    assert {it.tenant for it in served.stats(START_S + 2 * SERVED_S)} == {"acme", "other"}
