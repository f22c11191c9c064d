"""The rank channel: engine core <-> rank, one plan down and one report up a step."""

from __future__ import annotations

from kvtransfer.codec import Codec, Message, Part
from kvtransfer.common.faults import FaultRule
from kvtransfer.messages import CompatibilityRecord, RankEndpoints, ReplicaIdentity
from kvtransfer.rpc.trust import TrustFiles
from kvtransfer.store.messages.store_orders import StoreOrder, StoreReport
from kvtransfer.transfer_orders import TransferOrder, TransferSettings
from kvtransfer.transfer_reports import TransferReport
from workers.messages.sampling import Grammar, PackedLogprobs, SamplingParams, TokenLogprob
from workers.stats_record import DeviceMemory

# ---------------------------------------------------------------------------------------------- start


class StepPace(Part, frozen=True):
    """Configures how long a step takes at least: a base, and more for each sequence that decodes and each
    token of a prompt. A paced rank has the same speed on every machine, whatever else that does."""

    base_s: float
    sequence_s: float
    token_s: float


class RankSpec(Message, frozen=True):
    """The specification that a rank process is started with (on its standard input, or as the actor's
    argument).

    Rank `stage * tp + tp_rank` is the `tp_rank`-th of the `tp` ranks that share every layer of `stage`. The
    first of the last stage samples. `probe_rows` above 0: before it loads, the rank measures what a layer and
    the head cost on its device for a step of that many tokens, `probe_sampled_rows` of which sample (0: all),
    and reports it in `RankJoined`. `kv_share` above 0: `num_kv_tokens` is the most; see `AutoKv`.
    """

    replica: ReplicaIdentity
    rank: int
    tp: int
    pp: int
    engine_core_address: str
    trust: TrustFiles
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
    # KV capacity in host memory for older blocks of running sequences, in addition to `num_kv_tokens`.
    num_offload_tokens: int = 0
    probe_rows: int = 0
    probe_sampled_rows: int = 0
    # Whether it may run only with products and attention whose results for a sequence depend on nothing else.
    deterministic: bool = False
    faults: tuple[FaultRule, ...] = ()
    # The pace of steps; None: they take the time that they need.
    pace: StepPace | None = None
    # The secret drawn for this start of this rank; see `RankTicket`.
    ticket: bytes = b""
    # The GGUF file of which `model_dir` was made on the engine core's host ("": none). A rank on another host
    # makes it again, in `model_cache` ("": the default of that host).
    gguf_file: str = ""
    model_cache: str = ""
    # The experts of each layer that the CPU computes.
    expert_offload: int = 0
    # The parts into which the experts of a layer are divided; `tp / ep` ranks share the experts of one.
    ep: int = 1
    # Whether layers with a window have KV apart, of which what is behind the window is freed.
    frees_windows: bool = False
    # The slots for copies of experts in each layer of each rank.
    expert_copies: int = 0
    # As `engine.kv_dtype`.
    kv_dtype: str = "auto"
    # The snapshots of recurrent states for which there are blocks; None: as many as KV leaves memory for.
    state_snapshots: int | None = None
    # The form of weights in products, as a pool's `weight_dtype`.
    weight_dtype: str = "auto"
    # As `store.kv_dtype`; "auto" also where the replica has no store.
    store_kv_dtype: str = "auto"
    # As `engine.latent_kv`.
    latent_kv: str = "replicated"
    # As `engine.mixed_graphs`.
    mixed_graphs: bool = False

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
    """The cost of a step of the probed size on a rank's device, in seconds: one layer (its share of it under
    TP), embedding, and norm with head. All 0 when it was not asked."""

    layer_s: float = 0.0
    embedding_s: float = 0.0
    head_s: float = 0.0


class RankTicket(Message, frozen=True):
    """Rank to engine core, the first frame: which rank of this replica it is, proven by the ticket of its
    `RankSpec`. Others who know the cluster secret, such as ranks of an earlier replica at this address, do
    not have it."""

    rank: int
    ticket: bytes


