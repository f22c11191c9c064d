"""The Link: gateway <-> engine core, one frame per engine step upward."""

from __future__ import annotations

from msgspec.structs import replace

from kvtransfer.codec import MAX_FRAME_BYTES, Codec, Message, Part
from kvtransfer.kv_events import KvEvents, KvSnapshot, KvSnapshotRequest
from kvtransfer.messages import CompatibilityRecord, ReplicaIdentity
from kvtransfer.request_facts import Pooling, RequestFacts, ServiceClass
from workers.messages.sampling import Grammar, PackedLogprobs, SamplingParams, TokenLogprob
from workers.stats_record import ReplicaStats

# (request id, attempt).
RequestKey = tuple[str, int]
# (gateway id, epoch).
GatewayKey = tuple[str, int]
# The most bytes that come with a request besides its tokens and keys (a grammar has 256 KiB at most), and of
# messages that carry none.
_OTHER_BYTES = 2 << 20
# The most ends of messages that come with a request.
MAX_MESSAGE_ENDS = 16
# The bytes of a key with its length.
_KEY_BYTES = 18


def longest_link_frame(max_context_tokens: int, block_tokens: int, max_sequences: int) -> int:
    """Return the most bytes of a frame that a gateway or a peer sends to a replica: a request with its block
    keys, and outputs of as many samples as fit there."""
    num_keys = max_context_tokens // block_tokens + 1
    num_bytes = max_context_tokens * 4 * (1 + max_sequences) + num_keys * _KEY_BYTES + _OTHER_BYTES
    return min(num_bytes, MAX_FRAME_BYTES)


# ------------------------------------------------------------------------------- gateway to engine core


class GatewayHello(Message, frozen=True):
    """Gateway to engine core, first after the proof: whose requests come over this Link."""

    gateway_id: str
    epoch: int


class SampleState(Part, frozen=True):
    """One of the `n` continuations of a prompt: its number, its seed, and the tokens it has so far. With a
    grammar `mask_digest` is that of its last token (`TokenDelta`), with which the replayed state is compared;
    b"": it is not compared."""

    index: int
    seed: int
    output: bytes = b""
    mask_digest: bytes = b""


class HandOverTarget(Part, frozen=True):
    """The decode replica to which a prefill replica hands the sequence over."""

    identity: ReplicaIdentity
    address: str


class Submission(Message, frozen=True):
    """Gateway to engine core: run this request (or hand it over to `decode` after prefill).

    `block_keys` are the chained keys of the prompt's full blocks, computed once at the gateway; blocks of
    output continue their chain, which begins at `root_key`. The KV belongs to the `sharing_group`. `samples`
    share the prompt; more than one only when all outputs are empty (a resumed request is one submission per
    unfinished sample). `deadline_s` is what remains of it (None: none), and in `due_s`, which may be over, it
    has waited as long as its class may (None: as the replica has it). KV of a private one is neither found
    by others nor stored. A `suspect` was in flight when a replica broke: it runs alone until it has survived
    some steps (`engine.isolation`). One with `pooling` ends with the prompt, by a `PromptEmbedding` in place
    of tokens: it has one sample, without output, and is not handed over. With a `grammar` every
    sample's output is one of its texts, or the beginning of one where it ends for another reason. It fails as
    "crowded" where more than `most_backlog_tokens` are to be computed before it (None: never): another
    gateway was faster, and there is a better place.
    """

    request_id: str
    attempt: int
    tenant: str
    sharing_group: str
    priority: int
    prompt: bytes
    root_key: bytes
    block_keys: tuple[bytes, ...]
    samples: tuple[SampleState, ...]
    sampling: SamplingParams
    decode: HandOverTarget | None
    deadline_s: float | None
    is_private: bool = False
    suspect: bool = False
    # The purpose of the request. Under load `batch` is paused first.
    service_class: ServiceClass = "standard"
    pooling: Pooling | None = None
    grammar: Grammar | None = None
    most_backlog_tokens: int | None = None
    due_s: float | None = None
    # All of tenant, sharing_group, priority, is_private, service_class and pooling; None: the gateway is of a
    # version that sends these alone.
    standing: RequestFacts | None = None
    # How many tokens of the prompt are before the end of each of its messages, ascending, at most
    # `MAX_MESSAGE_ENDS` of them: places at which other prompts may part from this one.
    message_ends: tuple[int, ...] = ()

    @property
    def facts(self) -> RequestFacts:
        """The request's owner and purpose, and how it may be treated."""
        return self.standing or RequestFacts(
            tenant=self.tenant,
            sharing_group=self.sharing_group,
            priority=self.priority,
            service_class=self.service_class,
            is_private=self.is_private,
            pooling=self.pooling,
        )

    def made_private(self) -> Submission:
        """Return the submission of a request whose KV is found by no other from now on."""
        return replace(self, is_private=True, standing=replace(self.facts, is_private=True))


