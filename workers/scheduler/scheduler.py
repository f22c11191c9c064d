"""Scheduler: decides what each step computes. The engine core calls it between steps, and the simulator runs
the same class. It uses no clock, device or socket: time is an argument, plans and outcomes are messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import replace as replace_plan

from msgspec.structs import replace

from kvtransfer.blocks.keys import TOKEN_BYTES
from kvtransfer.messages import BlockSpan
from workers.config import EngineConfig
from workers.errors import QueueFullError
from workers.messages.link import (
    PromptEmbedding,
    PromptLogprobs,
    RequestFailed,
    RequestKey,
    StageTimes,
    Submission,
    TokenDelta,
)
from workers.messages.rank_channel import GrammarCompiled, StepPlan, StepReport
from workers.messages.sampling import TokenLogprob
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.chunk_sizes import ChunkSizes
from workers.scheduler.engine_limits import EngineLimits
from workers.scheduler.group_pool import GroupPool
from workers.scheduler.isolation import Isolation
from workers.scheduler.lifecycle import Lifecycle
from workers.scheduler.micro_batches import BatchPause, MicroBatches
from workers.scheduler.offload import most_local_tokens
from workers.scheduler.planner import Planner
from workers.scheduler.sequence import HeldBack, LandingState, Phase, Sequence, StoreLoad
from workers.scheduler.sequence_counts import SequenceCounts
from workers.scheduler.sequence_migration import SequenceMigration
from workers.scheduler.snapshot_policy import SnapshotPolicy
from workers.scheduler.step import (
    ChunkDone,
    IssuedPlan,
    LandingNeed,
    LoadNeed,
    PlannedEntry,
    PromptDone,
    StepBatch,
    StepOutcome,
    end_of,
)
from workers.scheduler.step_costs import StepCosts
from workers.scheduler.waiting_needs import landing_needs, load_needs

# The time to a retry of a request for whose grammar there is no memory.
_FULL_RETRY_S = 1.0

# A token of a report, with its log-probabilities and the digest of its mask, if any.
_Row = tuple[bytes, TokenLogprob | None, bytes]


class Scheduler:
    """Continuous batching with chunked prefill, prefix reuse, priorities, deadlines and preemption.

    Plans may be made while earlier ones are unreported. A plan is settled, in plan order, when every rank has
    reported it; until then nothing that the plan names is free. A token that is sampled but not yet reported
    is named in a later plan without its id. `Lifecycle` draws the states of a sequence, `Planner` fills a
    step, and `MicroBatches` divides the sequences over plans.

    A waiting sequence is admitted in the order of `Sequence.queue_rank`, and the one with the largest
    `Sequence.rank` is preempted first.

    The parts are public, for reading and for calls that concern one part alone: the settings (`config`), the
    limits of one request (`limits`), the requests with their blocks and grammars (`life`), their counts
    (`counts`), the unreported plans (`issued`), the pause of the class `batch` (`pause`), sequences that move
    to another replica (`migration`), and the search for a request that fails (`isolation`).
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        *,
        eos_token_ids: Seq[int],
        max_context_tokens: int,
        num_stages: int = 1,
        attention_ratio: float = 0.0,
        has_store: bool = False,
        num_offload_blocks: int = 0,
        group_pools: Seq[GroupPool] = (),
        snapshots: SnapshotPolicy | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        """`group_pools` are those of the groups of layers behind the first. `num_stages` is the
        number of pipeline stages; with several, `attention_ratio` shortens later chunks (`MicroBatches`).
        With `has_store`, a waiting sequence is admitted only after its load from the store (`loads_wanted`)
        has ended. Every rank has `num_offload_blocks` blocks in host memory, whose ids follow those of the
        pool. `snapshots` decides which states are kept; None: as `config` has it. Chunks are sized by the
        `costs`, if `config` has an objective for output tokens; None: of no step.
        """
        self.config = config
        self._pool = pool
        self._end_token_ids = frozenset(eos_token_ids)
        self.limits = EngineLimits(
            max_context_tokens=max_context_tokens,
            pool=pool,
            max_local_kv_tokens=most_local_tokens(
                config.offload_share, pool.num_total, num_offload_blocks, pool.block_tokens
            ),
            max_sequences=config.max_sequences,
        )
        micro = MicroBatches(num_stages, config.longest_chunk_tokens, pool.block_tokens, attention_ratio)
        self._landing_window_tokens = config.max_batch_tokens * num_stages
        snapshots = snapshots or SnapshotPolicy.of_replica(pool.block_tokens, config, group_pools)
        self.life = Lifecycle(pool, config.max_sequences, snapshots, num_offload_blocks, group_pools)
        self.life.has_store = self.life.tables.has_store = has_store
        self.migration = SequenceMigration(self.life)
        self.isolation = Isolation(self.life, num_stages)
        self.pause = BatchPause(self.life, config.max_sequences)
        self.counts = SequenceCounts(self.life, self.pause, pool)
        sizes = ChunkSizes(config.tpot_objective_s, costs or StepCosts(), num_stages, pool.block_tokens)
        self._planner = Planner(config, self.life, micro, self.isolation, self.pause, sizes)
        self.issued: deque[IssuedPlan] = deque()
        self._failures: list[RequestFailed] = []
        self._step = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is no request and no unreported plan."""
        return not self.life.requests and not self.issued

    def check(self, num_other_references: int = 0, num_other_group_references: Seq[int] = ()) -> None:
        """Assert every invariant of pools and sequences. The others are references of landings, to blocks
        and, in each group with a window, to its blocks."""
        self.life.check(num_other_references, num_other_group_references)
        self._planner.check()
        if self.is_idle:
            assert self.life.num_references == self.life.num_group_references == 0

    # ---------------------------------------------------------------------------------------- requests

    def check_capacity(self, submission: Submission) -> None:
        """Raise `CapacityError` when the request can never run here, `QueueFullError` when too many wait."""
        self.limits.check(submission)
        self.life.grammars.check_limit(submission)
        if self.counts.num_waiting >= self.config.max_waiting:
            raise QueueFullError(
                f"{self.counts.num_waiting} requests wait here, the limit is {self.config.max_waiting}"
            )
        group = submission.facts.sharing_group
        if self._pool.has_limit(group):
            most = max(1, self.config.max_waiting * self._pool.limit(group) // self._pool.num_total)
            num_waiting = self.counts.num_waiting_of(group)
            if num_waiting >= most:
                raise QueueFullError(
                    f"{num_waiting} requests of sharing group {group!r} wait here, its share is {most}"
                )

    def submit(self, submission: Submission, now: float) -> None:
        """Queue a request. Raise errors as `check_capacity` does, and `ValueError` if this attempt of the
        request is here already."""
        self.check_capacity(submission)
        request = self.life.arrive(submission, now, self.limits.output_limit(submission))
        leader, *leader.forks = request.sequences
        self.life.enqueue(leader)

    def adopt(
        self,
        submission: Submission,
        block_ids: Seq[int],
        num_valid_tokens: int,
        now: float,
        windows: Seq[BlockSpan] = (),
    ) -> list[TokenDelta]:
        """Add a request that was handed over. `block_ids` cover its prompt, and `windows` what groups with a
        window need behind the valid tokens; their references pass to it.

        The KV of the first `num_valid_tokens` tokens is right, and the rest is recomputed. The output of
        every sample has at least one token, which is not sent to the gateway again. Return the ends, without
        tokens, of samples that do not continue: the last token ends them, or there is no capacity for more.
        """
        submission = replace(submission, decode=None)
        self.life.handled = submission.request_id, submission.attempt
        request = self.life.arrive(submission, now, self.limits.output_limit(submission))
        request.scheduled_at = now
        request.prompt_done = True
        request.num_scored_tokens = request.num_prompt_tokens
        for sequence in request.sequences:
            assert sequence.num_output_tokens > 0, "a sample was handed over without its first token"
            newest = sequence.token_at(sequence.num_tokens - 1)
            sequence.finish = request.finish_of(sequence, newest, self._end_token_ids)
        ends = [end_of(sequence) for sequence in request.sequences if sequence.finish]
        leader, *forks = sorted(request.sequences, key=lambda sequence: bool(sequence.finish))
        leader.block_ids = list(block_ids)
        self.life.tables.groups.give(leader, windows)
        leader.forks = [fork for fork in forks if not fork.finish]
        leader.num_scheduled = leader.num_settled = min(num_valid_tokens, leader.num_tokens - 1)
        self.life.tables.settled(leader)
        self.life.run(leader)
        if leader.forks and leader.num_remaining <= 0:
            self.life.fork(leader)
        for sequence in request.sequences:
            if sequence.finish:
                self.life.end(sequence)
        self.life.handled = None
        return ends

    def cancel(self, request_id: str, attempt: int) -> bool:
        """End the request, and free everything that it has. Return False if it is not here any more."""
        request = self.life.requests.get((request_id, attempt))
        if request is not None:
            self.life.drop(request)
        return request is not None

    def in_flight(self, steps: Collection[int]) -> set[RequestKey]:
        """Return the requests that may have caused a fault in one of these steps."""
        return self.isolation.in_flight([plan for plan in self.issued if plan.step in steps])

    def is_here(self, request_id: str, attempt: int) -> bool:
        """Whether this attempt waits, runs or is held here."""
        return (request_id, attempt) in self.life.requests

    def finish_hand_over(self, request_id: str, attempt: int) -> bool:
        """Release the prompt's blocks after a hand-over that succeeded or failed. Return False if none are
        held."""
        request = self.life.requests.get((request_id, attempt))
        if request is None or not request.is_held:
            return False
        self.life.drop(request)
        return True

    def held_state(self, key: RequestKey, now: float) -> Submission:
        """Return the submission with which a held request continues elsewhere: its unfinished samples, with
        their output."""
        request = self.life.requests[key]
        assert request.is_held
        return replace(
            request.submission,
            samples=request.unfinished_samples,
            decode=None,
            deadline_s=None if request.deadline is None else max(0.0, request.deadline - now),
            due_s=request.due_at - now,
        )

    def take_failures(self) -> list[RequestFailed]:
        """Return the requests that `plan` or `grammar_compiled` has ended, and that no outcome has named
        yet."""
        failures, self._failures = self._failures, []
        return failures

    def grammar_compiled(self, report: GrammarCompiled) -> None:
        """Let the requests with this grammar sample, or end them if the grammar was refused."""
        for request in self.life.grammars.compiled(report):
            code, retry_after_s = ("refused", _FULL_RETRY_S) if report.is_transient else ("grammar", 0.0)
            reason = f"its grammar: {report.error}"
            self._failures.append(RequestFailed(*request.key, code, reason, retry_after_s))
            self.life.drop(request)

    def landings_wanted(self, now: float) -> list[LandingNeed]:
        """Return the prompts whose landing should be requested now: they will be handed over, and are about
        one step (of all stages) away from being scheduled. Each is returned once."""
        life, window_tokens = self.life, self._landing_window_tokens
        return landing_needs(
            life.tables,
            life.running,
            life.waiting,
            window_tokens,
            now,
            self.isolation.is_busy,
            self.pause,
        )

    def loads_wanted(self) -> list[LoadNeed]:
        """Return the waiting sequences whose missing blocks the store may have, in the order of the line.
        Each is returned once, and is not admitted before `end_load`."""
        return load_needs(self.life.waiting, self.life.tables, self.config.max_loading)

    def has_new_load_needs(self) -> bool:
        """Whether, since the last call, a plan found that `loads_wanted` has more to return."""
        has_new, self.life.has_new_load_needs = self.life.has_new_load_needs, False
        return has_new

    def hold_back(self, need: LoadNeed, whom: HeldBack) -> None:
        """Hold back the sequences behind the one of this need: its load waits for free blocks, or for the
        share of its group. Until the next call or `end_load`, none of `whom` is admitted, just as if the
        sequence waited for blocks to compute into."""
        for sequence in self._loading(need):
            sequence.holds_back = whom

    def end_load(self, need: LoadNeed, num_loaded_tokens: dict[str, int]) -> None:
        """Note that a load has ended: its blocks are in the prefix index, `num_loaded_tokens` of each
        tier."""
        request = self.life.requests.get((need.request_id, need.attempt))
        for sequence in request.sequences if request else ():
            if sequence.index == need.sample and sequence.phase is Phase.WAITING:
                sequence.request.count_loaded(num_loaded_tokens)
        for sequence in self._loading(need):
            sequence.load, sequence.holds_back = StoreLoad.DONE, HeldBack.NOBODY
            sequence.num_expected_cached_tokens = self.life.tables.num_cached_tokens(sequence)

    def note_loaded(self, key: RequestKey, num_loaded_tokens: dict[str, int]) -> None:
        """Note the tokens, by tier, that were loaded for a request before the request arrived."""
        request = self.life.requests.get(key)
        if request is not None:
            request.count_loaded(num_loaded_tokens)

    def _loading(self, need: LoadNeed) -> list[Sequence]:
        """Return the sequence that waits for the load, or nothing if it is gone."""
        request = self.life.requests.get((need.request_id, need.attempt))
        return [
            sequence
            for sequence in (request.sequences if request else ())
            if sequence.index == need.sample and sequence.load is StoreLoad.ASKED
        ]

    def grant_landing(self, request_id: str, attempt: int) -> bool:
        """Allow the request to be computed: the decode replica has reserved blocks for its KV. Return False
        if it is not here any more."""
        request = self.life.requests.get((request_id, attempt))
        if request is not None:
            request.landing = LandingState.READY
        return request is not None

    # -------------------------------------------------------------------------------------------- plan

    def plan(self, now: float) -> StepPlan | None:
        """Return the plan of the next step, with decodes before prompt chunks, or None if nothing can be
        computed now. Requests whose deadline has passed end first."""
        self._failures += self.life.expire(now)
        batch = StepBatch(self._step + 1, self.config.max_batch_tokens)
        self._planner.fill(batch, now, [plan.suspect for plan in self.issued])
        self.life.handled = None
        if not batch.num_planned:
            return None
        self._step = batch.step
        self.issued.append(batch.issued())
        return batch.plan(self.life.take_freed_slots())

    def skip(self, num_steps: int) -> None:
        """Note that so many steps like the unreported ones were settled, and as many planned, whose effects
        on sequences were made at once (`workers.scheduler.decode_run`)."""
        self._step += num_steps
        for index, plan in enumerate(self.issued):
            starts = [start + num_steps for start in plan.decode_starts]
            self.issued[index] = replace_plan(plan, step=plan.step + num_steps, decode_starts=starts)
        self.life.settle(self.issued[0].step - 1)
        for _ in range(num_steps):
            self.isolation.planned(is_isolated=False)

    # ------------------------------------------------------------------------------------------ settle

    def settle(self, report: StepReport, now: float) -> StepOutcome:
        """Settle the oldest unreported plan, and return everything that its report changed."""
        issued = self.issued.popleft()
        assert issued.step == report.step, f"report of step {report.step}, expected {issued.step}"
        outcome = StepOutcome(failures=self.take_failures(), decode_starts=issued.decode_starts)
        rows = _rows_of(report)
        index_to_failed = {failed.index: failed for failed in report.failed}
        num_taken = 0
        for index, entry in enumerate(issued.entries):
            sampled = rows[num_taken : num_taken + len(entry.samplers)]
            num_taken += len(entry.samplers)
            if not self._continues(entry.sequence):
                continue
            if (failed := index_to_failed.get(index)) is not None:
                sampling = (entry.sequence,) if entry.pools else entry.samplers
                outcome.failures.extend(self.life.fail(entry.sequence, sampling, failed))
            else:
                if entry.targets is not None or entry.pools:
                    self._settle_readings(index, entry, report, outcome)
                self._settle_entry(entry, sampled, report, now, outcome)
        life, decoded = self.life, zip(issued.decodes, rows[num_taken:], strict=True)
        for index, (sequence, row) in enumerate(decoded, len(issued.entries)):
            if sequence.phase is Phase.ENDED:
                continue
            life.handled = sequence.request.key  # `_continues`, without a call for each of many
            if index_to_failed and (failed := index_to_failed.get(index)) is not None:
                outcome.failures.extend(life.fail(sequence, (sequence,), failed))
            else:
                self._settle_decode(sequence, row, report, now, outcome)
        self.isolation.settled(issued)
        self.life.settle(report.step)
        return outcome

    def _continues(self, sequence: Sequence) -> bool:
        """Whether what a plan had of the sequence counts: it has not ended since."""
        if sequence.phase is Phase.ENDED:
            return False
        self.life.handled = sequence.request.key
        return True

    def _settle_decode(
        self,
        sequence: Sequence,
        row: _Row,
        report: StepReport,
        now: float,
        outcome: StepOutcome,
    ) -> None:
        """Settle a decode. This is the short way of `_settle_entry` for the many sequences that only
        continue."""
        end, request = sequence.num_settled + 1, sequence.request
        if sequence.hold_at or not request.prompt_done or request.decodes_remotely:
            entry = PlannedEntry(sequence, end - 1, end, b"", (sequence,))
            self._settle_entry(entry, [row], report, now, outcome)
            return
        sequence.num_settled = end
        if end % self._pool.block_tokens == 0:
            self.life.tables.settled(sequence)
        outcome.tokens.append(self._take_token(sequence, row))
        if sequence.finish:
            self.life.end(sequence)

    @staticmethod
    def _settle_readings(index: int, entry: PlannedEntry, report: StepReport, outcome: StepOutcome) -> None:
        """Take what entry `index` of the plan has read of its prompt. An embedding ends the sequence."""
        sequence, request = entry.sequence, entry.sequence.request
        if entry.targets is not None:
            first = entry.targets.start + 1
            assert first == request.num_scored_tokens, f"{first} follows on {request.num_scored_tokens}"
            (logprobs,) = (it.logprobs for it in report.prompt_logprobs if it.index == index)
            num_tokens = len(entry.targets.tokens) // TOKEN_BYTES
            assert logprobs.is_whole, f"log-probabilities of entry {index}"
            assert (logprobs.num_tokens, logprobs.num_top) == (num_tokens, entry.targets.num_top)
            outcome.prompt_logprobs.append(PromptLogprobs(*request.key, first, logprobs))
            request.num_scored_tokens += num_tokens
        if entry.pools:
            (vector,) = (it.vector for it in report.embeddings if it.index == index)
            outcome.embeddings.append(PromptEmbedding(*request.key, vector))
            sequence.num_pending -= 1
            sequence.finish = "stop"

    def _settle_entry(
        self,
        entry: PlannedEntry,
        sampled: list[_Row],
        report: StepReport,
        now: float,
        outcome: StepOutcome,
    ) -> None:
        sequence, request = entry.sequence, entry.sequence.request
        sequence.num_settled = entry.end
        self.life.tables.settled(sequence)
        for sampler, row in zip(entry.samplers, sampled, strict=True):
            outcome.tokens.append(self._take_token(sampler, row))
        if sequence.forks and entry.end == sequence.target and sequence.phase is Phase.RUNNING:
            self.life.fork(sequence)  # of a prompt that was repaired: it had no samplers
        if request.decodes_remotely:
            outcome.chunks.append(self._chunk(entry, report))
        elif sequence.hold_at and not sequence.finish:
            outcome.migrating.append(self._chunk(entry, report))
            if entry.end == sequence.hold_at:
                self.life.hold(sequence)
        if (entry.samplers or entry.pools) and not request.prompt_done:
            outcome.prompts.append(self._finish_prompt(sequence, entry.end, report, now))
        for ended in (sequence,) if entry.pools else entry.samplers:
            if ended.finish and ended.phase is not Phase.HELD:
                self.life.end(ended)

    def _chunk(self, entry: PlannedEntry, report: StepReport) -> ChunkDone:
        return ChunkDone(
            *entry.sequence.request.key,
            num_computed_tokens=entry.end,
            block_ids=self.life.tables.covering(entry.sequence, entry.end),
            windows=self.life.tables.groups.blocks(entry.sequence),
            started_at=report.started_at,
            finished_at=report.finished_at,
        )

    def _take_token(self, sequence: Sequence, row: _Row) -> TokenDelta:
        request = sequence.request
        token, logprob, sequence.mask_digest = row
        sequence.append(token)
        sequence.num_pending -= 1
        token_id = int.from_bytes(token, "little")
        sequence.finish = finish = request.finish_of(sequence, token_id, self._end_token_ids)
        request_id, attempt = request.key
        return TokenDelta(
            request_id,
            attempt,
            sequence.index,
            sequence.num_tokens - request.num_prompt_tokens - 1,
            token,
            () if logprob is None else (logprob,),
            finish,
            sequence.mask_digest,
        )

    def _finish_prompt(
        self, leader: Sequence, num_computed_tokens: int, report: StepReport, now: float
    ) -> PromptDone:
        """Finish a prompt, whose last chunk was in the reported step.

        The leader of a request that is handed over keeps the blocks for the hand-over, and the other samples
        end here."""
        request = leader.request
        request.prompt_done = True
        samples = request.unfinished_samples
        done = PromptDone(
            *request.key,
            submission=request.submission,
            num_computed_tokens=num_computed_tokens,
            num_cached_tokens=request.num_cached_tokens,
            times=StageTimes(
                arrived=request.arrived_at,
                scheduled=request.scheduled_at or 0.0,
                prefilled=now,
                step_start=report.started_at,
                step_end=report.finished_at,
            ),
            decodes_remotely=request.decodes_remotely,
            all_finished=not samples,
            samples=samples,
            block_ids=self.life.tables.covering(leader, num_computed_tokens),
            windows=self.life.tables.groups.blocks(leader),
            num_loaded_tokens=request.num_loaded_tokens,
        )
        if request.decodes_remotely:
            for sequence in request.sequences:
                if sequence is leader and samples:
                    self.life.hold(sequence)
                else:
                    self.life.end(sequence)
        return done


def _rows_of(report: StepReport) -> list[_Row]:
    """Return the rows of a report in their order."""
    tokens = report.tokens
    starts = range(0, len(tokens), TOKEN_BYTES)
    if not (report.logprobs or report.masks):  # as most reports are
        return [(tokens[start : start + TOKEN_BYTES], None, b"") for start in starts]
    row_to_logprob = {it.row: it.logprob for it in report.logprobs}
    row_to_digest = {it.row: it.digest for it in report.masks}
    return [
        (tokens[start : start + TOKEN_BYTES], row_to_logprob.get(row), row_to_digest.get(row, b""))
        for row, start in enumerate(starts)
    ]
