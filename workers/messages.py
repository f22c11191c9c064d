"""Messages that enter or leave a replica, or pass between its engine core and its ranks.

Link: gateway <-> engine core, one frame per engine step upward. Peer link: engine core <-> engine core (KV
messages of `kvtransfer.messages` plus `HandOver`). Rank channel: engine core <-> rank, one plan down and one
report up a step. Token ids travel as uint32 little-endian bytes; no tensors.
"""

from __future__ import annotations

from kvtransfer.codec import Codec, Message, Part
from kvtransfer.common.faults import FaultRule
from kvtransfer.messages import (
    CompatibilityRecord,
    KvEvents,
    KvSnapshot,
    KvSnapshotRequest,
    PeerMessage,
    RankEndpoints,
    ReplicaIdentity,
    TransferOrder,
    TransferReport,
    TransferSettings,
)
from kvtransfer.store.messages import StoreOrder, StoreReport
from workers.stats_record import DeviceMemory, ReplicaStats

# (request id, attempt).
RequestKey = tuple[str, int]
# (gateway id, epoch).
GatewayKey = tuple[str, int]

# ---------------------------------------------------------------------------------- what is asked for

_GREEDY_TEMPERATURE = 1e-5


class SamplingParams(Part, frozen=True):
    """How tokens are chosen, in the order of application: logit bias, repetition penalty (over prompt and
    output), presence and frequency penalties (over output), minimum length, temperature, top-k, top-p,
    min-p, then Gumbel-max with noise from (seed, output index). A temperature below 1e-5 is greedy: the
    likeliest token wins whatever the noise, and smaller ones would overflow.

    `top_k` 0, `top_p` 1, `min_p` 0 and penalties 1, 0, 0 are off. `num_logprobs` None: no log-probabilities;
    n: those of the chosen token and of the n most likely, of the model's own distribution (before any
    processing). `stop_token_ids` end the sequence like the model's own end tokens, which `ignore_eos`
    disables. `min_tokens` suppresses every end token until that many were produced.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_TEMPERATURE

    @property
    def penalizes_prompt(self) -> bool:
        """Whether a token's chances depend on its being in the prompt."""
        return self.repetition_penalty != 1.0

    @property
    def penalizes_output(self) -> bool:
        """Whether a token's chances depend on the output so far."""
        return self.penalizes_prompt or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class SampleState(Part, frozen=True):
    """One of the `n` continuations of a prompt: its number, its seed, and the tokens it has so far."""

    index: int
    seed: int
    output: bytes = b""


class HandOverTarget(Part, frozen=True):
    """The decode replica to which a prefill replica hands the sequence over."""

    identity: ReplicaIdentity
    address: str


class Submission(Message, frozen=True):
    """Gateway to engine core: run this request (or hand it over to `decode` after prefill).

    `block_keys` are the chained keys of the prompt's full blocks, computed once at the gateway.
    `samples` share the prompt; more than one only when all outputs are empty (a resumed request is one
    submission per unfinished sample). `deadline_s` is what remains of it (None: none). KV of a private one
    is neither found by others nor stored. A `suspect` was in flight when a replica broke: it runs alone until
    it has survived some steps (`engine.isolation`).
    """

    request_id: str
    attempt: int
    tenant: str
    priority: int
    prompt: bytes
    block_keys: tuple[bytes, ...]
    samples: tuple[SampleState, ...]
    sampling: SamplingParams
    decode: HandOverTarget | None
    deadline_s: float | None
    is_private: bool = False
    suspect: bool = False


class Cancel(Message, frozen=True):
    """Gateway to engine core: stop the request and free everything of it within one step. Always answered by
    nothing: the gateway has already answered its client."""

    request_id: str
    attempt: int


# ------------------------------------------------------------------------------- Link: engine core to gateway


