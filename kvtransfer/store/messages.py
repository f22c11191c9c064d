"""Everything of the store that crosses a wall.

Four borders: brain and owner (the node's store process), rank and owner, brain and rank (store orders and
their reports), owner and owner. Keys are 16 bytes, offsets and sizes bytes, times seconds. An *offset* names
a record in the arena: where its header page starts; the payload follows after `HEADER_BYTES`. The file is
over 400 lines because what crosses a wall is listed in one place.
"""

from __future__ import annotations

from typing import Literal

from kvtransfer.codec import Codec, Message, Part
from kvtransfer.messages import BlocksStored, CompatibilityRecord, RankEndpoints, ReplicaIdentity, Shard

STORE_PROTOCOL = 3
HEADER_BYTES = 4096

# Where a block lies, the cheapest first. "remote": in a tier of another node.
Tier = Literal["dram", "nvme", "remote"]

# In a `PutGrant`: that record is in the host tier already, or is being written; nothing to do.
HELD = -1
# In a `PutGrant`: no room, no arena, or the tenant's share is used up.
REFUSED = -2


# ---------------------------------------------------------------------------------------------- records


class RecordId(Part, frozen=True):
    """What names a record: the space (model, dtype and block layout; `kvtransfer.store.record.space_id`), the
    block's chained key, and the part of the model whose KV it holds."""

    space: bytes
    key: bytes
    shard: Shard


class RecordInfo(Part, frozen=True):
    """A record as every tier knows it. `parent` is the key of the block before (b"" at the root), `chain` the
    first key of its chain, `num_bytes` its payload, `checksum` the payload's (`kvtransfer.blocks.checksum`)."""

    id: RecordId
    parent: bytes
    chain: bytes
    tenant: str
    # The model's fingerprint: what `tandem store purge --model` compares.
    model: bytes
    num_bytes: int
    checksum: int


# ------------------------------------------------------------------------------------- brain and owner


class EngineHello(Message, frozen=True):
    """Engine core to owner, first: whose records it will put and ask for. `session` is drawn once in a brain's life
    and shared with its ranks; `shards` are those of its ranks, in rank order."""

    protocol: int
    session: bytes
    replica: ReplicaIdentity
    compatibility: CompatibilityRecord
    shards: tuple[Shard, ...]


class StoreWelcome(Message, frozen=True):
    """Owner to brain: it may ask. Told again after every change of the rates (1e9 bytes a second, 0: not yet
    measured) at which the owner brings records into the host tier, by tier."""

    owner: ReplicaIdentity
    gb_s: dict[str, float]


class StoreRefusal(Message, frozen=True):
    """Owner to whoever connected: it cannot work with them; the connection closes."""

    reason: str


class NewRecord(Part, frozen=True):
    """A record that a rank wants to put."""

    key: bytes
    parent: bytes
    shard: Shard
    num_bytes: int


class PutRequest(Message, frozen=True):
    """Engine core to owner: room for these records, all of one chain and tenant. Answered by `PutGrant`."""

    number: int
    tenant: str
    chain: bytes
    records: tuple[NewRecord, ...]


class PutGrant(Message, frozen=True):
    """Owner to brain: where each record goes in the arena named `arena`, or `HELD`, or `REFUSED`. What is
    granted belongs to the session until it is committed or abandoned."""

    number: int
    arena: bytes
    offsets: tuple[int, ...]


class PutCommit(Message, frozen=True):
    """Engine core to owner: `written` are (offset, payload checksum) of records whose bytes are all there;
    `abandoned` are offsets that nobody writes (any more)."""

    written: tuple[tuple[int, int], ...]
    abandoned: tuple[int, ...] = ()


class FindRequest(Message, frozen=True):
    """Engine core to owner: which of these blocks (a chain or its rest) could be had? Answered within the look-up
    budget by `FindAnswer`."""

    number: int
    chain: bytes
    keys: tuple[bytes, ...]


class FindAnswer(Message, frozen=True):
    """Owner to brain: the tier of each leading block that can be had for all the session's shards; shorter
    than what was asked when a block is missing."""

    number: int
    tiers: tuple[Tier, ...]


class FetchRequest(Message, frozen=True):
    """Engine core to owner: bring these blocks into the host tier. `to_device`: their sources are told as they come
    (`FetchedBlocks`) and leased until `FetchRelease`; else they are only kept there for a while (a prefetch),
    and nothing is answered."""

    number: int
    chain: bytes
    keys: tuple[bytes, ...]
    to_device: bool


