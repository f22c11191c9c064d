"""Device memory of one host: the writer maps the target's pool, and a kernel of its device copies pieces
there, with the checksums of what it reads.

As in `shm` a writer that has proven the secret gets what it needs to map the pool over a unix socket. Here
the socket's end is no proof that the writer cannot write: copies run on the device, and a mapping lives until
the writer unmaps it or the driver takes its context down, which is when the process has given up its files.
So the target counts a writer as gone only

- when it has said so (`Unmapped`), after its last copy was done and its mapping closed, or
- when its process has exited, which the kernel reports through a pidfd of the process that connected: it is
  readable once every thread has ended and every file of the process, the driver's too, is closed.

A stopped writer has neither exited nor said so.

A write of any number of blocks is one kernel and one wait (`kvtransfer.blocks.copy_stream`): a kernel of its
own for each part of a push, with a wait for each, left the device idle for most of the time. How much is
written at a time is decided by the writer's traffic class and the measured rate, a few milliseconds' worth.
The path is measured as pushes are, by one kernel over many pieces, without the round trip that confirms it.
Rates of this shape are not yet validated on a card.

The target's memory may be another card's. Under Ray a process does not see that card, so the memory is an
address and never a tensor (`kvtransfer.blocks.mapped_blocks`). Not yet validated between two cards.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from kvtransfer.blocks.device_pool import DevicePool
from kvtransfer.blocks.host_memory import SCRATCH_BYTES
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.mapped_blocks import MappedBlocks
from kvtransfer.blocks.transfer_memory import DEVICE_SCRATCH_BYTES
from kvtransfer.codec import Codec, Message
from kvtransfer.common.clock import Clock
from kvtransfer.errors import PathError, PeerGoneError
from kvtransfer.messages import Shard
from kvtransfer.rpc.handshake import receive_frame, send_frame
from kvtransfer.rpc.listener import shut_down
from kvtransfer.transfer_orders import BlockMove, Lane
from kvtransfer.transports.base import Measured, TargetRank, WriterRank
from kvtransfer.transports.cuda_driver import CudaDriver, cuda_driver
from kvtransfer.transports.onesided import (
    REQUEST_CODEC,
    OneSidedChannel,
    OneSidedListener,
    Unmapped,
    connect_unix,
)
from kvtransfer.transports.stream_sockets import (
    ChannelHello,
    ChannelWelcome,
    Connection,
    Stopped,
    greet,
    opening,
)

_SO_PEERPIDFD = 77
_CREDENTIALS = struct.Struct("3i")
_CLOSING_POLL_MS = 200
# Copied by one kernel, and between two looks at `stopped`: at least what the writer writes at a time. Two are
# under way where it is less, so that the device does not wait for the next.
_BATCH_BYTES = 1 << 30
_MOST_BATCHES = 2
# A part of the scratch memory, as a block.
_SCRATCH = BlockLayout(Shard(0, 1, 0, 1), head_dim=SCRATCH_BYTES // 2, block_tokens=1, item_bytes=1)

_log = logging.getLogger(__name__)


class PoolOffer(Message, frozen=True):
    """Target to writer, after the welcome: the allocations that hold the pool and the scratch memory, and
    where in them these start. There are `scratch_bytes` of the latter."""

    pool_handle: bytes
    pool_offset: int
    scratch_handle: bytes
    scratch_offset: int
    scratch_bytes: int = SCRATCH_BYTES


OFFER_CODEC: Codec[PoolOffer] = Codec(PoolOffer)


class CudaIpcListener(OneSidedListener):
    """Offers the handles of the pools, and knows which processes may have mapped one."""

    transport = "cuda_ipc"

    def __init__(self, target: TargetRank, pools: Mapping[int, DevicePool], driver: CudaDriver) -> None:
        """`pools` are the pools of the rank by group of layers."""
        self._scratch = next(iter(pools.values())).tensor.new_empty(DEVICE_SCRATCH_BYTES)
        scratch = driver.export(self._scratch.data_ptr())
        self._offered = {
            group: PoolOffer(*driver.export(pool.tensor.data_ptr()), *scratch, DEVICE_SCRATCH_BYTES)
            for group, pool in pools.items()
        }
        super().__init__(target)

    def _offer(self, sock: socket.socket, hello: ChannelHello) -> None:
        send_frame(sock, OFFER_CODEC.encode(self._offered[hello.group]))

    def _serve(self, sock: socket.socket, hello: ChannelHello) -> None:
        process = peer_process(sock)
        connection = self._target.gate.enter(hello.writer)
        is_unmapped = False
        try:
            self._send_welcome(sock, hello)
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
    """The target's memory in this process, by address: its `num_blocks` blocks, and those of its scratch
    memory."""

    def __init__(self, driver: CudaDriver, offer: PoolOffer, layout: BlockLayout, num_blocks: int) -> None:
        with contextlib.ExitStack() as undo:
            pool = driver.map(offer.pool_handle) + offer.pool_offset
            undo.callback(driver.unmap, offer.pool_handle)
            scratch = driver.map(offer.scratch_handle) + offer.scratch_offset
            undo.callback(driver.unmap, offer.scratch_handle)
            self.pool = MappedBlocks(pool, num_blocks, layout, driver)
            num_scratch = max(1, offer.scratch_bytes // SCRATCH_BYTES)
            self.scratch = MappedBlocks(scratch, num_scratch, _SCRATCH, driver)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Unmap the memory. No copy may be under way."""
        del self.pool, self.scratch
        self._undo.close()


