"""Communicators of exactly two processes, whatever carries the bytes: `gloo` and `nccl` say what does.

Each is built directly on a store of its own, which the target opens on the address that the cluster uses
for KV. `init_process_group` and `new_group` would need every process of a fixed world; pairs come and go.
What hangs is ended by `abort`, never by a timeout: how long a peer may be silent is not decided here.
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from kvtransfer.errors import PathError, PeerGoneError
from kvtransfer.transports.tcp import family

# A pair that has not formed after this is given up.
FORM_TIMEOUT_S = 20.0
# A pair whose other side has not come to the store after this is given up, too.
STORE_TIMEOUT = timedelta(seconds=10)
ENDLESS = timedelta(days=365)

TARGET, WRITER = 0, 1


class PairWork(Protocol):
    """A message under way; torch calls it `Work`."""

    def is_completed(self) -> bool: ...
    def wait(self, timeout: timedelta = ...) -> bool: ...


class Group(Protocol):
    """The part of torch's process groups that pairs use."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> PairWork: ...
    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> PairWork: ...
    def abort(self) -> None: ...


class PairGroup(ABC):
    """Messages arrive in the order of their start. `abort` may come from any thread, the rest from one."""

    backend: str

    def __init__(self, group: Group, rank: int) -> None:
        self._group = group
        self._peer = 1 - rank
        self._lock = threading.Lock()
        self._aborted = threading.Event()
        self._aborter = threading.Thread(target=self._abort, name=f"{self.backend}-abort", daemon=True)

    @classmethod
    @abstractmethod
    def is_possible(cls, device: str) -> bool:
        """Whether memory of `device` ("cpu", "cuda:0") can be sent from here."""

    @classmethod
    @abstractmethod
    def form(cls, store: Store, rank: int, device: str, address: str) -> PairGroup:
        """Form the group; return when both sides have come; `RuntimeError` when that fails. `address` is this
        side's."""

    def start_send(self, data: torch.Tensor, packed: torch.cuda.Event | None = None) -> PairWork:
        """Queue a message (uint8 [num_bytes] on the device), behind the event if there is one; `data` is in
        use until `wait` returns. `PeerGoneError` when it cannot be queued."""
        if packed is not None:
            try:
                self._wait_for(packed)
            except RuntimeError as error:
                raise self._gone(error) from error
        return self._start(data, is_send=True)

    def start_receive(self, data: torch.Tensor) -> PairWork:
        """Queue the receipt of a message of exactly the size of `data`. `PeerGoneError` when it cannot be
        queued."""
        return self._start(data, is_send=False)

    @abstractmethod
    def wait(self, work: PairWork) -> None:
        """Return when it is done; `PeerGoneError` when the peer or the device failed or this side aborted."""

    def abort(self) -> None:
        """End all waiting here, now and later; does not wait. Bytes may still arrive in the memory of a
        receipt that was not done."""
        with self._lock:
            if not self._aborted.is_set():
                self._aborted.set()
                self._aborter.start()

    def close(self, timeout_s: float) -> bool:
        """Release the connection and torch's threads, after `abort`, when no thread waits any more. False,
        and nothing is released, when the abort itself hangs."""
        self._aborter.join(timeout_s)
        if self._aborter.is_alive():
            return False
        del self._group
        return True

    def _wait_for(self, event: torch.cuda.Event) -> None:
        """Queue what is started next behind an event of the device."""
        event.synchronize()

    @abstractmethod
    def _abort(self) -> None:
        """Make `wait` of any thread end; may take its time."""

    def _start(self, data: torch.Tensor, *, is_send: bool) -> PairWork:
        self._check()
        try:
            operation = self._group.send if is_send else self._group.recv
            return operation([data], self._peer, 0)
        except RuntimeError as error:
            raise self._gone(error) from error

    def _check(self) -> None:
        if self._aborted.is_set():
            raise PeerGoneError(f"{self.backend}: the pair was ended")

    def _gone(self, error: RuntimeError) -> PeerGoneError:
        return PeerGoneError(f"{self.backend}: {_first_line(error)}")


def open_store(host: str) -> tuple[Store, str]:
    """Return a store that listens on `host` alone, and its address. `PathError` when it cannot."""
    try:
        listening = socket.create_server((host, 0), family=family(host))
        port = listening.getsockname()[1]
        store = _store(host, port, listening.detach())
    except (OSError, RuntimeError) as error:
        raise PathError(f"no store on {host}: {error}") from error
    return store, f"{host}:{port}"


def form_pair(kind: type[PairGroup], store: Store | str, rank: int, device: str, address: str) -> PairGroup:
    """Form a pair on a store, or on the store at an address. `PathError` when the other side does not come
    or the two cannot reach each other, at last after `FORM_TIMEOUT_S`."""
    formed: list[PairGroup] = []
    failed: list[str] = []

    def form() -> None:
        try:
            formed.append(kind.form(_connected(store), rank, device, address))
        except (RuntimeError, ValueError) as error:
            failed.append(_first_line(error))

    # A thread of its own, since nothing ends a formation from outside when the peer stops in the middle.
    thread = threading.Thread(target=form, name=f"{kind.backend}-form", daemon=True)
    thread.start()
    thread.join(FORM_TIMEOUT_S)
    if not formed:
        reason = failed[0] if failed else f"no pair within {FORM_TIMEOUT_S:.0f} s"
        raise PathError(f"{kind.backend}: {reason}")
    return formed[0]


def _connected(store: Store | str) -> Store:
    if isinstance(store, str):
        host, _, port = store.rpartition(":")
        return _store(host, int(port), None)
    return store


def _store(host: str, port: int, listen_fd: int | None) -> Store:
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]  # there, but not in the stubs
        host,
        port,
        2,
        is_master=listen_fd is not None,
        timeout=STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )
    return store


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
