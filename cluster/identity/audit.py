"""The audit log: who did what to the cluster, from where, and with what result. One JSON object a line.

Recorded are calls of `tandem.v1.Admin`, refused credentials, changes of the API keys, and what is done in the
console. Never recorded are credentials, and what requests contain.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from cluster.errors import StartError
from cluster.identity.config import AuditConfig
from kvtransfer.common.clock import Clock

AUDIT_LOGGER = "tandem.audit"
# Who has shown no credential that was accepted.
NOBODY = "-"
OK = "OK"
MAX_CHARS = 500
MAX_ITEMS = 50
MAX_REFUSED_S = 20

_PREFIX, _SUFFIX = "audit-", ".jsonl"
_MODE, _FOLDER_MODE = 0o600, 0o700
# API keys, JSON web tokens, and what else follows the word in a header. Nobody writes them into an entry on
# purpose; a caller may into a field of a request.
_CREDENTIAL = re.compile(r"tandem_[a-z2-7]{8}_[\w-]+|eyJ[\w-]+\.[\w-]+\.[\w-]*|(?<=[Bb]earer )\S+")
_REDACTED = "[redacted]"

_log = logging.getLogger(AUDIT_LOGGER)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One act. Texts longer than `MAX_CHARS` are cut, and lists longer than `MAX_ITEMS`."""

    # The name of the identity; `NOBODY`.
    who: str
    # Such as `/tandem.v1.Admin/StorePurge`, `console/sign-in`, `keys/reload`.
    method: str
    # `OK`, or the name of a gRPC status.
    result: str
    tenant: str = ""
    # Where the caller is, as gRPC writes it, such as `ipv4:127.0.0.1:40112`.
    peer: str = ""
    # On what: the fields of the request that say so.
    what: Mapping[str, object] = field(default_factory=dict)
    # Why it was refused, or what came of it.
    detail: str = ""


class AuditLog:
    """Writes the entries of one process, to a file of its own and to the logger `tandem.audit`.

    A file that reaches its size is closed and numbered. All files in the folder, also of processes that have
    ended, take at most the bytes of `keep` closed ones and an open one: the oldest are removed.
    """

    def __init__(self, config: AuditConfig, name: str, clock: Clock) -> None:
        """`name` is the process's; `StartError` when the folder cannot be written to."""
        self._clock = clock
        self._refused_second = 0
        self._num_refused = self._num_left_out = 0
        self._file: _AuditFile | None = None
        if config.folder is not None:
            try:
                self._file = _AuditFile(config.folder, name, round(config.max_mb * 1e6), config.keep)
            except OSError as error:
                raise StartError(f"auth.audit.folder: {error}") from error

    def record(self, entry: AuditEntry) -> None:
        """Write the entry. What cannot be written to the file is in the log all the same.

        Of refused strangers at most `MAX_REFUSED_S` a second are written, so that they do not fill the files;
        the next entry counts those that were left out.
        """
        if entry.who == NOBODY and entry.result != OK and self._is_flooded():
            self._num_left_out += 1
            return
        line = json.dumps(self._fields(entry), ensure_ascii=False)
        record = _log.makeRecord(AUDIT_LOGGER, logging.INFO, __file__, 0, line, (), None)
        if self._file is not None:
            self._file.emit(record)
        _log.handle(record)

    def _is_flooded(self) -> bool:
        second = int(self._clock.now())
        if second != self._refused_second:
            self._refused_second, self._num_refused = second, 0
        self._num_refused += 1
        return self._num_refused > MAX_REFUSED_S

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _fields(self, entry: AuditEntry) -> dict[str, object]:
        at = datetime.fromtimestamp(self._clock.wall(), UTC).isoformat(timespec="milliseconds")
        left_out, self._num_left_out = self._num_left_out, 0
        return {
            "at": at.replace("+00:00", "Z"),
            "who": _text(entry.who),
            "tenant": _text(entry.tenant),
            "method": entry.method,
            "what": _json(entry.what),
            "peer": _text(entry.peer),
            "result": entry.result,
            "detail": _text(entry.detail),
            **({"num_left_out": left_out} if left_out else {}),
        }


def check_audit_folder(config: AuditConfig) -> None:
    """Make the folder of the audit log where it is missing; `StartError` when no file can be made there."""
    if config.folder is None:
        return
    try:
        config.folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.folder):
            pass
    except OSError as error:
        raise StartError(f"auth.audit.folder: {error}") from error


def _json(value: object) -> object:
    match value:
        case None | bool() | int() | float():
            return value
        case Mapping():
            return {_text(str(name)): _json(item) for name, item in list(value.items())[:MAX_ITEMS]}
        case list() | tuple():
            return [_json(item) for item in value[:MAX_ITEMS]]
        case _:
            return _text(str(value))


def _text(value: str) -> str:
    """Cut out credentials, and replace what no encoding can carry, such as a lone surrogate."""
    encodable = value.encode(errors="replace").decode()
    return _CREDENTIAL.sub(_REDACTED, encodable)[:MAX_CHARS]


class _AuditFile(RotatingFileHandler):
    """The file of one process, which only its user can read. Another process may remove the file when it is
    the oldest of the folder: the next entry begins it anew."""

    def __init__(self, folder: Path, name: str, max_bytes: int, keep: int) -> None:
        folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        self._folder = folder
        self._most_bytes = max_bytes * (keep + 1)
        path = folder / f"{_PREFIX}{name}{_SUFFIX}"
        super().__init__(path, maxBytes=max_bytes, backupCount=keep, encoding="utf-8", errors="replace")
        self._remove_oldest()

    def emit(self, record: logging.LogRecord) -> None:
        if not os.path.exists(self.baseFilename):
            self.close()
            self.stream = self._open()
        super().emit(record)

    def doRollover(self) -> None:
        super().doRollover()
        self._remove_oldest()

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _MODE)
        return os.fdopen(descriptor, "a", encoding=self.encoding, errors=self.errors)

    def _remove_oldest(self) -> None:
        found: list[tuple[float, int, Path]] = []
        for path in self._folder.glob(f"{_PREFIX}*{_SUFFIX}*"):
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        num_bytes = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if num_bytes <= self._most_bytes:
                break
            if path != Path(self.baseFilename):
                path.unlink(missing_ok=True)
                num_bytes -= size
