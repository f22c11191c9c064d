"""Ray nodes started by hand, as `ray start` does it: on this host, or on hosts of a network of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil
from network_hosts import Host
from serving import environment, free_port


class RayNodes:
    """Ray processes with a folder of their own, beside whatever else runs here."""

    def __init__(self, folder: Path, head: Host | None = None) -> None:
        """`folder` must have a short name: sockets lie below it. `head` None: this host's loopback."""
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.address = f"{head.address if head else '127.0.0.1'}:{free_port()}"

    def start(
        self, *, is_head: bool, host: Host | None = None, resources: Mapping[str, float] | None = None
    ) -> None:
        """One with resources for one replica, and the head for the gateway too."""
        place = (
            ("--head", "--port", self.address.rpartition(":")[2]) if is_head else ("--address", self.address)
        )
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *place, "--block"]
        command += ["--node-ip-address", host.address if host else "127.0.0.1", "--num-cpus", "2"]
        command += ["--object-store-memory", "100000000", "--resources", json.dumps(dict(resources or {}))]
        command += ["--include-dashboard", "false"] if is_head else []
        with (self._folder / f"ray-{len(self._processes)}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    host.command(*command) if host else command,
                    env={**environment(), "RAY_AUTH_MODE": "token", "RAY_TMPDIR": str(self._folder)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )

    def close(self) -> None:
        """Kill them: an orderly end is drained for half a minute."""
        for process in reversed(self._processes):
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
            for each in family:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(family, timeout=20)
