"""A file that somebody else replaces while it is in use, such as a mounted Secret."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from cluster.errors import ConfigError
from kvtransfer.common.clock import Clock
from kvtransfer.common.os_errors import os_reason

# How long a change may stay unnoticed.
RELOAD_S = 1.0
MAX_FILE_BYTES = 16 << 20

T = TypeVar("T")
_log = logging.getLogger(__name__)


class WatchedFile(Generic[T]):
    """The parsed content of a file, which is read again when the file changes.

    A file that cannot be read any more, or is wrong, leaves the last good content in use.
    """

    def __init__(self, path: Path, field: str, parse: Callable[[bytes], T]) -> None:
        """Read the file; `ConfigError` names the configuration's `field` when that cannot be done.

        `parse` raises `ValueError` with what is wrong with the content.
        """
        self._path = path
        self._field = field
        self._parse = parse
        self._mark = self._look()
        self.content = self._read()
        # Grows with every new content.
        self.version = 0
        self._is_broken = False

    def reload(self) -> bool:
        """Read the file if it has changed; return whether there is a new content. Blocks; any thread may call
        it, one at a time."""
        try:
            mark = self._look()
            if mark == self._mark and not self._is_broken:
                return False
            content = self._read()
        except ConfigError as error:
            if not self._is_broken:
                _log.error("the last good content stays in use: %s", error)
            self._is_broken = True
            return False
        if self._is_broken:
            _log.warning("%s: %s can be read again", self._field, self._path)
        self._mark, self._is_broken = mark, False
        self.content = content
        self.version += 1
        return True

    async def follow(self, clock: Clock, on_change: Callable[[], None] | None = None) -> None:
        """Reload when the file changes, until cancelled; reads in a thread."""
        while True:
            await clock.sleep(RELOAD_S)
            if await asyncio.to_thread(self.reload) and on_change is not None:
                on_change()

    def _look(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError as error:
            raise ConfigError(f"{self._field}: {os_reason(error)}") from error
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _read(self) -> T:
        try:
            with self._path.open("rb") as file:
                text = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{self._field}: {os_reason(error)}") from error
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"{self._field}: {self._path} is larger than {MAX_FILE_BYTES} bytes")
        try:
            return self._parse(text)
        except ValueError as error:
            raise ConfigError(f"{self._field}: {self._path}: {error}") from error
