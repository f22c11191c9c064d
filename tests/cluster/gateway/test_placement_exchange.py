"""Gateways that exchange their placements: every view equals a naive model, nothing stays when all has ended,
and what a wrong gateway sends is bounded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples

from cluster.gateway.fleet import peer_placements, placement_feed
from cluster.gateway.fleet.messages import (
    MAX_COUNT,
    MAX_KEYS,
    MAX_PLACEMENT_FRAME_BYTES,
    PLACEMENT_CODEC,
    Change,
    Finished,
    Placed,
    PlacementDelta,
    PlacementSnapshot,
    PlacementsRefused,
    Prefilled,
)
from cluster.gateway.fleet.peer_placements import PeerPlacements
from cluster.gateway.fleet.placement_feed import PlacementFeed
from kvtransfer.common.clock import ManualClock
from kvtransfer.errors import WireError
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.request_facts import RequestFacts
from router.config import RouterConfig
from router.messages import ReplicaLoad, RouteRequest
from router.service import RouterService
from router.tracked_replica import REPORT_LAG_S

REPLICAS = ("r0", "r1", "r2")
PROMPT_TOKENS = 1000


def report(replica_id: str, now: float, backlog_tokens: int = 0) -> ReplicaLoad:
    return ReplicaLoad(
        identity=ReplicaIdentity(replica_id, 1),
        received_at=now,
        num_running=0,
        num_waiting=0,
        num_landings=0,
        num_backlog_tokens=backlog_tokens,
        num_free_blocks=1000,
        num_total_blocks=1000,
        prefill_tok_s=10_000.0,
        decode_step_s=0.01,
        transfer_tok_s=0.0,
    )


class Member:
    """A gateway's router and feed, and what it hears of the others; frames arrive when `Group` lets them."""

    def __init__(self, name: str, names: Sequence[str], clock: ManualClock) -> None:
        self.name = name
        self.clock = clock
        self.feed = PlacementFeed(clock)
        self.router = RouterService(RouterConfig(), 64, clock, 1, salt=name, observer=self.feed)
        for replica_id in REPLICAS:
            self.router.add_replica(ReplicaIdentity(replica_id, 1), "both")
            self.router.loads.on_load(report(replica_id, clock.now()))
        self.peers = {it: PeerPlacements(it, self.router, clock) for it in names if it != name}

    def backlogs(self) -> dict[str, float]:
        """What a decision would count at each replica."""
        return {replica_id: self.router.loads.state(replica_id).backlog_tokens for replica_id in REPLICAS}


