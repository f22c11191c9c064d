"""Attention by pieces: rows have the same bits in both ways, and equal torch and the former kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from drawn_attention import DrawnStep, assert_equal, make_step
from launch_recorder import recorded_launches

from workers.model.attention.interface import SequenceSpan

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

from triton.runtime.errors import OutOfResources

from workers.model.attention import triton_backend
from workers.model.attention.triton_backend import TritonAttention
from workers.model.cuda import card, pieced_attention, pieced_choice
from workers.model.cuda.pieced_attention import num_pieces, pieced_tiles
from workers.model.cuda.pieced_choice import AttentionKind, tried_tiles

# Sequences of one to four pieces: (tokens before, new tokens).
WORK = [(200, 1), (58, 9), (7, 1)]


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pieces of 64 keys, and then pieces of 128."""
    for name, value in (("PIECE_TOKENS", 64), ("NUM_FIRST_PIECES", 3), ("LATER_TOKENS", 128)):
        monkeypatch.setattr(pieced_attention, name, value)


def rows_of(case: DrawnStep) -> list[slice]:
    ends = [sum(span.num_tokens for span in case.spans[: index + 1]) for index in range(len(case.spans))]
    return [slice(end - span.num_tokens, end) for end, span in zip(ends, case.spans, strict=True)]


def drawn(device: torch.device, seed: int) -> DrawnStep:
    dtype = (torch.float16, torch.bfloat16, torch.float32)[seed % 3]
    return make_step(
        device,
        WORK,
        seed=seed,
        dtype=dtype,
        head_dim=(16, 80, 64)[seed % 3],
        num_kv_heads=1 + seed % 2,
        group=(3, 1, 8)[seed % 3],
        windows=(0, (40, 130, 1)[seed % 3]),
        block_tokens=(16, 64, 128)[seed % 3],
        softcap=(0.0, 5.0)[seed % 2],
        has_sinks=seed % 2 == 0,
    )


@pytest.mark.parametrize("seed", range(3))
def test_rows_have_the_same_bits_in_any_company_and_way(device: torch.device, seed: int) -> None:
    """Alone and together; chunks at once, split over their keys, and cut in two."""
    case = drawn(device, seed)
    together = case.run(case.triton(is_deterministic=True))
    assert_equal(together, case.expected())
    with pytest.MonkeyPatch.context() as patch, recorded_launches() as launches:
        patch.setattr(triton_backend, "MIN_SPLIT_TOKENS", 1)
        results = case.run(case.triton(is_deterministic=True))
    assert "_attend_whole" not in launches
    assert all(torch.equal(one, other) for one, other in zip(results, together, strict=True))
    for index, rows in enumerate(rows_of(case)):
        alone = case.only([index])
        for result, whole in zip(alone.run(alone.triton(is_deterministic=True)), together, strict=True):
            assert torch.equal(result, whole[rows]), index


def test_a_prompt_has_the_same_bits_token_by_token(device: torch.device) -> None:
    """Whatever chunks come between."""
    case = make_step(device, [(0, 150)], windows=(0, 70), group=3, dtype=torch.float16, has_sinks=True)
    at_once = case.run(case.triton(is_deterministic=True))
    backend, row = case.triton(is_deterministic=True), 0
    for size in (60, 1, 1, 70, 1, 17):
        rows = slice(row, row + size)
        span = SequenceSpan(row, size, case.spans[0].block_ids)
        chunk = dataclasses.replace(case, spans=[span], qkv=[qkv[rows] for qkv in case.qkv])
        for result, whole in zip(chunk.run(backend), at_once, strict=True):
            assert torch.equal(result, whole[rows]), row
        row += size


def test_short_chunks_behind_many_keys_are_split_without_the_mode_too(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_backend, "MIN_SPLIT_TOKENS", 100)
    case = make_step(device, [(150, 5), (90, 4), (20, 1)], group=4, windows=(0, 30))
    with recorded_launches() as launches:
        actual = case.run(case.triton())
    layer = ["_rotate_and_write_kernel", "_attend_pieces", "_reduce_pieces"]
    assert launches[-6:] == [*layer, "_attend_split", "_combine_pieces", "_attend_tiles"]
    assert_equal(actual, case.expected())
    monkeypatch.setattr(triton_backend, "MOST_SPLIT_BYTES", 1 << 10)  # which no tile's pieces fit
    with recorded_launches() as launches:
        assert_equal(case.run(case.triton()), actual)
    assert "_attend_split" not in launches


def test_rows_are_computed_by_the_former_kernels_where_pieces_cannot(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TritonAttention, "pieced", None)
    case = make_step(device, [(20, 1), (0, 5), (150, 2)])
    with recorded_launches() as launches:
        assert_equal(case.run(case.triton(is_deterministic=True)), case.expected())
    assert [it for it in launches if it.startswith("_attend")] == ["_attend_tiles"] * 2


def test_contexts_have_pieces_of_two_sizes() -> None:
    counts = {tokens: num_pieces(tokens) for tokens in (1, 64, 65, 192, 193, 320, 321)}
    assert counts == {1: 1, 64: 1, 65: 2, 192: 3, 193: 4, 320: 4, 321: 5}


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.int8])
def test_the_trial_finds_what_can_be_used(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kv_dtype: torch.dtype
) -> None:
    """Kernels that do not compile, differ from the former ones, or depend on the tile are not."""
    kind = AttentionKind(torch.float16, kv_dtype, 16, 16, 2)
    tiles = pieced_tiles(kind.dtype, kind.head_dim, card.card_of(device))
    assert tiles is not None
    found = tried_tiles(device, kind, *tiles)
    assert found is not None
    assert found.is_invariant
    whole = pieced_attention.attend_whole

    def other(factor: float) -> None:
        def attend(*arguments: Any) -> None:
            whole(*arguments)
            arguments[-1].mul_(factor)

        monkeypatch.setattr(pieced_choice, "attend_whole", attend)

    other(1.001)
    found = tried_tiles(device, kind, *tiles)
    assert found is not None
    assert not found.is_invariant
    other(1.1)
    assert tried_tiles(device, kind, *tiles) is None

    def refuse(*_: Any) -> None:
        raise OutOfResources(1 << 20, 99 << 10, "shared memory")

    monkeypatch.setattr(pieced_choice, "attend_whole", refuse)
    assert tried_tiles(device, kind, *tiles) is None


@pytest.mark.parametrize(
    ("capability", "head_dim", "is_known"),
    [(80, 128, True), (89, 64, True), (90, 256, True), (100, 128, True), (80, 256, False), (100, 192, False)],
)
def test_tiles_follow_the_card(capability: int, head_dim: int, is_known: bool) -> None:
    tiles = pieced_tiles(torch.bfloat16, head_dim, card.Card(capability))
    assert (tiles is not None) == is_known
