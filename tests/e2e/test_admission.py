"""A burst at a real gateway, before replicas that run two sequences at a time: who goes first, who is refused
and how soon, and what is left of those that waited."""

from __future__ import annotations

import asyncio
import functools
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from e2e_front import Call, Front, copy_tiny, prompt, tokens_alone
from e2e_harness import E2eHarness, until

from cluster.admission.admission import RequestAdmission
from cluster.admission.ladder import Rung
from cluster.proto.tandem.v1 import inference_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE = {"kv_tokens": 8192, "max_batch_tokens": 64, "chunk_tokens": 64, "max_sequences": 2}
# Objectives that nothing here comes near, and those of a burst.
CALM: dict[str, Any] = {
    "interactive": {"ttft_s": 300.0, "aging_s": 290.0, "max_wait_s": 300.0},
    "standard": {"ttft_s": 300.0, "aging_s": 290.0, "max_wait_s": 300.0},
}
STRICT: dict[str, Any] = {
    "standard": {"ttft_s": 15.0, "aging_s": 10.0, "max_wait_s": 15.0, "capped_tokens": 3}
}
NUM_BURST = 2000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[E2eHarness]:
    """b0 serves; b1 is for what comes later."""
    model_dir = copy_tiny(tmp_path_factory.mktemp("admission"))
    async with E2eHarness(model_dir) as built:
        await built.add_all({"b0": "both", "b1": "both"}, engine=ENGINE)
        yield built


@asynccontextmanager
async def opened(harness: E2eHarness, admission: dict[str, Any], *names: str) -> AsyncIterator[Front]:
    """A gateway over these replicas, which are left as they were found."""
    model_dir: Path = harness._model_dir
    front = Front(harness, model_dir, policy="cost", admission=admission)
    await front.open()
    try:
        await front.register(*(harness.replicas[name] for name in names or ("b0",)))
        yield front
    finally:
        await front.close()
        await harness.quiet()


def admission_of(front: Front) -> RequestAdmission:
    return front.gateway.requests.admission


async def busy(front: Front) -> list[Call]:
    """Streams that take both places of b0, and last much longer than a test."""
    streams = [front.call(prompt(900 + index, 20), max_tokens=1900) for index in range(2)]
    await until(lambda: all(len(call.sequence) >= 2 for call in streams), "both run")
    await until(lambda: not _takes_more(front), "the gateway knows that nothing more runs there")
    return streams


def _takes_more(front: Front) -> bool:
    (view,) = [it for it in front.gateway.connections.views() if it.record.identity.replica_id == "b0"]
    return view.load is None or view.load.num_running < 2


def held(front: Front, number: int, **options: Any) -> list[Call]:
    return [
        front.call(prompt(1000 + index, 30), resume=False, **{"max_tokens": 4, **options})
        for index in range(number)
    ]


async def all_wait(front: Front, number: int) -> None:
    await until(lambda: len(admission_of(front).waiting) == number, f"{number} wait in the gateway")


def is_empty(front: Front) -> bool:
    admission = admission_of(front)
    admission.check()
    return (
        len(admission.waiting) == 0
        and admission.bytes.num_bytes == 0
        and front.gateway.requests.num_running == 0
    )


def is_answered(call: Call) -> bool:
    return call.accepted is not None or call.error is not None


def all_answered(calls: Sequence[Call]) -> bool:
    return all(map(is_answered, calls))


async def flood(front: Front, rung: Rung = Rung.NORMAL) -> list[Call]:
    """One tenant sends until the gateway refuses, and the ladder has climbed; returns all its calls."""
    calls: list[Call] = []
    # The pressure is measured ten times a second; of what was sent at once, much may have run by then.
    while not any(call.error for call in calls) or admission_of(front).degradation.ladder.rung < rung:
        assert len(calls) < NUM_BURST, "nothing was refused, or the ladder has not climbed"
        calls += [
            front.call(prompt(2000 + len(calls) + index, 900), tenant="greedy", resume=False)
            for index in range(10)
        ]
        await until(functools.partial(all_answered, tuple(calls)), "each was taken or refused")
    return calls


