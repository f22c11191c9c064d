"""What a device can do, measured, and how full its memory is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import psutil
import torch

from kvtransfer.clock import Clock
from workers.messages import DeviceMemory


class MeasureSizes(NamedTuple):
    """Rows of a square matrix, bytes that are read, and how often; the best run counts."""

    gemm: int
    read_bytes: int
    repeat: int


AT_START = {"cpu": MeasureSizes(768, 48 << 20, 3), "cuda": MeasureSizes(8192, 1 << 30, 5)}
"""By type of device: enough to know what the device is able to do within a tenth of a second."""


class DeviceLimits(NamedTuple):
    """Of one rank's share of its device: what it measured alone or beside others that started with it."""

    flop_s: float
    byte_s: float


def measure_limits(
    device: torch.device, dtype: torch.dtype, clock: Clock, sizes: MeasureSizes
) -> DeviceLimits:
    """With the threads that torch is set to. The first run of each is dropped: it touches the memory."""
    square = torch.randn(sizes.gemm, sizes.gemm, device=device).to(dtype)
    gemm_s = _best_s(lambda: square @ square, clock, device, sizes.repeat)
    memory = torch.ones(sizes.read_bytes // 4, device=device)
    read_s = _best_s(memory.sum, clock, device, sizes.repeat)
    if device.type == "cuda":
        del square, memory
        torch.cuda.empty_cache()
    return DeviceLimits(flop_s=2 * sizes.gemm**3 / gemm_s, byte_s=sizes.read_bytes / read_s)


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
