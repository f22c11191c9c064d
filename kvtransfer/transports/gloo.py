"""Pairs in host memory, over TCP sockets of gloo's own: the code of `nccl` where there is no CUDA."""

from __future__ import annotations

import contextlib
import functools
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from kvtransfer.transports.pair import connect_pair, listen_pair
from kvtransfer.transports.pair_group import ENDLESS, STORE_TIMEOUT, PairGroup, PairWork

_BREAK_TAG = 1
_BREAK_AFTER = timedelta(milliseconds=1)


class GlooPair(PairGroup):
    """One TCP connection, served by threads of gloo's own."""

    backend = "gloo"

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


listen = functools.partial(listen_pair, GlooPair)
connect = functools.partial(connect_pair, GlooPair)
