"""Engine core to rank: the orders to a rank's transfer agent."""

from __future__ import annotations

from typing import Literal

from kvtransfer.codec import Message, Part
from kvtransfer.messages import RankEndpoints, ReplicaIdentity, Shard

# What a transfer is for, the most urgent first: a lower class moves only while no higher one wants to.
TrafficClass = Literal["hand_over", "prefetch", "write_back"]


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
    """From one writer rank to one rank of the peer: of every block of the group, `piece` goes there. `piece`
    is part of both ranks' shards, and has layers of the group; a pair of ranks has at most one lane for a
    group."""

    target: RankEndpoints
    piece: Shard
    group: int = 0


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
    """Write these blocks of a group (this rank's lanes' pieces of them) through the connection, and sum each
    piece. Every rank of the writer answers for itself, also one without lanes of the group."""

    push_id: int
    connection_id: bytes
    landing_id: bytes
    moves: tuple[BlockMove, ...]
    traffic: TrafficClass = "hand_over"
    group: int = 0


class StopPush(Message, frozen=True):
    """Stop every push of the landing, queued or running; answered by `PushStopped` when nothing of it is
    or will be written."""

    landing_id: bytes


class OpenLanding(Message, frozen=True):
    """These blocks may be written by `writer` for this landing, `windows` of each group behind the first.
    Two-sided transports accept frames for open landings only."""

    landing_id: bytes
    writer: ReplicaIdentity
    block_ids: tuple[int, ...]
    windows: tuple[tuple[int, ...], ...] = ()


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
    """Sum these pieces of blocks of one group where they lie and compare; answered by `Verified`."""

    landing_id: bytes
    pieces: tuple[PieceCheck, ...]
    group: int = 0


TransferOrder = ConnectPeer | ClosePeer | PushOrder | StopPush | OpenLanding | CloseLanding | VerifyOrder
