"""A tenant whose prompt another tenant has cached is served as if nobody had ever sent it.

The calls of router, pools, loaders and store clients are recorded for tenant B's prompt twice: once it is
equal to a prompt that A has cached everywhere, once it is fresh. Names of blocks apart, both records are
equal, and no block of A is named in either.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from e2e_front import Call, Front, copy_tiny, prompt
from e2e_harness import BLOCK_TOKENS, E2eHarness, until
from store_harness import StoreHarness

from cluster.proto.tandem.v1 import inference_pb2 as pb
from kvtransfer.blocks.keys import KEY_BYTES
from kvtransfer.protocol.receiver import LandingTable
from kvtransfer.store.messages.engine_session import FetchRequest, FindRequest, PutRequest
from kvtransfer.store.store_client import StoreClient
from router.prefix_match import Match
from router.radix import PrefixTree
from workers.scheduler.block_pool import BlockPool

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 12 * BLOCK_TOKENS + 5
ENGINE = {"kv_tokens": 8192, "chunk_tokens": 64}
# What looks blocks up, counts or loads them, and what it is asked with.
RECORDED = (
    (PrefixTree, "match"),
    (PrefixTree, "predict"),
    (BlockPool, "match"),
    (BlockPool, "register"),
    (LandingTable, "request"),
    (StoreClient, "send"),
)

Recorded = set[tuple[str, str]]


class Recorder:
    """The recorded calls since `start`, without numbers that differ from request to request, and with every
    key replaced by its place among the keys of the prompt."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: Recorded = set()
        self.keys: list[bytes] = []
        for owner, name in RECORDED:
            patch.setattr(owner, name, self._wrapped(f"{owner.__name__}.{name}", getattr(owner, name)))

    def start(self) -> None:
        self.calls, self.keys = set(), []

    def _wrapped(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def recording(owner: object, *args: Any, **kwargs: Any) -> Any:
            found = method(owner, *args, **kwargs)
            result = ""
            if isinstance(found, Match):
                result = f"{found.device} {found.stored}"
            elif name == "BlockPool.match":
                result = str(len(found))
            self._add(name, args, result)
            return found

        return recording

    def _add(self, name: str, args: tuple[Any, ...], result: str) -> None:
        if name == "StoreClient.send" and not isinstance(args[0], FindRequest | FetchRequest | PutRequest):
            return
        if isinstance(args[0], PutRequest):  # how many go together is a matter of time
            for record in args[0].records:
                named = [self._place(key) for key in (*keys_in(args[0].chain), *keys_in(record))]
                self.calls.add(("PutRequest", str(named)))
            return
        named = [self._place(key) for arg in args for key in keys_in(arg)]
        kind = type(args[0]).__name__ if name == "StoreClient.send" else name
        self.calls.add((kind, f"{named} -> {result}"))

    def _place(self, key: bytes) -> int:
        if key not in self.keys:
            self.keys.append(key)
        return self.keys.index(key)


def keys_in(value: Any) -> list[bytes]:
    """All block keys of an argument, in their order."""
    if isinstance(value, bytes):
        return [value] if len(value) == KEY_BYTES else []
    if isinstance(value, FindRequest | FetchRequest):
        return list(value.keys)
    if isinstance(value, msgspec.Struct):
        fields = [getattr(value, name) for name in value.__struct_fields__ if name != "landing_id"]
        return [key for each in fields for key in keys_in(each)]
    if isinstance(value, tuple | list):
        return [key for each in value for key in keys_in(each)]
    return []


class World:
    def __init__(self, front: Front, harness: E2eHarness) -> None:
        self.front = front
        self.harness = harness

    async def settle(self) -> None:
        """Return when nothing computes, moves or is stored, and the gateway has heard of all that is."""
        for replica in self.harness.replicas.values():
            tiers = replica.core.connector
            assert tiers is not None
            await until(lambda: tiers.is_idle, "all is stored")  # noqa: B023
        await self.harness.quiet()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder: Path = tmp_path_factory.mktemp("isolation")
    model_dir = copy_tiny(folder)
    harness = E2eHarness(model_dir)
    store = StoreHarness(folder / "store", harness.trust, dram_bytes=64 << 20)
    async with AsyncExitStack() as ends:
        await ends.enter_async_context(store)
        await ends.enter_async_context(harness)
        await store.start()
        roles = {"p0": "prefill", "d0": "decode"}
        replicas = await harness.add_all(roles, engine=ENGINE, store=store.settings.name)
        front = Front(harness, model_dir)
        await front.open()
        ends.push_async_callback(front.close)
        await front.register(*replicas)
        for replica in replicas:
            tiers = replica.core.connector
            assert tiers is not None
            await until(lambda: tiers.is_open, "the store is open")  # noqa: B023
        yield World(front, harness)


def cached_tokens(call: Call) -> int:
    """Tokens of the prompt that were found anywhere."""
    assert call.finished is not None
    found: pb.CachedTokens = call.finished.usage.cached
    return found.device + found.dram + found.nvme + found.remote


async def matched_tokens(world: World, call: Call) -> list[tuple[int, int]]:
    """What `Explain` shows of caches, of every candidate."""
    assert call.accepted is not None
    (decision,) = (await world.front.client.explain(call.accepted.request_id)).decisions
    return [(it.matched_tokens, it.uncached_tokens) for it in decision.candidates]


async def test_what_another_tenant_cached_is_not_looked_up_counted_or_loaded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)

    async def recorded(asked: list[int], tenant: str) -> tuple[Call, Recorded, set[bytes]]:
        await world.settle()
        recorder.start()
        call = await world.front.complete(asked, tenant=tenant, max_tokens=4, seed=5)
        await world.settle()
        await asyncio.sleep(0)
        return call, recorder.calls, set(recorder.keys)

    shared, fresh = prompt(1, NUM_TOKENS), prompt(2, NUM_TOKENS)
    await recorded(prompt(3, NUM_TOKENS), "warm-up")
    _, _, keys_of_a = await recorded(shared, "a")
    again, calls_of_cached, same_keys = await recorded(shared, "a")
    assert cached_tokens(again) == NUM_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
    assert len(keys_of_a & same_keys) >= NUM_TOKENS // BLOCK_TOKENS, "A finds its own"
    known, calls_of_known, keys_of_known = await recorded(shared, "b")
    unknown, calls_of_unknown, keys_of_unknown = await recorded(fresh, "b")
    assert calls_of_known == calls_of_unknown
    assert calls_of_known != calls_of_cached, "the record shows what is cached"
    assert {kind for kind, _ in calls_of_known} >= {"PrefixTree.match", "BlockPool.match", "FindRequest"}
    assert not keys_of_known & keys_of_a
    assert not keys_of_unknown & keys_of_a
    assert cached_tokens(known) == cached_tokens(unknown) == 0
    assert await matched_tokens(world, known) == await matched_tokens(world, unknown)
    assert {it[0] for it in await matched_tokens(world, known)} == {0}


