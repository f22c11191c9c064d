"""The arena's memory is taken before records need it, by a process that gives way to all others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path

import pytest
from store_harness import StoreHarness, eventually

from kvtransfer.common.clock import SystemClock
from kvtransfer.store.dram import prefault_process
from kvtransfer.store.dram.arena import Arena
from kvtransfer.store.dram.prefault import Prefault

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    """64 MiB, of which 16 are taken ahead."""
    arena = Arena.create(64 * MIB, MIB, huge_pages=False)
    yield arena
    arena.close()


class TopUps:
    """The tasks of a `Prefault`."""

    def __init__(self, arena: Arena) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.prefault = Prefault(arena, self._spawn, SystemClock())

    async def top_up(self, *, at_once: bool = False) -> int:
        """How many times memory was taken."""
        num_tasks = len(self.tasks)
        self.prefault.top_up(at_once=at_once)
        self.prefault.top_up(at_once=at_once)  # is under way already
        await asyncio.gather(*self.tasks)
        return len(self.tasks) - num_tasks

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work, name=name))
        return self.tasks[-1]


def taken_mib(fd: int) -> float:
    return os.fstat(fd).st_blocks * 512 / MIB


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_quarter_of_the_arena_is_prefaulted(arena: Arena, at_once: bool) -> None:
    top_ups = TopUps(arena)
    arena.allocate(5000)
    assert await top_ups.top_up(at_once=at_once) == 1
    assert 16 <= taken_mib(arena.fd) <= 18
    for _ in range(10):
        arena.allocate(900_000)
    assert await top_ups.top_up(at_once=at_once) == 0, "so little is not worth a process"
    for _ in range(20):
        arena.allocate(900_000)
    assert await top_ups.top_up(at_once=at_once) == 1
    assert 46 <= taken_mib(arena.fd) <= 48
    for _ in range(30):
        arena.allocate(900_000)
    assert await top_ups.top_up(at_once=at_once) == 1
    assert 64 <= taken_mib(arena.fd) <= 65, "not behind the arena"
    assert await top_ups.top_up(at_once=at_once) == 0


async def test_what_records_hold_stays_and_an_adopted_arena_goes_on_behind_them(arena: Arena) -> None:
    offset = arena.allocate(20 * MIB)
    assert offset is not None
    payload = arena.payload(offset, 20 * MIB)
    payload[:] = b"\x07" * len(payload)
    arena.num_used_bytes = 0  # so that the range with the record is taken too
    await TopUps(arena).top_up()
    assert payload == b"\x07" * len(payload)
    arena.num_used_bytes = 22 * MIB
    await TopUps(arena).top_up()
    assert taken_mib(arena.fd) <= 22 + 16 + 1


async def test_a_small_arena_is_left_to_its_first_writes() -> None:
    small = Arena.create(32 * MIB, MIB, huge_pages=False)
    assert await TopUps(small).top_up() == 0
    small.close()


def run_taker(arena: Arena, owner_pid: str, at_once: int) -> int:
    """Of a process of its own: how it was scheduled in the end."""
    code = (
        "import os, prefault_process;"
        f"prefault_process.main({arena.fd}, {MIB * 2}, {MIB * 8}, {owner_pid}, {at_once});"
        "print(os.sched_getscheduler(0))"
    )
    folder = Path(prefault_process.__file__).parent
    run = subprocess.run(
        [sys.executable, "-S", "-c", code],
        pass_fds=(arena.fd,),
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return int(run.stdout)


def test_the_prefault_process_runs_when_a_core_idles_unless_at_once(arena: Arena) -> None:
    assert run_taker(arena, "os.getppid()", 0) == os.SCHED_IDLE
    assert 6 <= taken_mib(arena.fd) < 7
    assert run_taker(arena, "os.getppid()", 1) == os.SCHED_OTHER


def test_the_taker_ends_with_its_owner(arena: Arena) -> None:
    run_taker(arena, "1", 0)
    assert taken_mib(arena.fd) < 1, "only the superblock"


@pytest.mark.parametrize("what", ["descriptor", "interpreter"])
async def test_where_it_cannot_be_prefaulted_a_line_says_so_once(
    arena: Arena, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if what == "interpreter":
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
    else:
        os.close(arena.fd)
        arena.fd = os.open(os.devnull, os.O_RDWR)
    top_ups = TopUps(arena)
    with caplog.at_level(logging.WARNING):
        assert await top_ups.top_up() == 1
        assert await top_ups.top_up() == 0
    (record,) = caplog.records
    assert "is not populated ahead" in record.message
    assert ("No such device" if what == "descriptor" else "No such file") in record.message


def children() -> list[str]:
    """Processes that threads of this one have started and not yet reaped."""
    return [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


async def test_no_process_is_left_when_the_owner_stops_meanwhile() -> None:
    arena = Arena.create(1 << 30, MIB, huge_pages=False)
    top_ups = TopUps(arena)
    before = set(children())
    top_ups.prefault.top_up()
    await eventually(lambda: bool(set(children()) - before), "it runs")
    top_ups.tasks[0].cancel()
    await asyncio.gather(*top_ups.tasks, return_exceptions=True)
    assert set(children()) <= before
    arena.close()


async def test_an_owner_to_whom_no_rank_comes_has_memory_for_the_first_one(tmp_path: Path) -> None:
    async with StoreHarness(tmp_path, dram_bytes=64 * MIB, granule_bytes=MIB) as harness:
        await harness.start()
        await eventually(lambda: any(size >= 16 for size in arena_mib(harness.pid)), "16 MiB are taken")
        await harness.stop()


def arena_mib(pid: int) -> list[float]:
    """The memory that each arena of a process takes."""
    sizes = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if "memfd:tandem-store" in str(path.readlink()):
                sizes.append(path.stat().st_blocks * 512 / MIB)
    return sizes
