"""The prefix tree: which replica holds which block where, fed by KV events, snapshots and predictions.

The router's service owns one tree and looks up, for each request, how much of the prompt each replica holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtransfer.common.clock import Clock
from kvtransfer.messages import BlocksStored, KvEvents, KvSnapshot, ReplicaIdentity

# While a snapshot is awaited, a gap is reported again only this often: one request, not one per event.
SNAPSHOT_WAIT_S = 2.0

# Keys that are looked up before it is asked whether anybody has the last of them.
_MATCHED_AT_ONCE = 256

StoreTier = Literal["dram", "nvme"]


class InStore(NamedTuple):
    """Blocks of a prompt that only the store of a replica's node holds, by tier."""

    dram: int
    nvme: int


NOT_IN_STORE = InStore(0, 0)


class Match(NamedTuple):
    """The leading blocks of a prompt that each replica has without computing: `device` counts the first ones,
    on its device, `stored` those after them in its node's store. Replicas with none are absent."""

    device: dict[str, int]
    stored: dict[str, InStore]


@dataclass(slots=True, eq=False)
class _Holder:
    """One epoch of a replica: its bit, the blocks that it reported, and those that are predicted."""

    identity: ReplicaIdentity
    slot: int
    sequence: int = -1
    # True from a snapshot on, until a gap; events are applied only then.
    in_step: bool = False
    asked_at: float | None = None
    # On its device.
    held: set[bytes] = field(default_factory=set)
    # In the store of its node.
    stored: dict[bytes, StoreTier] = field(default_factory=dict)
    predicted_until: dict[bytes, float] = field(default_factory=dict)


class _Prediction(NamedTuple):
    """The keys of one routed prompt, in the queue of what expires next."""

    until: float
    holder: _Holder
    keys: tuple[bytes, ...]


