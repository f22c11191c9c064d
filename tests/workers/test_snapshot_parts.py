"""A watcher that takes a snapshot in parts knows at their end what the replica holds, whatever changed
between them."""

from __future__ import annotations

from random import Random
from unittest import mock

import pytest

from kvtransfer.common.clock import ManualClock
from kvtransfer.kv_events import BlocksRemoved, BlocksStored, KvEvents, KvSnapshot
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.store.messages.engine_session import TierEvents
from router.block_holder import StoreTier
from router.radix import PrefixTree
from workers.replica import block_marks, snapshot_parts
from workers.replica.block_marks import BlockMarks
from workers.replica.snapshot_parts import SnapshotParts
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.group_pool import GroupPool
from workers.store_connector.tier_view import TierView

IDENTITY = ReplicaIdentity("r0", 1)
NUM_BLOCKS = 120
PART_BLOCKS = 16
TIERS: tuple[StoreTier, ...] = ("dram", "nvme")


class Replica:
    """A pool, a group with a window, and the store of the node, with what a watcher is told of them."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.pool = BlockPool(NUM_BLOCKS, 16)
        self.group = GroupPool(17, NUM_BLOCKS)
        self.view = TierView()
        self.view.apply(TierEvents((), ()))
        self.marks = BlockMarks([self.group], 16, self.view)
        self.parts = SnapshotParts(self.pool, self.marks, self.view)
        self.tree = PrefixTree(ManualClock(), 5.0)
        self.tree.add_replica(IDENTITY)
        self.sequence = 0
        self.num_prompts = 0

    def change(self) -> None:
        """Compute a prompt, which evicts others, and change what the store holds."""
        self.num_prompts += 1
        keys = [self.random.randbytes(16) for _ in range(self.random.randint(1, 9))]
        blocks, parent = self.pool.allocate(len(keys)), b""
        for block, key in zip(blocks, keys, strict=True):
            assert self.pool.register(block, parent, key, "")
            parent = key
        self.pool.release(blocks)
        (block,) = self.group.allocate(1)
        assert self.group.register(block, keys[-1], "")
        self.group.release([block])
        gone = tuple(key for key in self.view.marked if self.random.random() < 0.1)
        tier = self.random.choice(TIERS)
        self.view.apply(TierEvents((BlocksStored(b"", tuple(keys), tier),), gone))

    def publish(self) -> None:
        """Tell the watcher what has changed."""
        stored, removed = self.pool.take_events()
        stored_there, removed_there = self.view.take_events()
        marked, unmarked = self.marks.take_events()
        changes = (*stored, *stored_there), (*removed, *removed_there)
        self.sequence += 1
        self.tree.apply_events(KvEvents(IDENTITY, self.sequence, *changes, marked, unmarked))

    def send(self, part: int) -> int:
        """Send a part and return the number of the next one."""
        self.publish()
        stored, marked, next_part = self.parts.part(part)
        assert sum(len(chain.keys) for chain in stored) + len(marked) < 3 * PART_BLOCKS
        snapshot = KvSnapshot(IDENTITY, self.sequence, stored, marked, self.marks.num_needed, part, next_part)
        assert self.tree.apply_snapshot(snapshot)
        return next_part

    def check(self) -> None:
        """Compare what the watcher knows with a snapshot of the whole."""
        self.publish()
        whole = PrefixTree(ManualClock(), 5.0)
        whole.add_replica(IDENTITY)
        stored = (*self.pool.snapshot(), *self.view.snapshot())
        whole.apply_snapshot(KvSnapshot(IDENTITY, 0, stored, self.marks.snapshot(), self.marks.num_needed))
        known, wanted = (tree._holders["r0"] for tree in (self.tree, whole))
        assert set(known.held) == set(wanted.held)
        assert dict(known.stored.items()) == dict(wanted.stored.items())
        assert set(known.marked) == set(wanted.marked)
        self.tree.check()


@pytest.mark.parametrize("seed", range(4))
def test_parts_and_events_between_them_are_the_whole(seed: int) -> None:
    with (
        mock.patch.object(snapshot_parts, "SLICE_BLOCKS", PART_BLOCKS),
        mock.patch.object(snapshot_parts, "LEAST_PART_BLOCKS", PART_BLOCKS),
        mock.patch.object(block_marks, "_SLICE_BLOCKS", PART_BLOCKS),
    ):
        replica = Replica(seed)
        for _ in range(20):
            replica.change()
        for _ in range(3):
            num_parts, part = 1, replica.send(0)
            while part:
                for _ in range(replica.random.randrange(3)):
                    replica.change()
                part = replica.send(part)
                num_parts += 1
            assert num_parts > 5
            replica.check()
            replica.publish()
            replica.sequence += 1  # a lost frame
            replica.change()
            replica.publish()
            assert replica.tree.needs_snapshot("r0")


def test_a_part_of_an_older_snapshot_is_ignored() -> None:
    tree = PrefixTree(ManualClock(), 5.0)
    tree.add_replica(IDENTITY)
    key, other = bytes(16), bytes(15) + b"1"
    first = KvSnapshot(IDENTITY, 1, (BlocksStored(b"", (key,)),), next_part=3)
    late = KvSnapshot(IDENTITY, 1, (BlocksStored(b"", (other,)),), part=3)
    assert tree.apply_snapshot(first)
    assert not tree.apply_snapshot(KvSnapshot(IDENTITY, 1, (), part=2))
    assert not tree.apply_events(KvEvents(IDENTITY, 3, (), ())), "event 2 was lost"
    assert not tree.apply_snapshot(late), "a new snapshot is on its way"
    assert tree.apply_snapshot(KvSnapshot(IDENTITY, 5, (BlocksStored(b"", (other,)),)))
    assert tree.num_held("r0") == 1
    assert tree.match((key,)).device == {}
    assert tree.apply_events(KvEvents(IDENTITY, 6, (), (BlocksRemoved((other,)),)))
    assert tree.num_keys == 0
    tree.check()
