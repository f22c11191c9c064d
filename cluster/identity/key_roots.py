"""Key roots: the secrets from which gateways derive the roots of block-key chains (`kvtransfer.blocks.keys`).

A file holds one root a line, `<id> <base64 of 32 bytes>`: the one in use or, while they are rotated, two, the
newest first:

    a --rotate--> b a --end--> b
                  |
                  a prompt uses the chain of which more is cached

Gateways alone read it. Replicas, ranks and stores see keys and the roots of chains, never a secret. The id
says which root is meant, and nothing of the secret.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cluster.errors import ConfigError
from cluster.identity.watched_file import WatchedFile
from kvtransfer.blocks.keys import key_slices, root_key
from kvtransfer.common.clock import Clock, give_way
from kvtransfer.common.os_errors import os_reason

SECRET_BYTES = 32
FIELD = "auth.key_root_file"
# The name of a file that was not configured, in the folder of the NVMe records whose keys depend on it.
KEPT_NAME = "key-root"
FILE_MODE = 0o600

_MAX_ROOTS = 2
_ID_BYTES = 4
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log = logging.getLogger("tandem.keys")


@dataclass(frozen=True, slots=True)
class KeyRoot:
    """Represents one root secret and the name by which logs and people refer to it."""

    id: str
    secret: bytes = field(repr=False)


class BlockChain(NamedTuple):
    """The keys of a prompt's full blocks, and the root that they begin at."""

    root_key: bytes
    block_keys: tuple[bytes, ...]


class KeyRoots:
    """The roots in use at one gateway, and the chains of its prompts.

    `follow` reads the file again when it changes. A file that cannot be read any more, or is wrong, leaves
    the last good roots in use.
    """

    def __init__(
        self,
        path: Path | None,
        draw: Callable[[int], bytes],
        block_tokens: int,
        num_cached_blocks: Callable[[Sequence[bytes]], int],
    ) -> None:
        """Read the file; `ConfigError` when it cannot be used. None: draw a root, which nobody else knows.

        `num_cached_blocks` returns how many leading blocks of a chain are cached, wherever most are; it is
        asked only while there are two roots.
        """
        self._file = None if path is None else WatchedFile(path, FIELD, parse_key_roots)
        self._drawn = (draw_key_root(draw),)
        self._block_tokens = block_tokens
        self._num_cached_blocks = num_cached_blocks

    @property
    def current(self) -> tuple[KeyRoot, ...]:
        """The roots in use, the newest first."""
        return self._drawn if self._file is None else self._file.content

    async def follow(self, clock: Clock) -> None:
        """Follow changes of the file until cancelled."""
        if self._file is not None:
            await self._file.follow(clock, self._changed)

    async def chain(self, prompt: bytes, fingerprint: bytes, sharing_group: str) -> BlockChain:
        """Return the chain of a prompt (token ids as uint32 little-endian) for this group and model.

        Of two roots it is the one under which more of the prompt is cached, else the newer one. Between two
        slices of a long prompt the event loop does other work.
        """
        chains = [await self._chain(root, prompt, fingerprint, sharing_group) for root in self.current]
        if len(chains) == 1:
            return chains[0]
        return max(chains, key=lambda chain: self._num_cached_blocks(chain.block_keys))

    async def _chain(
        self, root: KeyRoot, prompt: bytes, fingerprint: bytes, sharing_group: str
    ) -> BlockChain:
        parent = root_key(root.secret, fingerprint, sharing_group)
        keys: list[bytes] = []
        for part in key_slices(parent, prompt, self._block_tokens):
            if keys:
                await give_way()
            keys += part
        return BlockChain(parent, tuple(keys))

    def _changed(self) -> None:
        _log.info("key roots in use: %s", ", ".join(root.id for root in self.current))


