"""The rooms of a brain around hand-overs: which news reach the gateway, and what peers may not break."""

from __future__ import annotations

import pytest
from hash_rank import BLOCK_TOKENS, pack
from replica_harness import GATEWAY, HERE, PEER, Components

from kvtransfer.messages import (
    LandingAbort,
    LandingGrant,
    LandingRefusal,
    LandingRequest,
    LandingResult,
    Manifest,
    PieceSum,
    PushDone,
    PushOrder,
    ReplicaIdentity,
    Shard,
    Verified,
    VerifyOrder,
)
from workers.messages import HandOver, Submission

PROMPT = list(range(1, 2 * BLOCK_TOKENS + 1))
LANDING_ID = bytes(16)
HALVES = ((0, Shard(0, 1, 0, 1)), (1, Shard(0, 1, 1, 2)))


def done(order: PushOrder, rank: int, seconds: float, started_at: float) -> PushDone:
    """The report of a rank that writes to the rank of the same number."""
    pieces = (PieceSum(0, *HALVES[rank], 5),)
    transport = ("tcp", "shm")[rank]
    return PushDone(order.push_id, order.landing_id, pieces, 10, seconds, started_at, transport)


async def test_a_prompt_held_at_the_peer_that_ends_with_its_first_token_is_not_handed_over() -> None:
    rooms = Components()
    rooms.requests.submit(GATEWAY, rooms.submission("r", PROMPT, decode=PEER, max_tokens=1))
    rooms.pump()
    rooms.grant(len(PROMPT), ())
    rooms.pump()
    assert [delta.finish for delta in rooms.deltas] == ["length"]
    kinds = [type(message) for message in rooms.peers.to_reader]
    assert kinds == [LandingRequest, LandingAbort], "a hand-over without samples would break the peer"
    assert (len(rooms.requests), rooms.pool.num_references, rooms.outbound.book.num_active) == (0, 0, 0)


async def test_a_deadline_before_the_first_push_is_told_as_a_deadline() -> None:
    rooms = Components()
    rooms.requests.submit(GATEWAY, rooms.submission("r", PROMPT, decode=PEER, deadline_s=1.0))
    rooms.pump()
    rooms.clock.advance(2.0)
    rooms.pump()
    rooms.pump()
    assert [failure.code for failure in rooms.failures] == ["deadline"]
    assert isinstance(rooms.peers.to_reader[-1], LandingAbort)


async def test_a_push_is_traced_to_its_request() -> None:
    rooms = Components()
    for name in ("a", "b"):
        rooms.requests.submit(GATEWAY, rooms.submission(name, [*PROMPT, ord(name) % 20], decode=PEER))
        rooms.pump()
        rooms.grant(0, (3, 4, 5))
    rooms.pump()
    orders = [order for order in rooms.orders if isinstance(order, PushOrder)]
    assert len(orders) == 2
    rooms.outbound.report(0, done(orders[1], 0, 0.5, 7.0))
    assert [name for name, _ in rooms.outbound.trace(("a", 1))] == ["chunk.start", "chunk.end"]
    assert rooms.outbound.trace(("b", 1))[-2:] == (("push.start", 7.0), ("push.end", 7.5))


async def test_a_prompt_is_handed_over_when_every_rank_has_pushed_it() -> None:
    rooms = Components(lanes=HALVES)
    rooms.requests.submit(GATEWAY, rooms.submission("r", PROMPT, decode=PEER))
    rooms.pump()
    rooms.grant(0, (3, 4))
    rooms.pump()
    (order,) = (order for order in rooms.orders if isinstance(order, PushOrder))
    rooms.outbound.report(1, done(order, 1, 0.5, 6.0))
    rooms.outbound.report(0, done(order, 0, 2.0, 7.0))
    *manifests, hand_over = rooms.peers.to_reader[1:]
    assert [[piece.rank for piece in it.pieces] for it in manifests if isinstance(it, Manifest)] == [[1], [0]]
    assert isinstance(hand_over, HandOver)
    assert (hand_over.num_moved_bytes, hand_over.transport) == (20, "shm+tcp")
    assert (hand_over.transfer_start, hand_over.transfer_seconds) == (6.0, 2.0)
    assert rooms.outbound.trace(("r", 1))[-2:] == (("push.start", 6.0), ("push.end", 8.0))


