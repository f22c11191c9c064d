"""A gateway over scripted replicas in a process of its own, that a test can kill. Prints the HTTP port; ends
when its input does."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from child_processes import kill_family
from gateway_harness import GatewayHarness, write_model

_PATHS = [str(Path(__file__).resolve().parent.parent.parent), str(Path(__file__).resolve().parent)]
_START = f"import sys; sys.path[:0] = {_PATHS!r}; import http_process; http_process.main()"


async def _serve(folder: Path, token_s: float) -> None:
    harness = GatewayHarness(write_model(folder))
    for replica_id, role in (("p0", "prefill"), ("d0", "decode")):
        replica = await harness.add_replica(replica_id, role)
        replica.script.token_s = token_s
    gateway, _ = await harness.add_gateway()
    print(gateway.http_port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await harness.close()


def main() -> None:
    """Of the process: `token_s` is its argument."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_serve(Path(folder), float(sys.argv[1])))


@contextmanager
def http_process(token_s: float) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process and its port; it decodes a token every `token_s`."""
    command = [sys.executable, "-c", _START, str(token_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        kill_family(process)
