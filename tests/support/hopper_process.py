"""Runs a script that compiles kernels for Hopper (`hopper_compiler`): a process of its own, because Triton
may interpret in that of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


def kernels_of(script: Path, cache: Path) -> list[dict[str, Any]]:
    """Return what the script prints, a JSON object about each kernel. `cache` is an empty folder."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))
    env["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
