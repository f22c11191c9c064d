"""The audit log: acts on the cluster with their callers, origins and results. One JSON object a line.

Recorded are calls of `tandem.v1.Admin`, refused credentials, changes of the API keys, and what is done in the
console. Never recorded are credentials, and what requests contain.

    acts (orders, changes of keys, sessions) --> audit-NAME.jsonl            files of each kind have
    reads (calls of Admin that change nothing) --> audit_reads-NAME.jsonl    a budget of their own
    refusals --> audit_refusals-NAME.jsonl
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
from typing import Literal

from cluster.errors import StartError
from cluster.identity.audit_limit import NOBODY as NOBODY
from cluster.identity.audit_limit import AuditLimit
from cluster.identity.config import AuditConfig
from cluster.log_fields import instead
from kvtransfer.common.clock import Clock
from kvtransfer.common.os_errors import os_reason

AUDIT_LOGGER = "tandem.audit"
OK = "OK"
MAX_CHARS = 500
MAX_ITEMS = 50

# An `order` changes the cluster or its keys; every one is written. Callers with less than the role `operator`
# can cause the other kinds in any number, so these are limited: a `session` begins or ends, a `read` changes
# nothing, a `refusal` is a call that was not let in.
AuditKind = Literal["order", "session", "read", "refusal"]
# The beginnings of the names of the files that hold the lines of each kind.
_PREFIXES: Mapping[AuditKind, str] = {
    "order": "audit-",
    "session": "audit-",
    "read": "audit_reads-",
    "refusal": "audit_refusals-",
}
_SUFFIX = ".jsonl"
_MODE, _FOLDER_MODE = 0o600, 0o700
# API keys, JSON web tokens, and what else follows the word in a header. Nobody writes them into an entry on
# purpose; a caller may into a field of a request. `Bearer KEY` is the advice in texts of refusals.
_CREDENTIAL = re.compile(
    r"tandem_[a-z2-7]{8}_[\w-]+|eyJ[\w-]+\.[\w-]+\.[\w-]*|(?<=[Bb]earer )(?!KEY`?[.,;:]?(?:\s|$))\S+"
)
_REDACTED = "[redacted]"

_log = logging.getLogger(AUDIT_LOGGER)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An act. Texts longer than `MAX_CHARS` are cut, and lists longer than `MAX_ITEMS`."""

    # The name of the identity; `NOBODY`.
    who: str
    # Such as `/tandem.v1.Admin/StorePurge`, `console/sign-in`, `keys/reload`.
    method: str
    # `OK`, or the name of a gRPC status.
    result: str
    tenant: str = ""
    # Where the caller is, as gRPC writes it, such as `ipv4:127.0.0.1:40112`.
    peer: str = ""
    # The object of the call: the fields of the request that name it.
    what: Mapping[str, object] = field(default_factory=dict)
    # The reason for a refusal, or the outcome of the call.
    detail: str = ""
    kind: AuditKind = "order"


class AuditLog:
    """Writes the entries of one process, to files of its own and to the logger `tandem.audit`.

    A file that reaches its size is closed and numbered. All files in the folder of one prefix, also of
    processes that have ended, take at most the bytes of `keep` closed ones and an open one: the oldest are
    removed. Refusals and reads thus never displace an act.
    """

    def __init__(self, config: AuditConfig, name: str, clock: Clock) -> None:
        """`name` is the process's; `StartError` when the folder cannot be written to."""
        self._clock = clock
        self._limits: Mapping[AuditKind, AuditLimit] = {
            kind: AuditLimit(clock) for kind in _PREFIXES if kind != "order"
        }
        self._num_left_out = 0
        self._files: dict[str, _AuditFile] = {}
        if config.folder is not None:
            max_bytes = round(config.max_mb * 1e6)
            try:
                for prefix in dict.fromkeys(_PREFIXES.values()):
                    self._files[prefix] = _AuditFile(config.folder, prefix, name, max_bytes, config.keep)
            except OSError as error:
                self.close()
                raise StartError(f"auth.audit.folder: {os_reason(error)}") from error

    def record(self, entry: AuditEntry) -> None:
        """Write the entry. An entry that cannot be written to the file is in the log all the same.

        Orders are always written, other lines within the bounds of `AuditLimit`, which hold for the log as
        well; the next line of any kind counts those that were left out.
        """
        limit = self._limits.get(entry.kind)
        if limit is not None and not limit.takes(entry.who, entry.tenant, entry.method):
            self._num_left_out += 1
            return
        fields = self._fields(entry)
        line = json.dumps(fields, ensure_ascii=False)
        summary = f"{fields['who']} {entry.method} {entry.result}"
        extra = instead(summary, {name: value for name, value in fields.items() if name != "at"})
        record = _log.makeRecord(AUDIT_LOGGER, logging.INFO, __file__, 0, line, (), None, extra=extra)
        if self._files:
            self._files[_PREFIXES[entry.kind]].emit(record)
        _log.handle(record)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

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
        raise StartError(f"auth.audit.folder: {os_reason(error)}") from error


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
    """Cut out credentials, and replace characters that no encoding can carry, such as a lone surrogate."""
    encodable = value.encode(errors="replace").decode()
    return _CREDENTIAL.sub(_REDACTED, encodable)[:MAX_CHARS]


class _AuditFile(RotatingFileHandler):
    """The file of one process, which only its user can read. Another process may remove the file when it is
    the oldest of the folder: the next entry starts a new one."""

    def __init__(self, folder: Path, prefix: str, name: str, max_bytes: int, keep: int) -> None:
        folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        self._folder = folder
        self._prefix = prefix
        self._most_bytes = max_bytes * (keep + 1)
        path = folder / f"{prefix}{name}{_SUFFIX}"
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
        for path in self._folder.glob(f"{self._prefix}*{_SUFFIX}*"):
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
