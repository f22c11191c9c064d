"""API keys: a file of salted hashes, and its writer.

    tandem_k3vq7yab_Zm9v...   `tandem_`, the key's id (8 characters), `_`, its secret (43 characters)

A secret is 256 random bits, so one round of SHA-256 is as good as a slow hash.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import hmac
import os
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.errors import ConfigError
from cluster.identity.config import AuthConfig, Tenant
from cluster.identity.identity import MAX_PRIORITY, Identity, Role
from cluster.setting_errors import setting_lines
from kvtransfer.common.os_errors import os_reason
from kvtransfer.common.patterns import Matches

KEY_PREFIX = "tandem_"
SALT_BYTES, SECRET_BYTES, ID_BYTES = 16, 32, 5
KEYS_FILE_MODE = 0o600
_MARK_CHARS = 16

_KEY = re.compile(r"tandem_([a-z2-7]{8})_([A-Za-z0-9_-]{43})")
_HEADER = "# API keys of a Tandem cluster: `tandem key` writes this file. Secrets are hashed, not kept.\n"


class KeyEntry(BaseModel):
    """A key of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[
        str, Matches(r"^[a-z2-7]{8}$", "8 lower-case letters or digits from 2 to 7, such as k3vq7yab")
    ]
    # Hexadecimal: random bytes, and SHA-256 over them and the secret.
    salt: Annotated[str, Matches(r"^([0-9a-f]{2}){16,64}$", "16 to 64 bytes in lower-case hexadecimal")]
    hash: Annotated[str, Matches(r"^[0-9a-f]{64}$", "32 bytes in lower-case hexadecimal: a SHA-256")]
    tenant: Tenant
    roles: tuple[Role, ...] = Field(default=("user",), min_length=1)
    # Where they are given, they replace the tenant's own limits.
    max_priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    models: tuple[str, ...] | None = None
    created: datetime
    expires: datetime | None = None
    note: str = ""

    @property
    def expires_at(self) -> float | None:
        """Unix time; a time without zone is UTC."""
        if self.expires is None:
            return None
        zoned = self.expires if self.expires.tzinfo is not None else self.expires.replace(tzinfo=UTC)
        return zoned.timestamp()

    @property
    def mark(self) -> str:
        """What another key of the same id has another one of; it tells nothing of the secret."""
        return hashlib.sha256(f"{self.salt}{self.hash}".encode()).hexdigest()[:_MARK_CHARS]

    def opens_with(self, secret: str) -> bool:
        """Whether this is the key's secret; takes the same time for every answer."""
        return hmac.compare_digest(bytes.fromhex(self.hash), _hashed(bytes.fromhex(self.salt), secret))

    def identity(self, config: AuthConfig) -> Identity:
        """Return the identity that calls with this key."""
        limits = config.limits(self.tenant)
        models = limits.models if self.models is None else self.models
        return Identity(
            name=f"key:{self.id}",
            tenant=self.tenant,
            roles=frozenset(self.roles),
            sharing_group=config.sharing_group(self.tenant),
            max_priority=limits.max_priority if self.max_priority is None else self.max_priority,
            models=frozenset(models) or None,
            method="key",
            expires_at=self.expires_at,
        )


class KeyFile(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[KeyEntry, ...] = ()

    def by_id(self) -> dict[str, KeyEntry]:
        """Return the keys by their ids."""
        return {entry.id: entry for entry in self.keys}


def parse_keys(text: bytes) -> dict[str, KeyEntry]:
    """Parse the file's text; `ValueError` names the bad field."""
    return _parse(text).by_id()


def split_key(token: str) -> tuple[str, str] | None:
    """Return id and secret of an API key; None for a text that has not the form of one."""
    found = _KEY.fullmatch(token)
    return (found[1], found[2]) if found is not None else None


# Compared with where the id is unknown, so that an answer's time does not tell which ids exist.
NO_ENTRY = KeyEntry(
    id="aaaaaaaa",
    salt="00" * SALT_BYTES,
    hash="00" * 32,
    tenant="none",
    created=datetime.fromtimestamp(0, UTC),
)


def _parse(text: bytes) -> KeyFile:
    try:
        raw = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not YAML: {error}") from error
    if raw is None:
        return KeyFile()
    try:
        found = KeyFile.model_validate(raw)
    except ValidationError as error:
        raise ValueError(setting_lines(error, KeyFile)[0]) from error
    if len(found.by_id()) < len(found.keys):
        raise ValueError("keys: an id is there more than once")
    return found


def _hashed(salt: bytes, secret: str) -> bytes:
    return hashlib.sha256(salt + secret.encode()).digest()


# ----------------------------------------------------------------------------------------------
# What `tandem key` does with the file.


def add_key(
    path: Path,
    draw: Callable[[int], bytes],
    *,
    tenant: str,
    roles: tuple[Role, ...],
    created: datetime,
    expires: datetime | None = None,
    max_priority: int | None = None,
    models: tuple[str, ...] | None = None,
    note: str = "",
) -> str:
    """Add a key to the file, which is made where it is missing; return the key, which nothing keeps.

    `draw` returns this many random bytes. `ConfigError` when the file cannot be used, or a field is wrong.
    """
    with _changing(path) as keys:
        known = {entry.id for entry in keys}
        key_id = _draw_id(draw)
        while key_id in known:
            key_id = _draw_id(draw)
        secret = base64.urlsafe_b64encode(draw(SECRET_BYTES)).decode().rstrip("=")
        salt = draw(SALT_BYTES)
        try:
            entry = KeyEntry(
                id=key_id,
                salt=salt.hex(),
                hash=_hashed(salt, secret).hex(),
                tenant=tenant,
                roles=roles,
                max_priority=max_priority,
                models=models,
                created=created,
                expires=expires,
                note=note,
            )
        except ValidationError as error:
            raise ConfigError(setting_lines(error, KeyEntry)[0]) from error
        keys.append(entry)
    return f"{KEY_PREFIX}{key_id}_{secret}"


def revoke_key(path: Path, key_id: str) -> None:
    """Remove a key from the file; `ConfigError` when it is not there."""
    with _changing(path) as keys:
        left = [entry for entry in keys if entry.id != key_id]
        if len(left) == len(keys):
            raise ConfigError(f"{path} has no key {key_id[:100]!r}; `tandem key list` shows the ids")
        keys[:] = left


def read_keys(path: Path) -> list[KeyEntry]:
    """Return the keys of the file, in its order; `ConfigError` when it cannot be read."""
    try:
        return list(_parse(path.read_bytes()).keys)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _draw_id(draw: Callable[[int], bytes]) -> str:
    return base64.b32encode(draw(ID_BYTES)).decode().lower()


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[list[KeyEntry]]:
    """Yield the keys, and write them as they are at the end; one process at a time changes the file."""
    lock = path.with_name(f".{path.name}.lock")
    try:
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            keys = read_keys(path) if path.exists() else []
            yield keys
            _write(path, keys)
    except OSError as error:
        raise ConfigError(f"{path}: {os_reason(error, has_path=True)}") from error


def _write(path: Path, keys: list[KeyEntry]) -> None:
    """Replace the file as a whole: readers see the old content or the new."""
    text = _HEADER + yaml.safe_dump(
        {"keys": [entry.model_dump(mode="json", exclude_none=True) for entry in keys]}, sort_keys=False
    )
    new = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, KEYS_FILE_MODE)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
