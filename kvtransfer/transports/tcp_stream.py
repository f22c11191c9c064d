"""The two ends of one TCP connection of a lane: what a frame is, who puts its bytes where.

A frame is a header (kind, landing id, number of blocks, number of bytes), the block ids, then the packed
pieces of those blocks. Long runs go from the pool into the socket and from the socket into the pool,
uncopied; short ones, and pools on a device, are packed in staging memory.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable, Sequence

from kvtransfer.blocks.pool import HostPool, KvPool, piece_table
from kvtransfer.errors import PeerGoneError, WireError
from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.protocol.gate import Gate, OpenedLanding
from kvtransfer.rpc.handshake import receive_exactly, send_frame
from kvtransfer.rpc.tls_socket import TlsSocket
from kvtransfer.transfer_orders import BlockMove
from kvtransfer.transports.stream_sockets import (
    ACK_CODEC,
    STALLED_S,
    Ack,
    Connection,
    Stopped,
)

_HEADER = struct.Struct("<B16sIQ")
_BLOCKS, _SCRATCH, _SYNC = 1, 2, 3
_NO_LANDING = bytes(16)
FRAME_BYTES = 1 << 20
# Pieces whose runs are shorter on average are packed before they are sent, and unpacked after: at 2 KiB that
# is as fast as a vector of runs, from 4 KiB on slower. A sender over TLS packs all that are shorter than a
# frame, since each call encrypts one run.
_SHORT_RUN_BYTES = 4 << 10
_MAX_VECTORS = 512


class Packing:
    """The layout of a lane's pieces in one rank's pool: in place where that is worth it, else in staging
    memory."""

    def __init__(self, pool: KvPool, piece: Shard, *, min_run_bytes: int = _SHORT_RUN_BYTES) -> None:
        self.pool = pool
        self.piece = piece
        self.piece_bytes = pool.piece_bytes(piece)
        self.blocks_per_frame = max(1, FRAME_BYTES // self.piece_bytes)
        runs = piece_table(pool.layout, piece).runs
        self._spans = [(run.src_offset, run.src_offset + run.num_bytes) for run in runs]
        short = self.piece_bytes < min_run_bytes * len(runs)
        self._buffer = pool.memory.buffer if isinstance(pool, HostPool) and not short else None

    @property
    def in_place(self) -> bool:
        return self._buffer is not None

    def allocate_staging(self) -> memoryview:
        """Allocate memory for the packed pieces of a frame."""
        return self.pool.allocate_staging(self.blocks_per_frame * self.piece_bytes)

    def views(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Return the pieces' bytes where they lie, in the order in which they are sent."""
        assert self._buffer is not None
        starts = [block_id * self.pool.layout.block_bytes for block_id in block_ids]
        return [self._buffer[base + start : base + end] for base in starts for start, end in self._spans]


