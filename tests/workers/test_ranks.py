"""Rank processes as the brain holds them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from workers.ranks import ProcessHandle


async def test_a_process_that_has_ended_is_not_killed_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
    )
    handle = ProcessHandle(process)
    handle.kill()
    assert str(-signal.SIGKILL) in await handle.wait()
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda process_id, _: killed.append(process_id))
    handle.kill()
    assert killed == [], "the number may be another process's by now"
