"""Everything about KV that crosses a wall.

Three boundaries: between the engine cores of two replicas (Peer link), between an engine core and its ranks
(transfer orders and their reports), and from an engine core to the watchers of its cache (KV events). No
tensors; ids are `str`, keys and landing ids are `bytes`, sizes are bytes, times are seconds. It is over 400
lines because what crosses a wall is listed in one place.
"""

from __future__ import annotations

from typing import Literal

from kvtransfer.codec import Message, Part
from kvtransfer.request_facts import RequestFacts

PROTOCOL_VERSION = 8
# Bytes of one element, by the dtype's name in a checkpoint and in the configuration.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp32": 4, "bf16": 2, "fp16": 2}

# What a transfer is for, the most urgent first: a lower class moves only while no higher one wants to.
TrafficClass = Literal["hand_over", "prefetch", "write_back"]


# ---------------------------------------------------------------------------------------------- identity


class Shard(Part, frozen=True):
    """The part of a model's KV that one rank holds: layers [start, end) and KV heads [start, end)."""

    layer_start: int
    layer_end: int
    head_start: int
    head_end: int

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.layer_end - self.layer_start

    @property
    def num_heads(self) -> int:
        """Number of KV heads of each layer."""
        return self.head_end - self.head_start


class CompatibilityRecord(Part, frozen=True):
    """What two replicas must share before a byte of KV may pass between them.

    `model_fingerprint` is of the checkpoint as it lies on disk, `weight_dtype` the form in which its weights
    take part in products, `dtype` that of activations and KV: KV computed with other weights is other KV.
    """

    protocol: int
    model_fingerprint: bytes
    dtype: str
    weight_dtype: str
    block_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """KV of one token over all layers and heads."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * ITEM_BYTES.get(self.dtype, 2)

    def differences(self, other: CompatibilityRecord) -> list[str]:
        """Return one line per differing field; no lines when the two may exchange KV."""
        return [
            f"{field}: {getattr(self, field)!r} here, {getattr(other, field)!r} there"
            for field in self.__struct_fields__
            if getattr(self, field) != getattr(other, field)
        ]


class Endpoint(Part, frozen=True):
    """One way to reach a rank's KV: the transport's name ("shm", "tcp") and its address."""

    transport: str
    address: str


class RankEndpoints(Part, frozen=True):
    """How a rank's KV pool is reached. `host_id` is equal exactly where memory can be shared."""

    rank: int
    shard: Shard
    host_id: str
    endpoints: tuple[Endpoint, ...]


class ReplicaIdentity(Part, frozen=True):
    """A replica in one life: a restart has the same or a new id and always a new epoch."""

    replica_id: str
    epoch: int


# ------------------------------------------------------------------------- Peer link: between engine cores


class PeerHello(Message, frozen=True):
    """First message each way on a Peer link. `ranks` are all of this side's, in rank order; from them both
    sides plan the same pieces (`kvtransfer.blocks.layout.plan_pieces`). The writer's need no endpoints."""

    identity: ReplicaIdentity
    compatibility: CompatibilityRecord
    ranks: tuple[RankEndpoints, ...]


class PeerRefusal(Message, frozen=True):
    """The pair cannot work together; the link closes. `reason` names each differing field."""

    reason: str


class PeerStopping(Message, frozen=True):
    """Decode to prefill, last of all: the replica stops, so that the link's end is no fault."""


class LandingRequest(Message, frozen=True):
    """Prefill to decode: a place is wanted for the KV of `num_tokens` prompt tokens.

    `block_keys` are the chained keys of the prompt's full blocks. `deadline_s` is what remains of the
    request's deadline (None: none), `num_samples` how many sequences will fork from the prompt.
    """

    landing_id: bytes
    request_id: str
    attempt: int
    sharing_group: str
    priority: int
    block_keys: tuple[bytes, ...]
    num_tokens: int
    num_samples: int
    deadline_s: float | None
    # Its writer still decodes the sequence: what it hands over are as many tokens as it then has, at most
    # `num_tokens`.
    is_growing: bool = False
    # The facts include sharing_group and priority; None: its writer is of a version that sends these alone.
    standing: RequestFacts | None = None

    @property
    def facts(self) -> RequestFacts:
        """Whose request it is, and how it may be treated."""
        return self.standing or RequestFacts(sharing_group=self.sharing_group, priority=self.priority)


