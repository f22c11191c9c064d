"""A file that arrives in pieces: a cut transfer continues where it ended, also in the next process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from cluster.model_source.fetch_context import ByteCount, FetchContext

_READ_BYTES = 1 << 20
# Failures in a row, without a byte between them.
_MAX_FAILURES = 5
_PAUSE_S = 0.5


class CutTransferError(Exception):
    """The transfer broke off, or could not begin: worth another try."""


class RestartTransferError(Exception):
    """What has arrived does not belong to the file: all of it must arrive anew."""


class Digest(Protocol):
    """Takes the bytes of a file, as the objects of hashlib do."""

    def update(self, data: bytes, /) -> None: ...


class PartialFile:
    """Represents what has arrived of a file of `size` bytes, in a file of its own."""

    def __init__(self, path: Path, size: int, context: FetchContext, count: ByteCount) -> None:
        self._path = path
        self._size = size
        self._context = context
        self._count = count
        self._num_bytes = 0

    def fill(self, chunks_from: Callable[[int], Iterator[bytes]], digest: Digest) -> bool:
        """Append what is missing, which `chunks_from` yields from a position on, and give all bytes to the
        digest. Returns False where another size arrives.

        Raises the last `CutTransferError` when several tries in a row bring nothing, and `StartError` when
        interrupted.
        """
        try:
            with self._path.open("a+b") as stream:
                self._read_part(stream, digest)
                num_failures = 0
                while self._num_bytes < self._size:
                    before = self._num_bytes
                    cut = self._append(stream, chunks_from, digest)
                    num_failures = 0 if self._num_bytes > before else num_failures + 1
                    if num_failures == _MAX_FAILURES:
                        raise cut
                    if self._num_bytes < self._size:
                        self._context.pause(_PAUSE_S * num_failures)
        except RestartTransferError:
            return False
        return self._num_bytes == self._size

    def discard(self) -> None:
        """Forget what has arrived."""
        self._path.unlink(missing_ok=True)
        self._count.add(-self._num_bytes)
        self._num_bytes = 0

    def _append(
        self, stream: BinaryIO, chunks_from: Callable[[int], Iterator[bytes]], digest: Digest
    ) -> CutTransferError:
        """Append until the transfer ends; return why it ended, if it did so early."""
        try:
            for chunk in chunks_from(self._num_bytes):
                stream.write(chunk)
                self._take(chunk, digest)
                if self._num_bytes > self._size:
                    raise RestartTransferError
        except CutTransferError as error:
            return error
        finally:
            stream.flush()
        return CutTransferError(f"it ended after {self._num_bytes} of {self._size} bytes")

    def _read_part(self, stream: BinaryIO, digest: Digest) -> None:
        """Give the digest what an earlier process has left."""
        stream.seek(0)
        while data := stream.read(_READ_BYTES):
            self._take(data, digest)

    def _take(self, data: bytes, digest: Digest) -> None:
        digest.update(data)
        self._num_bytes += len(data)
        self._count.add(len(data))
        self._context.check()
