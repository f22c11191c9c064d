"""The mutual proof of the cluster secret with which every connection starts (sans-I/O).

    client                                   server
    Hello(nonce_c, name, tls)         ->
                                      <-     Challenge(nonce_s, tls, HMAC("server", all of the above))
    Proof(HMAC("client", ...))        ->
                                      <-     Welcome() or the connection closes

Neither side sends its proof before the other has committed to a nonce, so neither can be replayed. Where
certificates are configured (`kvtransfer.rpc.mutual_tls`) TLS follows on the same connection, so that nobody
who does not know the secret reaches its parser, and then the server's Welcome once more, encrypted: with
TLS 1.3 only this shows the client that its certificate was accepted.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import ssl

from kvtransfer.codec import CONTROL_FRAME_BYTES, LENGTH, Codec, Message, framed
from kvtransfer.errors import PeerGoneError, ProofError, TransferError, WireError, shown
from kvtransfer.rpc.mutual_tls import welcome_failure
from kvtransfer.rpc.tls_socket import TlsSocket
from kvtransfer.rpc.trust import Trust

NONCE_BYTES = 16


class Hello(Message, frozen=True):
    """First frame: who connects (for logs only; it proves nothing) and a fresh nonce."""

    name: str
    nonce: bytes
    has_tls: bool


class Challenge(Message, frozen=True):
    """The server's proof and its own nonce."""

    nonce: bytes
    has_tls: bool
    proof: bytes


class Proof(Message, frozen=True):
    """The client's proof."""

    proof: bytes


class Welcome(Message, frozen=True):
    """Both sides have proven the secret; the next frame belongs to the protocol above."""


HandshakeMessage = Hello | Challenge | Proof | Welcome
HANDSHAKE_CODEC: Codec[HandshakeMessage] = Codec(HandshakeMessage)
WELCOME = HANDSHAKE_CODEC.encode(Welcome())


def draw_secret() -> bytes:
    """Draw a fresh 256-bit cluster secret."""
    return secrets.token_bytes(32)


def draw_id() -> bytes:
    """Draw 128 random bits: a landing id or connection id."""
    return secrets.token_bytes(16)


class ClientHandshake:
    """The connecting side. Send `hello()`, feed the reply to `answer()`, send its result, call `agree`, await
    Welcome."""

    def __init__(self, trust: Trust, name: str, *, has_tls: bool = False) -> None:
        self._trust = trust
        self._name = name
        self._has_tls = self._server_has_tls = has_tls
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    def hello(self) -> bytes:
        return HANDSHAKE_CODEC.encode(Hello(self._name, self._nonce, self._has_tls))

    def answer(self, frame: bytes) -> bytes:
        """Return the proof to send; `ProofError` when the server's own proof is wrong."""
        challenge = HANDSHAKE_CODEC.decode(frame)
        if not isinstance(challenge, Challenge):
            raise ProofError(f"expected Challenge, got {type(challenge).__name__}")
        self._server_has_tls = challenge.has_tls
        expected = self._mac(b"server", challenge.nonce)
        if not hmac.compare_digest(expected, challenge.proof):
            raise ProofError("the server does not know the cluster secret")
        return HANDSHAKE_CODEC.encode(Proof(self._mac(b"client", challenge.nonce)))

    def agree(self) -> None:
        """Raise `ProofError` where one side speaks TLS and the other does not; both know it by now."""
        _agree("the server", self._server_has_tls, self._has_tls)

    def finish(self, frame: bytes) -> None:
        """Check the server's last frame."""
        check_welcome(frame)

    def _mac(self, role: bytes, server_nonce: bytes) -> bytes:
        has_tls = self._has_tls, self._server_has_tls
        return _mac(self._trust, role, self._nonce, server_nonce, self._name, has_tls)


