"""Replicas that leave, or change their role, under streams of the real gateway: no stream is cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from e2e_front import Call, Stage, decoding, prompt, tokens_alone
from e2e_harness import until

from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from kvtransfer.common.faults import FaultRule

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE: dict[str, Any] = {"kv_tokens": 8192, "chunk_tokens": 32, "max_sequences": 32}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with Stage.opened(tmp_path_factory.mktemp("leaving"), ENGINE) as stage:
        yield stage


def attempts(calls: list[Call]) -> list[int]:
    return [call.finished.timing.attempts for call in calls if call.finished is not None]


async def test_a_leaving_replica_moves_its_streams_and_is_gone_long_before_their_end(stage: Stage) -> None:
    guest = await stage.guest("decode")
    async with stage.front(stage.p0, guest) as front:
        calls = stage.calls(front, 100, 3, 300)
        await until(decoding(calls), "all run")
        await front.register(stage.d0)
        await guest.core.drain(60.0)
        assert not any(call.task.done() for call in calls), "the drain has not waited for their end"
        await stage.all_right(calls, 100, 300)
        assert attempts(calls) == [1] * 3
        assert {call.finished.decode_replica for call in calls if call.finished} == {"d0"}
        assert guest.core.migration.num_migrated == 3
        assert calls[0].accepted is not None
        told = await front.client.explain(calls[0].accepted.request_id)
        assert "moved" in [event.name for event in told.timeline]
        await stage.harness.quiet()


@pytest.mark.slow
async def test_many_streams_leave_a_few_at_a_time(stage: Stage) -> None:
    guest, other = await asyncio.gather(stage.guest("decode"), stage.guest("decode"))
    async with stage.front(stage.p0, guest) as front:
        calls = stage.calls(front, 200, 16, 300)
        await until(decoding(calls), "all run", 60.0)
        await front.register(stage.d0, other)
        drain = asyncio.create_task(guest.core.drain(60.0))
        most = 0
        while not drain.done():
            most = max(most, guest.core.kv_sender.sends.num_active)
            await front.clock.sleep(0.002)
        await drain
        assert 0 < most <= 8
        await stage.all_right(calls, 200, 300)
        assert attempts(calls) == [1] * 16
        places = [call.finished.decode_replica for call in calls if call.finished]
        assert min(places.count("d0"), places.count(other.core.identity.replica_id)) >= 5
        await stage.harness.quiet()


@pytest.mark.slow
async def test_without_another_replica_streams_run_on_and_fail_over_at_the_end(stage: Stage) -> None:
    guest = await stage.guest("decode")
    async with stage.front(stage.p0, guest) as front:
        calls = stage.calls(front, 300, 2, 800)
        await until(decoding(calls), "both run")
        before = [len(call.sequence) for call in calls]
        await guest.core.drain(0.3)
        assert all(len(call.sequence) > count for call, count in zip(calls, before, strict=True))
        await until(lambda: len(guest.core.table) == 0, "nothing is left there")
        await front.register(stage.d0)
        await stage.all_right(calls, 300, 800)
        assert attempts(calls) == [2, 2]
        await stage.harness.quiet()


async def test_a_leaving_prefill_replica_finishes_what_it_has_begun_and_returns_the_rest(
    stage: Stage,
) -> None:
    guest = await stage.guest("prefill", max_sequences=2, chunk_tokens=16, max_batch_tokens=16)
    async with stage.front(guest, stage.d0, steps_ahead=1e6) as front:  # nothing waits in the gateway
        calls = stage.calls(front, 400, 8, 24)
        await until(lambda: guest.core.scheduler.counts.num_waiting >= 4, "most of them wait")
        await front.register(stage.p0)
        await guest.core.drain(30.0)
        await stage.all_right(calls, 400, 24)
        assert set(attempts(calls)) == {1, 2}
        computed = {call.finished.prefill_replica for call in calls if call.finished}
        assert computed == {"p0", guest.core.identity.replica_id}
        await stage.harness.quiet()


@pytest.mark.slow
async def test_several_samples_stay_until_the_end_of_the_drain(stage: Stage) -> None:
    guest = await stage.guest("decode")
    async with stage.front(stage.p0, guest) as front:
        # It must outlast the drain, however fast the engine is.
        call = front.call(prompt(500), seed=500, max_tokens=1500, n=3, temperature=1.0)
        await until(lambda: call.num_tokens > 30, "it runs")
        await front.register(stage.d0)
        await guest.core.drain(0.5)
        await call.done()
        assert attempts([call]) == [2]
        for sample in range(3):
            alone = stage.harness.replicas["b0"]
            wanted = await tokens_alone(
                alone, stage.harness, prompt(500), 500, 1500, sample=sample, temperature=1.0
            )
            assert call.tokens[sample] == wanted
        await stage.harness.quiet()


@pytest.mark.slow
async def test_a_decode_replica_becomes_a_prefill_replica_and_back(stage: Stage) -> None:
    guest = await stage.guest("decode")
    async with stage.front(stage.p0, guest) as front:
        calls = stage.calls(front, 600, 3, 400)
        await until(decoding(calls), "all run")
        await front.register(stage.d0)
        guest.core.set_role("prefill", 7)
        guest.core.set_role("decode", 6)
        await stage.all_right(calls, 600, 400)
        assert attempts(calls) == [1] * 3
        assert {call.finished.decode_replica for call in calls if call.finished} == {"d0"}
        status = await front.admin.status()
        assert {it.role for it in status.replicas if it.replica_id.startswith("guest")} == {
            admin_pb.REPLICA_ROLE_PREFILL
        }
        later = stage.calls(front, 610, 6, 8)
        await stage.all_right(later, 610, 8)
        ends = [call.finished for call in later if call.finished is not None]
        assert guest.core.identity.replica_id in {end.prefill_replica for end in ends}
        assert {end.decode_replica for end in ends} == {"d0"}
        guest.core.set_role("decode", 8)
        name = guest.core.identity.replica_id
        await until(lambda: front.gateway.connections.views()[1].role == "decode", "it is known")
        again = stage.calls(front, 620, 6, 8)
        await stage.all_right(again, 620, 8)
        assert name in {call.finished.decode_replica for call in again if call.finished}
        await stage.harness.quiet()


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 3])
async def test_a_leaving_replica_that_dies_in_the_middle_of_a_move(
    stage: Stage, tmp_path: Path, after: int
) -> None:
    fault = FaultRule("push.half", "kill", str(tmp_path / "kill"), after)
    guest = await stage.guest("decode", fault)
    async with stage.front(stage.p0, guest) as front:
        calls = stage.calls(front, 700 + 10 * after, 2, 300)
        await until(decoding(calls), "both run")
        await front.register(stage.d0)
        drain = asyncio.create_task(guest.core.drain(60.0))
        await until(lambda: Path(fault.marker).exists(), "its rank is killed")
        await stage.all_right(calls, 700 + 10 * after, 300)
        await drain
        await stage.harness.quiet(stage.p0, stage.d0)


@pytest.mark.slow
async def test_a_stream_is_cancelled_while_it_moves(stage: Stage, tmp_path: Path) -> None:
    fault = FaultRule("push.half", "stop", str(tmp_path / "stop"), 2)
    guest = await stage.guest("decode", fault)
    async with stage.front(stage.p0, guest) as front:
        (call,) = stage.calls(front, 800, 1, 300)
        await until(decoding([call]), "it runs")
        await front.register(stage.d0)
        drain = asyncio.create_task(guest.core.drain(60.0))
        await until(lambda: Path(fault.marker).exists(), "the writer stops")
        call.stream.cancel()
        await call.ended()
        await until(lambda: stage.d0.core.pool.num_quarantined > 0, "the landing waits for its writer")
        stage.harness.wake_all()
        await drain
        await stage.harness.quiet()
