"""Models of a replica that compute from step plans alone: `HashRank` is a replica's one rank,
`StagedEngine` a replica of several stages, each in its own time.

The KV is token ids by (block, offset), and the sampled token a hash of the context that is read back
through the block table. So a wrong table, a missed copy, a block reused too early or a wrong start is a
wrong token. A step takes the tokens from the first stage to the last; at each, what is read back through
the block tables must be what the stages before it read. The first learns a token that the plan leaves open
when the last has sampled it. So a block that is free while some stage has still to run a plan, or a token
planned for too early, is a failed check or a wrong token.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from group_kv import GroupKv, GroupRow, GroupSizes, StateKv
from plan_reader import ExpectedSlots, PlanReader, Work

from kvtransfer.blocks.keys import extend_keys
from kvtransfer.common.group_shares import GroupShares
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.request_facts import ServiceClass
from workers.config import EngineConfig
from workers.messages.link import HandOverTarget, SampleState, Submission
from workers.messages.rank_channel import (
    STATE_LOST,
    EntryEmbedding,
    EntryLogprobs,
    FailedEntry,
    StepPlan,
    StepReport,
)
from workers.messages.sampling import PackedLogprobs, SamplingParams, TokenLogprob
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.sequence import Sequence as SchedulerSequence
from workers.scheduler.step import StepOutcome
from workers.scheduler.step_costs import StepCosts

NO_LIMITS = GroupShares()


@dataclass
class Step:
    """A plan on its way through the stages; `rows` are, sequence by sequence, the tokens to compute and the
    whole context as the last stage to run it read it."""

    plan: StepPlan
    works: list[Work]
    rows: list[tuple[list[int], list[int]]] = field(default_factory=list)
    num_stages_done: int = 0
    sampled: dict[int, int] = field(default_factory=dict)

    @property
    def packed(self) -> bytes:
        """The tokens as a report carries them."""
        return pack([self.sampled[slot] for slot in self.plan.sample_slots])


@dataclass
class Stage:
    """One stage's memory: KV by (block, offset), and that of each group behind the first. Blocks from
    `num_blocks` on are in host memory: nothing is computed into them."""

    num_blocks: int
    groups: Sequence[GroupKv] = ()
    kv: dict[tuple[int, int], int] = field(default_factory=dict)

    def copy_blocks(self, plan: StepPlan) -> None:
        copied = {
            (copy.dst_block, offset): self.kv[copy.src_block, offset]
            for copy in plan.copies
            if not copy.group
            for offset in range(BLOCK_TOKENS)
            if (copy.src_block, offset) in self.kv
        }
        self.kv.update(copied)
        for group, memory in enumerate(self.groups, 1):
            memory.copy(copy for copy in plan.copies if copy.group == group)

    def compute_groups(self, works: Sequence[Work], contexts: Sequence[list[int]]) -> None:
        """Compute what the groups behind the first have of a plan, of which these are the whole contexts."""
        for number, memory in enumerate(self.groups):
            memory.compute(
                [
                    GroupRow(work.start, work.windows[number], context)
                    for work, context in zip(works, contexts, strict=True)
                ]
            )

    def write(self, entry: Work, tokens: list[int], written: set[tuple[int, int]]) -> None:
        for position, token in enumerate(tokens, entry.start):
            place = entry.block_ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            assert place not in written, "two entries of a plan write one place"
            assert place[0] < self.num_blocks, "KV is computed into host memory"
            written.add(place)
            self.kv[place] = token

    def read(self, entry: Work) -> list[int]:
        return [
            self.kv[entry.block_ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS]
            for position in range(entry.start + entry.num_tokens)
        ]


@dataclass
class StagedEngine:
    """A scheduler, its stages, and the plans that are out. The stages lag as far as the test lets them:
    `advance` runs one plan at one stage, `settle` what is left of the oldest plan."""

    config: EngineConfig
    num_blocks: int
    num_stages: int = 1
    attention_ratio: float = 0.0
    num_offload_blocks: int = 0
    has_store: bool = False
    shares: GroupShares = NO_LIMITS
    # The window of each further group, and its blocks; then the blocks of each group with states.
    windows: Sequence[tuple[int, int]] = ()
    states: Sequence[int] = ()
    costs: StepCosts | None = None
    pool: BlockPool = field(init=False)
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, BLOCK_TOKENS, self.shares)
        sizes = GroupSizes(self.windows, self.states)
        self.group_pools = sizes.pools(self.pool)
        self.scheduler = Scheduler(
            self.config,
            self.pool,
            eos_token_ids=(END,),
            max_context_tokens=MAX_CONTEXT,
            num_stages=self.num_stages,
            attention_ratio=self.attention_ratio,
            num_offload_blocks=self.num_offload_blocks,
            has_store=self.has_store,
            group_pools=self.group_pools,
            costs=self.costs,
        )
        self.stages = [Stage(self.num_blocks, sizes.memory(BLOCK_TOKENS)) for _ in range(self.num_stages)]
        self.group_blocks_of_landings = [0] * sizes.num_groups
        self.steps: deque[Step] = deque()
        self.blocks_of_landings: list[int] = []
        self.step = 0
        self._slots: dict[int, SlotState] = {}  # of the last stage's sampler
        self._slot_to_token: dict[int, tuple[int, int]] = {}  # sent back by the last stage: (plan, token)
        # The last plan that samples for the slot, as plans are made and as the first stage runs them.
        self._slot_to_planned: dict[int, int] = {}
        self._slot_to_source: dict[int, int] = {}
        self._slot_to_start: dict[int, int] = {}  # the last token that the slot was started with
        self._reader = PlanReader(sizes.num_groups)
        self._step_to_works: dict[int, list[Work]] = {}
        # Those whose states were lost, until they are freed, as `workers.rank.containment` has it.
        self._lost_slots: set[int] = set()

    def works(self, plan: StepPlan) -> list[Work]:
        """Return what a plan that was made here lets each sequence compute, its entries and then its
        decodes."""
        return self._step_to_works[plan.step]

    @property
    def plans(self) -> list[StepPlan]:
        """The plans that are out, the oldest first."""
        return [step.plan for step in self.steps]

    def plan(self, now: float) -> bool:
        plan = self.scheduler.plan(now)
        if plan is None:
            return False
        assert plan.step == self.step + 1
        self.step = plan.step
        assert plan.num_tokens <= self.config.max_batch_tokens
        assert plan.num_sequences <= self.config.max_sequences
        assert all(entry.num_tokens <= self.config.chunk_tokens for entry in plan.entries)
        works = self._reader.read(plan)
        expected = ExpectedSlots(self.scheduler)
        expected.check(self._reader.tables, self._reader.positions)
        expected.check_windows(self._reader.windows)
        issued = self.scheduler.issued[-1]  # others are out that named a request before it was suspected
        has_suspect = any(it.request.submission.suspect for it in issued.sequences)
        assert issued.is_isolated == has_suspect
        self._step_to_works[plan.step] = works
        for slot in plan.started_slots:
            self._slot_to_planned.pop(slot, None)
        out = {step.plan.step for step in self.steps}
        for work in works:
            if not work.tokens and (sampled_in := self._slot_to_planned.get(work.slot)) in out:
                assert sampled_in is not None
                age = plan.step - sampled_in
                assert age >= self.num_stages, "planned before its token can be at the first stage"
            self._slot_to_planned.update(dict.fromkeys(work.sample_slots, plan.step))
        self.steps.append(Step(plan, works))
        return True

    def oldest_works(self) -> list[tuple[Work, SchedulerSequence]]:
        """Return what the oldest plan lets each sequence compute."""
        step = self.steps[0]
        (issued,) = (it for it in self.scheduler.issued if it.step == step.plan.step)
        return list(zip(step.works, issued.sequences, strict=True))

    def losable_slots(self) -> list[int]:
        """Return the slots of the oldest plan whose states an attempt that fails may change, and whose
        requests survive that: those that read and write one block, and are not handed over."""
        return [
            work.slot
            for work, sequence in self.oldest_works()
            if self.states and not sequence.request.decodes_remotely
            if 0 < work.start % BLOCK_TOKENS <= BLOCK_TOKENS - work.num_tokens
        ]

    def settle(self, now: float, lost_slots: Collection[int] = ()) -> StepOutcome:
        """Settle the oldest plan, with which these slots lose their states."""
        step = self.steps[0]
        while step.num_stages_done < self.num_stages:
            assert self.advance(step.num_stages_done), "the oldest plan waits for nothing"
        self.steps.popleft()
        failed = self._lose(step, lost_slots)
        report = StepReport(
            step.plan.step,
            step.packed,
            0.0,
            0.0,
            prompt_logprobs=tuple(_read_logprobs(step)),
            embeddings=tuple(
                EntryEmbedding(index, embedded(step.rows[index][1]))
                for index, entry in enumerate(step.plan.entries)
                if entry.pools
            ),
            failed=failed,
        )
        return self.scheduler.settle(report, now)

    def _lose(self, step: Step, lost_slots: Collection[int]) -> tuple[FailedEntry, ...]:
        """Return the plan's sequences whose states are lost: `lost_slots`, and those that were lost before.
        Their tokens are wrong, and so are their blocks, unless a plan that is out finds them there."""
        self._lost_slots -= set(step.plan.free_slots)
        failed: list[FailedEntry] = []
        for index, work in enumerate(step.works):
            if work.slot not in lost_slots and work.slot not in self._lost_slots:
                continue
            self._lost_slots.update((work.slot, *work.sample_slots))
            failed.append(FailedEntry(index, "lost", STATE_LOST))
            step.sampled |= dict.fromkeys(work.sample_slots, 0)
            last = (work.start + work.num_tokens - 1) // BLOCK_TOKENS
            named = {later.slot for other in self.steps for later in other.works}
            if named.isdisjoint((work.slot, *work.sample_slots)):
                for stage in self.stages:
                    for memory, table in zip(stage.groups, work.windows, strict=True):
                        if isinstance(memory, StateKv):
                            memory.spoil(table[last])
        return tuple(failed)

    def advance(self, number: int) -> bool:
        """Run the next plan at this stage; False when it has none, or waits for a token."""
        step = next((step for step in self.steps if step.num_stages_done == number), None)
        if step is None:
            return False
        if number == 0:
            rows = self._embed(step)
            if rows is None:
                return False
            step.rows = rows
        self._compute(self.stages[number], step, is_first=number == 0)
        step.num_stages_done += 1
        if number == self.num_stages - 1:
            self._sample(step)
        return True

    def _embed(self, step: Step) -> list[tuple[list[int], list[int]]] | None:
        """Return the tokens of each sequence, with those that earlier plans sampled; None when one is not
        here."""
        source, plan = dict(self._slot_to_source), step.plan
        first = {
            **self._slot_to_start,
            **{it.slot: it.last_token for start in plan.starts for it in start.samples},
        }
        for slot in (*plan.free_slots, *plan.started_slots):
            source.pop(slot, None)
        rows: list[tuple[list[int], list[int]]] = []
        for entry in step.works:
            tokens = unpack(entry.tokens)
            if not tokens and entry.slot not in source:
                tokens = [first[entry.slot]]
            elif not tokens:
                sampled_in, token = self._slot_to_token.get(entry.slot, (0, 0))
                if sampled_in != source[entry.slot]:
                    assert sampled_in < source[entry.slot]
                    return None
                tokens = [token]
            assert len(tokens) == entry.num_tokens > 0
            rows.append((tokens, []))
            source.update(dict.fromkeys(entry.sample_slots, plan.step))
        self._slot_to_source, self._slot_to_start = source, first
        return rows

    def _compute(self, stage: Stage, step: Step, *, is_first: bool) -> None:
        stage.copy_blocks(step.plan)
        written: set[tuple[int, int]] = set()
        for entry, (tokens, _) in zip(step.works, step.rows, strict=True):
            stage.write(entry, tokens, written)
        contexts = [stage.read(entry) for entry in step.works]
        stage.compute_groups(step.works, contexts)
        if not is_first:
            assert contexts == [context for _, context in step.rows], "the stages read different contexts"
        step.rows = [(tokens, context) for (tokens, _), context in zip(step.rows, contexts, strict=True)]

    def _sample(self, step: Step) -> None:
        for slot in step.plan.free_slots:
            del self._slots[slot]
        started = SlotState.started_by(step.plan)
        assert not started.keys() & self._slots.keys()
        self._slots.update(started)
        for entry, (_, context) in zip(step.works, step.rows, strict=True):
            for slot in entry.sample_slots:
                token = self._slots[slot].sample(context, step.plan.step)
                step.sampled[slot] = token
                self._slot_to_token[slot] = step.plan.step, token

    def check(self) -> None:
        issued = self.scheduler.issued
        requests = {it.request for plan in issued for it in plan.sequences}
        assert len(requests) == 1 or not any(it.is_isolated for it in issued), "a suspect is not alone"
        self.scheduler.check(len(self.blocks_of_landings), self.group_blocks_of_landings)
        for step in self.steps:
            named = {
                block
                for entry in step.works
                for block in entry.block_ids[: -(-(entry.start + entry.num_tokens) // BLOCK_TOKENS)]
            }
            named |= {copy.src_block for copy in step.plan.copies if not copy.group}
            on_device = {block for block in named if block < self.num_blocks}
            assert all(self.pool.is_referenced(block) for block in on_device), "freed before it is reported"
            self._check_windows(step)

    def _check_windows(self, step: Step) -> None:
        """Assert that no block that a plan which is out reads in a group behind the first is free."""
        for group, (pool, memory) in enumerate(zip(self.group_pools, self.stages[0].groups, strict=True), 1):
            named = {copy.src_block for copy in step.plan.copies if copy.group == group}
            for entry in step.works:
                end = entry.start + entry.num_tokens
                named |= memory.read_blocks(entry.start, end, entry.windows[group - 1])
            assert all(map(pool.is_referenced, named)), "freed before it is reported"

    def max_tokens(self, group: str = "") -> int:
        """Return the most tokens of a request that is handed over."""
        return min(MAX_CONTEXT, self.pool.limit(group) * BLOCK_TOKENS)

    def max_local_tokens(self, group: str = "") -> int:
        """Return the most tokens of a request that stays, partly in host memory where its group has no
        limit."""
        return (
            self.max_tokens(group) if self.pool.has_limit(group) else self.scheduler.limits.max_local_tokens
        )


# ------------------------------------------------------------------------- what one test asks of one engine

PROMPT = [5, 6, 7, 8, 9, 10]


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(**{"block_tokens": 16, "max_batch_tokens": 16, "chunk_tokens": 8, **settings})


def engine(
    num_blocks: int = 40,
    num_stages: int = 1,
    ratio: float = 0.0,
    *,
    offload: int = 0,
    has_store: bool = False,
    shares: GroupShares = NO_LIMITS,
    windows: Sequence[tuple[int, int]] = (),
    states: Sequence[int] = (),
    costs: StepCosts | None = None,
    **settings: Any,
) -> StagedEngine:
    return StagedEngine(
        config(**settings), num_blocks, num_stages, ratio, offload, has_store, shares, windows, states, costs
    )


def ask(
    name: str = "a",
    prompt: list[int] = PROMPT,
    *,
    n: int = 1,
    max_tokens: int = 4,
    output: tuple[int, ...] = (),
    priority: int = 0,
    deadline_s: float | None = None,
    decode: str = "",
    suspect: bool = False,
    group: str = "",
    message_ends: tuple[int, ...] = (),
    service_class: ServiceClass = "standard",
    due_s: float | None = None,
) -> Submission:
    """Return a submission; every other name gives it a penalty, so that its plans carry its tokens."""
    tokens = pack(prompt)
    return Submission(
        request_id=name,
        attempt=1,
        tenant="",
        sharing_group=group,
        priority=priority,
        prompt=tokens,
        root_key=ROOT_KEY + group.encode(),
        block_keys=extend_keys(ROOT_KEY + group.encode(), tokens, BLOCK_TOKENS),
        samples=tuple(SampleState(index, 7 + index, pack(list(output))) for index in range(n)),
        sampling=SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, repetition_penalty=1.0 + ord(name[-1]) % 2
        ),
        decode=HandOverTarget(ReplicaIdentity(decode, 1), decode) if decode else None,
        deadline_s=deadline_s,
        suspect=suspect,
        service_class=service_class,
        due_s=due_s,
        message_ends=message_ends,
    )


def plan(side: StagedEngine, now: float = 0.0) -> StepPlan:
    assert side.plan(now)
    return side.plans[-1]


def step(side: StagedEngine, now: float = 0.0) -> StepOutcome:
    """Plan and settle one step, nothing else being out."""
    plan(side, now)
    outcome = side.settle(now)
    side.check()
    return outcome


def finish(side: StagedEngine) -> dict[tuple[str, int], list[int]]:
    """Run until idle; the tokens of each sample from now on."""
    outputs: dict[tuple[str, int], list[int]] = {}
    while side.plan(0.0) or side.plans:
        for delta in side.settle(0.0).tokens:
            outputs.setdefault((delta.request_id, delta.sample), []).extend(unpack(delta.tokens))
        side.check()
    assert side.scheduler.is_idle
    assert side.pool.num_referenced == 0
    assert not any(pool.num_references for pool in side.group_pools)
    return outputs


def right(submission: Submission, index: int = 0) -> list[int]:
    prompt = unpack(submission.prompt)
    limit = min(submission.sampling.max_tokens, MAX_CONTEXT - len(prompt))
    return alone(prompt, submission.samples[index].seed, limit, submission.sampling)


BLOCK_TOKENS = 4
VOCABULARY = 24
END = 0
MAX_CONTEXT = 40
ROOT_KEY = b"root"


def pack(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def unpack(tokens: bytes) -> list[int]:
    return [int.from_bytes(tokens[start : start + 4], "little") for start in range(0, len(tokens), 4)]


def sample(context: list[int], seed: int) -> int:
    return hashlib.sha256(pack([seed, *context])).digest()[0] % VOCABULARY


def likelihood(context: list[int], token: int) -> TokenLogprob:
    """Return the log-probability of a prompt's token after a context, and of the likeliest: anything that
    depends on all of both."""
    drawn = hashlib.sha256(pack([token, *context])).digest()
    return TokenLogprob(-float(drawn[0]), tuple((byte, -float(byte)) for byte in drawn[1:9]))


def embedded(context: list[int]) -> bytes:
    return hashlib.sha256(pack(context)).digest()


def _read_logprobs(step: Step) -> Iterator[EntryLogprobs]:
    for index, entry in enumerate(step.plan.entries):
        if (targets := entry.targets) is None:
            continue
        context, tokens = step.rows[index][1], unpack(targets.tokens)
        assert entry.start <= targets.start
        assert targets.start + len(tokens) <= entry.start + entry.num_tokens
        read = [likelihood(context[: at + 1], token) for at, token in enumerate(tokens, targets.start)]
        top = [pair for it in read for pair in it.top[: targets.num_top]]
        packed = PackedLogprobs(
            targets.num_top,
            struct.pack(f"<{len(read)}f", *(it.logprob for it in read)),
            pack([token for token, _ in top]),
            struct.pack(f"<{len(top)}f", *(logprob for _, logprob in top)),
        )
        yield EntryLogprobs(index, packed)


def alone(prompt: list[int], seed: int, limit: int, sampling: SamplingParams) -> list[int]:
    """Return the output of one sample computed without an engine."""
    output: list[int] = []
    while len(output) < limit and (sampling.ignore_eos or output[-1:] != [END]):
        output.append(sample(prompt + output, seed))
    return output


@dataclass
class SlotState:
    """`context` is None until it is known: plans say it only where penalties look at it."""

    seed: int
    last_token: int
    context: list[int] | None
    sampled_in_step: int = 0

    @staticmethod
    def started_by(plan: StepPlan) -> dict[int, SlotState]:
        """Return the state of each slot that the plan starts."""
        slot_to_state: dict[int, SlotState] = {}
        for start in plan.starts:
            assert bool(start.prompt) == start.sampling.penalizes_prompt
            for it in start.samples:
                context = unpack(start.prompt) + unpack(it.output) if start.prompt else None
                if context is not None:
                    assert len(it.output) == 4 * it.num_output_tokens
                    assert context[-1] == it.last_token
                assert it.slot not in slot_to_state
                slot_to_state[it.slot] = SlotState(it.seed, it.last_token, context)
        return slot_to_state

    def sample(self, context: list[int], step: int) -> int:
        """Return the next token after the context that the KV holds."""
        if self.context is not None:
            assert context == self.context, "the KV under the table is not the slot's context"
        assert context[-1] == self.last_token, "the KV under the table is not the slot's context"
        token = sample(context, self.seed)
        self.context, self.last_token, self.sampled_in_step = [*context, token], token, step
        return token


class HashRank:
    """Executes plans in order; knows nothing but what they carry. `groups` is the memory of the groups of
    layers behind the first."""

    def __init__(self, groups: Sequence[GroupKv] = ()) -> None:
        self._memory = Stage(0, groups)
        self.kv = self._memory.kv
        self.slots: dict[int, SlotState] = {}
        self.step = 0
        self._reader = PlanReader(len(groups))

    def kv_of(self, group: int) -> dict[tuple[int, int], int]:
        """Return the KV of a group of layers by (block, offset)."""
        return self._memory.groups[group - 1].kv if group else self.kv

    def run(self, plan: StepPlan) -> StepReport:
        assert plan.step == self.step + 1
        self.step = plan.step
        for slot in plan.free_slots:
            del self.slots[slot]
        started = SlotState.started_by(plan)
        assert not started.keys() & self.slots.keys()
        self.slots.update(started)
        self._memory.copy_blocks(plan)
        works = self._reader.read(plan)
        self._write(plan, works)
        tokens: list[int] = []
        contexts = [self._memory.read(entry) for entry in works]
        self._memory.compute_groups(works, contexts)
        for entry, context in zip(works, contexts, strict=True):
            tokens += [self.slots[slot].sample(context, plan.step) for slot in entry.sample_slots]
        return StepReport(step=plan.step, tokens=pack(tokens), started_at=0.0, finished_at=0.0)

    def _write(self, plan: StepPlan, works: list[Work]) -> None:
        written: set[tuple[int, int]] = set()
        for entry in works:
            assert entry.num_tokens > 0
            tokens = unpack(entry.tokens)
            if not tokens:
                state = self.slots[entry.slot]
                assert state.sampled_in_step < plan.step, "the slot has not sampled anything"
                tokens = [state.last_token]
            assert len(tokens) == entry.num_tokens
            for position, token in enumerate(tokens, entry.start):
                place = entry.block_ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS
                assert place not in written
                written.add(place)
                self.kv[place] = token
