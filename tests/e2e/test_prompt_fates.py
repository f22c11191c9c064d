"""With a real engine: why a prompt was computed again, the recording of its requests, and the device time
that is attributed to them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from e2e_front import Call, Front, copy_tiny, prompt
from e2e_harness import BLOCK_TOKENS, E2eHarness, until

from cluster.bench.recorded_trace import recorded_trace
from cluster.proto.tandem.v1 import inference_pb2 as pb

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

NUM_TOKENS = 300


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    """A replica whose KV has room for two of the prompts."""
    model_dir = copy_tiny(tmp_path_factory.mktemp("fates"))
    async with AsyncExitStack() as ends:
        harness = await ends.enter_async_context(E2eHarness(model_dir))
        replica = await harness.add("b0", engine={"kv_tokens": 640, "chunk_tokens": 64})
        built = Front(harness, model_dir)
        await built.open()
        ends.push_async_callback(built.close)
        await built.register(replica)
        yield built


async def explained(front: Front, call: Call) -> pb.ExplainResponse:
    assert call.accepted is not None
    return await front.client.explain(call.accepted.request_id)


async def test_an_evicted_prompt_is_told_from_a_new_one(front: Front) -> None:
    first, *others = (prompt(seed, NUM_TOKENS) for seed in (1, 2, 3))
    new = await explained(front, await front.complete(first, max_tokens=2))
    num_blocks = NUM_TOKENS // BLOCK_TOKENS
    assert [(it.fate, it.num_blocks) for it in new.decisions[-1].missed] == [(pb.BLOCK_FATE_NEW, num_blocks)]
    assert new.decisions[-1].achievable_tokens == 0
    for other in others:
        await front.complete(other, max_tokens=2)
    again = await explained(front, await front.complete(first, max_tokens=2))
    (removed,) = again.decisions[-1].missed
    assert (removed.fate, removed.reason) == (pb.BLOCK_FATE_REMOVED, "space")
    assert [(it.replica_id, it.tier) for it in removed.places] == [("b0", "device")]
    assert 0 <= removed.least_age_s <= removed.most_age_s
    assert again.decisions[-1].achievable_tokens == num_blocks * BLOCK_TOKENS
    assert again.prompt.relative_id == new.request_id
    assert again.prompt.num_shared_tokens == num_blocks * BLOCK_TOKENS
    trace = await recorded_trace(front.admin)
    assert [it.input_length for it in trace.requests] == [NUM_TOKENS] * 4
    ids = [set(it.full_blocks) for it in trace.requests]
    assert ids[0] == ids[3]
    assert not ids[0] & (ids[1] | ids[2])
    assert [it.num_output for it in trace.served] == [2] * 4


async def test_the_attributed_time_is_about_the_time_that_the_engine_computed(front: Front) -> None:
    replica = front.harness.replicas["b0"]

    def spent() -> tuple[float, float]:
        assert replica.load is not None
        return (
            replica.load.busy_s,
            sum(
                sum(use.device_s.values())
                for use in front.gateway.requests.counters.tenants.series().values()
            ),
        )

    async def run(seed: int) -> None:
        calls = [front.call(prompt(seed + number, 150), max_tokens=30) for number in range(2)]
        for call in calls:
            await call.done()

    for seed in range(100, 130, 2):  # until the coefficients are measured
        await run(seed)
    await front.harness.quiet()
    assert replica.load is not None
    assert replica.load.prefill_token_s > 0
    assert replica.load.decode_base_s > 0
    num_steps = replica.load.num_steps
    before = spent()
    for seed in range(200, 230, 2):
        await run(seed)
    await front.harness.quiet()
    await until(lambda: replica.load is not None and replica.load.num_steps > num_steps + 200, "its report")
    busy_s, attributed_s = (after - at for after, at in zip(spent(), before, strict=True))
    print(f"computed {busy_s:.2f} s, attributed {attributed_s:.2f} s: ratio {attributed_s / busy_s:.2f}")
    assert 0.5 < attributed_s / busy_s < 1.7
