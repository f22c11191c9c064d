"""Device memory of one host: the writer maps the target's pool and copies pieces from device to device.

As in `shm` a writer that has proven the secret gets what it needs to map the pool over a unix socket. Here
the socket's end is no proof that the writer cannot write: copies run on the device, and a mapping lives until
the writer unmaps it or the driver takes its context down, which is when the process has given up its files.
So the target counts a writer as gone only

- when it has said so (`Unmapped`), after its last copy was done and its mapping closed, or
- when its process has exited, which the kernel reports through a pidfd of the process that connected: it is
  readable once every thread has ended and every file of the process, the driver's too, is closed.

A stopped writer has neither exited nor said so. Not yet run on devices: none was at hand.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import replace
from typing import NamedTuple

from kvtransfer.blocks.device_pool import DevicePool
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.pool import SCRATCH_BYTES
from kvtransfer.codec import Codec, Message
from kvtransfer.errors import PathError, PeerGoneError
from kvtransfer.messages import BlockMove, Lane, Shard
from kvtransfer.rpc.handshake import receive_frame, send_frame
from kvtransfer.rpc.listener import shut_down
from kvtransfer.transports.base import (
    ChannelHello,
    ChannelWelcome,
    Connection,
    Stopped,
    TargetRank,
    WriterRank,
    greet,
    opening,
)
from kvtransfer.transports.onesided import (
    REQUEST_CODEC,
    OneSidedChannel,
    OneSidedListener,
    Unmapped,
    connect_unix,
)

_SO_PEERPIDFD = 77
_CREDENTIALS = struct.Struct("3i")
_CLOSING_POLL_MS = 200
# Copied between two looks at `stopped`: under a millisecond between devices with a fast link.
_BATCH_BYTES = 64 << 20


_log = logging.getLogger(__name__)


class PoolOffer(Message, frozen=True):
    """Target to writer, after the welcome: the allocations that hold the pool and the scratch memory, and
    where in them these start."""

    pool_handle: bytes
    pool_offset: int
    scratch_handle: bytes
    scratch_offset: int


OFFER_CODEC: Codec[PoolOffer] = Codec(PoolOffer)


class CudaIpcListener(OneSidedListener):
    """Offers the handles of the pool, and knows which processes may have mapped it."""

    transport = "cuda_ipc"

    def __init__(self, target: TargetRank, pool: DevicePool, driver: CudaDriver) -> None:
        self._scratch = pool.tensor.new_empty(SCRATCH_BYTES)
        exported = driver.export(pool.tensor.data_ptr())
        scratch = driver.export(self._scratch.data_ptr())
        self._offered = PoolOffer(*exported, *scratch)
        super().__init__(target)

    def _offer(self, sock: socket.socket, hello: ChannelHello) -> None:
        send_frame(sock, OFFER_CODEC.encode(self._offered))

    def _serve(self, sock: socket.socket, hello: ChannelHello) -> None:
        process = peer_process(sock)
        connection = self._target.gate.enter(hello.writer)
        is_unmapped = False
        try:
            self._send_welcome(sock)
            self._offer(sock, hello)
            is_unmapped = self._answer(sock, connection)
        finally:
            if not is_unmapped:
                shut_down(sock)
                self._await_exit(process)
            os.close(process)
            if not self._closing.is_set():
                self._target.gate.leave(connection)

    def _await_exit(self, process: int) -> None:
        """Return when the process has exited, or this listener closes."""
        exited = select.poll()
        exited.register(process, select.POLLIN)
        while not exited.poll(_CLOSING_POLL_MS) and not self._closing.is_set():
            pass


class Mapped:
    """The target's memory in this process, and a stream to copy on."""

    def __init__(self, driver: CudaDriver, offer: PoolOffer) -> None:
        self.driver = driver
        with contextlib.ExitStack() as undo:
            self.stream = driver.create_stream()
            undo.callback(driver.destroy_stream, self.stream)
            self.pool = driver.map(offer.pool_handle) + offer.pool_offset
            undo.callback(driver.unmap, offer.pool_handle)
            self.scratch = driver.map(offer.scratch_handle) + offer.scratch_offset
            undo.callback(driver.unmap, offer.scratch_handle)
            self._undo = undo.pop_all()

    def copy(self, src: int, dst: int, grid: Grid) -> None:
        self.driver.copy(src, dst, grid, self.stream)

    def finish(self) -> None:
        """Return when every copy is done."""
        self.driver.synchronize(self.stream)

    def close(self) -> None:
        """Finish and unmap."""
        self.finish()
        self._undo.close()


