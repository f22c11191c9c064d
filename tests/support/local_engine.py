"""A whole engine in this process: the scheduler, the runners of all ranks in a thread each, and step
plans written by hand as an engine core would write them: single entries, and a mix of all that they do."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from plan_reader import ExpectedSlots, Work

from kvtransfer.blocks.keys import extend_keys
from kvtransfer.common.clock import ManualClock
from kvtransfer.common.faults import Faults
from kvtransfer.rpc.trust import Trust
from workers.config import EngineConfig
from workers.errors import OutOfBlocksError
from workers.messages.link import RequestFailed, SampleState, Submission
from workers.messages.rank_channel import (
    BatchEntry,
    BlockCopy,
    CompileGrammar,
    GrammarCompiled,
    SlotSample,
    SlotStart,
    StepPlan,
    StepReport,
    TableChange,
)
from workers.messages.sampling import Grammar, SamplingParams, TokenLogprob
from workers.model.host_kv import OffloadMode
from workers.model.kv_groups import StateCapacity, WindowCapacity
from workers.model.model_config import read_model_config
from workers.model.weights import ShardSpec
from workers.rank.collectives import RankGroups, find_store, open_store
from workers.rank.compiled_grammars import CompiledGrammars
from workers.rank.device_queue import DeviceQueue
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, ComputeSettings, RankCapacity, RankPlace
from workers.replica.step_loop import StepLoop
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.group_pool import GroupPool
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.step import StepOutcome

CPU = torch.device("cpu")
TRUST = Trust.of(b"the ranks' own secret")


def submitted(
    name: str,
    prompt: bytes,
    sampling: SamplingParams,
    *,
    n: int = 1,
    priority: int = 0,
    grammar: Grammar | None = None,
) -> Submission:
    """Return the submission of `n` samples of a prompt that stays here."""
    return Submission(
        request_id=name,
        attempt=1,
        tenant="",
        sharing_group="",
        priority=priority,
        prompt=prompt,
        root_key=b"root",
        block_keys=extend_keys(b"root", prompt, BLOCK),
        samples=tuple(SampleState(index, 31 + index, b"") for index in range(n)),
        sampling=sampling,
        decode=None,
        deadline_s=None,
        grammar=grammar,
    )


class LocalEngine:
    """`num_blocks` on the device and `num_offload_blocks` in host memory; the model is split over `tp` ranks
    for each of `stages` (first and end layer)."""

    def __init__(
        self,
        model_dir: Path,
        config: EngineConfig,
        num_blocks: int,
        num_offload_blocks: int = 0,
        mode: OffloadMode = "in_place",
        *,
        tp: int = 1,
        stages: Sequence[tuple[int, int]] = ((0, 2),),
        host_id: str = "",
        faults: Sequence[Faults] = (),
        dtype: torch.dtype = torch.float32,
        queue: DeviceQueue | None = None,
        end_ids: tuple[int, ...] = (),
        has_windows: bool = False,
    ) -> None:
        """Ranks with a `host_id` share memory, others speak through gloo; `faults` are those of each rank.
        With `end_ids` outputs may follow grammars, which are compiled when `compiles` is true."""
        self.tp, self.pp = tp, len(stages)
        self.compiles = True
        self._grammars: CompiledGrammars | None = None
        if end_ids:
            vocab_size = read_model_config(model_dir).vocab_size
            self._grammars = CompiledGrammars(model_dir, vocab_size, end_ids)
        self._store, self._address = open_store("127.0.0.1")
        self._threads = [ThreadPoolExecutor(1) for _ in range(tp * self.pp)]

        windows = WindowCapacity(BLOCK, config.max_sequences, config.max_batch_tokens, self.pp)

        def make(rank: int) -> ModelRunner:
            first, end = stages[rank // tp]
            groups = RankGroups(
                find_store(self._address),
                tp=tp,
                pp=self.pp,
                rank=rank,
                device=CPU,
                host="127.0.0.1",
                trust=TRUST,
                host_id=host_id,
            )
            runner = ModelRunner(
                CheckpointFolder(model_dir),
                ComputeSettings(
                    dtype, CPU, config.num_threads, config.deterministic, queue, config.expert_offload
                ),
                RankCapacity(
                    BLOCK,
                    num_blocks * BLOCK,
                    config.max_sequences,
                    num_offload_blocks * BLOCK,
                    mode,
                    kv_dtype=config.kv_dtype,
                    latent_kv=config.latent_kv,
                    windows=windows if has_windows else None,
                    states=StateCapacity(config.max_sequences, self.pp, config.num_state_snapshots),
                ),
                ManualClock(5.0),
                place=RankPlace(ShardSpec(first, end, rank % tp, tp), groups),
                faults=faults[rank] if faults else None,
                grammars=self._grammars,
            )
            runner.warm_up()
            return runner

        made = [thread.submit(make, rank) for rank, thread in enumerate(self._threads)]
        self.runners = [each.result() for each in made]
        fields, self.pool = self.runners[0].ready_fields, BlockPool(num_blocks, BLOCK)
        sizes = zip(fields.compatibility.groups[1:], fields.num_window_blocks, strict=True)
        self.group_pools = [
            GroupPool(it.window, size, has_states=it.state_size > 0, kv=self.pool) for it, size in sizes
        ]
        self.scheduler = Scheduler(
            config,
            self.pool,
            eos_token_ids=end_ids,
            max_context_tokens=fields.max_context_tokens,
            num_stages=self.pp,
            num_offload_blocks=fields.num_offload_blocks,
            group_pools=self.group_pools,
        )
        self.steps = StepLoop(self.scheduler, self._send, ManualClock(0.0), tp, self.pp)
        self._out: deque[list[Future[StepReport]]] = deque()
        self.failures: dict[str, RequestFailed] = {}
        # The log-probabilities read of prompts, in order: (index of the token, its log-probability).
        self.prompt_logprobs: dict[str, list[tuple[int, TokenLogprob]]] = {}
        self.embeddings: dict[str, list[NDArray[np.float32]]] = {}
        self.most_offloaded = 0
        self.plans: list[StepPlan] = []

    def run(self, submissions: Sequence[Submission]) -> dict[tuple[str, int], bytes]:
        """Return the outputs of all samples; plans run ahead as they do under an engine core. Requests that
        fail are in `failures`."""
        for submission in submissions:
            self.scheduler.submit(submission, 0.0)
        outputs: dict[tuple[str, int], bytes] = {}
        while (outcome := self.step()) is not None:
            for delta in outcome.tokens:
                name = delta.request_id, delta.sample
                outputs[name] = outputs.get(name, b"") + delta.tokens
            self.failures |= {failure.request_id: failure for failure in outcome.failures}
        assert self.scheduler.is_idle
        assert self.scheduler.life.tables.host.num_used == 0
        assert not any(pool.num_references for pool in self.group_pools)
        return outputs

    def step(self) -> StepOutcome | None:
        """Send the plans that can be made, and settle the oldest that is out; None if nothing is."""
        if self.compiles:
            self._compile()
        self.steps.feed()
        if not self._out:
            return None
        reports = [future.result() for future in self._out.popleft()]
        outcome = [self.steps.settle(rank, report) for rank, report in enumerate(reports)][-1]
        assert outcome is not None
        for read in outcome.prompt_logprobs:
            numbered = enumerate(read.logprobs.unpacked(), read.first_index)
            self.prompt_logprobs.setdefault(read.request_id, []).extend(numbered)
        for embedding in outcome.embeddings:
            vector = np.frombuffer(embedding.vector, "<f4")
            self.embeddings.setdefault(embedding.request_id, []).append(vector)
        self.scheduler.check()
        self.most_offloaded = max(self.most_offloaded, self.scheduler.life.tables.host.num_used)
        return outcome

    def _compile(self) -> None:
        """Compile the grammars that the scheduler orders."""
        for order in self.scheduler.life.grammars.take_orders():
            assert self._grammars is not None
            if isinstance(order, CompileGrammar):
                self._grammars.compile(order.grammar)
                self.scheduler.grammar_compiled(GrammarCompiled(order.grammar.digest))
            else:
                self._grammars.release(order.digest)

    def move(self, request_id: str, num_tokens: int, target: LocalEngine) -> bool:
        """Hand a stream that is held with KV of `num_tokens` over to another engine of one rank: its KV and
        its state. Where that has no blocks the stream continues here, and the result is False."""
        key = request_id, 1
        (sequence,) = self.scheduler.life.requests[key].sequences
        try:
            blocks = target.pool.allocate(-(-(num_tokens + 1) // BLOCK))
        except OutOfBlocksError:
            self.scheduler.migration.resume(key)
            return False
        for src, dst in zip(sequence.block_ids, blocks, strict=False):
            target.runners[0].kv[dst] = self.runners[0].kv[src]
        target.scheduler.adopt(self.scheduler.held_state(key, 0.0), blocks, num_tokens, 0.0)
        assert self.scheduler.finish_hand_over(*key)
        return True

    def _send(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        expected = ExpectedSlots(self.scheduler)

        def run(runner: ModelRunner) -> StepReport:
            report, batch = runner.steps.run(plan), runner.steps.batch
            slots = np.flatnonzero(batch.is_started).tolist()
            expected.check(
                {slot: batch.table(slot) for slot in slots},
                {slot: int(batch.positions[slot]) for slot in slots},
            )
            return report

        ranks = zip(self._threads, self.runners, strict=True)
        self._out.append([thread.submit(run, runner) for thread, runner in ranks])

    def close(self) -> None:
        for thread, runner in zip(self._threads, self.runners, strict=True):
            thread.submit(runner.close).result()
            thread.shutdown()
        del self._store


BLOCK = 16
GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=1.1, repetition_penalty=1.1)


def draw(num_tokens: int, seed: int = 0) -> list[int]:
    """Draw random token ids below 256."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, 256, (num_tokens,), generator=generator)]


