"""Rank processes as the engine core holds them: started together, driven together, and how one's death
shows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pytest
from held_ranks import FORKS, NUM_LAYERS, PATIENCE_S, Puppet, by_cost, holding, make_specs, starting_puppets
from local_engine import BLOCK, mixed_plans, sampled
from msgspec.structs import replace
from patience import WAIT_S
from runner_parts import ON_CPU
from trust_files import TRUST

from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import FaultRule
from kvtransfer.rpc.handshake import prove_as_client, send_frame
from workers.errors import RankDiedError, WorkerError
from workers.messages.rank_channel import (
    RANK_UP_CODEC,
    RankFailed,
    RankJoined,
    RankProgress,
    RankTicket,
    RankUp,
    StageCost,
)
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, RankCapacity
from workers.replica.layer_split import given_layers
from workers.replica.rank_group import ProcessHandle, ProcessLauncher, RankLauncher


class MakeCheckpoint(Protocol):
    def __call__(self, family: str, *, seed: int = 0, **options: object) -> Path: ...


@pytest.fixture
def model_dir(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint("llama", seed=3, num_hidden_layers=NUM_LAYERS)


@pytest.mark.parametrize(
    ("tp", "layers", "num_in_flight", "launcher"),
    [
        (1, (3,), 2, FORKS),
        (2, (3,), 2, ProcessLauncher()),
        (1, (2, 1), 3, FORKS),
        (2, (1, 2), 2, FORKS),
    ],
)
async def test_ranks_in_processes_give_the_tokens_of_one_runner(
    model_dir: Path, tp: int, layers: tuple[int, ...], num_in_flight: int, launcher: RankLauncher
) -> None:
    whole = ModelRunner(CheckpointFolder(model_dir), ON_CPU, RankCapacity(BLOCK, 40 * BLOCK), SystemClock())
    plans, pp = mixed_plans(), len(layers)
    expected = [sampled(plan, whole.steps.run(plan)) for plan in plans]
    async with holding(launcher) as core:
        stages = given_layers(NUM_LAYERS, layers)
        ready = await core.group.start(make_specs(model_dir, tp, pp), "127.0.0.1", lambda _: stages)
        assert [it.rank for it in ready] == list(range(tp * pp))
        shards = [it.endpoints.shard for it in ready]
        assert [(it.layer_start, it.layer_end) for it in shards] == [
            each for each in stages for _ in range(tp)
        ]
        assert [(it.head_start, it.head_end) for it in shards[:tp]] == ([(0, 2)], [(0, 1), (1, 2)])[tp - 1]
        assert {it.num_blocks for it in ready} == {40}
        assert len({it.compatibility for it in ready}) == 1
        await core.run(plans, tp * pp, num_in_flight)
        for rank, reports in core.reports.items():
            found = [sampled(plan, report) for plan, report in zip(plans, reports, strict=True)]
            assert found == (expected if rank == (pp - 1) * tp else [[]] * len(plans))
            assert all(report.started_at <= report.finished_at for report in reports)
        await core.group.stop()
        assert core.deaths == []
        assert all(ending.endswith("ended with status 0") for ending in await core.launcher.endings())


async def test_joined_ranks_tell_what_their_device_costs(model_dir: Path) -> None:
    told: list[RankJoined] = []

    def plan(joined: Sequence[RankJoined]) -> tuple[tuple[int, int], ...]:
        told.extend(joined)
        return by_cost(2)(joined)

    async with holding() as core:
        ready = await core.group.start(make_specs(model_dir, 1, 2, probe_rows=32), "127.0.0.1", plan)
        assert [it.rank for it in told] == [0, 1]
        assert [it.process_id for it in told] == [it.process_id for it in ready]
        assert bool(told[0].store_address)
        assert told[1].store_address == ""
        for joined in told:
            assert min(joined.cost.layer_s, joined.cost.embedding_s, joined.cost.head_s) > 0
            assert joined.attention_ratio >= 0


@pytest.mark.parametrize(
    ("tp", "pp", "text"),
    [
        (5, 1, "rank [0-4]: tp 5 is more than num_attention_heads 4"),
        (1, 4, "pp 4 is more than num_hidden_layers 3"),
    ],
)
async def test_wrong_shapes_are_refused_with_their_names(
    model_dir: Path, tp: int, pp: int, text: str
) -> None:
    async with holding() as core:
        with pytest.raises(RankDiedError, match=text):
            await core.group.start(make_specs(model_dir, tp, pp), "127.0.0.1", by_cost(pp))
        assert core.deaths == []


async def test_a_refused_split_ends_the_ranks(model_dir: Path) -> None:
    def plan(joined: Sequence[RankJoined]) -> tuple[tuple[int, int], ...]:
        return given_layers(NUM_LAYERS, (1, 1))

    async with holding() as core:
        with pytest.raises(WorkerError, match=r"layers \[1, 1\] are 2 together"):
            await core.group.start(make_specs(model_dir, 1, 2), "127.0.0.1", plan)
        assert all(str(-signal.SIGKILL) in ending for ending in await core.launcher.endings())


async def test_ranks_of_unlike_models_are_refused(model_dir: Path, make_checkpoint: MakeCheckpoint) -> None:
    """As happens where each host has a copy of the model."""
    specs = make_specs(model_dir, 2, 1)
    other = make_checkpoint("llama", seed=4, num_hidden_layers=NUM_LAYERS)
    async with holding() as core:
        unlike = [specs[0], replace(specs[1], model_dir=str(other))]
        with pytest.raises(RankDiedError, match="rank 1 is not of rank 0's model: model_fingerprint: "):
            await core.group.start(unlike, "127.0.0.1", lambda _: ((0, NUM_LAYERS),))


async def test_a_rank_that_dies_while_the_others_wait_for_it_ends_the_start(model_dir: Path) -> None:
    def plan(joined: Sequence[RankJoined]) -> tuple[tuple[int, int], ...]:
        os.kill(joined[1].process_id, signal.SIGKILL)
        return ((0, NUM_LAYERS),)

    async with holding() as core:
        with pytest.raises(RankDiedError, match=rf"rank 1, process \d+, ended with status {-signal.SIGKILL}"):
            await core.group.start(make_specs(model_dir, 2, 1), "127.0.0.1", plan)
        assert all(str(-signal.SIGKILL) in ending for ending in await core.launcher.endings())


async def test_the_rank_that_died_in_a_step_is_named(
    model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other three meet broken connections at the same time, and say so, in a line each."""
    marker = tmp_path / "marker"
    faults = (FaultRule("rank.step.decode", "kill", str(marker)),)
    async with holding(ProcessLauncher()) as core:  # the standard error of forks is elsewhere
        stages = given_layers(NUM_LAYERS, (1, 2))
        ready = await core.group.start(
            make_specs(model_dir, 2, 2, faults=faults), "127.0.0.1", lambda _: stages
        )
        for plan in mixed_plans()[:3]:
            core.group.send(plan)
        await core.until(lambda: bool(core.deaths))
        (killed,) = [it.rank for it in ready if it.process_id == int(marker.read_text())]
        assert len(core.deaths) == 1
        assert core.deaths[0].startswith(f"rank {killed}, process ")
        assert core.deaths[0].endswith(f"ended with status {-signal.SIGKILL}")
        told = ""
        async with asyncio.timeout(PATIENCE_S):
            while " lost another rank: " not in told:
                await SystemClock().sleep(0.01)
                told += capfd.readouterr().err
        assert "Traceback" not in told


