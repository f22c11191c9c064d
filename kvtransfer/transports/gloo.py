"""Pairs in host memory, over TCP sockets of gloo's own: the code of `nccl` where there is no CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from kvtransfer.messages import Lane
from kvtransfer.transports.base import TargetRank, WriterRank
from kvtransfer.transports.pair import (
    ENDLESS,
    STORE_TIMEOUT,
    PairChannel,
    PairGroup,
    PairListener,
    PairWork,
    connect_pair,
)

_BREAK_TAG = 1
_BREAK_AFTER = timedelta(milliseconds=1)


class GlooPair(PairGroup):
    """One TCP connection, served by threads of gloo's own."""

    backend: ClassVar[str] = "gloo"

    @classmethod
    def is_possible(cls, device: str) -> bool:
        return device == "cpu" and dist.is_gloo_available()

    @classmethod
    def form(cls, store: Store, rank: int, device: str, address: str) -> GlooPair:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = STORE_TIMEOUT
        group = dist.ProcessGroupGloo(store, rank, 2, options)
        return cls(group, rank)  # type: ignore[arg-type]  # the stubs lack send and recv

    def wait(self, work: PairWork) -> None:
        try:
            work.wait(ENDLESS)
        except RuntimeError as error:
            raise self._gone(error) from error

    def _abort(self) -> None:
        # gloo's own `abort` does nothing. A receipt that times out closes the connection, which ends every
        # other operation on it; nothing is ever sent with this tag.
        with contextlib.suppress(RuntimeError):
            self._group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _BREAK_TAG).wait(_BREAK_AFTER)


class GlooListener(PairListener):
    transport: ClassVar[str] = "gloo"
    kind = GlooPair


class GlooChannel(PairChannel):
    transport: ClassVar[str] = "gloo"
    kind = GlooPair


def listen(target: TargetRank) -> GlooListener | None:
    """A listener, or None for a pool that is not in host memory."""
    return GlooListener(target) if GlooPair.is_possible(target.pool.device) else None


def connect(
    rank: WriterRank, lane: Lane, address: str, connection_id: bytes, on_lost: Callable[[str], None]
) -> PairChannel:
    """Open a channel; `TransferError` says why it could not be."""
    return connect_pair(GlooChannel, rank, lane, address, connection_id, on_lost)
