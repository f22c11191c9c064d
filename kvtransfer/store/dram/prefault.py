"""Populate the arena's memory before records need it.

The first write to a page takes many times as long as later ones, and callers that wait for a record would
wait for that, too.
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

_log = logging.getLogger(__name__)


# Bytes populated beyond the last record, at most a quarter of the arena.
PREFAULT_BYTES = 256 << 20
# Less is not worth a process: the memory of a small arena is populated by its first writes.
MIN_BYTES = 16 << 20
_STEP_BYTES = 2 << 20


class Prefault:
    """Populates the memory of one arena beyond its last record."""

    def __init__(self, arena: Arena, spawn: Spawn, clock: Clock) -> None:
        self._arena = arena
        self._spawn = spawn
        self._clock = clock
        self._prefault_bytes = min(PREFAULT_BYTES, arena.num_bytes // 4)
        self._num_taken_bytes = _whole_pages(arena.num_used_bytes)
        self._is_taking = False

    def top_up(self, *, at_once: bool = False) -> None:
        """Begin to populate more memory if records have used up enough: `at_once`, or when a core idles. If
        that fails, the first writes populate it."""
        start, end = self._num_taken_bytes, self._end
        if not self._is_taking and end - start >= MIN_BYTES:
            self._is_taking = True
            self._num_taken_bytes = end
            self._spawn(self._take(start, end, at_once), "store-pages")

    async def _take(self, start: int, end: int, at_once: bool) -> None:
        if self._arena.fd < 0:  # closed since
            return
        if error := await _take_in_child(self._arena.fd, start, end, at_once):
            _log.warning("the host tier's memory is not populated ahead of its first writes: %s", error)
        else:
            for offset in range(start, end, _STEP_BYTES):
                self._arena.map_pages(offset, min(_STEP_BYTES, end - offset))
                await self._clock.sleep(0.0)
        self._is_taking = False

    @property
    def _end(self) -> int:
        return min(_whole_pages(self._arena.num_used_bytes + self._prefault_bytes), self._arena.num_bytes)


def _whole_pages(num_bytes: int) -> int:
    """Round down to the start of a huge page."""
    return num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


async def _take_in_child(fd: int, start: int, end: int, at_once: bool) -> str:
    """Populate a range in a process of its own; return why that failed, or ""."""
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
        _, errors = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode == 0:
        return ""
    return errors.decode(errors="replace").strip() or f"status {child.returncode}"
