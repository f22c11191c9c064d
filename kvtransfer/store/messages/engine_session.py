"""Engine core and owner: the session of a replica, which puts and fetches records."""

from __future__ import annotations

from kvtransfer.codec import Message, Part
from kvtransfer.kv_events import BlocksStored
from kvtransfer.messages import CompatibilityRecord, ReplicaIdentity, Shard
from kvtransfer.store.messages.records import Tier

# Stands in a `PutGrant` for a record that is already in the host tier, or is being written.
HELD = -1
# Stands in a `PutGrant` for one without space or arena, or whose group has used up its share.
REFUSED = -2


class EngineHello(Message, frozen=True):
    """Engine core to owner, first: identifies the replica whose records it will put and fetch. The engine
    core draws `session` once and shares it with its ranks; `shards` are those of its ranks, in rank order."""

    protocol: int
    session: bytes
    replica: ReplicaIdentity
    compatibility: CompatibilityRecord
    shards: tuple[Shard, ...]
    # Whether it asks for the content of the tiers (`TierPartRequest`). Else all is sent after the welcome.
    takes_parts: bool = False


class StoreWelcome(Message, frozen=True):
    """Owner to engine core: requests are accepted. Sent again when the rates change at which the owner brings
    records into the host tier (by tier, in 1e9 bytes a second; 0: not yet measured)."""

    owner: ReplicaIdentity
    gb_s: dict[str, float]


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
    """Engine core to owner: which of these blocks (a chain or its rest) can be fetched, and which of these
    states, each of which is behind some block of the chain? Answered by `FindAnswer` within the look-up
    budget."""

    number: int
    chain: bytes
    keys: tuple[bytes, ...]
    states: tuple[bytes, ...] = ()


class FindAnswer(Message, frozen=True):
    """Owner to engine core: the tier of each leading block that is available for all shards of the session;
    shorter than the request when a block is missing. `states` are the tiers of the states that are, by their
    places in the request."""

    number: int
    tiers: tuple[Tier, ...]
    states: dict[int, Tier] = {}


class FetchRequest(Message, frozen=True):
    """Engine core to owner: bring these blocks into the host tier. With `to_device`, their sources are sent
    as they arrive (`FetchedBlocks`) and leased until `FetchRelease`. Otherwise this is a prefetch: the blocks
    are kept there for a while, and there is no answer. Their records belong to the sharing group.

    The `states` follow the blocks, and are numbered behind them: to the device all, else the last one of
    which the node knows."""

    number: int
    sharing_group: str
    chain: bytes
    keys: tuple[bytes, ...]
    to_device: bool
    states: tuple[bytes, ...] = ()


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


class TierPartRequest(Message, frozen=True):
    """Engine core to owner: send a part of what this node's tiers hold for the session's space and shards.
    Part 0 begins with all, and from then on changes are sent (`TierEvents`). Answered by `TierPart`."""

    part: int


class TierPart(Message, frozen=True):
    """Owner to engine core: what part `part` holds as it is made; a block is listed in its cheapest tier
    only. The engine core asks for `next_part` next; 0: this is the last one. Whatever neither a part nor an
    event has named by then is in no tier of the node."""

    stored: tuple[BlocksStored, ...]
    part: int
    next_part: int


class TierEvents(Message, frozen=True):
    """Owner to engine core: changes of this node's tiers for the session's space and shards. To an engine
    core that does not take parts, the first one after the welcome lists all blocks. A block is listed in its
    cheapest tier only; `removed` blocks are in no tier of the node any more, each for one of the `reasons` of
    `kvtransfer.kv_events.BlocksRemoved`. An owner of an older version sends no reasons."""

    stored: tuple[BlocksStored, ...]
    removed: tuple[bytes, ...]
    reasons: tuple[str, ...] = ()


EngineRequest = (
    EngineHello | PutRequest | PutCommit | FindRequest | FetchRequest | FetchRelease | TierPartRequest
)
