"""What goes into a step and what comes out of it: the plan under construction, the plans that are out, and
the outcome that the brain turns into frames.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.engine.sequence import Sequence
from workers.messages import (
    BatchEntry,
    BlockCopy,
    RequestFailed,
    SampledToken,
    SampleState,
    SlotStart,
    StageTimes,
    StepPlan,
    Submission,
    TokenDelta,
)


@dataclass(frozen=True, slots=True)
class LandingWish:
    """An outbound request will be scheduled soon: ask its decode replica for a landing of `num_tokens`."""

    request_id: str
    attempt: int
    submission: Submission
    num_tokens: int


@dataclass(frozen=True, slots=True)
class LoadWish:
    """A waiting sequence lacks blocks on the device: the store may have them. `keys` are those of all its
    full blocks (the last token's excluded), of which the device holds the first `num_held`."""

    request_id: str
    attempt: int
    sample: int
    tenant: str
    keys: tuple[bytes, ...]
    num_held: int


@dataclass(frozen=True, slots=True)
class FinishedBlock:
    """A block whose KV is complete, and which the prefix index holds under `key`. `chain` is the first key of
    its chain."""

    key: bytes
    parent: bytes
    chain: bytes
    tenant: str


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """KV of the first `num_computed_tokens` tokens of an outbound prompt, or of a sequence that moves, is in
    `block_ids` (the last block may be partial), at every rank. The first one of a request includes what was
    cached. Times are of the sampling rank's clock, for traces: the end of its part, and that less what all
    stages took."""

    request_id: str
    attempt: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    started_at: float
    finished_at: float


@dataclass(frozen=True, slots=True)
class PromptDone:
    """A request's prompt is computed and its first tokens are in the same outcome; once per request.

    `samples` are the unfinished ones with their outputs so far (what a hand-over carries), `block_ids` hold
    the KV of `num_computed_tokens` tokens. When `outbound` and not `all_finished`, the blocks stay
    referenced until `finish_outbound`; when `all_finished` the request is over and they are released.
    """

    request_id: str
    attempt: int
    submission: Submission
    num_computed_tokens: int
    num_cached_tokens: int
    times: StageTimes
    outbound: bool
    all_finished: bool
    samples: tuple[SampleState, ...]
    block_ids: tuple[int, ...]
    num_loaded_tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """All news of one step."""

    tokens: list[TokenDelta] = field(default_factory=list)
    chunks: list[ChunkDone] = field(default_factory=list)
    prompts: list[PromptDone] = field(default_factory=list)
    moving: list[ChunkDone] = field(default_factory=list)
    """Sequences that move to another replica: how far they have come."""
    failures: list[RequestFailed] = field(default_factory=list)


def delta_of(sequence: Sequence, token: bytes, sampled: SampledToken | None = None) -> TokenDelta:
    """News of one sequence; `token` is b"" or the sequence's last one."""
    logprob = None if sampled is None else sampled.logprob
    return TokenDelta(
        *sequence.request.key,
        sample=sequence.index,
        first_index=sequence.num_output_tokens - (1 if token else 0),
        tokens=token,
        logprobs=() if logprob is None else (logprob,),
        finish=sequence.finish,
    )


@dataclass(frozen=True, slots=True)
class PlannedEntry:
    """The scheduler's memory of one `BatchEntry`: who computes up to where, and who samples in which slot."""

    sequence: Sequence
    start: int
    end: int
    tokens: bytes
    samplers: tuple[tuple[int, Sequence], ...]


@dataclass(frozen=True, slots=True)
class IssuedPlan:
    """The scheduler's memory of a plan that is out. An isolated one names a suspect and nobody else."""

    step: int
    entries: list[PlannedEntry]
    is_isolated: bool


class Batch:
    """A step under construction; `budget_tokens` is what may still be added. Entries get their block tables
    when it is complete: until then blocks of any sequence may be moved out of the device's memory."""

    def __init__(self, step: int, budget_tokens: int) -> None:
        self.step = step
        self.budget_tokens = budget_tokens
        self.planned: list[PlannedEntry] = []
        self.is_isolated = False
        self._starts: list[SlotStart] = []
        self._copies: list[BlockCopy] = []

    def start(self, sequence: Sequence) -> None:
        """The sequence takes its slot in this step."""
        self._starts.append(
            SlotStart(
                slot=sequence.slot,
                tokens=bytes(sequence.tokens),
                num_prompt_tokens=sequence.request.num_prompt_tokens,
                seed=sequence.seed,
                sampling=sequence.request.submission.sampling,
            )
        )

    def copy(self, src_block: int, dst_block: int) -> None:
        """Copy a block before the step's computation; copies follow one another."""
        self._copies.append(BlockCopy(src_block=src_block, dst_block=dst_block))

    def add(self, sequence: Sequence, num_tokens: int, samplers: tuple[Sequence, ...]) -> None:
        """Compute the sequence's next `num_tokens`; then `samplers` sample one token each."""
        start = sequence.num_scheduled
        end = start + num_tokens
        slots = tuple((sampler.slot, sampler) for sampler in samplers)
        self.planned.append(PlannedEntry(sequence, start, end, sequence.token_bytes(start, end), slots))
        self.budget_tokens -= num_tokens
        sequence.num_scheduled = end
        sequence.last_step = self.step
        for sampler in samplers:
            sampler.num_pending += 1
            sampler.last_step = self.step

    @property
    def has_copies(self) -> bool:
        return bool(self._copies)

    def plan(self, free_slots: tuple[int, ...]) -> StepPlan:
        """The message to the ranks."""
        assert self.planned or not self._copies, "a plan that computes nothing moves blocks"
        entries = tuple(
            BatchEntry(
                slot=entry.sequence.slot,
                start=entry.start,
                num_tokens=entry.end - entry.start,
                tokens=entry.tokens,
                block_ids=tuple(entry.sequence.block_ids),
                sample_slots=tuple(slot for slot, _ in entry.samplers),
            )
            for entry in self.planned
        )
        return StepPlan(
            step=self.step,
            free_slots=free_slots,
            starts=tuple(self._starts),
            copies=tuple(self._copies),
            entries=entries,
        )
