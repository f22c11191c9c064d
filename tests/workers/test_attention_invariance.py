"""What the kernels compute for a token depends on nothing but its sequence up to it: bit for bit, and against
float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_steps import attend, capped, make_backend, softmax_with_sinks, unrotated
from compiled_kernels import KERNELS, TILED_KERNELS
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import slow_but
from torch import Tensor

from workers.model.attention.interface import SequenceSpan, kv_shape

MOST_ERROR = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Sequences:
    """KV of sequences in shuffled blocks; every other byte, before and after them, is NaN."""

    def __init__(
        self,
        name: str,
        lengths: list[int],
        *,
        block_tokens: int = 16,
        num_kv_heads: int = 2,
        group: int = 2,
        head_dim: int = 32,
        window: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        is_deterministic: bool = True,
        score_scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // block_tokens) for length in lengths]
        free = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        shape = (len(free), 1, 2, num_kv_heads, block_tokens, head_dim)
        kv = torch.full(shape, float("nan"), dtype=dtype)
        self.window, self.lengths = window, lengths
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for table, length in zip(self.tables, lengths, strict=True):
            heads = (num_kv_heads * (group + 2), head_dim)
            numbers = torch.randn((length, *heads), generator=generator).to(dtype)
            query, keys, values = numbers.split_with_sizes(
                [num_kv_heads * group, num_kv_heads, num_kv_heads], 1
            )
            self.queries.append(query)
            self.keys.append(keys)
            self.values.append(values)
            for at in range(0, length, block_tokens):
                both = torch.stack((keys[at : at + block_tokens], values[at : at + block_tokens]))
                kv[table[at // block_tokens], 0, :, :, : both.shape[1]] = both.transpose(1, 2)
        self._whole = kv
        self.scale = head_dim**-0.5 if score_scale is None else score_scale
        self.softcap, self.sinks = softcap, sinks
        attention = unrotated(
            num_kv_heads * group, head_dim, (window,), score_scale=score_scale, softcap=softcap
        )
        self.backend = make_backend(name, attention, kv.clone(), is_deterministic=is_deterministic)

    def compute(self, work: list[tuple[int, int, int]]) -> list[Tensor]:
        """One step over tokens [start, end) of sequences (number, start, end): the results of each. What lies
        after these tokens is NaN, and what lies before a window."""
        kv, size = self.backend.kv, kv_shape(self.backend.kv).block_tokens
        kv.copy_(self._whole)
        spans = []
        for number, start, end in work:
            table = list(self.tables[number])
            if end % size:
                kv[table[end // size], 0, :, :, end % size :] = float("nan")
            kv[table[-(-end // size) :]] = float("nan")
            if self.window:  # blocks before the window may be anybody's
                for place in range(max(0, start - self.window + 1) // size):
                    kv[table[place]] = float("nan")
            spans.append(SequenceSpan(start, end - start, table[: -(-end // size)]))
        query = torch.cat([self.queries[number][start:end] for number, start, end in work])
        (mixed,) = attend(self.backend, spans, [query], sinks=self.sinks)
        return list(torch.split(mixed, [end - start for _, start, end in work]))

    def exact(self, number: int, position: int) -> Tensor:
        """Attention of one token in float64."""
        first = max(0, position - self.window + 1) if self.window else 0
        query = self.queries[number][position].double()
        keys = self.keys[number][first : position + 1].double()
        values = self.values[number][first : position + 1].double()
        group = query.shape[0] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = capped(torch.einsum("hd,khd->hk", query, keys) * self.scale, self.softcap)
        sinks = None if self.sinks is None else self.sinks.double()[:, None]
        return torch.einsum("hk,khd->hd", softmax_with_sinks(scores, sinks), values).flatten()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
# Emulated tiles are slow: they are tested with one number of query heads.
@pytest.mark.parametrize(
    ("name", "group"),
    [
        *(pytest.param(*it.values, 1, marks=[*it.marks, pytest.mark.slow]) for it in KERNELS),
        *(pytest.param(*it.values, 2, marks=it.marks) for it in TILED_KERNELS),
        *(pytest.param(*it.values, 5, marks=it.marks) for it in KERNELS),
    ],
)
@pytest.mark.parametrize("window", slow_but([0, 70, 700], 0, 70))
def test_decoding_equals_prefill_bit_for_bit(name: str, window: int, group: int, dtype: torch.dtype) -> None:
    """Around the ends of panels, tiles and pieces; alone, in a batch of 16, chunked, with one thread."""
    sequences = Sequences(
        name, [1100] + [40 * it + 3 for it in range(15)], group=group, window=window, dtype=dtype
    )
    (whole,) = sequences.compute([(0, 0, 1100)])
    others = [(number, 40 * number - 38, 40 * number - 37) for number in range(1, 16)]
    for position in (0, 15, 31, 32, 63, 64, 127, 128, 500, 511, 512, 575, 1023, 1024, 1099):
        (alone,) = sequences.compute([(0, position, position + 1)])
        assert torch.equal(alone[0], whole[position]), position
        batched = sequences.compute([(0, position, position + 1), *others])
        assert torch.equal(batched[0], alone), position
        error = (alone[0].double() - sequences.exact(0, position)).norm() / alone.double().norm()
        assert float(error) < MOST_ERROR[dtype], position
    for size in (1, 37, 64, 500, 513):
        chunk = slice(580, 580 + size)
        (part,) = sequences.compute([(0, chunk.start, chunk.stop)])
        assert torch.equal(part, whole[chunk]), size
    torch.set_num_threads(1)
    (single,) = sequences.compute([(0, 0, 1100)])
    assert torch.equal(single, whole)


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("name", TILED_KERNELS)
def test_a_long_sequence_is_split_over_threads_with_the_same_result(
    name: str, is_deterministic: bool
) -> None:
    """One key-value head leaves threads idle unless its pieces are computed in parallel."""
    sequences = Sequences(
        name, [3000, 90, 20], num_kv_heads=1, head_dim=64, is_deterministic=is_deterministic
    )
    work = [(0, 2999, 3000), (1, 89, 90), (2, 3, 20)]
    several = sequences.compute(work)
    torch.set_num_threads(7)
    many = sequences.compute(work)
    torch.set_num_threads(1)
    for one, *others in zip(sequences.compute(work), several, many, strict=True):
        assert all(torch.equal(one, other) for other in others)
    error = (several[0][0].double() - sequences.exact(0, 2999)).norm() / several[0].double().norm()
    assert float(error) < MOST_ERROR[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("name", TILED_KERNELS)
def test_capped_scores_depend_on_no_other_row(name: str, is_deterministic: bool, dtype: torch.dtype) -> None:
    """Alone, in a chunk and split over threads, against float64. The cap tells: scores without it differ."""
    sequences = Sequences(
        name, [1100, 90], group=4, head_dim=64, dtype=dtype, score_scale=0.4, softcap=2.5, window=600,
        is_deterministic=is_deterministic,
    )  # fmt: skip
    (whole, _) = sequences.compute([(0, 900, 1100), (1, 20, 90)])
    for position in (900, 1023, 1024, 1099):
        (alone,) = sequences.compute([(0, position, position + 1)])
        batched = sequences.compute([(0, position, position + 1), (1, 89, 90)])
        assert torch.equal(batched[0], alone)
        results = [alone[0], whole[position - 900]]
        assert not is_deterministic or torch.equal(*results)
        expected = sequences.exact(0, position)
        for result in results:
            assert float((result.double() - expected).norm() / expected.norm()) < MOST_ERROR[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("group", [1, 4, 5])
@pytest.mark.parametrize("name", KERNELS)
def test_sinks_join_each_sum_once(name: str, group: int, is_deterministic: bool, dtype: torch.dtype) -> None:
    """Within a piece and across pieces, by few rows and by many, whole and split over threads; sinks that
    are nothing beside the scores, that take about half, and that take all."""
    sinks = torch.tensor([-torch.inf, 3.0, 7.0, 60.0, -20.0, 1.0, 5.0, 6.5, 0.0, 4.0])[: 2 * group]
    sequences = Sequences(
        name, [1100, 90, 3], group=group, head_dim=64, dtype=dtype, window=900, sinks=sinks,
        is_deterministic=is_deterministic,
    )  # fmt: skip
    (whole,) = sequences.compute([(0, 0, 1100)])
    positions = [(0, it) for it in (0, 1, 511, 512, 1023, 1024, 1099)]
    for number, position in (*positions, (1, 89), (2, 2)):
        (alone,) = sequences.compute([(number, position, position + 1)])
        batched = sequences.compute([(not number, 40, 45), (number, position, position + 1)])
        assert torch.equal(batched[1], alone)
        results = [alone[0]] if number else [alone[0], whole[position]]
        assert not is_deterministic or all(torch.equal(results[0], it) for it in results)
        expected = sequences.exact(number, position)
        for result in results:
            assert float((result.double() - expected).norm() / expected.norm()) < MOST_ERROR[dtype]
    torch.set_num_threads(1)
    (single,) = sequences.compute([(0, 0, 1100)])
    assert torch.equal(single, whole)


@pytest.mark.parametrize("name", TILED_KERNELS)
@pytest.mark.parametrize("window", slow_but([0, 70, 700], 0, 70))
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", slow_but([1, 2, 3, 4, 5], 2, 5))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_that_is_decoded_depends_on_its_own_sequence(
    name: str, dtype: torch.dtype, group: int, head_dim: int, window: int
) -> None:
    """Few rows have a way of their own where steps need not be invariant: around the ends of groups of keys,
    pieces and windows, alone and beside others, against float64."""
    lengths = [1100] + [40 * it + 3 for it in range(5)]
    sequences = Sequences(
        name, lengths, group=group, head_dim=head_dim, window=window, dtype=dtype, is_deterministic=False
    )
    others = [(number, 40 * number - 38, 40 * number - 37) for number in range(1, 6)]
    for position in (0, 1, 14, 15, 16, 31, 32, 71, 500, 511, 512, 527, 1023, 1024, 1099):
        (alone,) = sequences.compute([(0, position, position + 1)])
        batched = sequences.compute([*others, (0, position, position + 1)])
        assert torch.equal(batched[-1], alone), position
        error = (alone[0].double() - sequences.exact(0, position)).norm() / alone.double().norm()
        assert float(error) < MOST_ERROR[dtype], position


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", TILED_KERNELS)
def test_any_step_equals_float64_and_its_tokens_alone(name: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=4))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    num_kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 2, 3, 8]))
    sinks = None
    if data.draw(st.booleans()):
        num_heads = num_kv_heads * group
        values = st.lists(st.floats(-30, 8, width=32), min_size=num_heads, max_size=num_heads)
        sinks = torch.tensor(data.draw(values), dtype=torch.float32)
    sequences = Sequences(
        name,
        lengths,
        block_tokens=data.draw(st.sampled_from([16, 32, 64, 256])),
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=data.draw(st.sampled_from([16, 48, 64, 128])),
        window=data.draw(st.sampled_from([0, 1, 33, 200, 600])),
        dtype=dtype,
        seed=data.draw(st.integers(0, 100)),
        softcap=data.draw(st.sampled_from([0.0, 1.5, 30.0])),
        sinks=sinks,
    )
    work = []
    for number, length in enumerate(lengths):
        end = data.draw(st.integers(1, length))
        work.append((number, data.draw(st.sampled_from([end - 1, end // 2, 0])), end))
    results = sequences.compute(work)
    for (number, start, end), mixed in zip(work, results, strict=True):
        position = data.draw(st.integers(start, end - 1))
        (alone,) = sequences.compute([(number, position, position + 1)])
        assert torch.equal(mixed[position - start], alone[0])
        expected = sequences.exact(number, position)
        assert float((alone[0].double() - expected).norm() / expected.norm()) < MOST_ERROR[dtype]
