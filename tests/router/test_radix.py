"""The prefix tree against a naive model, over random streams of events, gaps, snapshots and leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, get_args
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from optional_programs import needs_compiler
from slow_cases import examples

from kvtransfer.common.clock import ManualClock
from kvtransfer.kv_events import BlocksRemoved, BlocksStored, KvEvents, KvSnapshot
from kvtransfer.messages import ReplicaIdentity
from router import radix
from router.block_history import BlockHistory
from router.block_holder import PrefixPrediction
from router.departed_replica import DepartedReplica
from router.holder_masks import HolderMasks
from router.native import RouterKernel, load_kernel
from router.prefix_match import InStore, Match
from router.radix import SNAPSHOT_WAIT_S, Expectation, PrefixTree

Tier = Literal["device", "dram", "nvme"]
TTL_S = 5.0
REPLICAS = ("p0", "p1", "p2")
kernels = pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=needs_compiler)], ids=["python", "compiled"]
)


def both(match: Match) -> tuple[dict[str, int], dict[str, InStore]]:
    return match.device, match.stored


def key_of(path: tuple[int, ...]) -> bytes:
    return repr(path).encode()


def keys_of(path: tuple[int, ...]) -> tuple[bytes, ...]:
    return tuple(key_of(path[: depth + 1]) for depth in range(len(path)))


paths = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
tiers = st.sampled_from(("device", "device", "dram", "nvme"))
chains = st.tuples(paths, tiers)
forget = DepartedReplica.forget
ALL_PATHS = [tuple(map(int, f"{number:b}"[1:])) for number in range(16, 32)]


@dataclass
class ReplicaModel:
    """The naive model of one epoch of a replica: plain sets, scanned in full."""

    epoch: int
    sequence: int = -1
    in_step: bool = False
    asked_at: float | None = None
    held: set[bytes] = field(default_factory=set)
    stored: dict[bytes, str] = field(default_factory=dict)
    predicted_until: dict[bytes, float] = field(default_factory=dict)
    # The one prediction of a key; None: there is more than one.
    sole: dict[bytes, PrefixPrediction | None] = field(default_factory=dict)
    expected: list[tuple[bytes, ...]] = field(default_factory=list)


def forget_one(
    departed: DepartedReplica, most: int, masks: HolderMasks, history: BlockHistory | None
) -> bool:
    return forget(departed, min(most, 1), masks, history)


def kernel_of(is_compiled: bool) -> RouterKernel | None:
    kernel = load_kernel() if is_compiled else None
    assert (kernel is not None) == is_compiled
    return kernel


class TreeAgainstModel(RuleBasedStateMachine):
    """Replicas that leave are forgotten a block at a time, so that others come and go meanwhile."""

    is_compiled = False

    def __init__(self) -> None:
        super().__init__()
        self.forgetting = mock.patch.object(DepartedReplica, "forget", forget_one)
        self.forgetting.start()
        # What was expected, also of replicas that are gone, with the model of that epoch.
        self.expectations: list[tuple[Expectation, ReplicaModel]] = []
        # What was predicted, likewise.
        self.predictions: list[tuple[PrefixPrediction, ReplicaModel]] = []
        self.clock = ManualClock()
        self.tree = PrefixTree(self.clock, TTL_S, kernel_of(self.is_compiled))
        self.models: dict[str, ReplicaModel] = {}

    @rule(replica=st.sampled_from(REPLICAS), epoch=st.integers(1, 3), with_snapshot=st.booleans())
    def join(self, replica: str, epoch: int, with_snapshot: bool) -> None:
        self.tree.add_replica(ReplicaIdentity(replica, epoch))
        if replica not in self.models or self.models[replica].epoch != epoch:
            self.models[replica] = ReplicaModel(epoch)
        if with_snapshot:
            self.snapshot(replica, 0, 1, [((0, 1), "device"), ((0, 1, 0), "nvme")])

    def teardown(self) -> None:
        """Forget all that is left of replicas."""
        while self.tree._departed:
            self.tree.match(())
        self.nothing_leaks()
        self.forgetting.stop()

    @rule(replica=st.sampled_from(REPLICAS))
    def leave(self, replica: str) -> None:
        self.tree.remove_replica(replica)
        self.models.pop(replica, None)

    @rule(
        replica=st.sampled_from(REPLICAS),
        wrong_epoch=st.sampled_from([0, 0, 0, 0, 1]),
        step=st.sampled_from([1, 1, 1, 1, 1, 0, -1, 2]),
        stored=st.lists(chains, max_size=3),
        removed=st.lists(st.tuples(paths, st.sampled_from(("device", "store"))), max_size=2),
    )
    def events(
        self,
        replica: str,
        wrong_epoch: int,
        step: int,
        stored: list[tuple[tuple[int, ...], Tier]],
        removed: list[tuple[tuple[int, ...], Literal["device", "store"]]],
    ) -> None:
        model = self.models.get(replica)
        sequence = (model.sequence if model else 0) + step
        epoch = (model.epoch if model else 1) + wrong_epoch
        known = self.tree.apply_events(
            KvEvents(
                ReplicaIdentity(replica, epoch),
                sequence,
                tuple(BlocksStored(b"unknown", keys_of(path), tier) for path, tier in stored),
                tuple(BlocksRemoved((key_of(path),), where) for path, where in removed),
            )
        )
        if model is None or wrong_epoch:
            assert not known
        elif model.in_step and step <= 0:
            assert known
        elif model.in_step and step == 1:
            assert known
            model.sequence = sequence
            model.held -= {key_of(path) for path, where in removed if where == "device"}
            for path, where in removed:
                if where == "store":
                    model.stored.pop(key_of(path), None)
            self._take(model, stored)
        else:
            model.in_step = False
            asked = model.asked_at is not None and self.clock.now() - model.asked_at < SNAPSHOT_WAIT_S
            assert known == asked
            if not asked:
                model.asked_at = self.clock.now()

    @rule(
        replica=st.sampled_from(REPLICAS),
        wrong_epoch=st.sampled_from([0, 0, 0, 1]),
        step=st.integers(-1, 3),
        stored=st.lists(chains, max_size=4),
    )
    def any_snapshot(
        self, replica: str, wrong_epoch: int, step: int, stored: list[tuple[tuple[int, ...], Tier]]
    ) -> None:
        self.snapshot(replica, wrong_epoch, step, stored)

    def snapshot(
        self, replica: str, wrong_epoch: int, step: int, stored: list[tuple[tuple[int, ...], Tier]]
    ) -> None:
        model = self.models.get(replica)
        sequence = (model.sequence if model else 0) + step
        identity = ReplicaIdentity(replica, (model.epoch if model else 1) + wrong_epoch)
        reported = tuple(BlocksStored(b"", keys_of(path), tier) for path, tier in stored)
        taken = self.tree.apply_snapshot(KvSnapshot(identity, sequence, reported))
        stale = model is not None and model.in_step and step < 0
        assert taken == (model is not None and not wrong_epoch and not stale)
        if model is not None and taken:
            model.sequence, model.in_step, model.asked_at = sequence, True, None
            model.held, model.stored = set(), {}
            self._take(model, stored)

    @rule(replica=st.sampled_from(REPLICAS), path=paths)
    def predict(self, replica: str, path: tuple[int, ...]) -> None:
        prediction = self.tree.predict(replica, keys_of(path))
        if replica not in self.models:
            assert prediction is None
            return
        model, now = self.models[replica], self.clock.now()
        for key in keys_of(path):
            if key not in model.held:
                is_first = model.predicted_until.get(key, 0.0) <= now
                model.sole[key] = prediction if is_first else None
                model.predicted_until[key] = now + TTL_S
        if prediction is not None:
            self.predictions.append((prediction, model))

    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        if self.predictions:
            prediction, model = self.predictions.pop(data.draw(st.integers(0, len(self.predictions) - 1)))
            self.tree.retract(prediction)
            for key in prediction.keys:
                if model.sole.get(key) is prediction:
                    model.predicted_until.pop(key, None)
                    del model.sole[key]

    @rule(replica=st.sampled_from(REPLICAS), path=paths)
    def expect(self, replica: str, path: tuple[int, ...]) -> None:
        expectation = self.tree.expect(replica, keys_of(path))
        assert (expectation is None) == (replica not in self.models)
        if expectation is not None:
            self.models[replica].expected.append(keys_of(path))
            self.expectations.append((expectation, self.models[replica]))

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if self.expectations:
            expectation, model = self.expectations.pop(data.draw(st.integers(0, len(self.expectations) - 1)))
            self.tree.withdraw(expectation)
            model.expected.remove(expectation.keys)

    @rule(delta_s=st.sampled_from([0.5, 2.5, 5.0]))
    def wait(self, delta_s: float) -> None:
        self.clock.advance(delta_s)

    @invariant()
    def same_matches(self) -> None:
        for path in ALL_PATHS:
            on_device: dict[str, int] = {}
            in_store: dict[str, InStore] = {}
            for replica, model in self.models.items():
                keys = list(keys_of(path))
                while keys and self._counts(model, keys[0]):
                    keys.pop(0)
                    on_device[replica] = on_device.get(replica, 0) + 1
                followed = []
                while keys and keys[0] in model.stored:
                    followed.append(model.stored[keys.pop(0)])
                if followed:
                    in_store[replica] = InStore(followed.count("dram"), followed.count("nvme"))
            assert both(self.tree.match(keys_of(path))) == (on_device, in_store)

    @invariant()
    def nothing_leaks(self) -> None:
        self.tree.match(())
        self.tree.check()
        alive = {
            key
            for model in self.models.values()
            for key in (*model.held, *model.predicted_until, *model.stored, *chain(*model.expected))
            if self._counts(model, key) or key in model.stored
        }
        leaving = {key for each in self.tree._departed.values() for _, keys in each.bits() for key in keys}
        assert len(alive) <= self.tree.num_keys <= len(alive | leaving)
        for replica in REPLICAS:
            model = self.models.get(replica)
            assert self.tree.num_held(replica) == (len(model.held) if model else 0)
            assert self.tree.num_stored(replica) == (len(model.stored) if model else 0)
            assert self.tree.needs_snapshot(replica) == (model is not None and not model.in_step)

    def _take(self, model: ReplicaModel, reported: list[tuple[tuple[int, ...], Tier]]) -> None:
        for path, tier in reported:
            for key in keys_of(path):
                if tier == "device":
                    model.held.add(key)
                    model.predicted_until.pop(key, None)
                    model.sole.pop(key, None)
                else:
                    model.stored[key] = tier

    def _counts(self, model: ReplicaModel, key: bytes) -> bool:
        is_predicted = model.predicted_until.get(key, 0.0) > self.clock.now()
        return key in model.held or is_predicted or any(key in keys for keys in model.expected)


TreeAgainstModel.TestCase.settings = settings(
    max_examples=examples(120), stateful_step_count=40, deadline=None
)
TestTreeAgainstModel = TreeAgainstModel.TestCase


class CompiledTreeAgainstModel(TreeAgainstModel):
    is_compiled = True


CompiledTreeAgainstModel.TestCase.settings = TreeAgainstModel.TestCase.settings
TestCompiledTreeAgainstModel = needs_compiler(CompiledTreeAgainstModel.TestCase)


def synced_tree(*replicas: str) -> tuple[PrefixTree, ManualClock]:
    clock = ManualClock()
    tree = PrefixTree(clock, TTL_S)
    for replica in replicas:
        tree.add_replica(ReplicaIdentity(replica, 1))
        assert tree.apply_snapshot(KvSnapshot(ReplicaIdentity(replica, 1), 0, ()))
    return tree, clock


def stored(replica: str, sequence: int, *keys: bytes, tier: Tier = "device") -> KvEvents:
    return KvEvents(ReplicaIdentity(replica, 1), sequence, (BlocksStored(b"", keys, tier),), ())


def removed(replica: str, sequence: int, *keys: bytes) -> KvEvents:
    return KvEvents(ReplicaIdentity(replica, 1), sequence, (), (BlocksRemoved(keys),))


def test_drawn_example() -> None:
    tree, _ = synced_tree("p0", "p1", "p2")
    assert tree.apply_events(stored("p0", 1, b"A", b"B", b"D"))
    assert tree.apply_events(stored("p1", 1, b"A", b"B", b"C"))
    assert tree.apply_events(stored("p2", 1, b"A", b"B", b"D"))
    assert tree.apply_events(removed("p2", 2, b"B"))
    assert tree.match((b"A", b"B", b"D", b"E")).device == {"p0": 3, "p1": 2, "p2": 1}


def test_a_gap_asks_once_until_the_wait_is_over() -> None:
    tree, clock = synced_tree("p0")
    assert tree.apply_events(stored("p0", 1, b"A"))
    assert not tree.apply_events(stored("p0", 3, b"B"))
    assert tree.apply_events(stored("p0", 4, b"C"))
    assert tree.match((b"A",)).device == {"p0": 1}, "what was known stays known"
    assert tree.match((b"C",)).device == {}, "events after a gap are ignored"
    clock.advance(SNAPSHOT_WAIT_S)
    assert not tree.apply_events(stored("p0", 5, b"D"))
    assert tree.apply_snapshot(KvSnapshot(ReplicaIdentity("p0", 1), 5, (BlocksStored(b"", (b"C", b"D")),)))
    assert tree.match((b"A",)).device == {}
    assert tree.match((b"C", b"D")).device == {"p0": 2}
    assert tree.apply_events(stored("p0", 6, b"E"))
    tree.check()


def test_duplicates_are_ignored() -> None:
    tree, _ = synced_tree("p0")
    assert tree.apply_events(stored("p0", 1, b"A"))
    assert tree.apply_events(removed("p0", 2, b"A"))
    assert tree.apply_events(stored("p0", 2, b"A")), "a repeated number is no gap"
    assert tree.apply_events(stored("p0", 1, b"A"))
    assert tree.match((b"A",)).device == {}
    assert tree.apply_events(stored("p0", 3, b"A"))
    assert tree.match((b"A",)).device == {"p0": 1}


def test_events_before_the_first_snapshot_are_ignored() -> None:
    tree = PrefixTree(ManualClock(), TTL_S)
    assert not tree.apply_events(stored("p0", 1, b"A"))
    tree.add_replica(ReplicaIdentity("p0", 1))
    assert not tree.apply_events(stored("p0", 1, b"A"))
    assert tree.num_keys == 0


def test_a_recycled_bit_inherits_nothing() -> None:
    tree, clock = synced_tree("old")
    assert tree.apply_events(stored("old", 1, b"A"))
    tree.predict("old", (b"A", b"B"))
    tree.remove_replica("old")
    assert tree.num_keys == 0
    tree.add_replica(ReplicaIdentity("new", 1))
    assert tree.match((b"A", b"B")).device == {}
    clock.advance(1.0)
    tree.predict("new", (b"A", b"B"))
    clock.advance(TTL_S - 0.5)
    assert tree.match((b"A", b"B")).device == {"new": 2}, (
        "the old replica's expiry must not touch the new one's"
    )
    tree.check()


def num_departed(tree: PrefixTree) -> int:
    """Return the number of bits that departed replicas may still have."""
    return sum(len(list(keys)) for each in tree._departed.values() for _, keys in each.bits())


@kernels
def test_no_use_of_the_tree_forgets_more_than_a_part_of_a_replica(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica comes back, and leaves again, before it is forgotten."""
    monkeypatch.setattr(radix, "_FORGOTTEN_BY_PART", 10)
    monkeypatch.setattr(radix, "_FORGOTTEN_BY_MATCH", 2)
    tree = PrefixTree(ManualClock(), TTL_S, kernel_of(is_compiled), BlockHistory(64))
    keys = tuple(number.to_bytes(16, "big") for number in range(90))
    for epoch in (1, 2, 3):
        identity = ReplicaIdentity("p0", epoch)
        tree.add_replica(identity)
        chains = (BlocksStored(b"", keys[:50]), BlocksStored(b"", keys[50:], "nvme"))
        assert tree.apply_snapshot(KvSnapshot(identity, 0, chains))
        assert both(tree.match(keys)) == ({"p0": 50}, {"p0": InStore(0, 40)})
        tree.predict("p0", (keys[-1], b"another"))
        tree.remove_replica("p0")
        assert tree.match(keys).most_blocks == 0
        assert tree.places(keys[0], "") == []
    assert len(tree._departed) == 3
    tree.add_replica(ReplicaIdentity("p1", 1))
    tree.apply_snapshot(KvSnapshot(ReplicaIdentity("p1", 1), 0, (BlocksStored(b"", keys[:10]),)))
    num_uses, num_left = 0, num_departed(tree)
    assert num_left > 200
    while tree._departed:
        assert both(tree.match(keys)) == ({"p1": 10}, {})
        num_uses += 1
        assert num_left - num_departed(tree) <= 2
        num_left = num_departed(tree)
    assert num_uses > 100
    assert tree.num_keys == 10
    tree.check()
    assert len(tree._free_slots) == 3


