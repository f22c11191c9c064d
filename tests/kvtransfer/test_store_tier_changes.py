"""What engine cores are told of the tiers, against a plain recomputation after every change."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from kvtransfer.common.moving_average import RateMeter
from kvtransfer.messages import Shard
from kvtransfer.store.dram.record_table import Held
from kvtransfer.store.messages.engine_session import TierEvents
from kvtransfer.store.messages.records import RecordId, RecordInfo
from kvtransfer.store.nvme.segment import NvmeRef
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


class EngineCore:
    """Takes in what it is told, and notices what makes no sense."""

    def __init__(self) -> None:
        self.tiers: dict[bytes, str] = {}

    def take(self, messages: list[TierEvents]) -> None:
        for events in messages:
            for stored in events.stored:
                parent = stored.parent
                for key in stored.keys:
                    assert PARENTS[key] == parent
                    parent = key
                    self.tiers[key] = stored.tier
            for key in events.removed:
                del self.tiers[key]


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


_changes = st.lists(
    st.tuples(
        st.sampled_from(KEYS), st.sampled_from([WHOLE, LEFT, RIGHT]), st.sampled_from(["", "d", "n", "dn"])
    ),
    max_size=30,
)


@given(changes=_changes, shards=st.sampled_from([(WHOLE,), (LEFT, RIGHT), (LEFT,)]), pace=st.integers(1, 5))
def test_engine_cores_know_what_there_is(
    changes: list[tuple[bytes, Shard, str]], shards: tuple[Shard, ...], pace: int
) -> None:
    books: dict[bytes, dict[Shard, Held]] = {}
    view = TierChanges(shards, lambda key: books.get(key, {}), [])
    early = EngineCore()
    early.take(view.snapshot())
    for number, (key, shard, tiers) in enumerate(changes):
        if tiers:
            books.setdefault(key, {})[shard] = held(key, shard, tiers)
        else:
            books.get(key, {}).pop(shard, None)
        view.changed(key)
        if number % pace == 0:
            early.take(view.take())
            assert early.tiers == expected(books, shards)
    early.take(view.take())
    late = EngineCore()
    late.take(view.snapshot())
    fresh = EngineCore()
    fresh.take(TierChanges(shards, lambda key: books.get(key, {}), books).snapshot())
    assert early.tiers == late.tiers == fresh.tiers == expected(books, shards)
    assert view.take() == [], "nothing is told twice"


def test_a_snapshot_of_nothing_is_one_message() -> None:
    assert TierChanges((WHOLE,), lambda key: {}, []).snapshot() == [TierEvents((), ())]


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
