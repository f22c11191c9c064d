"""The convolution with a state by CPU kernels against that by torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compiled_kernels import KERNELS, kernels_of
from optional_programs import needs_compiler

from workers.model.state.causal_conv import CausalConv
from workers.model.state.layer_states import LayerStates
from workers.model.state.native_conv import NativeConv
from workers.model.state.state_step import NO_STATE, StateStep

pytestmark = needs_compiler
builds = pytest.mark.parametrize("build", KERNELS)
NUM_BLOCKS = 12


def states_of(
    lengths: list[int], num_parts: int, num_channels: int, num_taps: int, *, is_started: bool
) -> LayerStates:
    """Return states full of numbers, whose parts have more than the convolution's; every second sequence
    continues its state in place."""
    draw = torch.Generator().manual_seed(num_channels)
    size = (num_taps - 1) * num_channels // num_parts + 5
    blocks = torch.randn(NUM_BLOCKS, 2, num_parts, size, generator=draw)[:, 1]
    order = torch.randperm(NUM_BLOCKS, generator=draw).to(torch.int32).numpy()
    count = len(lengths)
    reads = order[:count] if is_started else np.full(count, NO_STATE, np.int32)
    writes = np.where((np.arange(count) % 2 == 0) & is_started, reads, order[count : 2 * count])
    return LayerStates(blocks, StateStep(reads, writes, np.array(lengths, np.int32)))


@builds
@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 2, 9, 3], [40]], ids=str)
@pytest.mark.parametrize(("num_parts", "num_channels", "num_taps"), [(1, 37, 2), (2, 96, 4), (3, 51, 3)])
def test_it_equals_torch(
    build: str,
    num_parts: int,
    num_channels: int,
    num_taps: int,
    lengths: list[int],
    dtype: torch.dtype,
    is_started: bool,
) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(sum(lengths), num_channels + 9, generator=draw).to(dtype)[:, 4:-5]
    kernel = torch.randn(num_channels, num_taps, generator=draw)
    bias = torch.randn(num_channels, generator=draw) if num_taps == 3 else None
    states = states_of(lengths, num_parts, num_channels, num_taps, is_started=is_started)
    torch_states = LayerStates(states.blocks.clone(), states.step)
    expected = CausalConv(kernel, bias).convolve(x, torch_states).to(dtype)
    found = NativeConv(kernels_of(build), kernel, bias, dtype, is_activated=False)(x, states)
    assert torch.equal(found, expected)
    assert torch.equal(states.blocks, torch_states.blocks)


@builds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_activated(build: str, dtype: torch.dtype) -> None:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    kernel = torch.randn(32, 4, generator=torch.Generator().manual_seed(2))
    plain, activated = (
        NativeConv(kernels_of(build), kernel, None, dtype, is_activated=is_activated)(
            x, states_of([8], 1, 32, 4, is_started=True)
        )
        for is_activated in (False, True)
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(activated, F.silu(plain), rtol=tolerance, atol=tolerance)
