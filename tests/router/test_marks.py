"""Replicas that can continue a prompt only behind marked blocks, in the tree, against a naive model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from optional_programs import needs_compiler
from slow_cases import examples

from kvtransfer.common.clock import ManualClock
from kvtransfer.kv_events import BlocksRemoved, BlocksStored, KvEvents, KvSnapshot
from kvtransfer.messages import ReplicaIdentity
from router.native import RouterKernel, load_kernel
from router.prefix_match import InStore
from router.radix import Expectation, PrefixTree

Tier = Literal["device", "dram", "nvme"]
TTL_S = 5.0
REPLICAS = ("p0", "p1", "p2")
KEYS = tuple(bytes([index]) for index in range(6))
lengths = st.integers(0, len(KEYS))
some_keys = st.lists(st.sampled_from(KEYS), unique=True, max_size=4)
kernels = pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=needs_compiler)], ids=["python", "compiled"]
)


def kernel_of(is_compiled: bool) -> RouterKernel | None:
    return load_kernel() if is_compiled else None


def continued(where: list[str], marked: list[bool], needed: int, most: int) -> tuple[int, InStore]:
    """Return what counts of blocks that lie there ("" nowhere): the longest prefix behind which there are
    `needed` marks without a gap, by trying each."""
    for end in range(len(where), 0, -1):
        first = max(0, end - needed)
        is_reached = all(where[:end]) and (not needed or (end <= most and all(marked[first:end])))
        if is_reached:
            num_device = next((index for index, it in enumerate(where[:end]) if it != "device"), end)
            behind = where[num_device:end]
            # What is on the device behind a gap in the device's part counts as in the store, if it is there.
            return num_device, InStore(behind.count("dram"), behind.count("nvme"))
    return 0, InStore(0, 0)


@kernels
@settings(deadline=None)
@given(
    drawn=st.lists(
        st.tuples(
            st.integers(0, 40), st.integers(0, 40), st.integers(0, 3), st.lists(st.booleans(), max_size=90)
        ),
        min_size=1,
        max_size=40,
    ),
    num_keys=st.integers(0, 90),
    most=st.integers(0, 90),
)
def test_a_replica_counts_up_to_its_last_place_to_continue(
    is_compiled: bool, drawn: list[tuple[int, int, int, list[bool]]], num_keys: int, most: int
) -> None:
    """More replicas than fit a word, of which some need no marks."""
    tree = PrefixTree(ManualClock(), TTL_S, kernel_of(is_compiled))
    keys = tuple(index.to_bytes(2, "big") for index in range(num_keys))
    expected: dict[str, tuple[int, InStore]] = {}
    for number, (num_device, num_dram, needed, drawn_marks) in enumerate(drawn):
        replica = ReplicaIdentity(f"r{number}", 1)
        tree.add_replica(replica)
        where = ["device"] * num_device + ["dram"] * num_dram + ["nvme"] * 20
        where = where[:num_keys]
        marks = (drawn_marks + [False] * num_keys)[:num_keys] if needed else [False] * num_keys
        stored = tuple(
            BlocksStored(b"", tuple(key for key, it in zip(keys, where, strict=False) if it == tier), tier)
            for tier in ("device", "dram", "nvme")
        )
        marked = tuple(key for key, is_marked in zip(keys, marks, strict=True) if is_marked)
        tree.apply_snapshot(KvSnapshot(replica, 1, stored, marked, needed))
        expected[f"r{number}"] = continued(where, marks, needed, most)
    match = tree.match(keys, most)
    assert {name: match.of(name) for name in expected} == expected
    tree.check()


@dataclass
class MarkModel:
    """One replica: plain sets, and lists of what is predicted and expected."""

    needed: int
    sequence: int = 0
    held: set[bytes] = field(default_factory=set)
    stored: set[bytes] = field(default_factory=set)
    marked: set[bytes] = field(default_factory=set)
    predicted: list[tuple[float, tuple[bytes, ...], tuple[bytes, ...]]] = field(default_factory=list)
    expected: list[tuple[tuple[bytes, ...], tuple[bytes, ...]]] = field(default_factory=list)

    def ends(self, keys: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """The blocks that are marked when the prompt is computed: of states the last, of windows all."""
        return {0: (), 1: keys[-1:]}.get(self.needed, keys)


class MarksAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.tree = PrefixTree(self.clock, TTL_S, load_kernel())
        self.models: dict[str, MarkModel] = {}
        self.expectations: list[
            tuple[Expectation, MarkModel, tuple[tuple[bytes, ...], tuple[bytes, ...]]]
        ] = []

    @rule(replica=st.sampled_from(REPLICAS), needed=st.integers(0, 3), marked=some_keys, length=lengths)
    def join(self, replica: str, needed: int, marked: list[bytes], length: int) -> None:
        self.tree.remove_replica(replica)
        self.tree.add_replica(ReplicaIdentity(replica, 1))
        marks = tuple(marked) if needed else ()
        stored = (BlocksStored(b"", KEYS[:length]),)
        assert self.tree.apply_snapshot(KvSnapshot(ReplicaIdentity(replica, 1), 0, stored, marks, needed))
        self.models[replica] = MarkModel(needed, held=set(KEYS[:length]), marked=set(marks))

    @rule(replica=st.sampled_from(REPLICAS))
    def leave(self, replica: str) -> None:
        self.tree.remove_replica(replica)
        self.models.pop(replica, None)

    @rule(
        replica=st.sampled_from(REPLICAS),
        stored=some_keys,
        tier=st.sampled_from(("device", "dram")),
        removed=some_keys,
        marked=some_keys,
        unmarked=some_keys,
    )
    def events(
        self,
        replica: str,
        stored: list[bytes],
        tier: Tier,
        removed: list[bytes],
        marked: list[bytes],
        unmarked: list[bytes],
    ) -> None:
        if (model := self.models.get(replica)) is None:
            return
        model.sequence += 1
        marks = marked if model.needed else []
        events = KvEvents(
            ReplicaIdentity(replica, 1),
            model.sequence,
            (BlocksStored(b"", tuple(stored), tier),),
            (BlocksRemoved(tuple(removed), "device" if tier == "device" else "store"),),
            tuple(marks),
            tuple(unmarked),
        )
        assert self.tree.apply_events(events)
        lying = model.held if tier == "device" else model.stored
        lying.difference_update(removed)
        lying.update(stored)
        model.marked = (model.marked - set(unmarked)) | set(marks)

    @rule(replica=st.sampled_from(REPLICAS), length=st.integers(1, len(KEYS)))
    def predict(self, replica: str, length: int) -> None:
        keys = KEYS[:length]
        self.tree.predict(replica, keys)
        if (model := self.models.get(replica)) is not None:
            unconfirmed = tuple(key for key in keys if key not in model.held)
            if unconfirmed or not model.marked.issuperset(model.ends(keys)):
                model.predicted.append((self.clock.now() + TTL_S, unconfirmed, model.ends(keys)))

    @rule(replica=st.sampled_from(REPLICAS), length=st.integers(1, len(KEYS)))
    def expect(self, replica: str, length: int) -> None:
        expectation = self.tree.expect(replica, KEYS[:length])
        if (model := self.models.get(replica)) is not None:
            assert expectation is not None
            both = KEYS[:length], model.ends(KEYS[:length])
            model.expected.append(both)
            self.expectations.append((expectation, model, both))

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if self.expectations:
            place = data.draw(st.integers(0, len(self.expectations) - 1))
            expectation, model, both = self.expectations.pop(place)
            self.tree.withdraw(expectation)
            model.expected.remove(both)

    @rule(delta_s=st.sampled_from([0.5, 2.5, 5.0]))
    def wait(self, delta_s: float) -> None:
        self.clock.advance(delta_s)

    @invariant()
    def same_matches(self) -> None:
        match = self.tree.match(KEYS)
        for replica, model in self.models.items():
            now = self.clock.now()
            predicted = [it for it in model.predicted if it[0] > now]
            foreseen = {key for _, keys, _ in predicted for key in keys}
            # Once an event has confirmed a block, it is predicted no more.
            held = model.held | {key for keys, _ in model.expected for key in keys}
            marked = model.marked | {key for _, _, ends in predicted for key in ends}
            marked |= {key for _, ends in model.expected for key in ends}
            where = []
            is_on_device = True
            for key in KEYS:
                is_held = key in held or (key in foreseen and self._is_predicted(replica, key))
                is_on_device = is_on_device and is_held
                where.append("device" if is_on_device else "dram" if key in model.stored else "")
            assert match.of(replica) == continued(
                where, [key in marked for key in KEYS], model.needed, len(KEYS)
            )
        self.tree.check()

    def _is_predicted(self, replica: str, key: bytes) -> bool:
        return key in self.tree._holders[replica].predicted


MarksAgainstModel.TestCase.settings = settings(
    max_examples=examples(100), stateful_step_count=30, deadline=None
)
TestMarksAgainstModel = MarksAgainstModel.TestCase


def test_nothing_is_left_of_a_replica_with_marks() -> None:
    tree = PrefixTree(ManualClock(), TTL_S)
    identity = ReplicaIdentity("p0", 1)
    tree.add_replica(identity)
    assert tree.apply_snapshot(KvSnapshot(identity, 0, (BlocksStored(b"", KEYS),), KEYS[2:4], 1))
    assert tree.match(KEYS).of("p0") == (4, InStore(0, 0))
    assert tree.match(KEYS, most_blocks=3).of("p0") == (3, InStore(0, 0))
    tree.predict("p0", KEYS)
    assert tree.match(KEYS).of("p0") == (6, InStore(0, 0)), "it ends in a state"
    assert tree.match(KEYS[:5]).of("p0") == (4, InStore(0, 0)), "and has none before its end"
    tree.remove_replica("p0")
    tree.check()
    assert tree.num_keys == 0
