"""What one-sided transports share: the writer reaches the target's pool without the target's help, so it
asks the target once per landing before its first byte (`Begin`), and the end of its connection is the proof
that it can write no more (`Gate.leave`).

A push that comes late for a closed landing is so refused by the target's own rank. The target closing its own
end proves nothing, so it never counts a writer as gone by that.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

from kvtransfer.codec import Codec, Message
from kvtransfer.errors import PeerGoneError, PushStoppedError, TransferError
from kvtransfer.protocol.gate import RecentIds
from kvtransfer.rpc.handshake import HANDSHAKE_TIMEOUT_S, receive_frame, send_frame
from kvtransfer.transfer_orders import BlockMove, Lane
from kvtransfer.transports.base import Channel, Listener, TargetRank, WriterRank
from kvtransfer.transports.stream_sockets import ACK_CODEC, Ack, ChannelHello, Connection, Stopped

_MAX_BEGUN = 4096


class Begin(Message, frozen=True):
    """Writer to target: may this landing be written? Refused ones are named in the Ack."""

    landing_id: bytes


class Sync(Message, frozen=True):
    """Writer to target: answer."""


class Unmapped(Message, frozen=True):
    """Writer to target, its last message: it wrote all it will ever write over this connection. Only
    `cuda_ipc` takes it for a proof."""


REQUEST_CODEC: Codec[Begin | Sync | Unmapped] = Codec(Begin | Sync | Unmapped)


class OneSidedListener(Listener):
    """Offers its pools to proven writers and admits them landing by landing. It listens on a unix socket of
    the abstract namespace under a random name."""

    def __init__(self, target: TargetRank) -> None:
        name = f"tandem-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(f"\0{name}")
        sock.listen()
        super().__init__(target, sock, name)

    @abstractmethod
    def _offer(self, sock: socket.socket, hello: ChannelHello) -> None:
        """Send, after the welcome, what the writer needs to reach the pool of its group."""

    def _serve(self, sock: socket.socket, hello: ChannelHello) -> None:
        connection = self._target.gate.enter(hello.writer)
        try:
            self._send_welcome(sock, hello)
            self._offer(sock, hello)
            self._answer(sock, connection)
        finally:
            _await_end(sock)
            if not self._closing.is_set():
                self._target.gate.leave(connection)

    def _answer(self, sock: socket.socket, connection: bytes) -> bool:
        """Answer requests. True when the writer has sent `Unmapped`, False when its connection ended."""
        num_done = 0
        while True:
            try:
                request = REQUEST_CODEC.decode(receive_frame(sock))
            except PeerGoneError:
                return False
            if isinstance(request, Unmapped):
                return True
            refused: tuple[bytes, ...] = ()
            if isinstance(request, Begin) and not self._target.gate.admit(request.landing_id, connection):
                refused = (request.landing_id,)
            num_done += 1
            send_frame(sock, ACK_CODEC.encode(Ack(num_done, refused)))


class OneSidedChannel(Channel):
    """A channel with one connection, over which landings are begun. It writes at most `batch_bytes` between
    two looks at whether it shall stop, and waits when `most_batches` are under way."""

    batch_bytes: int
    most_batches = 1

    def __init__(
        self,
        rank: WriterRank,
        lane: Lane,
        connection: Connection,
        num_blocks: int,
        device: str,
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__(rank, lane, (connection,), num_blocks, device, on_lost)
        self._connection = connection
        self._begun = RecentIds(_MAX_BEGUN)
        self._batch = max(1, self.batch_bytes // self.piece_bytes)

    def begin(self, landing_id: bytes, stopped: Stopped) -> None:
        self.check()
        if landing_id not in self._begun:
            number = self._connection.request(lambda: _send(self._connection, Begin(landing_id)))
            self._connection.await_answer(number, stopped)
            self._check_accepted(landing_id)
            self._begun.add(landing_id)

    def _write_batch(self, landing_id: bytes, moves: Sequence[BlockMove], stopped: Stopped) -> list[int]:
        assert landing_id in self._begun
        sums: list[int] = []
        under_way: deque[Callable[[], list[int]]] = deque()
        try:
            for start in range(0, len(moves), self._batch):
                if stopped():
                    raise PushStoppedError("stopped on request")
                under_way.append(self._begin_batch(moves[start : start + self._batch], stopped))
                if len(under_way) == self.most_batches:
                    sums += under_way.popleft()()
            while under_way:
                sums += under_way.popleft()()
        finally:  # nothing is under way after, however this ends; the first error is the one that counts
            for finish in under_way:
                with contextlib.suppress(TransferError, RuntimeError):
                    finish()
        return sums

    @abstractmethod
    def _begin_batch(self, moves: Sequence[BlockMove], stopped: Stopped) -> Callable[[], list[int]]:
        """Begin to write the pieces of these blocks. Return a function that waits until they are written and
        returns their sums at the source."""

    def _request_ack(self, connection: Connection, stopped: Stopped) -> None:
        _send(connection, Sync())


def connect_unix(address: str) -> socket.socket:
    """Connect to a `OneSidedListener`; the socket has the timeout of the handshake."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    try:
        sock.connect(f"\0{address}")
    except OSError:
        sock.close()
        raise
    return sock


def _send(connection: Connection, request: Begin | Sync) -> None:
    send_frame(connection.sock, REQUEST_CODEC.encode(request))


def _await_end(sock: socket.socket) -> None:
    """Return when the writer's end is closed, regardless of what else it sends; shut down our side first."""
    with contextlib.suppress(OSError):  # reset: the writer closed with our answers unread
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