def test_a_confirmed_prediction_outlives_its_time() -> None:
    tree, clock = synced_tree("p0")
    tree.predict("p0", (b"A", b"B"))
    assert tree.match((b"A", b"B", b"C")).device == {"p0": 2}
    assert tree.apply_events(stored("p0", 1, b"A"))
    clock.advance(TTL_S)
    assert tree.match((b"A", b"B", b"C")).device == {"p0": 1}
    assert tree.apply_events(removed("p0", 2, b"A"))
    assert tree.num_keys == 0


def test_a_repeated_prediction_lasts_from_the_last_one() -> None:
    tree, clock = synced_tree("p0")
    tree.predict("p0", (b"A",))
    clock.advance(TTL_S - 1.0)
    tree.predict("p0", (b"A",))
    clock.advance(TTL_S - 1.0)
    assert tree.match((b"A",)).device == {"p0": 1}
    clock.advance(1.0)
    assert tree.num_held("p0") == 0
    assert tree.match((b"A",)).device == {}
    assert tree.num_keys == 0


def test_a_prefix_continues_in_the_store() -> None:
    tree, _ = synced_tree("p0", "p1", "p2")
    assert tree.apply_events(stored("p0", 1, b"A"))
    assert tree.apply_events(stored("p0", 2, b"A", b"B", b"C", tier="dram"))
    assert tree.apply_events(stored("p0", 3, b"D", tier="nvme"))
    assert tree.apply_events(stored("p1", 1, b"A", b"B", tier="nvme"))
    assert tree.apply_events(stored("p2", 1, b"B", b"C", tier="dram"))
    match = tree.match((b"A", b"B", b"C", b"D", b"E"))
    assert match.device == {"p0": 1}
    assert match.stored == {"p0": InStore(2, 1), "p1": InStore(0, 2)}, "p2 lacks A"


