"""KV events, from an engine core to the watchers of its prefix cache.

Blocks are named by the KV of layers that see all tokens. Where other groups of layers have a window, or keep
a state, what these need of a prefix may be gone while the blocks are still there. A block is *marked* where
all such groups have theirs of it: their KV of the block, or the state behind it, on the device or in the
node's store. A prompt can be continued behind a block when it is marked, and as many before it as the longest
window reaches, `marks_needed` in all.
"""

from __future__ import annotations

from typing import Literal

from kvtransfer.codec import Message, Part
from kvtransfer.messages import ReplicaIdentity


class BlocksStored(Part, frozen=True):
    """Blocks `keys` (a chain, each the child of the one before) follow `parent` (b"" at the root) and are
    held in `tier`. What the node's store holds is reported in its cheapest tier, whether or not the device
    holds it too."""

    parent: bytes
    keys: tuple[bytes, ...]
    tier: Literal["device", "dram", "nvme"] = "device"


class BlocksRemoved(Part, frozen=True):
    """These blocks are no longer held on the device, or in no tier of the node's store, all for one reason:

    - "space": space was needed, and these were the least recently used, or on NVMe not used since they were
      written
    - "share": their sharing group had more than its share
    - "offloaded": a sequence that has to wait was moved to host memory with them
    - "purged": by an order of an operator
    - "corrupt": a copy in the store could not be read, or had a wrong checksum
    - "lost": the store had them when the connection to its owner ended, and not when it was there again
    - "": not known
    """

    keys: tuple[bytes, ...]
    tier: Literal["device", "store"] = "device"
    reason: str = ""


class KvEvents(Message, frozen=True):
    """What changed in a replica's prefix cache since sequence number `sequence - 1`. A watcher that sees a
    gap, or another epoch, asks for a snapshot. Blocks `marked` are so from now on, the `unmarked` are not."""

    publisher: ReplicaIdentity
    sequence: int
    stored: tuple[BlocksStored, ...]
    removed: tuple[BlocksRemoved, ...]
    marked: tuple[bytes, ...] = ()
    unmarked: tuple[bytes, ...] = ()


class KvSnapshot(Message, frozen=True):
    """All a replica holds, as (parent, key) chains, valid up to and including `sequence`; and the blocks that
    are marked. With `marks_needed` 0 no layer has a window or a state, and none is.

    A watcher that takes parts gets one at a time, and asks for the one that the last names as `next_part`,
    until that is 0. Events come in between, and each part has what is held as it is made. After the last one
    the watcher therefore knows all that is held then: whatever neither a part nor an event named is gone."""

    publisher: ReplicaIdentity
    sequence: int
    stored: tuple[BlocksStored, ...]
    marked: tuple[bytes, ...] = ()
    marks_needed: int = 0
    part: int = 0
    next_part: int = 0


class KvSnapshotRequest(Message, frozen=True):
    """A watcher's request for a snapshot, on connect or after a gap, or for its next part."""

    reason: str
    takes_parts: bool = False
    # The part that is wanted; 0 begins a snapshot, in place of one that has not ended.
    part: int = 0
