"""The prefix tree: which replica holds which block where, fed by KV events, snapshots and predictions.

The router's service owns one tree and looks up, for each request, how much of the prompt each replica holds.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple

from kvtransfer.common.clock import Clock
from kvtransfer.kv_events import BlocksStored, KvEvents, KvSnapshot
from kvtransfer.messages import ReplicaIdentity
from router.block_history import BlockHistory, Removal, RemovalCause
from router.block_holder import MARK_BIT, SLOT_BITS, TIER_TO_BIT, BlockHolder, PrefixPrediction, StoreTier
from router.departed_replica import DepartedReplica
from router.holder_masks import CompiledMasks, HolderMasks, PlainMasks
from router.messages import BlockPlace
from router.native import RouterKernel
from router.prefix_match import Counts, Match

# While a snapshot is awaited, a gap is reported again only this often: one request, not one per event.
SNAPSHOT_WAIT_S = 2.0

# Outdated blocks, and those of departed replicas, that are forgotten when a part of a snapshot comes, events
# come, or a prompt is matched: in one to two milliseconds, and in some tenths of one. The rest follows when
# the tree is used again. Parts forget more blocks than they bring, so that replicas that come and go do not
# leave more and more.
_FORGOTTEN_BY_PART = 1024
_FORGOTTEN_BY_EVENTS = 256
_FORGOTTEN_BY_MATCH = 128

# Keys that are looked up before it is asked whether anybody has the last of them.
_MATCHED_AT_ONCE = 256

_BIT_TO_TIER = ("device", "dram", "nvme")
# Places of a block that are looked up.
_MAX_PLACES = 8
_WORD_BYTES = 8
_SLOTS_PER_WORD = 8 * _WORD_BYTES // SLOT_BITS


class Expectation(NamedTuple):
    """The keys that a request will compute at a replica for which it waits."""

    holder: BlockHolder
    keys: tuple[bytes, ...]
    marks: tuple[bytes, ...]


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

    What the store of a replica's node holds has bits of its own, by tier. A prefix is a chain: blocks in the
    store count only when all before them are on the device or in the store. The running conjunction of the
    masks says who still has the prefix at each block, for 16 replicas a word (`count_blocks`).

    Where layers of a replica have windows or states, it can continue a prompt only behind blocks that it has
    marked (`kvtransfer.kv_events`): of such a replica a match counts the blocks up to the last such place.

    Nodes are single keys and not compressed runs, on purpose. Events name single keys, with parents that
    may be unknown here, so every key needs its own entry anyway (190 bytes with one holder); compressed runs
    would also split wherever one replica's cache ends. Comparing 128 keys as one run, the least that a
    compressed tree needs, takes 1 to 2 us; `benchmarks/router.py` measures that, a match and a decision.

    Memory is bounded by what replicas report, plus the predictions of the last `prediction_ttl_s`; a key
    without holders is deleted. A prediction counts as held until an event confirms it or its time is over.
    What is outdated by a snapshot, and what a removed replica had, is forgotten in parts, with every use.
    """

    def __init__(
        self,
        clock: Clock,
        prediction_ttl_s: float,
        kernel: RouterKernel | None = None,
        history: BlockHistory | None = None,
    ) -> None:
        """Without a `kernel` matches are counted in Python. What becomes of blocks is noted in `history`."""
        self._history = history
        self._clock = clock
        self._kernel = kernel
        self._prediction_ttl_s = prediction_ttl_s
        self._key_to_mask: HolderMasks = PlainMasks() if kernel is None else CompiledMasks(kernel)
        self._holders: dict[str, BlockHolder] = {}
        # Replaced whenever it changes: matches keep the one of their time.
        self._id_to_slot: Mapping[str, int] = {}
        self._slot_to_id: list[str] = []
        self._free_slots: list[int] = []
        # The removed replicas that are not forgotten yet, by slot, in the order in which they left.
        self._departed: dict[int, DepartedReplica] = {}
        self._predictions: deque[PrefixPrediction] = deque()
        # The replicas of which outdated blocks are left to be forgotten.
        self._to_forget: dict[str, BlockHolder] = {}
        # The marks that each replica needs, by slot; None: no replica needs any.
        self._marks_needed: Counts | None = None

    def add_replica(self, identity: ReplicaIdentity) -> None:
        """Add this epoch of the replica with no known blocks, and wipe the blocks of an earlier epoch."""
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
        self._holders[identity.replica_id] = BlockHolder(identity, slot)
        self._id_to_slot = {**self._id_to_slot, identity.replica_id: slot}
        self._note_marks()

    def remove_replica(self, replica_id: str) -> None:
        """Count nothing of the replica any more. Its blocks are forgotten in parts, while the tree is used.
        Then no mask has its bits, and its slot is free."""
        holder = self._holders.pop(replica_id, None)
        if holder is None:
            return
        self._to_forget.pop(replica_id, None)
        self._slot_to_id[holder.slot] = ""
        self._id_to_slot = {name: it.slot for name, it in self._holders.items()}
        self._note_marks()
        self._departed[holder.slot] = DepartedReplica(holder, self._clock.now())
        self._forget(_FORGOTTEN_BY_PART)

    def slot(self, replica_id: str) -> int:
        """Return where a `Match` counts a known replica, until it is removed."""
        return self._id_to_slot[replica_id]

    def apply_events(self, events: KvEvents) -> bool:
        """Apply one batch. Returns False after a gap or for an unknown epoch: the caller requests a snapshot.

        Until the snapshot arrives events are ignored, and False is repeated only every `SNAPSHOT_WAIT_S`.
        A key both removed and stored in one batch counts as stored. Parents are not needed (see the class).
        """
        self._forget(_FORGOTTEN_BY_EVENTS)
        holder = self._holders.get(events.publisher.replica_id)
        if holder is None or holder.identity.epoch != events.publisher.epoch:
            return False
        if holder.in_step:
            if events.sequence <= holder.sequence:
                return True
            if events.sequence == holder.sequence + 1:
                holder.sequence = events.sequence
                if self._history is not None:
                    self._history.on_events(events, self._clock.now())
                for removal in events.removed:
                    if removal.tier == "device":
                        self._remove(holder, removal.keys)
                    else:
                        self._unstore(holder, removal.keys)
                self._take(holder, events.stored)
                if events.unmarked or events.marked:
                    self._unmark(holder, events.unmarked)
                    self._mark(holder, events.marked)
                return True
            holder.in_step = False
            holder.next_part = 0
        now = self._clock.now()
        if holder.asked_at is not None and now - holder.asked_at < SNAPSHOT_WAIT_S:
            return True
        holder.asked_at = now
        return False

    def apply_snapshot(self, snapshot: KvSnapshot) -> bool:
        """Replace the blocks that the replica held, part by part. Return False, and ignore the snapshot, for
        another epoch, an older sequence, or a part that is not the next one."""
        self._forget(_FORGOTTEN_BY_PART)
        holder = self._holders.get(snapshot.publisher.replica_id)
        if holder is None or holder.identity.epoch != snapshot.publisher.epoch:
            return False
        if snapshot.part:
            if not holder.in_step or snapshot.part != holder.next_part:
                return False
        elif holder.in_step and snapshot.sequence < holder.sequence:
            return False
        else:
            holder.begin_snapshot()
            holder.marks_needed = snapshot.marks_needed
            self._note_marks()
        self._take(holder, snapshot.stored)
        if self._history is not None:
            self._history.stored(snapshot.stored)
        self._mark(holder, snapshot.marked)
        holder.sequence = snapshot.sequence
        holder.in_step = True
        holder.asked_at = None
        holder.next_part = snapshot.next_part
        if holder.outdated and not holder.next_part:
            self._to_forget[holder.identity.replica_id] = holder
            self._forget(_FORGOTTEN_BY_PART)
        return True

    def needs_snapshot(self, replica_id: str) -> bool:
        """Whether the replica's events are ignored until a snapshot arrives."""
        holder = self._holders.get(replica_id)
        return holder is not None and not holder.in_step

    def predict(self, replica_id: str, keys: tuple[bytes, ...]) -> PrefixPrediction | None:
        """Count these blocks as held by the replica until confirmed, at most for `prediction_ttl_s`. Return
        None where all are confirmed, or the replica is not known."""
        holder = self._holders.get(replica_id)
        if holder is None:
            return None
        self._expire()
        unconfirmed = tuple(holder.held.missing(keys))
        marks = holder.foreseen(keys)
        if not unconfirmed and not holder.marked.missing(marks):
            return None
        until = self._clock.now() + self._prediction_ttl_s
        renewed = frozenset(holder.predicted.keys() & unconfirmed)
        prediction = PrefixPrediction(until, holder, unconfirmed, marks, renewed)
        holder.predicted.update(dict.fromkeys(unconfirmed, prediction))
        self._key_to_mask.set_bit(holder.device_bit, unconfirmed)
        self._foresee(holder, marks)
        self._predictions.append(prediction)
        return prediction

    def retract(self, prediction: PrefixPrediction) -> None:
        """Do not count the blocks of a prompt as held that will not be computed there after all. What another
        prompt predicts, too, is kept, and marks mean nothing without their blocks."""
        predicted = prediction.holder.predicted
        keys = [key for key in prediction.keys if predicted.get(key) is prediction]
        self._end(prediction, [key for key in keys if key not in prediction.renewed])

    def expect(self, replica_id: str, keys: tuple[bytes, ...]) -> Expectation | None:
        """Count these blocks as held by the replica until `withdraw`: a request waits that will compute them
        there. None: there are none, or the replica is not known."""
        holder = self._holders.get(replica_id)
        if holder is None or not keys:
            return None
        numbers = holder.num_expecting
        new = [key for key in keys if key not in numbers]
        for key in keys:
            numbers[key] = numbers.get(key, 0) + 1
        self._key_to_mask.set_bit(holder.device_bit, new)
        marks = holder.foreseen(keys)
        self._foresee(holder, marks)
        return Expectation(holder, keys, marks)

    def withdraw(self, expectation: Expectation) -> None:
        """Do not expect these blocks any more. Whatever else says that the replica holds them stays."""
        holder, keys, marks = expectation
        numbers = holder.num_expecting
        if self._holders.get(holder.identity.replica_id) is not holder:
            return
        over = [key for key in keys if numbers[key] == 1]
        for key in keys:
            numbers[key] -= 1
        for key in over:
            del numbers[key]
        self._clear_device(holder, over)
        self._unforesee(holder, marks)

    def match(self, keys: Sequence[bytes], most_blocks: int | None = None) -> Match:
        """Count for each replica how many of the leading keys it has, and where: it continues in the store
        where its device part ends, until a block is in neither. A replica with marks can continue behind the
        last block that is counted, and this is among the first `most_blocks` (None: any)."""
        self._expire()
        num_words = max(1, -(-len(self._slot_to_id) // _SLOTS_PER_WORD))
        num_slots = num_words * _SLOTS_PER_WORD
        counts = (ctypes.c_int32 * (3 * num_slots))()
        most = len(keys) if most_blocks is None else max(0, most_blocks)
        needed, kernel = self._marks_needed, self._kernel
        if kernel is None or not isinstance(self._key_to_mask, CompiledMasks):
            masks = self._masks(keys)
            count_blocks(masks, num_slots, counts)
            if needed is not None:
                limit_to_marks(masks[:most], num_slots, counts, needed)
        else:
            words, num_found = self._key_to_mask.leading(keys, num_words)
            kernel.count_blocks(words, num_found, num_words, counts)
            if needed is not None:
                most = min(most, num_found)
                kernel.limit_to_marks(words, num_words, most, counts, needed, len(needed))
        for slot in self._departed:
            counts[slot] = counts[num_slots + slot] = counts[2 * num_slots + slot] = 0
        return Match(self._id_to_slot, counts, num_slots)

    def reports(self, replica_id: str, key: bytes) -> bool:
        """Return whether the replica has reported to have the block, on its device or in its store."""
        holder = self._holders.get(replica_id)
        return holder is not None and (key in holder.held or key in holder.stored)

    def places_state(self, key: bytes, without: str) -> tuple[int, int]:
        """Return a value that is equal for blocks with the same `places` (0 twice: there are none), at a
        fraction of their cost."""
        found = expected = 0
        for slot, bit in self._place_bits(key, without):
            found |= bit
            if bit == 1 << SLOT_BITS * slot and key not in self._holders[self._slot_to_id[slot]].held:
                expected |= bit
        return found, expected

    def places(self, key: bytes, without: str) -> list[BlockPlace]:
        """Return where a block is, or is expected to be, `without` this replica: the tiers of replicas that
        have it, at most `_MAX_PLACES`."""
        found: list[BlockPlace] = []
        for slot, bit in self._place_bits(key, without):
            tier = _BIT_TO_TIER[bit.bit_length() - 1 - SLOT_BITS * slot]
            replica_id = self._slot_to_id[slot]
            is_expected = tier == "device" and key not in self._holders[replica_id].held
            found.append(BlockPlace(replica_id, tier, is_expected))
        return found

    def _place_bits(self, key: bytes, without: str) -> Iterator[tuple[int, int]]:
        """Yield the first bits of a block's mask that stand for tiers, each with its slot."""
        (mask,) = self._key_to_mask.found((key,))
        own = self._id_to_slot.get(without)
        num_found = 0
        while mask and num_found < _MAX_PLACES:
            bit = mask & -mask
            mask ^= bit
            slot, kind = divmod(bit.bit_length() - 1, SLOT_BITS)
            if kind != MARK_BIT and slot != own and slot not in self._departed:
                num_found += 1
                yield slot, bit

    def left_with(self, key: bytes) -> Removal | None:
        """Return the removal of a block by the departure of a replica that is not in the history yet; None:
        there is none."""
        for departed in reversed(self._departed.values()):
            if tier := departed.where(key):
                return Removal(RemovalCause(departed.replica_id, tier, "left"), departed.left_at)
        return None

    @property
    def num_keys(self) -> int:
        """Number of distinct block keys that any replica holds, or that are to be forgotten."""
        return len(self._key_to_mask)

    def num_held(self, replica_id: str) -> int:
        """Return the number of block keys that the replica reported to be on its device."""
        holder = self._holders.get(replica_id)
        return 0 if holder is None else len(holder.held)

    def num_stored(self, replica_id: str) -> int:
        """Return the number of block keys that the replica reported to be in its node's store."""
        holder = self._holders.get(replica_id)
        return 0 if holder is None else len(holder.stored)

    def num_reported(self, replica_id: str) -> int:
        """Return the number of blocks that the replica reported, on its device and in the store."""
        return self.num_held(replica_id) + self.num_stored(replica_id)

    def num_marked(self, replica_id: str) -> int:
        """Return the number of block keys that the replica reported to be marked."""
        holder = self._holders.get(replica_id)
        return 0 if holder is None else len(holder.marked)

    def check(self) -> None:
        """Assert that masks, holders and slots agree, and that no forgotten replica left a trace."""
        expected: dict[bytes, int] = {}
        # Bits of outdated blocks and departed replicas may be there still, and may be cleared already.
        allowed: dict[bytes, int] = {}

        def add(masks: dict[bytes, int], bit: int, keys: Iterable[bytes]) -> None:
            for key in keys:
                masks[key] = masks.get(key, 0) | 1 << bit

        for replica_id, holder in self._holders.items():
            assert self._slot_to_id[holder.slot] == replica_id
            assert self.slot(replica_id) == holder.slot
            assert not any(key in holder.held for key in holder.predicted)
            assert all(number > 0 for number in holder.num_expecting.values())
            assert all(number > 0 for number in holder.num_foreseen.values())
            assert not holder.next_part or holder.in_step
            add(expected, holder.device_bit, (*holder.held, *holder.predicted, *holder.num_expecting))
            add(expected, holder.mark_bit, (*holder.marked, *holder.num_foreseen))
            for key, tier in holder.stored.items():
                add(expected, holder.store_bits[tier], (key,))
            for outdated in holder.outdated:
                add(allowed, holder.device_bit, outdated.held)
                add(allowed, holder.mark_bit, outdated.marked)
                for key, tier in outdated.stored.items():
                    add(allowed, holder.store_bits[tier], (key,))
        for departed in self._departed.values():
            assert departed.slot not in self._free_slots
            assert not self._slot_to_id[departed.slot]
            for bit, its_keys in departed.bits():
                add(allowed, bit, its_keys)
        known = tuple({**expected, **allowed})
        num_found = 0
        for start in range(0, len(known), _MATCHED_AT_ONCE):
            keys = known[start : start + _MATCHED_AT_ONCE]
            for key, mask in zip(keys, self._key_to_mask.found(keys), strict=True):
                wanted = expected.get(key, 0)
                assert mask & wanted == wanted
                assert not mask & ~(wanted | allowed.get(key, 0))
                num_found += mask > 0
        assert num_found == len(self._key_to_mask), "a forgotten replica left a trace"
        assert self._id_to_slot.keys() == self._holders.keys()
        assert len(self._slot_to_id) == len(self._holders) + len(self._departed) + len(self._free_slots)

    def _masks(self, keys: Sequence[bytes]) -> list[int]:
        """Return the masks of the leading keys, without those behind one that no replica has."""
        masks: list[int] = []
        for start in range(0, len(keys), _MATCHED_AT_ONCE):
            found = self._key_to_mask.found(keys[start : start + _MATCHED_AT_ONCE])
            if 0 in found:
                return masks + found[: found.index(0)]
            masks += found
        return masks

    def _take(self, holder: BlockHolder, stored: Iterable[BlocksStored]) -> None:
        for tier, chains in groupby(stored, attrgetter("tier")):
            keys = tuple(chain.from_iterable(blocks.keys for blocks in chains))
            if tier == "device":
                self._hold(holder, keys)
            else:
                self._store(holder, keys, tier)

    def _hold(self, holder: BlockHolder, keys: Sequence[bytes]) -> None:
        if predicted := holder.predicted:
            for key in keys:
                predicted.pop(key, None)
        holder.held.set_all(keys, None)
        self._key_to_mask.set_bit(holder.device_bit, keys)

    def _store(self, holder: BlockHolder, keys: Sequence[bytes], tier: StoreTier) -> None:
        slices, num_slices = holder.stored.slices, len(holder.stored.slices)
        moved = [key for key in keys if slices[hash(key) % num_slices].get(key, tier) != tier]
        self._unstore(holder, moved)
        holder.stored.set_all(keys, tier)
        self._key_to_mask.set_bit(holder.store_bits[tier], keys)

    def _remove(self, holder: BlockHolder, keys: Iterable[bytes]) -> None:
        self._clear_device(holder, holder.held.discard_all(keys))

    def _unstore(self, holder: BlockHolder, keys: Iterable[bytes]) -> None:
        popped = [(key, holder.stored.pop(key)) for key in keys]
        self._clear_store(holder, [(key, tier) for key, tier in popped if tier is not None])

    def _clear_store(self, holder: BlockHolder, blocks: Collection[tuple[bytes, StoreTier]]) -> None:
        """Clear the bits of the tiers from which these blocks are gone."""
        for tier, bit in holder.store_bits.items() if blocks else ():
            self._key_to_mask.clear_bit(bit, [key for key, its in blocks if its == tier])

    def _expire(self) -> None:
        self._forget(_FORGOTTEN_BY_MATCH)
        now = self._clock.now()
        while self._predictions and self._predictions[0].until <= now:
            prediction = self._predictions.popleft()
            predicted = prediction.holder.predicted
            self._end(prediction, [key for key in prediction.keys if predicted.get(key) is prediction])
            self._unforesee(prediction.holder, prediction.marks)

    def _end(self, prediction: PrefixPrediction, keys: Sequence[bytes]) -> None:
        """Predict these of its keys no longer, of which no other prediction is newer."""
        for key in keys:
            del prediction.holder.predicted[key]
        self._clear_device(prediction.holder, keys)

    def _forget(self, most: int) -> None:
        """Forget `most` of the blocks that replicas had before a snapshot and not after it, which count until
        then; and where there are none, of the blocks of departed replicas."""
        if self._to_forget:
            self._forget_outdated(next(iter(self._to_forget.values())), most)
        elif self._departed:
            slot, departed = next(iter(self._departed.items()))
            if departed.forget(most, self._key_to_mask, self._history):
                del self._departed[slot]
                self._free_slots.append(slot)

    def _forget_outdated(self, holder: BlockHolder, most: int) -> None:
        """Forget `most` of the blocks on the device, as many in the store, and as many marks."""
        held, stored, marked = holder.outdated[-1]
        forgotten = [key for key, _ in held.pop_some(most)]
        if self._history is not None and (gone_from_device := holder.held.missing(forgotten)):
            name, now = holder.identity.replica_id, self._clock.now()
            self._history.removed(name, gone_from_device, "device", "", now)
        self._clear_device(holder, forgotten)
        gone = stored.pop_some(most)
        self._clear_store(holder, [(key, tier) for key, tier in gone if holder.stored.get(key) != tier])
        self._clear_mark(holder, [key for key, _ in marked.pop_some(most)])
        if held or stored or marked:
            return
        holder.outdated.pop()
        if not holder.outdated:
            del self._to_forget[holder.identity.replica_id]

    def _note_marks(self) -> None:
        """Note the marks that each replica needs."""
        needed = [0] * len(self._slot_to_id)
        for holder in self._holders.values():
            needed[holder.slot] = holder.marks_needed
        self._marks_needed = (ctypes.c_int32 * len(needed))(*needed) if any(needed) else None

    def _mark(self, holder: BlockHolder, keys: Sequence[bytes]) -> None:
        holder.marked.set_all(keys, None)
        self._key_to_mask.set_bit(holder.mark_bit, keys)

    def _unmark(self, holder: BlockHolder, keys: Iterable[bytes]) -> None:
        holder.marked.discard_all(keys)
        self._clear_mark(holder, keys)

    def _foresee(self, holder: BlockHolder, keys: Sequence[bytes]) -> None:
        """Count these blocks as marked until `_unforesee`."""
        for key in keys:
            holder.num_foreseen[key] = holder.num_foreseen.get(key, 0) + 1
        self._key_to_mask.set_bit(holder.mark_bit, keys)

    def _unforesee(self, holder: BlockHolder, keys: Iterable[bytes]) -> None:
        if self._holders.get(holder.identity.replica_id) is not holder:
            return
        for key in keys:
            holder.num_foreseen[key] -= 1
            if not holder.num_foreseen[key]:
                del holder.num_foreseen[key]
        self._clear_mark(holder, keys)

    def _clear_mark(self, holder: BlockHolder, keys: Iterable[bytes]) -> None:
        gone = [key for key in keys if key not in holder.marked and key not in holder.num_foreseen]
        self._key_to_mask.clear_bit(holder.mark_bit, gone)

    def _clear_device(self, holder: BlockHolder, keys: Sequence[bytes]) -> None:
        """Clear the device's bit of the keys that are known to be there from no other source."""
        held, predicted, expected = holder.held, holder.predicted, holder.num_expecting
        gone = [key for key in held.missing(keys) if not (key in predicted or key in expected)]
        self._key_to_mask.clear_bit(holder.device_bit, gone)


def count_blocks(masks: Sequence[int], num_slots: int, counts: Counts) -> None:
    """Count the leading blocks that each replica has, as `Match` describes and `router.native.RouterKernel`
    does in compiled code."""
    device = reached = int("1" * num_slots, 16)
    last = [0, 0, 0]
    for position, mask in enumerate([*masks, 0]):
        dram = mask >> TIER_TO_BIT["dram"]
        device &= mask
        reached &= device | dram | mask >> TIER_TO_BIT["nvme"]
        in_dram = dram & reached & ~device
        for tier, bits in enumerate((device, in_dram, reached & ~device & ~in_dram)):
            if bits != last[tier]:
                _count_changes(last[tier], bits, position, counts, tier * num_slots)
                last[tier] = bits


def limit_to_marks(masks: Sequence[int], num_slots: int, counts: Counts, marks_needed: Iterable[int]) -> None:
    """Cut what is counted of each replica with marks to the last block behind which it can continue."""
    for slot, needed in enumerate(marks_needed):
        num_device, num_dram, num_nvme = (counts[tier * num_slots + slot] for tier in range(3))
        num_counted = num_device + num_dram + num_nvme
        if not needed or not num_counted:
            continue
        bits = [mask >> SLOT_BITS * slot for mask in masks[:num_counted]]
        end = num_marked = 0
        for position, each in enumerate(bits, 1):
            num_marked = num_marked + 1 if each >> MARK_BIT & 1 else 0
            if num_marked >= min(needed, position):
                end = position
        if end < num_counted:
            counts[slot] = num_device = min(num_device, end)
            in_dram = sum(each >> TIER_TO_BIT["dram"] & 1 for each in bits[num_device:end])
            counts[num_slots + slot] = in_dram
            counts[2 * num_slots + slot] = end - num_device - in_dram


def _count_changes(before: int, now: int, position: int, counts: Counts, start: int) -> None:
    """Count the positions from which on a bit is set to that from which on it is not any more."""
    changed = before ^ now
    while changed:
        lowest = changed & -changed
        slot = start + lowest.bit_length() // SLOT_BITS
        counts[slot] += position if before & lowest else -position
        changed ^= lowest
