"""The sampler's processing against transformers' own processors and the written penalty formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from local_engine import packed
from torch import Tensor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from workers.messages.rank_channel import SlotSample, SlotStart
from workers.messages.sampling import SamplingParams
from workers.model import native
from workers.rank.logits import SLOT
from workers.rank.sampler import Sampler

VOCAB = 1000
NUM_SLOTS = 128
EOS = (7, 11)
PROMPT = (3, 5, 5, 800, 12)
OUTPUT = (5, 40, 41, 41, 41)

Process = Callable[[Tensor, Tensor], Tensor]


class ExposedSampler(Sampler):
    """A sampler that takes slots as any sequence, and also returns what it samples from."""

    def processed_logits(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        """Return the logits to which noise would be added; excluded tokens are -inf. `logits` may be
        overwritten."""
        which = np.array(slots, np.int32)
        if self._has_kernels:
            kernels = native.load()
            assert kernels is not None
            kernels.change_rows(self._arguments.of_logits(logits, which, None))
        else:
            self._table.change_(logits, which, self._table.needs(which))
        rows = np.flatnonzero(self._table.temperature[which])
        if len(rows):
            logits[rows] = self._warp(which[rows]).dense(logits[rows])
        return logits

    def tokens(self, logits: Tensor, slots: Sequence[int]) -> list[int]:
        """Sample a token for each slot."""
        tokens: list[int] = self.sample(logits, np.array(slots, np.int32)).tokens.tolist()
        return tokens


pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make_sampler(vocab_size: int = VOCAB) -> ExposedSampler:
    return ExposedSampler(vocab_size, EOS, torch.device("cpu"), NUM_SLOTS)


def start(
    slot: int,
    sampling: SamplingParams,
    *,
    prompt: Sequence[int] = PROMPT,
    output: Sequence[int] = OUTPUT,
    seed: int = 0,
) -> SlotStart:
    last_token = [*prompt, *output][-1]
    known = packed(output) if sampling.penalizes_output else b""
    sample = SlotSample(slot, seed, last_token, len(output), known)
    return SlotStart(sampling, (sample,), packed(prompt) if sampling.penalizes_prompt else b"")


def draw_logits(num_rows: int, seed: int = 0, vocab_size: int = VOCAB) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def reference(sampling: SamplingParams) -> Process:
    """The same processing by transformers' processors, one row at a time."""

    def penalize(ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(ids[0, len(PROMPT) :], minlength=scores.shape[1])
        scores = scores - counts * sampling.frequency_penalty
        return scores - (counts > 0) * sampling.presence_penalty

    steps: list[Process] = []
    if sampling.logit_bias:
        steps.append(
            SequenceBiasLogitsProcessor([[[id_], value] for id_, value in sampling.logit_bias.items()])
        )
    if sampling.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.append(penalize)
    if sampling.min_tokens:
        ends = [*EOS, *sampling.stop_token_ids]
        steps.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), sampling.min_tokens, ends))
    if sampling.temperature > 0:
        steps.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            steps.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            steps.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            steps.append(MinPLogitsWarper(sampling.min_p))

    def process(ids: Tensor, scores: Tensor) -> Tensor:
        for step in steps:
            scores = step(ids, scores)
        return scores

    return process


