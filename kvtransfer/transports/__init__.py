"""The transports by name. Their modules are loaded when first used: some need torch or NIXL."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Literal, NamedTuple, cast

from kvtransfer.errors import PathError
from kvtransfer.transfer_orders import Lane
from kvtransfer.transports.base import Channel, Listener, TargetRank, WriterRank

Connect = Callable[[WriterRank, Lane, str, bytes, Callable[[str], None]], Channel]
Listen = Callable[[TargetRank], Listener | None]


class Transport(NamedTuple):
    """Where a transport lives and between which ranks it can work. `device` is the kind of memory that the
    pools must lie in ("": any), `same_host` limits it to ranks that can share memory."""

    name: str
    module: str
    same_host: bool
    device: Literal["cpu", "cuda", ""]

    def unsuited(self, device: str, is_same_host: bool) -> str:
        """Return why the transport cannot work, by its nature, from a pool on `device` ("cpu", "cuda:0"); ""
        when it can."""
        if self.device and not device.startswith(self.device):
            return f"not for KV on {device}"
        if self.same_host and not is_same_host:
            return "another host"
        return ""

    def listen(self, target: TargetRank) -> Listener:
        """Listen for writers of the rank; the text of `PathError` gives the reason why it cannot be reached
        this way."""
        unsuited = self.unsuited(target.device, is_same_host=True)
        if unsuited:
            raise PathError(unsuited)
        try:
            listener = cast(Listen, self._load().listen)(target)
        except OSError as error:
            raise PathError(str(error)) from error
        if listener is None:
            raise PathError("not possible here")
        return listener

    def connect(
        self,
        rank: WriterRank,
        lane: Lane,
        address: str,
        connection_id: bytes,
        on_lost: Callable[[str], None],
    ) -> Channel:
        """Open a channel; the text of `TransferError` gives the reason of a failure."""
        return cast(Connect, self._load().connect)(rank, lane, address, connection_id, on_lost)

    def _load(self) -> ModuleType:
        try:
            return importlib.import_module(f"{__name__}.{self.module}")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith(__name__.partition(".")[0]):
                raise
            raise PathError(f"needs {error.name}, which is not installed") from error


TRANSPORTS: dict[str, Transport] = {
    transport.name: transport
    for transport in (
        Transport("cuda_ipc", "cuda_ipc", same_host=True, device="cuda"),
        Transport("shm", "shm", same_host=True, device="cpu"),
        Transport("nccl", "nccl", same_host=False, device="cuda"),
        Transport("gloo", "gloo", same_host=False, device="cpu"),
        Transport("rdma", "rdma", same_host=False, device=""),
        Transport("tcp", "tcp", same_host=False, device=""),
    )
}