def test_the_store_counts_in_its_cheapest_tier_only() -> None:
    tree, _ = synced_tree("p0")
    assert tree.apply_events(stored("p0", 1, b"A", b"B", tier="nvme"))
    assert tree.apply_events(stored("p0", 2, b"B", tier="dram"))
    assert tree.match((b"A", b"B")).stored == {"p0": InStore(1, 1)}
    assert tree.apply_events(stored("p0", 3, b"B", tier="nvme"))
    assert tree.match((b"A", b"B")).stored == {"p0": InStore(0, 2)}
    gone = KvEvents(ReplicaIdentity("p0", 1), 4, (), (BlocksRemoved((b"A", b"A", b"X"), "store"),))
    assert tree.apply_events(gone)
    assert both(tree.match((b"A", b"B"))) == ({}, {})
    tree.check()


def test_a_block_may_leave_the_device_and_stay_in_the_store() -> None:
    tree, _ = synced_tree("p0")
    assert tree.apply_events(stored("p0", 1, b"A", b"B"))
    assert tree.apply_events(stored("p0", 2, b"A", b"B", tier="dram"))
    assert both(tree.match((b"A", b"B"))) == ({"p0": 2}, {})
    assert tree.apply_events(removed("p0", 3, b"B"))
    assert both(tree.match((b"A", b"B"))) == ({"p0": 1}, {"p0": InStore(1, 0)})
    tree.remove_replica("p0")
    assert tree.num_keys == 0