CASES = {
    "nothing": SamplingParams(),
    "logit bias": SamplingParams(logit_bias={5: 4.5, 900: -100.0}),
    "repetition penalty": SamplingParams(repetition_penalty=1.7),
    "repetition reward": SamplingParams(repetition_penalty=0.6),
    "presence penalty": SamplingParams(presence_penalty=1.25),
    "frequency penalty": SamplingParams(frequency_penalty=-0.75),
    "min tokens": SamplingParams(min_tokens=6, stop_token_ids=(20, 21)),
    "min tokens reached": SamplingParams(min_tokens=5, stop_token_ids=(20, 21)),
    "temperature": SamplingParams(temperature=0.7),
    "top k": SamplingParams(temperature=1.0, top_k=13),
    "top k of one": SamplingParams(temperature=1.0, top_k=1),
    "top k above the vocabulary": SamplingParams(temperature=1.0, top_k=VOCAB + 5),
    "top p": SamplingParams(temperature=1.0, top_p=0.8),
    "top p tiny": SamplingParams(temperature=1.0, top_p=0.001),
    "top p of a flat distribution": SamplingParams(temperature=50.0, top_p=0.9),
    "min p": SamplingParams(temperature=1.0, min_p=0.05),
    "min p of one": SamplingParams(temperature=1.0, min_p=1.0),
    "all": SamplingParams(
        temperature=1.3,
        top_k=60,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={41: 6.0, 7: 5.0},
        min_tokens=9,
        stop_token_ids=(1,),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_processing_equals_transformers(name: str) -> None:
    sampler = make_sampler()
    sampler.start(start(0, CASES[name]))
    logits = draw_logits(1)
    expected = reference(CASES[name])(torch.tensor([[*PROMPT, *OUTPUT]]), logits.clone())
    actual = sampler.processed_logits(logits.clone(), [0])
    assert torch.equal(actual.isinf(), expected.isinf())
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_a_mixed_batch_equals_its_rows_alone() -> None:
    sampler, logits = make_sampler(), draw_logits(len(CASES))
    for slot, sampling in enumerate(CASES.values()):
        sampler.start(start(slot, sampling))
    together = sampler.processed_logits(logits.clone(), range(len(CASES)))
    for slot in range(len(CASES)):
        alone = sampler.processed_logits(logits[slot : slot + 1].clone(), [slot])
        assert torch.equal(together[slot], alone[0])


def test_tokens_do_not_depend_on_the_neighbours() -> None:
    def tokens(slots: Sequence[int]) -> dict[int, int]:
        sampler, logits = make_sampler(), draw_logits(len(CASES))
        cases = list(CASES.values())
        for slot in slots:
            sampler.start(start(slot, cases[slot], seed=slot * 7919))
        return dict(zip(slots, sampler.tokens(logits[list(slots)].clone(), slots), strict=True))

    together = tokens(range(len(CASES)))
    for slot in range(len(CASES)):
        assert tokens([slot]) == {slot: together[slot]}


def test_output_counts_follow_the_sampled_tokens() -> None:
    """After sampling, penalties equal those of a slot started with the tokens as output: the resume case."""
    sampling = SamplingParams(temperature=1.0, frequency_penalty=0.5, repetition_penalty=1.1, min_tokens=9)
    sampler = make_sampler()
    sampler.start(start(0, sampling, seed=5))
    output = list(OUTPUT)
    for step in range(6):
        output += sampler.tokens(draw_logits(1, seed=step), [0])
    resumed = make_sampler()
    resumed.start(start(0, sampling, output=output, seed=5))
    logits = draw_logits(1, seed=99)
    assert torch.equal(
        sampler.processed_logits(logits.clone(), [0]), resumed.processed_logits(logits.clone(), [0])
    )
    assert sampler.tokens(logits.clone(), [0]) == resumed.tokens(logits.clone(), [0])


def test_resumed_slots_sample_the_same_tokens() -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.95)
    sampler = make_sampler()
    sampler.start(start(0, sampling, output=(), seed=-3))
    whole = [sampler.tokens(draw_logits(1, seed=step), [0])[0] for step in range(20)]
    resumed = make_sampler()
    resumed.start(start(0, sampling, output=whole[:8], seed=-3))
    assert [resumed.tokens(draw_logits(1, seed=step), [0])[0] for step in range(8, 20)] == whole[8:]
    assert len(set(whole)) > 5


def test_samples_follow_the_processed_distribution() -> None:
    """Chi-square over many output indices: frequencies against the softmax of the processed logits."""
    num_draws, num_tokens = 20_000, 20
    sampling = SamplingParams(temperature=0.8, top_k=12, repetition_penalty=1.3)
    logits = draw_logits(1, vocab_size=num_tokens)
    sampler = make_sampler(num_tokens)
    slots = range(100)
    for slot in slots:
        sampler.start(start(slot, sampling, prompt=(1, 2), output=(), seed=slot))
    expected = sampler.processed_logits(logits.clone(), [0]).softmax(dim=-1)[0].double()
    counts = torch.zeros(num_tokens, dtype=torch.float64)
    for _ in range(num_draws // len(slots)):
        for slot in slots:  # a fresh slot state keeps the repetition penalty that of the prompt alone
            sampler.free(slot)
        for slot in slots:
            seed = int(counts.sum()) + slot
            sampler.start(start(slot, sampling, prompt=(1, 2), output=(), seed=seed))
        for token in sampler.tokens(logits.repeat(len(slots), 1), slots):
            counts[token] += 1
    kept = expected > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts - num_draws * expected)[kept] ** 2 / (num_draws * expected)[kept]).sum()
    assert int(kept.sum()) == 12
    assert chi_square < 31.3  # 11 degrees of freedom, p = 0.001


def test_greedy_ignores_seed_and_filters() -> None:
    logits = draw_logits(1)
    for seed in (0, 1, -(2**63), 2**64 - 1):
        sampler = make_sampler()
        sampler.start(start(0, SamplingParams(top_k=3, top_p=0.5, min_p=0.5), seed=seed))
        assert sampler.tokens(logits.clone(), [0]) == [int(logits.argmax())]


