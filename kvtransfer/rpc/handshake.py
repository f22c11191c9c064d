"""The mutual proof of the cluster secret with which every connection starts (sans-I/O).

    client                                   server
    Hello(nonce_c, name)              ->
                                      <-     Challenge(nonce_s, HMAC("server", nonce_c, nonce_s, name))
    Proof(HMAC("client", ...))        ->
                                      <-     Welcome() or the connection closes

Neither side sends its proof before the other has committed to a nonce, so neither can be replayed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from kvtransfer.codec import Codec, Message
from kvtransfer.errors import ProofError

NONCE_BYTES = 16


class Hello(Message, frozen=True):
    """First frame: who connects (for logs only; it proves nothing) and a fresh nonce."""

    name: str
    nonce: bytes


class Challenge(Message, frozen=True):
    """The server's proof and its own nonce."""

    nonce: bytes
    proof: bytes


class Proof(Message, frozen=True):
    """The client's proof."""

    proof: bytes


class Welcome(Message, frozen=True):
    """Both sides have proven the secret; the next frame belongs to the protocol above."""


HandshakeMessage = Hello | Challenge | Proof | Welcome
HANDSHAKE_CODEC: Codec[HandshakeMessage] = Codec(HandshakeMessage)


def draw_secret() -> bytes:
    """A fresh 256-bit cluster secret."""
    return secrets.token_bytes(32)


def draw_id() -> bytes:
    """128 random bits: landing ids, connection ids."""
    return secrets.token_bytes(16)


class ClientHandshake:
    """The connecting side. Send `hello()`, feed the reply to `answer()`, send its result, await Welcome."""

    def __init__(self, secret: bytes, name: str) -> None:
        self._secret = secret
        self._name = name
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    def hello(self) -> bytes:
        return HANDSHAKE_CODEC.encode(Hello(self._name, self._nonce))

    def answer(self, frame: bytes) -> bytes:
        """The proof to send; `ProofError` when the server's own proof is wrong."""
        challenge = HANDSHAKE_CODEC.decode(frame)
        if not isinstance(challenge, Challenge):
            raise ProofError(f"expected Challenge, got {type(challenge).__name__}")
        expected = _mac(self._secret, b"server", self._nonce, challenge.nonce, self._name)
        if not hmac.compare_digest(expected, challenge.proof):
            raise ProofError("the server does not know the cluster secret")
        proof = _mac(self._secret, b"client", self._nonce, challenge.nonce, self._name)
        return HANDSHAKE_CODEC.encode(Proof(proof))

    def finish(self, frame: bytes) -> None:
        """Check the server's last frame."""
        if not isinstance(HANDSHAKE_CODEC.decode(frame), Welcome):
            raise ProofError("the server did not welcome us")


class ServerHandshake:
    """The accepting side. Feed Hello to `challenge()`, send the result, feed Proof to `welcome()`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._client_nonce = b""
        self.client_name = ""

    def challenge(self, frame: bytes) -> bytes:
        hello = HANDSHAKE_CODEC.decode(frame)
        if not isinstance(hello, Hello) or len(hello.nonce) != NONCE_BYTES:
            raise ProofError("expected Hello with a nonce")
        self.client_name = hello.name
        self._client_nonce = hello.nonce
        proof = _mac(self._secret, b"server", hello.nonce, self._nonce, hello.name)
        return HANDSHAKE_CODEC.encode(Challenge(self._nonce, proof))

    def welcome(self, frame: bytes) -> bytes:
        """The last frame to send; `ProofError` when the client's proof is wrong."""
        proof = HANDSHAKE_CODEC.decode(frame)
        if not isinstance(proof, Proof):
            raise ProofError(f"expected Proof, got {type(proof).__name__}")
        expected = _mac(self._secret, b"client", self._client_nonce, self._nonce, self.client_name)
        if not hmac.compare_digest(expected, proof.proof):
            raise ProofError(f"{self.client_name!r} does not know the cluster secret")
        return HANDSHAKE_CODEC.encode(Welcome())


def _mac(secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes, name: str) -> bytes:
    text = b"|".join((b"tandem-1", role, client_nonce, server_nonce, name.encode()))
    return hmac.new(secret, text, hashlib.sha256).digest()
