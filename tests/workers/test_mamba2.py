"""The states of Mamba-2: all ways to scan tokens against one written down naively, in float64; and what they
promise of chunks and of other sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from compiled_kernels import KERNELS, kernels_of
from torch import Tensor

from workers.model.state.causal_conv import CausalConv
from workers.model.state.gated_norm import GatedNorm, NormGroups
from workers.model.state.layer_states import LayerStates
from workers.model.state.mamba2_scan import ScanHeads, TorchScan
from workers.model.state.native_conv import NativeConv
from workers.model.state.native_mamba2 import NativeScan
from workers.model.state.state_step import NO_STATE, StateStep

Scan = Callable[[Tensor, Tensor, LayerStates], Tensor]
NUM_KEPT, NUM_PARTS = 7, 2
SCANS = ("tokens", "chunks", *KERNELS)


class Shape(NamedTuple):
    """Heads, their size, that of states, and groups."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int


SHAPES = (Shape(4, 64, 128, 1), Shape(6, 11, 18, 2), Shape(2, 40, 24, 2))


def heads_of(shape: Shape) -> ScanHeads:
    generator = torch.Generator().manual_seed(5)
    step_bias, decay, skip = torch.randn(3, shape.num_heads, generator=generator)
    groups = torch.arange(shape.num_heads) * shape.num_groups // shape.num_heads
    limits = 0.02, 3.0
    return ScanHeads(*shape[1:], NUM_KEPT, limits, step_bias - 2, -decay.exp(), skip, groups)


def scan_of(kind: str, heads: ScanHeads, dtype: torch.dtype = torch.float32) -> Scan:
    if kind in ("tokens", "chunks"):
        return TorchScan(heads, is_deterministic=kind == "tokens")
    return NativeScan(kernels_of(kind), heads, dtype)


