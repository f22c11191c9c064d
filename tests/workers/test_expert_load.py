"""The load of experts from counts: decayed sums, against a naive model that keeps every token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.messages.rank_channel import ExpertCounts, StepPlan
from workers.replica.expert_load import ExpertLoad, HotExpert
from workers.replica.step_stats import StepStats
from workers.scheduler.step import pack_ids
from workers.stats_record import ReplicaStats

NUM_EXPERTS = 4
MEMORY_S = 10.0


def counts(
    layer_to_counts: Mapping[int, Sequence[int]],
    *,
    num_chosen: int = 1,
    first: int = 0,
    end: int = NUM_EXPERTS,
    copied: Sequence[tuple[int, int, int]] = (),
) -> ExpertCounts:
    """Return the report of the rank that owns experts [first, end), out of the counts of all, and has the
    tokens of `copied` (layer, expert, tokens)."""
    packed = pack_ids([count for each in layer_to_counts.values() for count in each[first:end]])
    of_copies = pack_ids([number for each in copied for number in each])
    return ExpertCounts(tuple(layer_to_counts), first, NUM_EXPERTS, num_chosen, packed, of_copies)


def load_of(
    layer_to_counts: Mapping[int, Sequence[int]], num_ranks: int = 1, num_chosen: int = 1
) -> ExpertLoad:
    load, held = ExpertLoad(), NUM_EXPERTS // num_ranks
    for first in range(0, NUM_EXPERTS, held):
        load.add(counts(layer_to_counts, num_chosen=num_chosen, first=first, end=first + held), 1.0)
    return load


def test_even_loads_have_an_imbalance_of_one() -> None:
    load = load_of({3: [50, 50, 50, 50]}, num_ranks=2)
    assert (load.imbalance, load.rank_imbalance, load.num_idle) == (1.0, 1.0, 0)


def test_an_imbalance_is_the_mean_over_layers() -> None:
    load = load_of({1: [40, 20, 20, 0], 5: [60, 60, 60, 60], 6: [200, 0, 0, 0]}, num_ranks=2)
    assert load.imbalance == pytest.approx((2 + 1 + 4) / 3) != 2.0
    assert load.rank_imbalance == pytest.approx((1.5 + 1 + 2) / 3)
    assert load.num_idle == 4


def test_one_rank_is_even_whatever_its_experts() -> None:
    assert load_of({1: [400, 0, 0, 0]}).rank_imbalance == 1.0


def test_the_hottest_have_the_largest_shares_of_their_layers_tokens() -> None:
    """Each token has two experts: 100 tokens in layer 2, and 1000 in layer 4."""
    load = load_of({2: [90, 60, 40, 10], 4: [600, 500, 500, 400]}, num_chosen=2)
    expected = [HotExpert(2, 0, 0.9), HotExpert(2, 1, 0.6), HotExpert(4, 0, 0.6)]
    assert sorted(load.hottest(3)) == expected
    assert load.hottest() == expected[:1]


def test_few_tokens_say_nothing_yet() -> None:
    load = load_of({1: [63, 0, 0, 0]})
    assert (load.imbalance, load.rank_imbalance, load.num_idle, load.hottest()) == (0.0, 0.0, 0, [])
    assert load.statistics() == {}
    load.add(counts({1: [1, 0, 0, 0]}), 1.0)
    assert load.imbalance == NUM_EXPERTS


def test_a_layer_is_known_when_all_of_its_ranks_have_reported() -> None:
    load, all_counts = ExpertLoad(), {1: [100, 0, 60, 40]}
    load.add(counts(all_counts, first=2, end=4), 1.0)
    assert (load.imbalance, load.rank_imbalance) == (0.0, 0.0)
    load.add(counts(all_counts, end=2), 1.0)
    assert (load.imbalance, load.rank_imbalance) == (2.0, 1.0)
    assert load.hottest(2) == [HotExpert(1, 0, 0.5), HotExpert(1, 2, 0.3)]


def test_tokens_of_copies_count_for_their_expert_and_for_the_rank_that_had_them() -> None:
    load = ExpertLoad()
    load.add(counts({3: [100, 20, 0, 0]}, end=2, copied=[(3, 2, 10)]), 1.0)
    assert load.loads(3) is None
    load.add(counts({3: [0, 0, 5, 15]}, first=2, copied=[(3, 0, 60), (3, 1, 30)]), 1.0)
    assert load.loads(3) == [160.0, 50.0, 15.0, 15.0]
    assert load.imbalance == pytest.approx(160 * 4 / 240)
    assert load.rank_imbalance == pytest.approx(130 / 120)
    assert load.uncopied_imbalance == pytest.approx(210 / 120)
    assert load.hottest() == [HotExpert(3, 0, 160 / 240)]
    load.add(counts({3: [0, 0]}, end=2), 61.0)
    assert load.loads(3) == pytest.approx([it / math.e for it in (160.0, 50.0, 15.0, 15.0)])
    assert load.rank_imbalance == pytest.approx(130 / 120), "copies are forgotten as others are"


def test_a_rank_without_tokens_is_forgotten_as_others_are() -> None:
    """It reports nothing meanwhile."""
    load = ExpertLoad(MEMORY_S)
    for first in (0, 2):
        load.add(counts({0: [100, 100, 100, 100]}, first=first, end=first + 2), 0.0)
    load.add(counts({0: [100, 100]}, end=2), MEMORY_S)
    busy, idle = 200 / math.e + 200, 200 / math.e
    assert load.rank_imbalance == pytest.approx(2 * busy / (busy + idle))


def test_an_expert_without_tokens_for_long_is_idle() -> None:
    load = ExpertLoad(memory_s=MEMORY_S)
    load.add(counts({0: [100, 100, 100, 100]}), 0.0)
    for second in range(1, 61):
        load.add(counts({0: [0, 100, 100, 100]}), float(second))
        assert load.num_idle == (1 if 100 * math.exp(-second / MEMORY_S) < 0.5 else 0)
    assert load.num_idle == 1


def test_figures_are_statistics_of_a_replica() -> None:
    stats = StepStats()
    assert not any(name.startswith(("expert", "hottest")) for name in stats.totals())
    stats.experts.add(counts({7: [100, 20, 0, 0]}), 1.0)
    figures = stats.experts.statistics()
    assert figures == {
        "expert_imbalance": pytest.approx(100 / 30),
        "expert_rank_imbalance": 1.0,
        "expert_uncopied_imbalance": 1.0,
        "num_idle_experts": 2,
        "hottest_expert_layer": 7,
        "hottest_expert": 0,
        "hottest_expert_share": pytest.approx(100 / 120),
    }
    defaults = ReplicaStats()
    assert all(type(getattr(defaults, name)) is type(value) for name, value in figures.items())
    assert figures.items() <= stats.totals().items()
    stats.experts.add(counts({7: [0, 80, 100, 100]}), 1.0)
    assert stats.totals()["expert_imbalance"] == 1.0


def test_steps_without_experts_have_no_figures() -> None:
    stats = StepStats()
    stats.add(StepPlan(1, decodes=bytes(4)), (3,), [0.1])
    assert stats.experts.statistics() == {}


_LAYERS = st.lists(st.integers(0, 300), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS)
_REPORTS = st.lists(
    st.tuples(st.floats(0.0, 30.0), st.dictionaries(st.integers(0, 3), _LAYERS, min_size=1)), max_size=8
)


@given(_REPORTS, st.lists(st.integers(1, NUM_EXPERTS - 1), unique=True, max_size=2))
def test_figures_equal_those_of_every_token_by_itself(
    reports: list[tuple[float, dict[int, list[int]]]], splits: list[int]
) -> None:
    bounds = [0, *sorted(splits), NUM_EXPERTS]
    ranks = [range(first, end) for first, end in itertools.pairwise(bounds)]
    load = ExpertLoad(MEMORY_S)
    tokens: list[tuple[float, int, int, int]] = []
    now = 0.0
    for elapsed_s, layers in reports:
        now += elapsed_s
        for rank in ranks:
            load.add(counts(layers, first=rank.start, end=rank.stop), now)
        tokens += [(now, layer, expert, n) for layer, of in layers.items() for expert, n in enumerate(of)]
    ratios, rank_ratios, shares = [], [], []
    for layer in {layer for _, layer, _, _ in tokens}:
        # A layer is as old as its own newest report.
        newest = max(at for at, each, _, _ in tokens if each == layer)

        def weight(of: Sequence[int], layer: int = layer, newest: float = newest) -> float:
            return sum(
                n * math.exp((at - newest) / MEMORY_S)
                for at, each, expert, n in tokens
                if each == layer and expert in of
            )

        total = weight(range(NUM_EXPERTS))
        if abs(total - 64) < 1e-6:
            return  # rounding decides
        if total < 64:
            continue
        loads = [weight([expert]) for expert in range(NUM_EXPERTS)]
        ratios.append(max(loads) * NUM_EXPERTS / total)
        rank_ratios.append(max(map(weight, ranks)) * len(ranks) / total)
        shares.append(max(loads) / total)
    assert load.imbalance == pytest.approx(sum(ratios) / len(ratios) if ratios else 0.0)
    assert load.uncopied_imbalance == load.rank_imbalance
    assert load.rank_imbalance == pytest.approx(sum(rank_ratios) / len(ratios) if ratios else 0.0)
    assert [hot.share for hot in load.hottest()] == pytest.approx(sorted(shares)[-1:])
