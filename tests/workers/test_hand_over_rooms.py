"""The rooms of a brain around hand-overs: which news reach the gateway, and what peers may not break."""

from __future__ import annotations

import pytest
from hash_rank import BLOCK_TOKENS, pack
from rooms import GATEWAY, HERE, PEER, Rooms

from kvtransfer.messages import (
    LandingAbort,
    LandingGrant,
    LandingRefusal,
    LandingRequest,
    LandingResult,
    PushDone,
    PushOrder,
    ReplicaIdentity,
)
from workers.messages import HandOver, Submission

PROMPT = list(range(1, 2 * BLOCK_TOKENS + 1))
LANDING_ID = bytes(16)


async def test_a_prompt_held_at_the_peer_that_ends_with_its_first_token_is_not_handed_over() -> None:
    rooms = Rooms()
    rooms.requests.submit(GATEWAY, rooms.submission("r", PROMPT, decode=PEER, max_tokens=1))
    rooms.pump()
    rooms.grant(len(PROMPT), ())
    rooms.pump()
    assert [delta.finish for delta in rooms.deltas] == ["length"]
    kinds = [type(message) for message in rooms.peers.to_reader]
    assert kinds == [LandingRequest, LandingAbort], "a hand-over without samples would break the peer"
    assert (len(rooms.requests), rooms.pool.num_references, rooms.outbound.book.num_active) == (0, 0, 0)


async def test_a_deadline_before_the_first_push_is_told_as_a_deadline() -> None:
    rooms = Rooms()
    rooms.requests.submit(GATEWAY, rooms.submission("r", PROMPT, decode=PEER, deadline_s=1.0))
    rooms.pump()
    rooms.clock.advance(2.0)
    rooms.pump()
    rooms.pump()
    assert [failure.code for failure in rooms.failures] == ["deadline"]
    assert isinstance(rooms.peers.to_reader[-1], LandingAbort)


async def test_a_push_is_traced_to_its_request() -> None:
    rooms = Rooms()
    for name in ("a", "b"):
        rooms.requests.submit(GATEWAY, rooms.submission(name, [*PROMPT, ord(name) % 20], decode=PEER))
        rooms.pump()
        rooms.grant(0, (3, 4, 5))
    rooms.pump()
    orders = [order for order in rooms.orders if isinstance(order, PushOrder)]
    assert len(orders) == 2
    rooms.outbound.report(
        PushDone(orders[1].push_id, orders[1].landing_id, (), 0, 0.5, 7.0, "shm"),
    )
    assert [name for name, _ in rooms.outbound.trace(("a", 1))] == ["chunk.start", "chunk.end"]
    assert rooms.outbound.trace(("b", 1))[-2:] == (("push.start", 7.0), ("push.end", 7.5))


async def test_a_replica_does_not_hand_over_to_itself() -> None:
    rooms = Rooms()
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
    rooms = Rooms()
    wanted = rooms.submission("r", [1], outputs=change.get("outputs", ((),)))  # type: ignore[arg-type]
    prompt = change.get("prompt", wanted.prompt)
    fields = {name: getattr(wanted, name) for name in wanted.__struct_fields__}
    rooms.requests.submit(GATEWAY, Submission(**{**fields, "prompt": prompt}))
    rooms.pump()
    (failure,) = rooms.failures
    assert failure.code == "invalid"
    assert words in failure.reason


# ---------------------------------------------------------------------------------- the decode side


def landing(rooms: Rooms, writer: ReplicaIdentity = PEER) -> None:
    request = LandingRequest(LANDING_ID, "r", 1, "", 0, (), len(PROMPT), 1, None)
    rooms.inbound.message(writer, request)
    assert isinstance(rooms.peers.to_writer[-1], LandingGrant)


def hand_over(submission: Submission) -> HandOver:
    return HandOver(LANDING_ID, submission, *GATEWAY, 0, "shm", 0.0, 0.0)


@pytest.mark.parametrize("outputs", [(), ((),), ((1,), (1, 2)), ((1, 2),)])
async def test_a_hand_over_with_the_wrong_tokens_breaks_nothing(outputs: tuple[tuple[int, ...], ...]) -> None:
    rooms = Rooms()
    landing(rooms)
    rooms.inbound.message(PEER, hand_over(rooms.submission("r", PROMPT, outputs=outputs)))
    assert isinstance(rooms.peers.to_writer[-1], LandingAbort)
    rooms.inbound.message(PEER, LandingAbort(LANDING_ID, "stopped", writers_stopped=True))
    assert (rooms.pool.num_references, rooms.pool.num_quarantined, len(rooms.requests)) == (0, 0, 0)


async def test_a_hand_over_of_what_runs_here_already_breaks_nothing() -> None:
    rooms = Rooms()
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
    rooms = Rooms()
    landing(rooms)
    rooms.inbound.message(PEER, hand_over(rooms.submission("r", PROMPT, outputs=((1,),), max_tokens=3)))
    assert isinstance(rooms.peers.to_writer[-1], LandingResult)
    for _ in range(5):
        rooms.pump()
    assert [delta.first_index for delta in rooms.deltas] == [1, 2]
    assert rooms.pool.num_references == 0


async def test_a_leaving_replica_takes_no_landing() -> None:
    rooms = Rooms()
    rooms.inbound.leave("it leaves")
    rooms.inbound.message(PEER, LandingRequest(LANDING_ID, "r", 1, "", 0, (), len(PROMPT), 1, None))
    (refusal,) = rooms.peers.to_writer
    assert isinstance(refusal, LandingRefusal)
    assert refusal.reason == "it leaves"
