"""The collectives of a rank whose kernels are found while there are no other ranks
(`workers.rank.kernel_rehearsal`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.messages.rank_channel import RankSpec
from workers.rank.collectives import RankGroups
from workers.rank.one_shot_group import OneShotGroup, OneShotSums
from workers.rank.peer_buffers import PeerBuffers


class RehearsedGroups(RankGroups):
    """Launches the kernels by which a rank adds up with the others of a stage on GPUs of one host. It waits
    for none of them, and what it receives of them, or of another stage, is zero.

    No rank of several stages is the sampler: there the host samples, by no kernels of Triton, and reads
    logits, which the device "meta" does not have."""

    def __init__(self, spec: RankSpec, device: torch.device) -> None:
        super().__init__(None, tp=1, pp=1, rank=0, device=device, host="")
        self.tp, self.pp, self.rank = spec.tp, spec.pp, spec.rank
        self.stage, self.tp_rank = spec.stage, spec.tp_rank
        self.is_first_stage, self.is_last_stage = spec.stage == 0, spec.stage == spec.pp - 1
        self.is_sampler = spec.pp == 1 and spec.tp_rank == 0
        # The steps of which tokens are expected, and how many.
        self._expected: deque[tuple[int, int]] = deque()
        if spec.tp > 1:
            others = _NoRanks()
            self._layer_group = OneShotGroup(
                OneShotSums(_OwnBuffer(spec.tp, device), spec.tp_rank),
                others,
                others,
                {},
                is_ordered=spec.deterministic and spec.tp > 2,
            )

    def smallest(self, value: int) -> int:
        return value

    def exchange(self, parts: Sequence[Tensor], num_rows: Sequence[int] | None = None) -> list[Tensor]:
        """Return zeros in host memory, where they can be read."""
        assert num_rows is not None, "the rows of experts are not exchanged between GPUs"
        pairs = zip(parts, num_rows, strict=True)
        return [part.new_zeros((rows, part.shape[1]), device="cpu") for part, rows in pairs]

    def send_marks(self, marks: NDArray[np.uint8]) -> None: ...

    def receive_marks(self, num_entries: int) -> NDArray[np.uint8]:
        return np.ones(num_entries, np.uint8)

    def send_hidden(self, hidden: Tensor) -> None: ...

    def receive_hidden(self, into: Tensor) -> None:
        into.zero_()

    def expect_tokens(self, step: int, num_tokens: int) -> None:
        self._expected.append((step, num_tokens))

    def receive_tokens(self) -> tuple[int, NDArray[np.int64]]:
        step, num_tokens = self._expected.popleft()
        return step, np.zeros(num_tokens, np.int64)


class _OwnBuffer(PeerBuffers):
    """A buffer that stands for those of all ranks."""

    def __init__(self, tp: int, device: torch.device) -> None:
        from workers.model.cuda.one_shot_sums import buffer_bytes  # imports triton

        self.own = torch.zeros(buffer_bytes(tp), dtype=torch.uint8, device=device)
        self.bases = torch.full((tp,), self.own.data_ptr(), dtype=torch.int64, device=device)

    def close(self) -> None:
        """Nothing was mapped."""


class _NoRanks:
    """Stands for NCCL and gloo, which launch no kernels of Triton."""

    def all_reduce(self, tensor: Tensor) -> None: ...

    def exchange(self, parts: Sequence[Tensor], num_rows: Sequence[int] | None) -> list[Tensor]:
        raise AssertionError("what ranks exchange by rows is not rehearsed")

    def gather_columns(self, tensor: Tensor, widths: Sequence[int], parts: list[Tensor]) -> None: ...

    def agree(self, is_well: bool) -> bool:
        return is_well
