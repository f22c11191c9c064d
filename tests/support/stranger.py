"""A process of another user that looks like a Ray cluster: it listens, and its arguments name the address.

Ray's own discovery finds it, and whoever follows that sends the Ray token there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of another user")
_CODE = f"""
import os, socket, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
listener = socket.create_server(("127.0.0.1", int(sys.argv[1].rpartition(":")[2])))
print("listens", flush=True)
while True:
    connection, _ = listener.accept()
    connection.settimeout(1.0)
    try:
        received = connection.recv(1 << 16)
    except OSError:
        received = b""
    connection.close()
    print(f"connected: {{received!r}}", flush=True)
"""


class Stranger:
    """Listens at `address` until the end of the `with`; `received` is what anybody sent there."""

    def __init__(self, address: str, program: str = "raylet") -> None:
        self.address = address
        host, _, port = address.rpartition(":")
        # The flags are those of a raylet and a GCS.
        flags = [f"--gcs-address={address}", f"--gcs_server_port={port}", f"--node-ip-address={host}"]
        self._process = subprocess.Popen(
            [f"/x/{program}", "-c", _CODE, *flags],
            executable=sys.executable,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Stranger:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "listens\n"
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> list[str]:
        """End it, and return a line for each connection that it got."""
        if self._process.stdout is None or self._process.stdout.closed:
            return []
        self._process.kill()
        received = self._process.stdout.readlines()
        self._process.stdout.close()
        self._process.wait()
        return received
