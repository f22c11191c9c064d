"""What the prefix tree knows of one replica: the blocks that it reported, and those that are predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvtransfer.messages import ReplicaIdentity
from router.key_map import KeyMap, KeySet

StoreTier = Literal["dram", "nvme"]

# A mask has four bits for each replica: one for its device, one for each tier, and one for its mark.
SLOT_BITS = 4
MARK_BIT = 3
TIER_TO_BIT: dict[StoreTier, int] = {"dram": 1, "nvme": 2}


class OutdatedBlocks(NamedTuple):
    """Blocks that a replica had reported before a snapshot began: on its device, in the store, and marked."""

    held: KeySet
    stored: KeyMap[StoreTier]
    marked: KeySet


@dataclass(slots=True, eq=False)
class BlockHolder:
    """One epoch of a replica: its bits, the blocks that it reported, and those that are predicted."""

    identity: ReplicaIdentity
    slot: int
    # The numbers of its bits in masks.
    device_bit: int = field(init=False)
    mark_bit: int = field(init=False)
    store_bits: Mapping[StoreTier, int] = field(init=False)
    sequence: int = -1
    # True from a snapshot on, until a gap; events are applied only then.
    in_step: bool = False
    asked_at: float | None = None
    # The block keys on its device.
    held: KeySet = field(default_factory=KeySet)
    # The block keys in the store of its node, with their tier.
    stored: KeyMap[StoreTier] = field(default_factory=KeyMap)
    # The blocks that prompts are to leave there, with the newest prediction of each.
    predicted: dict[bytes, PrefixPrediction] = field(default_factory=dict)
    # How many requests that wait for the replica will compute the block there.
    num_expecting: dict[bytes, int] = field(default_factory=dict)
    # How many blocks are to be marked without a gap for a prompt to be continued behind the last; 0: none.
    marks_needed: int = 0
    # The marked blocks that it reported, and how many predictions and expectations there are of a mark.
    marked: KeySet = field(default_factory=KeySet)
    num_foreseen: dict[bytes, int] = field(default_factory=dict)
    # The next part of the snapshot that comes in; 0: none does.
    next_part: int = 0
    # What it had before snapshots. After the last part, whatever was not named again is forgotten.
    outdated: list[OutdatedBlocks] = field(default_factory=list)

    def __post_init__(self) -> None:
        shift = SLOT_BITS * self.slot
        self.device_bit, self.mark_bit = shift, shift + MARK_BIT
        self.store_bits = {tier: shift + bit for tier, bit in TIER_TO_BIT.items()}

    def begin_snapshot(self) -> None:
        """Set aside all that the replica has reported."""
        if self.held or self.stored or self.marked:
            self.outdated.append(OutdatedBlocks(self.held, self.stored, self.marked))
            self.held, self.stored, self.marked = KeySet(), KeyMap(), KeySet()

    def foreseen(self, keys: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Return the blocks of a prompt that the replica will mark when it has computed it. What windows have
        passed stays while there is space; of states, which one block marks, only the last is certain."""
        if self.marks_needed == 1:
            return keys[-1:]
        return keys if self.marks_needed else ()


class PrefixPrediction(NamedTuple):
    """The keys of one routed prompt that its replica had not reported, in the queue of what expires next."""

    until: float
    holder: BlockHolder
    keys: tuple[bytes, ...]
    marks: tuple[bytes, ...]
    # Those of the keys that were predicted there already, by another prompt.
    renewed: frozenset[bytes]
