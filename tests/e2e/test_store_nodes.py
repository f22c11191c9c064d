"""Two nodes with an owner each and a Redis between them: what A's replica computed is loaded at B, which
never got A's events; and whatever becomes of A, or of Redis, B's requests go on.
"""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from e2e_harness import BLOCK_TOKENS, E2eHarness, Heard, Replica, until
from index_harness import RawRedis
from optional_programs import uses_redis_or_valkey
from patience import WAIT_S
from store_harness import StoreHarness

from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import FaultRule
from kvtransfer.store.messages.admin_requests import IndexStat, StatRequest, StoreStat

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, uses_redis_or_valkey]

SAMPLING: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.1, "seed": 77, "max_tokens": 8}
NUM_TOKENS = 200
NUM_BLOCKS = (NUM_TOKENS - 1) // BLOCK_TOKENS


@dataclass
class Town:
    """Replica `a` at the first node's store, `b` at the second's, `alone` without one."""

    harness: E2eHarness
    redis: RawRedis
    first: StoreHarness
    second: StoreHarness
    replicas: dict[str, Replica] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def open(self, name: str, store: StoreHarness) -> None:
        """A replica whose store is open."""
        self.replicas[name] = await self.harness.add(name, store=store.settings.name)
        await self.is_open(name)

    async def is_open(self, name: str) -> None:
        tiers = self.replicas[name].core.connector
        assert tiers is not None
        await until(lambda: tiers.is_open, f"the store of {name} is open", WAIT_S)

    async def run(self, at: str, tokens: list[int]) -> Heard:
        """A request that may not fail. Loading is always worth it here: how long computing takes instead is
        not known."""
        replica = self.replicas[at]
        replica.core.steps.rates.prefill_tok_s = 0.0
        heard = await self.harness.run(
            replica, self.harness.submission(f"{at}-{next(self.numbers)}", tokens, **SAMPLING)
        )
        assert heard.failure is None
        return heard

    async def wanted(self, tokens: list[int]) -> list[int]:
        return (await self.run("alone", tokens)).sequence()

    async def kept_at_first(self, num_prompts: int = 1) -> list[list[int]]:
        """New prompts whose blocks the first node has; they are told to the index if that can be reached."""
        tiers = self.replicas["a"].core.connector
        assert tiers is not None
        prompts: list[list[int]] = []
        clock = SystemClock()
        deadline = clock.now() + WAIT_S
        while len(prompts) < num_prompts:
            assert clock.now() < deadline, "the first node stores nothing"
            await self.is_open("a")
            tokens, before = fresh_prompt(next(self.numbers)), tiers.saver.num_stored
            await self.run("a", tokens)
            await until(lambda: tiers.saver.is_idle, "it is written, or the store is away")
            if tiers.saver.num_stored >= before + NUM_BLOCKS:
                prompts.append(tokens)
        return prompts

    async def index_until(
        self, store: StoreHarness, condition: Callable[[IndexStat], bool], what: str
    ) -> IndexStat:
        clock = SystemClock()
        deadline = clock.now() + WAIT_S
        while not condition(index := (await stat(store)).index):
            assert clock.now() < deadline, f"not in time: {what}; {index}"
            await clock.sleep(0.02)
        return index

    async def shares(self) -> None:
        """In the end what the first node computes is loaded at the second: new prompts, until one is."""
        clock = SystemClock()
        deadline = clock.now() + WAIT_S
        loaded: dict[str, int] = {}
        while loaded != {"remote": NUM_BLOCKS * BLOCK_TOKENS}:
            assert clock.now() < deadline, f"not found; {await stat(self.second)}"
            (tokens,) = await self.kept_at_first()
            await self.index_until(self.first, lambda index: index.state == "up", "the first node tells")
            await self.index_until(self.second, lambda index: index.state == "up", "the second node asks")
            heard = await self.run("b", tokens)
            assert heard.sequence() == await self.wanted(tokens)
            loaded = loaded_tokens(heard)

    async def is_whole(self) -> None:
        """All is well, and nothing was left behind."""
        await self.shares()
        await self.harness.quiet()
        for store in (self.first, self.second):
            await store.check_nothing_leaked()
            assert (await store.stat("dram")).num_checksum_failures == 0
        await self.second.until("remote", lambda stat: stat.num_quarantined == 0, "nothing in quarantine")


def fresh_prompt(number: int) -> list[int]:
    draw = random.Random(1000 + number)
    return [draw.randrange(3, 190) for _ in range(NUM_TOKENS)]


def loaded_tokens(heard: Heard) -> dict[str, int]:
    assert heard.prefill is not None
    return heard.prefill.num_loaded_tokens


async def stat(store: StoreHarness) -> StoreStat:
    return await store.ask(StatRequest(), StoreStat)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def town(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Town]:
    """One for all tests: each leaves it whole, which shows that it heals."""
    folder = tmp_path_factory.mktemp("town")
    harness, redis = E2eHarness(model_dir), RawRedis(folder)
    first, second = (
        StoreHarness(
            folder,
            harness.trust,
            node_id=f"node-{number}",
            redis_url=redis.url,
            dram_bytes=32 << 20,
            lookup_budget_s=0.1,
            node_lease_s=1.0,
        )
        for number in (1, 2)
    )
    built = Town(harness, redis, first, second)
    try:
        for store in (first, second):
            await store.start()
        built.replicas["alone"] = await harness.add("alone")
        await built.open("a", first)
        await built.open("b", second)
        yield built
    finally:
        await harness.close()
        for store in (first, second):
            await store.close()
        redis.close()


