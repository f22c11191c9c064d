"""Children for work on what strangers send, with bounded time and memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_harness import until

from cluster.text.bounded_process import BoundedProcess


async def test_a_child_whose_start_is_cancelled_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[asyncio.subprocess.Process] = []
    create = asyncio.create_subprocess_exec

    async def noted(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        children.append(await create(*command, **options))
        return children[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    process = BoundedProcess("cluster.text.chat_template", timeout_s=5.0)
    starting = asyncio.create_task(process.start())
    await until(lambda: bool(children), "the child runs")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children[0].returncode is not None
    await process.start()
    await process.close()
    assert [child.returncode is not None for child in children] == [True, True]
