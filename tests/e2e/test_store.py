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
from e2e_harness import BLOCK_TOKENS, Heard, House, Replica, until
from store_harness import StoreHouse

from kvtransfer.common.faults import FaultRule
from workers.config import Parallel

SAMPLING: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.1, "seed": 77}
NUM_TOKENS = 200
NUM_FULL_BLOCKS = (NUM_TOKENS - 1) // BLOCK_TOKENS
TWO_STAGES = Parallel(pp=2, devices=("cpu", "cpu"), layers=(1, 1))


def prompt(seed: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 190) for _ in range(num_tokens)]


@pytest.fixture
async def stored(model_dir: Path, tmp_path: Path) -> AsyncIterator[tuple[House, StoreHouse]]:
    """An empty house of replicas, and a store that is not started."""
    house = House(model_dir)
    async with StoreHouse(tmp_path, secret=house.secret) as store, house:
        yield house, store


async def add(house: House, store: StoreHouse, name: str, role: str = "both", **how: Any) -> Replica:
    """A replica whose store is open."""
    replica = await house.add(name, role, store=store.settings.name, **how)
    tiers = replica.brain.tiers
    assert tiers is not None
    await until(lambda: tiers.is_open, f"the store of {name} is open")
    return replica


async def run(house: House, at: Replica, request_id: str, tokens: list[int], **how: Any) -> Heard:
    heard = await house.run(at, house.submission(request_id, tokens, **{**SAMPLING, "max_tokens": 16, **how}))
    assert heard.failure is None
    return heard


async def alone(house: House, tokens: list[int], max_tokens: int = 16) -> list[int]:
    """The tokens of a replica without a store."""
    replica = house.replicas.get("alone") or await house.add("alone")
    request_id = f"alone-{len(house.heard)}"
    return (await run(house, replica, request_id, tokens, max_tokens=max_tokens)).sequence()


async def stored_blocks(replica: Replica, num_blocks: int) -> None:
    """Wait until so many blocks of the replica were written through, and no more are under way."""
    tiers = replica.brain.tiers
    assert tiers is not None
    await until(
        lambda: tiers.writing.num_stored >= num_blocks and tiers.writing.is_idle, f"{num_blocks} are stored"
    )


def loaded(heard: Heard) -> int:
    """Tokens that were loaded for the request."""
    assert heard.prefill is not None
    return sum(heard.prefill.num_loaded_tokens.values())


async def test_what_one_replica_computed_another_loads(stored: tuple[House, StoreHouse]) -> None:
    house, store = stored
    await store.start()
    first, second = await add(house, store, "a"), await add(house, store, "b")
    wanted = await alone(house, prompt(1))
    assert (await run(house, first, "r", prompt(1))).sequence() == wanted
    await stored_blocks(first, NUM_FULL_BLOCKS)
    heard = await run(house, second, "r2", prompt(1))
    assert heard.sequence() == wanted
    assert heard.prefill is not None
    assert heard.prefill.num_loaded_tokens == {"dram": NUM_FULL_BLOCKS * BLOCK_TOKENS}
    assert heard.prefill.num_cached_tokens == NUM_FULL_BLOCKS * BLOCK_TOKENS
    await house.quiet()


async def test_a_loaded_prefix_is_handed_over(stored: tuple[House, StoreHouse]) -> None:
    house, store = stored
    await store.start()
    first = await add(house, store, "a")
    prefill, decode = await add(house, store, "p", "prefill"), await house.add("d", "decode")
    wanted = await alone(house, prompt(2))
    await run(house, first, "r", prompt(2))
    await stored_blocks(first, NUM_FULL_BLOCKS)
    heard = await run(house, prefill, "r2", prompt(2), decode=decode)
    assert heard.sequence() == wanted
    assert loaded(heard) == NUM_FULL_BLOCKS * BLOCK_TOKENS
    assert heard.hand_over is not None
    assert heard.hand_over.num_bad_pieces == 0
    await house.quiet()