class ServerHandshake:
    """The accepting side. Feed Hello to `challenge()`, send the result, feed Proof to `welcome()`."""

    def __init__(self, trust: Trust, *, has_tls: bool = False) -> None:
        self._trust = trust
        self._has_tls = self._client_has_tls = has_tls
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._client_nonce = b""
        self._client_name = ""

    @property
    def client_name(self) -> str:
        """The client's name by its own account, as it may appear in logs."""
        return shown(self._client_name)

    def challenge(self, frame: bytes) -> bytes:
        hello = HANDSHAKE_CODEC.decode(frame)
        if not isinstance(hello, Hello) or len(hello.nonce) != NONCE_BYTES:
            raise ProofError("expected Hello with a nonce")
        self._client_name = hello.name
        self._client_nonce = hello.nonce
        self._client_has_tls = hello.has_tls
        return HANDSHAKE_CODEC.encode(Challenge(self._nonce, self._has_tls, self._mac(b"server")))

    def welcome(self, frame: bytes) -> bytes:
        """Return the last frame to send; `ProofError` when the client's proof is wrong, or when only one of
        the two sides speaks TLS."""
        proof = HANDSHAKE_CODEC.decode(frame)
        if not isinstance(proof, Proof):
            raise ProofError(f"expected Proof, got {type(proof).__name__}")
        if not hmac.compare_digest(self._mac(b"client"), proof.proof):
            raise ProofError(f"'{self.client_name}' does not know the cluster secret")
        _agree(f"'{self.client_name}'", self._client_has_tls, self._has_tls)
        return WELCOME

    def _mac(self, role: bytes) -> bytes:
        has_tls = self._client_has_tls, self._has_tls
        return _mac(self._trust, role, self._client_nonce, self._nonce, self._client_name, has_tls)


def check_welcome(frame: bytes) -> None:
    """Raise `ProofError` where a server's last frame is not its Welcome."""
    if not isinstance(HANDSHAKE_CODEC.decode(frame), Welcome):
        raise ProofError("the server did not welcome us")


def _agree(who: str, has_tls: bool, have_tls: bool) -> None:
    if has_tls and not have_tls:
        raise ProofError(f"{who} speaks TLS and this side does not: name the same inner_tls on both")
    if have_tls and not has_tls:
        raise ProofError(f"{who} does not speak TLS and this side does: name the same inner_tls on both")


def _mac(
    trust: Trust,
    role: bytes,
    client_nonce: bytes,
    server_nonce: bytes,
    name: str,
    has_tls: tuple[bool, bool],
) -> bytes:
    text = b"|".join((b"tandem-2", role, client_nonce, server_nonce, bytes(has_tls), name.encode()))
    return hmac.new(trust.secret, text, hashlib.sha256).digest()


# Frames on a socket, blocking and asyncio. Both sides exchange the proof on the bare socket: nothing is read
# ahead of it, so that an unproven peer takes no more memory than one frame.

HANDSHAKE_TIMEOUT_S = 10.0
# No frame of the proof is longer: a stranger must not make us take memory.
_HANDSHAKE_BYTES = 4096


def send_frame(sock: socket.socket, frame: bytes) -> None:
    """Write one frame; `PeerGoneError` when the connection is closed."""
    try:
        sock.sendall(framed(frame))
    except OSError as error:
        raise PeerGoneError(f"connection lost while sending: {error}") from error


def receive_frame(sock: socket.socket, max_bytes: int = CONTROL_FRAME_BYTES) -> bytes:
    """Read one frame; `PeerGoneError` when the connection ends, `WireError` when the frame is longer."""
    return receive_exactly(sock, _checked_length(receive_exactly(sock, LENGTH.size), max_bytes))


def receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """Read exactly `num_bytes`; `PeerGoneError` when the connection ends before."""
    buffer = bytearray(num_bytes)
    view = memoryview(buffer)
    while view:
        try:
            count = sock.recv_into(view)
        except OSError as error:
            raise PeerGoneError(f"connection lost while receiving: {error}") from error
        if count == 0:
            raise PeerGoneError("connection closed by the other side")
        view = view[count:]
    return bytes(buffer)


def prove_as_client(sock: socket.socket, trust: Trust, name: str) -> socket.socket:
    """Run the connecting side's handshake; `ProofError` or `PeerGoneError` when it fails. Return the socket
    to use from then on, which with TLS is another one that takes over."""
    tls = trust.client_tls(sock)
    handshake = ClientHandshake(trust, name, has_tls=tls is not None)
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    send_frame(sock, handshake.hello())
    send_frame(sock, handshake.answer(receive_frame(sock, _HANDSHAKE_BYTES)))
    handshake.agree()
    handshake.finish(receive_frame(sock, _HANDSHAKE_BYTES))
    secured = wrapped(sock, tls)
    try:
        secure(secured, "the server")
    except TransferError:
        secured.close()
        raise
    secured.settimeout(None)
    return secured