class Announce(Message, frozen=True):
    """Gateway to engine core: a request waits in the gateway, and will probably be submitted here. The
    store's blocks of its prompt's `block_keys`, as in `Submission`, may be loaded before that. Forgotten when
    the request is submitted or cancelled, and after a while (`AnnouncedPrompts`)."""

    request_id: str
    sharing_group: str
    num_tokens: int
    block_keys: tuple[bytes, ...]


class Cancel(Message, frozen=True):
    """Gateway to engine core: stop the request and free everything of it within one step. Always answered by
    nothing: the gateway has already answered its client. Attempt 0: it was only announced."""

    request_id: str
    attempt: int


class Move(Message, frozen=True):
    """Gateway to engine core: migrate this request to `target`: its finished KV first, then its state."""

    request_id: str
    attempt: int
    target: HandOverTarget


class PurgeCache(Message, frozen=True):
    """Gateway to engine core: forget all KV of this sharing group (None: of all); answered with the same
    number."""

    number: int
    sharing_group: str | None


class PauseBatch(Message, frozen=True):
    """Gateway to engine core: leave requests of the class `batch` out of steps while others are there, until
    it is said otherwise or this Link ends."""

    is_paused: bool


# ------------------------------------------------------------------------------- engine core to gateway


class StageTimes(Part, frozen=True):
    """The times of a request's events in one replica, on that host's monotonic clock (seconds); 0: did not
    happen. `transfer_start` is on the writer's clock; `transfer_end` is when the last piece was verified at
    the decode side. The step with the prompt's last chunk ran at the rank that samples from `step_start` to
    `step_end`, on that rank's clock."""

    arrived: float = 0.0
    scheduled: float = 0.0
    prefilled: float = 0.0
    transfer_start: float = 0.0
    transfer_end: float = 0.0
    joined: float = 0.0
    step_start: float = 0.0
    step_end: float = 0.0


class TokenDelta(Part, frozen=True):
    """New tokens of one sample: output indices [first_index, first_index + n). `finish` is "" while it
    runs, else "stop" (an end token, included last) or "length". With a grammar `mask_digest` is that of the
    tokens that were allowed in the last one's place."""

    request_id: str
    attempt: int
    sample: int
    first_index: int
    tokens: bytes
    logprobs: tuple[TokenLogprob, ...]
    finish: str
    mask_digest: bytes = b""


class PromptLogprobs(Part, frozen=True):
    """Log-probabilities of the prompt's tokens [first_index, first_index + n), of which the first token of
    all has none. They come in order, in parts of bounded size, all of them before the first token of output;
    after a preemption some may come twice."""

    request_id: str
    attempt: int
    first_index: int
    logprobs: PackedLogprobs


class PromptEmbedding(Part, frozen=True):
    """The end of a request with `pooling`: the hidden state of the prompt's last token after the final norm,
    not normalized, as float32 `vector` [hidden_size]."""

    request_id: str
    attempt: int
    vector: bytes


class PrefillReport(Part, frozen=True):
    """Sent once by the replica that finished the prompt, with the first token: what was cached and when."""

    request_id: str
    attempt: int
    num_prompt_tokens: int
    num_cached_tokens: int
    times: StageTimes
    # Named moments of the prompt's chunks and pushes so far, on the replica's monotonic clock.
    trace: tuple[tuple[str, float], ...] = ()
    # The cached tokens that were brought from the store for this request, by tier.
    num_loaded_tokens: dict[str, int] = {}
    # The time that the replica's steps from the arrival to the first token should have taken, for all they
    # computed, by its own measurements; 0: not known. If more has passed, something else held the request up.
    steps_s: float = 0.0


class HandOverReport(Part, frozen=True):
    """Sent once by the decode replica when it joined a handed-over sequence."""

    request_id: str
    attempt: int
    num_held_tokens: int
    num_moved_bytes: int
    num_bad_pieces: int
    transport: str
    transfer_gb_s: float
    times: StageTimes
    # The output index of the first token that comes from here; the tokens before it come from the replica
    # that handed it over.
    first_index: int = 0


