"""Shares of groups in host memory and on NVMe: any history against a naive model, and what a neighbour keeps
beside a group that writes much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from catalog_harness import GRANULE_BYTES, NUM_SLOTS, ONE_GRANULE, CatalogHarness, payload_of, record_id
from hypothesis import given, settings
from hypothesis import strategies as st
from store_harness import Chain, Replica, StoreHarness, eventually
from trust_files import TRUST

from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import Faults
from kvtransfer.common.group_shares import GroupShares
from kvtransfer.store.messages.records import RecordInfo
from kvtransfer.store.nvme.segment import NvmeRef
from kvtransfer.store.record import image_bytes
from kvtransfer.store.server.store_server import StoreServer

SHARES = GroupShares(1.0, {"a": 0.3, "b": 0.5})
GROUPS = "abc"
RECORD_BYTES = image_bytes(ONE_GRANULE)

# (group, number of its record, whether it is only used where it is there already)
Operation = tuple[str, int, bool]
operations = st.lists(st.tuples(st.sampled_from(GROUPS), st.integers(0, 30), st.booleans()), max_size=150)


@dataclass
class Tier:
    """A memory of so many records, each of another chain, as plainly as it can be said."""

    num_records: int
    # The least recently used first.
    used: list[str] = field(default_factory=list)

    def num_of(self, group: str) -> int:
        return sum(name[0] == group for name in self.used)

    def excess(self, group: str, num_more: int = 0) -> float:
        return self.num_of(group) + num_more - int(self.num_records * SHARES.of(group))

    def use(self, name: str) -> None:
        self.used.remove(name)
        self.used.append(name)

    def victim(self, group: str) -> str | None:
        """Of the group itself if it has its share, else of who exceeds its own most, else of nobody."""
        if SHARES.of(group) < 1 and self.excess(group, 1) > 0:
            return self.oldest(group)
        over = [each for each in GROUPS if SHARES.of(each) < 1 and self.excess(each) > 0]
        return self.oldest(min(over, key=lambda each: (-self.excess(each), each))) if over else None

    def oldest(self, group: str = "") -> str:
        return next(name for name in self.used if name.startswith(group))


@given(operations)
@settings(deadline=None)
def test_host_memory_is_divided_as_by_a_naive_model(history: list[Operation]) -> None:
    harness, model = CatalogHarness(shares=SHARES), Tier(NUM_SLOTS)
    for group, number, is_use in history:
        name = f"{group}{number}"
        if name in model.used:
            assert harness.read(name) == payload_of(name)
            model.use(name)
        elif not is_use:
            if len(model.used) == NUM_SLOTS:
                model.used.remove(model.victim(group) or model.oldest())
            harness.put(name, group=group)
            model.used.append(name)
        assert harness.names() == set(model.used)
    harness.catalog.check()
    taken = {group: model.num_of(group) * GRANULE_BYTES for group in GROUPS if model.num_of(group)}
    assert harness.catalog.bytes_by_group() == taken
    harness.close()


@given(operations, st.integers(4, 20))
@settings(deadline=None)
def test_nvme_is_divided_as_by_a_naive_model(history: list[Operation], num_records: int) -> None:
    """While the tier is full each new record takes the place of another one, or of none: then the next
    compaction has to free space."""
    harness = CatalogHarness(nvme_shares=SHARES, nvme_bytes=num_records * RECORD_BYTES)
    catalog, model = harness.catalog, Tier(num_records)
    for place, (group, number, is_use) in enumerate(history):
        name = f"{group}{number}"
        if name in model.used:
            use_on_nvme(harness, info_of(name))
            if SHARES.of(group) < 1:
                model.use(name)
        elif not is_use:
            if len(model.used) >= num_records:
                victim = model.victim(group)
                dropped = catalog.make_nvme_space(info_of(name))
                assert dropped is not None
                assert [it.info.id.key.decode() for it in dropped] == ([] if victim is None else [victim])
                if victim is not None:
                    model.used.remove(victim)
            catalog.added_nvme(info_of(name), NvmeRef(1, place * RECORD_BYTES, RECORD_BYTES))
            model.used.append(name)
        on_nvme = {held.info.id.key.decode() for held in catalog.records() if held.nvme is not None}
        assert on_nvme == set(model.used)
    catalog.check()
    harness.close()


def test_a_record_above_the_share_of_its_group_is_not_written() -> None:
    harness = CatalogHarness(nvme_shares=SHARES, nvme_bytes=3 * RECORD_BYTES)
    assert harness.catalog.make_nvme_space(info_of("a1")) is None
    assert harness.catalog.make_nvme_space(info_of("b1")) == []
    harness.close()


def info_of(name: str) -> RecordInfo:
    return RecordInfo(record_id(name), b"", name.encode(), name[0], b"model", ONE_GRANULE, 0)


def use_on_nvme(harness: CatalogHarness, info: RecordInfo) -> None:
    """As when a reader wants it: it is read into host memory, if it is not there."""
    catalog = harness.catalog
    if catalog.lease(info.id) is not None:
        held = catalog.find(info.id)
        assert held is not None
        assert held.offset is not None
        catalog.release(held.offset)
        return
    offset = catalog.begin_read(info)
    name = info.id.key.decode()
    catalog.commit_read(offset, harness.write(offset, payload_of(name)), info)


# ------------------------------------------------------------------------------------- a store and its disk

MODEST = Chain.of("modest", 8, group="modest")


async def test_a_group_that_writes_much_leaves_the_others_their_records(tmp_path: Path) -> None:
    """The greedy group may have a quarter of NVMe, and writes twice as much as all of it. Nothing of the
    modest one is used meanwhile: the oldest segment would be given up with all that it holds."""
    harness = StoreHarness(
        tmp_path,
        nvme_path=str(tmp_path / "nvme"),
        nvme_bytes=8 << 20,
        segment_bytes=1 << 20,
        admission="all",
        nvme_shares=GroupShares(1.0, {"greedy": 0.25}),
    )
    server = StoreServer(harness.settings, TRUST, SystemClock(), Faults(()), 0.0)
    await server.start()
    replica = await Replica(harness).start()
    try:
        await write(server, replica, [MODEST])
        record_bytes = nvme_bytes(server)
        num_chains = 2 * harness.settings.nvme_bytes // record_bytes
        await write(server, replica, [Chain.of(f"{n}", 8, group="greedy") for n in range(num_chains)])
        found = [held for held in server._node.catalog.records("modest") if held.nvme is not None]
        assert len(found) == len(MODEST.keys)
        greedy = sum(
            held.nvme.num_bytes for held in server._node.catalog.records("greedy") if held.nvme is not None
        )
        assert 0 < greedy < nvme_capacity(server)
    finally:
        await replica.close()
        await server.stop()


async def write(server: StoreServer, replica: Replica, chains: Sequence[Chain]) -> None:
    """Put these chains, and return when nothing of them waits to be written."""
    for chain in chains:
        await replica.put(chain)
        await replica.find(chain)  # behind the commit on the same connection
        await eventually(lambda: is_settled(server), "all is written")


def is_settled(server: StoreServer) -> bool:
    return not server._node._judged and not server._node.writes.num_waiting


def nvme_bytes(server: StoreServer) -> int:
    return next(tier.num_bytes for tier in server.stat().tiers if tier.tier == "nvme")


def nvme_capacity(server: StoreServer) -> int:
    return next(tier.capacity_bytes for tier in server.stat().tiers if tier.tier == "nvme")
