"""A gateway over scripted replicas in a process of its own, that a test can kill. Prints the HTTP port; ends
when its input does."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from child_processes import kill_family
from gateway_harness import GatewayHarness, ScriptedReplica, write_model

_PATHS = [str(Path(__file__).resolve().parent.parent.parent), str(Path(__file__).resolve().parent)]


async def _serve(folder: Path, token_s: float) -> None:
    harness = GatewayHarness(write_model(folder))
    for replica_id, role in (("p0", "prefill"), ("d0", "decode")):
        replica = harness.replicas[replica_id] = ScriptedReplica(harness, replica_id, role)
        replica.script.token_s = token_s
        await replica.start()
    gateway, _ = await harness.add_gateway()
    print(gateway.http_port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await harness.close()


def main() -> None:
    """Run the process: its argument is `token_s`."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_serve(Path(folder), float(sys.argv[1])))


@contextmanager
def started_process(
    module: str, arguments: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a process that runs `main` of a module in this folder; yield it and the first line that it
    prints."""
    start = f"import sys; sys.path[:0] = {_PATHS!r}; import {module}; {module}.main()"
    command = [sys.executable, "-c", start, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        kill_family(process)


@contextmanager
def http_process(token_s: float) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a process that decodes a token every `token_s`; yield it and its port."""
    with started_process("http_process", [str(token_s)]) as (process, line):
        yield process, int(line)