class TokenLogprob(Part, frozen=True):
    """Log-probability of the chosen token, and the most likely ones as (token id, log-probability)."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class StageTimes(Part, frozen=True):
    """When things happened to a request in one replica, on that host's monotonic clock (seconds); 0: did
    not happen. `transfer_start` is on the writer's clock; `transfer_end` is when the last piece was verified
    at the decode side."""

    arrived: float = 0.0
    scheduled: float = 0.0
    prefilled: float = 0.0
    transfer_start: float = 0.0
    transfer_end: float = 0.0
    joined: float = 0.0


class TokenDelta(Part, frozen=True):
    """New tokens of one sample: output indices [first_index, first_index + n). `finish` is "" while it
    runs, else "stop" (an end token, included last) or "length"."""

    request_id: str
    attempt: int
    sample: int
    first_index: int
    tokens: bytes
    logprobs: tuple[TokenLogprob, ...]
    finish: str


class PrefillReport(Part, frozen=True):
    """Sent once by the replica that finished the prompt, with the first token: what was cached and when."""

    request_id: str
    attempt: int
    num_prompt_tokens: int
    num_cached_tokens: int
    times: StageTimes
    # Named moments of the prompt's chunks and pushes so far, on the replica's monotonic clock.
    trace: tuple[tuple[str, float], ...] = ()
    # Of the cached tokens: those that were brought from the store for this request, by tier.
    num_loaded_tokens: dict[str, int] = {}


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
    # The output index of the first token that comes from here; those before come from who handed it over.
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
    fault: route again), "leaving" (it leaves, nobody's fault: route again), "invalid" (never retry).
    `retry_after_s` goes with "refused", and so does `refused_by`: the replica id of the hand-over's other
    side when that has no capacity, "" when the sender. With "internal", `suspect` tells whether this request
    may have caused the fault: it was in flight, or the fault was found to be its own."""

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


class LoadReport(ReplicaStats, frozen=True, kw_only=True):
    """The statistics of a replica after a step, or once a second when it is idle."""

    identity: ReplicaIdentity
    sequence: int


News = TokenDelta | PrefillReport | HandOverReport | RequestFailed | MoveEnded | IsolationReport


class StepFrame(Message, frozen=True):
    """Engine core to gateway: all news of one engine step for this gateway's requests."""

    deltas: tuple[TokenDelta, ...] = ()
    prefills: tuple[PrefillReport, ...] = ()
    hand_overs: tuple[HandOverReport, ...] = ()
    failures: tuple[RequestFailed, ...] = ()
    load: LoadReport | None = None
    moves: tuple[MoveEnded, ...] = ()
    isolations: tuple[IsolationReport, ...] = ()


class ReplicaHello(Message, frozen=True):
    """Engine core to gateway, first after the proof: who it is and what it serves."""

    identity: ReplicaIdentity
    pool: str
    role: str
    compatibility: CompatibilityRecord
    max_context_tokens: int
    load: LoadReport
    # Of the change that gave it this role; 0: its first one.
    role_epoch: int = 0


class GatewayHello(Message, frozen=True):
    """Gateway to engine core, first after the proof: whose requests come over this Link."""

    gateway_id: str
    epoch: int


class Leaving(Message, frozen=True):
    """Engine core to gateway: takes no new work; what it runs will finish or move within `drain_s`."""

    drain_s: float


class RoleChanged(Message, frozen=True):
    """Engine core to gateway: from now on it plays this role. Requests of the old role finish or migrate."""

    role: str
    epoch: int


class Move(Message, frozen=True):
    """Gateway to engine core: migrate this request to `target`: its finished KV first, then its state."""

    request_id: str
    attempt: int
    target: HandOverTarget


class PurgeCache(Message, frozen=True):
    """Gateway to engine core: forget all KV of this tenant (None: of all); answered with the same number."""

    number: int
    tenant: str | None


class CachePurged(Message, frozen=True):
    """Answer to `PurgeCache`."""

    number: int
    # That nothing finds any more.
    num_blocks: int
    # Of them, in use until the requests that hold them end.
    num_held: int
    # Of the tenant's, under way: their KV is private from now on. One whose prompt is on its way to another
    # replica in this very moment may leave some there.
    num_requests: int


# -------------------------------------------------------------------------------------- Peer link


class HandOver(Message, frozen=True):
    """Prefill to decode, after the last manifest: the sequence state. `submission.samples[i].output` holds
    the first token of sample i; `gateway_id` and `gateway_epoch` say on which Link its tokens go.
    `transfer_seconds` is the time spent writing, `transfer_start` when it began (the writer's clock)."""

    landing_id: bytes
    submission: Submission
    gateway_id: str
    gateway_epoch: int
    num_moved_bytes: int
    transport: str
    transfer_start: float
    transfer_seconds: float


