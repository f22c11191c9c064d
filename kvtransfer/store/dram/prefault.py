"""The arena's memory, taken before records need it: the first write to a page takes many times as long as its
bytes, and whoever waits for a record would wait for that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from kvtransfer.common.clock import Clock
from kvtransfer.common.tasks import Spawn
from kvtransfer.store.dram.arena import HUGE_PAGE_BYTES, Arena

# So much is taken ahead of the last record, at most a quarter of the arena.
AHEAD_BYTES = 256 << 20
# Less is not worth a process. A small arena is left to its first writes.
MIN_BYTES = 16 << 20
_STEP_BYTES = 2 << 20

_log = logging.getLogger(__name__)


class Prefault:
    """Of one arena."""

    def __init__(self, arena: Arena, spawn: Spawn, clock: Clock) -> None:
        self._arena = arena
        self._spawn = spawn
        self._clock = clock
        self._ahead_bytes = min(AHEAD_BYTES, arena.num_bytes // 4)
        self._num_taken_bytes = _whole_pages(arena.num_used_bytes)
        self._is_taking = False

    def top_up(self, *, at_once: bool = False) -> None:
        """When records have used up some of it, begin to have that taken again: `at_once`, or when a core
        idles. Where that cannot be, memory comes as it is written."""
        start, end = self._num_taken_bytes, self._end
        if not self._is_taking and end - start >= MIN_BYTES:
            self._is_taking = True
            self._num_taken_bytes = end
            self._spawn(self._take(start, end, at_once), "store-pages")

    async def _take(self, start: int, end: int, at_once: bool) -> None:
        if self._arena.fd < 0:  # closed since
            return
        if error := await _take_in_child(self._arena.fd, start, end, at_once):
            _log.warning("the host tier's memory is taken as it is written, not ahead: %s", error)
        else:
            for offset in range(start, end, _STEP_BYTES):
                self._arena.map_pages(offset, min(_STEP_BYTES, end - offset))
                await self._clock.sleep(0.0)
        self._is_taking = False

    @property
    def _end(self) -> int:
        return min(_whole_pages(self._arena.num_used_bytes + self._ahead_bytes), self._arena.num_bytes)


def _whole_pages(num_bytes: int) -> int:
    """Down to where a huge page begins."""
    return num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


async def _take_in_child(fd: int, start: int, end: int, at_once: bool) -> str:
    """Why it cannot be done, or "" when it is done."""
    script = str(Path(__file__).with_name("prefault_process.py"))
    numbers = (str(number) for number in (fd, start, end, os.getpid(), int(at_once)))
    try:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", script, *numbers),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(fd,),
        )
    except OSError as error:
        return str(error)
    try:
        _, said = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode == 0:
        return ""
    return said.decode(errors="replace").strip() or f"status {child.returncode}"
