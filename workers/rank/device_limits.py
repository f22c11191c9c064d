"""What a device can do, measured, and how full its memory is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import psutil
import torch

from kvtransfer.common.clock import Clock
from workers.messages import DeviceMemory
from workers.model.layers import Linear
from workers.model.linear import can_pack, pack, packed_product
from workers.model.weights import LinearWeights


class MeasureSizes(NamedTuple):
    """Rows of a square matrix, bytes that are read, and how often; the best run counts."""

    gemm: int
    read_bytes: int
    repeat: int


# By type of device: enough to know what the device is able to do within a tenth of a second.
AT_START = {"cpu": MeasureSizes(768, 48 << 20, 3), "cuda": MeasureSizes(8192, 1 << 30, 5)}


_SMALL_GEMM = 256
# A route this many times slower than the best on small matrices is not measured on large ones.
_HOPELESS = 3.0
_LINEAR = MeasureSizes(1024, 0, 3)
_LINEAR_ROWS = 256


class DeviceLimits(NamedTuple):
    """Of one rank's share of its device: what it measured alone or beside others that started with it."""

    flop_s: float
    byte_s: float


def measure_limits(
    device: torch.device, dtype: torch.dtype, clock: Clock, sizes: MeasureSizes
) -> DeviceLimits:
    """With the threads that torch is set to. The first run of each is dropped: it touches the memory.

    Arithmetic is that of the fastest route to a product of `dtype`, which need not be the one that the engine
    takes: where a CPU emulates bf16, it is faster to compute in float32.
    """
    gemm_s = _fastest_gemm_s(device, dtype, clock, sizes)
    memory = torch.ones(sizes.read_bytes // 4, device=device)
    read_s = _best_s(memory.sum, clock, device, sizes.repeat)
    if device.type == "cuda":
        del memory
        torch.cuda.empty_cache()
    return DeviceLimits(flop_s=2 * sizes.gemm**3 / gemm_s, byte_s=sizes.read_bytes / read_s)


def linear_flop_s(device: torch.device, dtype: torch.dtype, clock: Clock) -> float:
    """Operations a second of a linear layer as the engine computes it, over a tile of a prompt."""
    size = _LINEAR.gemm
    linear = Linear(LinearWeights(torch.randn(size, size, device=device).to(dtype), None))
    rows = torch.randn(_LINEAR_ROWS, size, device=device).to(dtype)
    best_s = _best_s(lambda: linear(rows), clock, device, _LINEAR.repeat)
    return 2 * _LINEAR_ROWS * size**2 / best_s


class Route(NamedTuple):
    """A way to a product: in this dtype, with a weight in oneDNN's packed order or as it is."""

    dtype: torch.dtype
    is_packed: bool


def routes(device: torch.device, dtype: torch.dtype) -> list[Route]:
    """All ways to products of `dtype` that lose no precision: in it, and on CPUs in float32."""
    if device.type != "cpu":
        return [Route(dtype, False)]
    dtypes = dict.fromkeys((torch.float32, dtype))
    found = [Route(each, True) for each in dtypes if can_pack(device, each)]
    return found + [Route(each, False) for each in dtypes]


def _fastest_gemm_s(device: torch.device, dtype: torch.dtype, clock: Clock, sizes: MeasureSizes) -> float:
    """Seconds of a product of square matrices by the fastest route."""
    candidates = routes(device, dtype)
    if len(candidates) > 1:
        small = min(_SMALL_GEMM, sizes.gemm)
        times = [_best_s(_product(route, small, device), clock, device, 1) for route in candidates]
        candidates = [
            route for route, time_s in zip(candidates, times, strict=True) if time_s <= _HOPELESS * min(times)
        ]
    return min(
        _best_s(_product(route, sizes.gemm, device), clock, device, sizes.repeat) for route in candidates
    )


def _product(route: Route, size: int, device: torch.device) -> Callable[[], object]:
    square = torch.randn(size, size, device=device).to(route.dtype)
    if not route.is_packed:
        return lambda: square @ square
    packed = pack(square)
    return lambda: packed_product(square, packed, None)


def device_memory(device: torch.device) -> DeviceMemory:
    """A GPU's memory as its driver tells it; on a CPU this process's and the host's."""
    if device.type == "cuda":
        num_free, num_total = torch.cuda.mem_get_info(device)
        return DeviceMemory(num_total - num_free, num_total)
    return DeviceMemory(psutil.Process().memory_info().rss, psutil.virtual_memory().total)


def _best_s(work: Callable[[], object], clock: Clock, device: torch.device, repeat: int) -> float:
    times = []
    for _ in range(repeat + 1):
        started_at = clock.now()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock.now() - started_at)
    return min(times[1:])
