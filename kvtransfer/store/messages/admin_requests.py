"""Administrator and owner: statistics, listings, checks and purges of a node's records."""

from __future__ import annotations

from kvtransfer.codec import Message, Part
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.store.messages.records import RecordInfo, Tier


class AdminHello(Message, frozen=True):
    """First message of an administrator."""

    protocol: int


class StatRequest(Message, frozen=True):
    """Ask for the statistics of all tiers. Answered by `StoreStat`."""


class TierStat(Part, frozen=True):
    """Statistics of one tier of a node. Bytes are of whole records (with header and padding); counters start
    with the owner. `num_written_bytes` over `num_put_bytes` is the write amplification."""

    tier: Tier
    num_bytes: int
    capacity_bytes: int
    num_records: int
    num_hits: int = 0
    num_misses: int = 0
    num_hit_bytes: int = 0
    num_put_bytes: int = 0
    num_written_bytes: int = 0
    num_evictions: int = 0
    num_refused: int = 0
    num_checksum_failures: int = 0
    num_io_errors: int = 0
    num_queued: int = 0
    num_leases: int = 0
    num_quarantined: int = 0
    read_gb_s: float = 0.0
    write_gb_s: float = 0.0
    # Moving average of one read (nvme), one fetch (remote).
    latency_s: float = 0.0
    # The fault of the tier, or "".
    note: str = ""


class IndexStat(Part, frozen=True):
    """Statistics of the cluster-wide index, as the owner sees it. `state` is "off", "up", "slow" (look-ups
    are cut off) or "down"."""

    state: str
    num_lookups: int = 0
    # Look-ups that the budget cut off.
    num_late: int = 0
    num_errors: int = 0
    num_announced: int = 0
    # Announcements that did not fit in the queue; a rebuild announces them later.
    num_dropped: int = 0
    num_rebuilds: int = 0
    latency_s: float = 0.0
    note: str = ""


class StoreStat(Message, frozen=True):
    """Statistics of one node's store."""

    owner: ReplicaIdentity
    tiers: tuple[TierStat, ...]
    index: IndexStat
    bytes_by_group: dict[str, int] = {}
    num_sessions: int = 0


class ListRequest(Message, frozen=True):
    """List records of this node; `model` is a prefix of the fingerprint in hex. Answered by
    `StoreListing`."""

    sharing_group: str | None
    model: str | None
    limit: int


class ListedRecord(Part, frozen=True):
    """Describes a record and the tiers of this node that hold it."""

    info: RecordInfo
    tiers: tuple[Tier, ...]
    num_hits: int


class StoreListing(Message, frozen=True):
    """Answer: the most recently used first; `num_matching` in all."""

    records: tuple[ListedRecord, ...]
    num_matching: int


class VerifyRequest(Message, frozen=True):
    """Verify the checksum of every record in every tier of this node, and drop the bad ones."""

    sharing_group: str | None
    model: str | None


class VerifyResult(Message, frozen=True):
    """Answer to `VerifyRequest`, by tier: the records that were read and those that were bad."""

    num_read: dict[str, int]
    num_bad: dict[str, int]
    num_bytes: int
    seconds: float


class PurgeRequest(Message, frozen=True):
    """Delete matching records (None: any) from every tier of this node, so that no restart brings them
    back."""

    sharing_group: str | None
    model: str | None


class PurgeResult(Message, frozen=True):
    """Answer to `PurgeRequest`: the number and bytes of the deleted records, by tier. Records that were
    leased or being written cannot be found any more, and are deleted when their last user is done
    (`num_pending`)."""

    num_records: dict[str, int]
    num_bytes: dict[str, int]
    num_pending: int


class AdminFailed(Message, frozen=True):
    """Answer instead of a result: why the request failed."""

    reason: str


AdminRequest = AdminHello | StatRequest | ListRequest | VerifyRequest | PurgeRequest
AdminAnswer = StoreStat | StoreListing | VerifyResult | PurgeResult | AdminFailed