def rows_of(heads: ScanHeads, num_tokens: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return channels and time steps, whose rows are apart."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(num_tokens, heads.num_channels + heads.num_heads + 3, generator=generator)
    return wide[:, : heads.num_channels], wide[:, heads.num_channels : -3] * 2


def states_of(heads: ScanHeads, num_blocks: int) -> Tensor:
    """Return states full of what is no number, in views whose rows are apart."""
    size = NUM_KEPT + heads.inner_size * heads.state_size // NUM_PARTS
    return torch.full((num_blocks, 3, NUM_PARTS, size + 2), float("nan"))[:, 1, :, :size]


def step_of(lengths: list[int], reads: list[int], writes: list[int]) -> StateStep:
    read, written, num_tokens = (np.array(it, dtype=np.int32) for it in (reads, writes, lengths))
    return StateStep(read, written, num_tokens)


def naive(heads: ScanHeads, channels: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the tokens of one sequence give, and the state behind them, in float64."""
    wide, shape = channels.double(), (heads.num_heads, heads.state_size, heads.head_dim)
    x, b, c = torch.split(wide, [heads.inner_size, *[heads.num_groups * heads.state_size] * 2], 1)
    state, found = torch.zeros(shape, dtype=torch.float64), []
    for token in range(len(channels)):
        outputs = []
        for head in range(heads.num_heads):
            group = int(heads.groups[head])
            of_group = slice(group * heads.state_size, (group + 1) * heads.state_size)
            own = x[token, head * heads.head_dim : (head + 1) * heads.head_dim]
            raw = float(steps[token, head] + heads.step_bias[head])
            width = min(max(float(np.log1p(np.exp(raw))), heads.limits[0]), heads.limits[1])
            state[head] *= np.exp(width * float(heads.decay[head]))
            state[head] += torch.outer(b[token, of_group], own * width)
            outputs.append(c[token, of_group] @ state[head] + own * float(heads.skip[head]))
        found.append(torch.cat(outputs))
    return torch.stack(found), state


def of_heads(blocks: Tensor, block: int, heads: ScanHeads) -> Tensor:
    return blocks[block, :, NUM_KEPT:].reshape(heads.num_heads, heads.state_size, heads.head_dim)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", SCANS)
def test_scans_equal_a_naive_one(kind: str, shape: Shape) -> None:
    """Over several sequences at once, in chunks of all sizes, from block to block and within one."""
    heads = heads_of(shape)
    scan, blocks = scan_of(kind, heads), states_of(heads, 6)
    sequences = [rows_of(heads, length, seed) for seed, length in enumerate((200, 67, 3))]
    steps = [
        step_of([130, 66, 1], [NO_STATE, NO_STATE, NO_STATE], [4, 1, 2]),
        step_of([1, 1, 1], [4, 1, 2], [0, 1, 2]),
        step_of([69, 1], [0, 2], [0, 5]),
    ]
    parts: list[list[Tensor]] = [[], [], []]
    done = [0, 0, 0]
    for step, numbers in zip(steps, ([0, 1, 2], [0, 1, 2], [0, 2]), strict=True):
        given = [
            tuple(rows[done[it] : done[it] + int(length)] for rows in sequences[it])
            for it, length in zip(numbers, step.lengths, strict=True)
        ]
        channels, time_steps = (torch.cat(it) for it in zip(*given, strict=True))
        mixed = scan(channels, time_steps, LayerStates(blocks, step))
        for it, rows in zip(numbers, torch.split(mixed, step.lengths.tolist()), strict=True):
            parts[it].append(rows)
            done[it] += len(rows)
    for (channels, time_steps), found, block in zip(sequences, parts, (0, 1, 5), strict=True):
        expected, state = naive(heads, channels, time_steps)
        scale = float(expected.abs().max())
        assert float((torch.cat(found) - expected).abs().max()) <= 2e-5 * scale
        assert float((of_heads(blocks, block, heads) - state).abs().max()) <= 2e-5 * float(state.abs().max())
    assert blocks[:, :, :NUM_KEPT].isnan().all(), "these are of the convolution"
    assert blocks[3].isnan().all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["tokens", *KERNELS])
def test_results_depend_on_neither_chunks_nor_other_sequences(kind: str, shape: Shape) -> None:
    """By torch but for the last place of exponentials, which depends on where a number lies."""
    heads = heads_of(shape)
    scan, blocks = scan_of(kind, heads), states_of(heads, 3)
    channels, steps = rows_of(heads, 150)
    other = rows_of(heads, 40, seed=9)
    whole = scan(channels, steps, LayerStates(blocks, step_of([150], [NO_STATE], [0])))
    found, start = [], 0
    for length in (1, 63, 64, 1, 21):
        own = [its[start : start + length] for its in (channels, steps)]
        rows, time_steps = (torch.cat(it) for it in zip(other, own, strict=True))
        step = step_of([40, length], [NO_STATE, 1 if start else NO_STATE], [2, 1])
        found.append(scan(rows, time_steps, LayerStates(blocks, step))[40:])
        start += length
    tolerance = 1e-5 if kind == "tokens" else 0.0
    compare = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    compare(torch.cat(found), whole)
    compare(blocks[1, :, NUM_KEPT:], blocks[0, :, NUM_KEPT:])


@pytest.mark.parametrize("kind", KERNELS)
def test_kernels_take_rows_of_bfloat16(kind: str) -> None:
    heads = heads_of(SHAPES[1])
    channels, steps = (rows.bfloat16() for rows in rows_of(heads, 70))
    found, expected = (
        scan(*rows, LayerStates(states_of(heads, 1), step_of([70], [NO_STATE], [0])))
        for scan, rows in (
            (scan_of(kind, heads, torch.bfloat16), (channels, steps)),
            (scan_of("tokens", heads), (channels.float(), steps.float())),
        )
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KERNELS)
def test_parts_that_share_channels_have_copies(kind: str, dtype: torch.dtype) -> None:
    """The kernel leaves in each part what torch leaves there."""
    generator = torch.Generator().manual_seed(2)
    kernel, bias = torch.randn(32, 4, generator=generator), torch.randn(32, generator=generator)
    parts = [[range(10), range(20, 26), range(26, 32)], [range(10, 20), range(20, 26), range(26, 32)]]
    conv = CausalConv(kernel, bias, parts)
    fast = NativeConv(kernels_of(kind), kernel, bias, dtype, is_activated=False, parts=parts)
    x = torch.randn(30, 40, generator=generator).to(dtype)[:, :32]
    blocks = torch.full((4, 2, 2, 70), float("nan"))[:, 1]
    others = blocks.clone()
    for lengths, reads, writes in (
        ([20, 2], [-1, -1], [0, 1]),
        ([1, 1], [0, 1], [0, 3]),
        ([5, 2], [0, 3], [2, 3]),
    ):
        step, rows = step_of(lengths, reads, writes), x[: sum(lengths)]
        expected = conv.convolve(rows, LayerStates(blocks, step)).to(dtype)
        assert torch.equal(fast(rows, LayerStates(others, step)), expected)
        assert torch.equal(blocks.nan_to_num(7), others.nan_to_num(7))
    assert torch.equal(blocks[2, 0, 10:22], blocks[2, 1, 10:22])


@pytest.mark.usefixtures("backend")
def test_groups_that_ranks_share_are_normalized_together() -> None:
    """Six parts of two groups on four ranks, of which two have a part of a group."""
    generator = torch.Generator().manual_seed(3)
    x, gate = torch.randn(2, 5, 60, generator=generator)
    weight = torch.randn(60, generator=generator)
    whole = GatedNorm(weight, 1e-5, NormGroups.of(60, 2, range(6), 6))
    expected = whole.normalize(x.clone(), gate)
    held = [range(1), range(1, 3), range(3, 4), range(4, 6)]
    columns = [slice(it.start * 10, it.stop * 10) for it in held]
    sums: list[Tensor] = []

    def run(total: Tensor | None) -> list[Tensor]:
        found = []
        for parts, own in zip(held, columns, strict=True):
            norm = GatedNorm(weight[own].contiguous(), 1e-5, NormGroups.of(60, 2, parts, 6))

            def all_reduce(tensor: Tensor) -> None:
                sums.append(tensor.clone())
                if total is not None:
                    tensor.copy_(total)

            norm.join(all_reduce, 4)
            assert norm.num_summed == 2
            found.append(norm.normalize(x[:, own].contiguous(), gate[:, own]))
        return found

    run(None)
    total = torch.stack(sums).sum(0)
    torch.testing.assert_close(torch.cat(run(total), 1), expected, rtol=1e-5, atol=1e-6)
    aligned = GatedNorm(weight[:30].contiguous(), 1e-5, NormGroups.of(60, 2, range(3), 6))
    aligned.join(lambda tensor: None, 2)
    assert aligned.num_summed == 0
    own = aligned.normalize(x[:, :30].contiguous(), gate[:, :30])
    torch.testing.assert_close(own, expected[:, :30], rtol=1e-6, atol=1e-6)
