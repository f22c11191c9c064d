"""Where copies of experts are placed, and what is ordered of the ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from workers.messages.rank_channel import ExpertCopy, ExpertCounts
from workers.model.sizes import part
from workers.replica.copy_placement import CopyRules, part_loads, place_copies
from workers.replica.expert_copies import ExpertCopies
from workers.replica.expert_load import ExpertLoad
from workers.scheduler.step import pack_ids

RULES = CopyRules(margin=0.1, num_deviations=3.0, bytes_per_s=100.0, burst_s=1.0)
_LOADS = st.lists(st.one_of(st.integers(0, 3000), st.integers(0, 10**6)), min_size=4, max_size=24)


def owned(num_experts: int, num_parts: int) -> NDArray[np.bool_]:
    is_owned = np.zeros((num_experts, num_parts), dtype=bool)
    for number in range(num_parts):
        is_owned[list(part(num_experts, number, num_parts)), number] = True
    return is_owned


def naive_loads(loads: list[int], is_held: NDArray[np.bool_]) -> list[float]:
    """Return the load of each part, by the shares of one expert after another."""
    of_parts = [0.0] * is_held.shape[1]
    for expert, load in enumerate(loads):
        holders = [number for number in range(is_held.shape[1]) if is_held[expert, number]]
        for number in holders:
            of_parts[number] += load / len(holders)
    return of_parts


@given(_LOADS, st.integers(2, 4), st.integers(0, 3), st.data())
def test_the_busiest_part_never_has_more_than_without_copies(
    loads: list[int], num_parts: int, num_slots: int, data: st.DataObject
) -> None:
    """From any copies that are there; owners keep their experts, and no part has more copies than slots."""
    is_owned = owned(len(loads), num_parts)
    is_held = is_owned.copy()
    for number in range(num_parts):
        experts = st.lists(st.integers(0, len(loads) - 1), max_size=num_slots, unique=True)
        is_held[data.draw(experts), number] = True
    counted = np.array(loads, dtype=np.float64)
    placed = place_copies(counted, is_owned, is_held, num_slots, RULES)
    assert (placed >= is_owned).all()
    assert ((placed & ~is_owned).sum(0) <= num_slots).all()
    before, after, without = (max(naive_loads(loads, it)) for it in (is_held, placed, is_owned))
    assert after <= without + 1e-6
    mean = sum(loads) / num_parts
    worth = RULES.margin * mean + RULES.num_deviations * math.sqrt(mean)
    assert np.array_equal(placed, is_held) or before > without or after <= before - worth + 1e-6
    again = place_copies(counted, is_owned, placed, num_slots, RULES)
    assert np.array_equal(again, placed), "what is placed stays while loads do"
    assert part_loads(counted, placed).tolist() == pytest.approx(naive_loads(loads, placed))


@settings(max_examples=30)
@given(st.integers(0, 1 << 30), st.integers(2, 4), st.integers(1, 3))
def test_loads_that_differ_by_chance_alone_change_little(seed: int, num_parts: int, num_slots: int) -> None:
    generator = np.random.default_rng(seed)
    rates = generator.gamma(0.5, 200.0, 16) + 1
    is_owned = owned(16, num_parts)
    placed, num_changes = is_owned, 0
    for _ in range(40):
        renewed = place_copies(
            generator.poisson(rates).astype(np.float64), is_owned, placed, num_slots, RULES
        )
        num_changes += int((renewed != placed).any())
        placed = renewed
    assert num_changes <= 4


@pytest.mark.parametrize(("num_parts", "num_slots", "most"), [(2, 1, 1.1), (4, 1, 1.15), (8, 2, 1.15)])
def test_an_expert_of_two_fifths_of_the_rows_is_spread(num_parts: int, num_slots: int, most: float) -> None:
    loads = np.full(64, 1.6e5 / 63)
    loads[0] = 0.4 * 1e5
    is_owned = owned(64, num_parts)
    placed = place_copies(loads, is_owned, is_owned, num_slots, RULES)
    without, found = (part_loads(loads, it).max() * num_parts / loads.sum() for it in (is_owned, placed))
    assert without > 1.15
    assert found <= most


# ------------------------------------------------------------------------------------------- orders


class Stage:
    """The slots of the ranks of a stage, which carry out orders."""

    def __init__(self, num_parts: int, num_slots: int, num_experts: int = 8) -> None:
        self.slots = [[[-1] * num_slots for _ in range(num_parts)] for _ in range(3)]
        self.is_owned = owned(num_experts, num_parts)

    def change(self, orders: tuple[ExpertCopy, ...]) -> None:
        for order in orders:
            slots = self.slots[order.layer][order.part]
            assert order.expert < 0 or order.expert not in slots, "a part has one copy of an expert"
            assert order.expert < 0 or not self.is_owned[order.expert, order.part]
            assert slots[order.slot] != order.expert, "nothing is ordered twice"
            slots[order.slot] = order.expert

    def is_held(self, layer: int) -> NDArray[np.bool_]:
        found = self.is_owned.copy()
        for number, slots in enumerate(self.slots[layer]):
            found[[expert for expert in slots if expert >= 0], number] = True
        return found


def load_of(layers: dict[int, list[int]], num_parts: int = 2) -> ExpertLoad:
    load, num_experts = ExpertLoad(), len(next(iter(layers.values())))
    for owner in range(num_parts):
        experts = part(num_experts, owner, num_parts)
        counts = pack_ids([count for each in layers.values() for count in each[experts.start : experts.stop]])
        load.add(ExpertCounts(tuple(layers), experts.start, num_experts, 2, counts), 1.0)
    return load


def copies_of(now: float = 0.0, expert_bytes: float = 40.0) -> ExpertCopies:
    return ExpertCopies(
        num_experts=8, num_parts=2, num_slots=2, expert_bytes=expert_bytes, rules=RULES, now=now
    )


HOT = [40000, 30000, 100, 100, 100, 100, 100, 100]


def test_orders_follow_the_loads_and_go_back_with_them() -> None:
    copies, stage = copies_of(), Stage(2, 2)
    copies.look_at([0, 2])
    stage.change(copies.take(load_of({0: HOT, 2: HOT[::-1]}), 0.0))
    assert stage.slots[2] == [[-1, -1], [-1, -1]], "a layer at a time"
    stage.change(copies.take(load_of({0: HOT, 2: HOT[::-1]}), 9.0))
    assert sorted(stage.slots[0][1]) == [0, 1]
    assert sorted(stage.slots[2][0]) == [6, 7]
    assert copies.num_copies == 4
    copies.look_at([0])
    assert copies.take(load_of({0: HOT}), 20.0) == ()
    copies.look_at([0])
    stage.change(copies.take(load_of({0: HOT[::-1]}), 40.0))
    assert sorted(stage.slots[0][0]) == [6, 7]
    assert sorted(stage.slots[0][1]) == [0, 1], "copies that do no harm stay"
    assert copies.num_copies == 6


_CHANGING = st.lists(st.lists(st.integers(0, 10**5), min_size=9, max_size=9), min_size=1, max_size=5)


@given(_CHANGING, st.integers(1, 3))
def test_ranks_hold_what_was_decided_when_all_is_ordered(changing: list[list[int]], num_slots: int) -> None:
    """Through all kinds of changes: slots are filled, filled anew and freed."""
    copies = ExpertCopies(num_experts=9, num_parts=3, num_slots=num_slots, expert_bytes=40.0, rules=RULES)
    stage, now = Stage(3, num_slots, 9), 0.0
    for loads in changing:
        before = stage.is_held(1)
        load = load_of({1: loads}, 3)
        copies.look_at([1])
        for _ in range(20):
            now += 1.0
            stage.change(copies.take(load, now))
        if load.loads(1) is None:
            assert np.array_equal(stage.is_held(1), before)
            continue
        counted = np.array(loads, dtype=np.float64)
        wanted = place_copies(counted, stage.is_owned, before, num_slots, RULES)
        assert np.array_equal(stage.is_held(1), wanted)
        assert copies.num_copies == int((wanted & ~stage.is_owned).sum())


def test_no_more_bytes_are_copied_than_the_rules_allow() -> None:
    """Of 100 bytes a second and at once, experts of 40."""
    copies, stage = copies_of(), Stage(2, 2)
    load = load_of({0: HOT, 1: HOT, 2: HOT})
    copies.look_at([0, 1, 2])
    times = []
    for tick in range(100):
        orders = copies.take(load, tick / 20)
        stage.change(orders)
        times += [tick / 20] * sum(order.expert >= 0 for order in orders)
    assert len(times) == copies.num_copies == 6
    for first, begin in enumerate(times):
        for last, end in enumerate(times[first:], first):
            assert 40 * (last - first + 1) <= 100 + 100 * (end - begin) + 1e-6


def test_an_expert_larger_than_a_burst_is_copied_alone() -> None:
    copies = copies_of(expert_bytes=1000.0)
    copies.look_at([0])
    assert len(copies.take(load_of({0: HOT}), 0.0)) == 1
    assert copies.take(load_of({0: HOT}), 9.9) == ()
    assert len(copies.take(load_of({0: HOT}), 10.1)) == 1


def test_nothing_is_ordered_without_slots_or_while_loads_are_not_known() -> None:
    without, unknown = ExpertCopies(), copies_of()
    for copies in (without, unknown):
        copies.look_at([0])
        assert copies.take(ExpertLoad(), 1.0) == ()
        assert copies.num_copies == 0
