"""The order of what waits for one replica: shares by weight, priorities that starve nobody, aging."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.admission.fair_queue import (
    AGED_PART,
    ARRIVAL_PER_PRIORITY_S,
    FairQueue,
    work_ahead,
)
from cluster.admission.flow import Flow
from cluster.admission.queued_request import QueuedRequest
from kvtransfer.common.indexed_heap import IndexedHeap
from kvtransfer.request_facts import SERVICE_CLASSES, ServiceClass

NEVER = math.inf
# What may be saved up of the time for aged requests.
CREDIT_S = 1.0


def waiting(
    request_id: str,
    tenant: str = "a",
    *,
    cost_s: float = 1.0,
    arrived_at: float = 0.0,
    due_at: float = NEVER,
    priority: int = 0,
    service_class: ServiceClass = "standard",
) -> QueuedRequest:
    flow = Flow(tenant, service_class)
    return QueuedRequest(request_id, flow, arrived_at, priority=priority, cost_s=cost_s, due_at=due_at)


def drain(queue: FairQueue, now: float = 0.0) -> list[str]:
    order = []
    while (popped := queue.pop(now)) is not None:
        order.append(popped.request_id)
        queue.check()
    return order


def test_flows_take_turns_whatever_their_numbers() -> None:
    queue = FairQueue()
    for index in range(4):
        queue.put(waiting(f"a{index}", "a"), 1.0, 0.0)
    queue.put(waiting("b0", "b"), 1.0, 0.0)
    queue.put(waiting("b1", "b"), 1.0, 0.0)
    assert drain(queue) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_flow_that_is_passed_over_keeps_its_turn() -> None:
    queue = FairQueue()
    for index in range(2):
        queue.put(waiting(f"a{index}", "a", due_at=1.0), 1.0, 0.0)
    for index in range(3):
        queue.put(waiting(f"b{index}", "b"), 1.0, 0.0)
    queue.put(waiting("c0", "c", service_class="batch"), 1.0, 0.0)
    passed = {Flow("a", "standard")}
    for now in (0.0, 2.0):  # whether it is due or not
        popped = queue.pop(now, without="batch", passed=passed)
        assert popped is not None
        assert popped.flow.tenant == "b"
        queue.check()
    assert queue.peek(0.0, passed={*passed, Flow("b", "standard"), Flow("c", "batch")}) is None
    assert queue.peek(0.0, without="batch", passed={*passed, Flow("b", "standard")}) is None
    order = drain(queue)
    assert order[0] == "a0"
    assert order.index("a1") < order.index("b2"), "b has had two turns more"


def test_a_flow_does_not_save_up_the_time_of_its_absence() -> None:
    queue = FairQueue()
    for index in range(10):
        queue.put(waiting(f"a{index}", "a"), 1.0, 0.0)
    for _ in range(5):
        queue.pop(0.0)
    for index in range(5):
        queue.put(waiting(f"b{index}", "b"), 1.0, 0.0)
    assert "".join(it[0] for it in drain(queue)) in ("babababababa"[:10], "ababababab")


def test_what_is_looked_at_and_put_back_at_once_is_as_if_it_never_left() -> None:
    """Also where nothing else waits: debts end with the last that waits, not with a look at it."""
    for back_at, order in ((0.0, ["b0", "b1", "a1"]), (1.0, ["b0", "a1", "b1"])):
        queue = FairQueue()
        queue.put(waiting("a0", "a", cost_s=10.0), 1.0, 0.0)
        queue.put(waiting("b0", "b"), 1.0, 0.0)
        popped, looked_at = queue.pop(0.0), queue.drop("b0", 0.0)
        assert popped is not None
        assert popped.request_id == "a0"
        assert looked_at is not None
        queue.put(looked_at, 1.0, back_at)
        queue.put(waiting("a1", "a"), 1.0, back_at)
        queue.put(waiting("b1", "b"), 1.0, back_at)
        assert drain(queue, back_at) == order


def test_a_flow_that_leaves_for_a_moment_gains_nothing() -> None:
    """Its debt is kept until the others have caught up."""
    queue = FairQueue()
    queue.put(waiting("a0", "a", cost_s=10.0), 1.0, 0.0)
    for index in range(6):
        queue.put(waiting(f"b{index}", "b"), 1.0, 0.0)
    popped = queue.pop(0.0)
    assert popped is not None
    assert popped.request_id == "a0"
    queue.put(waiting("a1", "a"), 1.0, 0.0)
    assert drain(queue) == ["b0", "b1", "b2", "b3", "b4", "b5", "a1"]


def test_tenants_that_come_once_are_forgotten_while_others_always_wait() -> None:
    """Ten thousand, one after the other, through a queue that is never empty."""
    queue, now = FairQueue(), 0.0
    for index in range(3):
        queue.put(waiting(f"always{index}", "always", cost_s=0.1), 1.0, now)
    num_flows = 0
    for index in range(10_000):
        queue.put(waiting(f"once{index}", f"once{index}", cost_s=0.1), 1.0, now)
        for _ in range(2):
            popped = queue.pop(now)
            assert popped is not None
            now += popped.cost_s
            if popped.flow.tenant == "always":
                queue.put(waiting(f"again{index}", "always", cost_s=0.1), 1.0, now)
        num_flows = max(num_flows, queue.num_flows)
        assert len(queue) > 1
    queue.check()
    # Who has come in the last seconds is remembered.
    assert num_flows < 300


def test_what_is_removed_from_a_heap_is_forgotten_behind_a_first_item_that_stays() -> None:
    heap: IndexedHeap[str] = IndexedHeap()
    heap.put("first", 0.0)
    for index in range(1000):
        heap.put(f"{index}", 1.0 + index)
        heap.put(f"{index}", 2.0 + index)
        assert heap.remove(f"{index}")
        heap.check()
    assert heap.first() == (0.0, "first")
    assert not heap.remove("0")
    heap.put("second", 0.0)
    assert heap.remove("first")
    assert heap.first() == (0.0, "second")
    assert heap.remove("second")
    assert heap.first() is None
    heap.check()


def test_a_higher_priority_goes_first_within_its_flow() -> None:
    queue = FairQueue()
    queue.put(waiting("low"), 1.0, 0.0)
    queue.put(waiting("high", arrived_at=1.0, priority=2), 1.0, 0.0)
    queue.put(waiting("other", "b"), 1.0, 0.0)
    assert drain(queue) == ["high", "other", "low"]


def test_a_priority_counts_as_so_many_seconds() -> None:
    queue = FairQueue()
    queue.put(waiting("low", arrived_at=0.0), 1.0, 0.0)
    queue.put(waiting("late", arrived_at=2 * ARRIVAL_PER_PRIORITY_S + 0.5, priority=2), 1.0, 0.0)
    assert drain(queue) == ["low", "late"]


def test_who_is_due_goes_first_and_its_flow_pays() -> None:
    queue = FairQueue()
    for index in range(3):
        queue.put(waiting(f"a{index}", "a"), 4.0, 0.0)
    queue.put(waiting("b0", "b", due_at=5.0, cost_s=1.0), 1.0, 0.0)
    queue.put(waiting("b1", "b"), 1.0, 0.0)
    first = queue.pop(0.0)
    assert first is not None
    assert first.request_id == "a0"
    assert drain(queue, now=5.0)[0] == "b0"


def test_a_paused_class_is_left_out_unless_it_is_due() -> None:
    queue = FairQueue()
    queue.put(waiting("batch", service_class="batch", due_at=10.0), 1.0, 0.0)
    assert queue.peek(0.0, without="batch") is None
    assert queue.pop(0.0, without="batch") is None
    due = queue.peek(10.0, without="batch")
    assert due is not None
    assert due.request_id == "batch"
    queue.put(waiting("now"), 1.0, 0.0)
    assert queue.num_by_class() == {"batch": 1, "standard": 1}
    popped = queue.pop(0.0, without="batch")
    assert popped is not None
    assert popped.request_id == "now"


def test_who_is_dropped_is_forgotten_and_not_charged() -> None:
    queue = FairQueue()
    queue.put(waiting("a0", "a", cost_s=5.0), 1.0, 0.0)
    queue.put(waiting("a1", "a"), 1.0, 0.0)
    queue.put(waiting("b0", "b"), 1.0, 0.0)
    assert queue.drop("a0", 0.0) is not None
    assert queue.drop("a0", 0.0) is None
    assert queue.drop("nobody", 0.0) is None
    queue.check()
    assert queue.cost_s == 2.0
    assert drain(queue) == ["a1", "b0"]


def test_what_comes_of_heavier_flows_goes_before_too() -> None:
    """A flow whose requests go as fast as they come takes its share of the time that a lighter one waits."""
    queue, light = FairQueue(), Flow("light", "standard")
    for index in range(50):  # for 50 s a request of half a second comes every second, and goes at once
        queue.put(waiting(f"heavy{index}", "heavy", cost_s=0.5), 8.0, float(index))
        assert queue.pop(float(index)) is not None
    for index in range(10):
        queue.put(waiting(f"light{index}", "light"), 1.0, 49.0)
    assert queue.ahead_s(light, 1.0, 49.5) == pytest.approx(20.0, rel=0.1), "half of the time is left"
    assert queue.ahead_s(light, 1.0, 49.5, rate=2.0) == pytest.approx(10.0 / 0.75, rel=0.1)
    assert queue.ahead_s(light, 1.0, 90.0) == pytest.approx(10.0, rel=0.01), "they come no more"


def test_what_was_dropped_did_not_come() -> None:
    queue = FairQueue()
    queue.put(waiting("light", "light"), 1.0, 0.0)
    queue.put(waiting("heavy", "heavy", cost_s=5.0), 8.0, 0.0)
    queue.drop("heavy", 0.0)
    assert queue.ahead_s(Flow("light", "standard"), 1.0, 0.0) == pytest.approx(1.0)


amounts = st.just(0.0) | st.floats(1e-3, 20.0)


@given(own_s=amounts, others=st.lists(st.tuples(amounts, st.floats(0.0, 1.5), amounts), max_size=6))
def test_the_work_ahead_is_the_least_that_agrees_with_itself(
    own_s: float, others: list[tuple[float, float, float]]
) -> None:
    """Against what rises step by step from nothing: none of the steps exceeds it, and it is one itself."""

    def step(ahead_s: float) -> float:
        return own_s + sum(min(cost_s + coming * ahead_s, share_s) for cost_s, coming, share_s in others)

    found, risen = work_ahead(own_s, others), 0.0
    assert step(found) == pytest.approx(found, abs=1e-6)
    for _ in range(3000):
        risen = step(risen)
    assert risen <= found + 1e-6
    close = all(abs(1 - sum(part)) > 0.01 for part in _subsets([coming for _, coming, _ in others]))
    assert not close or risen == pytest.approx(found, abs=1e-3)


def _subsets(values: list[float]) -> list[list[float]]:
    """All ways to leave some of the values out."""
    found: list[list[float]] = [[]]
    for value in values:
        found += [[*each, value] for each in found]
    return found


def test_what_goes_before_a_request_of_a_flow() -> None:
    queue = FairQueue()
    assert queue.ahead_s(Flow("a", "standard"), 1.0, 0.0) == 0.0
    for index in range(100):
        queue.put(waiting(f"greedy{index}", "greedy"), 1.0, 0.0)
    assert queue.ahead_s(Flow("greedy", "standard"), 1.0, 0.0) == pytest.approx(100.0)
    # Another tenant waits for a turn, not for all that.
    assert queue.ahead_s(Flow("other", "standard"), 1.0, 0.0) <= 1.0
    queue.put(waiting("other0", "other"), 1.0, 0.0)
    assert queue.ahead_s(Flow("other", "standard"), 1.0, 0.0) <= 3.0


costs = st.floats(0.05, 2.0)
weights = st.sampled_from([0.5, 1.0, 2.0, 8.0])


@settings(deadline=None)
@given(
    flows=st.lists(st.tuples(weights, st.lists(costs, min_size=20, max_size=30)), min_size=2, max_size=5),
    num_turns=st.integers(1, 60),
)
def test_flows_that_wait_are_served_by_their_weights(
    flows: list[tuple[float, list[float]]], num_turns: int
) -> None:
    """The bound of start-time fair queueing: of two flows that both wait, neither is ahead of the other by
    more than one request of each."""
    queue = FairQueue()
    for index, (weight, each) in enumerate(flows):
        for number, cost_s in enumerate(each):
            queue.put(waiting(f"{index}-{number}", str(index), cost_s=cost_s), weight, 0.0)
    served = [0.0] * len(flows)
    left = [len(each) for _, each in flows]
    for _ in range(num_turns):
        popped = queue.pop(0.0)
        assert popped is not None
        index = int(popped.flow.tenant)
        served[index] += popped.cost_s
        left[index] -= 1
        if 0 in left:
            break  # from here on not all of them wait
        for one, (weight, each) in enumerate(flows):
            for other, (other_weight, others) in enumerate(flows):
                bound = max(each) / weight + max(others) / other_weight
                assert abs(served[one] / weight - served[other] / other_weight) <= bound + 1e-6
    queue.check()


@settings(deadline=None)
@given(
    greedy=st.lists(costs, min_size=40, max_size=60),
    modest=st.lists(costs, min_size=20, max_size=30),
    due_at=st.floats(0.0, 5.0),
)
def test_aging_does_not_take_the_share_of_others(
    greedy: list[float], modest: list[float], due_at: float
) -> None:
    """A flow all of whose requests are due has no more than the part that aging may have beside its share."""
    queue = FairQueue()
    for index, cost_s in enumerate(greedy):
        queue.put(waiting(f"g{index}", "greedy", cost_s=cost_s, due_at=due_at), 1.0, 0.0)
    for index, cost_s in enumerate(modest):
        queue.put(waiting(f"m{index}", "modest", cost_s=cost_s), 1.0, 0.0)
    now, served = 0.0, dict.fromkeys(("greedy", "modest"), 0.0)
    for _ in range(len(modest)):
        popped = queue.pop(now)
        assert popped is not None
        now += popped.cost_s
        served[popped.flow.tenant] += popped.cost_s
        assert served["greedy"] <= now * 0.5 + AGED_PART * now + CREDIT_S + 2 * max(*greedy, *modest)
        if served["modest"] >= sum(modest) - 1e-9:
            break


@settings(deadline=None)
@given(
    old=st.lists(costs, min_size=1, max_size=5),
    others=st.lists(st.tuples(st.integers(0, 30), costs), min_size=5, max_size=60),
    weight=st.sampled_from([1e-6, 0.01, 1.0]),
)
def test_nobody_starves(old: list[float], others: list[tuple[int, float]], weight: float) -> None:
    """However many flows come, and whatever they weigh, requests that are due go within the time that aging
    has."""
    queue = FairQueue()
    for number, cost_s in enumerate(old):
        queue.put(waiting(f"old{number}", f"old{number}", cost_s=cost_s, due_at=number * 1e-3), weight, 0.0)
    for number, (index, cost_s) in enumerate(others):
        queue.put(waiting(f"new{number}", f"new{index}", cost_s=cost_s), 8.0, 0.0)
    now, num_popped = 1.0, 0
    for number in range(1000):
        popped = queue.pop(now)
        assert popped is not None
        if popped.request_id.startswith("old"):
            taken_s = sum(old[:num_popped])
            assert popped.request_id == f"old{num_popped}"
            assert now - 1.0 <= taken_s / AGED_PART + max(cost_s for _, cost_s in others) + 1e-6
            num_popped += 1
            if num_popped == len(old):
                return
        else:  # something of other flows is always there
            queue.put(waiting(f"again{number}", popped.flow.tenant, cost_s=popped.cost_s), 8.0, now)
        now += popped.cost_s
    raise AssertionError(f"only {num_popped} of {len(old)} were served")


operations = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "pop", "pop paused", "drop", "wait"]),
        st.integers(0, 3),
        st.sampled_from(SERVICE_CLASSES),
        costs,
        st.integers(0, 3),
    ),
    max_size=80,
)


@settings(deadline=None)
@given(operations)
def test_sums_and_order_hold_over_any_operations(
    given_operations: list[tuple[str, int, ServiceClass, float, int]],
) -> None:
    """Against lists: nothing is lost or given twice, and within a flow who is not due goes by arrival and
    priority."""
    queue, model, now = FairQueue(), dict[str, QueuedRequest](), 0.0
    flow = Flow("1", "standard")
    left_out: tuple[ServiceClass | None, ...] = (None, "batch")
    for number, (what, tenant, service_class, cost_s, priority) in enumerate(given_operations):
        if what == "put":
            it = waiting(
                str(number),
                str(tenant),
                cost_s=cost_s,
                arrived_at=now,
                due_at=now + 3.0,
                priority=priority,
                service_class=service_class,
            )
            queue.put(it, 1.0 + tenant, now)
            model[it.request_id] = it
        elif what == "drop" and model:
            request_id = list(model)[tenant % len(model)]
            assert queue.drop(request_id, now) is model.pop(request_id)
        elif what == "wait":
            now += cost_s
        elif what in ("pop", "pop paused"):
            paused: ServiceClass | None = "batch" if what == "pop paused" else None
            able = [it for it in model.values() if it.flow.service_class != paused]
            popped = queue.pop(now, without=paused)
            if popped is None:
                assert not able
            else:
                del model[popped.request_id]
                earlier = [
                    it
                    for it in model.values()
                    if it.flow == popped.flow
                    and it.arrived_at - ARRIVAL_PER_PRIORITY_S * it.priority
                    < popped.arrived_at - ARRIVAL_PER_PRIORITY_S * popped.priority
                ]
                assert not earlier or popped.due_at <= now
                if popped.flow.service_class == paused:
                    assert popped.due_at <= now
        queue.check()
        assert len(queue) == len(model)
        ahead_s = queue.ahead_s(Flow("new", "standard"), 1.0, now)
        # All that waits, and of what comes no more than the shares of the flows that brought it.
        share_s = sum(queue.cost_s + cost_s for _, _, _, cost_s, _ in given_operations)
        assert -1e-9 <= ahead_s <= queue.cost_s + share_s + 1e-9
        # What was looked at after an earlier operation is what the flows are like now.
        known = [queue.ahead_s(flow, 2.0, now, rate=0.7, without=without) for without in left_out]
        queue._snapshots.clear()
        new = [queue.ahead_s(flow, 2.0, now, rate=0.7, without=without) for without in left_out]
        assert new == pytest.approx(known)
