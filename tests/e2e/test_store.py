"""Replicas with a store: the same tokens as without, what was computed is not computed again, and whatever
breaks in the store is a miss.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import (
    BLOCK_TOKENS,
    ROOT_KEY,
    E2eHarness,
    Heard,
    Replica,
    add_with_store,
    raw,
    stored_blocks,
    until,
)
from msgspec.structs import replace
from slow_cases import slow_but
from store_harness import StoreHarness

from kvtransfer.blocks.keys import extend_keys
from kvtransfer.common.faults import FaultRule
from kvtransfer.rpc.stream import open_link
from kvtransfer.rpc.trust import Trust
from workers.config import Parallel
from workers.messages.link import LINK_DOWN_CODEC, Announce, Cancel, GatewayHello, PurgeCache

SAMPLING: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.1, "seed": 77}
NUM_TOKENS = 200
NUM_FULL_BLOCKS = (NUM_TOKENS - 1) // BLOCK_TOKENS
TWO_STAGES = Parallel(pp=2, devices=("cpu", "cpu"), layers=(1, 1))


def prompt(seed: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 190) for _ in range(num_tokens)]


@pytest.fixture
async def stored(model_dir: Path, tmp_path: Path) -> AsyncIterator[tuple[E2eHarness, StoreHarness]]:
    """An empty harness of replicas, and a store that is not started."""
    harness = E2eHarness(model_dir)
    async with StoreHarness(tmp_path, harness.trust) as store, harness:
        yield harness, store


async def run(harness: E2eHarness, at: Replica, request_id: str, tokens: list[int], **how: Any) -> Heard:
    heard = await harness.run(
        at, harness.submission(request_id, tokens, **{**SAMPLING, "max_tokens": 16, **how})
    )
    assert heard.failure is None
    return heard


async def alone(harness: E2eHarness, tokens: list[int], max_tokens: int = 16) -> list[int]:
    """The tokens of a replica without a store."""
    replica = harness.replicas.get("alone") or await harness.add("alone")
    request_id = f"alone-{len(harness.heard)}"
    return (await run(harness, replica, request_id, tokens, max_tokens=max_tokens)).sequence()


def loaded(heard: Heard) -> int:
    """Tokens that were loaded for the request."""
    assert heard.prefill is not None
    return sum(heard.prefill.num_loaded_tokens.values())


async def test_what_one_replica_computed_another_loads(stored: tuple[E2eHarness, StoreHarness]) -> None:
    harness, store = stored
    await store.start()
    first, second = await add_with_store(harness, store, "a"), await add_with_store(harness, store, "b")
    wanted = await alone(harness, prompt(1))
    assert (await run(harness, first, "r", prompt(1))).sequence() == wanted
    await stored_blocks(first, NUM_FULL_BLOCKS)
    heard = await run(harness, second, "r2", prompt(1))
    assert heard.sequence() == wanted
    assert heard.prefill is not None
    assert heard.prefill.num_loaded_tokens == {"dram": NUM_FULL_BLOCKS * BLOCK_TOKENS}
    assert heard.prefill.num_cached_tokens == NUM_FULL_BLOCKS * BLOCK_TOKENS
    await harness.quiet()


async def test_of_a_private_request_nothing_is_stored_or_found(
    stored: tuple[E2eHarness, StoreHarness],
) -> None:
    harness, store = stored
    await store.start()
    first, second = await add_with_store(harness, store, "a"), await add_with_store(harness, store, "b")
    private = harness.submission("private", prompt(2), **SAMPLING, max_tokens=16)
    wanted = (await harness.run(first, replace(private, is_private=True))).sequence()
    await run(harness, first, "r", prompt(1))
    await stored_blocks(first, NUM_FULL_BLOCKS)
    tiers = first.core.connector
    assert tiers is not None
    num_full = (NUM_TOKENS + 16 - 1) // BLOCK_TOKENS
    assert tiers.saver.num_stored <= num_full, "what the other request has, and no more"
    for name, replica in (("elsewhere", second), ("again", first)):
        heard = await run(harness, replica, name, prompt(2))
        assert heard.sequence() == wanted
        assert heard.prefill is not None
        # What is found at the first one is what the run at the second one has stored.
        found = heard.prefill.num_cached_tokens, sum(heard.prefill.num_loaded_tokens.values())
        assert found == ((0, 0) if replica is second else (NUM_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS,) * 2)
        await stored_blocks(second, NUM_FULL_BLOCKS)
    await harness.quiet()


def announced(request_id: str, tokens: list[int]) -> Announce:
    keys = extend_keys(ROOT_KEY, raw(tokens), BLOCK_TOKENS)
    return Announce(request_id, "", len(tokens), keys)


async def test_what_is_announced_is_on_the_device_when_the_request_comes(
    stored: tuple[E2eHarness, StoreHarness],
) -> None:
    harness, store = stored
    await store.start()
    first, second = await add_with_store(harness, store, "a"), await add_with_store(harness, store, "b")
    wanted = await alone(harness, prompt(1))
    await run(harness, first, "r", prompt(1))
    await stored_blocks(first, NUM_FULL_BLOCKS)
    tiers = second.core.connector
    assert tiers is not None
    second.send(announced("r2", prompt(1)))
    second.send(announced("gone", prompt(1)))
    await until(lambda: tiers.announced.num_loaded_blocks == NUM_FULL_BLOCKS, "all blocks were loaded")
    assert second.core.scheduler.is_idle
    second.send(Cancel("gone", 0))
    heard = await run(harness, second, "r2", prompt(1))
    assert heard.sequence() == wanted
    assert heard.prefill is not None
    assert heard.prefill.num_cached_tokens == NUM_FULL_BLOCKS * BLOCK_TOKENS
    assert heard.prefill.num_loaded_tokens == {"dram": NUM_FULL_BLOCKS * BLOCK_TOKENS}
    assert tiers.loader.num_loaded_tokens == {"dram": NUM_FULL_BLOCKS * BLOCK_TOKENS}, "they were loaded once"
    assert len(tiers.announced) == 0
    await harness.quiet()


async def test_a_request_right_behind_its_announcement_is_loaded_once(
    stored: tuple[E2eHarness, StoreHarness],
) -> None:
    harness, store = stored
    await store.start()
    first, second = await add_with_store(harness, store, "a"), await add_with_store(harness, store, "b")
    wanted = [await alone(harness, prompt(seed)) for seed in range(4)]
    for seed in range(4):
        await run(harness, first, f"r{seed}", prompt(seed))
    await stored_blocks(first, 4 * NUM_FULL_BLOCKS)
    submissions = [
        harness.submission(f"s{seed}", prompt(seed), max_tokens=16, **SAMPLING) for seed in range(4)
    ]
    for seed in range(4):
        second.send(announced(f"s{seed}", prompt(seed)))
        second.send(submissions[seed])
    for seed in range(4):
        assert (await harness.ended(submissions[seed])).sequence() == wanted[seed]
    tiers = second.core.connector
    assert tiers is not None
    assert tiers.loader.num_loaded_tokens == {"dram": 4 * NUM_FULL_BLOCKS * BLOCK_TOKENS}
    await harness.quiet()


async def test_nothing_is_loaded_for_a_purged_group(stored: tuple[E2eHarness, StoreHarness]) -> None:
    harness, store = stored
    await store.start()
    first, second = await add_with_store(harness, store, "a"), await add_with_store(harness, store, "b")
    await run(harness, first, "r", prompt(1))
    await stored_blocks(first, NUM_FULL_BLOCKS)
    second.send(announced("r2", prompt(1)))
    second.send(PurgeCache(1, ""))
    tiers = second.core.connector
    assert tiers is not None
    await until(lambda: tiers.announced.num_announced == 1 and len(tiers.announced) == 0, "it is forgotten")
    await harness.quiet()
    assert second.core.pool.num_cached == 0


async def test_what_a_lost_gateway_announced_is_forgotten_at_once(
    stored: tuple[E2eHarness, StoreHarness],
) -> None:
    """Its place among the announced prompts, and among the blocks that they may take, is free again."""
    harness, store = stored
    await store.start()
    replica = await add_with_store(harness, store, "a")
    tiers = replica.core.connector
    assert tiers is not None
    trust = Trust.read(harness.trust)
    stream = await open_link(replica.core.address, "link", trust, "another gateway")
    stream.send(LINK_DOWN_CODEC.encode(GatewayHello("another", 1)))
    stream.send(LINK_DOWN_CODEC.encode(announced("its", prompt(1))))
    replica.send(announced("ours", prompt(2)))
    await until(lambda: len(tiers.announced) == 2, "both are announced")
    stream.abort()
    await until(lambda: len(tiers.announced) == 1, "that of the lost gateway is forgotten")
    assert tiers.announced.forget("its") is None
    assert tiers.announced.forget("ours") is not None
    await harness.quiet()


async def test_a_loaded_prefix_is_handed_over(stored: tuple[E2eHarness, StoreHarness]) -> None:
    harness, store = stored
    await store.start()
    first = await add_with_store(harness, store, "a")
    prefill, decode = await add_with_store(harness, store, "p", "prefill"), await harness.add("d", "decode")
    wanted = await alone(harness, prompt(2))
    await run(harness, first, "r", prompt(2))
    await stored_blocks(first, NUM_FULL_BLOCKS)
    heard = await run(harness, prefill, "r2", prompt(2), decode=decode)
    assert heard.sequence() == wanted
    assert loaded(heard) == NUM_FULL_BLOCKS * BLOCK_TOKENS
    assert heard.hand_over is not None
    assert heard.hand_over.num_bad_pieces == 0
    await harness.quiet()


@pytest.mark.parametrize("shapes", slow_but([("1x1", "2x1"), ("2x1", "1x2"), ("1x2", "1x1")], ("2x1", "1x2")))
async def test_any_shape_reads_what_any_shape_wrote(
    stored: tuple[E2eHarness, StoreHarness], shapes: tuple[str, str]
) -> None:
    harness, store = stored
    await store.start()
    parallel = {"1x1": Parallel(), "2x1": Parallel(tp=2), "1x2": TWO_STAGES}
    wanted = await alone(harness, prompt(3))
    for shape in shapes:
        replica = await add_with_store(harness, store, shape, parallel=parallel[shape])
        heard = await run(harness, replica, shape, prompt(3))
        assert heard.sequence() == wanted
        assert loaded(heard) == (NUM_FULL_BLOCKS * BLOCK_TOKENS if shape == shapes[1] else 0)
        connector = replica.core.connector
        assert connector is not None
        await until(lambda store=connector: store.is_idle, "it is written")  # type: ignore[misc]
    await harness.quiet()


async def test_a_preempted_sequence_comes_back_from_the_host_tier(
    stored: tuple[E2eHarness, StoreHarness],
) -> None:
    harness, store = stored
    await store.start()
    seeds = range(40, 44)
    wanted = [await alone(harness, prompt(seed, 64), 100) for seed in seeds]
    replica = await add_with_store(harness, store, "a", engine={"kv_tokens": 256})
    submissions = [
        harness.submission(f"r{seed}", prompt(seed, 64), max_tokens=100, **SAMPLING) for seed in seeds
    ]
    for submission in submissions:
        replica.send(submission)
    heard = [await harness.ended(submission) for submission in submissions]
    assert [each.sequence() for each in heard] == wanted
    await until(lambda: replica.load is not None and replica.load.num_preemptions > 0, "one was preempted")
    tiers = replica.core.connector
    assert tiers is not None
    assert tiers.loader.num_loaded_tokens["dram"] >= BLOCK_TOKENS
    await harness.quiet()


async def test_a_resumed_request_loads_what_the_dead_replica_had_generated(
    stored: tuple[E2eHarness, StoreHarness],
) -> None:
    harness, store = stored
    await store.start()
    wanted = await alone(harness, prompt(6), 60)
    prefill, first = (
        await add_with_store(harness, store, "p", "prefill"),
        await add_with_store(harness, store, "d0", "decode"),
    )
    submission = harness.submission("r", prompt(6), decode=first, max_tokens=60, **SAMPLING)
    prefill.send(submission)
    heard = harness.heard.setdefault(("r", 0), Heard())
    await until(lambda: len(heard.tokens.get(0, {})) >= 40, "40 tokens")
    num_blocks = (NUM_TOKENS + 40 - 1) // BLOCK_TOKENS
    tiers = first.core.connector
    assert tiers is not None
    await until(lambda: len(tiers.view) >= num_blocks, "the finished blocks are in the host tier")
    for process_id in first.core.rank_process_ids:
        os.kill(process_id, signal.SIGKILL)
    await until(lambda: heard.failure is not None, "the attempt fails")
    output = heard.sequence()
    second = await add_with_store(harness, store, "b")
    again = await run(
        harness, second, "r", prompt(6), attempt=1, output=output, max_tokens=60, seed=SAMPLING["seed"]
    )
    assert [*output, *list(again.tokens[0].values())][:60] == wanted
    assert loaded(again) >= (NUM_TOKENS + 40 - 1) // BLOCK_TOKENS * BLOCK_TOKENS


async def test_a_flipped_bit_in_the_arena_is_computed_not_used(
    stored: tuple[E2eHarness, StoreHarness], tmp_path: Path
) -> None:
    harness, store = stored
    await store.start()
    rule = FaultRule("store.corrupt.put", "corrupt", str(tmp_path / "flip"), after=4)
    first, second = (
        await add_with_store(harness, store, "a", faults=[rule]),
        await add_with_store(harness, store, "b"),
    )
    wanted = await alone(harness, prompt(7))
    await run(harness, first, "r", prompt(7))
    await stored_blocks(first, NUM_FULL_BLOCKS)
    assert (tmp_path / "flip").exists()
    heard = await run(harness, second, "r2", prompt(7))
    assert heard.sequence() == wanted
    assert loaded(heard) == 3 * BLOCK_TOKENS
    await until(
        lambda: second.load is not None and second.load.num_store_checksum_failures == 1, "it is counted"
    )
    third = await add_with_store(
        harness, store, "c"
    )  # the bad record is gone, the right one of the second is there
    await until(lambda: second.core.connector is not None and second.core.connector.is_idle, "it is stored")
    again = await run(harness, third, "r3", prompt(7))
    assert again.sequence() == wanted
    assert loaded(again) == NUM_FULL_BLOCKS * BLOCK_TOKENS
    await harness.quiet()


async def test_serving_goes_on_while_the_store_is_dead_and_the_arena_is_found_again(
    stored: tuple[E2eHarness, StoreHarness],
) -> None:
    harness, store = stored
    await store.start()
    first = await add_with_store(harness, store, "a")
    wanted = [await alone(harness, prompt(seed)) for seed in (8, 9)]
    await run(harness, first, "r8", prompt(8))
    await stored_blocks(first, NUM_FULL_BLOCKS)
    await store.kill()
    tiers = first.core.connector
    assert tiers is not None
    await until(lambda: not tiers.is_open, "its end is noticed")
    assert (await run(harness, first, "r9", prompt(9))).sequence() == wanted[1]
    await store.start()
    await until(lambda: tiers.is_open, "the next owner is found")
    second = await add_with_store(harness, store, "b")
    heard = await run(harness, second, "r8b", prompt(8))
    assert heard.sequence() == wanted[0]
    assert loaded(heard) == NUM_FULL_BLOCKS * BLOCK_TOKENS
    await harness.quiet()


async def test_a_stopped_store_holds_no_request_up(stored: tuple[E2eHarness, StoreHarness]) -> None:
    harness, store = stored
    await store.start()
    first = await add_with_store(harness, store, "a")
    wanted = await alone(harness, prompt(10))
    store.signal(signal.SIGSTOP)
    heard = await run(harness, first, "r", prompt(10))
    assert heard.sequence() == wanted
    assert loaded(heard) == 0
    store.signal(signal.SIGCONT)
    tiers = first.core.connector
    assert tiers is not None
    await until(lambda: tiers.is_open, "it is used again")
    await run(harness, first, "r2", prompt(11))
    await stored_blocks(first, NUM_FULL_BLOCKS)
    await harness.quiet()


@pytest.mark.parametrize("parallel", slow_but([Parallel(), Parallel(tp=2)], Parallel(tp=2)))
async def test_a_restart_of_everything_finds_the_nvme_warm(
    stored: tuple[E2eHarness, StoreHarness], parallel: Parallel, tmp_path: Path
) -> None:
    harness, store = stored
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    await store.start(nvme_path=str(nvme), nvme_bytes=64 << 20, segment_bytes=4 << 20)
    first = await add_with_store(harness, store, "a")
    wanted = await alone(harness, prompt(12))
    await run(harness, first, "r", prompt(12))
    await stored_blocks(first, NUM_FULL_BLOCKS)
    await first.close()
    await harness.replicas.pop("a").core.stop()
    await store.stop()
    await store.start(nvme_path=str(nvme), nvme_bytes=64 << 20, segment_bytes=4 << 20)
    second = await add_with_store(harness, store, "b", parallel=parallel)
    await store.until("nvme", lambda stat: stat.num_records >= NUM_FULL_BLOCKS, "its segments are read")
    heard = await run(harness, second, "r2", prompt(12))
    assert heard.sequence() == wanted
    assert heard.prefill is not None
    assert heard.prefill.num_loaded_tokens == {"nvme": NUM_FULL_BLOCKS * BLOCK_TOKENS}
    await harness.quiet()


async def test_a_rank_killed_in_the_middle_of_a_copy_leaks_nothing(
    stored: tuple[E2eHarness, StoreHarness], tmp_path: Path
) -> None:
    harness, store = stored
    await store.start()
    rule = FaultRule("store.copy.put", "kill", str(tmp_path / "kill"), after=3)
    first = await add_with_store(harness, store, "a", faults=[rule])
    harness.replicas["a"].send(harness.submission("r", prompt(13), max_tokens=16, **SAMPLING))
    await until((tmp_path / "kill").exists, "the rank is killed")
    await until(lambda: harness.heard.get(("r", 0), Heard()).failure is not None, "the attempt fails")
    await first.close()
    await harness.replicas.pop("a").core.stop()
    await store.check_nothing_leaked()
    second = await add_with_store(harness, store, "b")
    heard = await run(harness, second, "r2", prompt(13))
    assert heard.sequence() == await alone(harness, prompt(13))
    await harness.quiet()
