"""What a rank process has begun before it has imported torch."""

from __future__ import annotations

from typing import NamedTuple

from workers.model.fingerprint import FingerprintTask
from workers.rank.kernel_task import KernelTask


class BeganTasks(NamedTuple):
    """The hash of the checkpoint and the compiler of kernels (None: not begun), and when the process began,
    by the system's clock (None: when the rank does)."""

    fingerprint: FingerprintTask | None = None
    kernels: KernelTask | None = None
    began_at: float | None = None
