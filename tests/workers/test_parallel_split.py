"""Which heads, columns and ids a rank holds: everything once, key-value heads beside their queries."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.errors import CheckpointError
from workers.messages.rank_channel import StageCost
from workers.model.experts.mixture_shape import MixtureShape
from workers.model.experts.router_rule import RouterRule
from workers.model.layer_shapes import HeadShape, KvCells, LayerShapes
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.sizes import (
    equal_stages,
    kv_heads,
    last_stage_limit,
    layer_heads,
    part,
    query_heads,
    refuse_split,
    refuse_stages,
    sends_rows,
)
from workers.replica.layer_split import Stages, given_layers, split_layers

TINY = read_model_config(Path(__file__).resolve().parent.parent.parent / "models" / "tiny")


@given(st.integers(1, 1000), st.integers(1, 40))
def test_parts_are_everything_once_and_nearly_equal(size: int, num_parts: int) -> None:
    parts = [part(size, index, num_parts) for index in range(num_parts)]
    assert [item for held in parts for item in held] == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_every_query_head_is_once_beside_its_key_value_head(
    num_kv_heads: int, group: int, data: st.DataObject
) -> None:
    num_heads = num_kv_heads * group
    tp = data.draw(st.integers(1, num_heads))
    queries = [query_heads(num_heads, num_kv_heads, rank, tp) for rank in range(tp)]
    keys = [kv_heads(num_kv_heads, rank, tp) for rank in range(tp)]
    assert [head for held in queries for head in held] == list(range(num_heads))
    for own_queries, own_keys in zip(queries, keys, strict=True):
        assert len(own_queries) > 0
        assert len(own_queries) % len(own_keys) == 0
        assert {head // group for head in own_queries} == set(own_keys)
    copies = Counter(head for held in keys for head in held)
    assert set(copies) == set(range(num_kv_heads))
    if tp <= num_kv_heads:
        assert set(copies.values()) == {1}
    else:
        assert sum(copies.values()) == tp
        for head, count in copies.items():
            shares = [len(own) for own, held in zip(queries, keys, strict=True) if held.start == head]
            assert len(shares) == count
            assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((4, 100, 256), "num_attention_heads 4"),
        ((8, 4, 256), "intermediate_size 4"),
        ((8, 8, 3), "vocab_size 3"),
    ],
)
def test_a_rank_without_a_part_is_refused(sizes: tuple[int, int, int], named: str) -> None:
    num_heads, intermediate_size, vocab_size = sizes
    config = dataclasses.replace(
        TINY,
        num_heads=num_heads,
        num_kv_heads=1,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
    )
    with pytest.raises(CheckpointError, match=f"tp 5 is more than {named}"):
        refuse_split(config, 5)


EXPERTS = MixtureShape(RouterRule(6, 2), 8, tuple(range(TINY.num_layers)), shared_size=16)


@pytest.mark.parametrize(
    ("experts", "tp", "ep", "refusal"),
    [
        (EXPERTS, 6, 4, "ep 4 does not divide tp 6"),
        (None, 4, 2, "ep 2: the model has no experts to divide"),
        (EXPERTS, 8, 8, "ep 8 is more than the 6 experts of a layer"),
        (EXPERTS, 9, 1, "tp 9 with ep 1 divides each expert over 9 ranks, and its size is 8"),
        (EXPERTS._replace(shared_size=4), 6, 6, "tp 6 is more than the size of shared experts 4"),
    ],
)
def test_experts_of_which_a_rank_would_hold_nothing_are_refused(
    experts: MixtureShape | None, tp: int, ep: int, refusal: str
) -> None:
    config = dataclasses.replace(TINY, num_heads=16, mixture=experts)
    with pytest.raises(CheckpointError, match=refusal):
        refuse_split(config, tp, ep)


def test_rows_are_sent_where_some_ranks_need_not_have_them() -> None:
    routed = EXPERTS._replace(shared_size=0)
    assert sends_rows(routed, 4, 4)
    assert sends_rows(routed, 4, 2)
    assert not sends_rows(routed, 4, 1), "each rank holds a slice of all experts"
    assert not sends_rows(routed, 2, 2)
    assert not sends_rows(EXPERTS, 4, 4), "each rank holds a slice of shared experts"
    assert not sends_rows(routed._replace(has_dense_branch=True), 4, 4)


def test_experts_may_be_as_many_parts_as_there_are() -> None:
    """No layer has another feed-forward, so the size of those does not matter."""
    config = dataclasses.replace(TINY, num_heads=16, intermediate_size=1, mixture=EXPERTS)
    for tp, ep in ((6, 6), (12, 6), (8, 1), (16, 2)):
        refuse_split(config, tp, ep)


def _of_two_sizes(num_kv_heads: int, full: HeadShape, num_shared: int = 0) -> ModelConfig:
    """Return a model of 16 query heads in 12 layers, every third without a window."""
    windows = tuple(0 if layer % 3 == 2 else 20 for layer in range(12))
    return dataclasses.replace(
        TINY,
        num_layers=12,
        num_heads=16,
        num_kv_heads=num_kv_heads,
        head_dim=32,
        intermediate_size=64,
        sliding_windows=windows,
        layer_shapes=LayerShapes(full, num_shared=num_shared),
    )


def test_cells_hold_the_heads_of_every_kind_at_equal_distances() -> None:
    """And a part of a cell is of one head, of whatever kind."""
    size = TINY.head_dim
    assert TINY.kv_cells == KvCells(TINY.num_layers, TINY.num_kv_heads, (size,))
    assert _of_two_sizes(16, HeadShape(4, 64)).kv_cells == KvCells(12, 4, (32,) * 4)
    assert _of_two_sizes(1, HeadShape(1, 64), 6).kv_cells == KvCells(6, 1, (32,) * 2)
    assert _of_two_sizes(4, HeadShape(2, 24)).kv_cells == KvCells(12, 2, (8,) * 24)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_ranks_split_heads_of_two_sizes_by_cells(tp: int) -> None:
    config = _of_two_sizes(16, HeadShape(4, 64))
    refuse_split(config, tp)
    for layer, group in ((0, 1), (2, 4)):
        held = [layer_heads(config, layer, rank, tp) for rank in range(tp)]
        assert [head for own in held for head in own.keys] == list(range(16 // group))
        for own in held:
            assert {head // group for head in own.queries} == set(own.keys)


def test_more_ranks_than_cells_are_refused_where_a_cell_has_several_heads() -> None:
    refuse_split(_of_two_sizes(2, HeadShape(2, 64)), 4)
    with pytest.raises(CheckpointError, match=r"tp 8 is more than 4: .*take tp 4 and a pp above 1"):
        refuse_split(_of_two_sizes(16, HeadShape(4, 64)), 8)


def test_layers_that_share_keys_and_values_are_on_one_stage() -> None:
    config = _of_two_sizes(2, HeadShape(2, 64), num_shared=6)
    assert config.kv_sources == (0, 1, 2, 3, 4, 5, 4, 4, 5, 4, 4, 5)
    refuse_stages(config, 5)
    refuse_stages(config, 2, (4, 8))
    assert equal_stages(config, 2) == [4, 8]
    assert equal_stages(config, 5) == [1, 1, 1, 1, 8]
    assert equal_stages(TINY, 2) == [part(TINY.num_layers, 0, 2).stop, len(part(TINY.num_layers, 1, 2))]
    with pytest.raises(CheckpointError, match="pp 6 is more than 5: the layers from 4 on share"):
        refuse_stages(config, 6)
    with pytest.raises(CheckpointError, match=r"layers \[5, 7\]: the layers from 4 on share"):
        refuse_stages(config, 2, (5, 7))


@st.composite
def _with_shared_kv(draw: st.DrawFn) -> ModelConfig:
    """Draw a model of up to six layers, the last of which may attend to the KV of earlier ones."""
    num_own = draw(st.integers(1, 6))
    own = draw(st.lists(st.sampled_from((0, 20)), min_size=num_own, max_size=num_own))
    shared = draw(st.lists(st.sampled_from(own), max_size=6 - num_own))
    return dataclasses.replace(
        TINY,
        num_layers=num_own + len(shared),
        sliding_windows=(*own, *shared),
        layer_shapes=LayerShapes(num_shared=len(shared)),
    )


def _has_all_sources(config: ModelConfig, stages: Stages) -> bool:
    """Whether each layer is on the stage of the layer whose keys and values it attends to."""
    return all(start <= config.kv_sources[layer] for start, end in stages for layer in range(start, end))


def _is_refused(config: ModelConfig, pp: int, layers: tuple[int, ...] = ()) -> bool:
    try:
        refuse_stages(config, pp, layers)
    except CheckpointError:
        return True
    return False


@given(_with_shared_kv(), st.integers(1, 7), st.data())
def test_stages_are_refused_where_layers_would_be_apart_from_their_kv(
    config: ModelConfig, pp: int, data: st.DataObject
) -> None:
    """Every other split is accepted, and those that are chosen, by measured costs or none, are such."""
    num_layers = config.num_layers
    cuts = itertools.combinations(range(1, num_layers), pp - 1)
    splits = [tuple(b - a for a, b in itertools.pairwise((0, *cut, num_layers))) for cut in cuts]
    possible = [split for split in splits if _has_all_sources(config, given_layers(num_layers, split))]
    assert [split for split in splits if not _is_refused(config, pp, split)] == possible
    assert _is_refused(config, pp) == (not possible)
    if possible:
        assert tuple(equal_stages(config, pp)) in possible
        seconds = st.sampled_from((0.0, 0.1, 1.0, 7.0))
        costs = [data.draw(st.builds(StageCost, seconds, seconds, seconds)) for _ in range(pp)]
        stages = split_layers(num_layers, costs, last_stage_limit(config))
        assert tuple(end - start for start, end in stages) in possible