@pytest.mark.parametrize("shapes", [("1x1", "2x1"), ("2x1", "1x2"), ("1x2", "1x1")])
async def test_any_shape_reads_what_any_shape_wrote(
    stored: tuple[House, StoreHouse], shapes: tuple[str, str]
) -> None:
    house, store = stored
    await store.start()
    parallel = {"1x1": Parallel(), "2x1": Parallel(tp=2), "1x2": TWO_STAGES}
    wanted = await alone(house, prompt(3))
    for shape in shapes:
        replica = await add(house, store, shape, parallel=parallel[shape])
        heard = await run(house, replica, shape, prompt(3))
        assert heard.sequence() == wanted
        assert loaded(heard) == (NUM_FULL_BLOCKS * BLOCK_TOKENS if shape == shapes[1] else 0)
        await until(lambda: replica.brain.tiers is not None and replica.brain.tiers.is_idle, "it is written")  # noqa: B023
    await house.quiet()


async def test_a_preempted_sequence_comes_back_from_the_host_tier(
    stored: tuple[House, StoreHouse],
) -> None:
    house, store = stored
    await store.start()
    seeds = range(40, 44)
    wanted = [await alone(house, prompt(seed, 64), 100) for seed in seeds]
    replica = await add(house, store, "a", engine={"kv_tokens": 256})
    submissions = [
        house.submission(f"r{seed}", prompt(seed, 64), max_tokens=100, **SAMPLING) for seed in seeds
    ]
    for submission in submissions:
        replica.send(submission)
    heard = [await house.ended(submission) for submission in submissions]
    assert [each.sequence() for each in heard] == wanted
    await until(lambda: replica.load is not None and replica.load.num_preemptions > 0, "one was preempted")
    tiers = replica.brain.tiers
    assert tiers is not None
    assert tiers.num_loaded_tokens["dram"] >= BLOCK_TOKENS
    await house.quiet()


async def test_a_resumed_request_loads_what_the_dead_replica_had_generated(
    stored: tuple[House, StoreHouse],
) -> None:
    house, store = stored
    await store.start()
    wanted = await alone(house, prompt(6), 60)
    prefill, first = await add(house, store, "p", "prefill"), await add(house, store, "d0", "decode")
    submission = house.submission("r", prompt(6), decode=first, max_tokens=60, **SAMPLING)
    prefill.send(submission)
    heard = house.heard.setdefault(("r", 0), Heard())
    await until(lambda: len(heard.tokens.get(0, {})) >= 40, "40 tokens")
    num_blocks = (NUM_TOKENS + 40 - 1) // BLOCK_TOKENS
    tiers = first.brain.tiers
    assert tiers is not None
    await until(lambda: len(tiers.view) >= num_blocks, "the finished blocks are in the host tier")
    for process_id in first.brain.rank_process_ids:
        os.kill(process_id, signal.SIGKILL)
    await until(lambda: heard.failure is not None, "the attempt fails")
    output = heard.sequence()
    second = await add(house, store, "b")
    again = await run(
        house, second, "r", prompt(6), attempt=1, output=output, max_tokens=60, seed=SAMPLING["seed"]
    )
    assert [*output, *list(again.tokens[0].values())][:60] == wanted
    assert loaded(again) >= (NUM_TOKENS + 40 - 1) // BLOCK_TOKENS * BLOCK_TOKENS


async def test_a_flipped_bit_in_the_arena_is_computed_not_used(
    stored: tuple[House, StoreHouse], tmp_path: Path
) -> None:
    house, store = stored
    await store.start()
    rule = FaultRule("store.corrupt.put", "corrupt", str(tmp_path / "flip"), after=4)
    first, second = await add(house, store, "a", faults=[rule]), await add(house, store, "b")
    wanted = await alone(house, prompt(7))
    await run(house, first, "r", prompt(7))
    await stored_blocks(first, NUM_FULL_BLOCKS)
    assert (tmp_path / "flip").exists()
    heard = await run(house, second, "r2", prompt(7))
    assert heard.sequence() == wanted
    assert loaded(heard) == 3 * BLOCK_TOKENS
    await until(
        lambda: second.load is not None and second.load.num_store_checksum_failures == 1, "it is counted"
    )
    third = await add(house, store, "c")  # the bad record is gone, the right one of the second is there
    await until(lambda: second.brain.tiers is not None and second.brain.tiers.is_idle, "it is stored")
    again = await run(house, third, "r3", prompt(7))
    assert again.sequence() == wanted
    assert loaded(again) == NUM_FULL_BLOCKS * BLOCK_TOKENS
    await house.quiet()


