"""The queue of copies that one thread gives to a device, and the tables of pieces that its kernels read.

A push of any number of pieces is four calls of the driver and one wait, whatever its size:

    upload of a table      source ids, target ids, and a zero for each sum
    one kernel             copies every piece, and adds the mixed words of each to its zero
    download of the sums   8 bytes a piece
    event                  for which the thread sleeps once

A thread gives up Python's lock in each of these calls and must win it back from the thread that computes, and
on a card that processes share it may wait for a time slice between two of them. Earlier, a push of 64 MiB was
one such round for each 128 MiB, each of some twenty calls, and took 4.6 ms in service for 45 us of copying.
The tables of pushes and of sums are used again, so that neither allocates in the long run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

_LEAST_PIECES = 64
# The device's scheduler prefers blocks of such a stream wherever a multiprocessor becomes free.
_URGENT = -1


class PieceTable:
    """The block ids of up to `capacity` pieces and their sums, in host memory and on the device."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.num_pieces = 0
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(3 * capacity, dtype=torch.int64, pin_memory=is_cuda)
        self._words: NDArray[np.int64] = self._host.numpy()
        # int64: the source ids, as many target ids, and as many sums, of `num_pieces` each.
        self.on_device = torch.empty(3 * capacity, dtype=torch.int64, device=device)

    def fill(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Name the pieces, before `upload`; `target_ids` are empty where nothing is written."""
        count = self.num_pieces = len(source_ids)
        self._words[:count] = source_ids
        if len(target_ids):
            self._words[count : 2 * count] = target_ids
        self._words[2 * count : 3 * count] = 0

    def upload(self) -> None:
        """Queue the copy to the device, of ids and zeros."""
        count = 3 * self.num_pieces
        self.on_device[:count].copy_(self._host[:count], non_blocking=True)

    def download(self) -> None:
        """Queue the copy of the sums to host memory."""
        sums = slice(2 * self.num_pieces, 3 * self.num_pieces)
        self._host[sums].copy_(self.on_device[sums], non_blocking=True)

    def totals(self) -> NDArray[np.uint64]:
        """Return the sums S of mixed words, uint64 [num_pieces], when the download is done. They are
        overwritten with the table's next use."""
        return self._words[2 * self.num_pieces : 3 * self.num_pieces].view(np.uint64)


class Mark(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """Return when the device has passed it. Raises `RuntimeError` if the device has failed."""

    @property
    def event(self) -> torch.cuda.Event | None:
        """The event for which other streams can wait; None: it is passed."""


class CopyStream:
    """The copies of one thread on one device, in the order in which they are queued. On the CPU they are done
    at once.

    `is_urgent`: someone waits for the copies, so that they go before the step that computes, whose kernels
    fill the device. One kernel of it has as many blocks as a device holds many times over; without priority
    the first block of a copy would wait for the last of such a kernel."""

    def __init__(self, device: torch.device, *, is_urgent: bool) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            priority = _URGENT if is_urgent else 0
            self._stream = torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]
        self._free: list[PieceTable] = []

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Make torch queue work here."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def run(self, work: Callable[[], object]) -> None:
        """Queue what `work` does, inside of `working`."""
        work()

    def mark(self) -> Mark:
        """Return the point at which all is done that is queued so far."""
        if self._stream is None:
            return _PASSED
        return _EventMark(self._stream)

    def take(self, num_pieces: int) -> PieceTable:
        """Return a table for so many pieces that nothing uses."""
        for place, table in enumerate(self._free):
            if table.capacity >= num_pieces:
                return self._free.pop(place)
        capacity = max(_LEAST_PIECES, 1 << (num_pieces - 1).bit_length())
        return PieceTable(capacity, self._device)

    def give_back(self, table: PieceTable) -> None:
        """Take back a table whose copies are done and whose sums are read."""
        self._free.append(table)


class _Passed:
    event = None

    def wait(self) -> None:
        pass


class _EventMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Its waiter takes no core.
        self.event: torch.cuda.Event | None = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        assert self.event is not None
        self.event.synchronize()


_PASSED = _Passed()
