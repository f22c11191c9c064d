"""Who moves next: the rules against a naive model over any history, limits, and threads that wait."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import WAIT_S

from kvtransfer.agent.qos import (
    BATCH_BYTES,
    CLASSES,
    DEVICE_BATCH_BYTES,
    STALLED_S,
    ClassQueue,
    TrafficGovernor,
    TrafficRules,
)
from kvtransfer.common.clock import ManualClock, SystemClock
from kvtransfer.transfer_orders import TrafficClass, TransferSettings

NO_LIMITS = TransferSettings("127.0.0.1", ())
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.sampled_from(CLASSES), st.none()),
        st.tuples(st.just("ask"), st.integers(0, 7), st.sampled_from([1, 8, 64])),
        st.tuples(st.just("close"), st.integers(0, 7), st.none()),
        st.tuples(st.just("pass"), st.sampled_from([0.125, 0.5, 4.0]), st.none()),
    ),
    max_size=60,
)


@dataclass
class NaiveFlow:
    number: int
    traffic: TrafficClass
    # inf: it waits for its turn.
    let_go_at: float = math.inf


class Naive:
    """All flows and every batch that was let go, looked through from the start each time."""

    def __init__(self, limits: dict[TrafficClass, float]) -> None:
        self.limits = limits
        self.flows: list[NaiveFlow] = []
        self.batches: list[tuple[TrafficClass, float, int]] = []

    def may_move(self, flow: NaiveFlow, now: float) -> bool:
        urgency = CLASSES.index(flow.traffic)
        higher = [each for each in self.flows if CLASSES.index(each.traffic) < urgency]
        if any(each.let_go_at == math.inf or now < each.let_go_at + STALLED_S for each in higher):
            return False
        limit = self.limits[flow.traffic]
        ours = [(at, count) for traffic, at, count in self.batches if traffic == flow.traffic]
        return not limit or not ours or now >= ours[-1][0] + ours[-1][1] / limit


@given(st.sampled_from([0.0, 16.0]), EVENTS)
def test_any_history(limit: float, events: list[tuple[str, object, object]]) -> None:
    limits: dict[TrafficClass, float] = dict.fromkeys(CLASSES, limit)
    rules, naive = TrafficRules(limits), Naive(limits)
    now = 0.0
    for name, first, second in events:
        if name == "open":
            traffic = next(each for each in CLASSES if each == first)
            naive.flows.append(NaiveFlow(rules.open(traffic), traffic))
        elif name == "pass":
            assert isinstance(first, float)
            now += first
        elif isinstance(first, int) and first < len(naive.flows):
            flow = naive.flows[first]
            if name == "close":
                naive.flows.remove(flow)
                rules.close(flow.number)
                continue
            assert isinstance(second, int)
            flow.let_go_at = math.inf
            expected = naive.may_move(flow, now)
            assert (rules.ask(flow.number, second, now) == 0) is expected
            if expected:
                flow.let_go_at = now
                naive.batches.append((flow.traffic, now, second))


@given(st.lists(st.integers(1, 4 << 20), min_size=2, max_size=30))
def test_a_limited_class_moves_its_rate_and_no_less(batches: list[int]) -> None:
    """Asked again when it was told to, a flow moves exactly at its rate, neither sooner nor later."""
    rate = 1e8
    rules = TrafficRules({"prefetch": rate})
    flow = rules.open("prefetch")
    now, started_at = 0.0, []
    for num_bytes in batches:
        while (wait_s := rules.ask(flow, num_bytes, now)) > 0:
            now += wait_s
        started_at.append(now)
    assert math.isclose(started_at[-1], sum(batches[:-1]) / rate, rel_tol=1e-9)


def test_an_idle_limited_class_saves_nothing_up() -> None:
    rules = TrafficRules({"hand_over": 100.0})
    flow = rules.open("hand_over")
    assert rules.ask(flow, 50, 0.0) == 0.0
    assert rules.ask(flow, 50, 1000.0) == 0.0
    assert rules.ask(flow, 50, 1000.0) == 0.5


def test_two_flows_share_the_limit_of_their_class() -> None:
    rules = TrafficRules({"hand_over": 100.0})
    first, second = rules.open("hand_over"), rules.open("hand_over")
    assert rules.ask(first, 50, 0.0) == 0.0
    assert rules.ask(second, 50, 0.0) == 0.5
    assert rules.ask(second, 50, 0.5) == 0.0
    assert rules.ask(first, 50, 0.5) == 0.5


class Mover(threading.Thread):
    """A thread that moves batches of a class, one for each permission of the test."""

    def __init__(self, governor: TrafficGovernor, traffic: TrafficClass, num_batches: int = 1) -> None:
        super().__init__()
        self.governor = governor
        self.traffic: TrafficClass = traffic
        self.num_batches = num_batches
        self.gives_up = False
        self.num_moved = 0
        # One permit each time its `give_up` was asked, which is at the start of every wait.
        self.asked = threading.Semaphore(0)
        self.start()

    def run(self) -> None:
        with self.governor.flow(self.traffic) as take_turn:
            for _ in range(self.num_batches):
                if not take_turn(100, self._give_up):
                    return
                self.num_moved += 1

    def await_asking(self) -> None:
        assert self.asked.acquire(timeout=WAIT_S)

    def await_end(self) -> None:
        self.join(WAIT_S)
        assert not self.is_alive()

    def _give_up(self) -> bool:
        self.asked.release()
        return self.gives_up


@pytest.fixture
def no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting threads are woken by what happens, or not at all."""
    monkeypatch.setattr("kvtransfer.agent.qos.STALLED_S", 1e6)