class Group:
    """Some gateways; by (follower, source): the frames on their way, None where the exchange is cut."""

    def __init__(self, num_gateways: int) -> None:
        self.clock = ManualClock(100.0)
        names = [f"g{index}" for index in range(num_gateways)]
        self.members = {name: Member(name, names, self.clock) for name in names}
        self.ways: dict[tuple[str, str], list[bytes] | None] = {
            (to, source): None for to in names for source in names if to != source
        }
        for pair in self.ways:
            self.connect(pair)

    def connect(self, pair: tuple[str, str]) -> None:
        if self.ways[pair] is None:
            source = self.members[pair[1]]
            self.flush(pair[1])
            self.ways[pair] = source.feed.snapshot(source.router.own_placements())

    def cut(self, pair: tuple[str, str]) -> None:
        self.ways[pair] = None
        self.members[pair[0]].peers[pair[1]].close()
        if all(way is None for (_, source), way in self.ways.items() if source == pair[1]):
            self.members[pair[1]].feed.stop()

    def flush(self, name: str) -> None:
        frames = self.members[name].feed.take()
        for (_, source), way in self.ways.items():
            if source == name and way is not None:
                way += frames

    def deliver(self, pair: tuple[str, str], num_frames: int) -> None:
        if (way := self.ways[pair]) is not None:
            for frame in way[:num_frames]:
                self.members[pair[0]].peers[pair[1]].on_frame(frame)
            del way[:num_frames]

    def settle(self) -> None:
        for pair in self.ways:
            self.connect(pair)
        for name in self.members:
            self.flush(name)
        for pair in self.ways:
            self.deliver(pair, 1 << 30)

    def check(self) -> None:
        for member in self.members.values():
            member.router.check()


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_every_view_equals_the_model_and_nothing_is_left(data: st.DataObject) -> None:
    """Any interleaving of placements, queued and sent, first tokens, ends, frames, cuts and reconnections."""
    group = Group(data.draw(st.integers(2, 4)))
    names = sorted(group.members)
    # By (gateway, request): the replica, and whether it waits in the gateway, is sent or has a token.
    model: dict[tuple[str, str], tuple[str, str]] = {}
    for number in range(data.draw(st.integers(0, 40))):
        action = data.draw(
            st.sampled_from(
                ["place"] * 4 + ["submit", "prefill", "finish", "flush", "deliver", "cut", "connect"]
            )
        )
        name = data.draw(st.sampled_from(names))
        pair = data.draw(st.sampled_from(sorted(group.ways)))
        own = sorted(it for it in model if it[0] == name)
        member = group.members[name]
        if action == "place":
            # Sometimes another attempt of a request that runs.
            is_retry = bool(own) and data.draw(st.booleans())
            request_id = data.draw(st.sampled_from(own))[1] if is_retry else f"q{number}"
            request, is_queued = (
                RouteRequest(request_id, RequestFacts("t"), (), PROMPT_TOKENS, 1),
                data.draw(st.booleans()),
            )
            decision = member.router.decide(request)
            member.router.place(request, decision, is_queued=is_queued)
            model[name, request_id] = (decision.compute_id, "queued" if is_queued else "sent")
        elif action == "submit" and own:
            key = data.draw(st.sampled_from(own))
            member.router.on_submitted(key[1])
            if model[key][1] == "queued":
                model[key] = (model[key][0], "sent")
        elif action == "prefill" and (sent := [it for it in own if model[it][1] != "queued"]):
            key = data.draw(st.sampled_from(sent))
            member.router.on_prefilled(key[1])
            model[key] = (model[key][0], "prefilled")
        elif action == "finish" and own:
            key = data.draw(st.sampled_from(own))
            member.router.on_finished(key[1])
            del model[key]
        elif action == "flush":
            group.flush(name)
        elif action == "deliver":
            group.deliver(pair, data.draw(st.integers(1, 3)))
        elif action == "cut":
            group.cut(pair)
        elif action == "connect":
            group.connect(pair)
        group.check()
    group.settle()
    expected, expected_queued = dict.fromkeys(REPLICAS, 0), dict.fromkeys(REPLICAS, 0)
    for replica_id, state in model.values():
        expected[replica_id] += 0 if state == "prefilled" else PROMPT_TOKENS
        expected_queued[replica_id] += PROMPT_TOKENS if state == "queued" else 0
    for member in group.members.values():
        assert member.router.num_placements == len(model)
        assert member.backlogs() == expected
        queued = {it: member.router.loads.state(it).num_queued_tokens for it in REPLICAS}
        assert queued == expected_queued
    for name, request_id in model:
        group.members[name].router.on_finished(request_id)
    group.settle()
    for member in group.members.values():
        assert member.router.num_placements == 0
        assert set(member.backlogs().values()) == {0}
        assert all(peer.num_placements == 0 for peer in member.peers.values())
    group.check()


def test_what_another_gateway_holds_takes_no_capacity_and_is_waited_for() -> None:
    group = Group(2)
    holder, other = group.members["g0"].router, group.members["g1"].router
    tokens = 100 * PROMPT_TOKENS  # more than the steps that any replica is sent ahead
    request = RouteRequest("q", RequestFacts("t"), (), tokens, 1)
    decision = holder.decide(request)
    replica_id = decision.compute_id
    holder.place(request, decision, is_queued=True)
    group.settle()
    assert other.members.takes_more(replica_id)
    assert other.loads.state(replica_id).submitted_wait_s(0) == pytest.approx(10.0), (
        "at 10,000 tokens a second"
    )
    group.clock.advance(1.0)
    other.loads.on_load(report(replica_id, group.clock.now()))  # which cannot show it
    assert other.loads.state(replica_id).num_queued_tokens == tokens
    holder.on_submitted("q")
    group.settle()
    assert not other.members.takes_more(replica_id)
    assert other.loads.state(replica_id).num_queued_tokens == 0
    group.clock.advance(1.0)
    other.loads.on_load(report(replica_id, group.clock.now()))
    assert other.members.takes_more(replica_id), "the report shows it"
    holder.on_finished("q")
    group.settle()
    assert other.num_placements == 0