async def test_a_rank_stopped_in_a_step_can_be_killed_with_those_that_wait(
    model_dir: Path, tmp_path: Path
) -> None:
    """Nobody reports the step, which is what the engine core notices; then it kills them all."""
    marker = tmp_path / "marker"
    faults = (FaultRule("rank.step.decode", "stop", str(marker)),)
    async with holding() as core:
        specs = make_specs(model_dir, 2, 1, faults=faults)
        ready = await core.group.start(specs, "127.0.0.1", lambda _: ((0, NUM_LAYERS),))
        for plan in mixed_plans()[:3]:
            core.group.send(plan)
        await core.until(lambda: all(len(core.reports[rank]) == 1 for rank in (0, 1)))
        async with asyncio.timeout(PATIENCE_S):
            while not marker.exists() or not marker.read_text():
                await SystemClock().sleep(0.01)
        assert int(marker.read_text()) in [it.process_id for it in ready]
        core.group.kill()
        assert all(str(-signal.SIGKILL) in ending for ending in await core.launcher.endings())
        assert all(len(core.reports[rank]) == 1 for rank in (0, 1))


# ---------------------------------------------------------------------- whose fault it was, without processes


LOST = RankFailed(0, "the connection to a rank broke", lost_peer=True)


async def test_the_one_who_died_is_told_before_those_who_noticed() -> None:
    async with starting_puppets() as (puppets, started):
        puppets[0].say(LOST)
        puppets[0].leave()
        puppets[0].ended.set_result("rank 0 ended with status 1")
        puppets[1].ended.set_result("rank 1 ended with status -9")
        puppets[1].leave()
        with pytest.raises(RankDiedError, match="rank 1 ended with status -9"):
            await started
        assert all(puppet.is_killed for puppet in puppets)


