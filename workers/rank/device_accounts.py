"""The memory that this process holds of its CUDA device, by its own accounts: its allocator's, and the
driver's of it.

The free memory of a device also changes when a neighbor starts, stops or grows, so no difference of it says
anything about this process."""

from __future__ import annotations

import ctypes
import gc
import os
from typing import NamedTuple, Protocol

import torch


class Availability(NamedTuple):
    """Bytes of a device that are free for anybody, and all bytes."""

    free_bytes: int
    total_bytes: int


class DeviceAccounts(Protocol):
    """The accounts of one process's memory on its device."""

    @property
    def reserved_bytes(self) -> int:
        """The bytes of the device that the process's allocator has, those of graphs included."""

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes that it had since `begin_peak`."""

    def begin_peak(self) -> None: ...

    def process_bytes(self) -> int | None:
        """Return the bytes of the device that the driver counts as this process's, None if it does not
        say."""

    def availability(self) -> Availability: ...

    def release(self, *, with_workspaces: bool = False) -> None:
        """Return unused memory of the allocator to the device, also the memory that products keep for the
        next ones."""


class CudaAccounts:
    """The accounts of this process on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"

    @property
    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    @property
    def peak_reserved_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def begin_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def process_bytes(self) -> int | None:
        return nvml_process_bytes(self._uuid)

    def availability(self) -> Availability:
        return Availability(*map(int, torch.cuda.mem_get_info(self._device)))

    def release(self, *, with_workspaces: bool = False) -> None:
        gc.collect()  # what was released may be part of a cycle
        if with_workspaces:
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


class _ProcessInfo(ctypes.Structure):
    """`nvmlProcessInfo_t` as of `nvmlDeviceGetComputeRunningProcesses_v3`."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


_MOST_PROCESSES = 1024
_NOT_AVAILABLE = (1 << 64) - 1


def nvml_process_bytes(uuid: str, library: str = "libnvidia-ml.so.1") -> int | None:
    """Return the bytes that the driver's library counts as this process's on the device. None where there is
    no such library, or where it does not know this process by the number that it has here, as in
    containers."""
    try:
        nvml = ctypes.CDLL(library)
        processes = nvml.nvmlDeviceGetComputeRunningProcesses_v3
    except (OSError, AttributeError):
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            return None
        count, found = ctypes.c_uint(_MOST_PROCESSES), (_ProcessInfo * _MOST_PROCESSES)()
        if processes(handle, ctypes.byref(count), found):
            return None
        own = [info.used_bytes for info in found[: count.value] if info.pid == os.getpid()]
    finally:
        nvml.nvmlShutdown()
    return own[0] if own and own[0] != _NOT_AVAILABLE else None
