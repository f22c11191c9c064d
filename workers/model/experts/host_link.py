"""Copy tensors between a device and host memory while both compute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Waits until copies have arrived in host memory, and returns them.
Arrival = Callable[[], list[Tensor]]


class HostLink(ABC):
    """The way between one device and host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def begin_out(self, tensors: Sequence[Tensor]) -> Arrival:
        """Begin to copy tensors of the device to host memory, before all work that is queued afterwards."""

    @abstractmethod
    def pinned(self, host: Tensor) -> Tensor:
        """Return a tensor of host memory where the device can copy it from while the host continues. The
        result may be dropped when the copy is queued."""


class SameMemory(HostLink):
    """A device whose memory is that of the host: a CPU."""

    def begin_out(self, tensors: Sequence[Tensor]) -> Arrival:
        return lambda: list(tensors)

    def pinned(self, host: Tensor) -> Tensor:
        return host


class CudaLink(HostLink):
    """A CUDA device, through pinned memory, which torch keeps and uses again."""

    def begin_out(self, tensors: Sequence[Tensor]) -> Arrival:
        copies = [torch.empty(it.shape, dtype=it.dtype, pin_memory=True) for it in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

        def arrival() -> list[Tensor]:
            copied.synchronize()
            return copies

        return arrival

    def pinned(self, host: Tensor) -> Tensor:
        return torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)


class MetaLink(HostLink):
    """The device "meta", whose tensors have no values: what arrives is -1, the number of no expert."""

    def begin_out(self, tensors: Sequence[Tensor]) -> Arrival:
        return lambda: [torch.tensor(-1, dtype=it.dtype).expand(it.shape) for it in tensors]

    def pinned(self, host: Tensor) -> Tensor:
        return host


def host_link(device: torch.device) -> HostLink:
    """Return the link of a device."""
    if device.type == "meta":
        return MetaLink(device)
    return CudaLink(device) if device.type == "cuda" else SameMemory(device)
