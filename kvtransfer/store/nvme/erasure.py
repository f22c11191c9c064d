"""Erases records so that no byte of them is left in a file, and remembers purges until they are complete.

    purge --> journal --> directory without the records --> every gap between live records cleared --> journal
                                                                                                       emptied

A gap is punched out of the file; where the file system cannot do that, zeros are written. What was in a gap
reads as zeros then. A disk may still hold the bytes in blocks that the file system has taken back.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvtransfer.codec import Codec, Message
from kvtransfer.errors import WireError
from kvtransfer.store.messages.records import PurgeOrder
from kvtransfer.store.nvme.page_io import PageBuffer, naming, write_at

JOURNAL_NAME = "purges"
_NEW_JOURNAL_NAME = "purges.new"
JOURNAL_NAMES = (JOURNAL_NAME, _NEW_JOURNAL_NAME)
_ZEROS_BYTES = 1 << 20
# fallocate(2).
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_CANNOT_PUNCH = (errno.EOPNOTSUPP, errno.ENOSYS)

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def gaps_between(live: Iterable[tuple[int, int]], end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges [start, stop) before `end` that no live range (offset, bytes) covers."""
    start = 0
    for offset, num_bytes in sorted(live):
        if offset > start:
            yield start, offset
        start = max(start, offset + num_bytes)
    if end > start:
        yield start, end


def clear_range(fd: int, start: int, stop: int) -> None:
    """Make whole pages of a file read as zeros. `OSError`."""
    try:
        punch(fd, start, stop)
    except OSError as error:
        if error.errno not in _CANNOT_PUNCH:
            raise
        zeros = PageBuffer(min(stop - start, _ZEROS_BYTES)).view
        for offset in range(start, stop, len(zeros)):
            write_at(fd, [zeros[: stop - offset]], offset)


def punch(fd: int, start: int, stop: int) -> None:
    """Give the range back to the file system. `OSError`: with EOPNOTSUPP it cannot take it."""
    while _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, start, stop - start):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


class _Journal(Message, frozen=True):
    """The contents of the journal."""

    orders: tuple[PurgeOrder, ...]


_CODEC: Codec[_Journal] = Codec(_Journal)


class PurgeJournal:
    """A file next to the segments: the purges that have begun and are not complete."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / JOURNAL_NAME
        self._orders: tuple[PurgeOrder, ...] | None = None

    def read(self) -> tuple[PurgeOrder, ...]:
        """Return the orders. A journal that cannot be read stands for a purge of everything: the records that
        it named must not be served."""
        if self._orders is None:
            try:
                self._orders = _CODEC.decode(self._path.read_bytes()).orders
            except FileNotFoundError:
                self._orders = ()
            except (OSError, WireError) as error:
                _log.error("%s: a purge was interrupted, and it is not known of what: %s", self._path, error)
                self._orders = (PurgeOrder(None, None),)
        return self._orders

    def write(self, orders: Sequence[PurgeOrder]) -> None:
        """Replace the orders, durably; without any there is no file. `StoreIoError`."""
        with naming("writing", self._path):
            if orders:
                new = self._folder / _NEW_JOURNAL_NAME
                fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                try:
                    os.write(fd, _CODEC.encode(_Journal(tuple(orders))))
                    os.fsync(fd)
                finally:
                    os.close(fd)
                new.rename(self._path)
            else:
                for name in JOURNAL_NAMES:
                    with suppress(FileNotFoundError):
                        (self._folder / name).unlink()
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        self._orders = tuple(orders)
