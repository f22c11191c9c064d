"""What steps cost, against models that are known exactly and are observed with noise."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slow_cases import examples

from workers.messages.rank_channel import BatchEntry, StepPlan
from workers.scheduler.step import pack_ids
from workers.scheduler.step_costs import FIRST_DECODE_RATIO, NonNegativeFit, StepCosts, _least

UNKNOWN = {
    "prefill_token_s": 0.0,
    "attention_token_s": 0.0,
    "decode_base_s": 0.0,
    "decode_sequence_s": 0.0,
    "decode_context_s": 0.0,
}
DECODE = (8e-3, 2e-4, 3e-8)
PREFILL = (4e-5, 5e-10)


def entry(start: int, num_tokens: int) -> BatchEntry:
    return BatchEntry(0, start, num_tokens, bytes(4 * num_tokens), ())


def plan(entries: tuple[BatchEntry, ...] = (), num_decodes: int = 0) -> StepPlan:
    return StepPlan(1, entries=entries, decodes=pack_ids(range(num_decodes)))


def decode_s(starts: list[int]) -> float:
    return DECODE[0] + len(starts) * DECODE[1] + sum(starts) * DECODE[2]


def chunk_s(start: int, num_tokens: int) -> float:
    return num_tokens * PREFILL[0] + num_tokens * (start + num_tokens / 2) * PREFILL[1]


class Replica:
    """Runs steps that take what the models say, with noise, and some much longer."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.costs = StepCosts()

    def measured(self, seconds: float) -> float:
        disturbed = 20.0 if self.random.random() < 0.01 else 1.0
        return seconds * self.random.uniform(0.9, 1.1) * disturbed

    def decode(self, num_sequences: int, context: int, num_stages: int = 1) -> None:
        starts = [self.random.randrange(context // 2, context * 3 // 2) for _ in range(num_sequences)]
        busy_s = self.measured(decode_s(starts)) / num_stages
        self.costs.add(plan(num_decodes=num_sequences), starts, [busy_s] * num_stages)

    def chunk(self, start: int, num_tokens: int, num_decodes: int = 0) -> None:
        starts = [1000] * num_decodes
        seconds = chunk_s(start, num_tokens) + (decode_s(starts) - DECODE[0])
        step = plan((entry(start, num_tokens),), num_decodes)
        self.costs.add(step, starts, [self.measured(seconds)])

    def some_decodes(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.decode(self.random.randint(1, 64), self.random.randint(100, 20_000))

    def predicted_decode_s(self, num_sequences: int, num_context_tokens: int) -> float:
        known: dict[str, float] = self.costs.coefficients()
        return (
            known["decode_base_s"]
            + num_sequences * known["decode_sequence_s"]
            + num_context_tokens * known["decode_context_s"]
        )

    def predicted_chunk_s(self, start: int, num_tokens: int) -> float:
        known: dict[str, float] = self.costs.coefficients()
        attended = num_tokens * (start + num_tokens / 2)
        return num_tokens * known["prefill_token_s"] + attended * known["attention_token_s"]


@pytest.mark.parametrize("seed", range(4))
def test_decode_steps_are_predicted_as_the_model_has_them(seed: int) -> None:
    replica = Replica(seed)
    replica.some_decodes(600)
    for num_sequences, context in ((1, 100), (1, 20_000), (16, 1_000), (64, 500), (64, 20_000)):
        expected = decode_s([context] * num_sequences)
        predicted = replica.predicted_decode_s(num_sequences, num_sequences * context)
        assert predicted == pytest.approx(expected, rel=0.25), (num_sequences, context)


@pytest.mark.parametrize("num_decodes", [0, 16])
def test_chunks_are_predicted_as_the_model_has_them_also_beside_decodes(num_decodes: int) -> None:
    replica = Replica(1)
    replica.some_decodes(600)
    for _ in range(400):
        replica.chunk(
            replica.random.randrange(0, 100_000), replica.random.choice([64, 512, 2048]), num_decodes
        )
    for start, num_tokens in ((0, 512), (0, 2048), (50_000, 512), (100_000, 2048)):
        predicted = replica.predicted_chunk_s(start, num_tokens)
        assert predicted == pytest.approx(chunk_s(start, num_tokens), rel=0.2), (start, num_tokens)


def test_nothing_is_told_before_enough_steps() -> None:
    replica = Replica(2)
    replica.some_decodes(15)
    for _ in range(15):
        replica.chunk(0, 512)
    assert replica.costs.coefficients() == UNKNOWN
    replica.some_decodes(1)
    replica.chunk(0, 512)
    known = replica.costs.coefficients()
    assert known["decode_base_s"] > 0
    assert known["prefill_token_s"] > 0


@pytest.mark.parametrize("disturbed_steps", [{0}, {7}, {15}, {0, 1}, {2, 3, 4, 11, 15}])
def test_first_steps_that_were_disturbed_do_not_price_the_others(disturbed_steps: set[int]) -> None:
    """They would be predicted of every prompt, and refuse those that could not come in time then."""
    costs = StepCosts()
    for step in range(16):
        disturbed = 200.0 if step in disturbed_steps else 1.0
        costs.add(plan(num_decodes=4), [500] * 4, [disturbed * decode_s([500] * 4)])
        costs.add(plan((entry(64 * step, 64),)), [], [disturbed * chunk_s(64 * step, 64)])
    known = costs.coefficients()
    # Each disturbed one counts as three.
    most = 1.05 * (1 + 2 * len(disturbed_steps) / 16)
    assert known["decode_base_s"] < most * decode_s([500] * 4)
    prompt_s = known["prefill_token_s"] * 1024 + known["attention_token_s"] * 1024 * 512
    assert 0.95 * chunk_s(0, 1024) < prompt_s < most * chunk_s(0, 1024)


@pytest.mark.parametrize("seed", range(8))
def test_short_prompts_do_not_make_attention_dear(seed: int) -> None:
    """Reading the weights is most of what they take, and noise the rest. A long prompt has thirty times the
    tokens, but a thousand times the pairs."""
    replica = Replica(seed)
    for _ in range(64):
        num_tokens = replica.random.randint(20, 30)
        seconds = 0.02 * replica.random.uniform(0.5, 2.5) * (num_tokens / 25) ** 2
        replica.costs.add(plan((entry(0, num_tokens),)), [], [seconds])
    assert replica.predicted_chunk_s(0, 900) < 2 * (0.03 / 25) * 900


@pytest.mark.parametrize("num_long", [1, 3, 8, 15])
def test_first_chunks_behind_long_contexts_were_not_disturbed(num_long: int) -> None:
    """Attention is most of what they take, and prompts behind long contexts must not seem cheap."""
    costs, context = StepCosts(), 2_000_000
    for step in range(16):
        start, num_tokens = (context, 2048) if step >= 16 - num_long else (0, 512)
        costs.add(plan((entry(start, num_tokens),)), [], [chunk_s(start, num_tokens)])
    known = costs.coefficients()
    prompt_s = known["prefill_token_s"] * 2048 + known["attention_token_s"] * 2048 * (context + 1024)
    assert prompt_s == pytest.approx(chunk_s(context, 2048), rel=0.15)


def test_a_chunk_beside_decodes_of_unknown_cost_teaches_nothing() -> None:
    replica = Replica(2)
    for _ in range(100):
        replica.chunk(0, 512, num_decodes=8)
    assert replica.costs.coefficients() == UNKNOWN


def test_what_equal_steps_do_not_tell_apart_is_due_to_the_base() -> None:
    """The router would otherwise fear larger batches for nothing."""
    replica = Replica(3)
    for _ in range(2000):
        replica.decode(1, 400)
    assert replica.predicted_decode_s(1, 400) == pytest.approx(decode_s([400]), rel=0.1)
    assert replica.predicted_decode_s(32, 32 * 400) < 2 * decode_s([400] * 32)


def test_equal_steps_do_not_undo_what_was_learned() -> None:
    replica = Replica(4)
    replica.some_decodes(1000)
    for _ in range(5000):
        replica.decode(1, 400)
    assert replica.predicted_decode_s(64, 64 * 10_000) == pytest.approx(decode_s([10_000] * 64), rel=0.3)


def test_a_replica_that_becomes_slower_is_known_to_be() -> None:
    replica = Replica(5)
    replica.some_decodes(1000)
    before = replica.predicted_decode_s(16, 16_000)
    for _ in range(2000):
        starts = [replica.random.randrange(20_000)] * replica.random.randint(1, 64)
        replica.costs.add(plan(num_decodes=len(starts)), starts, [5 * decode_s(starts)])
    assert replica.predicted_decode_s(16, 16_000) == pytest.approx(5 * before, rel=0.25)


def test_decodes_take_all_stages_and_chunks_the_slowest() -> None:
    costs = StepCosts()
    for size in range(1, 65):
        costs.add(plan(num_decodes=size), [100] * size, [0.010, 0.030])
        costs.add(plan((entry(0, 512),)), [], [0.1, 0.2])
    known = costs.coefficients()
    assert known["decode_base_s"] == pytest.approx(0.040, rel=0.02)
    assert known["prefill_token_s"] * 512 + known["attention_token_s"] * 512 * 256 == pytest.approx(
        0.2, rel=0.02
    )


@pytest.mark.parametrize("base_s", [0.0, 8e-3])
def test_chunks_that_get_shorter_do_not_become_dearer(base_s: float) -> None:
    """Reading the weights is most of a short chunk: a price per token alone would rise as chunks shrink."""
    replica = Replica(6)
    replica.some_decodes(600)
    starts = [1000] * 8
    beside_s = decode_s(starts) - DECODE[0]
    for num_tokens in (*range(2048, 64, -64), *[64] * 300):
        seconds = replica.measured(base_s + chunk_s(0, num_tokens) + beside_s)
        replica.costs.add(plan((entry(0, num_tokens),), 8), starts, [seconds])
    for num_tokens in (64, 512, 2048):
        known_s = replica.costs.step_s(8, 8000, num_tokens, num_tokens * num_tokens / 2)
        expected_s = max(base_s + chunk_s(0, num_tokens), DECODE[0]) + beside_s
        assert known_s == pytest.approx(expected_s, rel=0.25), num_tokens


def test_an_output_token_takes_a_chunk_in_every_stage() -> None:
    costs = StepCosts()
    for size in range(1, 65):
        costs.add(plan(num_decodes=size), [100] * size, [0.010, 0.030])
        costs.add(plan((entry(0, 512),)), [], [0.1, 0.2])
    assert costs.step_s(1, 100, 512, 512 * 256, num_stages=2) == pytest.approx(0.4, rel=0.02)
    assert costs.step_s(1, 100, 0, 0.0, num_stages=2) == pytest.approx(0.040, rel=0.02)


def test_whole_steps_are_not_predicted_before_enough_were_seen() -> None:
    replica = Replica(7)
    replica.chunk(0, 512)
    assert replica.costs.step_s(1, 100, 0, 0.0) == 0.0
    replica.some_decodes(16)
    assert replica.costs.step_s(1, 100, 0, 0.0) > 0.0
    assert replica.costs.step_s(1, 100, 64, 2048.0) == 0.0


def test_a_first_token_of_a_slot_is_a_decode() -> None:
    costs = StepCosts()
    for _ in range(16):
        costs.add(plan((entry(700, 1),)), [], [0.010])
    known = costs.coefficients()
    assert known["prefill_token_s"] == 0.0
    assert known["decode_base_s"] > 0


def test_sequences_are_not_free_while_all_steps_have_as_many() -> None:
    costs = StepCosts()
    for _ in range(100):
        costs.add(plan(num_decodes=3), [50] * 3, [0.010])
    known = costs.coefficients()
    assert known["decode_base_s"] + 3 * known["decode_sequence_s"] == pytest.approx(0.010, rel=0.001)
    assert known["decode_sequence_s"] == pytest.approx(
        FIRST_DECODE_RATIO[1] * known["decode_base_s"], rel=0.01
    )
    # As soon as there are others, it is measured; here they are free.
    for size in list(range(1, 65)) * 10:
        costs.add(plan(num_decodes=size), [50] * size, [0.010])
    assert costs.coefficients()["decode_sequence_s"] < 1e-5


def test_steps_without_a_time_are_left_out() -> None:
    costs = StepCosts()
    for _ in range(100):
        costs.add(plan(num_decodes=1), [5], [0.0])
    assert costs.coefficients() == UNKNOWN


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e3)), min_size=16, max_size=200)
)
def test_coefficients_are_never_negative_and_always_numbers(
    steps: list[tuple[float, float, float]],
) -> None:
    fit = NonNegativeFit(FIRST_DECODE_RATIO)
    for sequences, context, seconds in steps:
        fit.add((1.0, sequences, context), seconds)
    assert len(fit.coefficients) == 3
    assert all(0.0 <= each < float("inf") for each in fit.coefficients)