@pytest.mark.usefixtures("no_stall")
def test_a_lower_class_waits_for_the_end_of_a_higher_flow() -> None:
    governor = TrafficGovernor(NO_LIMITS, ManualClock())
    with governor.flow("hand_over") as take_turn:
        mover = Mover(governor, "write_back")
        mover.await_asking()
        assert take_turn(100, lambda: False)
        governor.wake()
        mover.await_asking()
        assert mover.num_moved == 0
    mover.await_end()
    assert mover.num_moved == 1


def test_a_higher_class_does_not_wait_for_a_lower() -> None:
    governor = TrafficGovernor(NO_LIMITS, ManualClock())
    with governor.flow("write_back") as low:
        assert low(100, lambda: False)
        with governor.flow("hand_over") as high:
            assert high(100, lambda: False)
        assert low(100, lambda: False)


def test_a_higher_class_whose_target_stalls_holds_nobody_back_for_long() -> None:
    clock = ManualClock()
    governor = TrafficGovernor(NO_LIMITS, clock)
    with governor.flow("hand_over") as take_turn:
        assert take_turn(100, lambda: False)
        mover = Mover(governor, "prefetch")
        mover.await_asking()
        clock.advance(STALLED_S)
        governor.wake()
        mover.await_end()
    assert mover.num_moved == 1


def test_waiting_for_the_limit_ends_with_the_clock_and_is_counted() -> None:
    clock = ManualClock()
    governor = TrafficGovernor(TransferSettings("", (), prefetch_gb_s=1e-10), clock)
    mover = Mover(governor, "prefetch", num_batches=3)
    mover.await_asking()
    for num_moved in (1, 2):
        mover.await_asking()
        assert mover.num_moved == num_moved
        clock.advance(1000.0)  # what 100 bytes take
        governor.wake()
        mover.await_asking()
    mover.await_end()
    counted = governor.counted()
    assert counted["prefetch"] == (300, 3, 2000.0)
    assert counted["hand_over"] == (0, 0, 0.0)


def test_a_wait_is_given_up_at_once() -> None:
    governor = TrafficGovernor(TransferSettings("", (), write_back_gb_s=1e-12), SystemClock())
    mover = Mover(governor, "write_back", num_batches=2)
    mover.await_asking()
    mover.await_asking()
    mover.gives_up = True
    governor.wake()
    mover.await_end()
    assert mover.num_moved == 1
    counted = governor.counted()["write_back"]
    assert (counted.num_bytes, counted.num_batches) == (100, 1)


@given(st.lists(st.tuples(st.sampled_from(CLASSES), st.booleans())))
def test_the_queue_gives_items_by_class_and_in_order(items: list[tuple[TrafficClass, bool]]) -> None:
    queue: ClassQueue[int] = ClassQueue()
    expected: dict[TrafficClass, list[int]] = {traffic: [] for traffic in CLASSES}
    for number, (traffic, is_first) in enumerate(items):
        if is_first:
            queue.put_first(traffic, number)
            expected[traffic].insert(0, number)
        else:
            queue.put(traffic, number)
            expected[traffic].append(number)
    for index, traffic in enumerate(CLASSES):
        assert queue.has_above(traffic) is any(expected[each] for each in CLASSES[:index])
    assert [queue.get() for _ in items] == [number for numbers in expected.values() for number in numbers]


def test_a_woken_queue_says_so_first() -> None:
    queue: ClassQueue[int] = ClassQueue()
    queue.put("hand_over", 1)
    queue.wake()
    assert [queue.get(), queue.get()] == [None, 1]


def test_a_limited_class_moves_in_batches_that_its_rate_explains() -> None:
    governor = TrafficGovernor(
        TransferSettings("h", (), hand_over_gb_s=0.1, prefetch_gb_s=1e-9), SystemClock()
    )
    assert governor.batch_bytes("hand_over") == 500_000
    assert governor.batch_bytes("prefetch") == 1, "never nothing"
    assert governor.batch_bytes("write_back") == BATCH_BYTES
    on_device = TrafficGovernor(NO_LIMITS, ManualClock(), "cuda:0")
    assert on_device.batch_bytes("hand_over") == DEVICE_BATCH_BYTES > BATCH_BYTES
    assert on_device.batch_bytes("hand_over", 20) == DEVICE_BATCH_BYTES, "12 ms over PCI Express"
    assert on_device.batch_bytes("hand_over", 100) == 500_000_000
    assert on_device.batch_bytes("hand_over", 3000) == 1 << 30
    assert governor.batch_bytes("hand_over", 3000) == 500_000, "a limit is a limit"
