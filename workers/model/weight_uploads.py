"""Upload weights to a device through two pinned buffers: one is filled from the mapped files while the
other is copied to the device.

The driver copies pageable memory, as mapped files are, in small pieces and one after another, with the caller
waiting. Not yet validated on a card: CPU tensors stand for the device's in the tests."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

# The bytes of each buffer: a copy of so many costs the host little beside the copy itself.
BUFFER_BYTES = 32 << 20


class SentCopy(Protocol):
    """A copy to the device that was begun."""

    def synchronize(self) -> None:
        """Return when the copy is done."""


class DeviceCopies(Protocol):
    """Copies from pinned memory to one device, in the order of its current stream."""

    device: torch.device

    def buffer(self, num_bytes: int) -> Tensor:
        """Return pinned uint8 memory [num_bytes]."""

    def send(self, source: Tensor, target: Tensor) -> SentCopy:
        """Begin to copy `source`, in pinned memory, to `target` of the same shape on the device."""


class CudaCopies:
    """Copies to a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def send(self, source: Tensor, target: Tensor) -> SentCopy:
        target.copy_(source, non_blocking=True)
        stream = torch.cuda.current_stream(self.device)
        sent: SentCopy = stream.record_event()
        return sent


class WeightUploads:
    """Uploads tensors of mapped files, one after another."""

    def __init__(self, copies: DeviceCopies, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._copies = copies
        self._buffer_bytes = buffer_bytes
        self._buffers: list[Tensor] = []
        self._sent: list[SentCopy | None] = [None, None]
        self._next = 0

    def upload(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy of a tensor in host memory, which may be a view, on the device in this dtype. Work
        that is queued there from now on finds it complete."""
        row_bytes = dtype.itemsize * math.prod(stored.shape[1:])
        if stored.dim() == 0 or not 0 < row_bytes <= self._buffer_bytes:
            return stored.to(device=self._copies.device, dtype=dtype)
        target = torch.empty(stored.shape, dtype=dtype, device=self._copies.device)
        num_rows = self._buffer_bytes // row_bytes
        for first in range(0, len(stored), num_rows):
            rows = stored[first : first + num_rows]
            self._send(rows, target[first : first + len(rows)])
        return target

    def close(self) -> None:
        """Wait for the last copies, and free the buffers."""
        for sent in filter(None, self._sent):
            sent.synchronize()
        self._sent = [None, None]
        self._buffers = []

    def _send(self, rows: Tensor, target: Tensor) -> None:
        if not self._buffers:
            self._buffers = [self._copies.buffer(self._buffer_bytes) for _ in self._sent]
        index, self._next = self._next, 1 - self._next
        if (before := self._sent[index]) is not None:
            before.synchronize()  # what the buffer held is on the device
        pinned = self._buffers[index][: target.nbytes].view(target.dtype).view(target.shape)
        pinned.copy_(rows)  # which converts it
        self._sent[index] = self._copies.send(pinned, target)
