"""Every message of the tiered store, and the constants that its processes share.

There are four connections: engine core to owner (the node's store server), rank to owner, engine core to rank
(orders to the store worker and their reports), and owner to owner. Keys are 16 bytes, offsets and sizes are
in bytes, times in seconds. An *offset* names a record in the arena: the position of its header page, which
the payload follows after `HEADER_BYTES`. The file is over 400 lines because all messages stand in one place.
"""

from __future__ import annotations

from typing import Literal, TypeVar

from kvtransfer.codec import Codec, Message, Part
from kvtransfer.errors import MAX_REASON_CHARS, StoreError, WireError, shown
from kvtransfer.messages import BlocksStored, CompatibilityRecord, RankEndpoints, ReplicaIdentity, Shard

STORE_PROTOCOL = 4
HEADER_BYTES = 4096
# The most bytes of a frame between an owner and an engine core, another owner or an administrator: blocks of
# a long prompt, or a listing. The messages of an owner to the engine cores of its node may be longer.
MAX_OWNER_BYTES = 16 << 20

# Where a block is held, the cheapest tier first. "remote": in a tier of another node.
Tier = Literal["dram", "nvme", "remote"]

# Stands in a `PutGrant` for a record that is already in the host tier, or is being written.
HELD = -1
# Stands in a `PutGrant` for one without space or arena, or whose group has used up its share.
REFUSED = -2


# ---------------------------------------------------------------------------------------------- records


class RecordId(Part, frozen=True):
    """Names a record: its space (model, dtype and block layout; `kvtransfer.store.record.space_id`), the
    block's chained key, and the part of the model whose KV the record holds."""

    space: bytes
    key: bytes
    shard: Shard


class RecordInfo(Part, frozen=True):
    """Describes a record in any tier. `parent` is the key of the preceding block (b"" at the root), `chain`
    the first key of its chain; `num_bytes` and `checksum` (`kvtransfer.blocks.checksum`) are the
    payload's."""

    id: RecordId
    parent: bytes
    chain: bytes
    sharing_group: str
    # The model's fingerprint: what `tandem store purge --model` compares.
    model: bytes
    num_bytes: int
    checksum: int


class PurgeOrder(Part, frozen=True):
    """Names the records to delete: of this group (None: of all), and of a model whose fingerprint in hex has
    this prefix (None: of any)."""

    sharing_group: str | None
    model: str | None

    def includes(self, info: RecordInfo) -> bool:
        """Whether the record is to be deleted."""
        is_of_group = self.sharing_group in (None, info.sharing_group)
        return is_of_group and (self.model is None or info.model.hex().startswith(self.model))


# ------------------------------------------------------------------------------- engine core and owner


class EngineHello(Message, frozen=True):
    """Engine core to owner, first: identifies the replica whose records it will put and fetch. The engine
    core draws `session` once and shares it with its ranks; `shards` are those of its ranks, in rank order."""

    protocol: int
    session: bytes
    replica: ReplicaIdentity
    compatibility: CompatibilityRecord
    shards: tuple[Shard, ...]


class StoreWelcome(Message, frozen=True):
    """Owner to engine core: requests are accepted. Sent again when the rates change at which the owner brings
    records into the host tier (by tier, in 1e9 bytes a second; 0: not yet measured)."""

    owner: ReplicaIdentity
    gb_s: dict[str, float]


class StoreRefusal(Message, frozen=True):
    """Owner to any client: the connection is refused and closes."""

    reason: str


class NewRecord(Part, frozen=True):
    """A record that a rank wants to put."""

    key: bytes
    parent: bytes
    shard: Shard
    num_bytes: int


class PutRequest(Message, frozen=True):
    """Engine core to owner: reserve space for these records of one chain and sharing group. Answered by
    `PutGrant`."""

    number: int
    sharing_group: str
    chain: bytes
    records: tuple[NewRecord, ...]


class PutGrant(Message, frozen=True):
    """Owner to engine core: the offset of each record in the arena named `arena`, or `HELD`, or `REFUSED`.
    Granted space belongs to the session until it is committed or abandoned."""

    number: int
    arena: bytes
    offsets: tuple[int, ...]


class PutCommit(Message, frozen=True):
    """Engine core to owner: `written` are (offset, payload checksum) of records that are written completely;
    `abandoned` are offsets that nobody writes (any more)."""

    written: tuple[tuple[int, int], ...]
    abandoned: tuple[int, ...] = ()


class FindRequest(Message, frozen=True):
    """Engine core to owner: which of these blocks (a chain or its rest) can be fetched? Answered by
    `FindAnswer` within the look-up budget."""

    number: int
    chain: bytes
    keys: tuple[bytes, ...]


class FindAnswer(Message, frozen=True):
    """Owner to engine core: the tier of each leading block that is available for all shards of the session;
    shorter than the request when a block is missing."""

    number: int
    tiers: tuple[Tier, ...]


class FetchRequest(Message, frozen=True):
    """Engine core to owner: bring these blocks into the host tier. With `to_device`, their sources are sent
    as they arrive (`FetchedBlocks`) and leased until `FetchRelease`. Otherwise this is a prefetch: the blocks
    are kept there for a while, and there is no answer. Their records belong to the sharing group."""

    number: int
    sharing_group: str
    chain: bytes
    keys: tuple[bytes, ...]
    to_device: bool


class Source(Part, frozen=True):
    """Rank `rank` reads `piece` of its shard of a block from the record of `shard` at `offset`."""

    rank: int
    offset: int
    shard: Shard
    piece: Shard
    num_bytes: int
    checksum: int


