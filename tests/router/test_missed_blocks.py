"""Why blocks of a prompt were computed, and what a cache without a limit would have had."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples

from kvtransfer.common.clock import ManualClock
from kvtransfer.kv_events import BlocksRemoved, BlocksStored, KvEvents, KvSnapshot
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.request_facts import RequestFacts
from router.block_history import BlockHistory, RemovalCause
from router.config import RouterConfig
from router.departed_replica import DepartedReplica
from router.messages import BlockPlace, Decision, MissedBlocks, RouteRequest
from router.missed_blocks import MAX_RUNS, find_misses
from router.service import RouterService

BLOCK_TOKENS = 16
KEYS = tuple(f"k{index}".encode() for index in range(10))


class Cluster:
    """A router with a history, and replicas that report what a test wants."""

    def __init__(self, *replicas: str) -> None:
        self.clock = ManualClock(100.0)
        self.history = BlockHistory(1 << 10)
        self.router = RouterService(RouterConfig(), BLOCK_TOKENS, self.clock, 7, history=self.history)
        self.sequences: dict[str, int] = {}
        for replica in replicas:
            self.join(replica)

    def join(self, replica: str) -> None:
        self.router.add_replica(ReplicaIdentity(replica, 1), "both")
        self.router.tree.apply_snapshot(KvSnapshot(ReplicaIdentity(replica, 1), 0, ()))
        self.sequences[replica] = 0

    def report(
        self, replica: str, *, stored: tuple[BlocksStored, ...] = (), removed: tuple[BlocksRemoved, ...] = ()
    ) -> None:
        self.sequences[replica] += 1
        events = KvEvents(ReplicaIdentity(replica, 1), self.sequences[replica], stored, removed)
        assert self.router.tree.apply_events(events)

    def store(self, replica: str, *keys: bytes) -> None:
        self.report(replica, stored=(BlocksStored(b"", keys),))

    def place(self, *, at: str, num_tokens: int = 10 * BLOCK_TOKENS + 1) -> Decision:
        """Place a prompt of all keys at a replica, as a request that is submitted is."""
        request = RouteRequest("r", RequestFacts(), KEYS, num_tokens, 8, pinned_prefill=at, pinned_decode=at)
        decision = self.router.route(request)
        assert decision.compute_id == at
        return self.router.with_misses(decision, KEYS, num_tokens)


def test_a_block_of_each_fate() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.store("a", *KEYS[:8])
    cluster.store("b", *KEYS[:5])
    cluster.clock.advance(10.0)
    cluster.report("a", removed=(BlocksRemoved(KEYS[6:8], reason="space"),))
    cluster.clock.advance(5.0)
    cluster.report("a", removed=(BlocksRemoved(KEYS[5:6], reason="space"),))
    cluster.clock.advance(1.0)
    cluster.report("a", removed=(BlocksRemoved(KEYS[3:5], reason="purged"),))
    decision = cluster.place(at="a")
    assert decision.prefill_cached_tokens == 3 * BLOCK_TOKENS
    assert decision.missed == (
        MissedBlocks(3, 2, "elsewhere", (BlockPlace("b", "device"),)),
        MissedBlocks(5, 3, "removed", (BlockPlace("a", "device"),), "space", 1.0, 6.0),
        MissedBlocks(8, 2, "new"),
    )
    assert decision.achievable_tokens == 8 * BLOCK_TOKENS


def test_what_the_store_lost_and_what_left_with_a_replica() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.report("b", stored=(BlocksStored(b"", KEYS[:4], "dram"), BlocksStored(b"", KEYS[4:6])))
    cluster.report("b", removed=(BlocksRemoved(KEYS[:2], "store"),))
    cluster.router.remove_replica("b")
    decision = cluster.place(at="a")
    assert decision.missed == (
        MissedBlocks(0, 2, "removed", (BlockPlace("b", "store"),)),
        MissedBlocks(2, 2, "removed", (BlockPlace("b", "store"),), "left"),
        MissedBlocks(4, 2, "removed", (BlockPlace("b", "device"),), "left"),
        MissedBlocks(6, 4, "new"),
    )


def test_blocks_that_left_have_one_fate_before_and_after_they_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget = DepartedReplica.forget
    monkeypatch.setattr(DepartedReplica, "forget", lambda it, most, *to: forget(it, min(most, 1), *to))
    cluster = Cluster("a", "b", "c")
    cluster.report("b", stored=(BlocksStored(b"", KEYS[:4], "dram"), BlocksStored(b"", KEYS[4:8])))
    cluster.router.remove_replica("b")
    cluster.join("b")
    cluster.store("b", *KEYS[7:8])
    tree = cluster.router.tree
    num_uses = 0
    while tree._departed:
        found = find_misses(tree, cluster.history, "a", KEYS, 0, cluster.clock.now())
        assert found.num_achievable == 8
        assert found.runs == (
            MissedBlocks(0, 4, "removed", (BlockPlace("b", "store"),), "left"),
            MissedBlocks(4, 3, "removed", (BlockPlace("b", "device"),), "left"),
            MissedBlocks(7, 1, "elsewhere", (BlockPlace("b", "device"),)),
            MissedBlocks(8, 2, "new"),
        )
        tree.match(())
        num_uses += 1
    assert num_uses > 4


def test_what_another_request_computes_is_expected_and_the_own_prompt_is_not() -> None:
    cluster = Cluster("a", "b")
    other = RouteRequest("other", RequestFacts(), KEYS[:6], 100, 8, pinned_prefill="b", pinned_decode="b")
    cluster.router.route(other)
    decision = cluster.place(at="a")
    assert decision.missed == (
        MissedBlocks(0, 6, "expected", (BlockPlace("b", "device", True),)),
        MissedBlocks(6, 4, "new"),
    )


def test_blocks_behind_a_gap_are_there_but_unusable() -> None:
    cluster = Cluster("a")
    cluster.store("a", *KEYS[2:4])
    decision = cluster.place(at="a")
    assert [(it.first, it.num_blocks, it.fate) for it in decision.missed] == [
        (0, 2, "new"),
        (2, 2, "unusable"),
        (4, 6, "new"),
    ]


def test_the_last_token_is_always_computed() -> None:
    """So a block that ends with it could never be reused, and is not missed."""
    cluster = Cluster("a", "b")
    cluster.store("a", *KEYS)
    decision = cluster.place(at="a", num_tokens=10 * BLOCK_TOKENS)
    assert decision.missed == ()
    assert decision.achievable_tokens == decision.prefill_cached_tokens == 10 * BLOCK_TOKENS - 1


def test_a_snapshot_counts_as_seen_and_what_it_lacks_as_removed() -> None:
    cluster = Cluster("a", "b")
    cluster.store("b", *KEYS[:3])
    snapshot = KvSnapshot(ReplicaIdentity("b", 1), 9, (BlocksStored(b"", KEYS[:2]),))
    assert cluster.router.tree.apply_snapshot(snapshot)
    decision = cluster.place(at="a")
    assert [(it.fate, it.num_blocks) for it in decision.missed] == [
        ("elsewhere", 2),
        ("removed", 1),
        ("new", 7),
    ]


def test_without_a_history_a_decision_stays_as_it_is() -> None:
    router = RouterService(RouterConfig(), BLOCK_TOKENS, ManualClock(), 7)
    router.add_replica(ReplicaIdentity("a", 1), "both")
    decision = router.route(RouteRequest("r", RequestFacts(), KEYS, 161, 8))
    assert router.with_misses(decision, KEYS, 161) is decision


def test_many_fates_end_in_few_runs() -> None:
    cluster = Cluster("a", "b", "c")
    keys = tuple(f"x{index}".encode() for index in range(200))
    cluster.store("b", *keys[::2])
    cluster.store("c", *keys[1::2])
    decision = cluster.router.route(
        RouteRequest("r", RequestFacts(), keys, 3201, 8, pinned_prefill="a", pinned_decode="a")
    )
    missed = cluster.router.with_misses(decision, keys, 3201).missed
    assert len(missed) == MAX_RUNS
    assert sum(it.num_blocks for it in missed) == 200


# ------------------------------------------------------------------------------------------ the history


def test_a_departure_that_is_noted_late_does_not_hide_a_later_removal() -> None:
    history = BlockHistory(64)
    history.removed("b", [b"k"], "device", "space", 7.0)
    history.removed("a", [b"k", b"l"], "device", "left", 5.0)
    assert history.last_removal(b"k") == (RemovalCause("b", "device", "space"), 7.0)
    assert history.last_removal(b"l") == (RemovalCause("a", "device", "left"), 5.0)


def test_the_latest_removal_counts_and_a_block_that_came_back_keeps_it() -> None:
    history = BlockHistory(64)
    history.removed("a", [b"k"], "device", "space", 5.0)
    history.removed("b", [b"k"], "store", "", 7.0)
    history.stored([BlocksStored(b"", (b"k", b"l"))])
    assert history.last_removal(b"k") == (RemovalCause("b", "store", ""), 7.0)
    assert history.last_removal(b"l") is None
    assert history.was_seen(b"l")
    assert not history.was_seen(b"m")


def test_causes_run_out_and_are_numbered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.block_history._MAX_CAUSES", 3)
    # Large, as the hashes of the keys differ by process: no bucket gets more of them than it has slots.
    history = BlockHistory(1 << 16)
    for number in range(6):
        history.removed(f"p{number}", [b"%d" % number], "device", "space", float(number))
    found = [history.last_removal(b"%d" % number) for number in range(6)]
    names = [each and each.cause.replica_id for each in found]
    assert names == [None, None, None, "p3", "p4", "p5"]
    assert all(history.was_seen(b"%d" % number) for number in range(6))


def test_a_bucket_forgets_only_when_it_is_full() -> None:
    history = BlockHistory(4)
    keys = [b"%d" % number for number in range(5)]
    history.stored([BlocksStored(b"", tuple(keys[:4]))])
    assert [history.was_seen(key) for key in keys] == [True] * 4 + [False]
    history.stored([BlocksStored(b"", (keys[4],))])
    assert history.was_seen(keys[4])
    assert sum(map(history.was_seen, keys)) == 4


@given(st.lists(st.tuples(st.integers(0, 400), st.booleans()), max_size=300))
@settings(max_examples=examples(250))
def test_the_history_says_nothing_wrong(changes: list[tuple[int, bool]]) -> None:
    """It may forget, and remembers the very last changes."""
    history = BlockHistory(256)
    removals: dict[int, float] = {}
    for at, (number, is_removed) in enumerate(changes):
        key = number.to_bytes(8, "little")
        if is_removed:
            removals[number] = float(at)
            history.removed(f"p{number}", [key], "device", "space", float(at))
        else:
            history.stored([BlocksStored(b"", (key,))])
        assert history.was_seen(key)
        if is_removed:
            assert history.last_removal(key) == (RemovalCause(f"p{number}", "device", "space"), float(at))
    seen = {number for number, _ in changes}
    for number in range(401):
        key = number.to_bytes(8, "little")
        assert number in seen or not history.was_seen(key)
        found = history.last_removal(key)
        assert found is None or found.at == removals[number]
