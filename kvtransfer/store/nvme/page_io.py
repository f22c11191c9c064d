"""Read and write whole pages of the NVMe tier's files, with errors that say what was done where."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtransfer.errors import StoreIoError
from kvtransfer.store.record import PAGE_BYTES


class PageBuffer:
    """Page-aligned memory, as O_DIRECT requires."""

    def __init__(self, num_bytes: int) -> None:
        self.view = memoryview(mmap.mmap(-1, padded(num_bytes)))


def padded(num_bytes: int) -> int:
    """Return the bytes of the pages that hold so many."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def write_at(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all buffers, one after the other; `OSError` when anything is missing."""
    num_bytes = sum(map(len, buffers))
    num_written = os.pwritev(fd, buffers, offset)
    if num_written != num_bytes:
        raise OSError(errno.EIO, f"{num_written} bytes instead of {num_bytes} at {offset}")


def read_at(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill all buffers, one after the other; `OSError` when the file ends before."""
    num_bytes = sum(map(len, buffers))
    num_read = os.preadv(fd, buffers, offset)
    if num_read != num_bytes:
        raise OSError(errno.EIO, f"{num_read} bytes instead of {num_bytes} at {offset}")


def erase_page(fd: int, offset: int) -> None:
    """Erase the header at this offset. `OSError`."""
    write_at(fd, [PageBuffer(PAGE_BYTES).view], offset)


def io_error(doing: str, path: Path, error: OSError) -> StoreIoError:
    name = errno.errorcode.get(error.errno or 0, "OSError")
    return StoreIoError(f"{doing} {path}: {name}, {error.strerror or error}")


@contextmanager
def naming(doing: str, path: Path) -> Iterator[None]:
    """Turn every `OSError` inside into a `StoreIoError` whose text names the failed step, the place and the
    cause."""
    try:
        yield
    except OSError as error:
        raise io_error(doing, path, error) from error