async def test_what_one_node_computed_another_fetches(town: Town) -> None:
    await town.index_until(town.first, lambda index: index.state == "up", "Redis is reached")
    await town.index_until(town.second, lambda index: index.state == "up", "Redis is reached")
    (tokens,) = await town.kept_at_first()
    await town.index_until(town.first, lambda index: index.num_announced >= NUM_BLOCKS, "it is told")
    tiers = town.replicas["b"].core.connector
    assert tiers is not None
    assert len(tiers.view) == 0, "b heard of what a's node has"
    heard = await town.run("b", tokens)
    assert loaded_tokens(heard) == {"remote": NUM_BLOCKS * BLOCK_TOKENS}
    assert heard.sequence() == await town.wanted(tokens)
    remote = await town.second.stat("remote")
    assert (remote.num_hits, remote.num_checksum_failures) == (NUM_BLOCKS, 0)
    await town.is_whole()


@pytest.mark.parametrize("action", ["kill", "stop"])
async def test_the_holder_ends_in_mid_fetch(town: Town, tmp_path: Path, action: str) -> None:
    """`stop`: it hangs with all its connections open, and goes on later."""
    marker = tmp_path / "marker"
    await town.first.stop()
    await town.first.start(FaultRule("push.half", action, str(marker)))
    await town.is_open("a")
    prompts = await town.kept_at_first(2)
    await town.index_until(
        town.first, lambda index: index.num_announced >= 2 * NUM_BLOCKS, "the second life tells"
    )
    clock = SystemClock()
    deadline = clock.now() + WAIT_S
    wanted = [await town.wanted(tokens) for tokens in prompts]
    heard = await town.run("b", prompts[0])
    while not marker.exists():  # a look-up may have been late: then with others
        assert clock.now() < deadline, "the holder was never asked"
        (tokens,) = await town.kept_at_first()
        await town.run("b", tokens)
    assert heard.sequence() == wanted[0]
    assert (await town.run("b", prompts[1])).sequence() == wanted[1], "with the holder away"
    assert (await stat(town.second)).tiers[-1].num_misses > 0
    if action == "stop":
        town.first.signal(signal.SIGCONT)
    else:
        assert await town.first.ended() == -signal.SIGKILL
        await town.first.start()
    await town.is_open("a")
    await town.is_open("b")
    await town.is_whole()


async def test_a_stopped_holder_costs_no_request(town: Town) -> None:
    prompts = await town.kept_at_first(3)
    wanted = [await town.wanted(tokens) for tokens in prompts]
    town.first.signal(signal.SIGSTOP)
    for tokens, expected in zip(prompts, wanted, strict=True):
        assert (await town.run("b", tokens)).sequence() == expected
    mine = fresh_prompt(next(town.numbers))
    expected = await town.wanted(mine)
    assert (await town.run("b", mine)).sequence() == expected
    town.first.signal(signal.SIGCONT)
    await town.is_open("b")
    await town.is_whole()


async def test_a_flushed_index_is_told_again(town: Town) -> None:
    prompts = await town.kept_at_first(8)
    rebuilds = (await stat(town.first)).index.num_rebuilds
    client = town.redis.client()
    client.flushall()
    wanted = await town.wanted(prompts[0])
    assert (await town.run("b", prompts[0])).sequence() == wanted, "found or not"
    await town.index_until(town.first, lambda index: index.num_rebuilds > rebuilds, "it noticed")
    await found_again(town, prompts[1:])
    client.close()
    await town.is_whole()


async def test_redis_dies_and_comes_back_empty(town: Town) -> None:
    prompts = await town.kept_at_first(8)
    town.redis.kill()
    for at, tokens in (("b", prompts[0]), ("a", fresh_prompt(next(town.numbers)))):
        wanted = await town.wanted(tokens)
        heard = await town.run(at, tokens)
        assert heard.sequence() == wanted
        assert not loaded_tokens(heard)
    await town.index_until(town.second, lambda index: index.state == "down", "it shows")
    town.redis.start()
    await found_again(town, prompts[1:])
    await town.is_whole()


@pytest.mark.parametrize("how", ["silent", "late"])
async def test_requests_end_while_redis_does_not_answer(town: Town, how: str) -> None:
    """`silent`: stopped, so that whoever waits for it waits for ever. `late`: answers after 2 s."""
    prompts = await town.kept_at_first(12)
    wanted = [await town.wanted(tokens) for tokens in prompts[:3]]
    client = town.redis.client()
    if how == "silent":
        town.redis.signal(signal.SIGSTOP)
    else:
        client.client_pause(2000)
    for tokens, expected in zip(prompts[:3], wanted, strict=True):
        heard = await town.run("b", tokens)
        assert heard.sequence() == expected
    if how == "silent":
        await town.index_until(town.second, lambda index: index.state != "up", "it shows")
        town.redis.signal(signal.SIGCONT)
    client.ping()
    client.close()
    await found_again(town, prompts[3:])
    await town.is_whole()


async def found_again(town: Town, prompts: list[list[int]]) -> None:
    """One of these, which the first node kept from before, is loaded at the second in the end."""
    for store in (town.first, town.second):
        await town.index_until(store, lambda index: index.state == "up", "Redis answers again")
    clock = SystemClock()
    for tokens in prompts:
        wanted = await town.wanted(tokens)
        heard = await town.run("b", tokens)
        assert heard.sequence() == wanted
        if loaded_tokens(heard).get("remote", 0) == NUM_BLOCKS * BLOCK_TOKENS:
            return
        await clock.sleep(0.3)  # it is told bit by bit
    raise AssertionError(f"none was found again; {await stat(town.second)}")
