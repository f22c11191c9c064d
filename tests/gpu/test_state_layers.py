"""The convolution and the scan of layers with a state by Triton kernels, against torch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from workers.model import cuda
from workers.model.state.causal_conv import CausalConv
from workers.model.state.gated_norm import GatedNorm, NormGroups
from workers.model.state.layer_states import LayerStates
from workers.model.state.mamba2_scan import ScanHeads, TorchScan
from workers.model.state.state_step import DeviceStates, StateStep

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

STEPS = (
    ([20, 2, 1], [-1, -1, -1], [0, 1, 2]),
    ([1, 1, 1], [0, 1, 2], [0, 3, 2]),
    ([5, 40, 2], [0, 3, 2], [4, 3, 2]),
)
PARTS = [[range(10), range(20, 26), range(26, 32)], [range(10, 20), range(20, 26), range(26, 32)]]


def step_of(lengths: list[int], reads: list[int], writes: list[int]) -> StateStep:
    read, written, num_tokens = (np.array(it, dtype=np.int32) for it in (reads, writes, lengths))
    return StateStep(read, written, num_tokens)


def known_to(device: torch.device, step: StateStep) -> StateStep:
    """Return the step as its graph is captured: arrays say nothing of blocks."""
    states = DeviceStates(*(torch.from_numpy(it).to(device) for it in (step.reads, step.writes)))
    nowhere = np.zeros_like(step.reads)
    return dataclasses.replace(step, reads=nowhere, writes=nowhere, device=states)


def draw(device: torch.device, *shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("is_known", [False, True])
def test_convolution(device: torch.device, dtype: torch.dtype, is_known: bool) -> None:
    from workers.model.state.triton_conv import TritonConv

    kernel, bias = draw(device, 32, 4), draw(device, 32, seed=2)
    conv = CausalConv(kernel, bias, PARTS)
    fast = TritonConv(kernel, bias, PARTS, is_activated=False)
    x = draw(device, 60, 40, seed=3).to(dtype)[:, 4:36]
    blocks = torch.full((5, 2, 2, 70), float("nan"), device=device)[:, 1]
    others = torch.full((5, 2, 2, 70), float("nan"), device=device)[:, 1]
    for lengths, reads, writes in STEPS:
        step, rows = step_of(lengths, reads, writes), x[: sum(lengths)]
        expected = conv.convolve(rows, LayerStates(blocks, step)).to(dtype)
        own = known_to(device, step) if is_known and step.is_decode else step
        torch.testing.assert_close(fast(rows, LayerStates(others, own)), expected, rtol=1e-3, atol=1e-5)
        assert torch.equal(blocks.nan_to_num(7), others.nan_to_num(7))


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_scan(device: torch.device, is_known: bool, is_deterministic: bool) -> None:
    from workers.model.state.triton_mamba2 import TritonScan

    groups = torch.tensor([0, 0, 1, 1], device=device)
    of_heads = draw(device, 3, 4)
    heads = ScanHeads(20, 18, 2, 7, (0.02, 3.0), of_heads[0] - 2, -of_heads[1].exp(), of_heads[2], groups)
    torch_scan = TorchScan(heads, is_deterministic=is_deterministic)
    scan = TritonScan(heads, is_deterministic=is_deterministic)
    wide = draw(device, 60, heads.num_channels + 4, seed=3)
    blocks = torch.full((5, 2, 2, 7 + 2 * 18 * 20), float("nan"), device=device)[:, 1]
    others = torch.full((5, 2, 2, 7 + 2 * 18 * 20), float("nan"), device=device)[:, 1]
    for lengths, reads, writes in STEPS:
        step, rows = step_of(lengths, reads, writes), wide[: sum(lengths)]
        channels, steps = rows[:, :-4], rows[:, -4:]
        expected = torch_scan(channels, steps, LayerStates(blocks, step))
        own = known_to(device, step) if is_known and step.is_decode else step
        found = scan(channels, steps, LayerStates(others, own))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(others, blocks, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_gated_norm(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = GatedNorm(draw(device, 50, seed=4), 1e-5, NormGroups.of(60, 2, range(5), 6))
    x, gate = draw(device, 2, 7, 50)
    wide = torch.cat((gate, x), 1)[:, :50]
    monkeypatch.setattr(cuda, "serves", lambda device: True)
    found = norm.normalize(x.clone(), wide)
    monkeypatch.setattr(cuda, "serves", lambda device: False)
    torch.testing.assert_close(found, norm.normalize(x.clone(), wide), rtol=1e-4, atol=1e-5)