async def test_serving_goes_on_while_the_store_is_dead_and_the_arena_is_found_again(
    stored: tuple[House, StoreHouse],
) -> None:
    house, store = stored
    await store.start()
    first = await add(house, store, "a")
    wanted = [await alone(house, prompt(seed)) for seed in (8, 9)]
    await run(house, first, "r8", prompt(8))
    await stored_blocks(first, NUM_FULL_BLOCKS)
    await store.kill()
    tiers = first.brain.tiers
    assert tiers is not None
    await until(lambda: not tiers.is_open, "its end is noticed")
    assert (await run(house, first, "r9", prompt(9))).sequence() == wanted[1]
    await store.start()
    await until(lambda: tiers.is_open, "the next owner is found")
    second = await add(house, store, "b")
    heard = await run(house, second, "r8b", prompt(8))
    assert heard.sequence() == wanted[0]
    assert loaded(heard) == NUM_FULL_BLOCKS * BLOCK_TOKENS
    await house.quiet()


async def test_a_stopped_store_holds_no_request_up(stored: tuple[House, StoreHouse]) -> None:
    house, store = stored
    await store.start()
    first = await add(house, store, "a")
    wanted = await alone(house, prompt(10))
    store.signal(signal.SIGSTOP)
    heard = await run(house, first, "r", prompt(10))
    assert heard.sequence() == wanted
    assert loaded(heard) == 0
    store.signal(signal.SIGCONT)
    tiers = first.brain.tiers
    assert tiers is not None
    await until(lambda: tiers.is_open, "it is used again")
    await run(house, first, "r2", prompt(11))
    await stored_blocks(first, NUM_FULL_BLOCKS)
    await house.quiet()


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(tp=2)])
async def test_a_restart_of_everything_finds_the_nvme_warm(
    stored: tuple[House, StoreHouse], parallel: Parallel, tmp_path: Path
) -> None:
    house, store = stored
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    await store.start(nvme_path=str(nvme), nvme_bytes=64 << 20, segment_bytes=4 << 20)
    first = await add(house, store, "a")
    wanted = await alone(house, prompt(12))
    await run(house, first, "r", prompt(12))
    await stored_blocks(first, NUM_FULL_BLOCKS)
    await first.close()
    await house.replicas.pop("a").brain.stop()
    await store.stop()
    await store.start(nvme_path=str(nvme), nvme_bytes=64 << 20, segment_bytes=4 << 20)
    second = await add(house, store, "b", parallel=parallel)
    await store.until("nvme", lambda stat: stat.num_records >= NUM_FULL_BLOCKS, "its segments are read")
    heard = await run(house, second, "r2", prompt(12))
    assert heard.sequence() == wanted
    assert heard.prefill is not None
    assert heard.prefill.num_loaded_tokens == {"nvme": NUM_FULL_BLOCKS * BLOCK_TOKENS}
    await house.quiet()


async def test_a_rank_killed_in_the_middle_of_a_copy_leaks_nothing(
    stored: tuple[House, StoreHouse], tmp_path: Path
) -> None:
    house, store = stored
    await store.start()
    rule = FaultRule("store.copy.put", "kill", str(tmp_path / "kill"), after=3)
    first = await add(house, store, "a", faults=[rule])
    house.replicas["a"].send(house.submission("r", prompt(13), max_tokens=16, **SAMPLING))
    await until((tmp_path / "kill").exists, "the rank is killed")
    await until(lambda: house.heard.get(("r", 0), Heard()).failure is not None, "the attempt fails")
    await first.close()
    await house.replicas.pop("a").brain.stop()
    await store.check_nothing_leaked()
    second = await add(house, store, "b")
    heard = await run(house, second, "r2", prompt(13))
    assert heard.sequence() == await alone(house, prompt(13))
    await house.quiet()