class StreamReceiver:
    """One connection's frames, until it ends."""

    def __init__(
        self,
        pool: KvPool,
        gate: Gate,
        sock: socket.socket,
        writer: ReplicaIdentity,
        piece: Shard,
        group: int = 0,
    ) -> None:
        """`pool` is that of the `group` of layers."""
        self._gate = gate
        self._group = group
        self._sock = sock
        self._writer = writer
        self._packing = Packing(pool, piece)
        self._staging = memoryview(b"") if self._packing.in_place else self._packing.allocate_staging()
        self._waste = memoryview(bytearray(FRAME_BYTES))
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._num_done = 0
        self._refused: list[bytes] = []

    def run(self) -> None:
        while True:
            kind, landing_id, num_blocks, num_bytes = _HEADER.unpack(
                receive_exactly(self._sock, _HEADER.size)
            )
            if kind == _BLOCKS:
                self._receive_blocks(landing_id, num_blocks, num_bytes)
            elif kind == _SCRATCH:
                self._drain(num_bytes)
            elif kind == _SYNC:
                self._num_done += 1
                send_frame(self._sock, ACK_CODEC.encode(Ack(self._num_done, tuple(self._refused))))
                self._refused.clear()
            else:
                raise WireError(f"no frame of kind {kind}")

    def _receive_blocks(self, landing_id: bytes, num_blocks: int, num_bytes: int) -> None:
        packing = self._packing
        if not 0 < num_blocks <= packing.blocks_per_frame or num_bytes != num_blocks * packing.piece_bytes:
            raise WireError(f"{num_blocks} pieces of {packing.piece_bytes} bytes in a frame of {num_bytes}")
        ids = struct.unpack(f"<{num_blocks}I", receive_exactly(self._sock, 4 * num_blocks))
        landing = self._gate.find(landing_id, self._writer)
        if landing is None or not landing.has_blocks(self._group, ids):
            self._drain(num_bytes)
            is_taken = False
        elif packing.in_place:
            is_taken = self._receive_in_place(landing, ids)
        else:
            is_taken = self._receive_packed(landing, ids, num_bytes)
        if not is_taken and landing_id not in self._refused:
            self._refused.append(landing_id)

    def _receive_in_place(self, landing: OpenedLanding, block_ids: Sequence[int]) -> bool:
        """Receive into the blocks while the landing is open; False when it was closed before the last
        byte."""
        views = self._packing.views(block_ids)
        while views:
            if not landing.start_receiving():
                self._drain(sum(len(view) for view in views))
                return False
            try:
                count = self._receive_some(views)
            finally:
                landing.end_receiving()
            if count == 0:
                self._readable.poll()
            _consume(views, count)
        return True

    def _receive_packed(self, landing: OpenedLanding, block_ids: Sequence[int], num_bytes: int) -> bool:
        staging = self._staging[:num_bytes]
        self._receive_all(staging)
        if not landing.start_receiving():
            return False
        try:
            self._packing.pool.scatter(block_ids, self._packing.piece, staging)
        finally:
            landing.end_receiving()
        return True

    def _drain(self, num_bytes: int) -> None:
        while num_bytes:
            count = min(num_bytes, len(self._waste))
            self._receive_all(self._waste[:count])
            num_bytes -= count

    def _receive_all(self, buffer: memoryview) -> None:
        views = [buffer]
        while views:
            count = self._receive_some(views)
            if count == 0:
                self._readable.poll()
            _consume(views, count)

    def _receive_some(self, views: list[memoryview]) -> int:
        """Take the bytes that have arrived, without waiting; 0: there are none. `PeerGoneError` at the
        end."""
        try:
            count, _, _, _ = self._sock.recvmsg_into(views[:_MAX_VECTORS], 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise PeerGoneError(f"connection lost while receiving: {error}") from error
        if count == 0:
            raise PeerGoneError("connection closed by the other side")
        return count


class StreamSender:
    """One connection's sending side, used by one thread at a time."""

    def __init__(self, connection: Connection, pool: KvPool, piece: Shard) -> None:
        self.connection = connection
        is_encrypted = isinstance(connection.sock, TlsSocket)
        self.packing = Packing(pool, piece, min_run_bytes=FRAME_BYTES if is_encrypted else _SHORT_RUN_BYTES)
        self._sock = connection.sock
        self._staging: memoryview | None = None
        self._writable = select.poll()
        self._writable.register(self._sock, select.POLLOUT)

    def send_blocks(self, landing_id: bytes, moves: Sequence[BlockMove], stopped: Stopped) -> list[int]:
        """Sum the pieces, which brings them into the cache, and send them."""
        packing = self.packing
        ids = [move.src_block for move in moves]
        header = self._header(landing_id, moves)
        if packing.in_place:
            sums = packing.pool.sums(ids, packing.piece)
            self.send([header, *packing.views(ids)], stopped)
            return sums
        sums, packed = self._pack(ids)
        self.send([header, packed], stopped)
        return sums

    def send_block(
        self, landing_id: bytes, move: BlockMove, corrupt: bool, half: Callable[[], object], stopped: Stopped
    ) -> int:
        """Send one block as `send_blocks` does, with `half` called in the middle of its bytes."""
        (checksum,), packed = self._pack([move.src_block])
        packed[0] ^= corrupt
        middle = len(packed) // 2
        self.send([self._header(landing_id, [move]), packed[:middle]], stopped)
        half()
        self.send([packed[middle:]], stopped)
        return checksum

    def send(self, views: list[memoryview], stopped: Stopped) -> None:
        """Send everything. A frame cannot be left half sent, so a push that is stopped while the target
        takes nothing costs the connection (`PeerGoneError`)."""
        while views:
            self.connection.check()
            try:
                count = self._sock.sendmsg(views[:_MAX_VECTORS], [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                count = 0
                if not self._writable.poll(STALLED_S * 1e3) and stopped():
                    reason = "given up: a push was stopped and the target took no bytes"
                    raise PeerGoneError(reason) from None
            except OSError as error:
                raise PeerGoneError(f"connection lost while sending: {error}") from error
            _consume(views, count)

    def send_scratch(self, source: memoryview, stopped: Stopped) -> None:
        header = _HEADER.pack(_SCRATCH, _NO_LANDING, 0, len(source))
        self.send([memoryview(header), source], stopped)

    def request_ack(self, stopped: Stopped) -> None:
        self.send([memoryview(_HEADER.pack(_SYNC, _NO_LANDING, 0, 0))], stopped)

    def _header(self, landing_id: bytes, moves: Sequence[BlockMove]) -> memoryview:
        num_bytes = len(moves) * self.packing.piece_bytes
        ids = struct.pack(f"<{len(moves)}I", *(move.dst_block for move in moves))
        return memoryview(_HEADER.pack(_BLOCKS, landing_id, len(moves), num_bytes) + ids)

    def _pack(self, block_ids: Sequence[int]) -> tuple[list[int], memoryview]:
        if self._staging is None:
            self._staging = self.packing.allocate_staging()
        sums = self.packing.pool.gather(block_ids, self.packing.piece, self._staging)
        return sums, self._staging[: len(block_ids) * self.packing.piece_bytes]


def _consume(views: list[memoryview], count: int) -> None:
    """Drop the first `count` bytes of the views."""
    num_whole = 0
    while num_whole < len(views) and count >= len(views[num_whole]):
        count -= len(views[num_whole])
        num_whole += 1
    del views[:num_whole]
    if count:
        views[0] = views[0][count:]


Task = Callable[[StreamSender], None]
