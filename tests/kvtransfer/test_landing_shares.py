"""Landings of groups with a share of the device: one at its share waits in order, and holds up nobody."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from landing_world import BLOCK, PREFILL, SHARD, request
from slow_cases import examples

from kvtransfer.common.group_shares import GroupShares, ShareClaim
from kvtransfer.config import TransferConfig
from kvtransfer.peer_messages import LandingAbort, LandingGrant, LandingRefusal
from kvtransfer.protocol.actions import LandingAction, ToWriter
from kvtransfer.protocol.receiver import LandingTable
from workers.scheduler.block_pool import BlockPool

NUM_BLOCKS = 40
A_HAS = GroupShares(1.0, {"a": 0.3})
LIMIT = 12
RESERVE = 4  # a tenth of the pool
QUEUE = 10


class Replica:
    """A decode replica; a landing that is granted joins at once, and runs until the test ends it."""

    def __init__(self, shares: GroupShares = A_HAS) -> None:
        self.pool = BlockPool(NUM_BLOCKS, BLOCK, shares)
        self.landings = LandingTable(TransferConfig(landing_queue=QUEUE), self.pool, BLOCK, 1)
        self.landings.writer_joined(PREFILL, [[(0, SHARD)]])
        self.running: dict[str, list[int]] = {}
        self.refused: dict[str, str] = {}
        self.ended: set[str] = set()
        self.now = 0.0
        self._names: dict[bytes, str] = {}
        self._num_asked = 0

    def ask(
        self,
        group: str,
        num_blocks: int,
        num_samples: int = 1,
        deadline_s: float | None = None,
        level: int = 0,
    ) -> str:
        self._num_asked += 1
        name = f"{group}{self._num_asked}"
        wanted = request(
            0,
            num_blocks * BLOCK,
            landing_id=self._num_asked.to_bytes(16, "big"),
            request_id=name,
            sharing_group=group,
            num_samples=num_samples,
            deadline_s=deadline_s,
            priority=level,
        )
        self._names[wanted.landing_id] = name
        self._do(self.landings.request(PREFILL, wanted, self.now, idle=not self.running))
        return name

    def end(self, name: str) -> None:
        self.pool.release(self.running.pop(name))
        self.ended.add(name)
        self.grant()

    def grant(self) -> None:
        self._do(self.landings.grant(self.now, idle=not self.running))
        self.landings.check()
        self.pool.check()

    def is_waiting(self, name: str) -> bool:
        return name not in self.running and name not in self.refused and name not in self.ended

    def _do(self, actions: Sequence[LandingAction]) -> None:
        for action in actions:
            if not isinstance(action, ToWriter):
                continue
            match action.message:
                case LandingGrant(landing_id, _, block_ids):
                    name = self._names[landing_id]
                    self.running[name] = list(block_ids)
                    num_tokens = len(block_ids) * BLOCK
                    self.landings.hand_over(PREFILL, landing_id, (name, 0), num_tokens, self.now)
                case LandingRefusal(landing_id, reason) | LandingAbort(landing_id, reason):
                    self.refused[self._names[landing_id]] = reason


def test_a_group_waits_in_order_for_its_share_and_alone() -> None:
    replica = Replica()
    names = [replica.ask("a", count) for count in (8, 6, 1)]
    assert list(replica.running) == names[:1], "the third would fit, but is behind the second"
    other = replica.ask("b", 20)
    assert other in replica.running
    replica.end(names[0])
    assert set(replica.running) == {*names[1:], other}


def test_what_exceeds_the_share_is_refused_at_once() -> None:
    replica = Replica()
    for count in (LIMIT, LIMIT + 1):
        reason = replica.refused[replica.ask("a", count)]
        assert "12 are the share of sharing group 'a' (device_kv_share)" in reason
    assert replica.ask("b", LIMIT + 1) in replica.running


def test_a_group_fills_its_share_of_the_queue_alone() -> None:
    replica = Replica()
    names = [replica.ask("a", 9) for _ in range(6)]
    assert [replica.is_waiting(name) for name in names] == [False, True, True, True, False, False]
    assert replica.refused[names[-1]] == "the landing queue of 'a' is full"
    assert replica.ask("b", 9) in replica.running


def test_a_landing_defers_to_what_its_group_has_waiting_for_longer() -> None:
    replica = Replica()
    replica.now = 5.0
    replica.pool.claim("sequences", {"a": ShareClaim(1.0, 6)})
    name = replica.ask("a", 8)
    assert replica.is_waiting(name)
    assert replica.pool.num_claimed("landings", "a", 6.0) == 8
    assert replica.pool.num_claimed("landings", "a", 5.0) == 0
    replica.pool.claim("sequences", {"a": ShareClaim(6.0, 6), "b": ShareClaim(1.0, 6)})
    replica.grant()
    assert name in replica.running
    assert not replica.landings.has_claims
    assert replica.pool.num_claimed("landings", "a", 6.0) == 0


def test_a_deadline_is_not_missed_for_the_wait_of_another_group() -> None:
    replica = Replica()
    for _ in range(3):
        last = replica.ask("a", 9)
    for _ in range(2):
        replica.now += 30
        replica.end(next(iter(replica.running)))
    assert last in replica.running
    waiting = replica.ask("a", 9)
    assert "would miss the deadline" in replica.refused[replica.ask("a", 9, deadline_s=5.0)]
    assert replica.ask("b", 9, deadline_s=5.0) in replica.running
    assert replica.is_waiting(waiting)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("a"), st.integers(1, LIMIT - 1), st.integers(1, 3), st.sampled_from([0, 0, 9])),
        st.tuples(st.just("b"), st.integers(1, 9), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 9), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=examples(300), deadline=None)
@given(events=EVENTS)
def test_others_are_granted_as_if_the_group_had_a_pool_of_its_own(
    events: list[tuple[str, int, int, int]],
) -> None:
    """Compared with a count by hand: what `b` finds free is at least what is not the share of `a`."""
    replica = Replica()
    names: list[str] = []
    for kind, size, num_samples, level in events:
        replica.now += 1
        if kind == "end":
            if replica.running:
                replica.end(sorted(replica.running)[size % len(replica.running)])
            continue
        num_of_b = sum(len(blocks) for name, blocks in replica.running.items() if name.startswith("b"))
        others_wait = any(name.startswith("b") and replica.is_waiting(name) for name in names)
        name = replica.ask(kind, size, num_samples, level=level)
        names.append(name)
        replica.grant()
        num_of_a = sum(len(blocks) for name, blocks in replica.running.items() if name.startswith("a"))
        assert num_of_a <= LIMIT
        if kind == "b" and not others_wait:
            assert (
                size + max(RESERVE, num_samples) > NUM_BLOCKS - LIMIT - num_of_b
            ) or name in replica.running
    while replica.running:
        replica.end(min(replica.running))
    assert not any(map(replica.is_waiting, names)), "somebody waits for ever"
    assert replica.pool.num_free == NUM_BLOCKS
