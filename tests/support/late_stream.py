"""A stream whose work is done late: when it is awaited and not before, so that what is queued too early, read
too early or used again too early shows on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvtransfer.blocks.copy_stream import CopyStream, Mark


class LateStream(CopyStream):
    """Does its work in the first `wait` for a mark behind it. `fails_at` is the number of the work, counted
    over all streams, that fails as a device does: nothing queued after it is done."""

    made: list[LateStream] = []
    num_done = 0
    fails_at = -1

    def __init__(self, device: torch.device, *, is_urgent: bool) -> None:
        super().__init__(device, is_urgent=is_urgent)
        self.is_urgent = is_urgent
        self.num_queued = 0
        self._queued: list[Callable[[], object]] = []
        self._is_broken = False
        LateStream.made.append(self)

    @classmethod
    def forget(cls, fails_at: int = -1) -> None:
        """Begin a test."""
        cls.made, cls.num_done, cls.fails_at = [], 0, fails_at

    def run(self, work: Callable[[], object]) -> None:
        self.num_queued += 1
        self._queued.append(work)

    def mark(self) -> Mark:
        return _LateMark(self, self.num_queued)

    def catch_up(self, num_queued: int) -> None:
        """Do the work up to a point."""
        while len(self._queued) > self.num_queued - num_queued and not self._is_broken:
            if LateStream.num_done == LateStream.fails_at:
                self._is_broken = True
                break
            LateStream.num_done += 1
            with torch.inference_mode():
                self._queued.pop(0)()
        if self._is_broken:
            raise RuntimeError("an illegal memory access was encountered")


class _LateMark:
    event = None

    def __init__(self, stream: LateStream, num_queued: int) -> None:
        self._stream = stream
        self._num_queued = num_queued

    def wait(self) -> None:
        self._stream.catch_up(self._num_queued)
