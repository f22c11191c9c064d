"""Random operations on a prefix tree, beside a plain model of what each replica has reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Literal

from kvtransfer.common.clock import ManualClock
from kvtransfer.kv_events import BlocksRemoved, BlocksStored, KvEvents, KvSnapshot
from kvtransfer.messages import ReplicaIdentity
from router.block_holder import StoreTier
from router.native import load_kernel
from router.radix import Expectation, PrefixTree

TTL_S = 5.0
_TIERS: tuple[Literal["device", "dram", "nvme"], ...] = ("device", "device", "dram", "nvme")
_STORE_TIERS: tuple[StoreTier, ...] = ("dram", "nvme")
# Blocks that an event or a prompt names at most.
_MOST_BLOCKS = 12
# Snapshots come in parts of so many blocks.
_PART_BLOCKS = 64


@dataclass(slots=True, eq=False)
class ModelReplica:
    """What a replica holds, as its events and snapshots say in order."""

    identity: ReplicaIdentity
    marks_needed: int
    sequence: int = 0
    device: set[bytes] = field(default_factory=set)
    store: dict[bytes, StoreTier] = field(default_factory=dict)
    marked: set[bytes] = field(default_factory=set)
    # The blocks and tiers that are left for parts of a snapshot, and the number of the next part; None: no
    # snapshot comes.
    left: list[tuple[bytes, str]] | None = None
    next_part: int = 0


class TreeOperations:
    """Draws operations, applies them to the tree, and keeps the model: events of blocks and marks, lost
    events, snapshots in parts between other operations, predictions, requests that wait, matches, replicas
    that come, go and restart, and time."""

    def __init__(self, seed: int, num_replicas: int, num_prompts: int, prompt_blocks: int) -> None:
        self._random = Random(seed)
        self.clock = ManualClock(100.0)
        self.tree = PrefixTree(self.clock, TTL_S, load_kernel())
        self._names = [f"r{index:04}" for index in range(num_replicas)]
        self._prompts = [
            tuple(self._random.randbytes(16) for _ in range(prompt_blocks)) for _ in range(num_prompts)
        ]
        self.replicas: dict[str, ModelReplica] = {}
        self._expectations: list[Expectation] = []
        self._num_epochs = 0
        kinds = {
            self._store: 40,
            self._remove: 30,
            self._mark: 8,
            self._match: 30,
            self._predict: 20,
            self._expect: 8,
            self._withdraw: 8,
            self._continue_snapshot: 40,
            self._lose_event: 0.3,
            self._begin_snapshot: 0.2,
            self._advance: 10,
            self._join: 0.3,
            self._leave: 0.1,
        }
        self._kinds, self._weights = list(kinds), list(kinds.values())

    def run(self, num_operations: int) -> None:
        """Apply so many random operations."""
        while len(self.replicas) < len(self._names):
            self._join()
        for operation in self._random.choices(self._kinds, self._weights, k=num_operations):
            operation()

    def check(self) -> None:
        """Finish all snapshots, and assert the tree's invariants and that it knows what replicas hold."""
        for replica in tuple(self.replicas.values()):
            if self.tree.needs_snapshot(replica.identity.replica_id):
                self._snapshot(replica)
            while replica.left is not None:
                self._send_part(replica)
            replica_id = replica.identity.replica_id
            assert self.tree.num_held(replica_id) == len(replica.device)
            assert self.tree.num_stored(replica_id) == len(replica.store)
            assert self.tree.num_marked(replica_id) == len(replica.marked)
        self.tree.check()

    # ------------------------------------------------------------------------------------- operations

    def _keys(self) -> tuple[bytes, ...]:
        prompt = self._random.choice(self._prompts)
        start = self._random.randrange(len(prompt))
        return prompt[start : start + self._random.randint(1, _MOST_BLOCKS)]

    def _prefix(self) -> tuple[bytes, ...]:
        prompt = self._random.choice(self._prompts)
        return prompt[: self._random.randint(1, len(prompt))]

    def _replica(self) -> ModelReplica:
        while True:
            replica = self.replicas.get(self._random.choice(self._names))
            if replica is not None:
                return replica

    def _send(self, replica: ModelReplica, events: KvEvents) -> None:
        replica.sequence = events.sequence
        in_order = self.tree.apply_events(events)
        if not in_order:
            self._snapshot(replica)

    def _store(self) -> None:
        replica, keys = self._replica(), self._keys()
        tier: Literal["device", "dram", "nvme"] = self._random.choice(_TIERS)
        if tier == "device":
            replica.device.update(keys)
        else:
            replica.store.update(dict.fromkeys(keys, tier))
        chains = (BlocksStored(b"", keys, tier),)
        self._send(replica, KvEvents(replica.identity, replica.sequence + 1, chains, ()))

    def _remove(self) -> None:
        replica, keys = self._replica(), self._keys()
        is_device = self._random.random() < 0.6
        if is_device:
            replica.device.difference_update(keys)
        else:
            for key in keys:
                replica.store.pop(key, None)
        removal = BlocksRemoved(keys, "device" if is_device else "store")
        self._send(replica, KvEvents(replica.identity, replica.sequence + 1, (), (removal,)))

    def _mark(self) -> None:
        replica, keys = self._replica(), self._keys()
        if not replica.marks_needed:
            return
        marked = tuple(key for key in keys if key not in replica.marked)
        unmarked = tuple(key for key in self._keys() if key in replica.marked)
        replica.marked.difference_update(unmarked)
        replica.marked.update(marked)
        events = KvEvents(replica.identity, replica.sequence + 1, (), (), marked, unmarked)
        self._send(replica, events)

    def _lose_event(self) -> None:
        replica = self._replica()
        replica.sequence += 1

    def _begin_snapshot(self) -> None:
        self._snapshot(self._replica())

    def _snapshot(self, replica: ModelReplica) -> None:
        blocks: list[tuple[bytes, str]] = [(key, "device") for key in replica.device]
        blocks += [(key, "store") for key in replica.store]
        blocks += [(key, "mark") for key in replica.marked]
        replica.left, replica.next_part = blocks, 0
        self._send_part(replica)

    def _continue_snapshot(self) -> None:
        replica = self._replica()
        if replica.left is not None:
            self._send_part(replica)

    def _send_part(self, replica: ModelReplica) -> None:
        """Send what of the next blocks is still held."""
        assert replica.left is not None
        part, replica.left = replica.left[:_PART_BLOCKS], replica.left[_PART_BLOCKS:]
        chains = [
            BlocksStored(
                b"", tuple(key for key, where in part if where == "device" and key in replica.device)
            )
        ]
        for tier in _STORE_TIERS:
            keys = tuple(key for key, where in part if where == "store" and replica.store.get(key) == tier)
            chains.append(BlocksStored(b"", keys, tier))
        marked = tuple(key for key, where in part if where == "mark" and key in replica.marked)
        number = replica.next_part
        replica.next_part = number + 1 if replica.left else 0
        snapshot = KvSnapshot(
            replica.identity,
            replica.sequence,
            tuple(chains),
            marked,
            replica.marks_needed,
            number,
            replica.next_part,
        )
        is_taken = self.tree.apply_snapshot(snapshot)
        if not is_taken or not replica.left:
            replica.left = None

    def _match(self) -> None:
        self.tree.match(self._prefix(), self._random.choice((None, 5)))

    def _predict(self) -> None:
        self.tree.predict(self._random.choice(self._names), self._prefix())

    def _expect(self) -> None:
        expectation = self.tree.expect(self._random.choice(self._names), self._prefix())
        if expectation is not None:
            self._expectations.append(expectation)

    def _withdraw(self) -> None:
        if self._expectations:
            index = self._random.randrange(len(self._expectations))
            self._expectations[index], last = self._expectations[-1], self._expectations[index]
            self._expectations.pop()
            self.tree.withdraw(last)

    def _advance(self) -> None:
        self.clock.advance(self._random.choice((0.001, 0.01, 0.5)))

    def _join(self) -> None:
        """Add a replica, or a new epoch of one."""
        name = self._random.choice([each for each in self._names if each not in self.replicas] or self._names)
        self._num_epochs += 1
        identity = ReplicaIdentity(name, self._num_epochs)
        self.replicas[name] = replica = ModelReplica(identity, self._random.choice((0, 0, 1, 3)))
        self.tree.add_replica(identity)
        self._snapshot(replica)

    def _leave(self) -> None:
        if len(self.replicas) > 1:
            name = self._random.choice(list(self.replicas))
            del self.replicas[name]
            self.tree.remove_replica(name)
