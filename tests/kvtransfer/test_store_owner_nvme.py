"""The owner with an NVMe tier: written behind, found after a restart, deleted for good; never wrong bytes."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from store_harness import (
    BOTTOM,
    LEFT,
    MODEL,
    RIGHT,
    TOP,
    Chain,
    Replica,
    StoreHarness,
    block_bytes,
    eventually,
)

from kvtransfer.common.faults import FaultRule
from kvtransfer.messages import Shard
from kvtransfer.store.messages.admin_requests import (
    AdminFailed,
    ListRequest,
    PurgeRequest,
    PurgeResult,
    StatRequest,
    StoreListing,
    StoreStat,
    VerifyRequest,
    VerifyResult,
)
from kvtransfer.store.messages.engine_session import FetchRequest, PutCommit

pytestmark = pytest.mark.slow

DRAM_BYTES = 2 << 20
NUM_FITTING = DRAM_BYTES // (block_bytes(MODEL) + 4096)


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[StoreHarness]:
    harness = StoreHarness(
        tmp_path,
        nvme_path=str(tmp_path / "nvme"),
        nvme_bytes=64 << 20,
        segment_bytes=4 << 20,
        dram_bytes=DRAM_BYTES,
    )
    yield harness
    await harness.close()


async def written(harness: StoreHarness, num_records: int) -> None:
    """Wait until so many records are on NVMe, and none waits."""
    await harness.until(
        "nvme", lambda stat: stat.num_records == num_records and not stat.num_queued, f"{num_records} on NVMe"
    )


async def push_out(harness: StoreHarness, replica: Replica) -> None:
    """Fill the host tier with something else."""
    before = (await harness.stat("nvme")).num_records
    for number in range(4):
        other = Chain.of(f"other {number}", NUM_FITTING // 4, group="mallory")
        await replica.put(other)
        await written(harness, before + (number + 1) * len(other.keys))


async def test_what_left_the_host_tier_is_read_from_nvme(harness: StoreHarness) -> None:
    await harness.start()
    replica = await Replica(harness).start()
    chain = Chain.of("prompt", 8)
    await replica.put(chain)
    await written(harness, 8)
    await push_out(harness, replica)
    await eventually(lambda: [replica.tiers.get(key) for key in chain.keys] == ["nvme"] * 8, "told")
    assert await replica.find(chain) == ("nvme",) * 8
    assert await replica.get(chain) == ("nvme",) * 8
    assert await replica.get(chain) == ("dram",) * 8
    assert (await harness.stat("nvme")).num_hits == 8
    await eventually(lambda: replica.welcomes[-1].gb_s["nvme"] > 0, "the rate is told")
    await harness.check_nothing_leaked()
    await replica.close()
    await harness.stop()


async def test_one_read_serves_all_who_want_the_record(harness: StoreHarness) -> None:
    await harness.start()
    first, second = await Replica(harness).start(), await Replica(harness, LEFT, RIGHT).start()
    chain = Chain.of("prompt", 8)
    await first.put(chain)
    await written(harness, 8)
    await push_out(harness, first)
    got = await asyncio.gather(first.get(chain), second.get(chain), first.get(chain))
    assert all(len(tiers) == 8 for tiers in got)
    assert (await harness.stat("nvme")).num_hits == 8
    await harness.check_nothing_leaked()
    await first.close()
    await second.close()


@pytest.mark.parametrize("how", ["released", "disconnected"])
async def test_what_is_not_wanted_any_more_is_not_read(harness: StoreHarness, how: str) -> None:
    await harness.start(io_threads=1)
    replica = await Replica(harness).start()
    chain = Chain.of("prompt", NUM_FITTING - 6)
    await replica.put(chain)
    await written(harness, len(chain.keys))
    await push_out(harness, replica)
    request = FetchRequest(1000, chain.group, chain.keys[0], chain.keys, True)
    assert replica.client.send(request)
    if how == "released":
        replica.release(request.number)
        await harness.check_nothing_leaked()
    else:
        await replica.leave()
        await harness.check_nothing_leaked()
        await replica.come_back()
    assert (await harness.stat("nvme")).num_hits < len(chain.keys) // 2
    assert len(await replica.get(chain)) == len(chain.keys)
    await harness.check_nothing_leaked()
    await replica.close()


async def test_a_prefetched_block_waits_in_the_host_tier(harness: StoreHarness) -> None:
    await harness.start(prefetch_pin_s=60.0)
    replica = await Replica(harness).start()
    chain = Chain.of("prompt", 8)
    await replica.put(chain)
    await written(harness, 8)
    await push_out(harness, replica)
    replica.prefetch(chain)
    await eventually(lambda: [replica.tiers.get(key) for key in chain.keys] == ["dram"] * 8, "brought")
    for number in range(6):
        await replica.put(Chain.of(f"more {number}", NUM_FITTING // 4))
    assert await replica.get(chain) == ("dram",) * 8, "pinned"
    await harness.check_nothing_leaked()
    await replica.close()


@pytest.mark.parametrize("ends", ["in good order", "killed"])
@pytest.mark.parametrize(
    ("writers", "readers"),
    [
        ((MODEL,), (MODEL,)),
        ((MODEL,), (LEFT, RIGHT)),
        ((LEFT, RIGHT), (MODEL,)),
        ((LEFT, RIGHT), (TOP, BOTTOM)),
    ],
)
async def test_a_restart_finds_what_was_written_for_any_shape(
    harness: StoreHarness, ends: str, writers: tuple[Shard, ...], readers: tuple[Shard, ...]
) -> None:
    await harness.start()
    writer = await Replica(harness, *writers).start()
    chain = Chain.of("prompt", 8)
    await writer.put(chain)
    if ends == "killed":
        await written(harness, 8 * len(writers))
        await harness.kill()
    else:
        await harness.stop()  # writes what is still queued
    await writer.close()
    await harness.start()
    reader = await Replica(harness, *readers).start()
    await eventually(lambda: set(reader.tiers) == set(chain.keys), "told")
    assert await reader.find(chain) == ("nvme",) * 8
    assert await reader.get(chain) == ("nvme",) * 8
    await harness.check_nothing_leaked()
    await reader.close()
    await harness.stop()


async def test_what_waits_for_a_short_queue_is_written_before_the_end(harness: StoreHarness) -> None:
    await harness.start(write_queue=1, io_threads=1)
    replica = await Replica(harness).start()
    chain = Chain.of("prompt", 30)
    assert await replica.put(chain) == list(range(30))
    assert await replica.find(chain) == ("dram",) * 30
    await harness.stop()
    await replica.close()
    await harness.start()
    replica = await Replica(harness).start()
    await eventually(lambda: replica.tiers == dict.fromkeys(chain.keys, "nvme"), "all is there")
    await replica.close()


async def test_nvme_gives_up_the_oldest_and_keeps_what_is_read(harness: StoreHarness) -> None:
    await harness.start(nvme_bytes=12 << 20)
    replica = await Replica(harness).start()
    useful = Chain.of("useful", 8)
    await replica.put(useful)
    await written(harness, 8)
    put = 8
    for number in range(40):
        chain = Chain.of(f"prompt {number}", 12)
        assert len(await replica.put(chain)) == 12
        await harness.until("nvme", lambda stat: not stat.num_queued, "written")
        if number % 8 == 0:
            assert len(await replica.get(useful)) == 8
        put += 12
    stat = await harness.stat("nvme")
    assert stat.num_evictions > 0
    assert stat.num_bytes <= 12 << 20
    assert stat.num_records < put
    assert len(await replica.get(useful)) == 8
    assert await replica.find(Chain.of("prompt 1", 12)) == ()
    await harness.check_nothing_leaked()
    await replica.close()
    await harness.stop()


# ------------------------------------------------------------------------------------------------- faults


def _truncate(folder: Path) -> None:
    for path in folder.glob("*.seg"):
        os.truncate(path, 0)


def _overwrite(folder: Path) -> None:
    for path in folder.glob("*.seg"):
        path.write_bytes(b"\xa5" * path.stat().st_size)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("damage", [_truncate, _overwrite, _remove])
async def test_a_disk_that_fails_costs_what_it_held_only(
    harness: StoreHarness, damage: Callable[[Path], None]
) -> None:
    await harness.start()
    replica = await Replica(harness).start()
    chain = Chain.of("prompt", 8)
    await replica.put(chain)
    await written(harness, 8)
    await push_out(harness, replica)
    damage(Path(harness.settings.nvme_path))
    got = await replica.get(chain)
    if damage is not _remove:  # a file that is open is still there
        assert got == ()
        await eventually(lambda: chain.keys[0] not in replica.tiers, "what is lost is told")
        assert replica.reasons[chain.keys[0]] == "corrupt"
    for number in range(3):
        more = Chain.of(f"more {number}", 20)
        assert await replica.put(more) == list(range(20))
        assert await replica.get(more) == ("dram",) * 20
        await harness.until("nvme", lambda stat: not stat.num_queued, "written, or not")
    await harness.check_nothing_leaked()
    await replica.close()
    await harness.stop()


async def test_a_folder_that_cannot_be_used_leaves_the_host_tier(harness: StoreHarness) -> None:
    Path(harness.settings.nvme_path).write_text("not a folder")
    await harness.start()
    replica = await Replica(harness).start()
    chain = Chain.of("prompt", 4)
    assert await replica.put(chain) == [0, 1, 2, 3]
    assert await replica.get(chain) == ("dram",) * 4
    await harness.until("nvme", lambda stat: stat.note != "", "told why")
    failed = await harness.ask(PurgeRequest("alice", None), AdminFailed)
    assert failed.reason, "what may lie on NVMe was not deleted"
    assert await replica.find(chain) == (), "not found any more all the same"
    await replica.close()
    await harness.stop()


@pytest.mark.parametrize("point", ["store.nvme.write", "store.nvme.read"])
async def test_flipped_bits_are_a_miss_and_counted(harness: StoreHarness, tmp_path: Path, point: str) -> None:
    await harness.start(FaultRule(point, "corrupt", str(tmp_path / "marker")))
    replica = await Replica(harness).start()
    chain = Chain.of("prompt", 4)
    await replica.put(chain)
    await written(harness, 4)
    await push_out(harness, replica)
    got = await replica.get(chain)
    assert (tmp_path / "marker").exists()
    assert len(got) < 4
    assert (await harness.stat("dram")).num_checksum_failures == 1
    await eventually(lambda: len(set(chain.keys) & set(replica.tiers)) == 3, "told")
    assert await replica.put(chain) == [0, 1, 2, 3]
    assert len(await replica.get(chain)) == 4
    await harness.check_nothing_leaked()
    await replica.close()
    await harness.stop()


# -------------------------------------------------------------------------------------------------- admin


async def test_a_purge_deletes_a_tenant_from_all_tiers_for_good(harness: StoreHarness) -> None:
    await harness.start()
    replica = await Replica(harness).start()
    mine, theirs = Chain.of("prompt", 6, group="alice"), Chain.of("prompt", 6, group="bob")
    await replica.put(mine)
    await replica.put(theirs)
    await written(harness, 12)
    purged = await harness.ask(PurgeRequest("alice", None), PurgeResult)
    assert purged.num_records == {"dram": 6, "nvme": 6}
    assert purged.num_pending == 0
    assert await replica.get(mine) == ()
    assert await replica.get(theirs) == ("dram",) * 6
    await eventually(lambda: set(replica.tiers) == set(theirs.keys), "told")
    stat = await harness.ask(StatRequest(), StoreStat)
    assert set(stat.bytes_by_group) == {"bob"}
    await harness.kill()
    await replica.close()
    await harness.start()
    replica = await Replica(harness).start()
    await eventually(lambda: set(theirs.keys) <= set(replica.tiers), "found again")
    assert await replica.find(theirs) == ("nvme",) * 6
    assert await replica.find(mine) == ()
    assert not set(mine.keys) & set(replica.tiers)
    for path in Path(harness.settings.nvme_path).glob("*.seg"):
        raw = path.read_bytes()
        assert b"alice" not in raw
        assert not any(key in raw for key in mine.keys)
    await replica.close()
    await harness.stop()


async def test_a_purge_reaches_what_is_being_read_and_written(harness: StoreHarness) -> None:
    await harness.start()
    replica = await Replica(harness).start()
    read, being_written = Chain.of("read", 4), Chain.of("written", 4)
    await replica.put(read)
    await written(harness, 4)
    assert len(await replica.get(read, hold=True)) == 4
    number = replica.held
    grant = await replica.grant(being_written, range(4))
    assert grant is not None
    purged = await harness.ask(PurgeRequest("alice", None), PurgeResult)
    assert purged.num_records == {"dram": 4, "nvme": 4}
    assert purged.num_pending >= 4
    assert await replica.find(read) == ()
    sums = await replica.write(being_written, grant, [(index, 0) for index in range(4)])
    assert len(sums) == 4
    replica.client.send(PutCommit(tuple((grant.offsets[index], sums[index, 0]) for index in range(4))))
    assert await replica.find(being_written) == ()
    replica.release(number)
    await harness.until("dram", lambda stat: stat.num_bytes == 0, "all is free")
    assert await replica.put(read) == [0, 1, 2, 3]
    await replica.close()
    await harness.stop()


async def test_listing_and_verifying(harness: StoreHarness, tmp_path: Path) -> None:
    await harness.start(FaultRule("store.nvme.write", "corrupt", str(tmp_path / "marker")))
    replica = await Replica(harness).start()
    alice, bob = Chain.of("prompt", 3, group="alice"), Chain.of("prompt", 2, group="bob")
    await replica.put(alice)
    await replica.put(bob)
    await written(harness, 5)
    listing = await harness.ask(ListRequest("alice", None, 2), StoreListing)
    assert listing.num_matching == 3
    assert [record.tiers for record in listing.records] == [("dram", "nvme")] * 2
    assert {record.info.sharing_group for record in listing.records} == {"alice"}
    model = b"model of tests..".hex()
    assert (await harness.ask(ListRequest(None, model[:6], 10), StoreListing)).num_matching == 5
    assert (await harness.ask(ListRequest(None, "00", 10), StoreListing)).num_matching == 0
    verified = await harness.ask(VerifyRequest(None, None), VerifyResult)
    assert verified.num_read == {"dram": 5, "nvme": 5}
    assert verified.num_bad == {"dram": 0, "nvme": 1}
    again = await harness.ask(VerifyRequest(None, None), VerifyResult, is_remote=True)
    assert again.num_read == {"dram": 5, "nvme": 4}
    assert again.num_bad == {"dram": 0, "nvme": 0}
    assert len(await replica.get(alice)) == 3, "the copy in the host tier was good"
    await harness.check_nothing_leaked()
    await replica.close()
    await harness.stop()