def parse_key_roots(text: bytes) -> tuple[KeyRoot, ...]:
    """Parse the content of a file; `ValueError` describes the fault, and shows no secret."""
    try:
        lines = [line.split() for line in text.decode("ascii").splitlines()]
    except UnicodeDecodeError as error:
        raise ValueError("holds bytes that are not ASCII") from error
    roots = [_parse_line(number, words) for number, words in enumerate(lines, 1) if words]
    if not 1 <= len(roots) <= _MAX_ROOTS:
        raise ValueError(f"has {len(roots)} roots; one is needed, or two while they are rotated")
    if len(roots) > 1 and (roots[0].id == roots[1].id or roots[0].secret == roots[1].secret):
        raise ValueError("its two roots have the same id or the same secret")
    return tuple(roots)


def draw_key_root(draw: Callable[[int], bytes]) -> KeyRoot:
    """Return a new root; `draw` returns this many random bytes."""
    return KeyRoot(draw(_ID_BYTES).hex(), draw(SECRET_BYTES))


def keep_key_root(folder: Path, draw: Callable[[int], bytes]) -> Path:
    """Return the file with the root that this folder keeps, which is drawn where there is none."""
    path = folder / KEPT_NAME
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _write(path, [draw_key_root(draw)], replaces=False)
    except OSError as error:
        raise ConfigError(
            f"{FIELD}: none is given, and none can be kept in {folder}: {os_reason(error, has_path=True)}"
        ) from error
    return path


def key_root_proof(path: Path, question: bytes) -> bytes | str:
    """Return a proof that requires knowledge of the roots in the file, or why they cannot be read."""
    try:
        roots = _read(path)
    except ConfigError as error:
        return str(error)
    secrets = b"".join(root.secret for root in roots)
    return hmac.digest(secrets, b"same key roots" + question, "sha256")


def rotate_key_root(path: Path, draw: Callable[[int], bytes]) -> tuple[KeyRoot, ...]:
    """Put a new root before the one in the file, which is made where it is missing; return its roots."""
    roots = _read(path) if path.exists() else ()
    if len(roots) == _MAX_ROOTS:
        raise ConfigError(
            f"{path}: the rotation from {roots[1].id} to {roots[0].id} has not ended; end it first (--end)"
        )
    return _replace(path, (draw_key_root(draw), *roots))


def end_rotation(path: Path) -> tuple[KeyRoot, ...]:
    """Remove the older of two roots from the file, and return the rest."""
    roots = _read(path)
    if len(roots) < _MAX_ROOTS:
        raise ConfigError(f"{path}: it has one root; there is no rotation to end")
    return _replace(path, roots[:1])


def _parse_line(number: int, words: Sequence[str]) -> KeyRoot:
    if len(words) != 2:
        raise ValueError(f"line {number} has {len(words)} words; expected `<id> <base64 of 32 bytes>`")
    root_id, encoded = words
    if not _ID.fullmatch(root_id):
        raise ValueError(f"line {number}: an id has 1 to 64 letters, digits, dots, dashes or underscores")
    try:
        secret = base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ValueError(f"line {number}: the secret is not base64") from error
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"line {number}: the secret has {len(secret)} bytes; {SECRET_BYTES} are needed")
    return KeyRoot(root_id, secret)


def _read(path: Path) -> tuple[KeyRoot, ...]:
    try:
        return parse_key_roots(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _replace(path: Path, roots: tuple[KeyRoot, ...]) -> tuple[KeyRoot, ...]:
    try:
        _write(path, roots, replaces=True)
    except OSError as error:
        raise ConfigError(f"{path}: {os_reason(error, has_path=True)}") from error
    return roots


def _write(path: Path, roots: Sequence[KeyRoot], *, replaces: bool) -> None:
    """Write the file as a whole: readers see the old content or the new. Without `replaces` a file that
    another process has written in the meantime stays."""
    text = "".join(f"{root.id} {base64.b64encode(root.secret).decode()}\n" for root in roots)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if replaces:
        new.replace(path)
        return
    with contextlib.suppress(FileExistsError):
        path.hardlink_to(new)
    new.unlink()
