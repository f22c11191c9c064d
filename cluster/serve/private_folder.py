"""The private folder of each run of `tandem serve` on this host: its secrets, its record, and the session of
the Ray cluster that it starts.

    $TMPDIR/tandem-runs-UID/   0700, of this user alone
        lock                   held while a folder is made, or those of killed runs are removed
        1/                     0700, locked while the run lives; another run at that time has 2
            cluster-secret     0600, as every file that is written here
            ray/               Ray's own folder; Ray gives it modes that the folder above makes harmless
        logs/                  logs of the runs that have ended, the latest few
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvtransfer.common.host import private_folder
from kvtransfer.rpc.trust import write_private

# Below the folder of a run: what Ray calls its temporary folder.
RAY_FOLDER = "ray"
_RUNS = "tandem-runs"
_LOGS = "logs"
_NUM_KEPT_LOGS = 3


class PrivateFolder:
    """A new folder that only this user can enter, from construction to `close`. `OSError` where the temporary
    folder does not allow it."""

    def __init__(self) -> None:
        """Also remove what runs have left behind that were killed: their folders are locked no more."""
        parent = private_folder(_RUNS)
        with _locked(parent):
            for folder in _folders(parent):
                if (lock := _try_lock(folder, fcntl.LOCK_EX)) is not None:
                    _remove(folder)
                    os.close(lock)
            self.path = _first_free(parent)
            # systemd-tmpfiles removes old files below /tmp, but not from a folder that somebody has locked.
            lock = _try_lock(self.path, fcntl.LOCK_EX)
            assert lock is not None, "nobody else looks at it while the folder above is locked"
            self._lock = lock

    def write(self, name: str, text: str) -> Path:
        """Write a new file, and return its path."""
        path = self.path / name
        write_private(path, text)
        return path

    def close(self) -> Path | None:
        """Remove the folder and its files; return where the logs of its Ray cluster are kept, if it had
        one."""
        kept = _remove(self.path)
        os.close(self._lock)
        return kept


def living_folders() -> list[Path]:
    """Return the private folders of this user's runs that live on this host. `OSError` where another user has
    made the folder that they would be in."""
    parent = private_folder(_RUNS)
    living = []
    for folder in _folders(parent):
        if (lock := _try_lock(folder, fcntl.LOCK_SH)) is None:
            living.append(folder)
        else:
            os.close(lock)
    return living


def _folders(parent: Path) -> list[Path]:
    numbers = [entry.name for entry in os.scandir(parent) if entry.name.isdecimal()]
    return [parent / name for name in sorted(numbers, key=int)]


def _first_free(parent: Path) -> Path:
    """Make the folder with the lowest number: one run at a time always has the same path."""
    for number in itertools.count(1):
        path = parent / str(number)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path
    raise AssertionError("numbers do not end")


@contextlib.contextmanager
def _locked(parent: Path) -> Iterator[None]:
    descriptor = os.open(parent / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _try_lock(folder: Path, kind: int) -> int | None:
    """Lock the folder, and return the object that holds the lock until it is closed; None while its owner
    lives. Opened by name without following links; the lock does not pass to programs that are started."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # removed since, or no folder
        return None
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _remove(folder: Path) -> Path | None:
    """Remove the folder but for the logs of its Ray session, and return where those are now. Files that an
    ending process writes in the meantime are removed by the next start."""
    kept = None
    for logs in (folder / RAY_FOLDER).glob("session_*/logs"):
        if not logs.parent.is_symlink():
            kept = _keep(logs, folder.parent / _LOGS)
    shutil.rmtree(folder, ignore_errors=True)
    return kept


def _keep(logs: Path, folder: Path) -> Path | None:
    """Move the logs, and remove those of the oldest sessions, whose names begin with their time."""
    folder.mkdir(mode=0o700, exist_ok=True)
    kept = folder / logs.parent.name
    try:
        logs.rename(kept)
    except OSError:  # its process removes it, or has written it twice
        return None
    for oldest in sorted(folder.iterdir())[:-_NUM_KEPT_LOGS]:
        shutil.rmtree(oldest, ignore_errors=True)
    return kept
