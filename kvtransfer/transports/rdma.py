"""One-sided writes over a network, through NIXL's UCX backend: RDMA where the host has InfiniBand or RoCE.

The target registers its pool with a NIXL agent of its own for every writer, on network devices only, and
sends the agent's metadata over the control connection. The writer's agent writes spans of its registered pool
(or of packed pieces, where runs are short) straight into the target's; a write is done when UCX has flushed
the endpoint, that is when it is visible there.

Fence. When the control connection ends, however it ends, the target first destroys that writer's agent and
only then counts the writer as gone. With the agent go its queue pairs and memory keys (for TCP devices: its
sockets, with whatever they have not delivered), and nothing else leads to the memory: paths within a host,
which would not need them (`process_vm_writev`, CUDA IPC), are off. So it holds for a writer that is dead,
stopped or cut off by the network alike. A writer that is asked to stop waits until what is under way is done,
or until the target has ended the connection, and so has destroyed its agent. Only over TCP devices can that
take long: there the target's processor takes the bytes, and a stopped one leaves them in its socket.

InfiniBand guards memory by keys. UCX over TCP does not: any program that reaches an agent's port could
write the memory of its process. Name TCP devices (`rdma_devices`) in a trusted network only.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated

from msgspec import Meta

from kvtransfer.blocks.host_memory import SCRATCH_BYTES
from kvtransfer.blocks.layout import Run, plan_runs, split_runs
from kvtransfer.codec import Codec, Message
from kvtransfer.common.clock import Clock
from kvtransfer.errors import PathError, PeerGoneError, PushStoppedError
from kvtransfer.rpc.handshake import receive_frame, send_frame
from kvtransfer.transfer_orders import BlockMove, Lane
from kvtransfer.transports.base import Listener, Measured, TargetRank, WriterRank
from kvtransfer.transports.nixl import NixlAgent, Posting, Region, is_infiniband, network_devices
from kvtransfer.transports.onesided import Begin, OneSidedChannel, Sync
from kvtransfer.transports.registered_memory import RegisteredBuffer, Runs, pool_region
from kvtransfer.transports.stream_sockets import (
    ACK_CODEC,
    HELLO_CODEC,
    STALLED_S,
    Ack,
    ChannelHello,
    ChannelRefusal,
    ChannelWelcome,
    Connection,
    Stopped,
    greet,
    opening,
)
from kvtransfer.transports.tcp import listen_tcp, open_socket, tune

# Written at once; two batches are under way at a time.
_BATCH_BYTES = 8 << 20
_MAX_UNDER_WAY = 2
# Shorter runs are packed first where that makes fewer: over TCP on loopback runs of 4 KiB move at 0.5 GB/s,
# of 32 KiB at 1.3 and of 256 KiB at 1.7, and packing sums on the way.
_PACK_BELOW_BYTES = 32 << 10
_NUM_KEEN_POLLS = 50
_MIN_PAUSE_S, _MAX_PAUSE_S = 20e-6, 200e-6
_SERVE_PAUSE_S = 100e-6
_IDLE_PAUSE_S = 1e-3
_WORD_BYTES = 8


class Offer(Message, frozen=True):
    """Target to writer, after the welcome: its agent, where the pool and the scratch memory lie, and what
    kind of memory it is."""

    metadata: bytes
    pool_address: Annotated[int, Meta(ge=0)]
    scratch_address: Annotated[int, Meta(ge=0)]
    kind: str
    device_index: Annotated[int, Meta(ge=0)]


class Writing(Message, frozen=True):
    """Writer to target, not acknowledged: until the next `Sync`, take what comes over the agent."""


_OFFER_CODEC: Codec[Offer] = Codec(Offer)
_REQUEST_CODEC: Codec[Begin | Sync | Writing] = Codec(Begin | Sync | Writing)


class RdmaListener(Listener):
    """Gives each proven writer an agent to write to, for as long as its connection lasts."""

    transport = "rdma"

    def __init__(self, target: TargetRank, devices: tuple[str, ...]) -> None:
        self._devices = devices
        # The processor has to take what comes over TCP; a device does so itself once it is connected.
        self._pause_s = _IDLE_PAUSE_S if is_infiniband(devices) else _SERVE_PAUSE_S
        super().__init__(target, *listen_tcp(target))

    def _serve(self, sock: socket.socket, hello: ChannelHello) -> None:
        tune(sock)
        of_group = self._target.group_to_pool[hello.group]
        pool, scratch = pool_region(of_group), RegisteredBuffer(of_group, SCRATCH_BYTES)
        try:
            agent = NixlAgent(self._devices)
        except PathError as error:
            send_frame(sock, HELLO_CODEC.encode(ChannelRefusal(str(error))))
            raise
        connection = self._target.gate.enter(hello.writer)
        try:
            agent.register(pool)
            agent.register(scratch.region)
            offer = Offer(
                agent.metadata(), pool.address, scratch.region.address, pool.kind, pool.device_index
            )
            self._send_welcome(sock, hello)
            send_frame(sock, _OFFER_CODEC.encode(offer))
            self._take(sock, connection, agent)
        finally:
            agent.close()
            if not self._closing.is_set():
                self._target.gate.leave(connection)

    def _take(self, sock: socket.socket, connection: bytes, agent: NixlAgent) -> None:
        """Answer requests. Until the first `Sync`, for the agents' connecting, and from each `Writing` to the
        next `Sync`, progress the agent."""
        num_done = 0
        is_written = True
        readable = select.poll()
        readable.register(sock, select.POLLIN)
        while True:
            while is_written and not readable.poll(0):
                agent.progress()
                self._closing.wait(self._pause_s)
            try:
                request = _REQUEST_CODEC.decode(receive_frame(sock))
            except PeerGoneError:
                return
            if isinstance(request, Writing):
                is_written = True
                continue
            refused: tuple[bytes, ...] = ()
            if isinstance(request, Sync):
                is_written = False
            elif not self._target.gate.admit(request.landing_id, connection):
                refused = (request.landing_id,)
            num_done += 1
            send_frame(sock, ACK_CODEC.encode(Ack(num_done, refused)))


class RdmaChannel(OneSidedChannel):
    """An agent that writes to the target's."""

    transport = "rdma"
    batch_bytes = _BATCH_BYTES

    def __init__(
        self,
        rank: WriterRank,
        lane: Lane,
        connection: Connection,
        welcome: ChannelWelcome,
        agent: NixlAgent,
        offer: Offer,
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__(rank, lane, connection, welcome.num_blocks, ",".join(agent.devices), on_lost)
        self._agent = agent
        ours, packed = rank.pool.layout, replace(rank.pool.layout, shard=lane.piece)
        theirs = replace(ours, shard=lane.target.shard)
        runs, packed_runs = plan_runs(ours, theirs, lane.piece), plan_runs(packed, theirs, lane.piece)
        first, second = split_runs(runs, self.piece_bytes // 2)
        self._direct = Runs(runs, ours.block_bytes, theirs.block_bytes)
        self._first = Runs(first, ours.block_bytes, theirs.block_bytes)
        self._second = Runs(second, ours.block_bytes, theirs.block_bytes)
        self._packed = Runs(packed_runs, packed.block_bytes, theirs.block_bytes)
        self._one_byte = Runs([Run(0, runs[0].dst_offset, 1)], packed.block_bytes, theirs.block_bytes)
        self._packs = min(run.num_bytes for run in runs) < _PACK_BELOW_BYTES and len(packed_runs) < len(runs)
        buffer_bytes = max(SCRATCH_BYTES, self._batch * self.piece_bytes if self._packs else self.piece_bytes)
        self._buffers = [
            RegisteredBuffer(rank.pool, buffer_bytes) for _ in range(_MAX_UNDER_WAY if self._packs else 1)
        ]
        self._source = pool_region(rank.pool)
        target_bytes = welcome.num_blocks * theirs.block_bytes
        self._target = Region(offer.pool_address, target_bytes, offer.kind, offer.device_index)
        self._scratch = Region(offer.scratch_address, SCRATCH_BYTES, offer.kind, offer.device_index)
        self._under_way: deque[Posting] = deque()
        self._num_packed = 0
        self._is_served = True
        self._pause = threading.Event()
        self._ended = threading.Event()
        for region in (self._source, *(buffer.region for buffer in self._buffers)):
            agent.register(region)
        agent.connect(offer.metadata)

    def flush(self, landing_id: bytes, stopped: Stopped) -> None:
        self._await(0, stopped)
        super().flush(landing_id, stopped)

    def drain(self) -> None:
        """Wait until all that is under way has arrived; or, when the connection is lost, for its end: before
        that, the target has destroyed the agent that we write to, or has died."""
        try:
            self._await(0, lambda: False)
            if self._is_served:
                self._connection.request(lambda: self._request_ack(self._connection, lambda: False))
        except PeerGoneError:
            self._agent.close()
            self._under_way.clear()
            with contextlib.suppress(OSError):  # the target was first
                self._connection.sock.shutdown(socket.SHUT_WR)
            self._ended.wait()

    def measure(self, clock: Clock) -> Measured:
        measured = super().measure(clock)
        self._sync(lambda: True)
        return measured

    def close(self) -> None:
        """Destroy our agent, then close the connection."""
        self.interrupt()
        self._agent.close()
        self._buffers.clear()
        super().close()

    def _begin_batch(self, moves: Sequence[BlockMove], stopped: Stopped) -> Callable[[], list[int]]:
        """Post the writes of a batch; `flush` awaits the writes themselves."""
        self._await(_MAX_UNDER_WAY - 1, stopped)
        sources, targets = [move.src_block for move in moves], [move.dst_block for move in moves]
        if not self._packs:
            self._post(self._direct, self._source, sources, self._target, targets)
            return lambda: self._pool.sums(sources, self._piece)
        buffer = self._buffers[self._num_packed % _MAX_UNDER_WAY]
        self._num_packed += 1
        sums = buffer.gather(sources, self._piece)
        self._post(self._packed, buffer.region, range(len(moves)), self._target, targets)
        return lambda: sums

    def _write_block(self, landing_id: bytes, move: BlockMove, corrupt: bool, stopped: Stopped) -> int:
        assert landing_id in self._begun
        self._post(self._first, self._source, [move.src_block], self._target, [move.dst_block])
        self._await(0, stopped)
        self._faults.at("push.half")
        self._post(self._second, self._source, [move.src_block], self._target, [move.dst_block])
        self._await(0, stopped)
        (checksum,) = self._buffers[0].gather([move.src_block], self._piece)
        if corrupt:
            self._buffers[0].flip_first_bit()
            self._post(self._one_byte, self._buffers[0].region, [0], self._target, [move.dst_block])
            self._await(0, stopped)
        return checksum

    def _write_scratch(self, num_bytes: int, stopped: Stopped) -> None:
        run = Runs([Run(0, 0, num_bytes)], 0, 0)
        self._post(run, self._buffers[0].region, [0], self._scratch, [0])
        self._await(0, stopped)

    def _timed(self, clock: Clock, num_bytes: int, stopped: Stopped) -> float:
        """Return the seconds of a round trip. An empty one is that of one word: UCX answers a write when it
        has been flushed."""
        started = clock.now()
        self._write_scratch(num_bytes or _WORD_BYTES, stopped)
        return clock.now() - started

    def _post(
        self,
        runs: Runs,
        source: Region,
        src_blocks: Sequence[int],
        target: Region,
        dst_blocks: Sequence[int],
    ) -> None:
        """Start writing the runs of each pair of blocks."""
        if not self._is_served:
            send_frame(self._connection.sock, _REQUEST_CODEC.encode(Writing()))
            self._is_served = True
        sources, targets = runs.spans(source, src_blocks, target, dst_blocks)
        with self._losing():
            self._under_way.append(self._agent.post(sources, source.kind, targets, target.kind))

    def _await(self, num_left: int, stopped: Stopped) -> None:
        """Return when no more than `num_left` postings are under way. `PushStoppedError` when stopped while
        nothing moves."""
        num_polls, waited_s = 0, 0.0
        pause_s = _MIN_PAUSE_S
        while True:
            self.check()
            with self._losing():
                while self._under_way and self._agent.is_done(self._under_way[0]):
                    self._under_way.popleft()
            if len(self._under_way) <= num_left:
                return
            num_polls += 1
            if num_polls > _NUM_KEEN_POLLS:
                self._pause.wait(pause_s)
                waited_s += pause_s
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            if waited_s >= STALLED_S:
                waited_s = 0.0
                if stopped():
                    raise PushStoppedError("stopped while the target took nothing")

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Mark the connection as lost when a write fails."""
        try:
            yield
        except PeerGoneError as error:
            self.interrupt(str(error))
            raise

    def _request_ack(self, connection: Connection, stopped: Stopped) -> None:
        super()._request_ack(connection, stopped)
        self._is_served = False

    def _end(self, reason: str) -> None:
        self._ended.set()
        super()._end(reason)


def listen(target: TargetRank) -> RdmaListener:
    """Return a listener; the text of `PathError` gives the reason why there is none (no device, no NIXL)."""
    for pool in target.group_to_pool.values():
        pool_region(pool)
    devices = network_devices(target.settings)
    NixlAgent(devices).close()
    return RdmaListener(target, devices)


def connect(
    rank: WriterRank, lane: Lane, address: str, connection_id: bytes, on_lost: Callable[[str], None]
) -> RdmaChannel:
    """Open a channel; the text of `TransferError` gives the reason of a failure."""
    agent = NixlAgent(network_devices(rank.settings))
    with opening("rdma", address) as undo:
        undo.callback(agent.close)
        hello = rank.hello(lane, connection_id)
        sock, welcome = greet(undo, open_socket(address), rank.trust, hello)
        offer = _OFFER_CODEC.decode(receive_frame(sock))
        channel = RdmaChannel(rank, lane, Connection(sock, "rdma"), welcome, agent, offer, on_lost)
    channel.start()
    return channel