class Source(Part, frozen=True):
    """Rank `rank` finds `piece` of its shard of a block in the record of `shard` at `offset`."""

    rank: int
    offset: int
    shard: Shard
    piece: Shard
    num_bytes: int
    checksum: int


class FetchedBlocks(Message, frozen=True):
    """Owner to brain: the next blocks of a fetch, [first, first + len(blocks)) of its keys, each with the
    sources that together cover all the session's shards. After `is_last` nothing more comes: blocks beyond
    are a miss, because of `reason`."""

    number: int
    arena: bytes
    first: int
    blocks: tuple[tuple[Source, ...], ...]
    # From where each block came.
    tiers: tuple[Tier, ...]
    is_last: bool
    reason: str = ""


class FetchRelease(Message, frozen=True):
    """Engine core to owner: the fetch's leases end (before its last message it also stops). `bad` are offsets of
    records whose bytes had another sum: they leave all tiers of this node."""

    number: int
    bad: tuple[int, ...] = ()


class TierEvents(Message, frozen=True):
    """Owner to brain: what changed in this node's tiers for the session's space and shards. The first one
    after the welcome tells all there is. A block is told in its cheapest tier only; `removed` are in no tier
    of the node any more."""

    stored: tuple[BlocksStored, ...]
    removed: tuple[bytes, ...]


# -------------------------------------------------------------------------------------- rank and owner


class RankHello(Message, frozen=True):
    """Rank to owner, first, over the node's unix socket. With `arena` it has an arena mapped since before the
    owner started, and its descriptor comes with the next byte: the owner adopts it if it has none."""

    protocol: int
    session: bytes
    rank: int
    # The id of the arena; b"": none.
    arena: bytes


class ArenaGrant(Message, frozen=True):
    """Owner to rank: the arena's descriptor comes with the next byte (not when it is the offered one, then
    `is_yours`). The connection stays open as long as the rank has the arena mapped: its end proves that
    the rank writes no more."""

    arena: bytes
    num_bytes: int
    is_yours: bool


# -------------------------------------------------------------------------------------- brain and rank


class AttachStore(Message, frozen=True):
    """To every rank: connect to the owner at this abstract unix socket and map its arena (again, when the
    owner was restarted). Copies ordered before are finished first. Answered by `StoreAttached`."""

    address: str
    session: bytes


class StoreAttached(Message, frozen=True):
    """Answer: the arena that is mapped now, or why none is. Sent again, with an error, when the owner's
    connection ends."""

    arena: bytes
    error: str = ""


class StoreCopy(Part, frozen=True):
    """The rank's part of block `block_id` and the record at `offset`."""

    block_id: int
    offset: int


class StorePut(Message, frozen=True):
    """To one rank: copy these blocks into their records. Answered by `StorePutDone`."""

    number: int
    arena: bytes
    copies: tuple[StoreCopy, ...]


class StorePutDone(Message, frozen=True):
    """Answer: the payload's checksum of each copy, in order; empty with an error, after which none of them is
    written by this rank."""

    number: int
    sums: tuple[int, ...]
    num_bytes: int
    seconds: float
    error: str = ""


class StoreRead(Part, frozen=True):
    """Fill `piece` of block `block_id` from the record of `shard` at `offset`, whose payload of `num_bytes`
    must have this sum."""

    block_id: int
    offset: int
    shard: Shard
    piece: Shard
    num_bytes: int
    checksum: int


class StoreGet(Message, frozen=True):
    """To one rank: copy from records into blocks, and check every record read. Answered by `StoreGetDone`."""

    number: int
    arena: bytes
    reads: tuple[StoreRead, ...]


class StoreGetDone(Message, frozen=True):
    """Answer: `bad` are the indices of the reads whose record had another sum; all of them with an error."""

    number: int
    bad: tuple[int, ...]
    num_bytes: int
    seconds: float
    error: str = ""


# ------------------------------------------------------------------------------------- owner and owner


class OwnerHello(Message, frozen=True):
    """Owner to owner, first, over TCP: who asks. Records are exchanged in granules of the arenas."""

    protocol: int
    owner: ReplicaIdentity
    granule_bytes: int


class SendRecords(Message, frozen=True):
    """Owner to owner: write these records of yours into my arena. `granules[i]` are my granules that record i
    takes, header first; `target` is how my transfer agent is reached. Answered by `RecordsSent`."""

    landing_id: bytes
    target: RankEndpoints
    records: tuple[RecordId, ...]
    granules: tuple[tuple[int, ...], ...]