@given(
    st.lists(st.lists(st.floats(-1, 1), min_size=3, max_size=3), min_size=4, max_size=8),
    st.lists(st.floats(-1, 1), min_size=3, max_size=3),
)
@settings(max_examples=examples(200))
def test_the_fit_is_the_best_that_is_not_negative(rows: list[list[float]], moments: list[float]) -> None:
    """Against projected descent, which only ever walks downhill and within what is allowed."""
    matrix = [
        [sum(row[i] * row[j] for row in rows) + (0.1 if i == j else 0.0) for j in range(3)] for i in range(3)
    ]
    assume(all(matrix[index][index] < 10 for index in range(3)))

    def value(x: list[float] | tuple[float, ...]) -> float:
        squares = sum(x[i] * matrix[i][j] * x[j] for i in range(3) for j in range(3))
        return squares / 2 - sum(a * b for a, b in zip(moments, x, strict=True))

    descent = [0.0] * 3
    for _ in range(500):
        for i in range(3):
            rest = sum(matrix[i][j] * descent[j] for j in range(3) if j != i)
            descent[i] = max(0.0, (moments[i] - rest) / matrix[i][i])
    found = _least(matrix, moments)
    assert min(found) >= 0
    assert value(found) == pytest.approx(value(descent), abs=1e-6)
