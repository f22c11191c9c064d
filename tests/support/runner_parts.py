"""How the ranks of tests compute: in float32 with one thread of the CPU, or by kernels."""

from __future__ import annotations

import torch

from workers.rank.device_queue import CpuQueue
from workers.rank.runner_settings import ComputeSettings

ON_CPU = ComputeSettings(torch.float32, torch.device("cpu"), num_threads=1)


def by_kernels(device: torch.device, *, is_deterministic: bool = False) -> ComputeSettings:
    """Return how kernels compute on a device; on a CPU those of Triton, in the interpreter."""
    queue = CpuQueue(has_triton=True) if device.type == "cpu" else None
    return ON_CPU._replace(device=device, is_deterministic=is_deterministic, queue=queue)
