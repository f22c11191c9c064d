"""Processes in which a benchmark's own program plays one of its parts: a gateway, a replica, clients."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class PartProcess:
    """A part that is ready."""

    def __init__(self, process: asyncio.subprocess.Process, said: str) -> None:
        # What it printed when it was ready.
        self.said = said
        self.process_id = process.pid
        self._process = process

    async def ask(self, order: object) -> Any:
        """Give it an order, a line of JSON; return its answer, another one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise SystemExit("a part has ended")
        return json.loads(line)


@asynccontextmanager
async def part_process(module: str, kind: str, order: object) -> AsyncIterator[PartProcess]:
    """Run the module's `main` with `--part kind`, and the order as its first line of input, until the block
    ends; it ends when its input does."""
    command = [sys.executable, "-c", f"from {module} import main; main()", "--part", kind]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 24)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(order).encode() + b"\n")
    try:
        line = await process.stdout.readline()
        if not line:
            raise SystemExit(f"the {kind} did not start")
        yield PartProcess(process, line.decode().strip())
    finally:
        process.stdin.close()
        await process.wait()
