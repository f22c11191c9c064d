"""A lane that breaks: the push goes on over the best path left, and comes back to the better one."""

from __future__ import annotations

import pytest
from service_harness import NUM_BLOCKS, TARGET, WHOLE, WRITER, Rank

from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.transfer_orders import OpenLanding, PieceCheck, StopPush
from kvtransfer.transfer_reports import PeerConnected, PeerLost, PushDone, PushFailed, PushStopped


def test_tcp_finishes_what_shared_memory_began(target: Rank) -> None:
    """The connection over shared memory breaks in the middle of the third block of six."""
    with Rank(WRITER, seed=1, error_budget=1) as writer:
        connection_id = writer.connect(target)
        assert writer.paths()[0].transport == "shm"
        moves = [(src, src + 10) for src in range(6)]
        writer.faults.hooks["push.half"] = lambda count: writer.break_channel() if count == 3 else None
        landing_id = target.open(*(dst for _, dst in moves))
        writer.push(connection_id, landing_id, moves)
        done = writer.reports.take(PushDone)
        assert done.transport == "tcp"
        assert writer.faults.counts["push.half"] >= 3 + 6  # repeated from its start
        (path,) = writer.paths()
        assert (path.transport, path.gb_s > 0) == ("tcp", True)
        assert path.instead_of.startswith("shm: failed (")
        assert "not tried again for" in path.instead_of
        for src, dst in moves:
            assert target.piece(dst, WHOLE) == writer.piece(src, WHOLE)
        checks = [
            PieceCheck(piece.block_index + 10, piece.block_index, piece.shard, piece.checksum)
            for piece in done.pieces
        ]
        assert len(checks) == 6
        assert target.verify(*checks) == ()
        assert not writer.reports.has(PushFailed)
        assert not writer.reports.has(PeerLost)


def test_within_its_budget_a_transport_is_opened_again(target: Rank) -> None:
    """And with every push that goes through, the budget is whole again."""
    with Rank(WRITER, seed=1, error_budget=2) as writer:
        connection_id = writer.connect(target)
        writer.paths()
        for push_id in range(1, 5):
            fatal = writer.faults.counts.get("push.half", 0) + 2
            writer.faults.hooks["push.half"] = lambda count, fatal=fatal: (  # type: ignore[misc]
                writer.break_channel() if count == fatal else None
            )
            landing_id = target.open(1, 2, 3)
            writer.push(connection_id, landing_id, [(4, 1), (5 + push_id, 2), (6, 3)], push_id=push_id)
            assert writer.reports.take(PushDone).transport == "shm"
            (path,) = writer.paths()
            assert (path.transport, path.instead_of) == ("shm", "")
            assert target.piece(2, WHOLE) == writer.piece(5 + push_id, WHOLE)


def test_a_lane_goes_back_to_the_better_transport_after_its_cool_down(target: Rank) -> None:
    clock = ManualClock()
    with Rank(WRITER, seed=1, clock=clock, error_budget=1, cool_down_s=1.0) as writer:
        connection_id = writer.connect(target)
        assert writer.paths()[0].transport == "shm"
        writer.break_channel()
        assert writer.paths()[0].transport == "tcp"
        for push_id, advance_s in enumerate((0.5, 0.5), start=1):
            assert not writer.reports.has(PeerConnected)
            clock.advance(advance_s)
            writer.push(connection_id, target.open(push_id), [(push_id, push_id)], push_id=push_id)
            assert writer.reports.take(PushDone).transport == "tcp"
        (path,) = writer.paths()
        assert (path.transport, path.instead_of) == ("shm", "")
        writer.push(connection_id, target.open(3), [(3, 3)], push_id=3)
        assert writer.reports.take(PushDone).transport == "shm"
        assert target.piece(3, WHOLE) == writer.piece(3, WHOLE)


@pytest.mark.parametrize("cool_down_s", [10.0, 1e-6])
def test_a_push_that_breaks_every_path_is_given_up(target: Rank, cool_down_s: float) -> None:
    """They open and are measured well, but it does not get through: also when nothing cools down."""
    with Rank(WRITER, seed=1, error_budget=3, cool_down_s=cool_down_s, max_cool_down_s=cool_down_s) as writer:
        connection_id = writer.connect(target)
        writer.faults.hooks["push.half"] = lambda count: writer.break_channel()
        writer.push(connection_id, target.open(1), [(1, 1)])
        assert writer.reports.take(PushFailed).push_id == 1
        assert writer.faults.counts["push.half"] == 2 * 3
        if cool_down_s > 1:
            reason = writer.reports.take(PeerLost).reason
            assert "shm: failed" in reason
            assert "tcp: failed" in reason


def test_a_push_to_a_target_that_is_gone_fails_fast(writer: Rank) -> None:
    with Rank(TARGET) as target:
        connection_id = writer.connect(target)
        writer.paths()
        landing_id = target.open(1)
    lost = writer.reports.take(PeerLost)
    assert lost.connection_id == connection_id
    assert "shm" in lost.reason
    assert "tcp" in lost.reason
    writer.push(connection_id, landing_id, [(1, 1)])
    assert writer.reports.take(PushFailed).reason == "its connection is closed"


def test_what_the_target_refuses_is_not_tried_on_another_path(writer: Rank, target: Rank) -> None:
    connection_id = writer.connect(target)
    writer.paths()
    landing_id = target.open(1)
    target.agent.handle(OpenLanding(landing_id, WRITER, (1,)))
    stranger = draw_id()
    target.agent.handle(OpenLanding(stranger, ReplicaIdentity("another", 1), (2,)))
    writer.push(connection_id, stranger, [(1, 2)])
    assert "does not accept" in writer.reports.take(PushFailed).reason
    writer.push(connection_id, landing_id, [(1, NUM_BLOCKS)], push_id=2)
    assert "outside" in writer.reports.take(PushFailed).reason
    writer.push(connection_id, landing_id, [(1, 1)], push_id=3)
    assert writer.reports.take(PushDone).transport == "shm"
    assert not writer.reports.has(PeerConnected)


def test_a_stop_in_the_middle_is_answered_after_the_failure_and_not_repeated(
    writer: Rank, target: Rank
) -> None:
    connection_id = writer.connect(target)
    writer.paths()
    landing_id = target.open(1, 2, 3)

    def stop(count: int) -> None:
        if count == 2:
            writer.agent.handle(StopPush(landing_id))
            writer.break_channel()

    writer.faults.hooks["push.half"] = stop
    writer.push(connection_id, landing_id, [(4, 1), (5, 2), (6, 3)])
    writer.reports.take(PushStopped)
    kinds = [type(each) for each in writer.reports.all]
    assert kinds.index(PushFailed) < kinds.index(PushStopped)
    assert writer.faults.counts["push.half"] == 2
    assert writer.paths()[0].transport == "shm"  # the lane itself is opened again
