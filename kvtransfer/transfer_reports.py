"""Rank to engine core: what a rank's transfer agent reports."""

from __future__ import annotations

from kvtransfer.codec import Message, Part
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.peer_messages import PieceSum
from kvtransfer.transfer_orders import TrafficClass


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
