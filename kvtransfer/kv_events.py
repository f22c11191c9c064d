"""KV events, from an engine core to the watchers of its prefix cache."""

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
    """These blocks are no longer held on the device, or in no tier of the node's store."""

    keys: tuple[bytes, ...]
    tier: Literal["device", "store"] = "device"


class KvEvents(Message, frozen=True):
    """What changed in a replica's prefix cache since sequence number `sequence - 1`. A watcher that sees a
    gap, or another epoch, asks for a snapshot."""

    publisher: ReplicaIdentity
    sequence: int
    stored: tuple[BlocksStored, ...]
    removed: tuple[BlocksRemoved, ...]


class KvSnapshot(Message, frozen=True):
    """All a replica holds, as (parent, key) chains, valid up to and including `sequence`."""

    publisher: ReplicaIdentity
    sequence: int
    stored: tuple[BlocksStored, ...]


class KvSnapshotRequest(Message, frozen=True):
    """A watcher's request for a snapshot, on connect or after a gap."""

    reason: str