# ------------------------------------------------------------------------------------ engine core <-> rank


class RankSpec(Message, frozen=True):
    """What a rank process is started with (on its standard input, or as the actor's argument).

    Rank `stage * tp + tp_rank` is the `tp_rank`-th of the `tp` ranks that share every layer of `stage`. The
    first of the last stage samples. `probe_rows` above 0: before it loads, the rank measures what a layer and
    the head cost on its device for a step of so many tokens, `probe_sampled_rows` of which sample (0: all),
    and reports it in `RankJoined`. `kv_share` above 0: `num_kv_tokens` is the most; see `AutoKv`.
    """

    replica: ReplicaIdentity
    rank: int
    tp: int
    pp: int
    engine_core_address: str
    secret: bytes
    model_dir: str
    dtype: str
    device: str
    num_threads: int
    block_tokens: int
    num_kv_tokens: int
    max_batch_tokens: int
    max_sequences: int
    transfer: TransferSettings
    kv_share: float = 0.0
    # KV capacity in host memory for older blocks of running sequences, beside `num_kv_tokens`.
    num_offload_tokens: int = 0
    probe_rows: int = 0
    probe_sampled_rows: int = 0
    # Only with products and attention whose results for a sequence depend on nothing else.
    deterministic: bool = False
    faults: tuple[FaultRule, ...] = ()

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def stage(self) -> int:
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp


class StageCost(Part, frozen=True):
    """What a step of the probed size costs on a rank's device, in seconds: one layer (its share of it under
    TP), embedding, and norm with head. All 0 when it was not asked."""

    layer_s: float = 0.0
    embedding_s: float = 0.0
    head_s: float = 0.0


class RankJoined(Message, frozen=True):
    """Rank to engine core, first of all: it is alive, and has not loaded anything yet. `store_address` is
    where the ranks of a replica of several find each other; rank 0 opens it, the others say "".
    `attention_ratio` is the measured cost of attending to one earlier token, in units of the cost of one
    token's products."""

    rank: int
    process_id: int
    store_address: str
    cost: StageCost
    attention_ratio: float


class RankProgress(Message, frozen=True):
    """Rank to engine core, while it starts: it has come further. `phase` is what it does now, for people."""

    rank: int
    phase: str


class FormGroup(Message, frozen=True):
    """Engine core to every rank, when all have joined: load your part. `stages[i]` are the layers [start,
    end) of stage i."""

    store_address: str
    stages: tuple[tuple[int, int], ...]


class RankReady(Message, frozen=True):
    """Rank to engine core, after load and warm-up."""

    rank: int
    process_id: int
    host_id: str
    num_blocks: int
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    compatibility: CompatibilityRecord
    endpoints: RankEndpoints
    load_s: float
    warm_up_s: float
    # In host memory; their ids follow on those of `num_blocks`.
    num_offload_blocks: int = 0
    # What its device was measured to compute, and to read from its memory, a second.
    flop_s: float = 0.0
    byte_s: float = 0.0
    # What computes its attention.
    backend: str = ""


class RankFailed(Message, frozen=True):
    """Rank to engine core: it cannot continue (bad checkpoint, out of memory, a kernel's error); it exits.
    With `lost_peer` its connection to another rank broke: a consequence, not the first cause."""

    rank: int
    reason: str
    lost_peer: bool = False


class SlotSample(Part, frozen=True):
    """A sample takes slot `slot` of the rank. `last_token` is the newest of prompt and output, of which it
    has `num_output_tokens` already (resume, hand-over, preemption); `output` are these where penalties count
    them, else b""."""

    slot: int
    seed: int
    last_token: int
    num_output_tokens: int = 0
    output: bytes = b""


class SlotStart(Part, frozen=True):
    """Samples of one request begin: what the sampler must know of them. `prompt` is b"" unless the repetition
    penalty looks at it."""

    sampling: SamplingParams
    samples: tuple[SlotSample, ...]
    prompt: bytes = b""


class TableChange(Part, frozen=True):
    """Write `block_ids` (uint32) into the block table of `slot` from index `first` on. It is forgotten with
    its slot."""

    slot: int
    first: int
    block_ids: bytes


