"""A cluster on this machine that a benchmark asks, started by `tandem serve`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Service(NamedTuple):
    """The running cluster."""

    address: str
    admin_address: str
    logs: Path


@contextmanager
def serving(*options: str, variables: Mapping[str, str] = {}) -> Iterator[Service]:
    """Run `tandem serve` with these options, on free ports and a Ray of its own, until the block ends;
    `variables` are added to the environment."""
    command = [sys.executable, "-m", "cluster", "serve", *options, "--ray-address", "local"]
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "REDIS_URL")}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        [*command, "--port", "0", "--admin-port", "0"],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "120", **variables},
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        assert process.stdout is not None
        try:
            found: dict[str, str] = {}
            for line in process.stdout:
                if match := re.match(r"(gateway|admin|logs)\s+(\S.*)", line):
                    found[match[1]] = match[2].strip()
                if line.startswith("Ctrl-C"):
                    break
            else:
                raise SystemExit("tandem serve did not come up")
            yield Service(found["gateway"], found["admin"], Path(found["logs"]))
        finally:
            process.send_signal(signal.SIGINT)
            process.stdout.read()