class CudaIpcChannel(OneSidedChannel):
    """Copies from device to device; a write returns when its copies are done."""

    transport = "cuda_ipc"
    batch_bytes = _BATCH_BYTES
    most_batches = _MOST_BATCHES

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
        self._source = pool
        # Of this rank, while a path is measured.
        self._scratch: DevicePool | None = None

    def flush(self, landing_id: bytes, stopped: Stopped) -> None:
        """Check the connection; there is nothing to wait for, as copies are done when `write` returns."""
        self.check()

    def measure(self, clock: Clock) -> Measured:
        """Time empty round trips, and writes that take a few milliseconds, each by one kernel."""
        shape = self._mapped.scratch.num_blocks, SCRATCH_BYTES
        self._scratch = DevicePool(_SCRATCH, self._source.tensor.new_empty(shape))
        try:
            return self._measure_large(clock, self._mapped.scratch.num_blocks * SCRATCH_BYTES)
        finally:
            self._scratch = None

    def close(self) -> None:
        """Unmap the memory, report that, and close the connection. Without the report the target waits for
        this process."""
        self.interrupt()
        try:
            self._mapped.close()
        except PathError:
            _log.exception("the peer's memory could not be unmapped")
        else:
            _say_unmapped(self._connection.sock)
        super().close()

    def _begin_batch(self, moves: Sequence[BlockMove], stopped: Stopped) -> Callable[[], list[int]]:
        return self._begin(moves, self._piece)

    def _begin(self, moves: Sequence[BlockMove], piece: Shard) -> Callable[[], list[int]]:
        sources = [move.src_block for move in moves]
        targets = [move.dst_block for move in moves]
        return self._source.copy_to(sources, piece, self._mapped.pool, targets).result

    def _write_block(self, landing_id: bytes, move: BlockMove, corrupt: bool, stopped: Stopped) -> int:
        assert landing_id in self._begun
        first, *second = halves(self._piece, self._source.layout)
        self._begin([move], first)()
        self._faults.at("push.half")
        for piece in second:
            self._begin([move], piece)()
        if corrupt:
            self._corrupt(move)
        return self._source.sums([move.src_block], self._piece)[0]

    def _corrupt(self, move: BlockMove) -> None:
        """Write the piece again, with one bit flipped."""
        layout = self._source.layout
        flipped = self._source.tensor[move.src_block].clone().view(1, -1)
        offset = layout.offset(layout.layers_of(self._piece)[0], 0, self._piece.head_start)
        flipped[0, offset] ^= 1
        flipped[0, offset].item()  # it is there when this returns
        DevicePool(layout, flipped).copy_to([0], self._piece, self._mapped.pool, [move.dst_block]).result()

    def _write_scratch(self, num_bytes: int, stopped: Stopped) -> None:
        """Write whole parts of it, again and again: the time of less would be that of the call."""
        assert self._scratch is not None
        num_parts = self._scratch.num_blocks
        parts = [index % num_parts for index in range(-(-num_bytes // SCRATCH_BYTES))]
        self._scratch.copy_to(parts, _SCRATCH.shard, self._mapped.scratch, parts).result()


def listen(target: TargetRank) -> CudaIpcListener | None:
    """Return a listener, or None for a pool that is not on a CUDA device. `PathError`: memory that cannot be
    shared (of torch's expandable segments, for one)."""
    pools = {
        group: pool
        for group, pool in target.group_to_pool.items()
        if isinstance(pool, DevicePool) and pool.tensor.is_cuda
    }
    if not pools or len(pools) < len(target.group_to_pool):
        return None
    device = next(iter(pools.values())).tensor.device
    return CudaIpcListener(target, pools, cuda_driver(device.index))


def connect(
    rank: WriterRank, lane: Lane, address: str, connection_id: bytes, on_lost: Callable[[str], None]
) -> CudaIpcChannel:
    """Open a channel; the text of `TransferError` gives the reason of a failure."""
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
    """Open a channel with a given driver, as `connect` does."""
    with opening("cuda_ipc", address) as undo:
        hello = rank.hello(lane, connection_id)
        sock, welcome = greet(undo, connect_unix(address), rank.trust, hello)
        undo.callback(_say_unmapped, sock)
        offer = OFFER_CODEC.decode(receive_frame(sock))
        mapped = Mapped(driver, offer, replace(pool.layout, shard=lane.target.shard), welcome.num_blocks)
        undo.callback(mapped.close)
        connection = Connection(sock, "cuda_ipc")
        channel = CudaIpcChannel(rank, pool, lane, connection, welcome, mapped, on_lost)
    channel.start()
    return channel


def halves(piece: Shard, layout: BlockLayout) -> tuple[Shard, ...]:
    """Cut a piece of a block into two of about the same size, by layers or by heads; one layer of one head
    stays one."""
    layers = layout.layers_of(piece)
    if len(layers) > 1:
        middle = layers[len(layers) // 2]
        return structs.replace(piece, layer_end=middle), structs.replace(piece, layer_start=middle)
    if piece.num_heads > 1:
        middle = piece.head_start + piece.num_heads // 2
        return structs.replace(piece, head_end=middle), structs.replace(piece, head_start=middle)
    return (piece,)


def peer_process(sock: socket.socket) -> int:
    """Return a pidfd of the process that connected this unix socket. `PathError` when the process is
    invisible from here."""
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
