"""What a replica reports of itself: leaked blocks are counted, and blocks unaccounted for are noticed."""

from __future__ import annotations

from typing import cast

import pytest
from replica_harness import GATEWAY, HERE, PEER, ReplicaHarness

from kvtransfer.peer_messages import LandingRequest
from kvtransfer.transfer_reports import PushDone
from workers.disagg.kv_hand_overs import KvHandOvers
from workers.disagg.peers import Peers
from workers.messages.rank_channel import StepPlan
from workers.replica.replica_reports import ReplicaReports
from workers.replica.step_loop import StepLoop


class Reporting(ReplicaHarness):
    """ReplicaHarness with their reports; steps go through the step loop."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = StepLoop(self.scheduler, lambda plan: None, self.clock)
        self.reports = ReplicaReports(
            identity=HERE,
            pool=self.pool,
            scheduler=self.scheduler,
            steps=self.steps,
            hand_overs=KvHandOvers(self.kv_sender, self.kv_receiver, self.migration),
            peers=cast(Peers, self.peers),
        )


async def test_blocks_of_sequences_and_landings_are_not_leaked_and_others_are() -> None:
    reporting = Reporting()
    reporting.requests.submit(GATEWAY, reporting.submission("a", [1, 2, 3]))
    reporting.pump()
    reporting.kv_receiver.message(PEER, LandingRequest(bytes(16), "r", 1, "", 0, (), 9, 1, None))
    load = reporting.reports.load()
    assert (load.num_running, load.num_landings, load.num_leaked_blocks) == (1, 1, 0)
    assert reporting.pool.num_references == 4
    reporting.pool.allocate(2)
    assert reporting.reports.load().num_leaked_blocks == 2


async def test_what_was_moved_is_told_by_class_also_of_pushes_that_are_forgotten() -> None:
    reporting = Reporting()
    for number, traffic in enumerate(("hand_over", "prefetch", "hand_over")):
        done = PushDone(number, bytes(16), (), 10 + number, 0.1, 1.0, "shm", traffic)  # type: ignore[arg-type]
        reporting.kv_sender.report(0, done)
    assert reporting.reports.load().num_moved_bytes == {"hand_over": 22, "prefetch": 11}


async def test_what_was_moved_is_told_by_transport_with_the_time_it_took() -> None:
    reporting = Reporting()
    for number, (num_bytes, transport) in enumerate(((10, "shm"), (20, "tcp"), (5, "shm"), (0, "shm"))):
        reporting.kv_sender.report(0, PushDone(number, bytes(16), (), num_bytes, 0.25, 1.0, transport))
    load = reporting.reports.load()
    assert load.num_transport_bytes == {"shm": 15, "tcp": 20}
    assert load.transport_s == {"shm": 0.5, "tcp": 0.25}


async def test_slots_of_running_sequences_without_a_token_are_told() -> None:
    reporting = Reporting()
    reporting.requests.submit(GATEWAY, reporting.submission("a", [1, 2, 3]))
    assert reporting.reports.load().num_unfilled_tokens == 0, "it waits and holds nothing"
    reporting.pump()
    num_blocks = reporting.pool.num_referenced
    assert reporting.reports.load().num_unfilled_tokens == num_blocks * reporting.pool.block_tokens - 3


async def test_an_idle_replica_checks_its_books_once_after_work() -> None:
    reporting = Reporting()
    reporting.reports.check_when_idle()
    reporting.requests.submit(GATEWAY, reporting.submission("a", [1, 2, 3]))
    reporting.pool.allocate(1)  # nobody's
    reporting.steps.num_steps = 1
    reporting.reports.check_when_idle()  # not idle
    reporting.requests.cancel(("a", 1))
    with pytest.raises(AssertionError, match="1 references in the pool, 0 of sequences"):
        reporting.reports.check_when_idle()
    reporting.reports.check_when_idle()  # only once


async def test_events_are_numbered_without_gaps() -> None:
    reporting = Reporting()
    for number, prompt in enumerate(([1] * 4, [2] * 4), 1):
        reporting.requests.submit(GATEWAY, reporting.submission(f"r{number}", prompt))
        reporting.pump()
        events = reporting.reports.kv_events()
        assert events is not None
        assert events.sequence == number
        assert reporting.reports.kv_events() is None
    assert reporting.reports.kv_snapshot().sequence == 2


async def test_what_the_router_reads_of_size_and_context_is_reported() -> None:
    reporting = Reporting()
    reporting.requests.submit(GATEWAY, reporting.submission("a", list(range(20))))
    before = reporting.reports.load()
    assert before.num_context_tokens == 0
    assert before.max_batch_tokens == reporting.scheduler.config.max_batch_tokens > 0
    assert before.max_sequences == reporting.scheduler.config.max_sequences > 0
    reporting.pump()
    assert reporting.reports.load().num_context_tokens >= 20
    reporting.steps.costs.add(StepPlan(1, decodes=bytes(4)), [7], [0.01])
    for _ in range(15):
        reporting.steps.costs.add(StepPlan(1, decodes=bytes(4)), [7], [0.01])
    measured = reporting.reports.load()
    assert measured.decode_base_s + measured.decode_sequence_s == pytest.approx(0.01, rel=0.01)
