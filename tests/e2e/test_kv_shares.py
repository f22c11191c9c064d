"""A tenant at its share of the replicas' KV floods them, and another tenant is served as if alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from e2e_front import Call, Front, copy_tiny, prompt, tokens_alone
from e2e_harness import BLOCK_TOKENS, E2eHarness, Replica, until
from patience import WAIT_S
from store_harness import StoreHarness

from cluster.errors import CallError
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.group_shares import GroupShares

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_BLOCKS = 128
SHARE = 0.3
LIMIT = 38
LIMIT_TOKENS = LIMIT * BLOCK_TOKENS
ENGINE = {"kv_tokens": NUM_BLOCKS * BLOCK_TOKENS, "chunk_tokens": 256}
NUM_PROMPT = 320
FLOOD = 10
PAIR = ("p0", "d0")
ALONE = ("b0",)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def harness(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[E2eHarness]:
    model_dir: Path = copy_tiny(tmp_path_factory.mktemp("shares"))
    async with E2eHarness(model_dir) as built:
        roles = {"p0": "prefill", "d0": "decode", "b0": "both"}
        await built.add_all(roles, engine=ENGINE, shares=GroupShares(1.0, {"a": SHARE}))
        yield built


@asynccontextmanager
async def front(harness: E2eHarness, names: tuple[str, ...]) -> AsyncIterator[Front]:
    """A gateway over these replicas, with the same shares."""
    async with AsyncExitStack() as ends:
        built = Front(harness, harness._model_dir, {"a": {"device_kv_share": SHARE}})
        await built.open()
        ends.push_async_callback(built.close)
        await built.register(*(harness.replicas[name] for name in names))
        yield built


async def most_used(replicas: list[Replica], most: list[int]) -> None:
    """Keep the most blocks that tenant a is ever seen to use at any of them."""
    while True:
        most.append(max(replica.core.pool.num_used_by("a") for replica in replicas))
        await SystemClock().sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize("names", [PAIR, ALONE], ids=["prefill and decode", "one replica"])
async def test_a_flood_holds_back_nobody_else(harness: E2eHarness, names: tuple[str, ...]) -> None:
    """Each request of the flood needs all of the share at its end, and more than half of it at its start."""
    replicas = [harness.replicas[name] for name in names]
    most: list[int] = []
    num_tokens = LIMIT_TOKENS - NUM_PROMPT
    async with front(harness, names) as gateway:
        watch = asyncio.create_task(most_used(replicas, most))
        flood = [
            gateway.call(prompt(number, NUM_PROMPT), tenant="a", seed=number, max_tokens=num_tokens)
            for number in range(FLOOD)
        ]
        await until(lambda: any(call.sequence for call in flood), "the flood has begun")
        others = [
            gateway.call(prompt(100 + number, NUM_PROMPT), tenant="b", seed=number, max_tokens=8)
            for number in range(3)
        ]
        for call in others:
            await call.done()
        num_waiting = sum(not call.sequence for call in flood)
        assert num_waiting > FLOOD // 3, "it came after them, and was served before them"
        for call in flood:
            await call.done(wait_s=WAIT_S)
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        await harness.quiet(*replicas)
    assert NUM_PROMPT // BLOCK_TOKENS < max(most) <= LIMIT
    for number in (0, FLOOD - 1):
        alone = await tokens_alone(
            harness.replicas["b0"], harness, prompt(number, NUM_PROMPT), number, num_tokens
        )
        assert flood[number].sequence == alone


@pytest.mark.parametrize("names", [PAIR, ALONE], ids=["prefill and decode", "one replica"])
async def test_what_alone_exceeds_the_share_is_refused_with_the_remedy(
    harness: E2eHarness, names: tuple[str, ...]
) -> None:
    async with front(harness, names) as gateway:
        problem = f"prompt: has {LIMIT_TOKENS} tokens .* .device_kv_share 0.3.; shorten it"
        call = await gateway.call(prompt(7, LIMIT_TOKENS), tenant="a", max_tokens=1).ended()
        assert isinstance(call.error, CallError)
        with pytest.raises(CallError, match=problem):
            raise call.error
        await gateway.complete(prompt(7, LIMIT_TOKENS), tenant="b", max_tokens=1)
        whole = await gateway.complete(prompt(7, LIMIT_TOKENS - 9), tenant="a", max_tokens=9)
        assert len(whole.sequence) == 9
        for max_tokens in (None, 10, 32_000):
            cut = await gateway.complete(prompt(7, LIMIT_TOKENS - 9), tenant="a", max_tokens=max_tokens)
            assert len(cut.sequence) == 9, "it is cut to the share"
        await harness.quiet(*(harness.replicas[name] for name in names))


async def test_what_is_stored_and_loaded_keeps_to_the_share(
    harness: E2eHarness, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The flood comes twice; between the two, another tenant takes the device for its own cache."""
    folder = tmp_path_factory.mktemp("store")
    async with AsyncExitStack() as ends:
        store = await ends.enter_async_context(StoreHarness(folder, harness.trust, dram_bytes=64 << 20))
        await store.start()
        shares = GroupShares(1.0, {"a": SHARE})
        replica = await harness.add("s0", engine=ENGINE, store=store.settings.name, shares=shares)
        tiers = replica.core.connector
        assert tiers is not None
        await until(lambda: tiers.is_open, "the store is open")
        gateway = await ends.enter_async_context(front(harness, ("s0",)))
        most: list[int] = []
        watch = asyncio.create_task(most_used([replica], most))

        async def flood() -> list[Call]:
            asked = [
                gateway.call(prompt(number, NUM_PROMPT), tenant="a", max_tokens=4) for number in range(12)
            ]
            calls = [await call.done() for call in asked]
            await harness.quiet(replica)
            return calls

        first = await flood()
        for number in range(8):
            await gateway.complete(prompt(100 + number, 15 * BLOCK_TOKENS), tenant="b", max_tokens=4)
        again = await flood()
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        assert [call.sequence for call in again] == [call.sequence for call in first]
        assert sum(call.finished.usage.cached.dram for call in again if call.finished is not None) > 0
        assert max(most) <= LIMIT
