"""The file of API keys: its content, and its changes by `tandem key`."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.errors import ConfigError
from cluster.identity.api_keys import ID_BYTES, KEY_PREFIX, SALT_BYTES, SECRET_BYTES, KeyEntry, hash_secret
from cluster.identity.identity import Role
from cluster.setting_errors import setting_lines
from kvtransfer.common.os_errors import os_reason

KEYS_FILE_MODE = 0o600
_HEADER = "# API keys of a Tandem cluster: `tandem key` writes this file. Secrets are hashed, not kept.\n"


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
                hash=hash_secret(salt, secret).hex(),
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
