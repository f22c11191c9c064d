"""Owners that are killed at every point and started again: right bytes or a miss, and nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from store_harness import LEFT, MODEL, RIGHT, Chain, Replica, StoreHarness, block_bytes, eventually

from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import FaultRule
from kvtransfer.errors import TransferError
from kvtransfer.messages import Shard
from kvtransfer.store.messages.admin_requests import PurgeRequest, PurgeResult

pytestmark = pytest.mark.slow

DRAM_BYTES = 2 << 20
NUM_FITTING = DRAM_BYTES // (block_bytes(MODEL) + 4096)


def make_harness(folder: Path) -> StoreHarness:
    """Tiers so small that a few prompts overflow them."""
    return StoreHarness(
        folder,
        nvme_path=str(folder / "nvme"),
        nvme_bytes=8 << 20,
        segment_bytes=2 << 20,
        dram_bytes=DRAM_BYTES,
        flush_s=1.0,
    )


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[StoreHarness]:
    harness = make_harness(tmp_path)
    yield harness
    await harness.close()


@contextlib.asynccontextmanager
async def supervised(harness: StoreHarness) -> AsyncIterator[None]:
    """Whenever the owner was killed, it is started again."""

    async def watch() -> None:
        while True:
            assert await harness.ended(None) == -signal.SIGKILL
            await harness.start()

    task = asyncio.create_task(watch())
    yield
    if task.done():
        task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def purge(harness: StoreHarness, group: str) -> None:
    """Again and again, until an owner says that it is done."""
    while True:
        try:
            await harness.ask(PurgeRequest(group, None), PurgeResult)
        except (TransferError, AssertionError):  # away, or it has not yet read what it holds
            await SystemClock().sleep(0.05)
        else:
            return


# ----------------------------------------------------------------------------------- taking an arena over


async def test_a_restarted_owner_takes_the_arena_over(harness: StoreHarness) -> None:
    await harness.start()
    replica = await Replica(harness, LEFT, RIGHT).start()
    chain = Chain.of("prompt", 6)
    await replica.put(chain)
    assert await replica.find(chain) == ("dram",) * 6, "it has heard of the commit"
    await harness.kill()
    await eventually(lambda: bool(replica.losses), "its end is heard")
    await harness.start(offer_wait_s=1.0)
    await replica.up()
    await eventually(lambda: replica.tiers == dict.fromkeys(chain.keys, "dram"), "told anew")
    assert await replica.get(chain) == ("dram",) * 6
    other = await Replica(harness).start()
    assert await other.get(chain) == ("dram",) * 6, "a rank that comes anew maps the same arena"
    await harness.check_nothing_leaked()
    await replica.close()
    await other.close()
    await harness.stop()


async def test_what_was_being_written_when_the_owner_died_is_free_again(harness: StoreHarness) -> None:
    await harness.start()
    replica, other = await Replica(harness).start(), await Replica(harness).start()
    mine, others = Chain.of("mine", 5), Chain.of("others", 5)
    assert await replica.grant(mine, range(5))
    assert await other.grant(others, range(5))
    await other.leave()  # its ranks live on, with the arena mapped
    await harness.kill()
    await harness.start(offer_wait_s=1.0)
    await replica.up()
    stat = await harness.until(
        "dram", lambda stat: stat.num_quarantined == 5, "of the engine_core that is away"
    )
    assert stat.num_records == 0
    assert await replica.put(mine) == list(range(5))
    assert await replica.get(mine) == ("dram",) * 5
    assert (await harness.stat("dram")).num_quarantined == 5, "this process, the writer, still lives"
    await other.come_back()
    await harness.check_nothing_leaked()
    assert await other.put(others) == list(range(5))
    await replica.close()
    await other.close()
    await harness.stop()


async def test_ranks_with_the_arena_of_before_get_the_new_one(harness: StoreHarness) -> None:
    await harness.start()
    early = await Replica(harness, LEFT, RIGHT).start()
    await early.put(Chain.of("early", 3))
    await early.leave()
    await harness.kill()
    await harness.start()  # waits for no offers
    late = await Replica(harness).start()
    await late.put(Chain.of("late", 3))
    await early.come_back()
    assert await early.get(Chain.of("late", 3)) == ("dram",) * 3
    assert await early.put(Chain.of("more", 3)) == [0, 1, 2]
    assert await late.get(Chain.of("more", 3)) == ("dram",) * 3
    await harness.check_nothing_leaked()
    await early.close()
    await late.close()
    await harness.stop()


# ------------------------------------------------------------------------------------- killed at a point

POINTS = [
    ("store.put.allocate", 1),
    ("store.put.allocate", 40),
    ("store.put.commit", 1),
    ("store.put.commit", 30),
    ("store.get", 1),
    ("store.get", 60),
    ("store.evict", 1),
    ("store.evict", 20),
    ("store.nvme.write", 1),
    ("store.nvme.write", 12),
    ("store.nvme.read", 1),
    ("store.nvme.read", 10),
    ("store.compact", 1),
    ("store.compact", 3),
    ("store.purge", 1),
]


@pytest.mark.parametrize(
    ("point", "after"),
    [pytest.param(*each, marks=pytest.mark.slow if each[1] > 1 else ()) for each in POINTS],
)
async def test_killed_at_a_point(harness: StoreHarness, tmp_path: Path, point: str, after: int) -> None:
    marker = tmp_path / "marker"
    await harness.start(FaultRule(point, "kill", str(marker), after))
    async with supervised(harness):
        replicas = [await Replica(harness).start(), await Replica(harness, LEFT, RIGHT).start()]
        await work(harness, replicas)
        assert marker.exists(), "the point was never passed"
        for replica in replicas:
            await replica.up()
            fresh = Chain.of(f"fresh {replica.identity.replica_id}", 6)
            assert await replica.put(fresh) == list(range(6))
            assert await replica.get(fresh) == ("dram",) * 6
            assert await replica.find(Chain.of("secret", 6, group="mallory")) == ()
        await harness.check_nothing_leaked()
        for replica in replicas:
            await replica.close()
    await harness.stop()


async def work(harness: StoreHarness, replicas: list[Replica]) -> None:
    """More than the host tier holds, and more than NVMe does; what is read is compared."""
    await replicas[0].put(Chain.of("secret", 6, group="mallory"))
    for number in range(12):
        for replica in replicas:
            chain = Chain.of(f"prompt {number} {replica.shards}", 14)
            await replica.put(chain)
            await replica.get(chain)
            await replica.get(Chain.of(f"prompt {number // 2} {replica.shards}", 14))
            await replica.get(Chain.of(f"prompt {max(number - 4, 0)} {replicas[0].shards}", 14))
            await replica.up()
    await harness.until("nvme", lambda stat: not stat.num_queued, "written")
    for number in range(12):
        await replicas[0].get(Chain.of(f"prompt {number} {replicas[0].shards}", 14))
    await purge(harness, "mallory")


async def test_killed_while_it_recovers(harness: StoreHarness, tmp_path: Path) -> None:
    await harness.start()
    replica = await Replica(harness).start()
    chain = Chain.of("prompt", 8)
    await replica.put(chain)
    await harness.until("nvme", lambda stat: stat.num_records == 8, "written")
    await harness.kill()
    await replica.close()
    await harness.start(FaultRule("store.recover", "kill", str(tmp_path / "marker")))
    assert await harness.ended() == -signal.SIGKILL
    assert (tmp_path / "marker").exists()
    await harness.start()
    reader = await Replica(harness).start()
    await eventually(lambda: len(reader.tiers) == 8, "found again")
    assert await reader.get(chain) == ("nvme",) * 8
    await harness.check_nothing_leaked()
    await reader.close()
    await harness.stop()


# ----------------------------------------------------------------------------------------- interleavings

_names = st.integers(0, 3)
_operations = st.one_of(
    st.tuples(st.just("put"), _names),
    st.tuples(st.just("get"), _names),
    st.tuples(st.just("fill"), _names),
    st.tuples(st.sampled_from(["crash", "restart", "forget", "purge"]), st.just(0)),
)
_SHAPES: list[tuple[Shard, ...]] = [(MODEL,), (LEFT, RIGHT)]


@pytest.mark.slow
@settings(
    max_examples=8, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(operations=st.lists(_operations, min_size=6, max_size=24), shape=st.sampled_from(_SHAPES))
def test_any_history_gives_right_bytes_or_a_miss(
    operations: list[tuple[str, int]], shape: tuple[Shard, ...]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_history(Path(folder), operations, shape))


async def _history(folder: Path, operations: list[tuple[str, int]], shape: tuple[Shard, ...]) -> None:
    harness = make_harness(folder)
    try:
        await harness.start()
        history = History(harness, shape)
        await history.begin()
        for operation, number in operations:
            await history.do(operation, number)
        await history.end()
    finally:
        await harness.close()


class History:
    """What was done, and a plain set of the blocks that may be found."""

    def __init__(self, harness: StoreHarness, shape: tuple[Shard, ...]) -> None:
        self._harness = harness
        self._shape = shape
        self._stored: set[bytes] = set()
        self._num_filled = 0

    async def begin(self) -> None:
        self._replica = await Replica(self._harness, *self._shape).start()

    async def do(self, operation: str, number: int) -> None:
        chain = Chain.of(f"prompt {number}", 6)
        match operation:
            case "put":
                stored = await self._replica.put(chain)
                self._stored |= {chain.keys[index] for index in stored}
            case "get":
                got = await self._replica.get(chain)  # compares
                assert set(chain.keys[: len(got)]) <= self._stored
            case "fill":
                self._num_filled += 1
                other = Chain.of(f"other {self._num_filled}", NUM_FITTING // 2, group="bob")
                stored = await self._replica.put(other)  # some may be refused, while others are written
                num_leading = sum(index == number for number, index in enumerate(stored))
                assert len(await self._replica.get(other)) == num_leading
            case "crash":
                await self._restart(is_crash=True)
            case "restart":
                await self._restart(is_crash=False)
            case "forget":  # everything but NVMe
                await self._harness.stop()
                await self._replica.close()
                await self._harness.start()
                await self.begin()
            case "purge":
                await purge(self._harness, "alice")
                self._stored.clear()

    async def end(self) -> None:
        for number in range(4):
            await self.do("get", number)
        await self._harness.check_nothing_leaked()
        assert len(await self._replica.put(Chain.of("last", 4))) == 4
        assert await self._replica.get(Chain.of("last", 4)) == ("dram",) * 4
        await self._harness.check_nothing_leaked()
        await self._replica.close()
        await self._harness.stop()

    async def _restart(self, *, is_crash: bool) -> None:
        num_losses = len(self._replica.losses)
        await (self._harness.kill() if is_crash else self._harness.stop())
        await eventually(lambda: len(self._replica.losses) > num_losses, "its end is heard")
        await self._harness.start(offer_wait_s=1.0)
        await self._replica.up()