lengths = st.integers(0, 300)


@kernels
@settings(deadline=None)
@given(
    drawn=st.lists(st.tuples(lengths, lengths, lengths, st.booleans()), min_size=1, max_size=70),
    num_keys=st.integers(0, 600),
    lost=st.sampled_from([None, 5, 255, 256]),
)
def test_all_replicas_at_once_are_as_one_by_one(
    is_compiled: bool, drawn: list[tuple[int, int, int, bool]], num_keys: int, lost: int | None
) -> None:
    """More replicas than fit a word, longer prompts than are matched at once, a block that all have lost."""
    tree = PrefixTree(ManualClock(), 5.0, kernel_of(is_compiled))
    keys = tuple(index.to_bytes(4, "big") for index in range(num_keys))
    expected: dict[str, tuple[int, InStore]] = {}
    for number, (num_device, num_dram, num_nvme, is_dram_last) in enumerate(drawn):
        replica = ReplicaIdentity(f"r{number}", 1)
        tree.add_replica(replica)
        parts: list[tuple[Tier, int]] = [("device", num_device), ("dram", num_dram), ("nvme", num_nvme)]
        if is_dram_last:
            parts[1:] = parts[:0:-1]
        tiers = [tier for tier, num in parts for _ in range(num)]
        held = [
            (key, tier) for index, (key, tier) in enumerate(zip(keys, tiers, strict=False)) if index != lost
        ]
        chains = [
            BlocksStored(b"", tuple(key for key, its in held if its == tier), tier) for tier in get_args(Tier)
        ]
        tree.apply_snapshot(KvSnapshot(replica, 1, tuple(chains)))
        reached = [tier for _, tier in held[: lost if lost is not None else len(held)]]
        depth = reached.count("device")
        expected[f"r{number}"] = depth, InStore(reached.count("dram"), reached.count("nvme"))
    match = tree.match(keys)
    assert {name: match.of(name) for name in expected} == expected
    assert match.most_blocks == max(depth + sum(in_store) for depth, in_store in expected.values())
    tree.check()
