"""The components of an engine core around hand-overs: which news reach the gateway, and what peers may not
break."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace
from replica_harness import GATEWAY, HERE, PEER, ReplicaHarness
from staged_engine import BLOCK_TOKENS, pack

from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.peer_messages import (
    LandingAbort,
    LandingGrant,
    LandingRefusal,
    LandingRequest,
    LandingResult,
    Manifest,
    PieceSum,
)
from kvtransfer.transfer_orders import PushOrder, VerifyOrder
from kvtransfer.transfer_reports import PushDone, Verified
from workers.messages.link import Submission
from workers.messages.peer_link import HandOver

PROMPT = list(range(1, 2 * BLOCK_TOKENS + 1))
LANDING_ID = bytes(16)
HALVES = ((0, Shard(0, 1, 0, 1)), (1, Shard(0, 1, 1, 2)))


def done(order: PushOrder, rank: int, seconds: float, started_at: float) -> PushDone:
    """The report of a rank that writes to the rank of the same number."""
    pieces = (PieceSum(0, *HALVES[rank], 5),)
    transport = ("tcp", "shm")[rank]
    return PushDone(order.push_id, order.landing_id, pieces, 10, seconds, started_at, transport)


def trace(replica: ReplicaHarness, request_id: str) -> tuple[tuple[str, float], ...]:
    record = replica.table.get((request_id, 1))
    assert record is not None
    return tuple(record.trace)


async def test_a_prompt_held_at_the_peer_that_ends_with_its_first_token_is_not_handed_over() -> None:
    replica = ReplicaHarness()
    replica.requests.submit(GATEWAY, replica.submission("r", PROMPT, decode=PEER, max_tokens=1))
    replica.pump()
    replica.grant(len(PROMPT), ())
    replica.pump()
    assert [delta.finish for delta in replica.deltas] == ["length"]
    kinds = [type(message) for message in replica.peers.to_reader]
    assert kinds == [LandingRequest, LandingAbort], "a hand-over without samples would break the peer"
    assert (len(replica.table), replica.pool.num_references, replica.kv_sender.sends.num_active) == (0, 0, 0)


async def test_a_deadline_before_the_first_push_is_told_as_a_deadline() -> None:
    replica = ReplicaHarness()
    replica.requests.submit(GATEWAY, replica.submission("r", PROMPT, decode=PEER, deadline_s=1.0))
    replica.pump()
    replica.clock.advance(2.0)
    replica.pump()
    replica.pump()
    assert [failure.code for failure in replica.failures] == ["deadline"]
    assert isinstance(replica.peers.to_reader[-1], LandingAbort)


async def test_a_push_is_traced_to_its_request() -> None:
    replica = ReplicaHarness()
    for name in ("a", "b"):
        replica.requests.submit(GATEWAY, replica.submission(name, [*PROMPT, ord(name) % 20], decode=PEER))
        replica.pump()
        replica.grant(0, (3, 4, 5))
    replica.pump()
    orders = [order for order in replica.orders if isinstance(order, PushOrder)]
    assert len(orders) == 2
    replica.kv_sender.report(0, done(orders[1], 0, 0.5, 7.0))
    landing, chunk = ["landing.asked", "landing.granted"], ["chunk.start", "chunk.end"]
    assert [name for name, _ in trace(replica, "a")] == landing + chunk
    assert trace(replica, "b")[-2:] == (("push.start", 7.0), ("push.end", 7.5))


async def test_a_first_token_is_sent_before_its_push_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = ReplicaHarness()
    replica.requests.submit(GATEWAY, replica.submission("r", PROMPT, decode=PEER))
    replica.pump()
    replica.grant(0, (3, 4))
    num_tokens_at_push = []

    def send(order: object) -> None:
        if isinstance(order, PushOrder):
            replica.listen()
            num_tokens_at_push.append(len(replica.deltas))

    monkeypatch.setattr(replica.ranks, "send", send)
    replica.pump()
    assert num_tokens_at_push == [1]


async def test_a_prompt_is_handed_over_when_every_rank_has_pushed_it() -> None:
    replica = ReplicaHarness(lanes=HALVES)
    replica.requests.submit(GATEWAY, replica.submission("r", PROMPT, decode=PEER))
    replica.pump()
    replica.grant(0, (3, 4))
    replica.pump()
    (order,) = (order for order in replica.orders if isinstance(order, PushOrder))
    replica.kv_sender.report(1, done(order, 1, 0.5, 6.0))
    replica.kv_sender.report(0, done(order, 0, 2.0, 7.0))
    *manifests, hand_over = replica.peers.to_reader[1:]
    assert [[piece.rank for piece in it.pieces] for it in manifests if isinstance(it, Manifest)] == [[1], [0]]
    assert isinstance(hand_over, HandOver)
    assert (hand_over.num_moved_bytes, hand_over.transport) == (20, "shm+tcp")
    assert (hand_over.transfer_start, hand_over.transfer_seconds) == (6.0, 2.0)
    assert trace(replica, "r")[-2:] == (("push.start", 6.0), ("push.end", 8.0))


async def test_a_refusal_names_who_has_no_capacity() -> None:
    replica = ReplicaHarness()
    replica.requests.submit(GATEWAY, replica.submission("r", PROMPT, decode=PEER))
    replica.pump()
    (asked,) = replica.peers.to_reader
    assert isinstance(asked, LandingRequest)
    replica.kv_sender.message(PEER, LandingRefusal(asked.landing_id, "full", 2.0))
    replica.requests.refusal = "it leaves"
    replica.requests.submit(GATEWAY, replica.submission("s", PROMPT, decode=PEER))
    replica.pump()
    named = [(failure.request_id, failure.code, failure.refused_by) for failure in replica.failures]
    assert named == [("r", "refused", PEER.replica_id), ("s", "refused", "")]


async def test_all_that_wait_for_a_path_are_told_when_there_is_none() -> None:
    replica = ReplicaHarness()
    replica.peers.is_ready = False
    for name in ("a", "b"):
        replica.requests.submit(GATEWAY, replica.submission(name, PROMPT, decode=PEER))
    replica.peers.failure = "below the floor"
    replica.pump()
    replica.requests.submit(GATEWAY, replica.submission("c", PROMPT, decode=PEER))
    replica.pump()
    failures = [(failure.request_id, failure.code, failure.reason) for failure in replica.failures]
    assert failures == [(name, "peer", "below the floor") for name in ("a", "b", "c")]
    assert (len(replica.table), replica.pool.num_references) == (0, 0)


async def test_a_replica_does_not_hand_over_to_itself() -> None:
    replica = ReplicaHarness()
    replica.requests.submit(GATEWAY, replica.submission("r", PROMPT, decode=HERE, max_tokens=3))
    for _ in range(4):
        replica.pump()
    assert [delta.finish for delta in replica.deltas] == ["", "", "length"]
    assert replica.peers.to_reader == []


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
    replica = ReplicaHarness()
    wanted = replica.submission("r", [1], outputs=change.get("outputs", ((),)))  # type: ignore[arg-type]
    prompt = change.get("prompt", wanted.prompt)
    fields = {name: getattr(wanted, name) for name in wanted.__struct_fields__}
    replica.requests.submit(GATEWAY, Submission(**{**fields, "prompt": prompt}))
    replica.pump()
    (failure,) = replica.failures
    assert failure.code == "invalid"
    assert words in failure.reason


async def test_a_request_goes_back_where_more_is_to_be_computed_than_its_gateway_knew() -> None:
    replica = ReplicaHarness()
    for name, most in (("a", None), ("b", len(PROMPT) - 1), ("c", len(PROMPT)), ("d", len(PROMPT))):
        wanted = replica.submission(name, PROMPT)
        replica.requests.submit(GATEWAY, replace(wanted, most_backlog_tokens=most))
    replica.flush()
    replica.pump()
    failures = [(failure.request_id, failure.code) for failure in replica.failures]
    assert failures == [("b", "crowded"), ("d", "crowded")]
    assert {record.key[0] for record in replica.table} == {"a", "c"}


# ---------------------------------------------------------------------------------- the decode side


def landing(replica: ReplicaHarness, writer: ReplicaIdentity = PEER) -> None:
    request = LandingRequest(LANDING_ID, "r", 1, "", 0, (), len(PROMPT), 1, None)
    replica.kv_receiver.message(writer, request)
    assert isinstance(replica.peers.to_writer[-1], LandingGrant)


def hand_over(submission: Submission) -> HandOver:
    return HandOver(LANDING_ID, submission, *GATEWAY, 0, "shm", 0.0, 0.0)


@pytest.mark.parametrize("outputs", [(), ((),), ((1,), (1, 2)), ((1, 2),)])
async def test_a_hand_over_with_the_wrong_tokens_breaks_nothing(outputs: tuple[tuple[int, ...], ...]) -> None:
    replica = ReplicaHarness()
    landing(replica)
    replica.kv_receiver.message(PEER, hand_over(replica.submission("r", PROMPT, outputs=outputs)))
    assert isinstance(replica.peers.to_writer[-1], LandingAbort)
    replica.kv_receiver.message(PEER, LandingAbort(LANDING_ID, "stopped", writers_stopped=True))
    assert (replica.pool.num_references, replica.pool.num_quarantined, len(replica.table)) == (0, 0, 0)


async def test_a_hand_over_of_what_runs_here_already_breaks_nothing() -> None:
    replica = ReplicaHarness()
    landing(replica)
    replica.requests.submit(GATEWAY, replica.submission("r", PROMPT))
    replica.pump()
    replica.kv_receiver.message(PEER, hand_over(replica.submission("r", PROMPT, outputs=((1,),))))
    assert isinstance(replica.peers.to_writer[-1], LandingAbort)
    replica.kv_receiver.message(PEER, LandingAbort(LANDING_ID, "stopped", writers_stopped=True))
    for _ in range(10):
        replica.pump()
    assert replica.deltas[-1].finish == "length"
    assert replica.pool.num_references == 0


async def test_a_right_hand_over_joins() -> None:
    replica = ReplicaHarness()
    landing(replica)
    replica.kv_receiver.message(
        PEER, hand_over(replica.submission("r", PROMPT, outputs=((1,),), max_tokens=3))
    )
    assert isinstance(replica.peers.to_writer[-1], LandingResult)
    for _ in range(5):
        replica.pump()
    assert [delta.first_index for delta in replica.deltas] == [1, 2]
    assert replica.pool.num_references == 0


async def test_a_hand_over_joins_when_every_rank_has_verified_its_pieces() -> None:
    replica = ReplicaHarness(lanes=HALVES)
    landing(replica)
    pieces = tuple(PieceSum(0, rank, shard, 5 + rank) for rank, shard in HALVES)
    replica.kv_receiver.message(PEER, Manifest(LANDING_ID, pieces))
    replica.kv_receiver.message(
        PEER, hand_over(replica.submission("r", PROMPT, outputs=((1,),), max_tokens=3))
    )
    sums = {rank: [it.checksum for it in order.pieces] for rank, order in replica.orders_to}
    assert sums == {0: [5], 1: [6]}
    assert all(isinstance(order, VerifyOrder) for _, order in replica.orders_to)
    for rank in (1, 0):
        assert not isinstance(replica.peers.to_writer[-1], LandingResult)
        replica.kv_receiver.report(rank, Verified(LANDING_ID, ()))
    assert replica.peers.to_writer[-1] == LandingResult(LANDING_ID, BLOCK_TOKENS, 0)


class GivenBlocks:
    """Stands for ranks that give blocks on, until `then` is called."""

    def __init__(self) -> None:
        self.block_ids: list[tuple[int, ...]] = []
        self.then: list[Callable[[], None]] = []

    def give(self, block_ids: tuple[int, ...], then: Callable[[], None]) -> None:
        self.block_ids.append(block_ids)
        self.then.append(then)


def landed_at(sharing: GivenBlocks) -> ReplicaHarness:
    """A replica at which the first block of a prompt of two has landed."""
    replica = ReplicaHarness(lanes=HALVES, sharing=sharing)
    landing(replica)
    pieces = tuple(PieceSum(0, rank, shard, 5) for rank, shard in HALVES)
    replica.kv_receiver.message(PEER, Manifest(LANDING_ID, pieces))
    replica.kv_receiver.message(
        PEER, hand_over(replica.submission("r", PROMPT, outputs=((1,),), max_tokens=3))
    )
    for rank in (0, 1):
        replica.kv_receiver.report(rank, Verified(LANDING_ID, ()))
    return replica


async def test_a_sequence_joins_when_all_ranks_have_what_landed() -> None:
    """Of a prompt of two blocks, the one that is good. Until then nobody finds its blocks, and they are
    accounted for."""
    sharing = GivenBlocks()
    replica = landed_at(sharing)
    granted = next(it for it in replica.peers.to_writer if isinstance(it, LandingGrant))
    assert sharing.block_ids == [granted.block_ids[:1]]
    assert replica.peers.to_writer[-1] == LandingResult(LANDING_ID, BLOCK_TOKENS, 0)
    assert (len(replica.table), replica.scheduler.is_here("r", 1)) == (0, False)
    assert replica.kv_receiver.num_references == replica.pool.num_references == 2
    assert replica.kv_receiver.num_unfinished == 1
    replica.pump()
    assert not replica.joined
    sharing.then[0]()
    assert replica.scheduler.is_here("r", 1)
    assert (replica.kv_receiver.num_references, replica.kv_receiver.num_unfinished) == (0, 0)
    replica.scheduler.check(0)


async def test_a_request_that_is_cancelled_while_its_blocks_are_given_frees_them() -> None:
    sharing = GivenBlocks()
    replica = landed_at(sharing)
    replica.requests.cancel(("r", 1))
    assert replica.pool.num_references == 2, "the ranks still write them"
    sharing.then[0]()
    assert (len(replica.table), replica.scheduler.is_here("r", 1)) == (0, False)
    assert (replica.pool.num_references, replica.kv_receiver.num_references) == (0, 0)
    replica.pump()
    assert not replica.joined


async def test_a_hand_over_of_which_nothing_is_good_has_nothing_to_give() -> None:
    sharing = GivenBlocks()
    replica = ReplicaHarness(sharing=sharing)
    landing(replica)
    replica.kv_receiver.message(
        PEER, hand_over(replica.submission("r", PROMPT, outputs=((1,),), max_tokens=3))
    )
    assert not sharing.block_ids
    assert replica.scheduler.is_here("r", 1)


async def test_a_hand_over_of_another_writer_is_not_taken_for_that_of_the_landing() -> None:
    replica = ReplicaHarness(lanes=HALVES)
    landing(replica)
    pieces = tuple(PieceSum(0, rank, shard, 0) for rank, shard in HALVES)
    replica.kv_receiver.message(PEER, Manifest(LANDING_ID, pieces))
    replica.kv_receiver.message(
        PEER, hand_over(replica.submission("r", PROMPT, outputs=((1,),), max_tokens=3))
    )
    other = ReplicaIdentity("other", 1)
    replica.kv_receiver.message(other, hand_over(replica.submission("r", [9] * len(PROMPT), outputs=((7,),))))
    assert [type(message) for message in replica.peers.to_writer] == [LandingGrant, LandingAbort]
    for rank in (0, 1):
        replica.kv_receiver.report(rank, Verified(LANDING_ID, ()))
    assert replica.peers.to_writer[-1] == LandingResult(LANDING_ID, BLOCK_TOKENS, 0)
    (sequence,) = replica.scheduler.life._sequences()
    tokens = [sequence.token_at(index) for index in range(sequence.num_tokens)]
    assert tokens == [*PROMPT, 1]


async def test_a_leaving_replica_takes_no_landing() -> None:
    replica = ReplicaHarness()
    replica.kv_receiver.leave("it leaves")
    replica.kv_receiver.message(PEER, LandingRequest(LANDING_ID, "r", 1, "", 0, (), len(PROMPT), 1, None))
    (refusal,) = replica.peers.to_writer
    assert isinstance(refusal, LandingRefusal)
    assert refusal.reason == "it leaves"