class CudaIpcChannel(OneSidedChannel):
    """Copies from device to device; a write returns when they are done."""

    transport = "cuda_ipc"
    batch_bytes = _BATCH_BYTES

    def __init__(
        self,
        rank: WriterRank,
        pool: DevicePool,
        lane: Lane,
        connection: Connection,
        welcome: ChannelWelcome,
        mapped: Mapped,
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__(rank, lane, connection, welcome.num_blocks, pool.device, on_lost)
        self._mapped = mapped
        self._tensor = pool.tensor
        target = replace(pool.layout, shard=lane.target.shard)
        self._src_bytes, self._dst_bytes = pool.layout.block_bytes, target.block_bytes
        self._grid = piece_grid(pool.layout, target, lane.piece)
        self._scratch = pool.tensor.new_empty(SCRATCH_BYTES)

    def flush(self, landing_id: bytes, stopped: Stopped) -> None:
        """Nothing to wait for: copies are done when `write` returns."""
        self.check()

    def close(self) -> None:
        """Unmap, say so, and close the connection. Without the first the target waits for this process."""
        self.interrupt()
        try:
            self._mapped.close()
        except PathError:
            _log.exception("the peer's memory could not be unmapped")
        else:
            _say_unmapped(self._connection.sock)
        super().close()

    def _copy_batch(self, moves: Sequence[BlockMove], stopped: Stopped) -> list[int]:
        with self._finishing():
            for move in moves:
                self._copy(move, self._grid)
            return self._pool.sums([move.src_block for move in moves], self._piece)

    def _write_block(self, landing_id: bytes, move: BlockMove, corrupt: bool, stopped: Stopped) -> int:
        assert landing_id in self._begun
        first, second = halves(self._grid)
        with self._finishing():
            self._copy(move, first)
        self._faults.at("push.half")
        with self._finishing():
            self._copy(move, second)
        if corrupt:
            offset = self._grid.src_offset
            flipped = self._tensor[move.src_block, offset : offset + 1] ^ 1
            flipped.item()  # it is there when this returns
            with self._finishing():
                target = self._mapped.pool + move.dst_block * self._dst_bytes
                self._mapped.copy(flipped.data_ptr(), target, Grid(0, 1, self._grid.dst_offset, 1, 1, 1))
        return self._pool.sums([move.src_block], self._piece)[0]

    def _write_scratch(self, num_bytes: int, stopped: Stopped) -> None:
        with self._finishing():
            row = Grid(0, num_bytes, 0, num_bytes, num_bytes, 1)
            self._mapped.copy(self._scratch.data_ptr(), self._mapped.scratch, row)

    def _copy(self, move: BlockMove, grid: Grid) -> None:
        source = self._tensor.data_ptr() + move.src_block * self._src_bytes
        self._mapped.copy(source, self._mapped.pool + move.dst_block * self._dst_bytes, grid)

    @contextlib.contextmanager
    def _finishing(self) -> Iterator[None]:
        """What is queued within is done after, however it ends."""
        try:
            yield
        finally:
            self._mapped.finish()


def listen(target: TargetRank) -> CudaIpcListener | None:
    """A listener, or None for a pool that is not on a CUDA device. `PathError`: memory that cannot be shared
    (of torch's expandable segments, for one)."""
    pool = target.pool
    if not isinstance(pool, DevicePool) or not pool.tensor.is_cuda:
        return None
    return CudaIpcListener(target, pool, cuda_driver(pool.tensor.device.index))


def connect(
    rank: WriterRank, lane: Lane, address: str, connection_id: bytes, on_lost: Callable[[str], None]
) -> CudaIpcChannel:
    """Open a channel; `TransferError` says why it could not be."""
    pool = rank.pool
    if not isinstance(pool, DevicePool) or not pool.tensor.is_cuda:
        raise PathError(f"cuda_ipc: not for KV on {pool.device}")
    driver = cuda_driver(pool.tensor.device.index)
    return connect_over(driver, rank, pool, lane, address, connection_id, on_lost)


def connect_over(
    driver: CudaDriver,
    rank: WriterRank,
    pool: DevicePool,
    lane: Lane,
    address: str,
    connection_id: bytes,
    on_lost: Callable[[str], None],
) -> CudaIpcChannel:
    """`connect` with a given driver."""
    with opening("cuda_ipc", address) as undo:
        sock = undo.enter_context(connect_unix(address))
        welcome = greet(sock, rank.secret, rank.hello(lane, connection_id))
        undo.callback(_say_unmapped, sock)
        mapped = Mapped(driver, OFFER_CODEC.decode(receive_frame(sock)))
        undo.callback(mapped.close)
        connection = Connection(sock, "cuda_ipc")
        channel = CudaIpcChannel(rank, pool, lane, connection, welcome, mapped, on_lost)
    channel.start()
    return channel


def peer_process(sock: socket.socket) -> int:
    """A pidfd of the process that connected this unix socket. `PathError` when it is invisible from here."""
    with contextlib.suppress(OSError):  # a kernel before 6.5
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process_id = _CREDENTIALS.unpack(credentials)[0]
    if process_id == 0:
        raise PathError("the writer's process is not visible from here (another PID namespace)")
    # Should it have died and its number be another's by now, that one is waited for: late, but not wrong.
    return os.pidfd_open(process_id)


def _say_unmapped(sock: socket.socket) -> None:
    with contextlib.suppress(PeerGoneError):
        send_frame(sock, REQUEST_CODEC.encode(Unmapped()))


# ----------------------------------------------------------------------------------------------
# The few calls of the CUDA driver that sharing device memory between processes needs, through ctypes.
#
# torch can share tensors between processes too, but lets go of the mapping when its garbage is collected;
# here the end of a mapping is a proof, so it is explicit. Has not run yet: no device was at hand.

HANDLE_BYTES = 64

_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1
_UNIFIED = 4


class Grid(NamedTuple):
    """A copy of `num_rows` rows of `row_bytes`, whose starts are `src_pitch` and `dst_pitch` apart."""

    src_offset: int
    src_pitch: int
    dst_offset: int
    dst_pitch: int
    row_bytes: int
    num_rows: int


def piece_grid(src: BlockLayout, dst: BlockLayout, piece: Shard) -> Grid:
    """The one copy that moves `piece` from a block of `src` to one of `dst`; both hold it. A row is K or V of
    the piece's heads in one layer; all rows are one where they follow one another in both blocks."""
    row_bytes = piece.num_heads * src.head_bytes
    num_rows = 2 * piece.num_layers
    pitches = [layout.shard.num_heads * layout.head_bytes for layout in (src, dst)]
    if pitches == [row_bytes, row_bytes]:
        row_bytes, num_rows, pitches = row_bytes * num_rows, 1, [row_bytes * num_rows] * 2
    first = piece.layer_start, 0, piece.head_start
    return Grid(src.offset(*first), pitches[0], dst.offset(*first), pitches[1], row_bytes, num_rows)


def halves(grid: Grid) -> tuple[Grid, Grid]:
    """The same copy in two of about the same size."""
    if grid.num_rows == 1:
        size = grid.row_bytes // 2
        rest = grid._replace(
            src_offset=grid.src_offset + size,
            dst_offset=grid.dst_offset + size,
            row_bytes=grid.row_bytes - size,
        )
        return grid._replace(row_bytes=size), rest
    count = grid.num_rows // 2
    rest = grid._replace(
        src_offset=grid.src_offset + count * grid.src_pitch,
        dst_offset=grid.dst_offset + count * grid.dst_pitch,
        num_rows=grid.num_rows - count,
    )
    return grid._replace(num_rows=count), rest


class Exported(NamedTuple):
    """Memory that another process may map: the handle of its allocation, and where in it the memory lies."""

    handle: bytes
    offset: int


class _Handle(Structure):
    _fields_ = (("reserved", c_char * HANDLE_BYTES),)


class _Copy2D(Structure):
    """`CUDA_MEMCPY2D`."""

    _fields_ = (
        ("src_x", c_size_t),
        ("src_y", c_size_t),
        ("src_type", c_uint),
        ("src_host", c_void_p),
        ("src_device", c_uint64),
        ("src_array", c_void_p),
        ("src_pitch", c_size_t),
        ("dst_x", c_size_t),
        ("dst_y", c_size_t),
        ("dst_type", c_uint),
        ("dst_host", c_void_p),
        ("dst_device", c_uint64),
        ("dst_array", c_void_p),
        ("dst_pitch", c_size_t),
        ("width_bytes", c_size_t),
        ("height", c_size_t),
    )


class CudaDriver:
    """Device `index` of this process, for any thread. `PathError` carries the driver's error."""

    def __init__(self, library: ctypes.CDLL, index: int) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._mapped: dict[bytes, list[int]] = {}  # handle: [address, number of users]
        device, context = c_int(), c_void_p()
        self._call("cuInit", c_uint(0))
        self._call("cuDeviceGet", byref(device), c_int(index))
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)  # the one that torch uses
        self._context = context

    def export(self, address: int) -> Exported:
        """For memory of this process; it must have come from one `cuMemAlloc`."""
        self._bind()
        base, size, handle = c_uint64(), c_size_t(), _Handle()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(address))
        self._call("cuIpcGetMemHandle", byref(handle), base)
        return Exported(bytes(memoryview(handle)), address - base.value)

    def map(self, handle: bytes) -> int:
        """The address of another process's allocation here. A process can open a handle only once, so its
        users share the mapping."""
        if len(handle) != HANDLE_BYTES:
            raise PathError(f"a handle of {len(handle)} bytes")
        self._bind()
        with self._lock:
            if handle not in self._mapped:
                address = c_uint64()
                opened = _Handle.from_buffer_copy(handle)
                self._call("cuIpcOpenMemHandle_v2", byref(address), opened, c_uint(_LAZY_PEER_ACCESS))
                self._mapped[handle] = [address.value, 0]
            mapped = self._mapped[handle]
            mapped[1] += 1
            return mapped[0]

    def unmap(self, handle: bytes) -> None:
        """The end of one use of a mapping, of which nothing may be under way any more."""
        self._bind()
        with self._lock:
            mapped = self._mapped[handle]
            mapped[1] -= 1
            if mapped[1] == 0:
                del self._mapped[handle]
                self._call("cuIpcCloseMemHandle", c_uint64(mapped[0]))

    def create_stream(self) -> int:
        """A stream that waits for no other."""
        self._bind()
        stream = c_void_p()
        self._call("cuStreamCreate", byref(stream), c_uint(_NON_BLOCKING))
        return int(stream.value or 0)

    def destroy_stream(self, stream: int) -> None:
        self._bind()
        self._call("cuStreamDestroy_v2", c_void_p(stream))

    def copy(self, src: int, dst: int, grid: Grid, stream: int) -> None:
        """Queue a copy between device addresses, which may be of two devices."""
        self._bind()
        copy = _Copy2D(
            src_type=_UNIFIED,
            src_device=src + grid.src_offset,
            src_pitch=grid.src_pitch,
            dst_type=_UNIFIED,
            dst_device=dst + grid.dst_offset,
            dst_pitch=grid.dst_pitch,
            width_bytes=grid.row_bytes,
            height=grid.num_rows,
        )
        self._call("cuMemcpy2DAsync_v2", byref(copy), c_void_p(stream))

    def synchronize(self, stream: int) -> None:
        """Return when all that is queued on the stream is done."""
        self._bind()
        self._call("cuStreamSynchronize", c_void_p(stream))

    def _bind(self) -> None:
        """Make the device's context the calling thread's."""
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = c_char_p()
            self._library.cuGetErrorName(c_int(status), byref(text))
            raise PathError(f"{name}: {(text.value or b'').decode() or status}")


@functools.cache
def cuda_driver(index: int) -> CudaDriver:
    """The driver for a device; `PathError` where there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PathError(str(error)) from error
    library.cuGetErrorName.argtypes = [c_int, POINTER(c_char_p)]
    return CudaDriver(library, index)
