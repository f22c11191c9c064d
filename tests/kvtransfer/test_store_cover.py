"""Which records cover a shard: against a cell by cell reference and, for small cases, all choices."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples

from kvtransfer.messages import Shard
from kvtransfer.store.server.shard_cover import cover

NUM_LAYERS, NUM_HEADS = 5, 4
Cell = tuple[int, int]


def cells(shard: Shard) -> set[Cell]:
    layers = range(shard.layer_start, shard.layer_end)
    return {(layer, head) for layer in layers for head in range(shard.head_start, shard.head_end)}


def ranges(end: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.sampled_from([(a, b) for a in range(end) for b in range(a + 1, end + 1)])


shards = st.builds(lambda layers, heads: Shard(*layers, *heads), ranges(NUM_LAYERS), ranges(NUM_HEADS))


def grid(pp: int, tp: int, num_layers: int = 28, num_heads: int = 8) -> list[Shard]:
    return [
        Shard(
            stage * num_layers // pp,
            (stage + 1) * num_layers // pp,
            rank * num_heads // tp,
            (rank + 1) * num_heads // tp,
        )
        for stage in range(pp)
        for rank in range(tp)
    ]


def check(needed: Shard, held: list[Shard], pieces: list[tuple[Shard, Shard]]) -> None:
    found: list[Cell] = []
    for shard, piece in pieces:
        assert shard in held
        assert cells(piece)
        assert cells(piece) <= cells(shard)
        found += cells(piece)
    assert len(found) == len(set(found)), "two pieces overlap"
    assert set(found) == cells(needed)


@settings(max_examples=examples(400), deadline=None)
@given(shards, st.lists(shards, max_size=8))
def test_the_pieces_make_up_the_shard_with_the_fewest_records(needed: Shard, held: list[Shard]) -> None:
    pieces = cover(needed, held)
    wanted = cells(needed)
    num_fewest = next(
        (
            count
            for count in range(1, len(held) + 1)
            if any(wanted <= set().union(*map(cells, some)) for some in combinations(held, count))
        ),
        None,
    )
    if num_fewest is None:
        assert pieces is None
        return
    assert pieces is not None
    check(needed, held, pieces)
    assert len({shard for shard, _ in pieces}) == num_fewest
    assert cover(needed, list(reversed(held))) == pieces


def test_the_exact_record_is_taken_alone() -> None:
    needed = Shard(0, 14, 0, 4)
    assert cover(needed, [Shard(0, 28, 0, 8), needed, Shard(0, 14, 0, 2)]) == [(needed, needed)]


def test_the_smallest_of_those_that_hold_it_all_is_taken() -> None:
    needed = Shard(0, 14, 0, 4)
    assert cover(needed, grid(1, 1) + grid(2, 1)) == [(Shard(0, 14, 0, 8), needed)]


def test_every_shape_is_read_from_every_other() -> None:
    shapes = [(pp, tp) for pp in (1, 2, 3, 4, 7) for tp in (1, 2, 4, 8)]
    for writer in shapes:
        for reader in shapes:
            held = grid(*writer)
            for needed in grid(*reader):
                pieces = cover(needed, held)
                assert pieces is not None
                check(needed, held, pieces)


def test_several_shapes_in_one_store_give_the_fewest_records() -> None:
    held = grid(4, 8) + grid(7, 2) + grid(2, 4)
    pieces = cover(Shard(0, 28, 0, 8), held)
    assert pieces is not None
    check(Shard(0, 28, 0, 8), held, pieces)
    assert len({shard for shard, _ in pieces}) == 8


def test_a_missing_part_is_a_miss() -> None:
    assert cover(Shard(0, 28, 0, 8), grid(4, 8)[:-1]) is None
    assert cover(Shard(0, 28, 0, 8), []) is None
