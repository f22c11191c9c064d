"""A tenant is purged everywhere: on devices, on the way to the store, in it; requests under way go on and
leave nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from e2e_front import Call, Front, copy_tiny, prompt, tokens_alone
from e2e_harness import E2eHarness, Replica, until
from store_harness import StoreHarness

from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.roster.messages import StoreRecord
from kvtransfer.store.messages.admin_requests import StatRequest, StoreStat
from kvtransfer.store.messages.store_orders import StorePutDone
from workers.store_connector.block_saver import BlockSaver

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE: dict[str, Any] = {"kv_tokens": 4096, "chunk_tokens": 32}
NUM_PROMPT_TOKENS = 180
# Of the prompt: its full blocks but for the last token.
NUM_SHARED_TOKENS = 176


@dataclass
class Purged:
    """p0 (prefill), d0 (decode) and their store, behind a gateway; b0 (both) beside it."""

    front: Front
    store: StoreHarness
    harness: E2eHarness

    def replica(self, name: str) -> Replica:
        return self.harness.replicas[name]

    async def purge(self, **chosen: Any) -> admin_pb.StorePurgeResponse:
        asked = admin_pb.StorePurgeRequest(filter=admin_pb.StoreFilter(**chosen), all=not chosen)
        return await self.front.admin.store_purge(asked, 30.0)

    async def settled(self) -> None:
        """What is finished is stored, nothing is under way."""
        for name in ("p0", "d0"):
            tiers = self.replica(name).core.connector
            assert tiers is not None
            await until(lambda: tiers.is_idle, f"{name} has written what it had")  # noqa: B023
        await self.harness.quiet()

    async def bytes_of(self, tenant: str) -> int:
        stat = await self.store.ask(StatRequest(), StoreStat)
        return stat.bytes_by_group.get(tenant, 0)

    def num_cached(self) -> int:
        return sum(self.replica(name).core.pool.num_cached for name in ("p0", "d0"))


@pytest_asyncio.fixture(loop_scope="module")
async def world(tmp_path: Path) -> AsyncIterator[Purged]:
    model_dir = copy_tiny(tmp_path)
    harness = E2eHarness(model_dir)
    store = StoreHarness(tmp_path / "store", harness.trust, dram_bytes=64 << 20)
    async with AsyncExitStack() as ends:
        await ends.enter_async_context(store)
        await ends.enter_async_context(harness)
        await store.start()
        name = store.settings.name
        async with asyncio.TaskGroup() as starts:
            starting = starts.create_task(
                harness.add_all({"p0": "prefill", "d0": "decode"}, engine=ENGINE, store=name)
            )
            starts.create_task(harness.add("b0", "both", engine=ENGINE))
        replicas = starting.result()
        front = Front(harness, model_dir)
        await front.open()
        ends.push_async_callback(front.close)
        await front.register(*replicas)
        await front.roster.register(StoreRecord("n", 1, store.address, store.pid, "here"))
        for replica in replicas:
            tiers = replica.core.connector
            assert tiers is not None
            await until(lambda: tiers.is_open, "the store is open")  # noqa: B023
        yield Purged(front, store, harness)


def cached(call: Call) -> tuple[int, int]:
    """Tokens of the prompt that were found on a device, and in other tiers."""
    assert call.finished is not None
    found = call.finished.usage.cached
    return found.device, found.dram + found.nvme + found.remote


async def expected_tokens(world: Purged, call: Call) -> int:
    """Of its prompt, cached somewhere when it was routed, as the router believed."""
    assert call.accepted is not None
    (decision,) = (await world.front.client.explain(call.accepted.request_id)).decisions
    return max(candidate.matched_tokens for candidate in decision.candidates)


async def test_a_purged_tenant_finds_nothing_and_the_others_all(world: Purged) -> None:
    asked = prompt(1, NUM_PROMPT_TOKENS)
    first = {tenant: await world.front.complete(asked, tenant=tenant) for tenant in ("a", "b")}
    await world.settled()
    assert await world.bytes_of("a") == await world.bytes_of("b") > 0
    reply = await world.purge(sharing_group="a")
    assert [it.replica_id for it in reply.replicas] == ["d0", "p0"]
    for it in reply.replicas:
        assert (it.error, it.num_held, it.num_requests) == ("", 0, 0)
        assert it.num_blocks >= NUM_SHARED_TOKENS // 16
    assert reply.nodes[0].num_records["dram"] > 0
    assert await world.bytes_of("a") == 0
    again = {tenant: await world.front.complete(asked, tenant=tenant) for tenant in ("a", "b")}
    assert cached(again["a"]) == (0, 0)
    assert await expected_tokens(world, again["a"]) == 0, "the router knows that nothing is there"
    assert await expected_tokens(world, again["b"]) > 0
    assert cached(again["b"]) == (NUM_SHARED_TOKENS, 0)
    assert {call.sequence == first["a"].sequence for call in (*again.values(), *first.values())} == {True}
    await world.settled()
    await world.purge()
    assert world.num_cached() == 0


async def test_a_stream_under_way_goes_on_and_leaves_nothing(world: Purged) -> None:
    asked = prompt(2, NUM_PROMPT_TOKENS)
    other = await world.front.complete(prompt(3, NUM_PROMPT_TOKENS), tenant="b")
    call = world.front.call(asked, tenant="a", max_tokens=200, seed=5)
    await until(lambda: call.num_tokens >= 40, "it decodes")
    others = (await world.purge(sharing_group="nobody")).replicas
    assert [(it.num_blocks, it.num_requests) for it in others] == [(0, 0), (0, 0)]
    reply = await world.purge(sharing_group="a")
    on_decode = next(it for it in reply.replicas if it.replica_id == "d0")
    assert on_decode.num_requests == 1
    assert on_decode.num_held >= (NUM_PROMPT_TOKENS + 32) // 16
    await call.done()
    assert call.sequence == await tokens_alone(world.replica("b0"), world.harness, asked, 5, 200)
    await world.settled()
    assert await world.bytes_of("a") == 0
    again = await world.front.complete(asked + call.sequence, tenant="a")
    assert cached(again) == (0, 0)
    assert cached(await world.front.complete(prompt(3, NUM_PROMPT_TOKENS), tenant="b")) == (
        NUM_SHARED_TOKENS,
        0,
    )
    assert other.finished is not None


async def test_what_is_on_its_way_to_the_store_never_comes_there(
    world: Purged, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = [tiers.saver for name in ("p0", "d0") if (tiers := world.replica(name).core.connector)]
    held: list[tuple[BlockSaver, int, StorePutDone]] = []
    with monkeypatch.context() as patch:
        for writer in writers:
            patch.setattr(writer, "copied", lambda rank, done, to=writer: held.append((to, rank, done)))
        for tenant in ("a", "b"):
            await world.front.complete(prompt(8, NUM_PROMPT_TOKENS), tenant=tenant)
        await until(lambda: len(held) >= 2, "ranks have copied, and nobody knows it")
        links = world.front.gateway.connections
        for view in links.views():
            await links.purge(view, "a")  # not the store
    for writer, rank, done in held:
        writer.copied(rank, done)
    await world.settled()
    assert await world.bytes_of("a") == 0
    assert sum(writer.num_unstored["purged"] for writer in writers) > 0
    assert await world.bytes_of("b") > 0


async def test_a_prompt_that_is_computed_meanwhile_leaves_nothing_where_it_lands(world: Purged) -> None:
    asked = prompt(4, 1500)
    call = world.front.call(asked, tenant="a", max_tokens=8, seed=6)
    pool = world.replica("p0").core.pool
    await until(lambda: pool.num_referenced > 20, "its prompt is computed")
    reply = await world.purge(sharing_group="a")
    assert call.num_tokens == 0, "the purge came in the middle"
    assert sum(it.num_requests for it in reply.replicas) >= 1
    await call.done()
    assert call.sequence == await tokens_alone(world.replica("b0"), world.harness, asked, 6, 8)
    await world.settled()
    assert world.num_cached() == 0
    assert await world.bytes_of("a") == 0


async def test_a_replica_that_does_not_answer_is_named(world: Purged) -> None:
    await world.front.forget(world.replica("p0"))
    await world.replica("p0").core.stop()
    await until(
        lambda: (
            not any(view.stream for view in world.front.gateway.connections.views() if view.role == "prefill")
        ),
        "the link is down",
    )
    reply = await world.purge(sharing_group="a")
    errors = {it.replica_id: it.error for it in reply.replicas}
    assert errors.pop("d0") == ""
    assert all(error.startswith("not purged for certain: ") for error in errors.values())
    gone = await world.front.gateway.connections.purge(world.front.gateway.connections.views()[0], None)
    assert gone.num_requests == 0


async def test_replicas_of_other_models_are_left_alone(world: Purged) -> None:
    await world.front.complete(prompt(7, NUM_PROMPT_TOKENS))
    await world.settled()
    num_cached = world.num_cached()
    reply = await world.purge(model="00ff")
    assert not reply.replicas
    assert world.num_cached() == num_cached > 0
    fingerprint = world.replica("d0").core.compatibility.model_fingerprint.hex()
    reply = await world.purge(model=fingerprint[:12])
    assert len(reply.replicas) == 2
    assert world.num_cached() == 0
