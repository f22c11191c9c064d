"""The buffers of a stage's ranks on GPUs of one host, each mapped by all others.

The ranks form them together, and either all have them or none: where one cannot export its memory, cannot map
that of another (no peer access), or has no native atomics there, all learn why. Buffers between the ranks of
one replica live as long as its ranks, so that nothing has to prove that a mapping has ended."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from kvtransfer.errors import PathError, TransferError
from kvtransfer.rpc.handshake import receive_frame, send_frame
from workers.errors import RankDiedError


class PeerDriver(Protocol):
    """The driver's calls for memory that processes share."""

    # The card of this process's device.
    bus_id: str

    def export(self, address: int) -> tuple[bytes, int]:
        """Return the handle of an allocation, and the offset of the address in it."""

    def map(self, handle: bytes) -> int:
        """Return the address here of another process's allocation."""

    def unmap(self, handle: bytes) -> None:
        """End one use of a mapping."""

    def check_atomics(self, bus_id: str) -> None:
        """Raise `PathError` if there are no native atomics to a card."""


class _Offer(msgspec.Struct, frozen=True):
    """A rank's buffer as another may map it; with an `error` there is none."""

    handle: bytes = b""
    offset: int = 0
    bus_id: str = ""
    error: str = ""


class PeerBuffers:
    """The rank's own buffer `own`, uint8 and zero at first, and `bases`, int64 [tp] on its device: the
    addresses here of all ranks' buffers."""

    def __init__(
        self, own: Tensor, bases: Sequence[int], driver: PeerDriver, handles: Sequence[bytes]
    ) -> None:
        self.own = own
        self.bases = torch.tensor(bases, dtype=torch.int64).to(own.device)
        self._driver = driver
        self._handles = list(handles)

    @staticmethod
    def form(
        driver: PeerDriver, sockets: Mapping[int, socket.socket], own: Tensor, tp_rank: int
    ) -> PeerBuffers | str:
        """Share this rank's buffer, which is zero, and map those of the other ranks, which do the same;
        proven `sockets` lead to them. Returns the reason if some rank cannot. Raises `RankDiedError` if one
        ends."""
        if own.is_cuda:
            torch.cuda.synchronize(own.device)  # it is zero before anyone maps it
        try:
            offer = _Offer(*driver.export(own.data_ptr()), driver.bus_id)
        except PathError as error:
            offer = _Offer(error=f"rank {tp_rank} of the stage: {error}")
        given = _exchanged(sockets, tp_rank, msgspec.json.encode(offer))
        offers = [msgspec.json.decode(each, type=_Offer) for each in given]
        handles: list[bytes] = []
        bases: list[int] = []
        error_text = next((each.error for each in offers if each.error), "")
        try:
            for rank, each in enumerate(offers if not error_text else ()):
                if rank == tp_rank:
                    bases.append(own.data_ptr())
                    continue
                driver.check_atomics(each.bus_id)
                bases.append(driver.map(each.handle) + each.offset)
                handles.append(each.handle)
        except PathError as error:
            error_text = f"rank {tp_rank} of the stage: {error}"
        errors = _exchanged(sockets, tp_rank, error_text.encode())
        found = next(filter(None, errors), b"").decode()
        if not found:
            return PeerBuffers(own, bases, driver, handles)
        for handle in handles:
            driver.unmap(handle)
        return found

    def close(self) -> None:
        """Unmap the others' buffers. Nothing may use them any more."""
        for handle in self._handles:
            self._driver.unmap(handle)
        self._handles = []


def _exchanged(sockets: Mapping[int, socket.socket], tp_rank: int, value: bytes) -> list[bytes]:
    """Send this rank's value to the others and return those of all ranks."""
    values = {tp_rank: value}
    try:
        for sock in sockets.values():
            send_frame(sock, value)
        for rank, sock in sockets.items():
            values[rank] = receive_frame(sock)
    except TransferError as error:
        raise RankDiedError(f"sharing memory with the stage's ranks: {error}") from error
    return [values[rank] for rank in range(len(values))]