def packed(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


def started(slot: int, prompt: Sequence[int], sampling: SamplingParams = GREEDY, seed: int = 0) -> SlotStart:
    return SlotStart(
        sampling, (SlotSample(slot, seed, prompt[-1]),), packed(prompt) if sampling.penalizes_prompt else b""
    )


def entry(
    slot: int, start: int, tokens: Sequence[int], blocks: Sequence[int], samples: Sequence[int] = ()
) -> Work:
    """Return the work of a sequence. Without `tokens` it is a decode: the slot stands at `start` and
    continues with its newest token."""
    return Work(slot, start, len(tokens) or 1, packed(tokens), tuple(blocks), tuple(samples))


def step(
    *works: Work,
    starts: Sequence[SlotStart] = (),
    copies: Sequence[BlockCopy] = (),
    frees: Sequence[int] = (),
    number: int = 1,
) -> StepPlan:
    """Return a plan that sends the whole table of every sequence."""
    decodes = [work.slot for work in works if not work.tokens]
    assert all(work.sample_slots == (work.slot,) for work in works if not work.tokens)
    return StepPlan(
        number,
        free_slots=tuple(frees),
        starts=tuple(starts),
        copies=tuple(copies),
        entries=tuple(
            BatchEntry(work.slot, work.start, work.num_tokens, work.tokens, work.sample_slots)
            for work in works
            if work.tokens
        ),
        tables=tuple(TableChange(work.slot, 0, packed(work.block_ids)) for work in works),
        decodes=packed(decodes),
    )


def sampled(plan: StepPlan, report: StepReport) -> list[tuple[int, int]]:
    """Return slots and tokens of the report of a rank that samples; [] of one that does not."""
    tokens = np.frombuffer(report.tokens, dtype="<u4").tolist()
    return list(zip(plan.sample_slots, tokens, strict=True)) if tokens else []


def mixed_plans() -> list[StepPlan]:
    """Return plans of greedy, seeded and forked sequences in scattered blocks, decoded by slot.

    Only slots 4 and 5 share. Slots 2 and 6 are freed and begun again while what they sampled may still be on
    its way to the first stage, slot 6 then as a hand-over begins; slot 3 samples and nobody asks for its
    tokens.
    """
    first, second, forked, short = draw(45, 1), draw(20, 2), draw(20, 3), draw(5, 4)
    one, two, three = (7, 2, 30, 11, 5), (3, 39), (20, 21)
    tables = {4: (12, 13), 5: (12, 15)}
    plans = [
        step(
            entry(1, 0, first[:17], one),
            entry(2, 0, second, two, [2]),
            starts=[started(1, first), started(2, second, SEEDED, 9)],
        ),
        step(
            entry(2, 20, [], two, [2]),
            entry(1, 17, first[17:], one, [1]),
            entry(4, 0, forked, tables[4], [4, 5]),
            entry(6, 0, short, (33,), [6]),
            starts=[started(4, forked, SEEDED, 111), started(5, forked, SEEDED, 222), started(6, short)],
        ),
        step(
            entry(2, 0, short, (31, 32), [2]),
            entry(1, 45, [], one, [1]),
            *(entry(slot, 20, [], tables[slot], [slot]) for slot in (5, 4)),
            entry(3, 0, short, three, [3]),
            starts=[started(2, short), started(3, short, SEEDED, 5), started(6, second, SEEDED, 1)],
            copies=[BlockCopy(13, 15)],
            frees=[2, 6],
        ),
        step(entry(6, 19, second[19:], two, [6])),
    ]
    for turn in range(6):
        plans.append(
            step(
                entry(2, 5 + turn, [], (31, 32), [2]),
                entry(4, 21 + turn, [], tables[4], [4]),
                entry(3, 5 + turn, [turn], three, [3]),
            )
        )
        plans.append(
            step(
                entry(1, 46 + turn, [], one, [1]),
                entry(5, 21 + turn, [], tables[5], [5]),
                entry(6, 20 + turn, [], two, [6]),
            )
        )
    plans += [step(frees=[1, 2, 3]), step(entry(5, 27, [], tables[5], [5])), step()]
    return [replace(plan, step=number) for number, plan in enumerate(plans, start=1)]