async def test_a_refusal_names_who_has_no_room() -> None:
    rooms = Components()
    rooms.requests.submit(GATEWAY, rooms.submission("r", PROMPT, decode=PEER))
    rooms.pump()
    (asked,) = rooms.peers.to_reader
    assert isinstance(asked, LandingRequest)
    rooms.outbound.message(PEER, LandingRefusal(asked.landing_id, "full", 2.0))
    rooms.requests.refusal = "it leaves"
    rooms.requests.submit(GATEWAY, rooms.submission("s", PROMPT, decode=PEER))
    rooms.pump()
    named = [(failure.request_id, failure.code, failure.refused_by) for failure in rooms.failures]
    assert named == [("r", "refused", PEER.replica_id), ("s", "refused", "")]


async def test_all_that_wait_for_a_path_are_told_when_there_is_none() -> None:
    rooms = Components()
    rooms.peers.is_ready = False
    for name in ("a", "b"):
        rooms.requests.submit(GATEWAY, rooms.submission(name, PROMPT, decode=PEER))
    rooms.peers.failure = "below the floor"
    rooms.pump()
    rooms.requests.submit(GATEWAY, rooms.submission("c", PROMPT, decode=PEER))
    rooms.pump()
    failures = [(failure.request_id, failure.code, failure.reason) for failure in rooms.failures]
    assert failures == [(name, "peer", "below the floor") for name in ("a", "b", "c")]
    assert (len(rooms.requests), rooms.pool.num_references) == (0, 0)


async def test_a_replica_does_not_hand_over_to_itself() -> None:
    rooms = Components()
    rooms.requests.submit(GATEWAY, rooms.submission("r", PROMPT, decode=HERE, max_tokens=3))
    for _ in range(4):
        rooms.pump()
    assert [delta.finish for delta in rooms.deltas] == ["", "", "length"]
    assert rooms.peers.to_reader == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": b"12345"}, "prompt: 5 bytes"),
        ({"prompt": pack([1, 24])}, "prompt: a token id"),
        ({"outputs": ([1], [99])}, "samples[1].output: a token id"),
    ],
)
async def test_tokens_that_are_none_are_refused_before_the_rank_sees_them(
    change: dict[str, object], words: str
) -> None:
    rooms = Components()
    wanted = rooms.submission("r", [1], outputs=change.get("outputs", ((),)))  # type: ignore[arg-type]
    prompt = change.get("prompt", wanted.prompt)
    fields = {name: getattr(wanted, name) for name in wanted.__struct_fields__}
    rooms.requests.submit(GATEWAY, Submission(**{**fields, "prompt": prompt}))
    rooms.pump()
    (failure,) = rooms.failures
    assert failure.code == "invalid"
    assert words in failure.reason


# ---------------------------------------------------------------------------------- the decode side


def landing(rooms: Components, writer: ReplicaIdentity = PEER) -> None:
    request = LandingRequest(LANDING_ID, "r", 1, "", 0, (), len(PROMPT), 1, None)
    rooms.inbound.message(writer, request)
    assert isinstance(rooms.peers.to_writer[-1], LandingGrant)


def hand_over(submission: Submission) -> HandOver:
    return HandOver(LANDING_ID, submission, *GATEWAY, 0, "shm", 0.0, 0.0)


@pytest.mark.parametrize("outputs", [(), ((),), ((1,), (1, 2)), ((1, 2),)])
async def test_a_hand_over_with_the_wrong_tokens_breaks_nothing(outputs: tuple[tuple[int, ...], ...]) -> None:
    rooms = Components()
    landing(rooms)
    rooms.inbound.message(PEER, hand_over(rooms.submission("r", PROMPT, outputs=outputs)))
    assert isinstance(rooms.peers.to_writer[-1], LandingAbort)
    rooms.inbound.message(PEER, LandingAbort(LANDING_ID, "stopped", writers_stopped=True))
    assert (rooms.pool.num_references, rooms.pool.num_quarantined, len(rooms.requests)) == (0, 0, 0)


