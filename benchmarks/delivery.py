"""Ways to bring a frame from one process to several on this host, for `benchmarks.parallel`.

A `Sender` is made by the process that sends, and gives each receiver an order (plain data) from which it
makes its `Receiver`. Both block.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]  # the stubs lack one
from torch.distributed.distributed_c10d import PrefixStore

from kvtransfer.rpc.handshake import receive_frame, send_frame

_TIMEOUT = timedelta(minutes=2)
_SLOT_BYTES = 1 << 16
# Far more than the plans that a receiver may be behind: the sender never waits.
_NUM_SLOTS = 256
_HEADER = struct.Struct("<Q")


class Sender(ABC):
    """Sends every frame to all receivers."""

    def orders(self) -> list[dict[str, Any]]:
        """Return, for each receiver, what `receiver` needs."""
        return []

    def inherited(self) -> tuple[int, ...]:
        """Return the file descriptors that the receivers' processes must have."""
        return ()

    @abstractmethod
    def ready(self) -> None:
        """Wait until all receivers are there."""

    @abstractmethod
    def send(self, frame: bytes) -> None:
        """Send a frame; the call may return before the frame is received."""


class Receiver(ABC):
    """The other end of a `Sender`."""

    @abstractmethod
    def receive(self) -> bytes:
        """Wait for the next frame."""


class SocketSender(Sender):
    """One stream socket a receiver, TCP on loopback or unix."""

    def __init__(self, kind: str, num_receivers: int) -> None:
        self._kind = kind
        self._num_receivers = num_receivers
        self._folder = tempfile.TemporaryDirectory()
        if kind == "tcp":
            self._server = socket.create_server(("127.0.0.1", 0))
        else:
            self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._server.bind(str(Path(self._folder.name) / "plans"))
            self._server.listen()
        self._connections: list[socket.socket] = []

    def orders(self) -> list[dict[str, Any]]:
        order = {"how": self._kind, "address": self._server.getsockname()}
        return [order] * self._num_receivers

    def ready(self) -> None:
        for _ in range(self._num_receivers):
            connection, _ = self._server.accept()
            if self._kind == "tcp":
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.append(connection)

    def send(self, frame: bytes) -> None:
        for connection in self._connections:
            send_frame(connection, frame)


class _SocketReceiver(Receiver):
    def __init__(self, order: dict[str, Any]) -> None:
        if order["how"] == "tcp":
            self._socket = socket.create_connection(tuple(order["address"]))
        else:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.connect(order["address"])

    def receive(self) -> bytes:
        return receive_frame(self._socket)


class RingSender(Sender):
    """A ring of slots in shared memory, written once for all. A receiver spins on the count of frames, or
    sleeps on an event of its own."""

    def __init__(self, num_receivers: int, *, spins: bool) -> None:
        self._memory_fd = os.memfd_create("plans")
        os.ftruncate(self._memory_fd, _HEADER.size + _NUM_SLOTS * _SLOT_BYTES)
        self._memory = mmap.mmap(self._memory_fd, 0)
        self._num_receivers = num_receivers
        self._events = [] if spins else [os.eventfd(0) for _ in range(num_receivers)]
        self._num_frames = 0

    def orders(self) -> list[dict[str, Any]]:
        events = self._events or [-1] * self._num_receivers
        return [{"how": "ring", "memory": self._memory_fd, "event": event} for event in events]

    def inherited(self) -> tuple[int, ...]:
        return (self._memory_fd, *self._events)

    def ready(self) -> None:
        """Return at once: written frames stay, so there is no receiver to wait for."""

    def send(self, frame: bytes) -> None:
        at = _HEADER.size + self._num_frames % _NUM_SLOTS * _SLOT_BYTES
        self._memory[at : at + _HEADER.size + len(frame)] = _HEADER.pack(len(frame)) + frame
        self._num_frames += 1
        self._memory[: _HEADER.size] = _HEADER.pack(self._num_frames)
        for event in self._events:
            os.eventfd_write(event, 1)


class _RingReceiver(Receiver):
    def __init__(self, order: dict[str, Any]) -> None:
        self._memory = mmap.mmap(order["memory"], 0)
        self._event: int = order["event"]
        self._num_frames = 0

    def receive(self) -> bytes:
        while _HEADER.unpack_from(self._memory)[0] == self._num_frames:
            if self._event >= 0:
                os.eventfd_read(self._event)
            else:
                os.sched_yield()
        at = _HEADER.size + self._num_frames % _NUM_SLOTS * _SLOT_BYTES
        self._num_frames += 1
        (length,) = _HEADER.unpack_from(self._memory, at)
        return self._memory[at + _HEADER.size : at + _HEADER.size + length]


class BroadcastSender(Sender):
    """gloo's broadcast in a group of sender and receivers. Every frame has `num_bytes`, known to all: of any
    other length it would take two."""

    def __init__(self, num_receivers: int, num_bytes: int) -> None:
        self._store = open_store()
        self._num_receivers = num_receivers
        self._num_bytes = num_bytes

    def orders(self) -> list[dict[str, Any]]:
        common = {"how": "gloo", "port": self._store.port, "size": self._num_receivers + 1}
        return [{**common, "rank": 1 + at, "bytes": self._num_bytes} for at in range(self._num_receivers)]

    def ready(self) -> None:
        self._group = gloo_group(self._store, "plans", 0, self._num_receivers + 1)

    def send(self, frame: bytes) -> None:
        self._group.broadcast(torch.frombuffer(bytearray(frame), dtype=torch.uint8), 0).wait()


class _BroadcastReceiver(Receiver):
    def __init__(self, order: dict[str, Any]) -> None:
        self._group = gloo_group(find_store(order["port"]), "plans", order["rank"], order["size"])
        self._frame = torch.empty(order["bytes"], dtype=torch.uint8)

    def receive(self) -> bytes:
        self._group.broadcast(self._frame, 0).wait()
        return self._frame.numpy().tobytes()


def receiver(order: dict[str, Any]) -> Receiver:
    """Return the end of a sender that gave this order."""
    kinds = {"ring": _RingReceiver, "gloo": _BroadcastReceiver}
    return kinds.get(order["how"], _SocketReceiver)(order)


def open_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, _TIMEOUT, False)


def find_store(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, False, _TIMEOUT, False)


def gloo_group(store: TCPStore, name: str, rank: int, size: int) -> Any:
    """Return a group like those of a replica's ranks."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the type stubs lack it
    options._timeout = _TIMEOUT
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads = 1
    return ProcessGroupGloo(PrefixStore(name, store), rank, size, options)
