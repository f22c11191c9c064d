"""The place in its stage of a rank whose kernels are found while there are no other ranks
(`workers.rank.kernel_rehearsal`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from workers.messages.rank_channel import RankSpec
from workers.model.model_config import read_model_config
from workers.model.weights import ShardSpec
from workers.rank.collectives import RankGroups
from workers.rank.one_shot_group import OneShotGroup, OneShotSums
from workers.rank.peer_buffers import PeerBuffers


def rehearsed_place(spec: RankSpec, device: torch.device) -> tuple[ShardSpec, RankGroups]:
    """Return the part of the model that a rank of the only stage holds, and its collectives. Raises
    `CheckpointError`."""
    num_layers = read_model_config(Path(spec.model_dir)).num_layers
    shard = ShardSpec(0, num_layers, spec.tp_rank, spec.tp)
    if spec.tp == 1:
        return shard, RankGroups(None, tp=1, pp=1, rank=0, device=device, host="")
    groups = RehearsedGroups(spec.tp, spec.tp_rank, device, is_deterministic=spec.deterministic)
    return shard, groups


class RehearsedGroups(RankGroups):
    """Launches the kernels by which a rank adds up with the others of a stage on GPUs of one host. It waits
    for none of them, and receives nothing."""

    def __init__(self, tp: int, tp_rank: int, device: torch.device, *, is_deterministic: bool) -> None:
        super().__init__(None, tp=1, pp=1, rank=0, device=device, host="")
        self.tp, self.rank, self.tp_rank = tp, tp_rank, tp_rank
        self.is_sampler = tp_rank == 0
        others = _NoRanks()
        self._layer_group = OneShotGroup(
            OneShotSums(_OwnBuffer(tp, device), tp_rank),
            others,
            others,
            {},
            is_ordered=is_deterministic and tp > 2,
        )

    def smallest(self, value: int) -> int:
        return value


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
