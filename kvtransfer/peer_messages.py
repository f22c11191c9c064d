"""The Peer link, between the engine cores of two replicas: landings and their manifests."""

from __future__ import annotations

from kvtransfer.codec import Message, Part
from kvtransfer.messages import BlockSpan, CompatibilityRecord, RankEndpoints, ReplicaIdentity, Shard
from kvtransfer.request_facts import RequestFacts


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

    `block_ids[i]` takes the prompt's block `num_held_tokens / block_tokens + i`. `windows` are the places in
    the groups behind the first, one after another, to the prompt's last block.
    """

    landing_id: bytes
    num_held_tokens: int
    block_ids: tuple[int, ...]
    windows: tuple[BlockSpan, ...] = ()


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
    """Prefill to decode: these pieces of blocks of one group are written and visible in the target's memory.
    Renews the lease."""

    landing_id: bytes
    pieces: tuple[PieceSum, ...]
    group: int = 0


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
