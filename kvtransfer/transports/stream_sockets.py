"""Open the stream sockets of a channel.

Each starts with the proof of the secret, `ChannelHello` and `ChannelWelcome` (or a refusal). What the
transport needs follows. The writer sends requests, which the target answers in order with `Ack`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple

from msgspec import Meta

from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.codec import Codec, Message
from kvtransfer.errors import PathError, PeerGoneError, PushStoppedError, TransferError
from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.protocol.gate import RecentIds
from kvtransfer.rpc.handshake import HANDSHAKE_TIMEOUT_S, prove_as_client, receive_frame, send_frame
from kvtransfer.rpc.listener import shut_down
from kvtransfer.rpc.trust import Trust

# A stopped push waits this long for a target that neither reads nor answers before it gives up.
STALLED_S = 1.0

# Asked wherever a write could wait, from any of the channel's threads: True when it shall end.
Stopped = Callable[[], bool]


class ChannelHello(Message, frozen=True):
    """Writer to target, after the proof: who writes to which rank, how its blocks are laid out, and which
    piece of them it will write. They are blocks of one group of layers, of those named if there are
    several."""

    protocol: int
    writer: ReplicaIdentity
    connection_id: bytes
    target_rank: int
    piece: Shard
    shard: Shard
    head_dim: int
    block_tokens: int
    item_bytes: int
    scale_bytes: int = 0
    num_kinds: int = 2
    group: int = 0
    group_layers: tuple[int, ...] | None = None

    @property
    def layout(self) -> BlockLayout:
        sizes = self.head_dim, self.block_tokens, self.item_bytes, self.scale_bytes, self.num_kinds
        return BlockLayout(self.shard, *sizes, self.group_layers)


class ChannelWelcome(Message, frozen=True):
    """Target to writer: accepted; its pool has this many blocks, whose ids have 32 bits."""

    num_blocks: Annotated[int, Meta(ge=0, le=1 << 32)]


class ChannelRefusal(Message, frozen=True):
    """Target to writer: not accepted, and why; the connection closes."""

    reason: str


class Ack(Message, frozen=True):
    """Target to writer: the first `num_done` requests are done, and so is all that was sent before them.
    `refused` are landings of which something was not accepted since the Ack before."""

    num_done: int
    refused: tuple[bytes, ...]


HELLO_CODEC: Codec[ChannelHello | ChannelWelcome | ChannelRefusal] = Codec(
    ChannelHello | ChannelWelcome | ChannelRefusal
)
ACK_CODEC: Codec[Ack] = Codec(Ack)


@contextlib.contextmanager
def opening(transport: str, address: str) -> Iterator[contextlib.ExitStack]:
    """Open a channel in the block: the entries that the block has put on the stack are undone if it fails,
    and an `OSError` becomes a `PathError`."""
    with contextlib.ExitStack() as undo:
        try:
            yield undo
        except OSError as error:
            raise PathError(f"{transport} {address}: {error}") from error
        undo.pop_all()


class Greeted(NamedTuple):
    """A connection whose target has accepted the hello: the socket to use, and its answer."""

    sock: socket.socket
    welcome: ChannelWelcome


def greet(undo: contextlib.ExitStack, connected: socket.socket, trust: Trust, hello: ChannelHello) -> Greeted:
    """Open as the writer: send the proof, then the hello. `ProofError`, `PathError` or `PeerGoneError` when
    that fails; `undo` closes the connection, which keeps a timeout until a `Connection` takes it."""
    undo.enter_context(connected)
    sock = undo.enter_context(prove_as_client(connected, trust, hello.writer.replica_id))
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    send_frame(sock, HELLO_CODEC.encode(hello))
    answer = HELLO_CODEC.decode(receive_frame(sock))
    if not isinstance(answer, ChannelWelcome):
        raise PathError(f"refused by the target: {getattr(answer, 'reason', answer)}")
    return Greeted(sock, answer)


class Connection:
    """The writer's end of a greeted socket. A thread of its own reads the Acks."""

    def __init__(self, sock: socket.socket, transport: str) -> None:
        sock.settimeout(None)
        self.sock = sock
        self._hung_up = select.poll()
        self._hung_up.register(sock, 0)
        self._on_end: Callable[[str], None] = lambda _: None
        self._answered = threading.Condition()
        self._num_requests = 0
        self._num_done = 0
        self._refused = RecentIds()
        self._lost = ""
        self._reader = threading.Thread(target=self._read, name=f"{transport}-acks", daemon=True)

    def start(self, on_end: Callable[[str], None]) -> None:
        """Read Acks; `on_end(reason)` is called once, from the reading thread, when the socket ends."""
        self._on_end = on_end
        self._reader.start()

    def request(self, send: Callable[[], None]) -> int:
        """Send one request by `send`; returns its number, for `await_answer`."""
        self._num_requests += 1
        send()
        return self._num_requests

    def await_answer(self, number: int, stopped: Stopped) -> None:
        """Wait for the Ack of a request. `PushStoppedError` when stopped while the target does not answer."""
        with self._answered:
            while self._num_done < number:
                self.check()
                if not self._answered.wait(STALLED_S) and stopped():
                    raise PushStoppedError("stopped while the target did not answer")

    def has_refused(self, landing_id: bytes) -> bool:
        """Whether the target refused something of the landing, as far as answers have come."""
        with self._answered:
            return landing_id in self._refused

    def check(self) -> None:
        """Raise `PeerGoneError` when the connection is lost."""
        if self._lost:
            raise PeerGoneError(self._lost)

    def check_other_end(self) -> None:
        """Raise `PeerGoneError` when the target's end is closed, which the reading thread may not know
        yet."""
        self.check()
        if self._hung_up.poll(0):
            raise PeerGoneError("connection closed by the other side")

    def lose(self, reason: str) -> None:
        """End all waiting for an answer with `PeerGoneError`; callable from any thread."""
        with self._answered:
            self._lost = self._lost or reason
            self._answered.notify_all()

    def close(self) -> None:
        """Close the socket; returns when the reading thread has ended."""
        shut_down(self.sock)
        if self._reader.ident is not None:
            self._reader.join()
        self.sock.close()

    def _read(self) -> None:
        try:
            while True:
                ack = ACK_CODEC.decode(receive_frame(self.sock))
                with self._answered:
                    self._num_done = ack.num_done
                    for landing_id in ack.refused:
                        self._refused.add(landing_id)
                    self._answered.notify_all()
        except TransferError as error:
            self._on_end(str(error))