class LandingGrant(Message, frozen=True):
    """Decode to prefill: the first `num_held_tokens` are held and pinned; write the rest into `block_ids`.

    `block_ids[i]` takes the prompt's block `num_held_tokens / block_tokens + i`.
    """

    landing_id: bytes
    num_held_tokens: int
    block_ids: tuple[int, ...]


class LandingRefusal(Message, frozen=True):
    """Decode to prefill: no place before the deadline, or the queue is full. The gateway routes again."""

    landing_id: bytes
    reason: str
    retry_after_s: float


class PieceSum(Part, frozen=True):
    """The checksum of one piece: prompt block `block_index`, restricted to `shard`, written to the target's
    rank `rank`."""

    block_index: int
    rank: int
    shard: Shard
    checksum: int


class Manifest(Message, frozen=True):
    """Prefill to decode: these pieces are written and visible in the target's memory. Renews the lease."""

    landing_id: bytes
    pieces: tuple[PieceSum, ...]


class LandingProgress(Message, frozen=True):
    """Prefill to decode: the prompt moves on (tokens computed so far). Renews the lease."""

    landing_id: bytes
    num_tokens_computed: int


class LandingAbort(Message, frozen=True):
    """Either way: the landing is over without hand-over. From the prefill side `writers_stopped` says that
    nothing will be written any more; from the decode side it asks for exactly that (`WriterStopped`)."""

    landing_id: bytes
    reason: str
    writers_stopped: bool


class WriterStopped(Message, frozen=True):
    """Prefill to decode: every writer of this landing has acknowledged that it stopped."""

    landing_id: bytes


class LandingResult(Message, frozen=True):
    """Decode to prefill: the hand-over was joined. Bad pieces were recomputed, not used."""

    landing_id: bytes
    num_tokens_verified: int
    num_bad_pieces: int


# ------------------------------------------------------------------------ engine core to rank: orders


class TransferSettings(Part, frozen=True):
    """What a rank's transfer agent is started with; `kvtransfer.config.TransferConfig` says what each means.
    Rates of traffic classes are 1e9 bytes a second (0: no limit)."""

    data_host: str
    transports: tuple[str, ...]
    tcp_streams: int = 2
    rdma_devices: tuple[str, ...] = ()
    hand_over_gb_s: float = 0.0
    prefetch_gb_s: float = 0.0
    write_back_gb_s: float = 0.0
    error_budget: int = 3
    cool_down_s: float = 1.0
    max_cool_down_s: float = 300.0


class Lane(Part, frozen=True):
    """From one writer rank to one rank of the peer: of every block, `piece` goes there. `piece` is part of
    both ranks' shards; a pair of ranks has at most one lane."""

    target: RankEndpoints
    piece: Shard


class ConnectPeer(Message, frozen=True):
    """To one rank: open the best path of each of its lanes to the peer (none: its copy is not needed there)
    and measure it. `transports` is the order of preference; `min_gb_s` is the floor (0: none) below which a
    path is refused when `refuse_slow`, else used with a warning."""

    connection_id: bytes
    writer: ReplicaIdentity
    peer: ReplicaIdentity
    lanes: tuple[Lane, ...]
    transports: tuple[str, ...]
    min_gb_s: float
    refuse_slow: bool = True


class ClosePeer(Message, frozen=True):
    """Close the connection; pushes on it fail."""

    connection_id: bytes


class BlockMove(Part, frozen=True):
    """One block of a push: local block `src_block` into the peer's `dst_block`; `block_index` names it in
    the manifest."""

    src_block: int
    dst_block: int
    block_index: int


class PushOrder(Message, frozen=True):
    """Write these blocks (this rank's lanes' pieces of them) through the connection, and sum each piece.
    Every rank of the writer answers for itself, also one without lanes."""

    push_id: int
    connection_id: bytes
    landing_id: bytes
    moves: tuple[BlockMove, ...]
    traffic: TrafficClass = "hand_over"


