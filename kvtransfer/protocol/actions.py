"""The actions that both sides of the landing protocol return, and that the engine core carries out."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvtransfer.messages import BlockSpan, ReplicaIdentity
from kvtransfer.peer_messages import PeerMessage
from kvtransfer.transfer_orders import TransferOrder


class ToWriter(NamedTuple):
    """Action: send `message` on the Peer link of `writer`."""

    writer: ReplicaIdentity
    message: PeerMessage


class ToRanks(NamedTuple):
    """Action: send `order` to every rank of this replica."""

    order: TransferOrder


class ToRank(NamedTuple):
    """Action: send `order` to this rank only."""

    rank: int
    order: TransferOrder


class Landed(NamedTuple):
    """Action: join the sequence. `block_ids` cover all its tokens; their references pass to the caller. The
    KV of the first `num_valid_tokens` tokens is held or verified, as far as what follows looks back at it.

    `windows` are the blocks of each group of layers behind the first, whose references pass too: from the
    first one that is needed to continue behind the valid tokens to the last that `block_ids` have as well.
    Where no token is valid they are empty, and the caller takes new ones."""

    landing_id: bytes
    block_ids: tuple[int, ...]
    num_valid_tokens: int
    num_held_tokens: int
    num_bad_pieces: int
    windows: tuple[BlockSpan, ...] = ()


# Why an open landing was lost: its writer gave it up, a message did not fit, the request was
# cancelled or its replica leaves, the Peer link ended, or its lease ran out.
LostCause = Literal["writer", "message", "cancelled", "link", "progress"]


class Lost(NamedTuple):
    """Action: an open landing ended here without hand-over (for the caller's records and statistics)."""

    landing_id: bytes
    request_id: str
    attempt: int
    reason: str
    cause: LostCause


class ToPeer(NamedTuple):
    """Action: send `message` on the Peer link to `peer`."""

    peer: ReplicaIdentity
    message: PeerMessage


class Granted(NamedTuple):
    """Action: the prompt may be computed now."""

    request_id: str
    attempt: int


class HandOverReady(NamedTuple):
    """Action: everything is written; send the sequence state."""

    landing_id: bytes
    request_id: str
    attempt: int
    peer: ReplicaIdentity
    num_moved_bytes: int
    transport: str
    push_started_at: float
    push_seconds: float


class Pushed(NamedTuple):
    """Action: a chunk is written by every rank, from `started_at` on the writer's clock (for the caller's
    records)."""

    request_id: str
    attempt: int
    started_at: float
    seconds: float


class PushEnded(NamedTuple):
    """Action: the landing is over on this side; the prompt's blocks may go. `error` "" when it was joined,
    else "refused" or "peer"."""

    request_id: str
    attempt: int
    error: str
    reason: str
    retry_after_s: float


class KillRanks(NamedTuple):
    """Action: a rank did not acknowledge a stop in time; end the ranks of this replica."""

    reason: str


LandingAction = ToWriter | ToRanks | ToRank | Landed | Lost
PushAction = ToPeer | ToRanks | Granted | Pushed | HandOverReady | PushEnded | KillRanks
