"""Paged attention against a plain one that loops over tokens and heads in float64."""

from __future__ import annotations

import math

import pytest
import torch
from attention_steps import attend_once, unrotated, write
from compiled_kernels import backend_cases
from torch import Tensor

from workers.model.attention.interface import Marks, SequenceSpan, StepInput
from workers.model.attention.torch_backend import TorchAttention

LAYERS, HEAD_DIM = 2, 16


def _reference(
    query: Tensor, keys: Tensor, values: Tensor, start: int, window: int, sinks: Tensor | None
) -> Tensor:
    """`query` [t, H, D] at positions from `start`; `keys` and `values` [S, K, D]; `sinks` [H]."""
    group = query.shape[1] // keys.shape[1]
    output = torch.empty_like(query)
    for row in range(query.shape[0]):
        position = start + row
        first = max(0, position - window + 1) if window else 0
        for head in range(query.shape[1]):
            seen = slice(first, position + 1)
            scores = keys[seen, head // group] @ query[row, head] / math.sqrt(HEAD_DIM)
            powers = torch.exp(scores)
            total = powers.sum() + (0.0 if sinks is None else torch.exp(sinks[head]))
            output[row, head] = powers / total @ values[seen, head // group]
    return output.flatten(1)


@pytest.mark.parametrize(
    ("name", "dtype"),
    backend_cases(
        [(torch.float32,), (torch.bfloat16,), (torch.float16,)], [(torch.float32,), (torch.bfloat16,)]
    ),
)
@pytest.mark.parametrize("window", [0, 1, 16, 19])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 1), (6, 2)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_it_equals_a_loop_over_tokens(
    name: str, has_sinks: bool, num_heads: int, num_kv_heads: int, window: int, dtype: torch.dtype
) -> None:
    """Decoding rows from 1 to 150 tokens long and chunks at the start, inside and across blocks."""
    generator = torch.Generator().manual_seed(num_heads + window)
    work = [(0, 1), (149, 1), (15, 1), (16, 1), (0, 33), (17, 20), (48, 2), (40, 1), (0, 1)]
    free = torch.randperm(80, generator=generator).tolist()
    kv = torch.full((80, LAYERS, 2, num_kv_heads, 16, HEAD_DIM), float("nan"), dtype=dtype)
    spans, queries, expected = [], [], []
    sinks = torch.randn(num_heads, generator=generator) * 2 if has_sinks else None
    for start, count in work:
        table = [free.pop() for _ in range(-(-(start + count) // 16))]
        keys_values = torch.randn(start + count, 2 * num_kv_heads, HEAD_DIM, generator=generator).to(dtype)
        query = torch.randn(count, num_heads, HEAD_DIM, generator=generator).to(dtype)
        kv[table] = 0
        write(kv, 0, table, keys_values)
        spans.append(SequenceSpan(start, count, (*table, *free[:1])))
        queries.append(query)
        keys, values = keys_values.double().chunk(2, dim=1)
        of_reference = None if sinks is None else sinks.double()
        expected.append(_reference(query.double(), keys, values, start, window, of_reference))
    actual = attend_once(name, kv, spans, torch.cat(queries), window, sinks=sinks)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), torch.cat(expected), rtol=0, atol=tolerance)


def test_long_and_short_decoding_sequences_share_no_padding() -> None:
    """A group's longest context is at most twice its shortest, in blocks."""
    lengths = [5, 900, 40, 70, 33, 16, 500]
    tables = iter(range(1000))
    spans = [
        SequenceSpan(length - 1, 1, tuple(next(tables) for _ in range(-(-length // 16))))
        for length in lengths
    ]
    backend = TorchAttention(unrotated(2, HEAD_DIM), torch.zeros(200, 1, 2, 1, 16, HEAD_DIM))
    groups = backend.plan(StepInput.of(spans, 16)).window_to_view[0].groups
    assert sorted(row for group in groups for row in group.rows.tolist()) == list(range(len(lengths)))
    for group in groups:
        blocks = [-(-lengths[row] // 16) for row in group.rows.tolist()]
        assert max(blocks) <= 2 * min(blocks)
        assert group.bias.shape[-1] == max(blocks) * 16


class CountedMarks(Marks):
    """How often progress was marked."""

    num_marks = 0

    def mark(self) -> None:
        self.num_marks += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("flops", "num_marks"), [(1.4e6, 2), (2e5, 6), (1.0, 6)])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.0, 1.0, 2.0, 3.0])])
def test_a_chunk_behind_a_long_prefix_is_attended_in_pieces_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, flops: float, num_marks: int, sinks: Tensor | None
) -> None:
    """Two heads of 2.5e6 operations together: one after the other, then 16 rows at a time."""
    generator = torch.Generator().manual_seed(3)
    kv = torch.randn(20, LAYERS, 2, 2, 16, HEAD_DIM, generator=generator).to(dtype)
    query = torch.randn(40, 4, HEAD_DIM, generator=generator).to(dtype)
    marks = [CountedMarks(), CountedMarks()]
    spans = [SequenceSpan(200, 40, tuple(range(15)))]
    expected = attend_once("torch", kv, spans, query, marks=marks[0], sinks=sinks)
    monkeypatch.setattr("workers.model.attention.gathered_attention.ATTENTION_PIECE_FLOPS", flops)
    assert torch.equal(attend_once("torch", kv, spans, query, marks=marks[1], sinks=sinks), expected)
    assert [it.num_marks for it in marks] == [1, num_marks]
