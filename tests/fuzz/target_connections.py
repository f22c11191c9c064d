"""Connections over loopback to every kind of listener: strangers, and peers that know the secret and lie."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import struct
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random

import msgspec
from listeners import KINDS, ListenerProcess
from service_harness import LAYOUT, WRITER
from store_harness import COMPATIBILITY, MODEL, StoreHarness
from trust_files import FILES, TRUST

from kvtransfer.codec import framed, read_frame
from kvtransfer.errors import PeerGoneError
from kvtransfer.messages import PROTOCOL_VERSION
from kvtransfer.rpc.handshake import (
    HANDSHAKE_CODEC,
    ClientHandshake,
    prove_as_client,
    receive_frame,
    send_frame,
)
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.messages.admin_requests import (
    AdminHello,
    ListRequest,
    PurgeRequest,
    StatRequest,
    StoreStat,
    VerifyRequest,
)
from kvtransfer.store.messages.arena_mapping import ArenaGrant, RankHello
from kvtransfer.store.messages.engine_session import (
    EngineHello,
    FetchRelease,
    FetchRequest,
    FindRequest,
    PutCommit,
    PutRequest,
)
from kvtransfer.store.messages.owner_codec import FROM_OWNER_CODEC, STORE_PROTOCOL, TO_OWNER_CODEC, ToOwner
from kvtransfer.store.messages.record_exchange import OwnerHello, SendRecords, StopSending
from kvtransfer.transports.onesided import Sync, Unmapped
from kvtransfer.transports.stream_sockets import HELLO_CODEC, ChannelHello
from tests.fuzz.message_grammar import MessageGrammar
from tests.fuzz.mutation import mutate_bytes
from tests.fuzz.target import FindingError, Target, stderr_in
from workers.messages.rank_channel import RANK_UP_CODEC

# How long the other side may take to end what it serves.
WAIT_S = 15.0
# The channel of an engine core to a rank, which takes over a rank's identity, and with it is used up.
_PROTOCOLS = ("ranks", "shm", "tcp")


def open_targets(stack: ExitStack, folder: Path) -> list[Target]:
    """Return targets of strangers and of peers for each kind of listener, and those of a node's store."""
    with stderr_in(folder / "listeners.log"):
        listening = stack.enter_context(ListenerProcess(FILES))
    processes = (listening.process_id,)
    listeners = _Listeners(listening)
    store = _Store(stack, folder)
    return [
        *(Target(f"stranger, {kind}", partial(listeners.stranger, kind), 15, processes) for kind in KINDS),
        *(Target(f"peer, {kind}", partial(listeners.peer, kind), 20, processes) for kind in _PROTOCOLS),
        Target("peer, store", store.run, 100, (store.process_id,)),
    ]


def read_to_the_end(sock: socket.socket) -> bytes:
    """Say that nothing more comes, and return what still does."""
    received = b""
    with contextlib.suppress(OSError):  # the other side was first
        sock.shutdown(socket.SHUT_WR)
    try:
        while part := sock.recv(1 << 16):
            received += part
    except ConnectionError:  # closed with our bytes unread
        pass
    except TimeoutError as error:
        raise FindingError(f"the connection is still open after {WAIT_S:g} s") from error
    return received


class _Listeners:
    """The listeners of a process."""

    def __init__(self, listening: ListenerProcess) -> None:
        self._listening = listening
        self._proof = MessageGrammar(HANDSHAKE_CODEC.union)
        self._up = MessageGrammar(RANK_UP_CODEC.union, {"rank": [0, 1, -1]})
        self._hello = MessageGrammar(HELLO_CODEC.union, _hello_fields())
        # Without `Begin`, since a rank waits for seconds for a landing that it does not know.
        self._request = MessageGrammar(Sync | Unmapped)

    def stranger(self, kind: str, rng: Random) -> str:
        """Who does not know the secret is welcomed by nobody, whatever it sends."""
        client = ClientHandshake(Trust.of(b"another" * 8), "stranger")
        first = client.hello() if rng.random() < 0.5 else self._proof.frame(rng)
        data = framed(first) + framed(self._proof.frame(rng))
        if rng.random() < 0.3:
            data = mutate_bytes(rng, data)
        with self._connect(kind) as sock:
            sock.sendall(data[: rng.randint(0, len(data))] if rng.random() < 0.2 else data)
            received = read_to_the_end(sock)
        if b"Welcome" in received:
            raise FindingError(f"welcomed for {data!r}")
        self._check(kind)
        return "challenged" if received else "closed"

    def peer(self, kind: str, rng: Random) -> str:
        """A peer that breaks the protocol loses its own connection only."""
        with self._connect(kind) as sock:
            prove_as_client(sock, TRUST, "peer")
            sock.settimeout(WAIT_S)
            for frame in self._frames(kind, rng):
                try:
                    sock.sendall(framed(frame))
                except ConnectionError:
                    break
            received = read_to_the_end(sock)
        self._check(kind)
        return "answered" if received else "closed"

    def _frames(self, kind: str, rng: Random) -> list[bytes]:
        if kind == "ranks":
            return [self._up.frame(rng) for _ in range(rng.randint(1, 4))]
        is_honest = rng.random() < 0.7
        frames = [self._hello.message(rng) if is_honest else self._hello.frame(rng)]
        if kind == "shm":
            return frames + [self._request.frame(rng) for _ in range(rng.randrange(4))]
        kinds = [rng.choice((2, 3, 3, 0, 9)) for _ in range(rng.randrange(4))]
        return frames + [struct.pack("<B16sIQ", each, bytes(16), 0, 0) for each in kinds]

    def _connect(self, kind: str) -> socket.socket:
        sock = self._listening.connect(kind)
        sock.settimeout(WAIT_S)
        return sock

    def _check(self, kind: str) -> None:
        """Raise where the listener serves nobody any more."""
        with self._connect(kind) as sock:
            prove_as_client(sock, TRUST, "check")