class PrefixTree:
    """Block keys and, for each, a bit mask of the replicas that hold it.

    A block key is chained: it names the whole prefix that ends with its block, so equal keys are equal nodes
    and the tree needs no child pointers. A request brings its own path (`block_keys`), and a match looks up
    each key of that path. Two prompts A B C and A B D, on three replicas:

        key      mask   holders          the request A B D E is held by
        A        0b111  p0 p1 p2          p0: 3 blocks (A B D)
        +- B     0b011  p0 p1             p1: 2 blocks (A B)
           +- C  0b010     p1             p2: 1 block  (A)
           +- D  0b101  p0    p2          (p2's D does not count: its B is gone)

    What the store of a replica's node holds has masks of its own, by tier. A prefix is a chain: blocks in the
    store count only when all before them are on the device or in the store.

    Nodes are single keys and not compressed runs, on purpose. Events name single keys, with parents that
    may be unknown here, so every key needs its own entry anyway (170 bytes with one holder); compressed runs
    would also split wherever one replica's cache ends. A match over 128 blocks and 64 replicas, all of
    different depth, takes 21 us; comparing 128 keys as one run, the least that a compressed tree needs, takes
    1 us; a whole decision takes 180 us (`benchmarks/router.py`, one shared core).

    Memory is bounded by what replicas report, plus the predictions of the last `prediction_ttl_s`; a key
    without holders is deleted. A prediction counts as held until an event confirms it or its time is over.
    """

    def __init__(self, clock: Clock, prediction_ttl_s: float) -> None:
        self._clock = clock
        self._prediction_ttl_s = prediction_ttl_s
        self._key_to_mask: dict[bytes, int] = {}
        self._tier_to_masks: dict[StoreTier, dict[bytes, int]] = {"dram": {}, "nvme": {}}
        self._holders: dict[str, _Holder] = {}
        self._slot_to_id: list[str] = []
        self._free_slots: list[int] = []
        self._predictions: deque[_Prediction] = deque()

    def add_replica(self, identity: ReplicaIdentity) -> None:
        """Add this epoch of the replica with nothing known, and wipe what an earlier epoch held."""
        known = self._holders.get(identity.replica_id)
        if known is not None:
            if known.identity.epoch == identity.epoch:
                return
            self.remove_replica(identity.replica_id)
        if self._free_slots:
            slot = self._free_slots.pop()
            self._slot_to_id[slot] = identity.replica_id
        else:
            slot = len(self._slot_to_id)
            self._slot_to_id.append(identity.replica_id)
        self._holders[identity.replica_id] = _Holder(identity, slot)

    def remove_replica(self, replica_id: str) -> None:
        """Wipe everything of the replica. Afterwards no mask has its bit, so the bit may be reused."""
        holder = self._holders.pop(replica_id, None)
        if holder is None:
            return
        _clear_bit(self._key_to_mask, holder, holder.held)
        _clear_bit(self._key_to_mask, holder, holder.predicted_until)
        self._unstore(holder, tuple(holder.stored))
        holder.held.clear()
        holder.predicted_until.clear()
        self._slot_to_id[holder.slot] = ""
        self._free_slots.append(holder.slot)

    def apply_events(self, events: KvEvents) -> bool:
        """Apply one batch. Returns False after a gap or for an unknown epoch: the caller requests a snapshot.

        Until the snapshot arrives events are ignored, and False is repeated only every `SNAPSHOT_WAIT_S`.
        A key both removed and stored in one batch counts as stored. Parents are not needed (see the class).
        """
        holder = self._holders.get(events.publisher.replica_id)
        if holder is None or holder.identity.epoch != events.publisher.epoch:
            return False
        if holder.in_step:
            if events.sequence <= holder.sequence:
                return True
            if events.sequence == holder.sequence + 1:
                holder.sequence = events.sequence
                for removal in events.removed:
                    if removal.tier == "device":
                        self._remove(holder, removal.keys)
                    else:
                        self._unstore(holder, removal.keys)
                self._take(holder, events.stored)
                return True
            holder.in_step = False
        now = self._clock.now()
        if holder.asked_at is not None and now - holder.asked_at < SNAPSHOT_WAIT_S:
            return True
        holder.asked_at = now
        return False

    def apply_snapshot(self, snapshot: KvSnapshot) -> bool:
        """Replace what the replica held. Returns False, and ignores it, for another epoch or an older
        sequence."""
        holder = self._holders.get(snapshot.publisher.replica_id)
        if holder is None or holder.identity.epoch != snapshot.publisher.epoch:
            return False
        if holder.in_step and snapshot.sequence < holder.sequence:
            return False
        on_device = {key for stored in snapshot.stored if stored.tier == "device" for key in stored.keys}
        in_store = {key for stored in snapshot.stored if stored.tier != "device" for key in stored.keys}
        self._remove(holder, holder.held - on_device)
        self._unstore(holder, holder.stored.keys() - in_store)
        self._take(holder, snapshot.stored)
        holder.sequence = snapshot.sequence
        holder.in_step = True
        holder.asked_at = None
        return True

    def needs_snapshot(self, replica_id: str) -> bool:
        """Whether the replica's events are ignored until a snapshot arrives."""
        holder = self._holders.get(replica_id)
        return holder is not None and not holder.in_step

    def predict(self, replica_id: str, keys: tuple[bytes, ...]) -> None:
        """Count these blocks as held by the replica until confirmed, at most for `prediction_ttl_s`."""
        holder = self._holders.get(replica_id)
        if holder is None:
            return
        self._expire()
        held = holder.held
        unconfirmed = tuple(key for key in keys if key not in held)
        if not unconfirmed:
            return
        until = self._clock.now() + self._prediction_ttl_s
        bit, masks = 1 << holder.slot, self._key_to_mask
        for key in unconfirmed:
            holder.predicted_until[key] = until
            masks[key] = masks.get(key, 0) | bit
        self._predictions.append(_Prediction(until, holder, unconfirmed))

    def match(self, keys: Sequence[bytes]) -> Match:
        """Count for each replica how many of the leading keys it has, and where."""
        self._expire()
        replica_to_depth: dict[str, int] = {}
        if not keys:
            return Match(replica_to_depth, {})
        if any(self._tier_to_masks.values()):
            return self._match_tiers(keys)
        get_mask = self._key_to_mask.get
        alive = get_mask(keys[0], 0)
        depth = 0
        for depth, key in enumerate(keys):
            still_alive = alive & get_mask(key, 0)
            if still_alive != alive:
                self._record(replica_to_depth, alive ^ still_alive, depth)
                alive = still_alive
                if not alive:
                    return Match(replica_to_depth, {})
        self._record(replica_to_depth, alive, depth + 1)
        return Match(replica_to_depth, {})

    @property
    def num_keys(self) -> int:
        """Number of distinct block keys that any replica holds."""
        return len(set(self._key_to_mask).union(*self._tier_to_masks.values()))

    def num_held(self, replica_id: str) -> int:
        """Number of block keys that the replica reported to be on its device."""
        holder = self._holders.get(replica_id)
        return 0 if holder is None else len(holder.held)

    def num_stored(self, replica_id: str) -> int:
        """Number of block keys that the replica reported to be in its node's store."""
        holder = self._holders.get(replica_id)
        return 0 if holder is None else len(holder.stored)

    def check(self) -> None:
        """Assert that masks, holders and slots agree, and that no removed replica left a trace."""
        expected: dict[bytes, int] = {}
        expected_stored: dict[StoreTier, dict[bytes, int]] = {"dram": {}, "nvme": {}}
        for replica_id, holder in self._holders.items():
            assert self._slot_to_id[holder.slot] == replica_id
            assert not holder.held & holder.predicted_until.keys()
            for key in (*holder.held, *holder.predicted_until):
                expected[key] = expected.get(key, 0) | 1 << holder.slot
            for key, tier in holder.stored.items():
                expected_stored[tier][key] = expected_stored[tier].get(key, 0) | 1 << holder.slot
        assert expected == self._key_to_mask
        assert expected_stored == self._tier_to_masks
        assert len(self._slot_to_id) == len(self._holders) + len(self._free_slots)

    def _match_tiers(self, keys: Sequence[bytes]) -> Match:
        """Match with the store as well: a replica continues in the store where its device part ends, until a
        block is in neither tier."""
        device, dram, nvme = self._held_by(keys)
        # A row a block, and a column a replica; the last row is nobody's.
        blocks = np.arange(len(device))[:, None]
        depths = device.argmin(axis=0)
        is_before = blocks < depths
        ends = (dram | nvme | is_before).argmin(axis=0)
        num_dram = (dram & ~is_before & (blocks < ends)).sum(axis=0)
        num_nvme = ends - depths - num_dram
        ids = self._slot_to_id
        on_device, stored = depths.tolist(), zip(num_dram.tolist(), num_nvme.tolist(), strict=True)
        return Match(
            {ids[slot]: depth for slot, depth in enumerate(on_device) if depth},
            {ids[slot]: InStore(*counts) for slot, counts in enumerate(stored) if any(counts)},
        )

    def _held_by(self, keys: Sequence[bytes]) -> Iterator[npt.NDArray[np.bool_]]:
        """Return who has which of the leading keys on its device, in DRAM and on NVMe: `[num_keys + 1,
        num_slots]`. Keys behind one that nobody has may be left out."""
        maps = self._key_to_mask, self._tier_to_masks["dram"], self._tier_to_masks["nvme"]
        masks: tuple[list[int], ...] = ([], [], [])
        for start in range(0, len(keys), _MATCHED_AT_ONCE):
            for key_to_mask, found in zip(maps, masks, strict=True):
                get_mask = key_to_mask.get
                found += [get_mask(key, 0) for key in keys[start : start + _MATCHED_AT_ONCE]]
            if not any(found[-1] for found in masks):
                break
        num_bytes = -(-len(self._slot_to_id) // 8)
        for found in masks:
            packed = b"".join([mask.to_bytes(num_bytes, "little") for mask in (*found, 0)])
            rows = np.frombuffer(packed, np.uint8).reshape(-1, num_bytes)
            yield np.unpackbits(rows, axis=1, bitorder="little").view(np.bool_)

    def _record(self, replica_to_depth: dict[str, int], mask: int, depth: int) -> None:
        while mask:
            lowest = mask & -mask
            replica_to_depth[self._slot_to_id[lowest.bit_length() - 1]] = depth
            mask ^= lowest

    def _take(self, holder: _Holder, stored: Iterable[BlocksStored]) -> None:
        for blocks in stored:
            if blocks.tier == "device":
                self._hold(holder, blocks.keys)
            else:
                self._store(holder, blocks.keys, blocks.tier)

    def _hold(self, holder: _Holder, keys: Iterable[bytes]) -> None:
        for key in keys:
            holder.predicted_until.pop(key, None)
            holder.held.add(key)
        _set_bit(self._key_to_mask, holder, keys)

    def _store(self, holder: _Holder, keys: Sequence[bytes], tier: StoreTier) -> None:
        self._unstore(holder, [key for key in keys if holder.stored.get(key, tier) != tier])
        holder.stored.update(dict.fromkeys(keys, tier))
        _set_bit(self._tier_to_masks[tier], holder, keys)

    def _remove(self, holder: _Holder, keys: Iterable[bytes]) -> None:
        gone = [key for key in keys if key in holder.held]
        holder.held.difference_update(gone)
        _clear_bit(self._key_to_mask, holder, gone)

    def _unstore(self, holder: _Holder, keys: Iterable[bytes]) -> None:
        for key in keys:
            tier = holder.stored.pop(key, None)
            if tier is not None:
                _clear_bit(self._tier_to_masks[tier], holder, (key,))

    def _expire(self) -> None:
        now = self._clock.now()
        while self._predictions and self._predictions[0].until <= now:
            prediction = self._predictions.popleft()
            predicted_until = prediction.holder.predicted_until
            over = [key for key in prediction.keys if predicted_until.get(key, now + 1.0) <= now]
            for key in over:
                del predicted_until[key]
            _clear_bit(self._key_to_mask, prediction.holder, over)


def _set_bit(masks: dict[bytes, int], holder: _Holder, keys: Iterable[bytes]) -> None:
    bit = 1 << holder.slot
    for key in keys:
        masks[key] = masks.get(key, 0) | bit


def _clear_bit(masks: dict[bytes, int], holder: _Holder, keys: Iterable[bytes]) -> None:
    bit = 1 << holder.slot
    for key in keys:
        mask = masks.get(key, 0) & ~bit
        if mask:
            masks[key] = mask
        else:
            masks.pop(key, None)