class MoveEnded(Part, frozen=True):
    """Answer to `Move`, unless the request ended first. `error` "": it continues at `target`, and all its
    tokens from here have been sent; else it continues here, for that reason."""

    request_id: str
    attempt: int
    target: ReplicaIdentity
    error: str = ""


class RequestFailed(Part, frozen=True):
    """The attempt is over without a finish. `code`: "refused" (no capacity or queue full: route again),
    "peer" (the hand-over's other side failed: route again), "deadline", "internal" (the replica's own
    fault: route again), "leaving" (it leaves, nobody's fault: route again), "crowded" (more waits here than
    the submission allows: route again), "invalid" (never retry), "grammar" (never retry: its grammar is
    refused, or the output could not follow it). `retry_after_s` goes with "refused", and so does
    `refused_by`: the replica id of the hand-over's other side when that has no capacity, "" when the sender.
    With "internal", `suspect` tells whether this request may have caused the fault: it was in flight, or the
    fault was found to be its own."""

    request_id: str
    attempt: int
    code: str
    reason: str
    retry_after_s: float = 0.0
    refused_by: str = ""
    suspect: bool = False


class IsolationReport(Part, frozen=True):
    """A `suspect` submission runs alone from the next plan on; or, `is_cleared`, it has survived that and
    runs with the others. One whose prompt is handed over is cleared by the decode replica."""

    request_id: str
    attempt: int
    is_cleared: bool


class StallReport(Part, frozen=True):
    """The request is in a step with which no rank has progressed for a while, and may be the cause. Comes
    before a `LoadReport` whose `stalled_s` makes gateways leave the replica. Waiting ones are not named."""

    request_id: str
    attempt: int


class LoadReport(ReplicaStats, frozen=True):
    """The statistics of a replica after a step, or once a second when it is idle."""

    identity: ReplicaIdentity
    sequence: int


News = (
    TokenDelta
    | PromptLogprobs
    | PromptEmbedding
    | PrefillReport
    | HandOverReport
    | RequestFailed
    | MoveEnded
    | IsolationReport
    | StallReport
)


class QueueReport(Part, frozen=True):
    """The parts of a replica's load that change from step to step, as in
    `workers.stats_record.ReplicaStats`."""

    num_running: int
    num_waiting: int
    num_landings: int
    num_backlog_tokens: int
    num_free_blocks: int
    num_context_tokens: int


class StepFrame(Message, frozen=True):
    """Engine core to gateway: all news of one engine step for this gateway's requests. `queue` is there when
    it has changed, unless `load` is."""

    deltas: tuple[TokenDelta, ...] = ()
    prefills: tuple[PrefillReport, ...] = ()
    hand_overs: tuple[HandOverReport, ...] = ()
    failures: tuple[RequestFailed, ...] = ()
    load: LoadReport | None = None
    moves: tuple[MoveEnded, ...] = ()
    isolations: tuple[IsolationReport, ...] = ()
    queue: QueueReport | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    embeddings: tuple[PromptEmbedding, ...] = ()
    stalls: tuple[StallReport, ...] = ()


class ReplicaHello(Message, frozen=True):
    """Engine core to gateway, first after the proof: who it is and what it serves."""

    identity: ReplicaIdentity
    pool: str
    role: str
    compatibility: CompatibilityRecord
    max_context_tokens: int
    load: LoadReport
    # The epoch of the change that gave it this role; 0: its first one.
    role_epoch: int = 0


class Leaving(Message, frozen=True):
    """Engine core to gateway: takes no new work; what it runs will finish or move within `drain_s`."""

    drain_s: float


class RoleChanged(Message, frozen=True):
    """Engine core to gateway: from now on it plays this role. Requests of the old role finish or migrate."""

    role: str
    epoch: int


class CachePurged(Message, frozen=True):
    """Answer to `PurgeCache`."""

    number: int
    # The number of blocks that nothing finds any more.
    num_blocks: int
    # The number of blocks among them in use until the requests that hold them end.
    num_held: int
    # The group's requests under way: their KV is private from now on. One whose prompt is on its way to
    # another replica in this very moment may leave some there.
    num_requests: int


LinkDown = GatewayHello | Announce | Submission | Cancel | KvSnapshotRequest | Move | PurgeCache | PauseBatch
LinkUp = ReplicaHello | StepFrame | KvEvents | KvSnapshot | Leaving | RoleChanged | CachePurged

LINK_DOWN_CODEC: Codec[LinkDown] = Codec(LinkDown)
LINK_UP_CODEC: Codec[LinkUp] = Codec(LinkUp)