async def _embedded(world: World, tokens: list[int], tenant: str) -> pb.Usage:
    ids = pb.EmbedInput(token_ids=pb.TokenIds(ids=tokens))
    request = pb.EmbedRequest(inputs=[ids], tenant=tenant)
    reply: pb.EmbedResponse = await world.front.client.stub().Embed(request)
    return reply.usage


async def _scored(world: World, tokens: list[int], tenant: str) -> pb.Usage:
    ids = pb.EmbedInput(token_ids=pb.TokenIds(ids=tokens[-2:]))
    prompt_ids = pb.TokenIds(ids=tokens[:-2])
    request = pb.ScoreRequest(token_ids=prompt_ids, continuations=[ids], tenant=tenant)
    reply: pb.ScoreResponse = await world.front.client.stub().Score(request)
    return reply.usage


async def _read(world: World, tokens: list[int], tenant: str, **options: Any) -> pb.Usage:
    call = await world.front.complete(tokens, tenant=tenant, max_tokens=2, seed=5, **options)
    assert call.finished is not None
    return call.finished.usage


async def _with_logprobs(world: World, tokens: list[int], tenant: str) -> pb.Usage:
    return await _read(world, tokens, tenant, prompt_logprobs=1)


async def _not_stored(world: World, tokens: list[int], tenant: str) -> pb.Usage:
    return await _read(world, tokens, tenant, no_store=True)


async def _of_a_session(world: World, tokens: list[int], tenant: str) -> pb.Usage:
    return await _read(world, tokens, tenant, session_id="same")


@pytest.mark.parametrize("asks", [_embedded, _scored, _with_logprobs, _not_stored, _of_a_session])
async def test_what_another_tenant_cached_does_nothing_for_any_kind_of_request(
    world: World, monkeypatch: pytest.MonkeyPatch, asks: Callable[..., Any], request: Any
) -> None:
    recorder = Recorder(monkeypatch)
    number = 100 * (1 + request.node.callspec.indices["asks"])

    async def recorded(tokens: list[int], tenant: str) -> tuple[pb.Usage, Recorded, set[bytes]]:
        await world.settle()
        recorder.start()
        usage = await asks(world, tokens, tenant)
        await world.settle()
        return usage, recorder.calls, set(recorder.keys)

    shared, fresh = prompt(number, NUM_TOKENS), prompt(number + 1, NUM_TOKENS)
    await _read(world, shared, "a", session_id="same")
    await recorded(prompt(number + 2, NUM_TOKENS), "b")
    usage, calls_of_known, keys_of_known = await recorded(shared, "b")
    alike, calls_of_unknown, _ = await recorded(fresh, "b")
    assert usage == alike
    assert usage.prompt_tokens == NUM_TOKENS
    assert usage.cached == pb.CachedTokens()
    assert calls_of_known == calls_of_unknown
    _, _, keys_of_a = await recorded(shared, "a")
    assert not keys_of_known & keys_of_a
