"""Attention in bfloat16 against float64, with flat and sharply peaked scores."""

from __future__ import annotations

import pytest
import torch
from attention_steps import attend, attend_once, capped, make_backend, softmax_with_sinks, unrotated
from compiled_kernels import BACKENDS, backend_cases
from slow_cases import slow_but
from torch import Tensor

from workers.messages.rank_channel import BlockCopy
from workers.model.attention.gathered_attention import split_in_halves
from workers.model.attention.interface import SequenceSpan
from workers.model.host_kv import MODES, HostKv, OffloadMode

BLOCK, HEAD_DIM, NUM_BLOCKS, NUM_HOST = 16, 64, 110, 60
# Decoding sequences in several groups, a chunk behind a prefix, and one at the start of its prompt.
SPANS = (
    SequenceSpan(699, 1, tuple(range(0, 44))),
    SequenceSpan(404, 1, tuple(range(44, 70))),
    SequenceSpan(200, 40, tuple(range(70, 86))),
    SequenceSpan(0, 60, tuple(range(86, 90))),
    SequenceSpan(2, 1, (90,)),
    SequenceSpan(299, 1, tuple(range(91, 110))),
)
# Relative, of the root mean square: rounding the result alone comes to 0.0017, that of torch's own fused
# attention to 0.0024, and scores rounded to bfloat16 to 0.0045 and more.
MOST_ERROR = 3e-3


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("spread", slow_but([1.0, 4.0, 16.0], 16.0))
@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (4, 4)])
def test_scores_and_probabilities_are_float32(
    name: str, num_heads: int, num_kv_heads: int, window: int, spread: float
) -> None:
    kv, query = _draw(num_heads, num_kv_heads, spread)
    _check(attend_once(name, kv, SPANS, query, window), query, kv, window)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("softcap", [0.0, 2.0, 50.0])
@pytest.mark.parametrize("window", [0, 90])
def test_so_they_are_with_a_scale_and_a_cap(name: str, window: int, softcap: float) -> None:
    """A cap of 2 makes flat what would be peaked; one of 50 caps the largest of these scores."""
    kv, query = _draw(8, 2, 16.0)
    shape = unrotated(8, HEAD_DIM, (window,), score_scale=0.3, softcap=softcap)
    (actual,) = attend(make_backend(name, shape, kv), SPANS, [query])
    _check(actual, query, kv, window, 0.3, softcap)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (4, 4)])
def test_so_they_are_with_sinks(
    name: str, num_heads: int, num_kv_heads: int, window: int, softcap: float
) -> None:
    """From sinks that take next to nothing to one that leaves a thousandth to the keys."""
    kv, query = _draw(num_heads, num_kv_heads, 1.0)
    sinks = torch.linspace(-4.0, 12.0, num_heads)
    shape = unrotated(num_heads, HEAD_DIM, (window,), softcap=softcap)
    (actual,) = attend(make_backend(name, shape, kv), SPANS, [query], sinks=sinks)
    _check(actual, query, kv, window, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("spread", [1.0, 16.0])
@pytest.mark.parametrize(("name", "mode"), backend_cases([(mode,) for mode in MODES], [("in_place",)]))
def test_so_they_are_where_blocks_lie_in_host_memory(name: str, mode: OffloadMode, spread: float) -> None:
    kv, query = _draw(8, 2, spread)
    everything = kv.clone()
    moved = {block: NUM_BLOCKS + number for number, block in enumerate([*range(3, 30), *range(72, 80), 95])}
    host = HostKv(kv, NUM_HOST)
    host.copy([BlockCopy(block, host_id) for block, host_id in moved.items()])
    kv[list(moved)] = float("nan")
    host.use(mode)
    spans = [span._replace(block_ids=[moved.get(block, block) for block in span.block_ids]) for span in SPANS]
    (actual,) = attend(make_backend(name, unrotated(8, HEAD_DIM), kv), spans, [query], host.reader)
    _check(actual, query, everything, 0)
    host.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_halves_are_twice_as_exact(dtype: torch.dtype) -> None:
    """What CUDA multiplies instead of float32 probabilities."""
    generator = torch.Generator().manual_seed(5)
    probabilities = (torch.randn(3, 2, 500, generator=generator) * 4).softmax(-1)
    upper, lower = split_in_halves(probabilities, dtype).chunk(2, 1)
    assert upper.dtype == dtype
    large = probabilities > 1e-3
    left = (upper.double() + lower.double() - probabilities).abs() / probabilities
    assert float(left[large].max()) < 2**-15


def _draw(num_heads: int, num_kv_heads: int, spread: float) -> tuple[Tensor, Tensor]:
    """KV of one layer, and queries [T, H, D] whose scores have this standard deviation."""
    generator = torch.Generator().manual_seed(num_heads)
    kv = torch.randn((NUM_BLOCKS, 1, 2, num_kv_heads, BLOCK, HEAD_DIM), generator=generator)
    num_tokens = sum(span.num_tokens for span in SPANS)
    query = torch.randn((num_tokens, num_heads, HEAD_DIM), generator=generator) * spread
    return kv.bfloat16(), query.bfloat16()


def _check(
    actual: Tensor,
    query: Tensor,
    kv: Tensor,
    window: int,
    scale: float = HEAD_DIM**-0.5,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """Every sequence's rows by themselves, so that none hides behind the others."""
    assert actual.dtype == torch.bfloat16
    row = 0
    for span in SPANS:
        rows = slice(row, row + span.num_tokens)
        expected = _exactly(query[rows], kv, span, window, scale, softcap, sinks)
        error = (actual[rows].double() - expected).norm() / expected.norm()
        assert float(error) < MOST_ERROR, span
        row = rows.stop


def _exactly(
    query: Tensor,
    kv: Tensor,
    span: SequenceSpan,
    window: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """[t, H * D] in float64."""
    keys, values = kv[list(span.block_ids), 0].double().transpose(0, 1).transpose(1, 2).flatten(2, 3)
    group = query.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = capped(query.double().transpose(0, 1) @ keys.transpose(1, 2) * scale, softcap)
    position = torch.arange(span.start, span.start + span.num_tokens)[:, None]
    key = torch.arange(keys.shape[1])
    hidden = key > position
    if window:
        hidden |= key <= position - window
    of_rows = None if sinks is None else sinks.double()[:, None, None]
    probabilities = softmax_with_sinks(scores.masked_fill(hidden, -torch.inf), of_rows)
    mixed: Tensor = probabilities @ values
    return mixed.transpose(0, 1).flatten(1)
