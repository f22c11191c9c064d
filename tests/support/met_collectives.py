"""The ranks of a stage as threads of one process, with collectives that meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

WAIT_S = 30.0


class Meeting:
    """Where the ranks of a stage, each in a thread, leave what they send."""

    def __init__(self, tp: int) -> None:
        self.tp = tp
        self.barrier = threading.Barrier(tp, timeout=WAIT_S)
        self.left: list[Any] = [None] * tp

    def meet(self, rank: int, sent: Any) -> list[Any]:
        self.left[rank] = sent
        self.barrier.wait()
        found = list(self.left)
        self.barrier.wait()
        return found


class MetCollectives:
    """The collectives of a rank that is a thread; `sent` are the bytes of each of its exchanges."""

    def __init__(self, meeting: Meeting, tp_rank: int) -> None:
        self._meeting = meeting
        self.tp, self.tp_rank, self.shares_memory = meeting.tp, tp_rank, True
        self.sent: list[int] = []

    def all_reduce(self, tensor: Tensor) -> None:
        parts = self._meeting.meet(self.tp_rank, tensor.clone())
        assert len({tuple(it.shape) for it in parts}) == 1
        tensor.copy_(torch.stack(parts).sum(0))

    def exchange(self, parts: Sequence[Tensor], num_rows: Sequence[int] | None = None) -> list[Tensor]:
        assert len(parts) == self.tp
        self.sent.append(sum(it.nbytes for rank, it in enumerate(parts) if rank != self.tp_rank))
        found = [theirs[self.tp_rank].clone() for theirs in self._meeting.meet(self.tp_rank, parts)]
        others = [rank for rank in range(self.tp) if rank != self.tp_rank]
        if num_rows is not None:
            assert [len(found[rank]) for rank in others] == [num_rows[rank] for rank in others]
        found[self.tp_rank] = parts[self.tp_rank]
        return found

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        parts = self._meeting.meet(self.tp_rank, tensor)
        return torch.cat(parts, 1) if self.tp_rank == 0 else None


def together(tp: int, act: Callable[[MetCollectives], Any]) -> list[Any]:
    """Run `act` for each rank, in a thread of its own; the results in the order of ranks."""
    meeting = Meeting(tp)

    def run(rank: int) -> Any:
        try:
            return act(MetCollectives(meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(tp) as threads:
        return list(threads.map(run, range(tp)))
