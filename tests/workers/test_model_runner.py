"""The runner driven by hand-written plans, against transformers on the same random checkpoint, and those of
several ranks, here in threads, against the one of a single rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from local_engine import BLOCK, GREEDY, draw, entry, mixed_plans, packed, sampled, started, step
from runner_parts import ON_CPU
from transformers import AutoModelForCausalLM

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.blocks.device_pool import DevicePool
from kvtransfer.blocks.pool import HostPool
from kvtransfer.common.clock import Clock, ManualClock
from kvtransfer.messages import PROTOCOL_VERSION, CompatibilityRecord, Shard
from kvtransfer.rpc.trust import Trust
from workers.errors import CapacityError, CheckpointError, WorkerError
from workers.messages.rank_channel import (
    BatchEntry,
    BlockCopy,
    SlotSample,
    SlotStart,
    StepPlan,
    StepReport,
    TableChange,
)
from workers.messages.sampling import SamplingParams
from workers.model.fingerprint import DigestCache, model_fingerprint
from workers.model.weights import ShardSpec
from workers.rank.collectives import RankGroups, find_store, open_store
from workers.rank.device_queue import CpuQueue
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, RankCapacity, RankPlace, read_dtype
from workers.rank.tickets import Ticket, launched


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, "llama", seed=3, eos_token_id=[1, 9])
    return path


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def make_runner(model_dir: Path, *, num_kv_tokens: int = 40 * BLOCK, dtype: str = "float32") -> ModelRunner:
    return ModelRunner(
        CheckpointFolder(model_dir),
        ON_CPU._replace(dtype=read_dtype(dtype)),
        RankCapacity(BLOCK, num_kv_tokens),
        ManualClock(5.0),
    )


@pytest.fixture
def runner(model_dir: Path) -> ModelRunner:
    return make_runner(model_dir)


def run(runner: ModelRunner, plan: StepPlan) -> dict[int, int]:
    return dict(sampled(plan, runner.steps.run(plan)))


def token_of(report: StepReport) -> int:
    """The one token of a report."""
    assert len(report.tokens) == 4
    return int.from_bytes(report.tokens, "little")


def greedy_reference(model_dir: Path, prompt: Sequence[int], num_new: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_new):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_chunked_prefill_and_decode_equal_transformers(model_dir: Path, runner: ModelRunner) -> None:
    """Two sequences, interleaved: chunks of one beside decoding of the other, in scattered blocks."""
    first, second = draw(45, seed=1), draw(20, seed=2)
    first_blocks, second_blocks = (7, 2, 30, 11, 5), (3, 39, 0)
    tokens: dict[int, list[int]] = {10: [], 20: []}

    def take(plan: StepPlan) -> None:
        for slot, token in run(runner, plan).items():
            tokens[slot].append(token)

    take(step(entry(20, 0, second, second_blocks, [20]), starts=[started(20, second)]))
    take(step(entry(10, 0, first[:17], first_blocks), starts=[started(10, first)]))
    take(step(entry(20, 20, [], second_blocks, [20]), entry(10, 17, first[17:32], first_blocks)))
    take(step(entry(10, 32, first[32:], first_blocks, [10]), entry(20, 21, [], second_blocks, [20])))
    for number in range(8):
        take(
            step(
                entry(20, 22 + number, [], second_blocks, [20]),
                entry(10, 45 + number, [], first_blocks, [10]),
            )
        )
    assert tokens[10] == greedy_reference(model_dir, first, 9)
    assert tokens[20] == greedy_reference(model_dir, second, 11)


def test_samples_fork_from_one_prompt(runner: ModelRunner, model_dir: Path) -> None:
    """Two seeds on one prompt, with copy-on-write of the shared last block, equal two lone sequences."""
    prompt, sampling, seeds = draw(20), SamplingParams(temperature=1.5), {4: 111, 5: 222}
    starts = [started(slot, prompt, sampling, seed) for slot, seed in seeds.items()]
    forked: dict[int, list[int]] = {4: [], 5: []}
    tables = {4: (0, 1), 5: (0, 2)}
    plans = [step(entry(4, 0, prompt, (0, 1), [4, 5]), starts=starts)]
    for number in range(8):
        copies = [BlockCopy(1, 2)] if number == 0 else []
        entries = [entry(slot, 20 + number, [], tables[slot], [slot]) for slot in (4, 5)]
        plans.append(step(*entries, copies=copies))
    for plan in plans:
        for slot, token in run(runner, plan).items():
            forked[slot].append(token)
    assert forked[4] != forked[5]
    for slot, seed in seeds.items():
        alone = make_runner(model_dir)
        outputs = [
            run(
                alone,
                step(entry(0, 0, prompt, (8, 9), [0]), starts=[started(0, prompt, sampling, seed)]),
            )
        ]
        outputs += [run(alone, step(entry(0, 20 + number, [], (8, 9), [0]))) for number in range(8)]
        assert [output[0] for output in outputs] == forked[slot]


def test_a_resumed_sequence_continues_with_the_same_tokens(runner: ModelRunner) -> None:
    prompt, sampling = draw(20), SamplingParams(temperature=1.2, repetition_penalty=1.2, num_logprobs=2)
    whole = [
        runner.steps.run(step(entry(1, 0, prompt, (0, 1, 2), [1]), starts=[started(1, prompt, sampling, 7)]))
    ]
    whole += [runner.steps.run(step(entry(1, 20 + number, [], (0, 1, 2), [1]))) for number in range(10)]
    tokens = [token_of(report) for report in whole]
    known = [*prompt, *tokens[:6]]
    start = SlotStart(sampling, (SlotSample(2, 7, known[-1], 6, packed(known[20:])),), packed(prompt))
    again = [runner.steps.run(step(entry(2, 0, known, (3, 4, 5), [2]), starts=[start], frees=[1]))]
    again += [runner.steps.run(step(entry(2, 26 + number, [], (3, 4, 5), [2]))) for number in range(4)]
    for before, after in zip(whole[6:], again, strict=True):
        assert token_of(before) == token_of(after)
        (of_before,), (of_after,) = before.logprobs, after.logprobs
        assert (of_before.row, of_after.row) == (0, 0)
        assert of_before.logprob.logprob == pytest.approx(of_after.logprob.logprob, abs=1e-5)


def test_masks_arrive_between_execute_and_sample(runner: ModelRunner) -> None:
    """The only token that a row's mask allows is drawn and feeds the next step; rows keep their masks in a
    plan of entries and decodes, and log-probabilities are those of the model."""
    prompt, steps = draw(18), runner.steps
    with_logprobs = SamplingParams(num_logprobs=1)
    starts = [started(1, prompt, with_logprobs), started(2, prompt)]
    run(runner, step(entry(2, 0, prompt, (2, 3), [2]), starts=starts))
    executed = steps.execute(step(entry(1, 0, prompt, (0, 1), [1]), entry(2, 18, [], (2, 3), [2])))
    masks = np.zeros((2, -(-runner.config.vocab_size // 32)), np.uint32)
    masks[0, 77 // 32], masks[1, 45 // 32] = 1 << (77 % 32), 1 << (45 % 32)
    report = runner.steps.collect(steps.sample(executed, masks))
    assert np.frombuffer(report.tokens, "<u4").tolist() == [77, 45]
    assert report.logprobs[0].logprob.top[0][0] != 77
    implied = run(runner, step(entry(1, 18, [], (0, 1), [1]), entry(2, 19, [], (2, 3), [2])))
    again = [started(slot, prompt) for slot in (3, 4)]
    run(runner, step(entry(3, 0, prompt, (4, 5), [3]), entry(4, 0, prompt, (6, 7), [4]), starts=again))
    explicit = run(runner, step(entry(3, 18, [77], (4, 5), [3])))
    assert implied[1] == explicit[3]


def test_explicit_and_implied_input_tokens_are_the_same(runner: ModelRunner) -> None:
    prompt = draw(18)
    plan = step(
        entry(1, 0, prompt, (0, 1), [1]),
        entry(2, 0, prompt, (2, 3), [2]),
        starts=[started(1, prompt), started(2, prompt)],
    )
    first = run(runner, plan)
    assert first[1] == first[2]
    second = run(runner, step(entry(1, 18, [], (0, 1), [1]), entry(2, 18, [first[2]], (2, 3), [2])))
    assert second[1] == second[2]


def test_a_started_slot_implies_its_last_known_token(runner: ModelRunner) -> None:
    """A slot whose prompt is computed up to its last token decodes that one."""
    prompt = draw(18)
    token = run(runner, step(entry(1, 0, prompt, (0, 1), [1]), starts=[started(1, prompt)]))[1]
    expected = run(runner, step(entry(1, 18, [], (0, 1), [1])))[1]
    start = SlotStart(GREEDY, (SlotSample(2, 0, token, 1),))
    assert run(runner, step(entry(2, 0, prompt, (2, 3)), starts=[start])) == {}
    assert run(runner, step(entry(2, 18, [], (2, 3), [2]))) == {2: expected}


def test_a_table_changes_in_place(model_dir: Path, runner: ModelRunner) -> None:
    """What is not said again stays: growth, and a block that was copied elsewhere."""
    prompt = draw(20)
    first = step(entry(1, 0, prompt, (0, 1), [1]), starts=[started(1, prompt)])
    tokens = [run(runner, first)[1]]
    change = TableChange(1, 1, packed([9]))
    plan = StepPlan(1, copies=(BlockCopy(1, 9),), tables=(change,), decodes=packed([1]))
    tokens.append(run(runner, plan)[1])
    for _ in range(11):
        tokens.append(run(runner, StepPlan(1, decodes=packed([1])))[1])
    tokens.append(run(runner, StepPlan(1, tables=(TableChange(1, 2, packed([5])),), decodes=packed([1])))[1])
    assert runner.steps.batch.table(1) == [0, 9, 5]
    alone = make_runner(model_dir)
    again = [run(alone, first)[1]]
    again += [run(alone, step(entry(1, 20 + number, [], (0, 1, 2), [1])))[1] for number in range(13)]
    assert tokens == again


def test_a_mask_may_come_between_the_halves_of_a_step(runner: ModelRunner, model_dir: Path) -> None:
    """Of two sequences one may only sample token 77; it continues behind that token."""
    prompts = draw(18, seed=1), draw(18, seed=2)
    tables = (0, 1), (2, 3)
    starts = [started(slot, prompt) for slot, prompt in enumerate(prompts)]
    works = [entry(slot, 0, prompts[slot], tables[slot], [slot]) for slot in (0, 1)]
    masks = np.full((2, 256 // 32), 0xFFFFFFFF, np.uint32)
    masks[1] = 0
    masks[1, 77 // 32] = 1 << 77 % 32
    plan = step(*works, starts=starts)
    first = dict(sampled(plan, runner.steps.collect(runner.steps.sample(runner.steps.execute(plan), masks))))
    assert first[1] == 77
    second = run(runner, StepPlan(2, decodes=packed([1, 0])))
    alone = make_runner(model_dir)
    expected = run(alone, plan)
    assert expected[0] == first[0] != 77
    expected = run(alone, step(entry(0, 18, [first[0]], tables[0], [0]), entry(1, 18, [77], tables[1], [1])))
    assert second == expected


def test_the_next_plan_is_launched_before_the_last_is_collected() -> None:
    """Where the device runs ahead: if it is there, and no more than so many. All are collected, in order."""

    def log_of(most: int, arrivals: Mapping[str, Sequence[int | None]]) -> list[str]:
        plans: SimpleQueue[StepPlan | None] = SimpleQueue()
        log: list[str] = []

        def arrive(moment: str) -> None:
            log.append(moment)
            for number in arrivals.get(moment, ()):
                plans.put(None if number is None else StepPlan(number))

        def launch(plan: StepPlan) -> Ticket:
            arrive(f"launch {plan.step}")
            return Ticket(StepReport(plan.step, b"", 0.0, 0.0), CpuQueue().event())

        plans.put(StepPlan(1))
        for ticket in launched(plans, launch, most):
            arrive(f"collect {ticket.report.step}")
        return log

    there = {"launch 1": [2, 3, None]}
    assert log_of(1, there) == [f"{what} {step}" for step in (1, 2, 3) for what in ("launch", "collect")]
    assert log_of(2, there) == [
        "launch 1", "launch 2", "collect 1", "launch 3", "collect 2", "collect 3"
    ]  # fmt: skip
    late: dict[str, list[int | None]] = {"collect 1": [2], "launch 2": [3], "collect 3": [None]}
    assert log_of(2, late) == [
        "launch 1", "collect 1", "launch 2", "launch 3", "collect 2", "collect 3"
    ]  # fmt: skip


class SlowEvent:
    """Passed when it has been asked so many times."""

    def __init__(self, num_queries: int) -> None:
        self._num_left = num_queries

    def query(self) -> bool:
        self._num_left -= 1
        return self._num_left < 0

    def synchronize(self) -> None:
        self._num_left = 0


def test_a_plan_that_comes_while_a_step_computes_is_launched_at_once() -> None:
    """A rank that waits for a step is not deaf to the next plan; when none comes, it collects the step once
    that is done."""
    plans: SimpleQueue[StepPlan | None] = SimpleQueue()
    log: list[str] = []

    def launch(plan: StepPlan) -> Ticket:
        log.append(f"launch {plan.step}")
        late = threading.Timer(0.02, plans.put, [StepPlan(2)])
        if plan.step == 1:
            late.start()
        # The first computes until it is collected, the second for some polls.
        return Ticket(StepReport(plan.step, b"", 0.0, 0.0), SlowEvent(1 << 30 if plan.step == 1 else 5))

    plans.put(StepPlan(1))
    for ticket in launched(plans, launch, 2):
        log.append(f"collect {ticket.report.step}")
        if ticket.report.step == 2:
            assert ticket.event.query(), "nothing came, and it was done"
            plans.put(None)
    assert log == ["launch 1", "launch 2", "collect 1", "collect 2"]


def test_the_pool_is_the_shared_memory(runner: ModelRunner) -> None:
    prompt = draw(16)
    run(runner, step(entry(1, 0, prompt, (3,)), starts=[started(1, prompt)]))
    assert isinstance(runner.pools[0], HostPool)
    layout, memory = runner.pools[0].layout, runner.pools[0].memory
    assert runner.kv.shape == (40, 2, 2, 2, BLOCK, 16)
    assert layout.block_bytes * 40 == len(memory.buffer)
    begin = 3 * layout.block_bytes + layout.offset(1, 1, 1)
    raw = np.frombuffer(memory.buffer[begin : begin + layout.head_bytes], np.float32)
    assert np.array_equal(raw, runner.kv[3, 1, 1, 1].flatten().numpy())
    assert raw.any()
    assert not runner.kv[4].any()


def test_a_plan_that_samples_nothing_reports(runner: ModelRunner) -> None:
    prompt = draw(16)
    report = runner.steps.run(step(entry(1, 0, prompt, (0,)), starts=[started(1, prompt)]))
    assert (report.step, report.tokens, report.started_at, report.finished_at) == (1, b"", 5.0, 5.0)


def test_the_empty_plan_is_a_canary(runner: ModelRunner) -> None:
    assert runner.steps.run(step()).tokens == b""


def test_warm_up_leaves_no_slot(runner: ModelRunner) -> None:
    for _ in range(2):
        runner.warm_up()
    assert not runner.steps.batch.is_started.any()
    with pytest.raises(AssertionError, match="slot 64 is freed but was never started"):
        runner.steps.run(step(frees=[64]))


def test_after_the_warm_up_no_step_needs_more_scratch_memory(runner: ModelRunner) -> None:
    """It has the shapes of the largest steps that are served."""
    num_tokens = 200
    runner.warm_up(num_tokens)
    known = runner._model.decoder._workspace._name_to_memory
    before = {name: memory.data_ptr() for name, memory in known.items()}
    assert {"normed", "qkv", "gated"} <= before.keys()
    prompt = draw(num_tokens)
    runner.steps.run(step(entry(1, 0, prompt, tuple(range(13)), [1]), starts=[started(1, prompt)]))
    for _ in range(3):
        runner.steps.run(StepPlan(2, decodes=packed([1])))
    assert {name: memory.data_ptr() for name, memory in known.items()} == before


@pytest.mark.parametrize("num_kv_tokens", [16, 48, 49])
def test_warm_up_fits_a_small_pool(model_dir: Path, num_kv_tokens: int) -> None:
    make_runner(model_dir, num_kv_tokens=num_kv_tokens).warm_up()


def test_ready_fields(model_dir: Path, runner: ModelRunner) -> None:
    fields = runner.ready_fields
    assert (fields.num_blocks, fields.vocab_size, fields.eos_token_ids) == (40, 256, (1, 9))
    assert fields.max_context_tokens == 40 * BLOCK
    fingerprint = model_fingerprint(model_dir, DigestCache(None, ManualClock()))
    expected = PROTOCOL_VERSION, fingerprint, "float32", "float32", BLOCK, 2, 2, 16
    assert fields.compatibility == CompatibilityRecord(*expected)
    assert make_runner(model_dir, num_kv_tokens=4096).ready_fields.max_context_tokens == 2048


def test_freed_slots_can_be_taken_again_in_the_same_plan(runner: ModelRunner) -> None:
    run(runner, step(starts=[started(1, prompt := draw(5))]))
    plan = step(entry(1, 0, prompt, (0,), [1]), starts=[started(1, prompt)], frees=[1])
    assert list(run(runner, plan)) == [1]


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (step(frees=[3]), "slot 3 is freed but was never started"),
        (step(frees=[-1]), "slot -1 is freed but was never started"),
        (StepPlan(1, decodes=packed([3])), "slot 3 continues but was never started"),
        (StepPlan(1, entries=(BatchEntry(3, 0, 1, packed([5]), (3,)),)), "slot 3 computes but was never"),
        (step(entry(3, 0, [5, 6], (0,), [4]), starts=[started(3, [6])]), "slot 4 samples but was never"),
        (step(entry(3, 0, [5, 6], (0,), [3])), "slot 3 has a table but was never started"),
        (
            StepPlan(1, starts=(started(3, [5]),), entries=(BatchEntry(3, 0, 2, packed([5]), ()),)),
            "slot 3: 4 bytes",
        ),
        (step(starts=[started(3, [5]), started(3, [5])]), "slot 3 is already in use"),
        (step(starts=[started(69, [5])]), "slot 69 is not below 69"),
        (
            StepPlan(1, starts=(started(3, [5]),), tables=(TableChange(3, 1, packed([5])),)),
            "slot 3: no block 0 in its table",
        ),
        (
            step(entry(3, 0, draw(17), (0,), [3]), starts=[started(3, [5])]),
            "slot 3 computes beyond its block table",
        ),
    ],
)
def test_bad_plans_are_assertion_errors(runner: ModelRunner, plan: StepPlan, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        runner.steps.run(plan)


def test_bfloat16_runs_and_is_reported(model_dir: Path) -> None:
    runner, prompt = make_runner(model_dir, dtype="bf16"), draw(20)
    report = runner.steps.run(step(entry(1, 0, prompt, (0, 1), [1]), starts=[started(1, prompt)]))
    assert runner.ready_fields.compatibility.dtype == "bfloat16"
    assert token_of(report) < 256


def test_what_cannot_be_served_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="dtype 'int3' is not one of float32"):
        read_dtype("int3")
    with pytest.raises(CapacityError, match="kv_tokens 15 is less than one block of 16 tokens"):
        make_runner(model_dir, num_kv_tokens=15)
    with pytest.raises(CheckpointError):
        make_runner(tmp_path)


# ---------------------------------------------------------------------------------- ranks of one replica


class Ranks:
    """The runners of a replica's ranks, each with its groups in a thread of its own."""

    def __init__(
        self, model_dir: Path, tp: int, stages: Sequence[tuple[int, int]], clock: Clock | None = None
    ) -> None:
        self.tp, self.pp = tp, len(stages)
        self._store, self._address = open_store("127.0.0.1")
        self._clock = clock or ManualClock(5.0)
        self._model_dir = model_dir
        self._stages = stages
        self._threads = ThreadPoolExecutor(tp * self.pp)
        self.runners = list(self._threads.map(self._make, range(tp * self.pp)))

    def _make(self, rank: int) -> ModelRunner:
        first, end = self._stages[rank // self.tp]
        store = find_store(self._address)
        return ModelRunner(
            CheckpointFolder(self._model_dir),
            ON_CPU,
            RankCapacity(BLOCK, 40 * BLOCK),
            self._clock,
            place=RankPlace(
                ShardSpec(first, end, rank % self.tp, self.tp),
                RankGroups(
                    store,
                    tp=self.tp,
                    pp=self.pp,
                    rank=rank,
                    device=ON_CPU.device,
                    host="127.0.0.1",
                    trust=Trust.of(b"theirs"),
                ),
            ),
        )

    def run(self, plans: Sequence[StepPlan]) -> list[list[StepReport]]:
        """Every rank runs all plans without waiting to be asked; the reports of each rank."""

        def run_all(runner: ModelRunner) -> list[StepReport]:
            runner.warm_up()
            return [runner.steps.run(plan) for plan in plans]

        return list(self._threads.map(run_all, self.runners))

    def close(self) -> None:
        for runner in self.runners:
            runner.close()
        self._threads.shutdown()


SHAPES = {
    "2x1": (2, [(0, 2)]),
    "4x1": (4, [(0, 2)]),
    "1x2": (1, [(0, 1), (1, 2)]),
    "2x2": (2, [(0, 1), (1, 2)]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_together_give_the_tokens_of_one(model_dir: Path, runner: ModelRunner, shape: str) -> None:
    """All plans are there at once: the first stage runs ahead as far as the tokens that it needs let it."""
    plans = mixed_plans()
    expected = [sampled(plan, runner.steps.run(plan)) for plan in plans]
    assert sum(len(tokens) for tokens in expected) > 40
    ranks = Ranks(model_dir, *SHAPES[shape])
    reports = ranks.run(plans)
    sampler = (ranks.pp - 1) * ranks.tp
    for rank, rank_reports in enumerate(reports):
        assert [report.step for report in rank_reports] == [plan.step for plan in plans]
        found = [sampled(plan, report) for plan, report in zip(plans, rank_reports, strict=True)]
        assert found == (expected if rank == sampler else [[]] * len(plans))
    ranks.close()


def test_the_pools_of_all_ranks_are_the_pool_of_one(model_dir: Path, runner: ModelRunner) -> None:
    plans = [plan for plan in mixed_plans() if plan.num_sequences]
    for plan in plans:
        runner.steps.run(plan)
    ranks = Ranks(model_dir, 2, [(0, 1), (1, 2)])
    ranks.run(plans)
    shards = [Shard(0, 1, 0, 1), Shard(0, 1, 1, 2), Shard(1, 2, 0, 1), Shard(1, 2, 1, 2)]
    assert [it.layouts[0].shard for it in ranks.runners] == shards
    for rank, shard in zip(ranks.runners, shards, strict=True):
        layers, heads = slice(shard.layer_start, shard.layer_end), slice(shard.head_start, shard.head_end)
        (pool,) = rank.pools
        assert pool is not None
        assert pool.num_blocks == 40
        wanted = runner.kv[:, layers, :, heads]
        used = wanted != 0  # elsewhere is what the ranks' warm-up left
        assert used.any()
        assert torch.allclose(rank.kv[used], wanted[used], atol=1e-4)
    ranks.close()


class WatchedClock(ManualClock):
    """Lets a test wait until it has been read so many times."""

    def __init__(self) -> None:
        super().__init__(5.0)
        self.reads = threading.Semaphore(0)

    def now(self) -> float:
        now = super().now()
        self.reads.release()
        return now


def test_waiting_is_not_busy_time(model_dir: Path) -> None:
    clock = WatchedClock()
    ranks = Ranks(model_dir, 1, [(0, 1), (1, 2)], clock)
    prompt = draw(20)
    plan = step(entry(1, 0, prompt, (0, 1), [1]), starts=[started(1, prompt)])
    first, second = ranks.runners
    clock.reads = threading.Semaphore(0)  # loading has read it as well
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(second.steps.run, plan)
        for _ in range(2):  # when it began, and when it began to wait
            clock.reads.acquire()
        clock.advance(2.0)
        first.steps.run(plan)
        report = late.result()
    assert (report.started_at, report.finished_at) == (7.0, 7.0)
    ranks.close()


@pytest.mark.gpu
def test_a_cuda_rank_has_a_pool_that_transports_can_use(model_dir: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    runner = ModelRunner(
        CheckpointFolder(model_dir),
        ON_CPU._replace(device=torch.device("cuda:0")),
        RankCapacity(BLOCK, 40 * BLOCK),
        ManualClock(5.0),
    )
    runner.warm_up()
    assert isinstance(runner.pools[0], DevicePool)
    assert runner.pools[0].sums([0], runner.layouts[0].shard) != runner.pools[0].sums(
        [20], runner.layouts[0].shard
    )
    runner.close()