class RankJoined(Message, frozen=True):
    """Rank to engine core, before it loads: it is alive, and has not loaded anything yet. `store_address` is
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
    # Blocks in host memory; their ids follow on those of `num_blocks`.
    num_offload_blocks: int = 0
    # The operations that its device was measured to compute a second, and the bytes to read from its memory.
    flop_s: float = 0.0
    byte_s: float = 0.0
    # The name of its attention backend.
    backend: str = ""
    # The blocks of each group of layers behind the first, which has `num_blocks`.
    num_window_blocks: tuple[int, ...] = ()
    # The seconds of each phase of its start, from the begin of its process, in their order. Beside these ran,
    # for `kernels_s`, the compiler of kernels.
    phase_to_s: dict[str, float] = {}
    kernels_s: float = 0.0


class RankFailed(Message, frozen=True):
    """Rank to engine core: it cannot continue (bad checkpoint, out of memory, a kernel's error); it exits.
    With `lost_peer` its connection to another rank broke: a consequence, not the first cause."""

    rank: int
    reason: str
    lost_peer: bool = False


# ------------------------------------------------------------------------------------------- grammars


class CompileGrammar(Message, frozen=True):
    """Engine core to the rank that samples: compile this grammar and keep it until it is released; answered
    with `GrammarCompiled`."""

    grammar: Grammar


class ReleaseGrammar(Message, frozen=True):
    """Engine core to the rank that samples: no request here needs this grammar any more. It may stay in the
    cache. Follows every `CompileGrammar`, also one that was refused."""

    digest: bytes


class GrammarCompiled(Message, frozen=True):
    """Rank to engine core: slots may start with this grammar or, with an `error`, it is refused, if it
    `is_transient` only here and now: others take all the memory for grammars, or no process checks them."""

    digest: bytes
    error: str = ""
    is_transient: bool = False


# ---------------------------------------------------------------------------------------------- steps


class SlotSample(Part, frozen=True):
    """A sample takes slot `slot` of the rank. `last_token` is the newest of prompt and output, of which it
    has `num_output_tokens` already (resume, hand-over, preemption); `output` are these where penalties count
    them or a grammar replays them, else b"". `mask_digest` as in `SampleState`."""

    slot: int
    seed: int
    last_token: int
    num_output_tokens: int = 0
    output: bytes = b""
    mask_digest: bytes = b""


class SlotStart(Part, frozen=True):
    """The start of the samples of one request: the facts that the sampler must know. `prompt` is b"" unless
    the repetition penalty looks at it; `grammar` is the digest of one that is compiled, or b""."""

    sampling: SamplingParams
    samples: tuple[SlotSample, ...]
    prompt: bytes = b""
    grammar: bytes = b""


class TableChange(Part, frozen=True):
    """Write `block_ids` (uint32) into the block table of `slot`, of a group of layers, from index `first` on.
    It is forgotten with its slot."""

    slot: int
    first: int
    block_ids: bytes
    group: int = 0


class PromptTargets(Part, frozen=True):
    """The tokens of a prompt whose log-probabilities are asked for: these `tokens` (uint32), and the
    `num_top` most likely in their places, each from the logits of the position before it, the first from
    those of position `start`."""

    start: int
    tokens: bytes
    num_top: int


class BatchEntry(Part, frozen=True):
    """Compute `num_tokens` tokens of one sequence from position `start`: a chunk of a prompt, or the first
    token that a slot computes after its start.

    `sample_slots` are the slots that sample from the last position's logits: none for a chunk that is not the
    prompt's last, one normally, n when n samples fork from one prompt. All slots that are named continue
    behind the last position, which the block table of `slot` covers. With `pools`, the hidden state of the
    last position is asked for in place of a sample.
    """

    slot: int
    start: int
    num_tokens: int
    tokens: bytes
    sample_slots: tuple[int, ...]
    targets: PromptTargets | None = None
    pools: bool = False


class BlockCopy(Part, frozen=True):
    """Copy-on-write of a block of a group of layers, before the step's computation."""

    src_block: int
    dst_block: int
    group: int = 0


class ExpertCopy(Part, frozen=True):
    """Before the step's computation: the ranks of part `part` of the experts take a copy of `expert` of the
    layer into a slot, or free it (-1)."""

    layer: int
    part: int
    slot: int
    expert: int


class StepPlan(Message, frozen=True):
    """Engine core to rank: one step, as changes to what the rank knows by slot. Order of effects: frees,
    starts, tables, copies, copies of experts, computation, sampling. `grown` are pairs (uint32) of a slot,
    one a slot, and a block on the device, which is one more behind those of its table. `decodes` are slots
    (uint32): each computes its newest token and samples the next. The newest is that of the slot's start, or
    any that an earlier plan sampled, which the engine core may not know yet.

    A plan with blocks that are `given` has nothing else: the ranks of each stage, of which each received a
    part of these blocks, give one another the rest."""

    step: int
    free_slots: tuple[int, ...] = ()
    starts: tuple[SlotStart, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    entries: tuple[BatchEntry, ...] = ()
    tables: tuple[TableChange, ...] = ()
    grown: bytes = b""
    decodes: bytes = b""
    expert_copies: tuple[ExpertCopy, ...] = ()
    given: tuple[int, ...] = ()

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

    @property
    def num_targets(self) -> int:
        """Tokens of prompts whose log-probabilities are asked for."""
        return sum(len(entry.targets.tokens) // 4 for entry in self.entries if entry.targets is not None)


class RowLogprob(Part, frozen=True):
    """The log-probabilities that go with the token of row `row` of a report."""

    row: int
    logprob: TokenLogprob


class EntryLogprobs(Part, frozen=True):
    """The log-probabilities of the `targets` of entry `index` of the plan."""

    index: int
    logprobs: PackedLogprobs


class EntryEmbedding(Part, frozen=True):
    """The hidden state after the final norm of the last position of entry `index` of the plan, which `pools`:
    float32 `vector` [hidden_size]."""

    index: int
    vector: bytes


# The code of a `FailedEntry` that can be computed again from an earlier state.
STATE_LOST = "state"


class FailedEntry(Part, frozen=True):
    """Sequence `index` of the plan, of its entries and then of its decodes, was not computed; "" where
    another rank knows why. `code` is that of its `RequestFailed`: "grammar" where that is the cause. It is
    `STATE_LOST` where nothing is wrong with the sequence, but its recurrent state is."""

    index: int
    reason: str
    code: str = "internal"


class RowMask(Part, frozen=True):
    """The digest of the tokens that a grammar allowed in the place of the token of row `row` of a report."""

    row: int
    digest: bytes


class ExpertCounts(Part, frozen=True):
    """The tokens that each expert of a rank has had since its last such report: `counts` (uint32)
    [num_layers, num_owned] of the layers with these numbers, and of the experts from `first_expert` on. A
    token has `num_chosen` of the `num_experts` experts of a layer. `copied` are the tokens of copies of other
    experts, triples (uint32) of a layer, an expert and its tokens."""

    layers: tuple[int, ...]
    first_expert: int
    num_experts: int
    num_chosen: int
    counts: bytes
    copied: bytes = b""


class StepReport(Message, frozen=True):
    """Rank to engine core: its part of the step is done and its KV is in the pool, except that of `failed`
    entries. Only the sampling rank has `tokens`: uint32, a row for each of the plan's `sample_slots`, 0 where
    it failed. `logprobs` are those of the rows for which they were asked, `masks` of those with a grammar,
    and `prompt_logprobs` and `embeddings` those of entries; an entry that failed has none. Times are the
    rank's monotonic clock: when its input was there, and when its part was done."""

    step: int
    tokens: bytes
    started_at: float
    finished_at: float
    # The device's memory, every few seconds.
    memory: DeviceMemory | None = None
    # The failed entries, also those that a stage before this one failed to compute, and those of sequences
    # that failed in an earlier step which this plan had not known of.
    failed: tuple[FailedEntry, ...] = ()
    logprobs: tuple[RowLogprob, ...] = ()
    prompt_logprobs: tuple[EntryLogprobs, ...] = ()
    embeddings: tuple[EntryEmbedding, ...] = ()
    masks: tuple[RowMask, ...] = ()
    # Of a model with experts, every few seconds, from the first of the ranks that hold the same ones.
    experts: ExpertCounts | None = None


class StepProgress(Message, frozen=True):
    """Rank to engine core, at most every `workers.rank.process.PROGRESS_S`: the step has been under way for
    longer than that, and a piece of it was completed since."""

    step: int


class Shutdown(Message, frozen=True):
    """Engine core to rank: leave now."""

    reason: str


GrammarOrder = CompileGrammar | ReleaseGrammar

RankDown = FormGroup | StepPlan | Shutdown | TransferOrder | StoreOrder | GrammarOrder
RankUp = (
    RankTicket
    | RankJoined
    | RankProgress
    | RankReady
    | RankFailed
    | StepProgress
    | StepReport
    | GrammarCompiled
    | TransferReport
    | StoreReport
)

RANK_DOWN_CODEC: Codec[RankDown] = Codec(RankDown)
RANK_UP_CODEC: Codec[RankUp] = Codec(RankUp)
RANK_SPEC_CODEC: Codec[RankSpec] = Codec(RankSpec)
