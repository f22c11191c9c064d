"""The parts of a step: the plan under construction, the record of an unreported plan, and the outcome that
the engine core turns into frames.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from kvtransfer.blocks.keys import TOKEN_BYTES
from kvtransfer.codec import MAX_FRAME_BYTES
from kvtransfer.common.moving_average import moving_average
from kvtransfer.messages import BlockSpan
from workers.messages.link import (
    PromptEmbedding,
    PromptLogprobs,
    RequestFailed,
    SampleState,
    StageTimes,
    Submission,
    TokenDelta,
)
from workers.messages.rank_channel import (
    BatchEntry,
    BlockCopy,
    PromptTargets,
    SlotSample,
    SlotStart,
    StepPlan,
    TableChange,
)
from workers.messages.sampling import SamplingParams
from workers.scheduler.sequence import Phase, Request, Sequence

# The most bytes that starts, entries and tables of one plan may take. The other half is for changes that
# cannot wait: a freed slot takes 5 bytes, and a block that is moved 33, copy and place in a table.
PLAN_BYTES = MAX_FRAME_BYTES // 2
# The most bytes that the log-probabilities of prompts may take of one report.
LOGPROB_BYTES = MAX_FRAME_BYTES // 4


@dataclass(frozen=True, slots=True)
class LandingNeed:
    """A prompt to hand over that will be scheduled soon. Its decode replica is asked for a landing of
    `num_tokens` tokens, to be granted before `deadline` (None: at any time)."""

    request_id: str
    attempt: int
    submission: Submission
    num_tokens: int
    deadline: float | None


@dataclass(frozen=True, slots=True)
class LoadNeed:
    """A waiting sequence that lacks blocks which the store may have. `keys` are those of all its full blocks
    (without that of the last token). The device has the first `num_held` of them."""

    request_id: str
    attempt: int
    sample: int
    sharing_group: str
    keys: tuple[bytes, ...]
    num_held: int


@dataclass(frozen=True, slots=True)
class FinishedBlock:
    """A block whose KV is complete, and which the prefix index holds under `key`. `chain` is the first key of
    its chain. With `has_state` the pools of states hold the state behind its last token under the same
    key."""

    key: bytes
    parent: bytes
    chain: bytes
    sharing_group: str
    has_state: bool = False


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """KV of the first `num_computed_tokens` tokens of a prompt to hand over, or of a sequence that migrates,
    is in `block_ids` (the last block may be partial), at every rank, and as far as it is within the windows
    of groups of layers, in `windows`. The first one of a request includes the cached tokens. Times are of the
    sampling rank's clock, for traces: the end of its part, and that less the time that all stages took."""

    request_id: str
    attempt: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    started_at: float
    finished_at: float
    windows: tuple[BlockSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptDone:
    """A request's prompt is computed, and its first tokens are in the same outcome. Once per request.

    `samples` are the unfinished ones with their output, as a hand-over carries them. `block_ids` have the KV
    of `num_computed_tokens` tokens. If the request `decodes_remotely` and is not `all_finished`, the blocks
    stay referenced until `finish_hand_over`. If it is `all_finished`, the request is over.
    """

    request_id: str
    attempt: int
    submission: Submission
    num_computed_tokens: int
    num_cached_tokens: int
    times: StageTimes
    decodes_remotely: bool
    all_finished: bool
    samples: tuple[SampleState, ...]
    block_ids: tuple[int, ...]
    num_loaded_tokens: dict[str, int]
    windows: tuple[BlockSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Everything that the report of one step changed."""

    tokens: list[TokenDelta] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    embeddings: list[PromptEmbedding] = field(default_factory=list)
    chunks: list[ChunkDone] = field(default_factory=list)
    prompts: list[PromptDone] = field(default_factory=list)
    # The progress of sequences that move to another replica.
    migrating: list[ChunkDone] = field(default_factory=list)
    failures: list[RequestFailed] = field(default_factory=list)
    # The position that each decode of the step computed.
    decode_starts: Collection[int] = ()


def end_of(sequence: Sequence) -> TokenDelta:
    """Return the message that a sequence has ended, without a token."""
    return TokenDelta(
        *sequence.request.key,
        sample=sequence.index,
        first_index=sequence.num_output_tokens,
        tokens=b"",
        logprobs=(),
        finish=sequence.finish,
    )


@dataclass(slots=True)
class StepRates:
    """Moving averages of the speed of steps (0: not yet known).

    `prefill_tok_s` is what the slowest stage lets through, `decode_step_s` how long a token's step takes in
    all stages together.
    """

    prefill_tok_s: float = 0.0
    decode_step_s: float = 0.0
    # Tokens of prompts, and seconds, of a step. Their quotient is the rate: steps that a late host finds done
    # together seem to take no time, which the one before them had, so a mean of each step's own rate would
    # have no bound.
    _chunk_tokens: float = 0.0
    _chunk_s: float = 0.0

    def add(self, plan: StepPlan, stage_to_busy_s: list[float]) -> None:
        """Note a finished step; `stage_to_busy_s` is what each stage's slowest rank took. A step that
        computes chunks of prompts together with more decodes is no measure of either."""
        if min(stage_to_busy_s) <= 0:
            return
        num_chunk_tokens = sum(entry.num_tokens for entry in plan.entries if entry.num_tokens > 1)
        if not num_chunk_tokens:
            self.add_decode(sum(stage_to_busy_s))
        elif 2 * num_chunk_tokens >= plan.num_tokens:
            self._chunk_tokens = moving_average(self._chunk_tokens, num_chunk_tokens, 0.2)
            self._chunk_s = moving_average(self._chunk_s, max(stage_to_busy_s), 0.2)
            self.prefill_tok_s = self._chunk_tokens / self._chunk_s

    def add_decode(self, step_s: float) -> None:
        """Note a step of decodes alone, which took so long in all stages together."""
        self.decode_step_s = moving_average(self.decode_step_s, step_s, 0.1)


@dataclass(frozen=True, slots=True)
class PlannedEntry:
    """The scheduler's record of one `BatchEntry`: the sequence with the tokens [start, end) that it computes,
    the sequences that sample, and what is read of the prompt."""

    sequence: Sequence
    start: int
    end: int
    tokens: bytes
    samplers: tuple[Sequence, ...]
    targets: PromptTargets | None = None
    pools: bool = False


@dataclass(frozen=True, slots=True)
class IssuedPlan:
    """The scheduler's record of an unreported plan. Sequence i of `decodes` computes the token at the
    position `decode_starts[i]`. An isolated plan names one suspect and nobody else."""

    step: int
    entries: list[PlannedEntry]
    decodes: list[Sequence]
    decode_starts: list[int]
    is_isolated: bool

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that the plan names, in its order."""
        return [*(entry.sequence for entry in self.entries), *self.decodes]

    @property
    def samples(self) -> bool:
        """Whether any sequence samples."""
        return bool(self.decodes) or any(entry.samplers for entry in self.entries)

    @property
    def suspect(self) -> Request | None:
        """The request that is alone in the plan; None in a plan that is not isolated."""
        return self.sequences[0].request if self.is_isolated else None


class StepBatch:
    """A step under construction. `budget_tokens` and `budget_bytes` (of the message) may still be added.
    Changes of block tables are collected at the end, because blocks of any sequence may move to host memory
    until then."""

    def __init__(self, step: int, budget_tokens: int) -> None:
        self.step = step
        self.budget_tokens = budget_tokens
        self.budget_bytes = PLAN_BYTES
        self.budget_logprob_bytes = LOGPROB_BYTES
        self.entries: list[PlannedEntry] = []
        self.decodes: list[Sequence] = []
        self.decode_starts: list[int] = []
        self.is_isolated = False
        # Whether sequences that decode wait for this step, or one beside it, to end.
        self.delays_decodes = False
        self._request_to_samples: dict[Request, list[SlotSample]] = {}
        self._copies: list[BlockCopy] = []

    @property
    def num_planned(self) -> int:
        return len(self.entries) + len(self.decodes)

    @property
    def planned(self) -> set[Sequence]:
        """The sequences in the step."""
        return {*self.decodes, *(entry.sequence for entry in self.entries)}

    def fits(
        self, sequence: Sequence, num_tokens: int, num_blocks: int, starting: Iterable[Sequence]
    ) -> bool:
        """Whether the message has bytes left for the sequence's next `num_tokens`, the new part of its table
        of `num_blocks`, and the starts of `starting`."""
        num_bytes = _entry_bytes(sequence, num_tokens) + _table_bytes(sequence, num_blocks)
        for number, sample in enumerate(starting):
            if number == 0 and sample.request not in self._request_to_samples:
                num_bytes += _request_bytes(sample.request)
            num_bytes += _sample_bytes(sample)
        return num_bytes <= self.budget_bytes

    def most_tokens(self, sequence: Sequence) -> int:
        """Return how many of the sequence's next tokens the step may compute: the budget, or fewer if the
        report cannot take that many log-probabilities."""
        request = sequence.request
        first = max(sequence.num_scheduled, request.num_scored_tokens - 1)
        num_taken = self.budget_logprob_bytes // logprob_bytes(request.submission.sampling)
        if first + num_taken >= request.num_prompt_tokens - 1:
            return self.budget_tokens
        return min(self.budget_tokens, first + num_taken - sequence.num_scheduled)

    def start(self, sequence: Sequence) -> None:
        """Give the sequence its slot in this step."""
        request = sequence.request
        if request not in self._request_to_samples:
            self._request_to_samples[request] = []
            self.budget_bytes -= _request_bytes(request)
        self.budget_bytes -= _sample_bytes(sequence)
        self._request_to_samples[request].append(
            SlotSample(
                slot=sequence.slot,
                seed=sequence.seed,
                last_token=sequence.token_at(sequence.num_tokens - 1),
                num_output_tokens=sequence.num_output_tokens,
                output=sequence.output_bytes if _names_output(request.submission) else b"",
                mask_digest=sequence.mask_digest,
            )
        )

    def copy(self, src_block: int, dst_block: int, group: int = 0) -> None:
        """Copy a block of a group of layers before the step's computation; copies follow one another."""
        self._copies.append(BlockCopy(src_block=src_block, dst_block=dst_block, group=group))

    def add(self, sequence: Sequence, num_tokens: int, samplers: tuple[Sequence, ...]) -> None:
        """Compute the sequence's next `num_tokens`; then `samplers` sample one token each."""
        self.budget_tokens -= num_tokens
        self.budget_bytes -= _table_bytes(sequence, len(sequence.block_ids))
        start = sequence.num_scheduled
        end = start + num_tokens
        if sequence.slot_position == start == sequence.target - 1 and samplers == (sequence,):
            self._decode(sequence)
            return
        tokens = sequence.token_bytes(start, end)
        assert len(tokens) == TOKEN_BYTES * num_tokens, "a token is not known, and not the slot's newest one"
        pools = sequence.request.pools and end == sequence.target
        targets = _targets(sequence, start, end)
        self.entries.append(PlannedEntry(sequence, start, end, tokens, samplers, targets, pools))
        self.budget_bytes -= _entry_bytes(sequence, num_tokens)
        if targets is not None:
            num_targets = len(targets.tokens) // TOKEN_BYTES
            self.budget_logprob_bytes -= num_targets * logprob_bytes(sequence.request.submission.sampling)
        for named in {sequence, *samplers}:
            named.slot_position, named.last_step = end, self.step
        sequence.num_scheduled = end
        for sampler in samplers:
            sampler.num_pending += 1
        sequence.num_pending += pools  # the embedding counts as the token that ends the sequence

    def add_decode(self, sequence: Sequence) -> bool:
        """Compute and sample the sequence's next token, the only one that is left, if the ranks and its
        blocks are ready for it. Return whether they were."""
        start = sequence.num_scheduled
        if (
            sequence.slot_position != start
            or start >= sequence.num_writable
            or sequence.forks
            or sequence.request.pools
            or sequence.replaced
            or sequence.phase is not Phase.RUNNING
            or self.budget_tokens < 1
            or self.budget_bytes < DECODE_BYTES
        ):
            return False
        self.budget_tokens -= 1
        self._decode(sequence)
        return True

    def _decode(self, sequence: Sequence) -> None:
        self.budget_bytes -= DECODE_BYTES
        self.decodes.append(sequence)
        self.decode_starts.append(sequence.num_scheduled)
        sequence.num_scheduled += 1
        sequence.slot_position += 1
        sequence.num_pending += 1
        sequence.last_step = self.step

    @property
    def has_copies(self) -> bool:
        return bool(self._copies)

    def plan(self, free_slots: tuple[int, ...]) -> StepPlan:
        """Return the message to the ranks, which then know the tables of all sequences that it names."""
        assert self.num_planned or not self._copies, "a plan that computes nothing moves blocks"
        assert self.budget_bytes >= 0, "more was planned than a frame holds"
        tables: list[TableChange] = []
        for entry in self.entries:
            _send_table(entry.sequence, tables)
        grown: list[int] = []
        for sequence in self.decodes:
            num_new = len(sequence.block_ids) - sequence.num_sent_blocks
            if num_new == 1 and not sequence.replaced:
                grown += (sequence.slot, sequence.block_ids[-1])
                sequence.num_sent_blocks += 1
            elif num_new or sequence.replaced:
                _send_full_table(sequence, tables)
            if sequence.group_tables:
                _send_group_tables(sequence, tables)
        entries = tuple(
            BatchEntry(
                slot=entry.sequence.slot,
                start=entry.start,
                num_tokens=entry.end - entry.start,
                tokens=entry.tokens,
                sample_slots=tuple([sampler.slot for sampler in entry.samplers]),
                targets=entry.targets,
                pools=entry.pools,
            )
            for entry in self.entries
        )
        return StepPlan(
            step=self.step,
            free_slots=free_slots,
            starts=tuple(_slot_start(*started) for started in self._request_to_samples.items()),
            copies=tuple(self._copies),
            entries=entries,
            tables=tuple(tables),
            grown=pack_ids(grown),
            decodes=pack_ids([sequence.slot for sequence in self.decodes]),
        )

    def issued(self) -> IssuedPlan:
        """Return the record of the plan, which is kept until the plan is settled."""
        return IssuedPlan(self.step, self.entries, self.decodes, self.decode_starts, self.is_isolated)


def pack_ids(ids: Collection[int]) -> bytes:
    """Pack ids of tokens, blocks or slots as uint32."""
    return struct.pack(f"<{len(ids)}I", *ids)


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Return what `pack_ids` packed."""
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def _send_table(sequence: Sequence, into: list[TableChange]) -> None:
    """Add the parts of the sequence's tables that the ranks do not know yet."""
    _send_full_table(sequence, into)
    _send_group_tables(sequence, into)


def _send_full_table(sequence: Sequence, into: list[TableChange]) -> None:
    block_ids = sequence.block_ids
    for first, end in _runs(sequence.replaced, sequence.num_sent_blocks, len(block_ids)):
        into.append(TableChange(sequence.slot, first, pack_ids(block_ids[first:end])))
    sequence.num_sent_blocks = len(block_ids)
    sequence.replaced.clear()


def _send_group_tables(sequence: Sequence, into: list[TableChange]) -> None:
    for group, table in enumerate(sequence.group_tables, 1):
        if not table.num_unsent:
            continue
        for first, end in _runs(table.take_unsent(), 0, 0):
            block_ids = [table.block(index) for index in range(first, end)]
            into.append(TableChange(sequence.slot, first, pack_ids(block_ids), group))


def _runs(replaced: Collection[int], num_sent: int, end: int) -> list[list[int]]:
    """Return runs of indices: of those that were replaced, and those from `num_sent` to `end`."""
    runs: list[list[int]] = []
    for index in sorted(replaced):
        if runs and runs[-1][1] == index:
            runs[-1][1] += 1
        else:
            runs.append([index, index + 1])
    if num_sent < end:
        runs.append([num_sent, end])
    return runs


def _targets(sequence: Sequence, start: int, end: int) -> PromptTargets | None:
    """Return the prompt targets of positions [start, end): the log-probabilities of the prompt's tokens
    behind them that are not reported yet."""
    request = sequence.request
    first = max(start, request.num_scored_tokens - 1)
    tokens = sequence.token_bytes(first + 1, min(end + 1, request.num_prompt_tokens))
    num_top = request.submission.sampling.num_prompt_logprobs
    return PromptTargets(first, tokens, num_top) if tokens and num_top is not None else None


def _slot_start(request: Request, samples: list[SlotSample]) -> SlotStart:
    submission = request.submission
    prompt = submission.prompt if submission.sampling.penalizes_prompt else b""
    grammar = b"" if submission.grammar is None else submission.grammar.digest
    return SlotStart(submission.sampling, tuple(samples), prompt, grammar)


def _names_output(submission: Submission) -> bool:
    """Whether a slot's start names its output."""
    return submission.sampling.penalizes_output or submission.grammar is not None


# Upper bounds of the bytes that msgpack makes of a message: numbers take 9 bytes, ids and headers 5.
# The bytes of a slot of `StepPlan.decodes`.
DECODE_BYTES = 4
_TABLE_CHANGE_BYTES = 17


def entry_bytes(num_tokens: int, num_samplers: int) -> int:
    """Return the most bytes that a `BatchEntry` takes."""
    return 64 + 4 * num_tokens + 9 * num_samplers


def target_bytes(sampling: SamplingParams, num_tokens: int) -> int:
    """Return the most bytes that the `PromptTargets` of `num_tokens` tokens take."""
    return 0 if sampling.num_prompt_logprobs is None else 32 + 4 * num_tokens


def logprob_bytes(sampling: SamplingParams) -> int:
    """Return the bytes that the log-probabilities of one token of a prompt take."""
    return 4 + 8 * (sampling.num_prompt_logprobs or 0)


def table_bytes(num_blocks: int, num_changes: int = 1) -> int:
    """Return the most bytes that `num_changes` `TableChange`s of `num_blocks` blocks together take."""
    return _TABLE_CHANGE_BYTES * num_changes + 4 * num_blocks


def start_bytes(submission: Submission) -> int:
    """Return the most bytes that a `SlotStart` takes without its samples."""
    sampling = submission.sampling
    num_words = 16 + 2 * len(sampling.logit_bias) + len(sampling.stop_token_ids)
    return 128 + 9 * num_words + (len(submission.prompt) if sampling.penalizes_prompt else 0)


def sample_bytes(submission: Submission, num_output_tokens: int) -> int:
    """Return the most bytes that a `SlotSample` takes."""
    return 96 + (4 * num_output_tokens if _names_output(submission) else 0)


def _entry_bytes(sequence: Sequence, num_tokens: int) -> int:
    num_bytes = entry_bytes(num_tokens, len(sequence.samplers))
    return num_bytes + target_bytes(sequence.request.submission.sampling, num_tokens)


def _request_bytes(request: Request) -> int:
    return start_bytes(request.submission)


def _sample_bytes(sequence: Sequence) -> int:
    return sample_bytes(sequence.request.submission, sequence.num_output_tokens)


def _table_bytes(sequence: Sequence, num_blocks: int) -> int:
    """Return the most bytes that the ranks' table of the sequence takes until it has `num_blocks`."""
    num_replaced = len(sequence.replaced)
    num_bytes = table_bytes(num_blocks - sequence.num_sent_blocks + num_replaced, num_replaced + 1)
    for table in sequence.group_tables:
        num_new = max(0, num_blocks - table.end)
        num_bytes += table_bytes(num_new + table.num_unsent, table.num_unsent + 1)
    return num_bytes