async def end(front: Front, calls: list[Call]) -> None:
    for call in calls:
        call.stream.cancel()
    for call in calls:
        await call.ended()
    await until(lambda: is_empty(front), "nothing is left")


# ------------------------------------------------------------------------------------------ the order


async def test_interactive_requests_go_before_batch_ones_that_came_earlier(harness: E2eHarness) -> None:
    async with opened(harness, CALM) as front:
        streams = await busy(front)
        batch = held(front, 4, service_class="batch", tenant="t")
        await all_wait(front, 4)
        interactive = held(front, 4, service_class="interactive", tenant="t")
        await all_wait(front, 8)
        assert admission_of(front).waiting.queues.num_waiting() == {
            "interactive": 4,
            "standard": 0,
            "batch": 4,
        }
        streams[0].stream.cancel()  # one place: they go one after the other
        for call in (*batch, *interactive):
            await call.done()
        explained = {
            kind: [await _submitted_at(front, call) for call in calls]
            for kind, calls in (("batch", batch), ("interactive", interactive))
        }
        # The flow that came first may have the first turn; then its weight is an eighth.
        assert max(explained["interactive"]) < sorted(explained["batch"])[1]
        assert not streams[1].task.done()
        await end(front, [streams[1]])


async def _submitted_at(front: Front, call: Call) -> float:
    assert call.accepted is not None
    record = front.gateway.requests.record(call.accepted.request_id, None)
    return next(entry.at for entry in record.timeline if entry.name == "routed")


async def test_requests_that_are_held_give_the_tokens_of_the_model(harness: E2eHarness) -> None:
    async with opened(harness, CALM) as front:
        streams = await busy(front)
        calls = held(front, 6, max_tokens=12, seed=3)
        await all_wait(front, 6)
        streams[0].stream.cancel()
        for call in calls:
            await call.done()
        for index, call in enumerate(calls):
            wanted = await tokens_alone(harness.replicas["b1"], harness, prompt(1000 + index, 30), 3, 12)
            assert call.sequence == wanted
        await end(front, streams)


# ------------------------------------------------------------------------------- refusal and the cap


async def test_a_burst_is_refused_in_milliseconds_with_a_time_to_retry(harness: E2eHarness) -> None:
    async with opened(harness, STRICT) as front:
        calls = await flood(front)
        flooded = await front.admin.status()
        waits_s: list[float] = []
        while len(waits_s) < 10:
            assert len(calls) < NUM_BURST, "too few are refused"
            began_at = front.clock.now()
            call = front.call(prompt(5000 + len(calls), 900), tenant="greedy", resume=False)
            calls.append(call)
            await until(functools.partial(is_answered, call), "it was taken or refused")
            if call.error is not None:
                waits_s.append(front.clock.now() - began_at)
                assert call.error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert call.error.retry_after_s is not None
                assert 0 < call.error.retry_after_s < 60
                assert "objective of the class standard" in call.error.message
        errors = [call.error for call in calls if call.error is not None]
        async with asyncio.timeout(30):
            while (status := await front.admin.status()).demand.num_refused < len(errors):
                pass  # a status may be up to 0.2 s old
        assert status.demand.num_refused == len(errors)
        # A fast engine may have taken what waited by the end of the burst.
        replicas = [*flooded.replicas, *status.replicas]
        assert sum(it.held.num_prompts + it.held.num_sequences for it in replicas) > 0
        # The engine's ranks want the processor as well.
        assert statistics.median(waits_s) < 0.1
        assert admission_of(front).refusals.counts["late", "standard"] >= len(waits_s)
        refused = [call for call in calls if call.error is not None]
        assert all(call.error and call.error.is_refusal for call in refused)
        await end(front, [call for call in calls if call.error is None])


async def test_another_tenant_is_served_with_fewer_tokens_and_told_so(harness: E2eHarness) -> None:
    async with opened(harness, STRICT) as front:
        calls = await flood(front, Rung.TOKENS_CAPPED)
        modest = await front.call(prompt(6000, 20), tenant="modest", max_tokens=50, resume=False).done()
        assert len(modest.sequence) == 3
        assert modest.finished is not None
        assert modest.finished.usage.capped_max_tokens == 3
        assert modest.finished.samples[0].finish_reason == pb.FINISH_REASON_LENGTH
        short = await front.call(prompt(6001, 20), tenant="modest", max_tokens=2, resume=False).done()
        assert short.finished is not None
        assert short.finished.usage.capped_max_tokens == 0
        await end(front, [call for call in calls if call.error is None])


