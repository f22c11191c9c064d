"""Shorter ways to a token against the sampler that computes everything, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import pytest
import torch
from compiled_kernels import BACKENDS, KERNELS, kernels_of
from dense_sampler import DenseSampler, row_keys
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_engine import packed
from numpy.typing import NDArray
from torch import Tensor

from workers.messages.rank_channel import SlotSample, SlotStart
from workers.messages.sampling import SamplingParams, TokenLogprob
from workers.model import native
from workers.model.noise import gumbel, token_counters
from workers.rank.candidate_draw import largest
from workers.rank.sampler import Sampled, Sampler

CPU = torch.device("cpu")
EOS = (7, 11)
# Sampling, prompt, output, seed.
Case = tuple[SamplingParams, list[int], list[int], int]
Result = tuple[list[int], dict[int, TokenLogprob]]


class Sample(Protocol):
    def __call__(self, logits: Tensor, slots: range, masks: NDArray[np.uint32] | None = None) -> Result: ...


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


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels of each instruction set of this CPU, and the torch code."""
    if request.param == "torch":
        monkeypatch.setattr(native, "serves", lambda device, dtype: False)
    else:
        kernels = kernels_of(request.param)
        monkeypatch.setattr(native, "load", lambda: kernels)
    return str(request.param)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    """So that rows are computed in parts too."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


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
def batches(draw: st.DrawFn) -> tuple[int, str, int, list[Case], float | None]:
    """Vocabulary, shape of the logits, their seed, what the rows sample, and the share of tokens that a mask
    allows."""
    vocab_size = draw(st.sampled_from([1, 13, 257, 1000, 6000, 20_000]))
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
        draw(st.sampled_from([None, None, 0.0, 0.001, 0.5, 1.0])),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches())
def test_tokens_and_logprobs_are_those_of_the_whole_vocabulary(
    backend: str, batch: tuple[int, str, int, list[Case], float | None]
) -> None:
    vocab_size, shape, seed, cases, share_allowed = batch
    short, dense = samplers(vocab_size, cases)
    generator = torch.Generator().manual_seed(seed)
    slots = range(len(cases))
    for _ in range(3):
        logits = SHAPES[shape](torch.randn(len(cases), vocab_size, generator=generator))
        masks = None
        if share_allowed is not None:
            is_allowed = torch.rand(len(cases), vocab_size, generator=generator) < share_allowed
            masks = packed_masks(is_allowed.numpy())
        found, expected = short(logits.clone(), slots, masks), dense(logits.clone(), slots, masks)
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
        assert short(scores.clone(), range(num_rows)) == dense(scores.clone(), range(num_rows))


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
        found, expected = short(logits.clone(), range(3)), dense(logits.clone(), range(3))
        assert found[0] == expected[0]


def test_a_nucleus_beyond_the_candidates_is_drawn_from_whole(backend: str) -> None:
    sampling = SamplingParams(temperature=30.0, top_p=0.97)
    short, dense = samplers(6000, [(sampling, [1], [], seed) for seed in range(40)])
    logits = torch.randn(40, 6000, generator=torch.Generator().manual_seed(2))
    assert short(logits.clone(), range(40)) == dense(logits.clone(), range(40))


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
        tokens.append(short(logits.clone(), range(4)))
    assert tokens[0] == tokens[1]


def test_the_least_temperature_overflows_nothing(backend: str) -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(3)) * 20
    sampling = SamplingParams(temperature=1e-5)
    short, _ = samplers(500, [(sampling, [1], [], seed) for seed in range(4)])
    assert short(logits.clone(), range(4)) == (logits.argmax(-1).tolist(), {})


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


@pytest.mark.parametrize("backend", KERNELS, indirect=True)
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 130, 1111, 40_000])
def test_kernels_are_sure_of_nearly_every_row(backend: str, vocab_size: int) -> None:
    """And right, in batches and alone, where a row is drawn in parts."""
    num_rows, generator = 60, torch.Generator().manual_seed(4)
    kinds = [
        {},
        {"top_k": 50},
        {"top_p": 0.9},
        {"top_k": 50, "top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": 2000, "min_p": 0.01},
    ]
    cases: list[Case] = [
        (SamplingParams(temperature=0.1 + row / 30, **kinds[row % len(kinds)]), [1], [], row)  # type: ignore[arg-type]
        for row in range(num_rows)
    ]
    short = Sampler(vocab_size, EOS, CPU, num_rows)
    for slot, (sampling, _, _, seed) in enumerate(cases):
        short.start(SlotStart(sampling, (SlotSample(slot, seed, 1),)))
    _, dense = samplers(vocab_size, cases)
    kernels, slots = native.load(), np.arange(num_rows, dtype=np.int32)
    assert kernels is not None
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 4
    expected = np.array(dense(logits.clone(), range(num_rows))[0])
    arguments = short._arguments
    tokens, is_sure = kernels.sample_rows(arguments.of_logits(logits, slots, None))
    assert is_sure.mean() > 0.9
    assert (tokens == expected)[is_sure].all()
    for row in range(num_rows):
        one = slice(row, row + 1)
        alone = kernels.sample_rows(arguments.of_logits(logits[one], slots[one], None))
        assert (alone[0][0], alone[1][0]) == (tokens[row], is_sure[row])


def test_a_step_costs_no_call_of_python_for_each_slot(backend: str) -> None:
    """Counted, for slots with and without a temperature and filters."""

    def num_calls(num_rows: int) -> int:
        kinds = [
            {},
            {"temperature": 1.0},
            {"temperature": 0.5, "min_p": 0.1},
            {"temperature": 2.0, "top_k": 9},
        ]
        sampler, num_found = Sampler(64, EOS, CPU, num_rows), 0
        for slot in range(num_rows):
            sampling = SamplingParams(**kinds[slot % len(kinds)])  # type: ignore[arg-type]
            sampler.start(SlotStart(sampling, (SlotSample(slot, slot, 1),)))
        logits = torch.arange(64.0).flip(0).repeat(num_rows, 1) * 8  # far apart: nothing is drawn again
        slots = np.arange(num_rows, dtype=np.int32)

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal num_found
            num_found += event in ("call", "c_call")

        sampler.sample(logits.clone(), slots)
        sys.setprofile(count)
        try:
            sampler.sample(logits, slots)
        finally:
            sys.setprofile(None)
        return num_found

    if backend == "torch":  # it draws each row that has noise for all tokens by itself, to stay in cache
        assert num_calls(256) < num_calls(8) + 20 * 256
    else:
        assert num_calls(256) == num_calls(8) < 60


@pytest.mark.parametrize("num_allowed", [1, 3, 200])
def test_only_allowed_tokens_are_drawn(backend: str, num_allowed: int) -> None:
    vocab_size, num_rows = 1001, 12
    generator = torch.Generator().manual_seed(num_allowed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    is_allowed = np.zeros((num_rows, vocab_size), np.bool_)
    for row in is_allowed:
        row[torch.randperm(vocab_size, generator=generator)[:num_allowed].numpy()] = True
    kinds = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}, {"temperature": 1.0, "top_p": 0.5}]
    cases: list[Case] = [
        (SamplingParams(logit_bias={5: 90.0}, **kinds[row % len(kinds)]), [1], [], row)  # type: ignore[arg-type]
        for row in range(num_rows)
    ]
    short, _ = samplers(vocab_size, cases)
    tokens, _ = short(logits.clone(), range(num_rows), packed_masks(is_allowed))
    assert is_allowed[range(num_rows), tokens].all()
    greedy = logits.masked_fill(torch.from_numpy(~is_allowed), -torch.inf)[::4].argmax(-1).tolist()
    assert [token for token in tokens[::4] if token != 5] == [
        token for token, row in zip(greedy, is_allowed[::4], strict=True) if not row[5]
    ]
    whole = packed_masks(np.ones_like(is_allowed))
    short, _ = samplers(vocab_size, cases)
    unmasked, _ = samplers(vocab_size, cases)
    assert short(logits.clone(), range(num_rows), whole) == unmasked(logits.clone(), range(num_rows))


def test_a_mask_of_another_shape_is_refused() -> None:
    short, _ = samplers(100, [(SamplingParams(), [1], [], 0)])
    with pytest.raises(AssertionError, match="masks"):
        short(torch.zeros(1, 100), range(1), np.zeros((1, 3), np.uint32))


def samplers(vocab_size: int, cases: list[Case]) -> tuple[Sample, Sample]:
    """The engine's sampler, and the dense one behind the same rule for the smallest temperatures."""
    short, dense = Sampler(vocab_size, EOS, CPU, len(cases)), DenseSampler(vocab_size, EOS, CPU)
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

    def sample_short(logits: Tensor, slots: range, masks: NDArray[np.uint32] | None = None) -> Result:
        return listed(short.sample(logits, np.array(slots, np.int32), masks))

    def sample_dense(logits: Tensor, slots: range, masks: NDArray[np.uint32] | None = None) -> Result:
        return listed(dense.sample(logits, slots, masks))

    return sample_short, sample_dense


def packed_masks(is_allowed: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """The masks of the engine's sampler."""
    num_rows, vocab_size = is_allowed.shape
    masks = np.zeros((num_rows, -(-vocab_size // 32)), np.uint32)
    rows, tokens = np.nonzero(is_allowed)
    np.bitwise_or.at(masks, (rows, tokens // 32), (1 << tokens % 32).astype(np.uint32))
    return masks


def listed(sampled: Sampled) -> Result:
    return sampled.tokens.tolist(), sampled.row_to_logprob