def test_that_a_held_request_was_sent_is_announced_even_when_no_other_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement_feed, "MAX_PLACEMENTS", 3)
    group = Group(2)
    group.settle()
    holder, other = group.members["g0"].router, group.members["g1"].router
    for number in range(4):
        request = RouteRequest(f"q{number}", RequestFacts("t"), (), PROMPT_TOKENS, 1)
        holder.place(request, holder.decide(request), is_queued=True)
    group.settle()
    assert other.num_placements == 3, "one is beyond the bound"
    holder.on_submitted("q0")
    group.settle()
    assert sum(other.loads.state(it).num_queued_tokens for it in REPLICAS) == 2 * PROMPT_TOKENS
    group.members["g1"].peers["g0"].close()
    assert other.num_placements == 0
    assert sum(other.loads.state(it).num_queued_tokens for it in REPLICAS) == 0


def test_a_cut_takes_its_placements_along_and_a_reconnection_brings_them_back() -> None:
    group = Group(2)
    group.settle()
    chosen = (
        group.members["g1"].router.route(RouteRequest("q", RequestFacts("t"), (), PROMPT_TOKENS, 1)).decode
    )
    group.settle()
    assert group.members["g0"].backlogs()[chosen] == PROMPT_TOKENS
    group.cut(("g0", "g1"))
    assert group.members["g0"].backlogs()[chosen] == 0
    assert not group.members["g0"].peers["g1"].is_current
    group.settle()
    assert group.members["g0"].backlogs()[chosen] == PROMPT_TOKENS


@pytest.mark.parametrize(
    ("reported_after_s", "is_shown"), [(REPORT_LAG_S * 2, True), (REPORT_LAG_S / 2, False)]
)
def test_news_of_what_a_report_shows_is_not_counted_again(reported_after_s: float, is_shown: bool) -> None:
    """The report arrives after the placement was made, and before the placement is heard of."""
    group = Group(2)
    group.settle()
    chosen = (
        group.members["g1"].router.route(RouteRequest("q", RequestFacts("t"), (), PROMPT_TOKENS, 1)).decode
    )
    group.clock.advance(reported_after_s)
    follower = group.members["g0"]
    follower.router.loads.on_load(report(chosen, group.clock.now(), PROMPT_TOKENS))
    group.clock.advance(0.05)
    group.settle()
    assert follower.backlogs()[chosen] == PROMPT_TOKENS * (1 if is_shown else 2)
    follower.router.loads.on_load(report(chosen, group.clock.now(), PROMPT_TOKENS))
    assert follower.backlogs()[chosen] == PROMPT_TOKENS


def test_a_replica_that_joins_after_the_snapshot_has_its_placements() -> None:
    group = Group(2)
    chosen = (
        group.members["g1"].router.route(RouteRequest("q", RequestFacts("t"), (), PROMPT_TOKENS, 1)).decode
    )
    follower = group.members["g0"]
    follower.router.remove_replica(chosen)
    group.settle()
    follower.router.add_replica(ReplicaIdentity(chosen, 1), "both")
    assert follower.backlogs()[chosen] == PROMPT_TOKENS


def test_gateways_with_equal_views_choose_different_replicas() -> None:
    chosen = set()
    for number in range(5):
        router = Group(1).members["g0"].router
        router.set_shared(True)
        request = RouteRequest(f"q{number}", RequestFacts("t"), (), PROMPT_TOKENS, 1)
        chosen.add(router.route(request).decode)
    assert len(chosen) > 1


# ------------------------------------------------------------------------------------------ wrong gateways


def placed(**changed: object) -> Placed:
    fields: dict[str, object] = {
        "request_id": "q",
        "compute_id": "r0",
        "decode_id": "",
        "num_prefill_tokens": 10,
        "num_new_blocks": 1,
        "num_sequences": 1,
        "age_s": 0.0,
        "prefilled_age_s": None,
        "block_keys": (),
        "is_held": False,
    }
    return Placed(**(fields | changed))  # type: ignore[arg-type]


