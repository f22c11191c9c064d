"""Shorter ways to a token against the sampler that computes everything, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from dense_sampler import DenseSampler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_engine import packed
from torch import Tensor

from workers.messages import SamplingParams, SlotSample, SlotStart
from workers.model import native
from workers.rank.sampler import SampledToken, Sampler, gumbel, is_apart, largest, row_keys, token_counters

CPU = torch.device("cpu")
EOS = (7, 11)
# Sampling, prompt, output, seed.
Case = tuple[SamplingParams, list[int], list[int], int]

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda drawn: drawn * 3,
    "peaked": lambda drawn: drawn * 30,
    "flat": lambda drawn: drawn * 0.01,
    "of a head in bfloat16": lambda drawn: (drawn * 5).bfloat16().float(),
    "a few values": lambda drawn: drawn.round(),
    "equal": lambda drawn: drawn * 0 + 2.5,
    "far from zero": lambda drawn: drawn * 2 - 3000,
    "mostly excluded": lambda drawn: drawn.masked_fill(drawn < 1, -torch.inf),
}


def parameters(vocab_size: int) -> st.SearchStrategy[SamplingParams]:
    tokens = st.integers(0, vocab_size - 1)
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1e-39, 9e-6, 1.1e-5, 0.2, 0.7, 1.0, 1.7, 40.0]),
        top_k=st.sampled_from([0, 0, 1, 2, 5, 50, 300, vocab_size - 1, vocab_size, vocab_size + 9]),
        top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.999, 0.9999999]),
        min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.6]),
        presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -1.0]),
        logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.0, 8.0]), max_size=3),
        min_tokens=st.sampled_from([0, 0, 6]),
        num_logprobs=st.sampled_from([None, None, 0, 3]),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, str, int, list[Case]]:
    """Vocabulary, shape of the logits, their seed, and what the rows sample."""
    vocab_size = draw(st.sampled_from([1, 13, 257, 1000, 6000]))
    tokens = st.integers(0, vocab_size - 1)
    case = st.tuples(
        parameters(vocab_size),
        st.lists(tokens, min_size=1, max_size=20),
        st.lists(tokens, max_size=20),
        st.integers(-(2**63), 2**64 - 1),
    )
    return (
        vocab_size,
        draw(st.sampled_from(sorted(SHAPES))),
        draw(st.integers(0, 2**32)),
        draw(st.lists(case, min_size=1, max_size=6)),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches())
def test_tokens_and_logprobs_are_those_of_the_whole_vocabulary(
    backend: str, batch: tuple[int, str, int, list[Case]]
) -> None:
    vocab_size, shape, seed, cases = batch
    short, dense = samplers(vocab_size, cases)
    generator = torch.Generator().manual_seed(seed)
    slots = range(len(cases))
    for _ in range(3):
        logits = SHAPES[shape](torch.randn(len(cases), vocab_size, generator=generator))
        found, expected = short.sample(logits.clone(), slots), dense(logits.clone(), slots)
        assert repr(found) == repr(expected), "as text, for the log-probability of nothing is not a number"


@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.99])
def test_rounding_decides_nothing(backend: str, top_k: int, top_p: float) -> None:
    """Logits that the noise cancels, so that all scores are equal up to rounding."""
    num_rows, vocab_size = 8, 3000
    sampling = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)
    cases: list[Case] = [(sampling, [1], [], seed) for seed in range(num_rows)]
    short, dense = samplers(vocab_size, cases)
    keys = row_keys(range(num_rows), [0] * num_rows)
    cancelled = -gumbel(keys, token_counters(vocab_size, CPU))
    for nudge in (0.0, 1e-6, -1e-6):
        scores = cancelled.clone()
        scores[:, 1000] += nudge
        short, dense = samplers(vocab_size, cases)
        assert short.sample(scores.clone(), range(num_rows)) == dense(scores.clone(), range(num_rows))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_logits_break_no_neighbour(backend: str, value: float) -> None:
    """A row that is no distribution gives what it always gave, and the others their tokens."""
    for sampling in (
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=20),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=0.1),
    ):
        short, dense = samplers(2000, [(sampling, [1], [], seed) for seed in range(3)])
        logits = torch.randn(3, 2000, generator=torch.Generator().manual_seed(1)) * 3
        logits[1, 700] = value
        found, expected = short.sample(logits.clone(), range(3)), dense(logits.clone(), range(3))
        assert (found[0], found[2]) == (expected[0], expected[2])
        assert found == expected


def test_a_nucleus_beyond_the_candidates_is_drawn_from_whole(backend: str) -> None:
    sampling = SamplingParams(temperature=30.0, top_p=0.97)
    short, dense = samplers(6000, [(sampling, [1], [], seed) for seed in range(40)])
    logits = torch.randn(40, 6000, generator=torch.Generator().manual_seed(2))
    assert short.sample(logits.clone(), range(40)) == dense(logits.clone(), range(40))


@pytest.mark.parametrize("temperature", [1e-5 / 1.001, 1e-10, 1e-37, 1e-38, 1e-39, 5e-324])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"repetition_penalty": 1.2}])
def test_the_smallest_temperatures_are_greedy(
    backend: str, temperature: float, filters: dict[str, float]
) -> None:
    """Divided by them the logits would overflow, and the first infinity would win."""
    greedy = SamplingParams(repetition_penalty=filters.get("repetition_penalty", 1.0))
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(3)) * 20
    tokens = []
    for sampling in (greedy, SamplingParams(temperature=temperature, **filters)):  # type: ignore[arg-type]
        short, _ = samplers(500, [(sampling, [1, 2], [3], seed) for seed in range(4)])
        tokens.append(short.sample(logits.clone(), range(4)))
    assert tokens[0] == tokens[1]


def test_the_least_temperature_overflows_nothing(backend: str) -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(3)) * 20
    sampling = SamplingParams(temperature=1e-5)
    short, _ = samplers(500, [(sampling, [1], [], seed) for seed in range(4)])
    tokens = [token.token for token in short.sample(logits.clone(), range(4))]
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 1000, 4099])
@pytest.mark.parametrize("count", [1, 5, 64, 200])
def test_the_largest_are_found_in_a_few_blocks(vocab_size: int, count: int) -> None:
    count = min(count, vocab_size)
    for shape in SHAPES.values():
        logits = shape(torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(vocab_size)))
        values, ids = largest(logits, count)
        assert torch.equal(values, logits.topk(count).values)
        assert torch.equal(logits.gather(1, ids), values)
        assert all(len(set(row)) == count for row in ids.tolist())


def test_the_kernel_draws_the_best_of_all() -> None:
    if not native.serves(CPU, torch.float32):
        pytest.skip("this machine has no C++ compiler, so there are no kernels to test")
    kernels = native.load()
    assert kernels is not None
    generator = torch.Generator().manual_seed(4)
    keys = row_keys(range(50), range(50))
    for vocab_size in (1, 63, 64, 65, 1111, 40_000):
        logits = torch.randn(50, vocab_size, generator=generator) * 4
        temperature = torch.linspace(0.1, 3, 50)[:, None]
        least = torch.full((50, 1), -3.0)
        tokens, best, second = kernels.gumbel_argmax(logits, temperature, least, keys)
        scaled = logits / temperature
        scores = scaled + gumbel(keys, token_counters(vocab_size, CPU))
        scores.masked_fill_(scaled < least, -torch.inf)
        expected = scores.topk(min(2, vocab_size))
        some = expected.values[:, 0] > -torch.inf
        sure = is_apart(best, second)
        assert torch.equal(tokens[sure], expected.indices[sure, 0])
        assert torch.equal(sure, some & sure)
        assert float(sure[some].float().mean()) > 0.9
        torch.testing.assert_close(best[some], expected.values[some, 0], rtol=1e-6, atol=1e-5)


def samplers(
    vocab_size: int, cases: list[Case]
) -> tuple[Sampler, Callable[[Tensor, range], list[SampledToken]]]:
    """The engine's sampler, and the dense one behind the same rule for the smallest temperatures."""
    short, dense = Sampler(vocab_size, EOS, CPU), DenseSampler(vocab_size, EOS, CPU)
    for slot, (sampling, prompt, output, seed) in enumerate(cases):
        known = packed(output) if sampling.penalizes_output else b""
        sample = SlotSample(slot, seed, [*prompt, *output][-1], len(output), known)
        prompt_bytes = packed(prompt) if sampling.penalizes_prompt else b""
        short.start(SlotStart(sampling, (sample,), prompt_bytes))
        if sampling.temperature < 1e-5:
            sampling = SamplingParams(
                **{
                    name: getattr(sampling, name)
                    for name in sampling.__struct_fields__
                    if name not in ("temperature", "top_k", "top_p", "min_p")
                }
            )
        dense.start(slot, sampling, prompt, output, seed)
    return short, dense.sample
