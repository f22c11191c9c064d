"""A folder below the system's temporary one that nobody but this user can have written to."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def private_folder(name: str) -> Path:
    """The folder `<name>-<user id>`, made now if it is missing.

    Raises `OSError` when it cannot be made, or is not a folder of this user's that others cannot write to.
    """
    folder = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(f"{folder} is not a folder that only this user can write to; remove it")
    return folder