class StopPush(Message, frozen=True):
    """Stop every push of the landing, queued or running; answered by `PushStopped` when nothing of it is
    or will be written."""

    landing_id: bytes


class OpenLanding(Message, frozen=True):
    """These blocks may be written by `writer` for this landing. Two-sided transports accept frames for
    open landings only."""

    landing_id: bytes
    writer: ReplicaIdentity
    block_ids: tuple[int, ...]


class CloseLanding(Message, frozen=True):
    """Accept nothing more for this landing; answered by `LandingClosed`."""

    landing_id: bytes


class PieceCheck(Part, frozen=True):
    """A piece to verify in this rank's memory: the block, the sum it must have, and its range."""

    block_id: int
    block_index: int
    shard: Shard
    checksum: int


class VerifyOrder(Message, frozen=True):
    """Sum these pieces where they lie and compare; answered by `Verified`."""

    landing_id: bytes
    pieces: tuple[PieceCheck, ...]


# ------------------------------------------------------------------------ rank to engine core: reports


class LanePath(Part, frozen=True):
    """The measured path of one lane: `gb_s` (1e9 bytes a second) and one-way latency. `device` is what
    carries the bytes ("memory", "lo", "eth0", "mlx5_0", "cuda:0"). `instead_of` says why each transport that
    is preferred to this one is not used, and of one below the floor that it is; "" when all is as wanted."""

    peer_rank: int
    transport: str
    device: str
    gb_s: float
    latency_us: float
    instead_of: str = ""


class PeerConnected(Message, frozen=True):
    """All lanes of this rank are open and measured; sent again when a lane has failed over to another
    transport."""

    connection_id: bytes
    paths: tuple[LanePath, ...]


class PeerConnectFailed(Message, frozen=True):
    """No transport reaches the peer, or all are below the floor."""

    connection_id: bytes
    reason: str


class PeerLost(Message, frozen=True):
    """This rank, as a writer, lost its connection; pushes on it have failed."""

    connection_id: bytes
    reason: str


class PushDone(Message, frozen=True):
    """All moves of the push are written and visible in the target's memory."""

    push_id: int
    landing_id: bytes
    pieces: tuple[PieceSum, ...]
    num_bytes: int
    seconds: float
    started_at: float
    transport: str
    traffic: TrafficClass = "hand_over"


class PushFailed(Message, frozen=True):
    """The push ended before its last piece; nothing more of it will be written."""

    push_id: int
    landing_id: bytes
    reason: str


class PushStopped(Message, frozen=True):
    """Answer to `StopPush`: the fence. This rank writes no byte of the landing after this. What a two-sided
    transport still carries of it is dropped by the target, which has closed the landing or is about to
    (`CloseLanding`) before it uses the blocks again."""

    landing_id: bytes


class LandingClosed(Message, frozen=True):
    """Answer to `CloseLanding`. `connections` are those of a one-sided writer that were let in and are still
    open: until each of them is gone (`WriterGone`), the blocks must stay in quarantine."""

    landing_id: bytes
    connections: tuple[bytes, ...]


class WriterGone(Message, frozen=True):
    """This one-sided connection of the writer is closed, by the kernel or by the writer itself after it
    unmapped: proof that nothing is written over it any more. A writer that reconnects gets another."""

    writer: ReplicaIdentity
    connection: bytes


class Verified(Message, frozen=True):
    """Answer to `VerifyOrder`: the block indices whose sums differ (empty: all is well)."""

    landing_id: bytes
    bad_block_indices: tuple[int, ...]


# ------------------------------------------------------------------------ KV events: engine core to watchers


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


PeerMessage = (
    PeerHello
    | PeerRefusal
    | PeerStopping
    | LandingRequest
    | LandingGrant
    | LandingRefusal
    | Manifest
    | LandingProgress
    | LandingAbort
    | WriterStopped
    | LandingResult
)
TransferOrder = ConnectPeer | ClosePeer | PushOrder | StopPush | OpenLanding | CloseLanding | VerifyOrder
TransferReport = (
    PeerConnected
    | PeerConnectFailed
    | PeerLost
    | PushDone
    | PushFailed
    | PushStopped
    | LandingClosed
    | WriterGone
    | Verified
)