async def test_what_a_rank_says_counts_more_than_its_status() -> None:
    async with starting_puppets() as (puppets, started):
        puppets[1].ended.set_result("rank 1 ended with status 1")
        puppets[1].say(RankFailed(1, "no such file"))
        with pytest.raises(RankDiedError, match="rank 1: no such file"):
            await started


async def test_without_a_culprit_the_first_to_notice_is_told() -> None:
    async with starting_puppets() as (puppets, started):
        puppets[0].say(LOST)
        with pytest.raises(RankDiedError, match="rank 0: the connection to a rank broke"):
            await started


async def test_a_rank_that_ends_before_it_joins_ends_the_start() -> None:
    async with starting_puppets() as (puppets, started):
        puppets[2].ended.set_result("rank 2 ended with status 1")
        with pytest.raises(RankDiedError, match="rank 2 ended with status 1"):
            await started


async def test_a_process_that_has_ended_is_not_killed_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
    )
    handle = ProcessHandle(process, 0)
    handle.kill()
    assert str(-signal.SIGKILL) in await handle.wait()
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda process_id, _: killed.append(process_id))
    handle.kill()
    assert killed == [], "the number may be another process's by now"


@pytest.mark.parametrize(
    "words",
    [
        [RankFailed(0, "an intruder's reason")],
        [RankTicket(2, bytes(16)), RankFailed(2, "an intruder's reason")],
        [RankTicket(9, b""), RankProgress(2, "an intruder's phase")],
        [RankJoined(2, 1, "", StageCost(), 0.0), RankFailed(2, "an intruder's reason")],
    ],
    ids=["failure", "wrong ticket", "no rank", "joined"],
)
async def test_a_peer_that_is_no_rank_of_this_replica_ends_nothing(words: list[RankUp]) -> None:
    """It knows the secret, and its own connection ends."""
    async with starting_puppets() as (puppets, started):
        spec = puppets[2].spec
        host, _, port = spec.engine_core_address.rpartition(":")
        with socket.create_connection((host, int(port))) as sock:
            await asyncio.to_thread(prove_as_client, sock, TRUST, "intruder")
            for word in words:
                send_frame(sock, RANK_UP_CODEC.encode(word))
            sock.settimeout(WAIT_S)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.to_thread(sock.recv, 1) == b""
        assert not started.done()
        await puppets[2].connect()
        puppets[2].say(RankFailed(2, "its own reason"))
        with pytest.raises(RankDiedError, match="rank 2: its own reason"):
            await started


async def test_a_rank_is_let_in_once() -> None:
    """A connection with the ticket of one that is there, which somebody has read, is another's."""
    async with starting_puppets() as (puppets, started):
        await puppets[2].connect()
        other = Puppet(puppets[2].spec)
        await other.connect()
        other.say(RankFailed(2, "a second one's reason"))
        puppets[2].say(RankFailed(2, "the first one's reason"))
        with pytest.raises(RankDiedError, match="rank 2: the first one's reason"):
            await started
        other.leave()