class RecordsSent(Message, frozen=True):
    """Answer: these are written and visible, whole; (index in the request, checksum of the payload). The
    others are not held any more, or could not be sent. Nothing of the landing is written after this."""

    landing_id: bytes
    sent: tuple[tuple[int, int], ...]
    reason: str = ""


class StopSending(Message, frozen=True):
    """Owner to owner: not wanted any more; `RecordsSent` still comes, when nothing is written any more."""

    landing_id: bytes


# ------------------------------------------------------------------------------------ admin and owner


class AdminHello(Message, frozen=True):
    """First of whoever asks about or purges the store."""

    protocol: int


class StatRequest(Message, frozen=True):
    """Answered by `StoreStat`."""


class TierStat(Part, frozen=True):
    """One tier of a node. Bytes are of whole records (header and padding); counters grow from the owner's
    start. `num_written_bytes` over `num_put_bytes` is the write amplification."""

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
    # What is wrong with it; "" while all is well.
    note: str = ""


class IndexStat(Part, frozen=True):
    """The owner's view of the cluster-wide index. `state` is "off", "up", "slow" (look-ups are cut off) or
    "down"."""

    state: str
    num_lookups: int = 0
    # Look-ups that the budget cut off.
    num_late: int = 0
    num_errors: int = 0
    num_announced: int = 0
    # Announcements that found no room in the queue; the index heals later.
    num_dropped: int = 0
    num_rebuilds: int = 0
    latency_s: float = 0.0
    note: str = ""


class StoreStat(Message, frozen=True):
    """Of one node."""

    owner: ReplicaIdentity
    tiers: tuple[TierStat, ...]
    index: IndexStat
    bytes_by_tenant: dict[str, int] = {}
    num_sessions: int = 0


class ListRequest(Message, frozen=True):
    """Records of this node, filtered; `model` is a prefix of the fingerprint in hex. Answered by
    `StoreListing`."""

    tenant: str | None
    model: str | None
    limit: int


class ListedRecord(Part, frozen=True):
    """A record and the tiers of this node that hold it."""

    info: RecordInfo
    tiers: tuple[Tier, ...]
    num_hits: int


class StoreListing(Message, frozen=True):
    """Answer: the most recently used first; `num_matching` in all."""

    records: tuple[ListedRecord, ...]
    num_matching: int


class VerifyRequest(Message, frozen=True):
    """Read every record of every tier of this node and compare its sum; bad ones are dropped."""

    tenant: str | None
    model: str | None


class VerifyResult(Message, frozen=True):
    """Answer to `VerifyRequest`, by tier: records read, and those that were bad."""

    num_read: dict[str, int]
    num_bad: dict[str, int]
    num_bytes: int
    seconds: float


class PurgeRequest(Message, frozen=True):
    """Delete from every tier of this node, so that no restart brings it back; None: of all."""

    tenant: str | None
    model: str | None


class PurgeResult(Message, frozen=True):
    """Answer to `PurgeRequest`: records and bytes deleted, by tier. Records that were leased or being written
    are deleted too, as soon as their last user is done (`num_pending`); they cannot be found any more."""

    num_records: dict[str, int]
    num_bytes: dict[str, int]
    num_pending: int


class AdminFailed(Message, frozen=True):
    """Answer instead of a result."""

    reason: str


StoreOrder = AttachStore | StorePut | StoreGet
StoreReport = StoreAttached | StorePutDone | StoreGetDone
EngineRequest = EngineHello | PutRequest | PutCommit | FindRequest | FetchRequest | FetchRelease
AdminRequest = AdminHello | StatRequest | ListRequest | VerifyRequest | PurgeRequest
AdminAnswer = StoreStat | StoreListing | VerifyResult | PurgeResult | AdminFailed
ToOwner = EngineRequest | RankHello | AdminRequest | OwnerHello | SendRecords | StopSending
FromOwner = (
    StoreWelcome
    | StoreRefusal
    | PutGrant
    | FindAnswer
    | FetchedBlocks
    | TierEvents
    | ArenaGrant
    | OwnerHello
    | RecordsSent
    | AdminAnswer
)

TO_OWNER_CODEC: Codec[ToOwner] = Codec(ToOwner)
FROM_OWNER_CODEC: Codec[FromOwner] = Codec(FromOwner)
