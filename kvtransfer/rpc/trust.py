"""What the processes of a cluster know each other by: the cluster secret and, optionally, certificates.

Only the paths of the files (`TrustFiles`) pass between processes; each process reads the files itself, so
that no secret is in an actor's arguments, in Ray's GCS or in a process list.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import ssl
from pathlib import Path
from typing import NoReturn

from kvtransfer.codec import Part
from kvtransfer.common.os_errors import os_reason
from kvtransfer.errors import TrustError
from kvtransfer.rpc.mutual_tls import TlsContexts, TlsFiles

MIN_SECRET_BYTES = 16


class TrustFiles(Part, frozen=True):
    """The paths of the files from which a process makes its `Trust`."""

    secret_file: str
    # None: connections between hosts are not encrypted.
    tls: TlsFiles | None = None


class Trust:
    """What a process proves itself by, and checks others by. It stays in its process: it cannot be pickled,
    and its text shows nothing of the secret."""

    def __init__(self, secret: bytes, tls: TlsContexts | None = None) -> None:
        self.secret = secret
        self._tls = tls

    @classmethod
    def of(cls, secret: bytes) -> Trust:
        """Return the trust of all holders of `secret`."""
        return cls(secret)

    @classmethod
    def read(cls, files: TrustFiles) -> Trust:
        """Read the files; `TrustError` names the one that cannot be used."""
        tls = None if files.tls is None else TlsContexts(files.tls)
        return cls(read_secret(Path(files.secret_file)), tls)

    @classmethod
    def draw(cls) -> Trust:
        """Return the trust of a cluster of its own, with a fresh secret of 256 bits."""
        return cls(secrets.token_bytes(32))

    def key_for(self, purpose: str) -> bytes:
        """Return 256 bits that all holders of the secret derive for this purpose, and no others can."""
        return hmac.digest(self.secret, purpose.encode(), hashlib.sha256)

    def client_tls(self, sock: socket.socket) -> ssl.SSLContext | None:
        """Return the TLS that the connecting side of a connection speaks; None where none is configured, and
        on unix sockets, which do not leave the host."""
        return None if self._tls is None or sock.family == socket.AF_UNIX else self._tls.client

    def server_tls(self, sock: socket.socket) -> ssl.SSLContext | None:
        """Return that of the accepting side."""
        return None if self._tls is None or sock.family == socket.AF_UNIX else self._tls.server

    def __repr__(self) -> str:
        return "Trust()"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Trust stays in its process; pass the paths of its files (TrustFiles)")


def read_secret(path: Path) -> bytes:
    """Read a cluster secret, without surrounding white space; `TrustError` when the file cannot be read or is
    too short."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise TrustError(
            f"secret_file: {os_reason(error)}; every host of the cluster needs the same file at this path, "
            "readable by this user: make it with `openssl rand -hex 32`, copy it to each host and name it in "
            "secret_file"
        ) from error
    if len(secret) < MIN_SECRET_BYTES:
        raise TrustError(f"secret_file: needs at least {MIN_SECRET_BYTES} bytes, has {len(secret)}")
    return secret


def draw_files(folder: Path) -> TrustFiles:
    """Write a fresh secret of 256 bits into a new file of the folder."""
    path = folder / "cluster-secret"
    write_private(path, secrets.token_hex(32))
    return TrustFiles(str(path))


def write_private(path: Path, text: str) -> None:
    """Write a new file that only this user can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
