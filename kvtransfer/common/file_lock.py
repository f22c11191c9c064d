"""A lock between the processes of a host, which ends with the process that holds it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path


def try_lock(path: Path) -> int | None:
    """Return the descriptor that holds the lock until it is closed; None when another process does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
