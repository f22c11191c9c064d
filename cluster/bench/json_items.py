"""The lines of a file, and the objects of a file of JSON lines or of one JSON array, one after the other: of
a large file no more is in memory than what is read."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

from cluster.errors import BenchError

# Of a line: a request of a trace, or a conversation.
MAX_LINE_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20
# Whether a file is an array is seen in its beginning.
_START_BYTES = 1 << 12
# What matters between the items of the array, within an item, and within a string.
_BETWEEN = re.compile(rb"[^\s,]")
_WITHIN = re.compile(rb'["\[\]{}]')
_STRING = re.compile(rb'["\\]')


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line of a file with its number, reading no more than that; `BenchError` names a line that is
    longer than `MAX_LINE_BYTES`."""
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                if len(line) > MAX_LINE_BYTES:
                    raise BenchError(f"{path}, line {number}: is longer than {MAX_LINE_BYTES} bytes")
                yield number, line
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from error


def json_items(path: Path, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield each object, as it stands in the file, with the number of its first line. Whether it is JSON is
    for the reader to check. `BenchError` names what cannot be read."""
    try:
        with path.open("rb") as file:
            start = file.read(_START_BYTES)
            file.seek(0)
            if start.lstrip()[:1] == b"[":
                yield from _ArrayItems(path, chunk_bytes).read(file)
                return
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from error
    yield from ((number, line) for number, line in numbered_lines(path) if line.strip())


class _ArrayItems:
    """Cuts an array into its items."""

    def __init__(self, path: Path, chunk_bytes: int) -> None:
        self._path = path
        self._chunk_bytes = chunk_bytes
        # Brackets that are open; 1 is the array's own.
        self._depth = 0
        self._has_begun = False
        self._is_string = False
        self._is_escaped = False
        # The item so far, up to the chunk that is read, and where it began.
        self._item = bytearray()
        self._first_line = 1
        self._line = 1

    def read(self, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield the items of the file."""
        for chunk in iter(partial(file.read, self._chunk_bytes), b""):
            yield from self._cut(chunk)
        if self._depth != 0:
            raise BenchError(f"{self._path}, line {self._line}: the array does not end")

    def _cut(self, chunk: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the items that end in this chunk."""
        at = begin = counted = 0
        while (found := self._next(chunk, at)) is not None:
            byte, at = found
            if self._depth <= 1:
                self._line += chunk.count(b"\n", counted, at)
                counted = at
            if self._depth == 1 and byte in b"{[":
                begin, self._first_line = at - 1, self._line
            self._take(byte)
            if self._depth == 1 and byte in b"}]" and not self._is_string:
                yield self._first_line, bytes(self._item) + chunk[begin:at]
                self._item.clear()
        self._line += chunk.count(b"\n", counted)
        if self._depth > 1:
            self._item += chunk[begin:]
            if len(self._item) > MAX_LINE_BYTES:
                raise BenchError(
                    f"{self._path}, line {self._first_line}: an object is longer than {MAX_LINE_BYTES} bytes"
                )

    def _next(self, chunk: bytes, at: int) -> tuple[bytes, int] | None:
        """Return the next byte that matters, and what follows it."""
        if self._is_escaped and at < len(chunk):
            self._is_escaped = False
            at += 1
        pattern = _STRING if self._is_string else _WITHIN if self._depth > 1 else _BETWEEN
        match = pattern.search(chunk, at)
        return None if match is None else (match[0], match.end())

    def _take(self, byte: bytes) -> None:
        if self._is_string:
            self._is_escaped = byte == b"\\"
            self._is_string = self._is_escaped
        elif byte == b'"' and self._depth > 1:
            self._is_string = True
        elif self._depth == 0:
            if byte != b"[" or self._has_begun:
                raise BenchError(f"{self._path}, line {self._line}: nothing may follow the array")
            self._depth, self._has_begun = 1, True
        elif self._depth == 1 and byte not in b"{[]":
            raise BenchError(f"{self._path}, line {self._line}: expected an object")
        else:
            self._depth += 1 if byte in b"{[" else -1
