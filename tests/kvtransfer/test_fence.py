"""The writer's fence under any order of events: every push ends once, nothing follows `PushStopped`."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples

from kvtransfer.protocol.fence import PushFence
from kvtransfer.transfer_orders import PushOrder
from kvtransfer.transfer_reports import PushDone, PushFailed, PushStopped, TransferReport

LANDINGS = [b"a", b"b"]
CONNECTIONS = [b"x", b"y"]
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from(LANDINGS), st.sampled_from(CONNECTIONS)),
        st.tuples(st.just("start"), st.integers(0, 5), st.none()),
        st.tuples(st.just("end"), st.integers(0, 5), st.booleans()),
        st.tuples(st.just("park"), st.integers(0, 5), st.none()),
        st.tuples(st.just("stop"), st.sampled_from(LANDINGS), st.none()),
        st.tuples(st.just("remove"), st.sampled_from(CONNECTIONS), st.none()),
    ),
    max_size=40,
)


class FenceHarness:
    """A fence and what its caller would know; threads are played one event at a time."""

    def __init__(self) -> None:
        self.reports: list[TransferReport] = []
        self.fence = PushFence(self.reports.append)
        self.orders: list[PushOrder] = []
        self.queued: list[PushOrder] = []
        self.running: list[PushOrder] = []
        for connection_id in CONNECTIONS:
            self.fence.add_connection(connection_id)

    def submit(self, landing_id: bytes, connection_id: bytes) -> None:
        order = PushOrder(len(self.orders), connection_id, landing_id, ())
        self.orders.append(order)
        if self.fence.submit(order):
            self.queued.append(order)

    def start(self, index: int, _: object) -> None:
        if index < len(self.queued):
            order = self.queued.pop(index)
            if self.fence.start(order):
                assert not self.fence.is_stopped(order.landing_id)
                self.running.append(order)

    def end(self, index: int, done: bool) -> None:
        if index < len(self.running):
            order = self.running.pop(index)
            result = PushDone(order.push_id, order.landing_id, (), 0, 0.0, 0.0, "")
            failed = PushFailed(order.push_id, order.landing_id, "")
            self.fence.end(order, result if done else failed)

    def park(self, index: int, _: object) -> None:
        if index < len(self.running):
            order = self.running.pop(index)
            if self.fence.park(order):
                assert not self.fence.is_stopped(order.landing_id)
                self.queued.append(order)

    def stop(self, landing_id: bytes, _: object) -> None:
        self.fence.stop(landing_id)

    def remove(self, connection_id: bytes, _: object) -> None:
        self.fence.remove_connection(connection_id, "lost")


@settings(max_examples=examples(200))
@given(EVENTS)
def test_any_order_of_events(events: list[tuple[str, object, object]]) -> None:
    harness = FenceHarness()
    stopped_when: dict[bytes, int] = {}
    for name, first, second in events:
        num_before = len(harness.orders)
        getattr(harness, name)(first, second)
        if name == "stop" and first not in stopped_when:
            stopped_when[first] = num_before  # type: ignore[index]
    while harness.queued:
        harness.start(0, None)
    while harness.running:
        harness.end(0, True)
    assert not harness.running
    ends = [each.push_id for each in harness.reports if isinstance(each, PushDone | PushFailed)]
    assert sorted(ends) == [order.push_id for order in harness.orders]
    for landing_id, first_late in stopped_when.items():
        places = [place for place, each in enumerate(harness.reports) if each == PushStopped(landing_id)]
        assert places
        for report in harness.reports[places[0] :]:
            if isinstance(report, PushDone | PushFailed) and report.landing_id == landing_id:
                assert isinstance(report, PushFailed)
                assert report.push_id >= first_late  # submitted after the stop: failed at once


def test_a_stop_need_not_wait_for_a_parked_push() -> None:
    harness = FenceHarness()
    harness.submit(b"a", b"x")
    harness.start(0, None)
    harness.park(0, None)
    harness.stop(b"a", None)
    assert harness.reports == [PushFailed(0, b"a", "its landing was stopped"), PushStopped(b"a")]
    harness.start(0, None)
    assert not harness.running


def test_a_push_that_is_parked_after_the_stop_ends() -> None:
    harness = FenceHarness()
    harness.submit(b"a", b"x")
    harness.start(0, None)
    harness.stop(b"a", None)
    assert harness.reports == []
    harness.park(0, None)
    assert harness.reports == [PushFailed(0, b"a", "its landing was stopped"), PushStopped(b"a")]
