"""Runs and pieces between shapes against slicing the whole model's KV as a numpy array, byte for byte."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples

from kvtransfer.blocks.checksum import Checksummer
from kvtransfer.blocks.layout import (
    BlockLayout,
    Run,
    intersect,
    landing_shards,
    layers_of_copy,
    piece_runs,
    plan_pieces,
    plan_runs,
    split_runs,
)
from kvtransfer.errors import IncompatibleError
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


@st.composite
def moves(draw: st.DrawFn) -> tuple[Shard, Shard, Shard]:
    """Source, target, and a piece that both hold."""
    piece, one, two = draw(shards), draw(shards), draw(shards)
    return around(one, piece), around(two, piece), piece


def around(one: Shard, two: Shard) -> Shard:
    """The smallest shard that holds both."""
    return Shard(
        min(one.layer_start, two.layer_start),
        max(one.layer_end, two.layer_end),
        min(one.head_start, two.head_start),
        max(one.head_end, two.head_end),
    )


@given(moves())
def test_moving_by_runs_equals_slicing(move: tuple[Shard, Shard, Shard]) -> None:
    src, dst, piece = move
    source = cut(MODEL, src).tobytes()
    target = bytearray(layout(dst).block_bytes)
    assert len(source) == layout(src).block_bytes
    for run in plan_runs(layout(src), layout(dst), piece):
        target[run.dst_offset : run.dst_offset + run.num_bytes] = source[
            run.src_offset : run.src_offset + run.num_bytes
        ]
    expected = np.zeros_like(MODEL)
    cut(expected, piece)[:] = cut(MODEL, piece)
    assert bytes(target) == cut(expected, dst).tobytes()


@given(moves(), st.integers(0, 400))
def test_runs_are_ordered_and_cannot_be_joined(move: tuple[Shard, Shard, Shard], num_bytes: int) -> None:
    src, dst, piece = move
    runs = plan_runs(layout(src), layout(dst), piece)
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


def test_equal_heads_are_one_run_and_others_two_a_layer() -> None:
    full, layers, heads = layout(WHOLE), Shard(1, 3, 0, 6), Shard(0, 4, 2, 4)
    assert plan_runs(full, full, WHOLE) == [Run(0, 0, full.block_bytes)]
    assert len(plan_runs(full, layout(layers), layers)) == 1
    assert len(plan_runs(full, layout(heads), heads)) == 2 * NUM_LAYERS


def test_other_blocks_are_refused() -> None:
    with pytest.raises(IncompatibleError, match="block_tokens: 3 at the source, 16 there"):
        plan_runs(layout(WHOLE), BlockLayout(WHOLE, HEAD_DIM, 16, 2), WHOLE)
    with pytest.raises(ValueError, match="is not part of"):
        piece_runs(layout(Shard(0, 2, 0, 6)), Shard(1, 3, 0, 6))
    with pytest.raises(ValueError, match="is not part of"):
        plan_runs(layout(Shard(0, 3, 0, 6)), layout(Shard(2, 4, 0, 6)), Shard(1, 3, 0, 6))


# ------------------------------------------------------------------------------------- whole replicas

Ranks = list[tuple[int, Shard]]


def tensor_parallel(tp: int, num_heads: int, stages: list[tuple[int, int]]) -> Ranks:
    """The ranks of a replica: with more ranks than heads, several hold the same one."""
    heads = [(rank * num_heads // tp, max((rank + 1) * num_heads // tp, 1)) for rank in range(tp)]
    if tp > num_heads:
        heads = [(start, start + 1) for start, _ in heads]
    return list(enumerate(Shard(*layers, *held) for layers in stages for held in heads))


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """Contiguous parts of [0, size), of any sizes."""
    inner = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
    return list(itertools.pairwise([0, *sorted(inner), size]))


@st.composite
def replicas(draw: st.DrawFn, num_layers: int, num_heads: int) -> Ranks:
    """The ranks of a replica of any shape; or of one that no TP has, several heads in several copies."""
    stages = draw(cuts(num_layers))
    if draw(st.booleans()):
        return tensor_parallel(draw(st.integers(1, 9)), num_heads, stages)
    held = [Shard(*layers, *heads) for layers in stages for heads in draw(cuts(num_heads))]
    return list(
        enumerate(draw(st.permutations([shard for shard in held for _ in range(draw(st.integers(1, 3)))])))
    )


@given(
    data=st.data(), num_layers=st.integers(1, 7), num_heads=st.integers(1, 6), num_blocks=st.integers(1, 3)
)
@settings(max_examples=examples(200), deadline=None)
def test_what_lands_is_what_one_rank_would_hold(
    data: st.DataObject, num_layers: int, num_heads: int, num_blocks: int
) -> None:
    tokens, head_dim, item_bytes = data.draw(st.sampled_from([(1, 1, 1), (3, 2, 2), (4, 1, 4)]))
    scale_bytes, num_kinds = data.draw(st.sampled_from([(0, 2), (4, 2), (0, 1)]))
    head_bytes = tokens * (head_dim * item_bytes + scale_bytes)
    shape = (num_blocks, num_layers, num_kinds, num_heads, head_bytes)
    whole = np.random.default_rng(num_blocks).integers(0, 256, shape, dtype=np.uint8)
    group = data.draw(st.none() | st.sets(st.integers(0, num_layers - 1)).map(lambda it: tuple(sorted(it))))
    of_group = set(range(num_layers) if group is None else group)
    sources = data.draw(replicas(num_layers, num_heads))
    targets = data.draw(replicas(num_layers, num_heads))

    def held(shard: Shard) -> npt.NDArray[np.uint8]:
        layers = [it for it in range(shard.layer_start, shard.layer_end) if it in of_group]
        part = whole[:, layers, :, shard.head_start : shard.head_end]
        return part.reshape(num_blocks, -1)

    def block_layout(shard: Shard) -> BlockLayout:
        return BlockLayout(shard, head_dim, tokens, item_bytes, scale_bytes, num_kinds, group)

    def checksum(pool: npt.NDArray[np.uint8], shard: Shard, block: int, piece: Shard) -> int:
        data = pool[block].tobytes()
        runs = piece_runs(block_layout(shard), piece)
        return Checksummer().sum([data[run.src_offset : run.src_offset + run.num_bytes] for run in runs])

    source_pools = {rank: held(shard).copy() for rank, shard in sources}
    target_pools = {rank: np.zeros_like(held(shard)) for rank, shard in targets}
    num_writes = {rank: np.zeros(pool.shape[1], dtype=np.int64) for rank, pool in target_pools.items()}
    pieces = plan_pieces(sources, targets)
    assert pieces == plan_pieces(sources[::-1], targets[::-1]), "both sides must find the same plan"
    assert len({(source, target) for source, target, _ in pieces}) == len(pieces)
    for source, target, piece in pieces:
        src, dst = dict(sources)[source], dict(targets)[target]
        for run in plan_runs(block_layout(src), block_layout(dst), piece):
            there = slice(run.dst_offset, run.dst_offset + run.num_bytes)
            here = slice(run.src_offset, run.src_offset + run.num_bytes)
            target_pools[target][:, there] = source_pools[source][:, here]
            num_writes[target][there] += 1
    for rank, shard in targets:
        assert target_pools[rank].tobytes() == held(shard).tobytes()
        assert set(num_writes[rank]) <= {1}, "a byte is sent twice"
    for source, target, piece in pieces:
        for block in range(num_blocks):
            there_sum = checksum(target_pools[target], dict(targets)[target], block, piece)
            assert checksum(source_pools[source], dict(sources)[source], block, piece) == there_sum


@given(data=st.data(), num_layers=st.integers(1, 7), num_heads=st.integers(1, 6))
@settings(max_examples=examples(200), deadline=None)
def test_copies_share_the_work_evenly(data: st.DataObject, num_layers: int, num_heads: int) -> None:
    sources = data.draw(replicas(num_layers, num_heads))
    pieces = plan_pieces(sources, data.draw(replicas(num_layers, num_heads)))
    for shard in {shard for _, shard in sources}:
        copies = [rank for rank, other in sources if other == shard]
        sent = [[piece for source, _, piece in pieces if source == rank] for rank in copies]
        loads = [sum(num_cells(piece) for piece in mine) for mine in sent]
        one_layer = shard.head_end - shard.head_start
        assert max(loads) - sum(loads) / len(loads) <= one_layer
        if one_layer == 1:
            assert max(loads) - min(loads) <= 1


@given(data=st.data(), num_layers=st.integers(1, 7), num_heads=st.integers(1, 6))
@settings(max_examples=examples(200), deadline=None)
def test_what_copies_receive_is_each_once_what_they_hold(
    data: st.DataObject, num_layers: int, num_heads: int
) -> None:
    """And crosses the wire once: by a plan that any other replica can make, each cell of a stage's ranks is
    sent to one of them."""
    holders = data.draw(replicas(num_layers, num_heads))
    landing = landing_shards(holders)
    assert landing == landing_shards(holders[::-1])
    num_received: dict[tuple[Shard, int, int], int] = {}
    for rank, part in landing:
        held = dict(holders)[rank]
        assert intersect(held, part) == part
        copies = [other for other, shard in holders if shard == held]
        layers = layers_of_copy(held.num_layers, sorted(copies).index(rank), len(copies))
        assert part.layer_start - held.layer_start == layers.start
        assert part.num_layers == len(layers)
        for layer in range(part.layer_start, part.layer_end):
            for head in range(part.head_start, part.head_end):
                cell = held, layer, head
                num_received[cell] = num_received.get(cell, 0) + 1
    assert set(num_received.values()) == {1}
    assert len(num_received) == sum(num_cells(shard) for shard in {shard for _, shard in holders})
    pieces = plan_pieces(data.draw(replicas(num_layers, num_heads)), landing)
    assert sum(num_cells(piece) for *_, piece in pieces) == len(num_received)


def num_cells(shard: Shard) -> int:
    return (shard.layer_end - shard.layer_start) * (shard.head_end - shard.head_start)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_equal_shapes_are_paired_one_to_one(tp: int) -> None:
    ranks = tensor_parallel(tp, 4, [(0, 3), (3, 5)])
    assert plan_pieces(ranks, ranks) == tuple((rank, rank, shard) for rank, shard in ranks)


def test_a_plan_that_cannot_be_is_refused_by_what_is_missing() -> None:
    one = [(0, WHOLE)]
    with pytest.raises(IncompatibleError, match="holds layers 4 to 5 of KV heads 0 to 5, which rank 1 needs"):
        plan_pieces(one, [(0, WHOLE), (1, Shard(2, 6, 0, 6))])
    with pytest.raises(IncompatibleError, match="holds layers 0 to 3 of KV heads 2 to 3, which rank 0 needs"):
        plan_pieces([(0, Shard(0, 4, 0, 2)), (1, Shard(0, 4, 4, 6))], one)
    with pytest.raises(IncompatibleError, match="holds layers 0 to 3 of KV heads 0 to 5"):
        plan_pieces([], one)
    with pytest.raises(IncompatibleError, match="overlap in layers 0 to 3 of KV heads 2 to 2"):
        plan_pieces([(0, Shard(0, 4, 0, 3)), (1, Shard(0, 4, 2, 6))], one)