class FetchedBlocks(Message, frozen=True):
    """Owner to engine core: the next blocks of a fetch, [first, first + len(blocks)) of its keys, each with
    the sources that together cover all shards of the session. `is_last` ends the fetch: any further blocks
    are misses, because of `reason`."""

    number: int
    arena: bytes
    first: int
    blocks: tuple[tuple[Source, ...], ...]
    # The tier from which each block came.
    tiers: tuple[Tier, ...]
    is_last: bool
    reason: str = ""


class FetchRelease(Message, frozen=True):
    """Engine core to owner: end the leases of the fetch, and the fetch itself if it still runs. `bad` are the
    offsets of records with a wrong checksum, which are dropped from all tiers of this node."""

    number: int
    bad: tuple[int, ...] = ()


class TierEvents(Message, frozen=True):
    """Owner to engine core: changes of this node's tiers for the session's space and shards. The first one
    after the welcome lists all blocks. A block is listed in its cheapest tier only; `removed` blocks are in
    no tier of the node any more."""

    stored: tuple[BlocksStored, ...]
    removed: tuple[bytes, ...]


# -------------------------------------------------------------------------------------- rank and owner


class RankHello(Message, frozen=True):
    """Rank to owner, first, over the node's unix socket. With `arena` the rank offers an arena that it mapped
    before the owner started, and whose descriptor follows with the next byte: the owner adopts it if it has
    none."""

    protocol: int
    session: bytes
    rank: int
    # The id of the arena; b"": none.
    arena: bytes


class ArenaGrant(Message, frozen=True):
    """Owner to rank: the arena to map. Its descriptor follows with the next byte, unless it is the one that
    the rank offered (`is_yours`). The connection stays open as long as the rank has the arena mapped: its end
    proves that the rank writes no more."""

    arena: bytes
    num_bytes: int
    is_yours: bool


# -------------------------------------------------------------------------------- engine core and rank


class AttachStore(Message, frozen=True):
    """To every rank: connect to the owner at this abstract unix socket and map its arena (again, when the
    owner was restarted). Earlier orders are finished first. Answered by `StoreAttached`."""

    address: str
    session: bytes


class StoreAttached(Message, frozen=True):
    """Answer: the arena that is mapped now, or the reason why none is. Sent again, with an error, when the
    connection to the owner ends."""

    arena: bytes
    error: str = ""


class StoreCopy(Part, frozen=True):
    """Pairs the rank's part of block `block_id` with the record at `offset`."""

    block_id: int
    offset: int


class StorePut(Message, frozen=True):
    """To one rank: copy these blocks into their records. Answered by `StorePutDone`."""

    number: int
    arena: bytes
    copies: tuple[StoreCopy, ...]


class StorePutDone(Message, frozen=True):
    """Answer: the payload's checksum of each copy, in order. With an error there are none, and the rank
    writes none of the records any more."""

    number: int
    sums: tuple[int, ...]
    num_bytes: int
    seconds: float
    error: str = ""


class StoreRead(Part, frozen=True):
    """Fill `piece` of block `block_id` from the record of `shard` at `offset`, whose payload of `num_bytes`
    must have this checksum."""

    block_id: int
    offset: int
    shard: Shard
    piece: Shard
    num_bytes: int
    checksum: int


class StoreGet(Message, frozen=True):
    """To one rank: copy from records into blocks, and verify every record. Answered by `StoreGetDone`."""

    number: int
    arena: bytes
    reads: tuple[StoreRead, ...]


class StoreGetDone(Message, frozen=True):
    """Answer: `bad` are the indices of the reads whose record had a wrong checksum; with an error, all of
    them."""

    number: int
    bad: tuple[int, ...]
    num_bytes: int
    seconds: float
    error: str = ""


# ------------------------------------------------------------------------------------- owner and owner


class OwnerHello(Message, frozen=True):
    """Owner to owner, first, over TCP: identifies the sender. Records are exchanged in granules of the
    arenas."""

    protocol: int
    owner: ReplicaIdentity
    granule_bytes: int


class SendRecords(Message, frozen=True):
    """Owner to owner: write these records into the requester's arena. `granules[i]` are its granules for
    record i, header first; `target` are the endpoints of its transfer agent. Answered by `RecordsSent`."""

    landing_id: bytes
    target: RankEndpoints
    records: tuple[RecordId, ...]
    granules: tuple[tuple[int, ...], ...]


class RecordsSent(Message, frozen=True):
    """Answer: the records that are written completely, as (index in the request, checksum of the payload).
    The others are no longer held, or could not be sent. Nothing of the landing is written after this."""

    landing_id: bytes
    sent: tuple[tuple[int, int], ...]
    reason: str = ""


class StopSending(Message, frozen=True):
    """Owner to owner: stop sending. `RecordsSent` still follows, once nothing is written any more."""

    landing_id: bytes


# ------------------------------------------------------------------------------------ admin and owner


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

M = TypeVar("M")


def expect(message: FromOwner, kind: type[M]) -> M:
    """Return an owner's message if it is of this kind; otherwise raise `StoreError` with the reason of a
    refusal, or `WireError`."""
    if isinstance(message, StoreRefusal):
        raise StoreError(f"refused by the owner: {shown(message.reason, MAX_REASON_CHARS)}")
    if not isinstance(message, kind):
        raise WireError(f"expected {kind.__name__}, got {type(message).__name__}")
    return message