async def test_a_hand_over_of_what_runs_here_already_breaks_nothing() -> None:
    rooms = Components()
    landing(rooms)
    rooms.requests.submit(GATEWAY, rooms.submission("r", PROMPT))
    rooms.pump()
    rooms.inbound.message(PEER, hand_over(rooms.submission("r", PROMPT, outputs=((1,),))))
    assert isinstance(rooms.peers.to_writer[-1], LandingAbort)
    rooms.inbound.message(PEER, LandingAbort(LANDING_ID, "stopped", writers_stopped=True))
    for _ in range(10):
        rooms.pump()
    assert rooms.deltas[-1].finish == "length"
    assert rooms.pool.num_references == 0


async def test_a_right_hand_over_joins() -> None:
    rooms = Components()
    landing(rooms)
    rooms.inbound.message(PEER, hand_over(rooms.submission("r", PROMPT, outputs=((1,),), max_tokens=3)))
    assert isinstance(rooms.peers.to_writer[-1], LandingResult)
    for _ in range(5):
        rooms.pump()
    assert [delta.first_index for delta in rooms.deltas] == [1, 2]
    assert rooms.pool.num_references == 0


async def test_a_hand_over_joins_when_every_rank_has_verified_its_pieces() -> None:
    rooms = Components(lanes=HALVES)
    landing(rooms)
    pieces = tuple(PieceSum(0, rank, shard, 5 + rank) for rank, shard in HALVES)
    rooms.inbound.message(PEER, Manifest(LANDING_ID, pieces))
    rooms.inbound.message(PEER, hand_over(rooms.submission("r", PROMPT, outputs=((1,),), max_tokens=3)))
    sums = {rank: [it.checksum for it in order.pieces] for rank, order in rooms.orders_to}  # type: ignore[union-attr]
    assert sums == {0: [5], 1: [6]}
    assert all(isinstance(order, VerifyOrder) for _, order in rooms.orders_to)
    for rank in (1, 0):
        assert not isinstance(rooms.peers.to_writer[-1], LandingResult)
        rooms.inbound.report(rank, Verified(LANDING_ID, ()))
    assert rooms.peers.to_writer[-1] == LandingResult(LANDING_ID, BLOCK_TOKENS, 0)


async def test_a_hand_over_of_another_writer_is_not_taken_for_that_of_the_landing() -> None:
    rooms = Components(lanes=HALVES)
    landing(rooms)
    pieces = tuple(PieceSum(0, rank, shard, 0) for rank, shard in HALVES)
    rooms.inbound.message(PEER, Manifest(LANDING_ID, pieces))
    rooms.inbound.message(PEER, hand_over(rooms.submission("r", PROMPT, outputs=((1,),), max_tokens=3)))
    other = ReplicaIdentity("other", 1)
    rooms.inbound.message(other, hand_over(rooms.submission("r", [9] * len(PROMPT), outputs=((7,),))))
    assert [type(message) for message in rooms.peers.to_writer] == [LandingGrant, LandingAbort]
    for rank in (0, 1):
        rooms.inbound.report(rank, Verified(LANDING_ID, ()))
    assert rooms.peers.to_writer[-1] == LandingResult(LANDING_ID, BLOCK_TOKENS, 0)
    (sequence,) = rooms.scheduler._life._sequences()
    tokens = [sequence.token_at(index) for index in range(sequence.num_tokens)]
    assert tokens == [*PROMPT, 1]


async def test_a_leaving_replica_takes_no_landing() -> None:
    rooms = Components()
    rooms.inbound.leave("it leaves")
    rooms.inbound.message(PEER, LandingRequest(LANDING_ID, "r", 1, "", 0, (), len(PROMPT), 1, None))
    (refusal,) = rooms.peers.to_writer
    assert isinstance(refusal, LandingRefusal)
    assert refusal.reason == "it leaves"
