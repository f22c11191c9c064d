"""The files of secrets that `tandem serve` draws itself, for the processes of this user on this host."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from kvtransfer.rpc.trust import write_private


class PrivateFolder:
    """A new folder that only this user can enter, from construction to `close`."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="tandem-"))
        # systemd-tmpfiles removes old files below /tmp, but not from a folder that somebody has locked.
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def write(self, name: str, text: str) -> Path:
        """Write a new file, and return its path."""
        path = self.path / name
        write_private(path, text)
        return path

    def close(self) -> None:
        """Remove the folder and its files."""
        shutil.rmtree(self.path)
        os.close(self._lock)