def prove_as_server(sock: socket.socket, trust: Trust) -> str:
    """Run the accepting side's handshake; return the client's name. With TLS `wrapped` and `secure`
    follow."""
    handshake = ServerHandshake(trust, has_tls=trust.server_tls(sock) is not None)
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    send_frame(sock, handshake.challenge(receive_frame(sock, _HANDSHAKE_BYTES)))
    send_frame(sock, handshake.welcome(receive_frame(sock, _HANDSHAKE_BYTES)))
    sock.settimeout(None)
    return handshake.client_name


def wrapped(sock: socket.socket, tls: ssl.SSLContext | None) -> socket.socket:
    """Return the socket that takes over a proven one to speak TLS, at once; the same one without TLS."""
    if tls is None:
        return sock
    is_server = tls.protocol == ssl.PROTOCOL_TLS_SERVER
    return tls.wrap_socket(sock, server_side=is_server, do_handshake_on_connect=False)


def secure(sock: socket.socket, name: str) -> None:
    """Run the TLS handshake of a `wrapped` socket with `name`; nothing without TLS. `ProofError` or
    `PeerGoneError` when it fails. The socket keeps the handshake's timeout."""
    if not isinstance(sock, TlsSocket):
        return
    sock.open(name, HANDSHAKE_TIMEOUT_S)
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    if sock.server_side:
        send_frame(sock, WELCOME)
        return
    try:
        check_welcome(receive_frame(sock, _HANDSHAKE_BYTES))
    except PeerGoneError as error:
        raise welcome_failure(error.__cause__, name) from error


async def send_to(sock: socket.socket, frame: bytes) -> None:
    """Send one frame on a non-blocking socket; `PeerGoneError` when the connection is closed."""
    try:
        await asyncio.get_running_loop().sock_sendall(sock, framed(frame))
    except OSError as error:
        raise PeerGoneError(f"connection lost while sending: {error}") from error


async def receive_from(sock: socket.socket, max_bytes: int = CONTROL_FRAME_BYTES) -> bytes:
    """Receive one frame on a non-blocking socket, and not a byte beyond it; `PeerGoneError` when the
    connection ends, `WireError` when the frame is longer."""
    length = _checked_length(await _receive_bytes(sock, LENGTH.size), max_bytes)
    return await _receive_bytes(sock, length)


async def prove_as_async_client(sock: socket.socket, trust: Trust, name: str) -> None:
    """Run the connecting side's handshake on a non-blocking socket, on which TLS may follow
    (`kvtransfer.rpc.stream.frame_stream`)."""
    handshake = ClientHandshake(trust, name, has_tls=trust.client_tls(sock) is not None)
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        await send_to(sock, handshake.hello())
        await send_to(sock, handshake.answer(await receive_from(sock, _HANDSHAKE_BYTES)))
        handshake.agree()
        handshake.finish(await receive_from(sock, _HANDSHAKE_BYTES))


async def prove_as_async_server(sock: socket.socket, trust: Trust) -> str:
    """Run the accepting side's handshake on a non-blocking socket, on which TLS may follow; returns the
    client's name."""
    handshake = ServerHandshake(trust, has_tls=trust.server_tls(sock) is not None)
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):  # as a whole: also for who sends byte by byte
        await send_to(sock, handshake.challenge(await receive_from(sock, _HANDSHAKE_BYTES)))
        await send_to(sock, handshake.welcome(await receive_from(sock, _HANDSHAKE_BYTES)))
    return handshake.client_name


async def connect_tcp(address: str) -> socket.socket:
    """Connect to "host:port"; the non-blocking socket. `OSError` or `ValueError` when that cannot be."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    error = OSError(f"{host} has no address")
    for family, kind, protocol, _, where in await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, where)
            return sock
        except OSError as failure:
            sock.close()
            error = failure
        except asyncio.CancelledError:
            sock.close()
            raise
    raise error


async def _receive_bytes(sock: socket.socket, num_bytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    received = bytearray()
    while len(received) < num_bytes:
        try:
            part = await loop.sock_recv(sock, num_bytes - len(received))
        except OSError as error:
            raise PeerGoneError(f"connection lost while receiving: {error}") from error
        if not part:
            raise PeerGoneError("connection closed by the other side")
        received += part
    return bytes(received)


def _checked_length(header: bytes, max_bytes: int) -> int:
    (length,) = LENGTH.unpack(header)
    if length > max_bytes:
        raise WireError(f"frame of {length} bytes exceeds the limit of {max_bytes}")
    return int(length)
