"""What became of blocks that replicas have announced: whether a block was ever stored anywhere, and where,
when and why it was removed last. Of a fixed size: new blocks take the places of old ones."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from kvtransfer.kv_events import BlocksStored, KvEvents

# Blocks that are remembered, in buckets of `_WAYS`. A slot takes 18 bytes.
NUM_SLOTS = 1 << 19
_WAYS = 4
_HASH_BITS = (1 << 64) - 1
# Numbers of removals' causes, of 16 bits: when they run out, all causes are forgotten.
_MAX_CAUSES = (1 << 16) - 1
# A longer reason of a replica is cut.
_MAX_REASON_CHARS = 40


class RemovalCause(NamedTuple):
    """Where and why blocks were removed. `reason` as in `BlocksRemoved`, or "left" where the replica itself
    has gone; "": not known."""

    replica_id: str
    tier: str
    reason: str


class Removal(NamedTuple):
    """Why a block was removed, and when, by the clock."""

    cause: RemovalCause
    at: float


class BlockHistory:
    """Remembers blocks by a hash of their keys.

        stored   --> seen
        removed  --> seen, and removed there, then, for this reason (the latest counts)

    A block is in one of the `_WAYS` slots of its bucket. A new one takes a free slot; where there is none, it
    takes the slots in turn. So the history has about the latest `num_slots` blocks of the cluster, and never
    more. Time is an argument.
    """

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        assert num_slots >= _WAYS
        assert num_slots & (num_slots - 1) == 0, "a power of two"
        self._bucket_mask = (num_slots - 1) & ~(_WAYS - 1)
        # 0 marks a free slot.
        self._hashes = array("Q", bytes(8 * num_slots))
        self._removed_at = array("d", bytes(8 * num_slots))
        # By slot: the number of the cause; 0: it was not removed since it is remembered.
        self._slot_to_cause = array("H", bytes(2 * num_slots))
        self._causes = [RemovalCause("", "", "")]
        self._cause_to_number: dict[RemovalCause, int] = {}
        self._turn = 0

    def on_events(self, events: KvEvents, now: float) -> None:
        """Note the changes of a replica's prefix cache."""
        for removal in events.removed:
            reason = removal.reason[:_MAX_REASON_CHARS]
            self.removed(events.publisher.replica_id, removal.keys, removal.tier, reason, now)
        self.stored(events.stored)

    def stored(self, blocks: Iterable[BlocksStored]) -> None:
        """Note blocks that a replica has."""
        for each in blocks:
            for key in each.keys:
                self._slot(key)

    def removed(self, replica_id: str, keys: Iterable[bytes], tier: str, reason: str, at: float) -> None:
        """Note blocks that a replica has had no more since then, unless they were removed later elsewhere."""
        cause = self._number_of(RemovalCause(replica_id, tier, reason))
        removed_at, slot_to_cause = self._removed_at, self._slot_to_cause
        for key in keys:
            slot = self._slot(key)
            if removed_at[slot] <= at or not slot_to_cause[slot]:
                removed_at[slot] = at
                slot_to_cause[slot] = cause

    def was_seen(self, key: bytes) -> bool:
        """Return whether a replica is remembered to have had the block."""
        return self._find(_hash_of(key)) is not None

    def last_removal(self, key: bytes) -> Removal | None:
        """Return the last removal of the block; None: none is remembered."""
        slot = self._find(_hash_of(key))
        if slot is None or not self._slot_to_cause[slot]:
            return None
        return Removal(self._causes[self._slot_to_cause[slot]], self._removed_at[slot])

    def _find(self, hashed: int) -> int | None:
        start = hashed & self._bucket_mask
        bucket = self._hashes[start : start + _WAYS]
        return start + bucket.index(hashed) if hashed in bucket else None

    def _slot(self, key: bytes) -> int:
        """Return the slot of the block, which it gets now if it has none."""
        hashed = _hash_of(key)
        slot = self._find(hashed)
        if slot is None:
            slot = self._find_free(hashed)
            self._hashes[slot] = hashed
            self._slot_to_cause[slot] = 0
        return slot

    def _find_free(self, hashed: int) -> int:
        """Return a slot of the bucket of `hashed`: a free one, or the one whose turn it is."""
        start = hashed & self._bucket_mask
        bucket = self._hashes[start : start + _WAYS]
        if 0 in bucket:
            return start + bucket.index(0)
        self._turn = (self._turn + 1) % _WAYS
        return start + self._turn

    def _number_of(self, cause: RemovalCause) -> int:
        number = self._cause_to_number.get(cause)
        if number is None:
            if len(self._causes) > _MAX_CAUSES:
                self._slot_to_cause = array("H", bytes(2 * len(self._hashes)))
                self._cause_to_number.clear()
                del self._causes[1:]
            number = self._cause_to_number[cause] = len(self._causes)
            self._causes.append(cause)
        return number


def _hash_of(key: bytes) -> int:
    """Return the hash that Python keeps with the key, as an unsigned number other than 0."""
    return hash(key) & _HASH_BITS or 1