def _hello_fields() -> dict[str, list[object]]:
    hello = ChannelHello(
        PROTOCOL_VERSION,
        WRITER,
        bytes(16),
        0,
        LAYOUT.shard,
        LAYOUT.shard,
        LAYOUT.head_dim,
        LAYOUT.block_tokens,
        LAYOUT.item_bytes,
    )
    return {name: [_plain(getattr(hello, name))] for name in hello.__struct_fields__}


def _plain(value: object) -> object:
    """Return a value as MessagePack holds it."""
    decoded: object = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    return decoded


def _last_answer(received: bytes) -> str:
    """Return the name of the last message of an owner."""
    stream = io.BytesIO(received)
    last = "nothing"
    with contextlib.suppress(PeerGoneError):  # cut off in the middle of a frame
        while (frame := read_frame(stream)) is not None:
            last = type(FROM_OWNER_CODEC.decode(frame)).__name__
    return last


class _Store:
    """The store server of a node in a process of its own, with a rank that has its arena mapped."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        runner = stack.enter_context(asyncio.Runner())
        harness = StoreHarness(
            folder, nvme_path=str(folder / "nvme"), nvme_bytes=4 << 20, segment_bytes=1 << 20
        )
        stack.callback(lambda: runner.run(harness.close()))
        with stderr_in(folder / "store.log"):
            runner.run(harness.start())
        self._harness = harness
        self.process_id = harness.pid
        self._session = bytes(range(16))
        self._rank = stack.enter_context(self._map_arena())
        self._admin = stack.enter_context(self._open(AdminHello(STORE_PROTOCOL)))
        keys = [bytes([number]) * 16 for number in range(4)]
        self._grammar = MessageGrammar(
            TO_OWNER_CODEC.union,
            {
                "protocol": [STORE_PROTOCOL],
                "session": [self._session],
                "shard": [_plain(MODEL)],
                "shards": [[_plain(MODEL)]],
                "compatibility": [_plain(COMPATIBILITY)],
                "key": keys,
                "chain": keys[:1],
                "keys": [keys, keys[:2], []],
                "parent": [b"", *keys],
                "num_bytes": [65536],
                "granule_bytes": [4096],
                "tenant": ["a", "b", None],
                "offsets": [[0], [4096]],
            },
        )
        # What each kind of client begins with, what it goes on with, and how often it comes from elsewhere.
        self._clients = [
            (MessageGrammar(begin, self._grammar.likely), MessageGrammar(go_on, self._grammar.likely), share)
            for begin, go_on, share in (
                (EngineHello, PutRequest | PutCommit | FindRequest | FetchRequest | FetchRelease, 0.05),
                (AdminHello, StatRequest | ListRequest | VerifyRequest | PurgeRequest, 0.5),
                (OwnerHello, SendRecords | StopSending, 0.5),
                (RankHello, StatRequest, 0.05),
            )
        ]

    def run(self, rng: Random) -> str:
        """The owner outlives every client, and answers an administrator after each."""
        begin, go_on, remote_share = rng.choices(self._clients, (6, 2, 2, 1))[0]
        frames = [begin.message(rng) if rng.random() < 0.9 else self._grammar.frame(rng)]
        for _ in range(rng.randrange(6)):
            frames.append(go_on.message(rng) if rng.random() < 0.9 else self._grammar.frame(rng))
        with self._connect(is_remote=rng.random() < remote_share) as sock:
            for frame in frames:
                try:
                    sock.sendall(framed(frame))
                except ConnectionError:
                    break
            received = read_to_the_end(sock)
        send_frame(self._admin, TO_OWNER_CODEC.encode(StatRequest()))
        if not isinstance(FROM_OWNER_CODEC.decode(receive_frame(self._admin)), StoreStat):
            raise FindingError("the owner does not answer an administrator any more")
        return _last_answer(received)

    def _connect(self, *, is_remote: bool = False) -> socket.socket:
        if is_remote:
            host, _, port = self._harness.address.rpartition(":")
            sock = socket.create_connection((host, int(port)))
        else:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(f"\0{self._harness.settings.name}")
        sock.settimeout(WAIT_S)
        prove_as_client(sock, TRUST, "peer")
        sock.settimeout(WAIT_S)
        return sock

    def _open(self, hello: ToOwner) -> socket.socket:
        sock = self._connect()
        send_frame(sock, TO_OWNER_CODEC.encode(hello))
        return sock

    def _map_arena(self) -> socket.socket:
        sock = self._open(RankHello(STORE_PROTOCOL, self._session, 0, b""))
        assert isinstance(FROM_OWNER_CODEC.decode(receive_frame(sock)), ArenaGrant)
        _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
        for descriptor in descriptors:
            socket.close(descriptor)
        return sock