WRONG: list[Change] = [
    placed(request_id="q" * 257),
    placed(compute_id="r" * 257),
    placed(num_prefill_tokens=-1),
    placed(num_prefill_tokens=MAX_COUNT + 1),
    placed(num_new_blocks=-1),
    placed(num_sequences=MAX_COUNT + 1),
    placed(age_s=-1.0),
    placed(age_s=float("nan")),
    placed(prefilled_age_s=float("inf")),
    placed(block_keys=(b"k" * 65,)),
    placed(block_keys=(b"k",) * (MAX_KEYS + 1)),
    Prefilled("q", float("nan")),
    Prefilled("q", -0.1),
    Finished("q" * 257),
]


@pytest.mark.parametrize("change", WRONG, ids=range(len(WRONG)))
def test_wrong_numbers_end_the_stream_and_change_nothing(change: Change) -> None:
    group = Group(2)
    group.settle()
    follower = group.members["g0"]
    with pytest.raises(WireError):
        follower.peers["g1"].on_frame(
            PLACEMENT_CODEC.encode(PlacementDelta((placed(request_id="ok"), change)))
        )
    assert follower.router.num_placements == 0


def test_unknown_replicas_and_requests_are_ignored() -> None:
    group = Group(2)
    group.settle()
    follower = group.members["g0"]
    changes = (placed(compute_id="nobody", decode_id="neither"), Prefilled("q", 0.0), Prefilled("other", 1.0))
    follower.peers["g1"].on_frame(PLACEMENT_CODEC.encode(PlacementDelta((*changes, Finished("third")))))
    assert set(follower.backlogs().values()) == {0}
    follower.peers["g1"].close()
    assert follower.router.num_placements == 0


def test_the_order_of_frames_their_size_and_a_refusal() -> None:
    group = Group(2)
    peer = group.members["g0"].peers["g1"]
    with pytest.raises(WireError, match="before the snapshot"):
        peer.on_frame(PLACEMENT_CODEC.encode(PlacementDelta(())))
    with pytest.raises(WireError, match="bytes"):
        peer.on_frame(bytes(MAX_PLACEMENT_FRAME_BYTES + 1))
    with pytest.raises(WireError, match="not me"):
        peer.on_frame(PLACEMENT_CODEC.encode(PlacementsRefused("not me")))
    peer.on_frame(PLACEMENT_CODEC.encode(PlacementSnapshot((), is_last=True)))
    with pytest.raises(WireError, match="snapshot among changes"):
        peer.on_frame(PLACEMENT_CODEC.encode(PlacementSnapshot((), is_last=True)))


def test_the_placements_of_one_gateway_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender does not announce more, and the receiver does not take more."""
    for module in (placement_feed, peer_placements):
        monkeypatch.setattr(module, "MAX_PLACEMENTS", 3)
    group = Group(2)
    group.settle()
    sender, follower = group.members["g1"], group.members["g0"]
    for number in range(5):
        sender.router.route(RouteRequest(f"q{number}", RequestFacts("t"), (), PROMPT_TOKENS, 1))
    group.settle()
    assert follower.router.num_placements == 3
    with pytest.raises(WireError, match="more than 3"):
        follower.peers["g1"].on_frame(PLACEMENT_CODEC.encode(PlacementDelta((placed(request_id="x"),))))
    for number in range(5):
        sender.router.on_finished(f"q{number}")
    follower.peers["g1"].close()
    assert follower.router.num_placements == 0


def test_a_long_snapshot_comes_in_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_feed, "_FULL_FRAME_BYTES", 500)
    group = Group(2)
    group.cut(("g0", "g1"))
    sender, follower = group.members["g1"], group.members["g0"]
    for number in range(20):
        sender.router.route(RouteRequest(f"q{number}", RequestFacts("t"), (), PROMPT_TOKENS, 1))
    group.connect(("g0", "g1"))
    way = group.ways["g0", "g1"]
    assert way is not None
    assert len(way) > 2
    group.deliver(("g0", "g1"), 1)
    assert not follower.peers["g1"].is_current
    group.settle()
    assert follower.peers["g1"].is_current
    assert follower.backlogs() == sender.backlogs()
