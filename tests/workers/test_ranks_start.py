"""Ranks that hang while they start, and strangers at the port to which they connect."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path
from typing import Protocol

import pytest
from held_ranks import (
    NUM_LAYERS,
    PATIENCE_S,
    START_STALL_S,
    PuppetLauncher,
    holding,
    make_specs,
    refuse_planning,
    starting_puppets,
)
from msgspec.structs import replace
from trust_files import TRUST

from kvtransfer.common.clock import ManualClock, SystemClock
from kvtransfer.common.faults import FaultRule
from kvtransfer.rpc.listener import MAX_UNPROVEN
from workers.errors import RankDiedError
from workers.messages.rank_channel import RankProgress, RankReady
from workers.replica.rank_group import RankGroup


class MakeCheckpoint(Protocol):
    def __call__(self, family: str, *, seed: int = 0, **options: object) -> Path: ...


@pytest.fixture
def model_dir(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint("llama", seed=3, num_hidden_layers=NUM_LAYERS)


async def until_given_up(started: asyncio.Task[list[RankReady]], clock: ManualClock) -> None:
    """Time passes without news until the start ends."""
    async with asyncio.timeout(PATIENCE_S):
        while not started.done():
            clock.advance(START_STALL_S + 1)
            await SystemClock().sleep(0.01)


@pytest.mark.parametrize(
    ("phase", "other_phase"),
    [
        pytest.param("probing", "joined", marks=pytest.mark.slow),
        pytest.param("forming", "forming", marks=pytest.mark.slow),
        ("loading", "warming"),
        pytest.param("allocating", "warming", marks=pytest.mark.slow),
        pytest.param("warming", "warming", marks=pytest.mark.slow),
    ],
)
async def test_a_rank_that_hangs_while_it_starts_is_named_with_its_phase(
    model_dir: Path, tmp_path: Path, phase: str, other_phase: str
) -> None:
    """A stopped process, as a filer that does not answer leaves it; the other rank waits for it."""
    marker, clock = tmp_path / "marker", ManualClock()
    specs = make_specs(model_dir, 2, 1)
    faults = (FaultRule(f"rank.start.{phase}", "stop", str(marker)),)
    async with holding(clock=clock) as core:
        hung = [specs[0], replace(specs[1], faults=faults)]
        started = asyncio.create_task(core.group.start(hung, "127.0.0.1", lambda _: ((0, NUM_LAYERS),)))
        async with asyncio.timeout(PATIENCE_S):
            while not (marker.exists() and core.group.phases[0].startswith(other_phase)):
                await SystemClock().sleep(0.01)
        await until_given_up(started, clock)
        with pytest.raises(RankDiedError, match=rf"no progress for {START_STALL_S:g} s") as caught:
            await started
        assert f"rank 1 ({phase}" in str(caught.value)
        assert "engine.start_stall_s" in str(caught.value)
        assert all(str(-signal.SIGKILL) in ending for ending in await core.launcher.endings())


async def test_a_rank_that_comes_further_has_its_time_anew_and_one_that_never_connects_is_named() -> None:
    launcher, clock = PuppetLauncher(), ManualClock()
    group = RankGroup(
        TRUST, launcher, lambda rank, message: None, lambda reason: None, clock=clock, start_stall_s=10.0
    )
    started = asyncio.create_task(group.start(make_specs(Path(), 2, 1), "127.0.0.1", refuse_planning))
    while len(launcher.puppets) < 2:
        await SystemClock().sleep(0.001)
    puppet = launcher.puppets[0]
    await puppet.connect()
    for number in range(5):
        puppet.say(RankProgress(0, f"loading weights, {number} of 5 layers"))
        while group.phases.get(0) != f"loading weights, {number} of 5 layers":
            await SystemClock().sleep(0.001)
        await SystemClock().sleep(0.01)  # the wait for the next news has begun
        clock.advance(9.0)
        assert not started.done()
    await until_given_up(started, clock)
    with pytest.raises(RankDiedError, match=r"rank 1 \(starting its process\), rank 0 \(loading weights, 4"):
        await started
    await group.stop()


async def test_strangers_at_the_rank_channel_do_not_keep_the_ranks_out() -> None:
    async with starting_puppets() as (puppets, started):
        host, _, port = puppets[2].spec.engine_core_address.rpartition(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(MAX_UNPROVEN + 10)]
        await puppets[2].join()
        with pytest.raises(AssertionError, match="not all ranks have joined"):
            await started
        for stranger in strangers:
            stranger.close()
