"""Blocks on their way from the store, without an owner and without ranks: the test plays both."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_wires import HALVES, KEYS, Wires

from kvtransfer.common.clock import ManualClock
from kvtransfer.store.messages import (
    FetchedBlocks,
    FetchRelease,
    FetchRequest,
    FindAnswer,
    FindRequest,
    Source,
    StoreGet,
    StoreGetDone,
)
from workers.scheduler.block_pool import ROOT, BlockPool
from workers.scheduler.step import LoadNeed
from workers.store_connector.block_loader import (
    FETCH_PATIENCE_S,
    FIND_PATIENCE_S,
    ROOM_PATIENCE_S,
    BlockLoader,
    TierCosts,
)

BLOCK_BYTES = 1 << 20


class LoadingHouse:
    def __init__(self, num_blocks: int = 16, prefill_tok_s: float = 0.0) -> None:
        self.wires = Wires()
        self.clock = ManualClock()
        self.pool = BlockPool(num_blocks, 16)
        self.costs = TierCosts(16, BLOCK_BYTES)
        self.held: list[bool] = []
        self.loading = BlockLoader(
            pool=self.pool,
            costs=self.costs,
            clock=self.clock,
            find=self.wires.send,
            fetch=self.wires.send,
            release=self.wires.send,
            order_to=self.wires.order,
            prefill_tok_s=lambda: prefill_tok_s,
            num_spare_blocks=lambda: 0,
            hold_others=lambda wish, is_held: self.held.append(is_held),
            end=lambda wish, loaded: self.wires.ended.append((wish, loaded)),
        )

    def wish(self, keys: tuple[bytes, ...] = KEYS, num_held: int = 0) -> LoadNeed:
        return LoadNeed("r", 0, 0, "t", keys, num_held)

    def hold(self, keys: tuple[bytes, ...]) -> None:
        """The device has these cached."""
        block_ids = self.pool.allocate(len(keys))
        parent = ROOT
        for block_id, key in zip(block_ids, keys, strict=True):
            assert self.pool.register(block_id, parent, key, "t")
            parent = key
        self.pool.release(block_ids)

    def ask(self, wish: LoadNeed, *tiers: str) -> FetchRequest:
        self.loading.wanted(wish)
        find = self.wires.take(FindRequest)
        assert isinstance(find, FindRequest)
        assert find.keys == wish.keys[wish.num_held :]
        self.loading.found(FindAnswer(find.number, tiers))  # type: ignore[arg-type]
        fetch = self.wires.take(FetchRequest)
        assert isinstance(fetch, FetchRequest)
        return fetch

    def bring(self, number: int, first: int, count: int, *, is_last: bool) -> None:
        blocks = tuple(
            tuple(
                Source(rank, 4096 * (index * 2 + rank), shard, shard, 512, 0)
                for rank, shard in enumerate(HALVES)
            )
            for index in range(first, first + count)
        )
        self.loading.fetched(FetchedBlocks(number, b"a", first, blocks, ("dram",) * count, is_last))  # type: ignore[arg-type]

    def copy_all(self, bad: dict[int, tuple[int, ...]] | None = None) -> None:
        orders, self.wires.orders = self.wires.orders, []
        for rank, order in orders:
            self.loading.copied(rank, StoreGetDone(order.number, (bad or {}).get(rank, ()), 512, 0.001))


def test_what_was_loaded_is_found_like_any_cached_block() -> None:
    house = LoadingHouse()
    house.hold(KEYS[:2])
    fetch = house.ask(house.wish(num_held=2), *("dram",) * 6)
    assert fetch.keys == KEYS[2:]
    house.bring(fetch.number, 0, 4, is_last=False)
    house.bring(fetch.number, 4, 2, is_last=True)
    assert house.wires.ended == []
    house.copy_all()
    assert house.wires.ended == [(house.wish(num_held=2), {"dram": 6})]
    assert len(house.pool.match(KEYS)) == 8
    assert house.pool.num_references == house.loading.num_references == 0
    assert house.wires.take(FetchRelease) == FetchRelease(fetch.number)
    house.pool.check()


@pytest.mark.parametrize("is_begun", [False, True])
def test_what_a_purged_tenant_loads_is_not_used(is_begun: bool) -> None:
    house = LoadingHouse()
    if is_begun:
        fetch = house.ask(house.wish(), *("dram",) * 8)
        house.bring(fetch.number, 0, 4, is_last=False)
    else:
        house.loading.wanted(house.wish())
    house.loading.drop("u")
    assert house.wires.ended == []
    house.loading.drop("t")
    if is_begun:
        house.bring(fetch.number, 4, 4, is_last=True)
        house.copy_all()
    assert house.wires.ended == [(house.wish(), {})]
    assert house.pool.match(KEYS) == []
    assert house.pool.num_references == house.loading.num_references == 0
    house.pool.check()


def test_a_bad_record_ends_what_is_used_and_is_named_to_the_owner() -> None:
    house = LoadingHouse()
    fetch = house.ask(house.wish(), *("nvme",) * 8)
    house.bring(fetch.number, 0, 8, is_last=True)
    house.copy_all({1: (3,)})
    assert len(house.pool.match(KEYS)) == 3
    assert house.wires.take(FetchRelease) == FetchRelease(fetch.number, (4096 * 7,))
    assert house.loading.num_checksum_failures == 1
    assert house.pool.num_free == 16


def test_a_rank_that_could_not_copy_is_no_checksum_failure() -> None:
    house = LoadingHouse()
    fetch = house.ask(house.wish(KEYS[:1]), "dram")
    house.bring(fetch.number, 0, 1, is_last=True)
    for rank, order in house.wires.orders:
        house.loading.copied(rank, StoreGetDone(order.number, (0,), 0, 0.0, "no arena"))
    assert house.wires.ended == [(house.wish(KEYS[:1]), {})]
    assert house.loading.num_checksum_failures == 0
    assert house.wires.take(FetchRelease) == FetchRelease(fetch.number)


def test_an_owner_that_does_not_answer_holds_nobody_up() -> None:
    house = LoadingHouse()
    house.loading.wanted(house.wish())
    house.clock.advance(FIND_PATIENCE_S / 2)
    assert house.loading.tick()
    house.clock.advance(FIND_PATIENCE_S)
    assert not house.loading.tick()
    assert house.wires.ended == [(house.wish(), {})]
    find = house.wires.take(FindRequest)
    assert isinstance(find, FindRequest)
    house.loading.found(FindAnswer(find.number, ("dram",)))  # too late
    assert house.wires.sent == []


def test_what_came_before_an_owner_stalled_is_used() -> None:
    house = LoadingHouse()
    fetch = house.ask(house.wish(), *("nvme",) * 8)
    house.bring(fetch.number, 0, 3, is_last=False)
    house.copy_all()
    house.clock.advance(FETCH_PATIENCE_S + 1)
    # Perhaps it waits for a disk or another node: after a release no answer would come to tell that it lives.
    assert house.loading.tick()
    assert house.wires.ended == [(house.wish(), {"dram": 3})]
    house.bring(fetch.number, 3, 5, is_last=True)
    assert house.wires.orders == []
    assert house.pool.num_references == 0


def test_a_rank_that_does_not_copy_holds_up_blocks_but_no_request() -> None:
    house = LoadingHouse()
    fetch = house.ask(house.wish(), *("dram",) * 8)
    house.bring(fetch.number, 0, 8, is_last=True)
    house.clock.advance(FETCH_PATIENCE_S + 1)
    assert house.loading.tick()  # the owner has done its part
    assert house.wires.ended == [(house.wish(), {})]
    assert house.pool.num_references == 8
    house.copy_all()
    assert house.wires.ended == [(house.wish(), {})]
    assert len(house.pool.match(KEYS)) == 8
    assert house.pool.num_references == 0


def test_a_load_waits_for_room_and_takes_none_from_what_runs() -> None:
    house = LoadingHouse(num_blocks=8)
    running = house.pool.allocate(4)
    house.loading.wanted(house.wish(KEYS[:6]))
    find = house.wires.take(FindRequest)
    assert isinstance(find, FindRequest)
    house.loading.found(FindAnswer(find.number, ("dram",) * 6))
    assert house.wires.sent == []
    house.clock.advance(100)
    assert house.loading.tick()
    house.pool.release(running)
    house.loading.pump()
    assert isinstance(house.wires.take(FetchRequest), FetchRequest)


def test_a_load_that_lacks_room_for_long_has_those_behind_it_wait_too() -> None:
    house = LoadingHouse(num_blocks=8)
    running = house.pool.allocate(4)
    house.loading.wanted(house.wish(KEYS[:6]))
    find = house.wires.take(FindRequest)
    assert isinstance(find, FindRequest)
    house.loading.found(FindAnswer(find.number, ("dram",) * 6))
    house.loading.pump()
    assert house.held == []
    house.clock.advance(ROOM_PATIENCE_S + 0.1)
    house.loading.pump()
    house.loading.pump()
    assert house.held == [True]
    house.pool.release(running)
    house.loading.pump()
    assert house.held == [True, False]


@pytest.mark.parametrize(("num_held", "num_quarantined", "num_asked"), [(0, 0, 5), (2, 0, 3), (2, 2, 1)])
def test_of_a_chain_longer_than_the_pool_only_what_has_room_is_loaded(
    num_held: int, num_quarantined: int, num_asked: int
) -> None:
    house = LoadingHouse(num_blocks=6)
    house.pool.quarantine(house.pool.allocate(num_quarantined))
    house.hold(KEYS[:num_held])
    fetch = house.ask(house.wish(num_held=num_held), *("dram",) * (8 - num_held))
    assert fetch.keys == KEYS[num_held : num_held + num_asked]


def test_a_chain_whose_head_fills_the_pool_is_computed_on() -> None:
    house = LoadingHouse(num_blocks=4)
    house.hold(KEYS[:3])
    house.loading.wanted(house.wish(num_held=3))
    find = house.wires.take(FindRequest)
    assert isinstance(find, FindRequest)
    house.loading.found(FindAnswer(find.number, ("dram",) * 5))
    assert house.wires.ended == [(house.wish(num_held=3), {})]


def test_what_waits_for_room_ends_when_the_ranks_lose_the_store() -> None:
    house = LoadingHouse(num_blocks=8)
    house.pool.allocate(8)
    house.loading.wanted(house.wish(KEYS[:6]))
    find = house.wires.take(FindRequest)
    assert isinstance(find, FindRequest)
    house.loading.found(FindAnswer(find.number, ("dram",) * 6))
    house.loading.cannot_copy()
    assert house.wires.ended == [(house.wish(KEYS[:6]), {})]
    assert house.loading.is_idle


def test_a_prefix_that_was_evicted_meanwhile_ends_the_load() -> None:
    house = LoadingHouse(num_blocks=4)
    house.hold(KEYS[:2])
    house.loading.wanted(house.wish(KEYS[:4], num_held=2))
    house.pool.release(house.pool.allocate(4))
    find = house.wires.take(FindRequest)
    assert isinstance(find, FindRequest)
    house.loading.found(FindAnswer(find.number, ("dram", "dram")))
    assert house.wires.ended == [(house.wish(KEYS[:4], num_held=2), {})]


def test_nothing_is_asked_of_an_owner_that_is_away() -> None:
    house = LoadingHouse()
    house.wires.is_up = False
    house.loading.wanted(house.wish())
    assert house.wires.ended == [(house.wish(), {})]


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_every_load_ends_once_and_leaks_nothing(data: st.DataObject) -> None:
    house = LoadingHouse(num_blocks=24)
    num_wishes = data.draw(st.integers(1, 3))
    fetched: Counter[int] = Counter()
    for number in range(num_wishes):
        keys = tuple(bytes([16 * number + index + 1]) * 16 for index in range(6))
        house.loading.wanted(house.wish(keys))
    for _ in range(data.draw(st.integers(0, 25))):
        finds = [message for message in house.wires.sent if isinstance(message, FindRequest)]
        fetches = [message for message in house.wires.sent if isinstance(message, FetchRequest)]
        match data.draw(st.sampled_from(["find", "bring", "copy", "tick", "lost"])):
            case "find" if finds:
                find = data.draw(st.sampled_from(finds))
                tiers = ("dram",) * data.draw(st.integers(0, 6))
                house.loading.found(FindAnswer(find.number, tiers))  # type: ignore[arg-type]
            case "bring" if fetches:
                fetch = data.draw(st.sampled_from(fetches))
                left = len(fetch.keys) - fetched[fetch.number]
                count = data.draw(st.integers(0, left))
                first = fetched[fetch.number]
                fetched[fetch.number] += count
                is_last = count == left or data.draw(st.booleans())
                house.bring(fetch.number, first, count, is_last=is_last)
                if is_last:
                    house.wires.sent.remove(fetch)
            case "copy" if house.wires.orders:
                rank, order = house.wires.orders.pop(data.draw(st.integers(0, len(house.wires.orders) - 1)))
                assert isinstance(order, StoreGet)
                bad = data.draw(st.sets(st.integers(0, len(order.reads) - 1), max_size=1))
                house.loading.copied(rank, StoreGetDone(order.number, tuple(bad), 1, 0.1))
            case "tick":
                house.clock.advance(data.draw(st.sampled_from([0.1, FETCH_PATIENCE_S + 1])))
                house.loading.tick()
            case "lost":
                house.loading.lost()
                house.wires.sent.clear()
        house.pool.check()
        assert house.pool.num_references == house.loading.num_references
        copied_to = {read.block_id for _, order in house.wires.orders for read in order.reads}  # type: ignore[union-attr]
        assert all(map(house.pool.is_referenced, copied_to)), "a rank still copies into a block that is free"
    house.loading.lost()
    house.copy_all()
    assert house.loading.is_idle
    assert not house.loading.has_orders
    assert len(house.wires.ended) == num_wishes
    assert house.pool.num_references == 0