def test_logprobs_are_of_the_raw_distribution() -> None:
    sampler, logits = make_sampler(), draw_logits(4)
    sampler.start(start(0, SamplingParams(temperature=2.0, top_k=5, num_logprobs=3)))
    sampler.start(start(1, SamplingParams(num_logprobs=0)))
    sampler.start(start(2, SamplingParams(temperature=1.0)))
    sampler.start(start(3, SamplingParams(logit_bias={40: 100.0}, num_logprobs=2)))
    expected = logits.log_softmax(dim=-1)
    tokens, row_to_logprob = sampler.sample(logits.clone(), np.arange(4, dtype=np.int32))
    assert tokens[3] == 40
    assert row_to_logprob.keys() == {0, 1, 3}
    for row, num_top in ((0, 3), (1, 0), (3, 2)):
        logprob = row_to_logprob[row]
        assert logprob.logprob == float(expected[row, int(tokens[row])])
        values, ids = expected[row].topk(num_top)
        assert logprob.top == tuple(zip(ids.tolist(), values.tolist(), strict=True))


def test_logprobs_when_every_row_is_processed() -> None:
    sampler, logits = make_sampler(), draw_logits(1)
    sampler.start(start(0, SamplingParams(temperature=0.5, logit_bias={40: 100.0}, num_logprobs=0)))
    sampled = sampler.sample(logits.clone(), np.array([0], np.int32))
    assert sampled.row_to_logprob[0].logprob == float(logits.log_softmax(dim=-1)[0, 40])


def test_tokens_outside_the_vocabulary_are_ignored() -> None:
    sampling = SamplingParams(logit_bias={VOCAB: 5.0, -1: 5.0}, stop_token_ids=(VOCAB + 3,), min_tokens=9)
    sampler, logits = make_sampler(), draw_logits(1)
    sampler.start(start(0, sampling))
    expected = logits.clone()
    expected[0, list(EOS)] = -torch.inf
    assert torch.equal(sampler.processed_logits(logits.clone(), [0]), expected)


def test_penalty_rows_are_reused_clean() -> None:
    sampling, logits = SamplingParams(presence_penalty=1.0, repetition_penalty=2.0), draw_logits(1)
    sampler = make_sampler()
    for slot in range(30):
        sampler.start(start(slot, sampling, prompt=(slot,), output=(slot + 1, slot + 2)))
    for slot in range(30):
        sampler.free(slot)
    sampler.start(start(31, sampling, prompt=(500,), output=()))
    fresh = make_sampler()
    fresh.start(start(31, sampling, prompt=(500,), output=()))
    assert torch.equal(
        sampler.processed_logits(logits.clone(), [31]), fresh.processed_logits(logits.clone(), [31])
    )


def test_bad_plans_are_assertion_errors() -> None:
    sampler = make_sampler()
    sampler.start(start(0, SamplingParams()))
    with pytest.raises(AssertionError, match="slot 0 is already in use"):
        sampler.start(start(0, SamplingParams()))
    with pytest.raises(AssertionError, match="slot 4 is not in use"):
        sampler.free(4)
    with pytest.raises(AssertionError, match="slot 4 samples but was never started"):
        sampler.tokens(draw_logits(1), [4])


@pytest.mark.parametrize("field", ["prompt", "output"])
def test_a_start_that_fails_takes_no_slot(field: str) -> None:
    sampler, sampling = make_sampler(), SamplingParams(repetition_penalty=1.2)
    known = {"prompt": packed([5]), "output": packed([6])} | {field: packed([4, VOCAB])}
    samples = (SlotSample(0, 0, 6, 1, packed([6])), SlotSample(1, 0, 6, 2, known["output"]))
    with pytest.raises(IndexError):
        sampler.start(SlotStart(sampling, samples, known["prompt"]))
    sampler.start(start(0, sampling))
    sampler.start(start(1, sampling))


def test_samples_of_one_prompt_count_their_own_output() -> None:
    sampler, sampling = make_sampler(), SamplingParams(presence_penalty=50.0, repetition_penalty=1.1)
    samples = tuple(SlotSample(slot, slot, PROMPT[-1]) for slot in range(2))
    sampler.start(SlotStart(sampling, samples, packed(PROMPT)))
    logits = draw_logits(1).repeat(2, 1)
    found: list[set[int]] = [set(), set()]
    for step in range(40):  # more than there is memory for at first
        slots = [0, 1] if step % 2 else [1]
        for slot, token in zip(slots, sampler.tokens(logits[: len(slots)].clone(), slots), strict=True):
            assert token not in found[slot], "a penalty of 50 keeps every token from coming again"
            found[slot].add(token)
    assert [len(tokens) for tokens in found] == [20, 40]
    assert found[0] < found[1]


def test_the_kernels_read_a_slot_as_it_is_written() -> None:
    assert SLOT.itemsize == 112, "as asserted in sampling.h"


def test_one_row_per_slot_in_order() -> None:
    sampler, logits = make_sampler(), draw_logits(3)
    for slot in (9, 4, 6):
        sampler.start(start(slot, SamplingParams()))
    expected = logits.argmax(dim=-1).tolist()
    tokens, row_to_logprob = sampler.sample(logits, np.array([9, 4, 6], np.int32))
    assert tokens.dtype == np.uint32
    assert (tokens.tolist(), row_to_logprob) == (expected, {})
