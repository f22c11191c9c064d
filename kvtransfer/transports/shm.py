"""Shared memory of one host: the writer maps the target's pool and copies blocks straight into place.

The target listens on a unix socket of the abstract namespace (no file) under a random name. A writer that
has proven the secret gets the pool's memfd over it and maps it; the socket then stays open for as long as
the mapping lives, and that is the fence. When the target sees the socket's end, the writer cannot write:

- An orderly writer unmaps first and closes the socket after.
- For a killed one the kernel does: every thread of a dying process gives up its memory (`exit_mm`) before
  its files (`exit_files`), and the socket is a file, closed when the last thread has given it up.

A stopped (SIGSTOP) or hung writer still has its mapping: its socket stays open, and the gate counts it.
The target closing its own end proves nothing, so it never counts a writer as gone by that. A child that a
writer forks inherits mapping and socket together, so it only delays the proof; `exec` ends both.

Before its first byte for a landing the writer asks (`Begin`), so a push that comes late for a landing that
is closed is refused, also one-sided.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import PathError, PeerGoneError, TransferError, WireError
from kvtransfer.framing import HANDSHAKE_TIMEOUT_S, receive_frame, send_frame
from kvtransfer.gate import RecentIds
from kvtransfer.memory import map_shared, mapping_bytes, scratch_offset
from kvtransfer.messages import RankEndpoints
from kvtransfer.transports.base import (
    ACK_CODEC,
    Ack,
    Channel,
    ChannelHello,
    Listener,
    Stopped,
    TargetRank,
    WriterRank,
    greet,
    target_layout,
)
from kvtransfer.wire import Codec, Message

_FD_MARK = b"F"
_MAX_BEGUN = 4096


class Begin(Message, frozen=True):
    """Writer to target: may this landing be written? Refused ones are named in the Ack."""

    landing_id: bytes


class Sync(Message, frozen=True):
    """Writer to target: answer."""


_REQUEST_CODEC: Codec[Begin | Sync] = Codec(Begin | Sync)


class ShmListener(Listener):
    """Hands the pool's descriptor to proven writers and admits them landing by landing."""

    transport: ClassVar[str] = "shm"

    def __init__(self, target: TargetRank) -> None:
        name = f"tandem-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(f"\0{name}")
        sock.listen()
        super().__init__(target, sock, name)

    def _serve(self, sock: socket.socket, hello: ChannelHello) -> None:
        connection = self._target.gate.enter(hello.writer)
        try:
            send_frame(sock, self._welcome())
            socket.send_fds(sock, [_FD_MARK], [self._target.memory.fd])
            self._answer(sock, connection)
        finally:
            _await_end(sock)
            if not self._closing.is_set():
                self._target.gate.leave(connection)

    def _answer(self, sock: socket.socket, connection: bytes) -> None:
        num_done = 0
        while True:
            try:
                request = _REQUEST_CODEC.decode(receive_frame(sock))
            except PeerGoneError:
                return
            refused: tuple[bytes, ...] = ()
            if isinstance(request, Begin) and not self._target.gate.admit(request.landing_id, connection):
                refused = (request.landing_id,)
            num_done += 1
            send_frame(sock, ACK_CODEC.encode(Ack(num_done, refused)))


class ShmChannel(Channel):
    """The target's pool, mapped here."""

    transport: ClassVar[str] = "shm"

    def __init__(
        self,
        sock: socket.socket,
        rank: WriterRank,
        target: RankEndpoints,
        mapping: mmap.mmap,
        num_bytes: int,
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__(sock, rank, target_layout(rank, target.shard), on_lost)
        self._mapping = mapping
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        self._num_blocks = num_bytes // self._target.block_bytes
        self._scratch_offset = scratch_offset(num_bytes)
        self._begun = RecentIds(_MAX_BEGUN)
        self._reader.start()

    def begin(self, landing_id: bytes, stopped: Stopped) -> None:
        self.check()
        if landing_id not in self._begun:
            self._ask(lambda _: self._send(Begin(landing_id)), stopped)
            self._check_accepted(landing_id)
            self._begun.add(landing_id)

    def write(
        self,
        landing_id: bytes,
        dst_block: int,
        source: memoryview,
        half: Callable[[], None],
        stopped: Stopped,
    ) -> None:
        self.check()
        if not 0 <= dst_block < self._num_blocks:
            raise PathError(f"block {dst_block} is outside the target's pool of {self._num_blocks} blocks")
        assert landing_id in self._begun
        source_bytes = np.frombuffer(source, dtype=np.uint8)
        base = dst_block * self._target.block_bytes
        for number, runs in enumerate(self._halves):
            if number:
                half()
            for src, dst, count in runs:
                # numpy gives up the GIL while it copies; a memoryview's slice assignment does not.
                np.copyto(
                    self._bytes[base + dst : base + dst + count],
                    source_bytes[src : src + count],
                )

    def close(self) -> None:
        """Unmap, then close the socket: its end tells the target that nothing can be written."""
        self.interrupt()
        self._bytes = np.empty(0, dtype=np.uint8)
        self._mapping.close()
        super().close()

    def flush(self, landing_id: bytes, stopped: Stopped) -> None:
        """Nothing to wait for: stores are visible when made."""
        self.check()

    def _request_ack(self, stopped: Stopped) -> None:
        self._send(Sync())

    def _send(self, request: Begin | Sync) -> None:
        send_frame(self._sock, _REQUEST_CODEC.encode(request))

    def _write_scratch(self, source: memoryview, stopped: Stopped) -> None:
        start = self._scratch_offset
        np.copyto(self._bytes[start : start + len(source)], np.frombuffer(source, dtype=np.uint8))


def listen(target: TargetRank) -> ShmListener | None:
    """A listener, or None where the pool's memory cannot be shared."""
    return ShmListener(target) if target.memory.fd >= 0 else None


def connect(
    rank: WriterRank,
    target: RankEndpoints,
    address: str,
    connection_id: bytes,
    on_lost: Callable[[str], None],
) -> ShmChannel:
    """Open a channel; `TransferError` says why it could not be."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        sock.connect(f"\0{address}")
        welcome = greet(sock, rank, connection_id)
        mapping = _receive_mapping(sock, welcome.num_bytes)
        return ShmChannel(sock, rank, target, mapping, welcome.num_bytes, on_lost)
    except OSError as error:
        sock.close()
        raise PathError(f"shm {address}: {error}") from error
    except TransferError:
        sock.close()
        raise


def _receive_mapping(sock: socket.socket, num_bytes: int) -> mmap.mmap:
    """Map the pool of `num_bytes` whose descriptor comes next; the descriptor itself is closed again."""
    mark, descriptors, _, _ = socket.recv_fds(sock, len(_FD_MARK), 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise WireError("the target sent no descriptor")
    try:
        total_bytes = mapping_bytes(num_bytes)
        if mark != _FD_MARK or os.fstat(descriptors[0]).st_size != total_bytes:
            raise WireError(f"the descriptor is not a pool of {num_bytes} bytes")
        return map_shared(descriptors[0], total_bytes)
    finally:
        os.close(descriptors[0])


def _await_end(sock: socket.socket) -> None:
    """Return when the writer's end is closed, whatever else it still sends; tell it that we are done."""
    with contextlib.suppress(OSError):  # reset: the writer closed with our answers unread
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
