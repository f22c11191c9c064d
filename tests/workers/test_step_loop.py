"""The step loop: who has to report what; a slow step is not a hung one, and a hung rank is noticed."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import ReplicaIdentity
from workers.config import EngineConfig
from workers.errors import WorkerError
from workers.messages.link import HandOverTarget, RequestFailed, SampleState, Submission
from workers.messages.rank_channel import (
    BatchEntry,
    ExpertCopy,
    ExpertCounts,
    FailedEntry,
    StepPlan,
    StepReport,
)
from workers.messages.sampling import SamplingParams
from workers.replica.expert_copies import ExpertCopies
from workers.replica.step_loop import StepLoop
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.step import StepRates, pack_ids

NUM_TOKENS = 100


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1.0)


@pytest.fixture
def sent() -> list[StepPlan]:
    return []


def loop(
    clock: ManualClock,
    sent: list[StepPlan],
    num_prompts: int = 1,
    tp: int = 1,
    pp: int = 1,
    copies: ExpertCopies | None = None,
) -> StepLoop:
    """The loop of a replica to which prompts of `NUM_TOKENS` tokens were submitted, one for each plan."""
    scheduler = Scheduler(
        EngineConfig(block_tokens=16, kv_tokens=1024, max_batch_tokens=NUM_TOKENS),
        BlockPool(64, 16),
        eos_token_ids=(),
        max_context_tokens=1024,
        num_stages=pp,
    )
    prompt = b"".join(number.to_bytes(4, "little") for number in range(NUM_TOKENS))
    sampling = SamplingParams(max_tokens=50, ignore_eos=True)
    for index in range(num_prompts):
        keys = tuple(bytes([index, block] * 8) for block in range(6))
        submission = Submission(
            f"r{index}", 0, "", "", 0, prompt, b"", keys, (SampleState(0, 1),), sampling, None, None
        )
        scheduler.submit(submission, clock.now())
    return StepLoop(scheduler, sent.append, clock, tp, pp, copies=copies)


@pytest.fixture
def steps(clock: ManualClock, sent: list[StepPlan]) -> StepLoop:
    return loop(clock, sent)


def report(plan: StepPlan, seconds: float, at: float = 10.0, token: int = 5) -> StepReport:
    tokens = pack_ids([token] * len(plan.sample_slots))
    return StepReport(plan.step, tokens, at, at + seconds)


def test_what_follows_on_blocks_that_are_given_waits_for_all_ranks(
    clock: ManualClock, sent: list[StepPlan]
) -> None:
    """The plan is in order with the others, and its report is no outcome."""
    steps, done = loop(clock, sent, tp=2), list[str]()
    steps.feed()
    steps.give((4, 9), lambda: done.append("given"))
    *before, giving = sent
    assert (giving.given, giving.num_sequences) == ((4, 9), 0)
    for plan in before:
        for rank in range(2):
            steps.settle(rank, report(plan, 0.1))
    assert steps.settle(0, report(giving, 0.1)) is None
    assert not done
    assert steps.settle(1, report(giving, 0.1)) is None
    assert done == ["given"]


def test_what_experts_had_is_kept_as_of_the_time_of_its_report(
    steps: StepLoop, clock: ManualClock, sent: list[StepPlan]
) -> None:
    """After a minute tokens weigh 1/e, and reports without counts change nothing."""
    for step, of_first in enumerate((400, None, 0)):
        steps.feed()
        counts = None if of_first is None else ExpertCounts((1,), 0, 2, 1, pack_ids([of_first, 100]))
        steps.settle(0, replace(report(sent[step], 0.1), experts=counts))
        clock.advance(30.0)
    expected = [400 / math.e, 100 / math.e + 100]
    assert steps.stats.experts.imbalance == pytest.approx(2 * max(expected) / sum(expected))


def test_plans_carry_the_copies_of_experts_that_reports_make_worthwhile(
    clock: ManualClock, sent: list[StepPlan]
) -> None:
    """The step that waits for the copy is no measure of what a step takes."""
    copies = ExpertCopies(num_experts=4, num_parts=2, num_slots=1, expert_bytes=10.0, now=clock.now())
    steps = loop(clock, sent, tp=2, copies=copies)
    steps.feed()
    first = ExpertCounts((1,), 0, 4, 1, pack_ids([5000, 100]))
    second = ExpertCounts((1,), 2, 4, 1, pack_ids([100, 100]))
    for rank, experts in enumerate((first, second)):
        steps.settle(rank, replace(report(sent[0], 0.1), experts=experts))
    assert copies.num_copies == 0
    for index in range(1, 8):
        steps.feed()
        seconds = 50.0 if sent[index].expert_copies else 0.25
        for rank in range(2):
            steps.settle(rank, report(sent[index], seconds))
    orders = [plan.expert_copies for plan in sent if plan.expert_copies]
    assert orders == [(ExpertCopy(1, 1, 0, 0),)], "it is ordered once, with one plan"
    assert copies.num_copies == 1
    assert steps.rates.decode_step_s == 0.25


def test_a_step_that_progresses_may_take_any_time(
    steps: StepLoop, clock: ManualClock, sent: list[StepPlan]
) -> None:
    """Ten short chunks of 7 s, then one of equal size behind a long cached prefix, which takes 94 s: the
    figures are those of a model of 1e9 parameters on one core."""
    for index in range(10):
        steps.feed()
        clock.advance(7.0 - 4.0)
        steps.progressed(0, sent[index].step)
        clock.advance(4.0)
        assert not steps.is_stalled(5.0)
        steps.settle(0, report(sent[index], 7.0))
    steps.feed()
    for _ in range(24):
        clock.advance(94 / 24)
        assert not steps.is_stalled(5.0)
        steps.progressed(0, sent[10].step)
    clock.advance(5.1)
    assert steps.is_stalled(5.0)
    assert steps.settle(0, report(sent[10], 99.1)) is not None
    assert not steps.is_stalled(5.0)


def test_a_hung_step_is_noticed_whatever_its_size(steps: StepLoop, clock: ManualClock) -> None:
    steps.feed()
    clock.advance(4.9)
    assert not steps.is_stalled(5.0)
    clock.advance(0.2)
    assert steps.is_stalled(5.0)


def test_how_long_a_step_has_stalled_counts_from_its_last_progress(
    clock: ManualClock, sent: list[StepPlan]
) -> None:
    steps = StepLoop(loop(clock, sent)._scheduler, sent.append, clock, piece_s=0.5)
    clock.advance(10.0)
    assert steps.stalled_s == 0.0, "nothing is out"
    steps.feed()
    clock.advance(1.9)
    assert steps.stalled_s == 0.0, "the largest piece may take so long"
    clock.advance(1.1)
    assert steps.stalled_s == pytest.approx(1.0)
    steps.progressed(0, sent[0].step)
    assert steps.stalled_s == 0.0
    clock.advance(4.0)
    assert steps.stalled_s == pytest.approx(2.0)
    steps.settle(0, report(sent[0], 4.0))
    assert steps.stalled_s == 0.0


def test_a_piece_that_is_long_by_measure_has_its_time(clock: ManualClock, sent: list[StepPlan]) -> None:
    scheduler = loop(clock, sent)._scheduler
    steps = StepLoop(scheduler, sent.append, clock, piece_s=2.0)
    steps.feed()
    clock.advance(5.0 + 4 * 2.0)
    assert not steps.is_stalled(5.0)
    clock.advance(0.1)
    assert steps.is_stalled(5.0)


def test_of_ranks_that_wait_for_each_other_the_one_ahead_counts(
    clock: ManualClock, sent: list[StepPlan]
) -> None:
    steps = loop(clock, sent, num_prompts=2, tp=2, pp=2)
    steps.feed()
    for rank in (0, 1, 3, 2):
        clock.advance(4.0)
        steps.progressed(rank, sent[0].step)
        assert not steps.is_stalled(5.0)
    clock.advance(5.1)
    assert steps.is_stalled(5.0)


def test_progress_with_a_later_step_does_not_hide_a_stage_that_hangs(
    clock: ManualClock, sent: list[StepPlan]
) -> None:
    steps = loop(clock, sent, num_prompts=4, pp=2)
    steps.feed()
    steps.settle(0, report(sent[0], 0.1))
    clock.advance(4.0)
    steps.progressed(0, sent[1].step)
    steps.progressed(0, sent[0].step)  # on its way when the report was sent
    clock.advance(1.1)
    assert steps.is_stalled(5.0)
    steps.settle(1, report(sent[0], 0.1))
    assert not steps.is_stalled(5.0), "the next one has its time from here on"


def test_an_idle_rank_is_probed_and_its_silence_noticed(clock: ManualClock, sent: list[StepPlan]) -> None:
    idle = loop(clock, sent, num_prompts=0, pp=2)
    clock.advance(2.1)
    assert idle.probe(2.0)
    assert not sent[-1].num_sequences
    clock.advance(5.1)
    assert idle.is_stalled(5.0)
    assert idle.settle(0, report(sent[-1], 0.0)) is None
    assert idle.is_stalled(5.0), "one of two has answered"
    assert not idle.probe(2.0)
    assert idle.settle(1, report(sent[-1], 0.0)) is None
    assert not idle.is_stalled(5.0)


# ---------------------------------------------------------------------------------------------- many ranks


@pytest.mark.parametrize(("tp", "pp", "num_out"), [(1, 1, 2), (2, 1, 2), (1, 2, 3), (2, 3, 4)])
def test_one_plan_more_is_out_than_there_are_stages(
    clock: ManualClock, sent: list[StepPlan], tp: int, pp: int, num_out: int
) -> None:
    steps = loop(clock, sent, 2 * pp, tp, pp)
    steps.feed()
    assert [plan.step for plan in sent] == list(range(1, num_out + 1))


def test_a_step_is_settled_by_the_last_of_its_ranks_with_the_tokens_of_the_sampling_one(
    clock: ManualClock, sent: list[StepPlan]
) -> None:
    steps = loop(clock, sent, num_prompts=4, tp=2, pp=2)
    steps.feed()
    rank_to_token = {0: 10, 1: 11, 2: 12, 3: 13}
    for plan in sent[:2]:  # the first stage is a plan ahead
        for rank in (0, 1):
            assert steps.settle(rank, report(plan, 0.1, token=rank_to_token[rank])) is None
    assert steps.settle(2, report(sent[0], 0.1, token=rank_to_token[2])) is None
    assert steps.num_steps == 0
    outcome = steps.settle(3, report(sent[0], 0.1, token=rank_to_token[3]))
    assert outcome is not None
    assert {delta.tokens for delta in outcome.tokens} == {(12).to_bytes(4, "little")}
    assert steps.num_steps == 1
    assert steps.settle(3, report(sent[1], 0.1)) is None
    assert steps.settle(2, report(sent[1], 0.1)) is not None, "the order of ranks does not matter"


def test_an_entry_that_any_rank_could_not_compute_has_failed(
    clock: ManualClock, sent: list[StepPlan]
) -> None:
    """The first stage had reported the step when the second failed; the reason is that of the rank that knows
    it."""
    steps = loop(clock, sent, num_prompts=2, tp=2, pp=2)
    steps.feed()
    whole = report(sent[0], 0.1)
    failed = {2: FailedEntry(0, ""), 3: FailedEntry(0, "no memory")}
    for rank in (0, 1, 3):
        given = (failed[rank],) if rank in failed else ()
        assert steps.settle(rank, replace(whole, failed=given)) is None
    outcome = steps.settle(2, replace(whole, tokens=bytes(len(whole.tokens)), failed=(failed[2],)))
    assert outcome is not None
    assert outcome.failures == [
        RequestFailed("r0", 0, "internal", "a step failed: rank 3: no memory", suspect=True)
    ]
    assert not outcome.tokens
    assert steps.rates.prefill_tok_s == 0, "what failed is no measure of speed"


def test_a_report_that_is_not_due_is_an_error(clock: ManualClock, sent: list[StepPlan]) -> None:
    steps = loop(clock, sent, num_prompts=2, pp=2)
    with pytest.raises(WorkerError, match="rank 0 reported step 1, but nothing was due"):
        steps.settle(0, StepReport(1, b"", 0.0, 0.0))
    steps.feed()
    with pytest.raises(WorkerError, match="rank 1 reported step 2, but step 1 was due"):
        steps.settle(1, report(sent[1], 0.1))
    steps.settle(0, report(sent[0], 0.1))
    with pytest.raises(WorkerError, match="rank 0 reported step 1, but step 2 was due"):
        steps.settle(0, report(sent[0], 0.1))
    for rank in (2, -1):
        with pytest.raises(WorkerError, match=f"rank {rank} reported step 1, but nothing was due"):
            steps.settle(rank, report(sent[0], 0.1))
    assert steps.settle(1, report(sent[0], 0.1)) is not None, "what was refused has changed nothing"


def test_rates_are_of_the_slowest_stage_and_of_the_whole_way(
    clock: ManualClock, sent: list[StepPlan]
) -> None:
    steps = loop(clock, sent, num_prompts=1, tp=2, pp=2)
    rank_to_seconds = {0: 0.1, 1: 0.2, 2: 0.4, 3: 0.3}
    for _ in range(2):
        steps.feed()
        plan = sent[-1]
        for rank, seconds in rank_to_seconds.items():  # each with a clock of its own
            steps.settle(rank, report(plan, seconds, at=1000.0 * rank))
    assert [plan.num_tokens for plan in sent] == [NUM_TOKENS, 1]
    assert steps.rates.prefill_tok_s == pytest.approx(NUM_TOKENS / 0.4)
    assert steps.rates.decode_step_s == pytest.approx(0.2 + 0.4)


def chunk(num_tokens: int, slot: int = 0) -> BatchEntry:
    return BatchEntry(slot, 0, num_tokens, bytes(4 * num_tokens), ())


def test_the_rate_of_prefill_is_that_of_chunks_of_prompts() -> None:
    """Neither the first tokens behind prompts whose KV arrived nor decodes beside a short rest count."""
    rates = StepRates()
    rates.add(StepPlan(1, entries=tuple(chunk(1, slot) for slot in range(200))), [0.01])
    assert (rates.prefill_tok_s, rates.decode_step_s) == (0.0, 0.01)
    rates.add(StepPlan(2, entries=(chunk(12),), decodes=bytes(4 * 100)), [0.01])
    assert (rates.prefill_tok_s, rates.decode_step_s) == (0.0, 0.01)
    rates.add(StepPlan(3, entries=(chunk(300),), decodes=bytes(4 * 100)), [0.1])
    assert rates.prefill_tok_s == pytest.approx(3000)


def test_steps_that_are_found_done_together_do_not_raise_the_rate() -> None:
    """Seen on a card: a late host gives all the time of two steps to the first."""
    rates = StepRates()
    for step in range(100):
        rates.add(StepPlan(step, entries=(chunk(500),)), [0.2 if step % 2 == 0 else 1e-6])
        assert rates.prefill_tok_s < 2 * 5000
    assert rates.prefill_tok_s == pytest.approx(5000, rel=0.15)


def test_the_times_of_a_chunk_are_of_the_sampling_ranks_clock(
    clock: ManualClock, sent: list[StepPlan]
) -> None:
    steps = loop(clock, sent, num_prompts=0, pp=2)
    target = HandOverTarget(ReplicaIdentity("d", 1), "d:1")
    sampling = SamplingParams(max_tokens=2)
    prompt = bytes(4 * NUM_TOKENS)
    scheduler = steps._scheduler
    scheduler.submit(
        Submission(
            "r", 0, "", "", 0, prompt, b"", (b"k" * 16,) * 6, (SampleState(0, 1),), sampling, target, None
        ),
        0.0,
    )
    scheduler.grant_landing("r", 0)
    steps.feed()
    steps.settle(0, report(sent[0], 0.5, at=77.0))
    outcome = steps.settle(1, report(sent[0], 0.25, at=10.0))
    assert outcome is not None
    (chunk,) = outcome.chunks
    assert (chunk.started_at, chunk.finished_at) == (9.5, 10.25)
    (prompt_done,) = outcome.prompts
    assert (prompt_done.times.step_start, prompt_done.times.step_end) == (9.5, 10.25)


def test_a_stage_that_hangs_is_noticed_though_the_one_before_it_reports(
    clock: ManualClock, sent: list[StepPlan]
) -> None:
    steps = loop(clock, sent, num_prompts=4, pp=2)
    steps.feed()
    for rank in (0, 1):
        steps.settle(rank, report(sent[0], 0.1))
    clock.advance(4.9)
    for plan in sent[1:]:
        steps.settle(0, report(plan, 0.1))
    assert not steps.is_stalled(5.0)
    clock.advance(0.2)
    assert steps.is_stalled(5.0)


@pytest.mark.parametrize("is_failing", [False, True])
def test_the_costs_of_steps_are_learned_from_reports(
    clock: ManualClock, sent: list[StepPlan], is_failing: bool
) -> None:
    """Twenty chunks, and then decodes of what they left."""
    steps = loop(clock, sent, num_prompts=40)
    num_settled = 0
    steps.feed()
    while num_settled < len(sent):
        plan = sent[num_settled]
        has_chunk = any(entry.num_tokens > 1 for entry in plan.entries)
        done = report(plan, 0.2 if has_chunk else 0.01)
        failed = (FailedEntry(0, "broken"),) if is_failing else ()
        steps.settle(0, replace(done, failed=failed))
        num_settled += 1
        steps.feed()
    known = steps.costs.coefficients()
    if is_failing:
        assert not any(known.values())
        return
    assert known["decode_base_s"] > 0
    assert known["prefill_token_s"] > 0
