"""Pairs between CUDA devices, over whatever NCCL finds between them. Not yet validated between two devices.

NCCL chooses the network interface by its own settings (`NCCL_SOCKET_IFNAME`), and refuses two ranks that
share one device.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from kvtransfer.transports.pair import connect_pair, listen_pair
from kvtransfer.transports.pair_group import ENDLESS, Group, PairGroup, PairWork

_POLL_S = 0.00005
# Left to itself, torch's watchdog ends the process when a peer fails or is silent.
_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_environment = threading.Lock()


class NcclPair(PairGroup):
    """Works on a stream of its own."""

    backend = "nccl"

    def __init__(self, group: Group, rank: int, device: torch.device) -> None:
        super().__init__(group, rank)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @classmethod
    def is_possible(cls, device: str) -> bool:
        return device.startswith("cuda") and dist.is_nccl_available()

    @classmethod
    def form(cls, store: Store, rank: int, device: str, address: str) -> NcclPair:
        cuda = torch.device(device)
        return cls(make_group(store, rank, 2, cuda), rank, cuda)

    def wait(self, work: PairWork) -> None:
        """Wait for the work. A failure that NCCL sees first counts as done here: the bytes then have wrong
        sums, and the end of the peer's control connection follows."""
        try:
            while not work.is_completed() and not self._aborted.wait(_POLL_S):
                pass
        except RuntimeError as error:  # of the device
            raise self._gone(error) from error
        self._check()  # NCCL completes what it aborts

    def _wait_for(self, event: torch.cuda.Event) -> None:
        self._stream.wait_event(event)

    def _start(self, data: torch.Tensor, *, is_send: bool) -> PairWork:
        with torch.cuda.stream(self._stream):
            return super()._start(data, is_send=is_send)

    def _abort(self) -> None:
        with contextlib.suppress(RuntimeError):  # it had failed already
            self._group.abort()


listen = functools.partial(listen_pair, NcclPair)
connect = functools.partial(connect_pair, NcclPair)


def make_group(store: Store, rank: int, size: int, device: torch.device) -> Any:
    """Return a process group, already connected, that leaves failures and hangs to its user."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = ENDLESS
    torch.cuda.set_device(device)  # of this thread
    with _settings():
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Set the variables that torch reads when a group is made; the rank's other groups keep theirs."""
    with _environment:
        before = {name: os.environ.get(name) for name in _SETTINGS}
        os.environ.update(_SETTINGS)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
