"""Where a child process imports from: what the tests give it, then all that this process was given."""

from __future__ import annotations

import os
from pathlib import Path


def import_path(*folders: Path | str) -> str:
    """Return the PYTHONPATH of a child. Packages of this machine may come by our own."""
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*map(str, folders), *([inherited] if inherited else [])])
