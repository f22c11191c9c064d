"""What engine cores are told of the tiers, against a plain recomputation after every change."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import hypothesis.strategies as st
from hypothesis import example, given

from kvtransfer.common.moving_average import RateMeter
from kvtransfer.kv_events import BlocksStored
from kvtransfer.messages import Shard
from kvtransfer.store.dram.record_table import Held
from kvtransfer.store.messages.engine_session import TierEvents, TierPart
from kvtransfer.store.messages.records import RecordId, RecordInfo
from kvtransfer.store.nvme.segment import NvmeRef
from kvtransfer.store.server import tier_changes
from kvtransfer.store.server.tier_changes import TierChanges, tier_of

WHOLE, LEFT, RIGHT = Shard(0, 2, 0, 4), Shard(0, 2, 0, 2), Shard(0, 2, 2, 4)
KEYS = [bytes([number]) * 16 for number in range(6)]
PARENTS = {KEYS[0]: b"", KEYS[1]: KEYS[0], KEYS[2]: KEYS[1], KEYS[3]: KEYS[1], KEYS[4]: b"", KEYS[5]: KEYS[4]}


def held(key: bytes, shard: Shard, tiers: str) -> Held:
    """A record in DRAM ("d"), on NVMe ("n"), or both."""
    info = RecordInfo(RecordId(b"space", key, shard), PARENTS[key], KEYS[0], "alice", b"model", 1024, 0)
    record = Held(info)
    if "d" in tiers:
        record.offset = 4096
    if "n" in tiers:
        record.nvme, record.nvme_info = NvmeRef(1, 0, 8192), info
    return record


NUM_SLICES = 4


class EngineCore:
    """Takes in what it is sent, and notices what makes no sense."""

    def __init__(self) -> None:
        self.tiers: dict[bytes, str] = {}
        self.reasons: dict[bytes, str] = {}
        # What was named since part 0, and the next part; None: it asks for part 0.
        self.named: set[bytes] = set()
        self.next_part: int | None = None

    def take(self, messages: list[TierEvents]) -> None:
        for events in messages:
            self.add(events.stored)
            for key, reason in zip(events.removed, events.reasons, strict=True):
                self.tiers.pop(key, None)
                self.reasons[key] = reason

    def add(self, chains: tuple[BlocksStored, ...]) -> None:
        for stored in chains:
            parent = stored.parent
            for key in stored.keys:
                assert PARENTS[key] == parent
                parent = key
                self.tiers[key] = stored.tier
                self.named.add(key)

    def ask(self, changes: TierChanges) -> None:
        """Take the next part. After the last one only what was named is there."""
        number = self.next_part or 0
        if not number:
            self.named.clear()
        part = changes.part(number)
        assert part.part == number
        assert len(part.stored) <= len(KEYS) // 2, "the parts are small"
        self.add(part.stored)
        self.next_part = part.next_part
        if not part.next_part:
            self.tiers = {key: tier for key, tier in self.tiers.items() if key in self.named}


def expected(books: dict[bytes, dict[Shard, Held]], shards: tuple[Shard, ...]) -> dict[bytes, str]:
    """By looking at each half of each block."""
    halves = {half for shard in shards for half in (LEFT, RIGHT) if shard in (half, WHOLE)}
    tiers: dict[bytes, str] = {}
    for key, records in books.items():
        found = set()
        for half in halves:
            here = [record for shard, record in records.items() if shard in (half, WHOLE)]
            is_near = any(record.offset is not None for record in here)
            found.add("dram" if is_near else "nvme" if here else "none")
        if "none" not in found:
            tiers[key] = "nvme" if "nvme" in found else "dram"
    return tiers


def slice_of(books: dict[bytes, dict[Shard, Held]]) -> Callable[[int], list[bytes]]:
    return lambda index: [key for key in books if KEYS.index(key) % NUM_SLICES == index]


_change = st.tuples(
    st.sampled_from(KEYS),
    st.sampled_from([WHOLE, LEFT, RIGHT]),
    st.sampled_from(["", "d", "n", "dn"]),
)
_operations = st.lists(
    st.one_of(_change, st.sampled_from(["take", "ask 0", "ask 1", "restart 0"])), max_size=60
)


@example(drawn=["ask 1", (KEYS[0], WHOLE, "d"), "ask 0", (KEYS[0], WHOLE, "")], shards=(WHOLE,))
@example(
    drawn=[(KEYS[0], WHOLE, "n"), "ask 1", (KEYS[0], WHOLE, "d"), "ask 0", (KEYS[0], WHOLE, "n")],
    shards=(WHOLE,),
)
@given(drawn=_operations, shards=st.sampled_from([(WHOLE,), (LEFT, RIGHT), (LEFT,)]))
def test_engine_cores_know_what_there_is_whenever_they_ask(
    drawn: list[tuple[bytes, Shard, str] | str], shards: tuple[Shard, ...]
) -> None:
    """Parts come between changes, and one of the two engine cores begins again."""
    books: dict[bytes, dict[Shard, Held]] = {}
    with (
        mock.patch.object(tier_changes, "NUM_SLICES", NUM_SLICES),
        mock.patch.object(tier_changes, "PART_BLOCKS", 1),
    ):
        changes = TierChanges(shards, lambda key: books.get(key, {}), slice_of(books))
        cores = EngineCore(), EngineCore()

        def take() -> None:
            messages = changes.take()
            for core in cores:
                if core.next_part is not None:
                    core.take(messages)

        for operation in drawn:
            if operation == "take":
                take()
            elif operation == "restart 0":
                cores[0].next_part = None
                cores[0].tiers[KEYS[0]] = "nvme"  # of an earlier owner
            elif isinstance(operation, str):
                core = cores[int(operation[-1])]
                if core.next_part != 0:
                    core.ask(changes)
            else:
                key, shard, tiers = operation
                if tiers:
                    books.setdefault(key, {})[shard] = held(key, shard, tiers)
                elif key in books:
                    books[key].pop(shard, None)
                changes.changed(key)
        for core in cores:
            while core.next_part != 0:
                core.ask(changes)
        take()
        assert cores[0].tiers == cores[1].tiers == expected(books, shards)
        assert changes.take() == [], "nothing is sent twice"
        older = EngineCore()
        older.take([changes.whole()])
        assert older.tiers == expected(books, shards)


def test_a_part_of_nothing_is_the_last_one() -> None:
    changes = TierChanges((WHOLE,), lambda key: {}, lambda index: ())
    assert changes.part(0) == TierPart((), 0, 0)
    assert changes.part(-7) == TierPart((), 0, 0)
    assert changes.part(1 << 60).next_part == 0
    assert changes.whole() == TierEvents((), ())


def test_a_removal_has_the_reason_of_the_record_that_was_removed_last() -> None:
    books = {KEYS[0]: {half: held(KEYS[0], half, "d") for half in (LEFT, RIGHT)}}
    changes = TierChanges((LEFT, RIGHT), lambda key: books.get(key, {}), slice_of(books))
    with mock.patch.object(tier_changes, "NUM_SLICES", NUM_SLICES):
        assert len(changes.part(0).stored) == 1
    del books[KEYS[0]][LEFT]
    changes.changed(KEYS[0], "space")
    changes.changed(KEYS[0])  # the other half was moved
    assert changes.take() == [TierEvents((), (KEYS[0],), ("space",))]
    del books[KEYS[0]]
    changes.changed(KEYS[0], "purged")
    assert changes.take() == [], "it was not there any more"


def test_the_slowest_part_decides() -> None:
    records = {LEFT: held(KEYS[0], LEFT, "d"), RIGHT: held(KEYS[0], RIGHT, "n")}
    assert tier_of((LEFT,), records) == "dram"
    assert tier_of((WHOLE,), records) == "nvme"
    assert tier_of((WHOLE,), {LEFT: records[LEFT]}) is None


def test_a_meter_counts_the_time_in_which_something_is_under_way() -> None:
    meter = RateMeter()
    assert meter.gb_s == 0.0
    meter.begin(0.0)
    meter.begin(0.1)
    meter.end(0.2, 0.0, 100_000_000)
    meter.end(0.2, 0.1, 100_000_000)
    assert abs(meter.gb_s - 1.0) < 1e-6
    meter.begin(100.0)  # idle in between
    meter.end(100.2, 100.0, 200_000_000)
    assert abs(meter.gb_s - 1.0) < 1e-6
    assert 0.1 < meter.latency_s <= 0.2