class BatchEntry(Part, frozen=True):
    """Compute `num_tokens` tokens of one sequence from position `start`: a chunk of a prompt, or the first
    token that a slot computes after its start.

    `sample_slots` are the slots that sample from the last position's logits: none for a chunk that is not the
    prompt's last, one normally, n when n samples fork from one prompt. All slots that are named continue
    behind the last position, which the block table of `slot` covers.
    """

    slot: int
    start: int
    num_tokens: int
    tokens: bytes
    sample_slots: tuple[int, ...]


class BlockCopy(Part, frozen=True):
    """Copy-on-write, before the step's computation."""

    src_block: int
    dst_block: int


class StepPlan(Message, frozen=True):
    """Engine core to rank: one step, as changes to what the rank knows by slot. Order of effects: frees,
    starts, tables, copies, computation, sampling. `decodes` are slots (uint32): each computes its newest
    token and samples the next. The newest is that of the slot's start, or any that an earlier plan sampled,
    which the engine core may not know yet."""

    step: int
    free_slots: tuple[int, ...] = ()
    starts: tuple[SlotStart, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    entries: tuple[BatchEntry, ...] = ()
    tables: tuple[TableChange, ...] = ()
    decodes: bytes = b""

    @property
    def started_slots(self) -> list[int]:
        return [sample.slot for start in self.starts for sample in start.samples]

    @property
    def sample_slots(self) -> list[int]:
        """The slots that sample, in the order of the report's rows."""
        of_entries = (slot for entry in self.entries for slot in entry.sample_slots)
        return [*of_entries, *memoryview(self.decodes).cast("I")]

    @property
    def num_sequences(self) -> int:
        """Entries and decodes; 0: the plan is a canary."""
        return len(self.entries) + len(self.decodes) // 4

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries) + len(self.decodes) // 4


class RowLogprob(Part, frozen=True):
    """The log-probabilities that go with the token of row `row` of a report."""

    row: int
    logprob: TokenLogprob


class FailedEntry(Part, frozen=True):
    """Sequence `index` of the plan, of its entries and then of its decodes, was not computed; "" where
    another rank knows why."""

    index: int
    reason: str


class StepReport(Message, frozen=True):
    """Rank to engine core: its part of the step is done and its KV is in the pool, except that of `failed`
    entries. Only the sampling rank has `tokens`: uint32, a row for each of the plan's `sample_slots`, 0 where
    it failed. `logprobs` are those of the rows for which they were asked. Times are the rank's monotonic
    clock: when its input was there, and when its part was done."""

    step: int
    tokens: bytes
    started_at: float
    finished_at: float
    # Every few seconds.
    memory: DeviceMemory | None = None
    # Also those that a stage before this one failed to compute, and those of sequences that failed in an
    # earlier step which this plan had not known of.
    failed: tuple[FailedEntry, ...] = ()
    logprobs: tuple[RowLogprob, ...] = ()


class StepProgress(Message, frozen=True):
    """Rank to engine core, at most every `workers.rank.process.PROGRESS_S`: the step has been under way for
    longer than that, and a piece of it was completed since."""

    step: int


class Shutdown(Message, frozen=True):
    """Engine core to rank: leave now."""

    reason: str


LinkDown = GatewayHello | Submission | Cancel | KvSnapshotRequest | Move | PurgeCache
LinkUp = ReplicaHello | StepFrame | KvEvents | KvSnapshot | Leaving | RoleChanged | CachePurged
PeerLinkMessage = PeerMessage | HandOver
RankDown = FormGroup | StepPlan | Shutdown | TransferOrder | StoreOrder
RankUp = (
    RankJoined
    | RankProgress
    | RankReady
    | RankFailed
    | StepProgress
    | StepReport
    | TransferReport
    | StoreReport
)

LINK_DOWN_CODEC: Codec[LinkDown] = Codec(LinkDown)
LINK_UP_CODEC: Codec[LinkUp] = Codec(LinkUp)
PEER_CODEC: Codec[PeerLinkMessage] = Codec(PeerLinkMessage)
RANK_DOWN_CODEC: Codec[RankDown] = Codec(RankDown)
RANK_UP_CODEC: Codec[RankUp] = Codec(RankUp)
RANK_SPEC_CODEC: Codec[RankSpec] = Codec(RankSpec)