# ------------------------------------------------------------------- what was taken is not judged again


@pytest.mark.slow
async def test_a_stream_that_is_resumed_here_passes_those_that_wait(harness: E2eHarness) -> None:
    async with opened(harness, CALM, "b1") as first, opened(harness, CALM) as second:
        client = first.connect(first.address, second.address)
        # It must still run when its gateway stops, however fast the engine is.
        stream = first.call(prompt(7000, 40), client=client, seed=5, max_tokens=1500)
        await until(lambda: len(stream.sequence) >= 3, "it runs")
        streams = await busy(second)
        calls = held(second, 3)
        await all_wait(second, 3)
        await first.gateway.stop()
        table = harness.replicas["b0"].core.table
        await until(lambda: len(table) == 3, "it was sent to the replica, where no place is free")
        assert len(admission_of(second).waiting) == 3
        streams[0].stream.cancel()
        await stream.done(120.0)
        assert stream.stream.num_resumes >= 1
        wanted = await tokens_alone(harness.replicas["b1"], harness, prompt(7000, 40), 5, 1500)
        assert stream.sequence == wanted
        await end(second, [*streams, *calls])


async def test_streams_of_a_replica_that_leaves_pass_those_that_wait(harness: E2eHarness) -> None:
    guest = await harness.add("guest", "both", engine=ENGINE)
    async with opened(harness, STRICT) as front:
        await front.register(guest)
        streams = [
            front.call(prompt(7100 + i, 40), seed=5 + i, max_tokens=200, pinned_decode="guest")
            for i in range(2)
        ]
        await until(lambda: all(len(call.sequence) >= 3 for call in streams), "both run")
        calls = await flood(front)
        await guest.core.drain(60.0)
        for i, stream in enumerate(streams):
            await stream.done(120.0)
            wanted = await tokens_alone(harness.replicas["b1"], harness, prompt(7100 + i, 40), 5 + i, 200)
            assert stream.sequence == wanted
        await end(front, [call for call in calls if call.error is None])
        harness.replicas.pop("guest")
        await guest.close()
        await guest.core.stop()


# ------------------------------------------------------------------------------------------ how it ends


async def test_a_cancel_while_it_waits_leaves_nothing_behind(harness: E2eHarness) -> None:
    async with opened(harness, CALM) as front:
        streams = await busy(front)
        calls = held(front, 5)
        await all_wait(front, 5)
        assert admission_of(front).bytes.num_bytes > 0
        for call in calls:
            call.stream.cancel()
            await call.ended()
            assert call.error is not None
            assert call.error.code is grpc.StatusCode.CANCELLED
        await until(lambda: len(admission_of(front).waiting) == 0, "none waits")
        admission_of(front).check()
        assert admission_of(front).bytes.num_bytes == 0
        assert not any(stream.task.done() for stream in streams)
        assert len(front.gateway.connections.views()) == 1
        await end(front, streams)


async def test_a_deadline_passes_while_a_request_waits(harness: E2eHarness) -> None:
    async with opened(harness, {**CALM, "batch": {"aging_s": 290.0, "max_wait_s": 300.0}}) as front:
        streams = await busy(front)
        (call,) = held(front, 1)
        await all_wait(front, 1)
        late = front.call(prompt(1100, 30), timeout_s=1.0, resume=False)
        await late.ended()
        assert late.error is not None
        assert late.error.code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
        await all_wait(front, 1)
        await end(front, [*streams, call])


async def test_a_gateway_that_stops_ends_what_waits_with_unavailable(harness: E2eHarness) -> None:
    async with opened(harness, CALM) as front:
        await busy(front)
        calls = held(front, 3)
        await all_wait(front, 3)
        await front.gateway.requests.close()
        for call in calls:
            await call.ended()
            assert call.error is not None
            assert call.error.code is grpc.StatusCode.UNAVAILABLE
            assert "stopping" in call.error.message
        assert is_empty(front)
