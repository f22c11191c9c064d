"""Pieces through a communicator of two (`gloo`, `nccl`): packed in staging memory, sent, unpacked there.

A TCP connection beside the pair carries what the bytes mean: the writer announces each message before it
sends it, the target receives in that order and answers with Acks. Two-sided: what was received is put into
the pool only while the landing is open (`OpenedLanding.start_receiving`), else it is dropped and the landing
named in the next Ack as refused. The end of this connection, at either side, ends the pair (`abort`).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kvtransfer.blocks.copy_stream import Mark
from kvtransfer.blocks.device_pool import PendingSums, StagingArea
from kvtransfer.blocks.host_memory import SCRATCH_BYTES
from kvtransfer.blocks.pool import KvPool
from kvtransfer.blocks.transfer_memory import DEVICE_SCRATCH_BYTES
from kvtransfer.codec import Codec, Message
from kvtransfer.common.clock import Clock
from kvtransfer.errors import PathError, PeerGoneError, PushStoppedError, TransferError, WireError
from kvtransfer.messages import Shard
from kvtransfer.rpc.handshake import receive_frame, send_frame
from kvtransfer.rpc.listener import shut_down
from kvtransfer.transfer_orders import BlockMove, Lane
from kvtransfer.transports.base import Channel, Listener, Measured, TargetRank, WriterRank
from kvtransfer.transports.pair_group import TARGET, WRITER, PairGroup, PairWork, form_pair, open_store
from kvtransfer.transports.stream_sockets import (
    ACK_CODEC,
    STALLED_S,
    Ack,
    ChannelHello,
    Connection,
    Stopped,
    greet,
    opening,
)
from kvtransfer.transports.tcp import interface_of, listen_tcp, open_socket, tune

# At the target one is received while another is unpacked; at the writer two are sent while another is packed.
_NUM_STAGED = 2
_NUM_PACKED = 3
_END_TIMEOUT_S = 10.0
_NO_LANDING = b""
# Pairs that did not end, with their threads and the memory that their messages may still reach.
_left_behind: list[_LeftBehind] = []
_left_behind_lock = threading.Lock()

_log = logging.getLogger(__name__)


class _LeftBehind(NamedTuple):
    group: PairGroup
    thread: threading.Thread
    staged: Sequence[StagingArea]


class PairOffer(Message, frozen=True):
    """Target to writer, after the welcome: the address of the store on which the pair forms."""

    store: str


class Pieces(Message, frozen=True):
    """Writer to target: the next messages of the pair, of these sizes, are together the packed pieces of
    these blocks. Without a landing they are only received, to measure the path."""

    landing_id: bytes
    block_ids: tuple[int, ...]
    part_bytes: tuple[int, ...]


class Barrier(Message, frozen=True):
    """Writer to target: answer when everything that was announced before is done."""


OFFER_CODEC: Codec[PairOffer] = Codec(PairOffer)
REQUEST_CODEC: Codec[Pieces | Barrier] = Codec(Pieces | Barrier)


def staging_bytes(piece_bytes: int, device: str) -> int:
    """Return the size of the largest message between pools on such a device: as many pieces as fit in the
    scratch size, at least one. Between GPUs the message must take longer than its announcement."""
    return max(piece_bytes, SCRATCH_BYTES if device == "cpu" else DEVICE_SCRATCH_BYTES)


class PairListener(Listener):
    """Forms a pair of this kind with each writer."""

    def __init__(self, kind: type[PairGroup], target: TargetRank) -> None:
        self.transport = kind.backend
        self._kind = kind
        super().__init__(target, *listen_tcp(target))

    def _serve(self, sock: socket.socket, hello: ChannelHello) -> None:
        tune(sock)
        staged = _stage(self._target.group_to_pool[hello.group], hello.piece, _NUM_STAGED)
        store, address = open_store(self._target.settings.data_host)
        self._send_welcome(sock, hello)
        send_frame(sock, OFFER_CODEC.encode(PairOffer(address)))
        group = form_pair(self._kind, store, TARGET, self._target.device, sock.getsockname()[0])
        _Receiver(self._target, sock, hello, group, staged).run()


class _Receiving(NamedTuple):
    """An announcement whose messages are on their way."""

    pieces: Pieces
    staging: StagingArea
    works: list[PairWork]


class _Receiver:
    """One writer, until its connection ends. This thread reads requests, another receives: it starts on the
    next announcement before it unpacks the one before."""

    def __init__(
        self,
        target: TargetRank,
        sock: socket.socket,
        hello: ChannelHello,
        group: PairGroup,
        staged: Sequence[StagingArea],
    ) -> None:
        self._gate = target.gate
        self._sock = sock
        self._writer = hello.writer
        self._group = group
        self._piece = hello.piece
        self._layer_group = hello.group
        self._piece_bytes = target.group_to_pool[hello.group].piece_bytes(hello.piece)
        self._staged = staged
        self._num_started = 0
        self._num_done = 0
        self._refused: list[bytes] = []
        self._failure = ""
        self._requests: queue.SimpleQueue[Pieces | Barrier | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"{group.backend}-receive", daemon=True)

    def run(self) -> None:
        self._thread.start()
        try:
            while True:
                self._requests.put(REQUEST_CODEC.decode(receive_frame(self._sock)))
        except PeerGoneError:
            if self._failure:
                raise WireError(self._failure) from None
        finally:
            self._requests.put(None)
            _end(self._group, self._thread, self._staged)

    def _work(self) -> None:
        try:
            self._receive_all()
        except PeerGoneError:
            return  # that the writer is gone shows on the connection too
        except TransferError as error:
            self._failure = str(error)
        finally:
            shut_down(self._sock)

    def _receive_all(self) -> None:
        pending: _Receiving | None = None
        while True:
            try:
                request = self._requests.get(block=pending is None)
            except queue.Empty:
                assert pending is not None
                self._finish(pending)
                pending = None
                continue
            started = self._start(request) if isinstance(request, Pieces) else None
            if pending is not None:
                self._finish(pending)
            pending = started
            if request is None:
                return
            if isinstance(request, Barrier):
                self._num_done += 1
                send_frame(self._sock, ACK_CODEC.encode(Ack(self._num_done, tuple(self._refused))))
                self._refused.clear()

    def _start(self, pieces: Pieces) -> _Receiving:
        staging = self._staged[self._num_started % _NUM_STAGED]
        self._num_started += 1
        total, capacity = sum(pieces.part_bytes), len(staging.data)
        is_landing = pieces.landing_id != _NO_LANDING
        if not pieces.part_bytes or min(pieces.part_bytes) < 1 or total > capacity:
            raise WireError(f"messages of {pieces.part_bytes} bytes do not fit into {capacity}")
        if is_landing and total != len(pieces.block_ids) * self._piece_bytes:
            raise WireError(f"{total} bytes for {len(pieces.block_ids)} pieces of {self._piece_bytes}")
        works: list[PairWork] = []
        start = 0
        for count in pieces.part_bytes:
            works.append(self._group.start_receive(staging.data[start : start + count]))
            start += count
        return _Receiving(pieces, staging, works)

    def _finish(self, receiving: _Receiving) -> None:
        for work in receiving.works:
            self._group.wait(work)
        landing_id, ids = receiving.pieces.landing_id, receiving.pieces.block_ids
        if landing_id == _NO_LANDING:
            return
        landing = self._gate.find(landing_id, self._writer)
        has_all = landing is not None and landing.has_blocks(self._layer_group, ids)
        if landing is not None and has_all and landing.start_receiving():
            try:
                receiving.staging.scatter(ids, self._piece)
            finally:
                landing.end_receiving()
        elif landing_id not in self._refused:
            self._refused.append(landing_id)


class _Send(NamedTuple):
    """Bytes [start, end) of a staging area to send; `is_last` of them, so that it is free after. The device
    sends them once it has passed `packed` (None: they are packed)."""

    staging: StagingArea
    start: int
    end: int
    is_last: bool
    packed: Mark | None = None


class PairChannel(Channel):
    """The writing thread packs into one staging area while another thread sends the others. On a device it
    queues the packing, and the sends behind it, and waits for the sums once in a write."""

    def __init__(
        self,
        rank: WriterRank,
        lane: Lane,
        connection: Connection,
        num_blocks: int,
        group: PairGroup,
        staged: Sequence[StagingArea],
        on_lost: Callable[[str], None],
    ) -> None:
        on_host = rank.pool.device == "cpu"
        device = interface_of(connection.sock.getsockname()[0]) if on_host else rank.pool.device
        self.transport = group.backend
        super().__init__(rank, lane, (connection,), num_blocks, device, on_lost)
        self._connection = connection
        self._group = group
        self._changed = threading.Condition()
        self._staged = staged
        self._message_bytes = len(staged[0].data)
        self._free = list(staged)
        self._num_unsent = 0
        self._sends: queue.SimpleQueue[_Send | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name=f"{self.transport}-send", daemon=True)
        self._sender.start()

    def measure(self, clock: Clock) -> Measured:
        """Time empty round trips, and messages of full size, several where one takes too little time."""
        return self._measure_large(clock, self._message_bytes)

    def close(self) -> None:
        self.interrupt()
        self._sends.put(None)
        _end(self._group, self._sender, self._staged)
        super().close()

    def _write_batch(self, landing_id: bytes, moves: Sequence[BlockMove], stopped: Stopped) -> list[int]:
        per_message = self._message_bytes // self.piece_bytes
        sums: list[int] = []
        packing: list[PendingSums] = []
        try:
            for start in range(0, len(moves), per_message):
                if stopped():
                    raise PushStoppedError("stopped on request")
                part = moves[start : start + per_message]
                ids = [move.src_block for move in part]
                staging = self._take(stopped)
                pending = staging.start_gather(ids, self._piece)
                if pending is None:
                    sums += staging.gather(ids, self._piece)
                else:
                    packing.append(pending)
                num_bytes = len(part) * self.piece_bytes
                self._announce(landing_id, part, num_bytes)
                packed = None if pending is None else pending.mark
                self._submit(_Send(staging, 0, num_bytes, is_last=True, packed=packed))
        finally:  # nothing reads the pool after, however this ends, also where one of these fails
            with contextlib.ExitStack() as awaited:
                for each in reversed(packing):
                    awaited.callback(lambda it: sums.extend(it.result()), each)
        return sums

    def _write_block(self, landing_id: bytes, move: BlockMove, corrupt: bool, stopped: Stopped) -> int:
        staging = self._take(stopped)
        (checksum,) = staging.gather([move.src_block], self._piece)
        if corrupt:
            staging.flip_first_bit()
        middle, end = self.piece_bytes // 2, self.piece_bytes
        self._announce(landing_id, [move], middle, end - middle)
        self._submit(_Send(staging, 0, middle, is_last=False))
        self._await(lambda: self._num_unsent == 0, stopped)
        self._faults.at("push.half")
        self._submit(_Send(staging, middle, end, is_last=True))
        return checksum

    def _request_ack(self, connection: Connection, stopped: Stopped) -> None:
        send_frame(connection.sock, REQUEST_CODEC.encode(Barrier()))

    def _write_scratch(self, num_bytes: int, stopped: Stopped) -> None:
        for start in range(0, num_bytes, self._message_bytes):
            staging = self._take(stopped)
            count = min(self._message_bytes, num_bytes - start)
            self._announce(_NO_LANDING, (), count)
            self._submit(_Send(staging, 0, count, is_last=True))

    def _take(self, stopped: Stopped) -> StagingArea:
        """Return a staging area that nothing uses."""
        self._await(lambda: bool(self._free), stopped)
        return self._free.pop()

    def _await(self, condition: Callable[[], bool], stopped: Stopped) -> None:
        """Wait for the condition. A message cannot be left half sent, so a push that is stopped while the
        target takes nothing costs the connection (`PeerGoneError`)."""
        with self._changed:
            while not condition():
                self.check()
                if not self._changed.wait(STALLED_S) and stopped():
                    self.interrupt("given up: a push was stopped and the target took no bytes")

    def _announce(self, landing_id: bytes, moves: Sequence[BlockMove], *part_bytes: int) -> None:
        pieces = Pieces(landing_id, tuple(move.dst_block for move in moves), part_bytes)
        send_frame(self._connection.sock, REQUEST_CODEC.encode(pieces))

    def _submit(self, send: _Send) -> None:
        with self._changed:
            self._num_unsent += 1
        self._sends.put(send)

    def _send_all(self) -> None:
        """Send in order; the next message is queued before the one before is awaited."""
        under_way: deque[tuple[_Send, PairWork]] = deque()
        try:
            while (send := self._next_send(under_way)) is not None:
                packed = None if send.packed is None else send.packed.event
                data = send.staging.data[send.start : send.end]
                under_way.append((send, self._group.start_send(data, packed)))
                if len(under_way) == _NUM_PACKED - 1:
                    self._await_sent(*under_way.popleft())
        except PeerGoneError as error:
            self._end(str(error))

    def _next_send(self, under_way: deque[tuple[_Send, PairWork]]) -> _Send | None:
        """Return what to send next, None at the end; until there is something, await what is under way."""
        while under_way:
            try:
                return self._sends.get_nowait()
            except queue.Empty:
                self._await_sent(*under_way.popleft())
        return self._sends.get()

    def _await_sent(self, send: _Send, work: PairWork) -> None:
        self._group.wait(work)
        with self._changed:
            self._num_unsent -= 1
            if send.is_last:
                self._free.append(send.staging)
            self._changed.notify_all()

    def _lose(self, reason: str) -> bool:
        first = super()._lose(reason)
        self._group.abort()
        shut_down(self._connection.sock)
        with self._changed:
            self._changed.notify_all()
        return first


def listen_pair(kind: type[PairGroup], target: TargetRank) -> PairListener | None:
    """Return a listener; None: the pool does not lie where pairs of this kind send from."""
    return PairListener(kind, target) if kind.is_possible(target.device) else None


def connect_pair(
    kind: type[PairGroup],
    rank: WriterRank,
    lane: Lane,
    address: str,
    connection_id: bytes,
    on_lost: Callable[[str], None],
) -> PairChannel:
    """Open a channel; the text of `TransferError` gives the reason of a failure."""
    if not kind.is_possible(rank.pool.device):
        raise PathError(f"{kind.backend}: not for KV on {rank.pool.device}")
    staged = _stage(rank.pool, lane.piece, _NUM_PACKED)
    with opening(kind.backend, address) as undo:
        hello = rank.hello(lane, connection_id)
        sock, welcome = greet(undo, open_socket(address), rank.trust, hello)
        store = OFFER_CODEC.decode(receive_frame(sock)).store
        group = form_pair(kind, store, WRITER, rank.pool.device, sock.getsockname()[0])
        connection = Connection(sock, kind.backend)
        channel = PairChannel(rank, lane, connection, welcome.num_blocks, group, staged, on_lost)
    channel.start()
    return channel


def _stage(pool: KvPool, piece: Shard, count: int) -> list[StagingArea]:
    """Return so many staging areas, before the pair forms. `PathError` when there is no memory for them."""
    num_bytes = staging_bytes(pool.piece_bytes(piece), pool.device)
    try:
        return [StagingArea(pool, num_bytes) for _ in range(count)]
    except (torch.OutOfMemoryError, MemoryError, OSError) as error:
        raise PathError(f"no memory for {count} messages of {num_bytes} bytes on {pool.device}") from error


def _end(group: PairGroup, thread: threading.Thread, staged: Sequence[StagingArea]) -> None:
    """Abort, wait for the thread that this sets free, and release the pair. If something hangs all the same,
    the pair is left behind: nothing that it holds is used again, nor is its staging memory, until a later
    end finds that it has ended."""
    release_left_behind()
    group.abort()
    thread.join(_END_TIMEOUT_S)
    if thread.is_alive() or not group.close(_END_TIMEOUT_S):
        with _left_behind_lock:
            _left_behind.append(_LeftBehind(group, thread, staged))
        _log.warning("%s did not end within %.0f s of its abort", thread.name, _END_TIMEOUT_S)


def release_left_behind() -> None:
    """Release the pairs that did not end in time and have ended since."""
    with _left_behind_lock:
        _left_behind[:] = [it for it in _left_behind if it.thread.is_alive() or not it.group.close(0.0)]
