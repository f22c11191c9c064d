"""Sums and gathers over the ranks of a stage on GPUs of one host: small ones through memory that the ranks
have mapped of each other (`workers.model.cuda.one_shot_sums`), large ones by NCCL.

Ranks that share a card have no NCCL, which refuses them, and in deterministic mode more than two ranks do
not use it for sums, because it adds in an order that depends on the size: then large sums are exchanged in
parts. What has to be known to the host at once (`exchange`, and the counts of rows) goes through host
memory where there is no NCCL.

A rank that dies leaves the others' kernels waiting. Its socket ends, a thread sees that (`PeerWatch`) and
writes a word that the kernels read, and the rank's own thread finds the reason when the step's event has
passed (`check`), before it reports anything of the step. A rank that is stopped, so that its socket stays
open, is given up after about five minutes on the device; its engine core ends all ranks long before."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvtransfer.blocks.cuda_memory import view_memory
from workers.errors import RankDiedError
from workers.rank.peer_buffers import PeerBuffers
from workers.rank.peer_watch import PeerWatch

# Looks at a flag, each about a microsecond, after which a rank is given up.
_MOST_POLLS = 300_000_000


class StageGroup(Protocol):
    """The collectives of a stage's ranks by other means."""

    def all_reduce(self, tensor: Tensor) -> None: ...
    def exchange(self, parts: Sequence[Tensor], num_rows: Sequence[int] | None) -> list[Tensor]: ...
    def gather_columns(self, tensor: Tensor, widths: Sequence[int], parts: list[Tensor]) -> None: ...
    def agree(self, is_well: bool) -> bool: ...


class OneShotSums:
    """Exchanges of one rank on its device's current stream, in graphs, too. All ranks do the same ones."""

    def __init__(self, buffers: PeerBuffers, tp_rank: int, most_polls: int = _MOST_POLLS) -> None:
        # Here, since Triton is where CUDA is and need not be elsewhere.
        from workers.model.cuda import one_shot_sums

        self._kernels = one_shot_sums
        # The most that one exchange adds up.
        self.part_bytes = one_shot_sums.PART_BYTES
        self._buffers = buffers
        self.tp_rank = tp_rank
        self._tp = len(buffers.bases)
        self._most_polls = most_polls
        is_cuda = buffers.own.is_cuda
        self._host_control = torch.zeros(one_shot_sums.NUM_CONTROLS, dtype=torch.int32, pin_memory=is_cuda)
        self._control = self._host_control
        if is_cuda:
            view = view_memory(self._host_control.data_ptr(), self._host_control.nbytes)
            self._control = view.view(torch.int32)
        self._words = self._host_control.numpy()
        self._ended_rank: int | None = None

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by the sum, added in the order of ranks."""
        flat = tensor.view(-1)
        for part in torch.split(flat, self.part_bytes // flat.element_size()):
            self._exchange(part, part, gathers=False)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the contiguous tensors of all ranks, of one size, as [tp, num_elements]."""
        flat = tensor.view(-1)
        gathered = flat.new_empty((self._tp, len(flat)))
        size = self.part_bytes // flat.element_size()
        if len(flat) <= size:
            self._exchange(flat, gathered, gathers=True)
            return gathered
        for start in range(0, len(flat), size):
            part = flat[start : start + size]
            parts = part.new_empty((self._tp, len(part)))
            self._exchange(part, parts, gathers=True)
            gathered[:, start : start + size] = parts
        return gathered

    def end(self, tp_rank: int) -> None:
        """Let nothing wait any more, because a rank has ended. Any thread may call this."""
        self._ended_rank = tp_rank if self._ended_rank is None else self._ended_rank
        self._words[self._kernels.ENDED] = 1

    def check(self) -> None:
        """Raise `RankDiedError` if an exchange that the device has done was given up."""
        reason = int(self._words[self._kernels.REASON])
        if reason == self._kernels.PEER_ENDED:
            raise RankDiedError(
                f"summing over a stage's ranks: rank {self._ended_rank} of the stage has ended"
            )
        if reason:
            raise RankDiedError("summing over a stage's ranks: a rank of the stage did not come")

    def close(self) -> None:
        """Unmap the buffers, when the device has ended what is queued."""
        self._words[self._kernels.ENDED] = 1
        if self._buffers.own.is_cuda:
            torch.cuda.synchronize(self._buffers.own.device)
        self._buffers.close()

    def _exchange(self, own: Tensor, result: Tensor, *, gathers: bool) -> None:
        if len(own):
            self._kernels.exchange(
                own,
                result,
                self._buffers.bases,
                self.tp_rank,
                self._control,
                self._most_polls,
                gathers=gathers,
            )


class OneShotGroup:
    """The collectives of a stage whose ranks have mapped each other's buffers."""

    def __init__(
        self,
        sums: OneShotSums,
        large: StageGroup | None,
        host: StageGroup,
        sockets: Mapping[int, socket.socket],
        *,
        is_ordered: bool,
    ) -> None:
        """`large` is NCCL (None: it cannot serve), `host` what moves tensors of host memory. `sockets` lead
        to the other ranks. With `is_ordered` all sums are added in the order of ranks."""
        self._sums = sums
        # What adds up more than one exchange does.
        self.large = large
        self._host = host
        self.is_ordered = is_ordered or large is None
        self._watch = PeerWatch(sockets, sums.end)

    def all_reduce(self, tensor: Tensor) -> None:
        if self.large is None or self.is_ordered or tensor.nbytes <= self._sums.part_bytes:
            self._sums.all_reduce(tensor)
        else:
            self.large.all_reduce(tensor)

    def broadcast(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor of integers by that of the first rank."""
        assert not tensor.is_floating_point()
        if self._sums.tp_rank > 0:
            tensor.zero_()
        self._sums.all_reduce(tensor)

    def exchange(self, parts: Sequence[Tensor], num_rows: Sequence[int] | None) -> list[Tensor]:
        if self.large is not None:
            return self.large.exchange(parts, num_rows)
        device = parts[0].device
        received = self._host.exchange([part.cpu() for part in parts], num_rows)
        return [part.to(device) for part in received]

    def gather_columns(self, tensor: Tensor, widths: Sequence[int], parts: list[Tensor]) -> None:
        if self.large is not None:
            self.large.gather_columns(tensor, widths, parts)
            return
        padded = tensor
        if len(set(widths)) > 1:
            padded = torch.nn.functional.pad(tensor, (0, max(widths) - tensor.shape[1]))
        gathered = self._sums.gather(padded.contiguous()).view(len(widths), *padded.shape)
        for rank, part in enumerate(parts, start=1):
            part.copy_(gathered[rank, :, : widths[rank]])

    def agree(self, is_well: bool) -> bool:
        agreed = self._host.agree(is_well)
        self.check()
        return agreed

    def check(self) -> None:
        """Raise `RankDiedError` if a sum that the device has done was given up."""
        self._sums.check()

    def close(self) -> None:
        """Leave the other ranks."""
        self._watch.close()
        self._sums.close()
