"""Runs between shards against slicing the whole model's KV as a numpy array, byte for byte."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import IncompatibleError
from kvtransfer.layout import BlockLayout, Run, intersect, piece_runs, plan_runs, split_runs
from kvtransfer.messages import Shard

NUM_LAYERS, NUM_HEADS, HEAD_DIM, BLOCK_TOKENS = 4, 6, 2, 3
WHOLE = Shard(0, NUM_LAYERS, 0, NUM_HEADS)
MODEL = np.random.default_rng(0).integers(
    0, 2**16, (NUM_LAYERS, 2, NUM_HEADS, BLOCK_TOKENS, HEAD_DIM), dtype=np.uint16
)


def ranges(size: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted).filter(lambda r: r[0] < r[1])  # type: ignore[return-value]


shards = st.builds(lambda layers, heads: Shard(*layers, *heads), ranges(NUM_LAYERS), ranges(NUM_HEADS))


def layout(shard: Shard) -> BlockLayout:
    return BlockLayout(shard, HEAD_DIM, BLOCK_TOKENS, 2)


def cut(model: npt.NDArray[np.uint16], shard: Shard) -> npt.NDArray[np.uint16]:
    return model[shard.layer_start : shard.layer_end, :, shard.head_start : shard.head_end]


@given(shards, shards)
def test_moving_by_runs_equals_slicing(src: Shard, dst: Shard) -> None:
    source = cut(MODEL, src).tobytes()
    target = bytearray(layout(dst).block_bytes)
    assert len(source) == layout(src).block_bytes
    for run in plan_runs(layout(src), layout(dst)):
        target[run.dst_offset : run.dst_offset + run.num_bytes] = source[
            run.src_offset : run.src_offset + run.num_bytes
        ]
    expected = np.zeros_like(MODEL)
    both = intersect(src, dst)
    if both is not None:
        cut(expected, both)[:] = cut(MODEL, both)
    assert bytes(target) == cut(expected, dst).tobytes()


@given(shards, shards, st.integers(0, 400))
def test_runs_are_ordered_and_cannot_be_joined(src: Shard, dst: Shard, num_bytes: int) -> None:
    runs = plan_runs(layout(src), layout(dst))
    for one, two in itertools.pairwise(runs):
        assert one.src_offset + one.num_bytes <= two.src_offset
        assert one.dst_offset + one.num_bytes <= two.dst_offset
        assert (one.src_offset + one.num_bytes, one.dst_offset + one.num_bytes) != two[:2]
    first, second = split_runs(runs, num_bytes)
    total = sum(run.num_bytes for run in runs)
    assert sum(run.num_bytes for run in first) == min(num_bytes, total)
    moved = [(run.src_offset + i, run.dst_offset + i) for run in first + second for i in range(run.num_bytes)]
    assert moved == [(run.src_offset + i, run.dst_offset + i) for run in runs for i in range(run.num_bytes)]


@given(shards, shards)
def test_a_pieces_bytes_are_the_same_in_every_shard_that_holds_it(one: Shard, two: Shard) -> None:
    piece = intersect(one, two)
    if piece is None:
        return
    for shard in (one, two, WHOLE):
        block = cut(MODEL, shard).tobytes()
        data = b"".join(
            block[run.src_offset : run.src_offset + run.num_bytes] for run in piece_runs(layout(shard), piece)
        )
        assert data == cut(MODEL, piece).tobytes()


def test_equal_layouts_are_one_run_and_disjoint_ones_none() -> None:
    full = layout(WHOLE)
    assert plan_runs(full, full) == [Run(0, 0, full.block_bytes)]
    assert plan_runs(layout(Shard(0, 2, 0, 6)), layout(Shard(2, 4, 0, 6))) == []
    assert len(plan_runs(full, layout(Shard(1, 3, 0, 6)))) == 1
    assert len(plan_runs(full, layout(Shard(0, 4, 2, 4)))) == 2 * NUM_LAYERS


def test_other_blocks_are_refused() -> None:
    with pytest.raises(IncompatibleError, match="block_tokens: 3 at the source, 16 there"):
        plan_runs(layout(WHOLE), BlockLayout(WHOLE, HEAD_DIM, 16, 2))
    with pytest.raises(ValueError, match="is not part of"):
        piece_runs(layout(Shard(0, 2, 0, 6)), Shard(1, 3, 0, 6))
