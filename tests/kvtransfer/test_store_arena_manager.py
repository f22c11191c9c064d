"""Which arena a node has: one that a rank still maps goes before a spare that was made meanwhile."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from store_harness import StoreHarness, eventually

from kvtransfer.common.clock import ManualClock
from kvtransfer.store.dram.arena import Arena
from kvtransfer.store.dram.prefault import Prefault
from kvtransfer.store.messages.arena_mapping import RankHello
from kvtransfer.store.messages.owner_codec import STORE_PROTOCOL
from kvtransfer.store.server.arena_manager import SPARE_WAIT_S, UNUSED_WAIT_S, ArenaManager
from kvtransfer.store.server.listeners import LocalPeer, send_descriptor


class Entrance:
    """An arena manager whose clock stands still, and what it told."""

    def __init__(self, folder: Path) -> None:
        self.settings = StoreHarness(folder).settings
        self.clock = ManualClock()
        self.told: list[Arena] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.manager = ArenaManager(
            self.settings, self.clock, 1.0, self._on_arena, lambda rank: None, self.spawn
        )
        self.lonely = self.spawn(self.manager.make_without_ranks(), "lonely")

    def spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work, name=name))
        return self.tasks[-1]

    async def pass_time(self, seconds: float) -> None:
        """All that is due happens."""
        await asyncio.sleep(0)
        self.clock.advance(seconds)
        for _ in range(3):
            await asyncio.sleep(0)

    @contextmanager
    def rank(self, arena: Arena | None = None) -> Iterator[asyncio.Task[None]]:
        """It comes, with the arena that it has mapped, and stays for the block."""
        ours, ranks = socket.socketpair()
        ours.setblocking(False)
        hello = RankHello(STORE_PROTOCOL, b"session", 0, arena.id if arena else b"")
        if arena is not None:
            send_descriptor(ranks, arena.fd)
        try:
            yield self.spawn(self.manager.serve(LocalPeer(ours, "rank 0", hello), hello), "rank")
        finally:
            ranks.close()
            ours.close()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.manager.close()
        for arena in self.told:
            arena.close()

    def _on_arena(self, arena: Arena, ahead: Prefault) -> None:
        self.told.append(arena)


def arenas() -> set[int]:
    """That this process has open; other tests' go when they are collected."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            if "memfd:tandem-store" in os.readlink(f"/proc/self/fd/{name}"):
                inodes.add(os.fstat(int(name)).st_ino)
    return inodes


async def test_a_spare_is_used_when_nobody_has_come(tmp_path: Path) -> None:
    entrance, before = Entrance(tmp_path), arenas()
    await entrance.pass_time(SPARE_WAIT_S / 2)
    assert arenas() <= before
    await entrance.pass_time(SPARE_WAIT_S / 2)
    assert (len(arenas() - before), entrance.told) == (1, []), "made, and nobody is told of it"
    await entrance.pass_time(UNUSED_WAIT_S - SPARE_WAIT_S)
    assert (len(arenas() - before), entrance.told) == (1, [entrance.manager.arena])
    await entrance.close()
    assert arenas() <= before


@pytest.mark.parametrize("at", [0.0, SPARE_WAIT_S])
async def test_a_rank_without_an_arena_gets_a_new_one_or_the_spare(tmp_path: Path, at: float) -> None:
    entrance, before = Entrance(tmp_path), arenas()
    await entrance.pass_time(at)
    with entrance.rank():
        await entrance.pass_time(1.0)
        await eventually(lambda: len(entrance.told) == 1, "there is one")
        assert len(arenas() - before) == 1
        await entrance.pass_time(UNUSED_WAIT_S)
    assert entrance.told == [entrance.manager.arena]
    await entrance.close()
    assert arenas() <= before


@pytest.mark.parametrize("at", [0.0, SPARE_WAIT_S, UNUSED_WAIT_S - 0.1])
async def test_an_arena_of_before_goes_before_the_spare(tmp_path: Path, at: float) -> None:
    entrance, before = Entrance(tmp_path), arenas()
    settings = entrance.settings
    old = Arena.create(settings.dram_bytes, settings.granule_bytes, huge_pages=False)
    await entrance.pass_time(at)
    with entrance.rank(old):
        await eventually(lambda: len(entrance.told) == 1, "it is taken over")
        assert entrance.told[0].id == old.id
        assert len(arenas() - before) == 1, "the spare is gone"
        await entrance.pass_time(UNUSED_WAIT_S)
    assert len(entrance.told) == 1
    await entrance.close()
    old.close()
    assert arenas() <= before


async def test_after_the_wait_the_new_arena_stays(tmp_path: Path) -> None:
    entrance = Entrance(tmp_path)
    settings = entrance.settings
    old = Arena.create(settings.dram_bytes, settings.granule_bytes, huge_pages=False)
    await entrance.pass_time(SPARE_WAIT_S)
    await entrance.pass_time(UNUSED_WAIT_S - SPARE_WAIT_S)
    (ours,) = entrance.told
    with entrance.rank(old):
        await entrance.pass_time(0.0)
        assert entrance.manager.arena is ours
    await entrance.close()
    old.close()
