"""Upload weights to a device through two pinned buffers: one is filled, from the mapped files or from what
was repacked of them, while the other is copied to the device.

The driver copies pageable memory, as mapped files are, in small pieces and one after another, with the caller
waiting. What is pinned is 64 MiB, whatever the size of the model, from the first upload until `close`. Not
yet validated on a card: CPU tensors stand for the device's in the tests."""

from __future__ import annotations

import mmap
from typing import Protocol

import torch
from torch import Tensor

from kvtransfer.blocks.cuda_memory import pin, unpin

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

    def release(self, buffer: Tensor) -> None:
        """Unpin a buffer all copies from which are done. The caller drops it."""

    def send(self, source: Tensor, target: Tensor) -> SentCopy:
        """Begin to copy `source`, in pinned memory, to `target` of the same shape on the device."""


class CudaCopies:
    """Copies to a CUDA device. Memory that torch pins would stay pinned: torch keeps what is freed. Where
    memory cannot be pinned, which is logged, copies of it are right but slow."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned: set[int] = set()

    def buffer(self, num_bytes: int) -> Tensor:
        memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        if pin(memory.data_ptr(), num_bytes, self.device):
            self._pinned.add(memory.data_ptr())
        return memory

    def release(self, buffer: Tensor) -> None:
        if (address := buffer.data_ptr()) in self._pinned:
            self._pinned.remove(address)
            unpin(address)

    def send(self, source: Tensor, target: Tensor) -> SentCopy:
        target.copy_(source, non_blocking=True)
        stream = torch.cuda.current_stream(self.device)
        sent: SentCopy = stream.record_event()
        return sent


class WeightUploads:
    """Uploads tensors of host memory, one after another."""

    def __init__(self, copies: DeviceCopies, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._copies = copies
        self._buffer_bytes = buffer_bytes
        self._buffers: list[Tensor] = []
        self._sent: list[SentCopy | None] = [None, None]
        self._next = 0

    def upload(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy of a tensor in host memory, which may be a view, on the device in this dtype. Work
        that is queued there from now on finds it complete."""
        target = torch.empty(stored.shape, dtype=dtype, device=self._copies.device)
        if target.numel():
            self._fill(target, stored)
        return target

    def close(self) -> None:
        """Wait for the last copies, and give the buffers back."""
        for sent in filter(None, self._sent):
            sent.synchronize()
        self._sent = [None, None]
        while self._buffers:
            self._copies.release(self._buffers.pop())

    def _fill(self, target: Tensor, stored: Tensor) -> None:
        """Send as many rows at a time as a buffer holds; of larger ones, each by itself."""
        if target.nbytes <= self._buffer_bytes:
            self._send(stored, target)
            return
        num_rows = self._buffer_bytes // (target.nbytes // len(target))
        if not num_rows:
            for there, row in zip(target, stored, strict=True):
                self._fill(there, row)
            return
        for first in range(0, len(stored), num_rows):
            rows = stored[first : first + num_rows]
            self._send(rows, target[first : first + len(rows)])

    def _send(self, rows: Tensor, target: Tensor) -> None:
        while len(self._buffers) < len(self._sent):
            self._buffers.append(self._copies.buffer(self._buffer_bytes))
        index, self._next = self._next, 1 - self._next
        if (before := self._sent[index]) is not None:
            before.synchronize()  # what the buffer held is on the device
        pinned = self._buffers[index][: target.nbytes].view(target.dtype).view(target.shape)
        pinned.copy_(rows)  # which converts it
        self._sent[index] = self._copies.send(pinned, target)
