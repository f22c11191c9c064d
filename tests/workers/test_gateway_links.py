"""What gateways hear between two load reports, and how long their word on the class `batch` lasts."""

from __future__ import annotations

import pytest_asyncio
from engine_fakes import LinkEnd
from msgspec.structs import replace

from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import ReplicaIdentity
from workers.messages.link import LINK_UP_CODEC, LoadReport, QueueReport, StepFrame
from workers.replica.gateway_links import LOAD_PERIOD_S, QUEUE_PERIOD_S, GatewayLinks

KEY = ("g", 1)
QUEUE = QueueReport(
    num_running=1,
    num_waiting=2,
    num_landings=0,
    num_backlog_tokens=300,
    num_free_blocks=9,
    num_context_tokens=70,
)


class Linked:
    """One gateway at an engine core whose queue is `queue`."""

    def __init__(self) -> None:
        self.clock = ManualClock(10.0)
        self.links = GatewayLinks(self.clock)
        self.end = LinkEnd("g")
        self.links.connected(KEY, self.end.stream)
        self.queue = QUEUE
        self.num_asked = 0

    def flush(self, wait_s: float = 0.0) -> list[StepFrame]:
        self.clock.advance(wait_s)
        self.links.flush(lambda: LoadReport(identity=ReplicaIdentity("r", 1), sequence=1), self._asked)
        frames = [LINK_UP_CODEC.decode(frame) for frame in self.end.sent()]
        assert all(isinstance(frame, StepFrame) for frame in frames)
        return [frame for frame in frames if isinstance(frame, StepFrame)]

    def _asked(self) -> QueueReport:
        self.num_asked += 1
        return self.queue


@pytest_asyncio.fixture
async def linked() -> Linked:
    linked = Linked()
    (first,) = linked.flush()
    assert first.load is not None
    assert first.queue is None
    linked.flush(QUEUE_PERIOD_S)  # what the report has shown
    return linked


async def test_a_change_of_the_queue_is_sent_and_nothing_else(linked: Linked) -> None:
    assert linked.flush(QUEUE_PERIOD_S) == []
    linked.queue = replace(QUEUE, num_backlog_tokens=200, num_context_tokens=80)
    assert linked.flush(QUEUE_PERIOD_S) == [StepFrame(queue=linked.queue)]
    assert linked.flush(QUEUE_PERIOD_S) == []
    linked.queue = replace(linked.queue, num_context_tokens=81, num_free_blocks=8)
    assert linked.flush(QUEUE_PERIOD_S) == [], "that changes with every token"


async def test_changes_are_sent_so_often_and_the_last_one_always(linked: Linked) -> None:
    frames = []
    for number in range(100):
        linked.queue = replace(QUEUE, num_backlog_tokens=number)
        frames += linked.flush(QUEUE_PERIOD_S / 10)
    frames += linked.flush(QUEUE_PERIOD_S)
    assert frames[-1].queue == linked.queue
    assert 8 <= len(frames) <= 11
    assert linked.num_asked <= 13


async def test_a_report_makes_it_unnecessary(linked: Linked) -> None:
    linked.queue = replace(QUEUE, num_running=7)
    (frame,) = linked.flush(LOAD_PERIOD_S)
    assert frame.load is not None
    assert frame.queue is None


async def test_a_pause_lasts_until_it_is_said_otherwise_or_the_link_ends(linked: Linked) -> None:
    other = LinkEnd("h")
    linked.links.connected(("h", 1), other.stream)
    assert not linked.links.is_batch_paused
    for key in (KEY, ("h", 1)):
        linked.links.pause_batch(key, True)
    linked.links.pause_batch(KEY, False)
    assert linked.links.is_batch_paused, "the other gateway still wants it"
    linked.links.disconnected(("h", 1), other.stream)
    assert not linked.links.is_batch_paused
    linked.links.pause_batch(("h", 1), True)
    linked.links.pause_batch(("nobody", 1), True)
    assert not linked.links.is_batch_paused
