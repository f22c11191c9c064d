"""Blocks on their way from the store, without an owner and without ranks: the test plays both."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from engine_fakes import HALVES, KEYS, FakeControl, Wires
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples

from kvtransfer.common.clock import ManualClock
from kvtransfer.common.group_shares import GroupShares
from kvtransfer.store.messages.engine_session import (
    FetchedBlocks,
    FetchRelease,
    FetchRequest,
    FindAnswer,
    FindRequest,
    Source,
)
from kvtransfer.store.messages.store_orders import StoreGet, StoreGetDone
from workers.scheduler.block_pool import ROOT, BlockPool
from workers.scheduler.sequence import HeldBack
from workers.scheduler.step import LoadNeed, StepRates
from workers.store_connector.announced import POOL_SHARE, AnnouncedPrompts
from workers.store_connector.block_loader import (
    FETCH_PATIENCE_S,
    FIND_PATIENCE_S,
    SPACE_PATIENCE_S,
    BlockLoader,
)
from workers.store_connector.engine_parts import EngineParts
from workers.store_connector.tier_costs import TierCosts

BLOCK_BYTES = 1 << 20
NO_LIMITS = GroupShares()

GATEWAY = "g", 1


class LoadingHarness:
    def __init__(
        self, num_blocks: int = 16, prefill_tok_s: float = 0.0, shares: GroupShares = NO_LIMITS
    ) -> None:
        self.wires = Wires()
        self.clock = ManualClock()
        self.pool = BlockPool(num_blocks, 16, shares)
        self.costs = TierCosts(16, BLOCK_BYTES)
        self.announced = AnnouncedPrompts()
        fake: Any = self.wires
        rates = StepRates(prefill_tok_s=prefill_tok_s)
        engine = EngineParts(self.pool, fake, fake, rates, FakeControl())
        self.loader = BlockLoader(engine, self.costs, fake, self.announced, self.clock)

    def need(self, keys: tuple[bytes, ...] = KEYS, num_held: int = 0) -> LoadNeed:
        return LoadNeed("r", 0, 0, "t", keys, num_held)

    def hold(self, keys: tuple[bytes, ...]) -> None:
        """The device has these cached."""
        block_ids = self.pool.allocate(len(keys), "t")
        parent = ROOT
        for block_id, key in zip(block_ids, keys, strict=True):
            assert self.pool.register(block_id, parent, key, "t")
            parent = key
        self.pool.release(block_ids)

    def ask(self, need: LoadNeed, *tiers: str) -> FetchRequest:
        self.loader.wanted(need)
        find = self.wires.take(FindRequest)
        assert isinstance(find, FindRequest)
        assert find.keys == need.keys[need.num_held :]
        self.loader.found(FindAnswer(find.number, tiers))  # type: ignore[arg-type]
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
        self.loader.fetched(FetchedBlocks(number, b"a", first, blocks, ("dram",) * count, is_last))  # type: ignore[arg-type]

    def copy_all(self, bad: dict[int, tuple[int, ...]] | None = None) -> None:
        orders, self.wires.orders = self.wires.orders, []
        for rank, order in orders:
            self.loader.copied(rank, StoreGetDone(order.number, (bad or {}).get(rank, ()), 512, 0.001))


def test_what_was_loaded_is_found_like_any_cached_block() -> None:
    harness = LoadingHarness()
    harness.hold(KEYS[:2])
    fetch = harness.ask(harness.need(num_held=2), *("dram",) * 6)
    assert fetch.keys == KEYS[2:]
    harness.bring(fetch.number, 0, 4, is_last=False)
    harness.bring(fetch.number, 4, 2, is_last=True)
    assert harness.wires.ended == []
    harness.copy_all()
    assert harness.wires.ended == [(harness.need(num_held=2), {"dram": 6})]
    assert len(harness.pool.match(KEYS)) == 8
    assert harness.pool.num_references == harness.loader.num_references == 0
    assert harness.wires.take(FetchRelease) == FetchRelease(fetch.number)
    harness.pool.check()


@pytest.mark.parametrize("is_begun", [False, True])
def test_what_a_purged_tenant_loads_is_not_used(is_begun: bool) -> None:
    harness = LoadingHarness()
    if is_begun:
        fetch = harness.ask(harness.need(), *("dram",) * 8)
        harness.bring(fetch.number, 0, 4, is_last=False)
    else:
        harness.loader.wanted(harness.need())
    harness.loader.drop("u")
    assert harness.wires.ended == []
    harness.loader.drop("t")
    if is_begun:
        harness.bring(fetch.number, 4, 4, is_last=True)
        harness.copy_all()
    assert harness.wires.ended == [(harness.need(), {})]
    assert harness.pool.match(KEYS) == []
    assert harness.pool.num_references == harness.loader.num_references == 0
    harness.pool.check()


def test_a_bad_record_ends_what_is_used_and_is_named_to_the_owner() -> None:
    harness = LoadingHarness()
    fetch = harness.ask(harness.need(), *("nvme",) * 8)
    harness.bring(fetch.number, 0, 8, is_last=True)
    harness.copy_all({1: (3,)})
    assert len(harness.pool.match(KEYS)) == 3
    assert harness.wires.take(FetchRelease) == FetchRelease(fetch.number, (4096 * 7,))
    assert harness.loader.num_checksum_failures == 1
    assert harness.pool.num_free == 16


def test_a_rank_that_could_not_copy_is_no_checksum_failure() -> None:
    harness = LoadingHarness()
    fetch = harness.ask(harness.need(KEYS[:1]), "dram")
    harness.bring(fetch.number, 0, 1, is_last=True)
    for rank, order in harness.wires.orders:
        harness.loader.copied(rank, StoreGetDone(order.number, (0,), 0, 0.0, "no arena"))
    assert harness.wires.ended == [(harness.need(KEYS[:1]), {})]
    assert harness.loader.num_checksum_failures == 0
    assert harness.wires.take(FetchRelease) == FetchRelease(fetch.number)


def test_an_owner_that_does_not_answer_holds_nobody_up() -> None:
    harness = LoadingHarness()
    harness.loader.wanted(harness.need())
    harness.clock.advance(FIND_PATIENCE_S / 2)
    assert harness.loader.tick()
    harness.clock.advance(FIND_PATIENCE_S)
    assert not harness.loader.tick()
    assert harness.wires.ended == [(harness.need(), {})]
    find = harness.wires.take(FindRequest)
    assert isinstance(find, FindRequest)
    harness.loader.found(FindAnswer(find.number, ("dram",)))  # too late
    assert harness.wires.sent == []


def test_what_came_before_an_owner_stalled_is_used() -> None:
    harness = LoadingHarness()
    fetch = harness.ask(harness.need(), *("nvme",) * 8)
    harness.bring(fetch.number, 0, 3, is_last=False)
    harness.copy_all()
    harness.clock.advance(FETCH_PATIENCE_S + 1)
    # Perhaps it waits for a disk or another node: after a release no answer would come to tell that it lives.
    assert harness.loader.tick()
    assert harness.wires.ended == [(harness.need(), {"dram": 3})]
    harness.bring(fetch.number, 3, 5, is_last=True)
    assert harness.wires.orders == []
    assert harness.pool.num_references == 0


def test_a_rank_that_does_not_copy_holds_up_blocks_but_no_request() -> None:
    harness = LoadingHarness()
    fetch = harness.ask(harness.need(), *("dram",) * 8)
    harness.bring(fetch.number, 0, 8, is_last=True)
    harness.clock.advance(FETCH_PATIENCE_S + 1)
    assert harness.loader.tick()  # the owner has done its part
    assert harness.wires.ended == [(harness.need(), {})]
    assert harness.pool.num_references == 8
    harness.copy_all()
    assert harness.wires.ended == [(harness.need(), {})]
    assert len(harness.pool.match(KEYS)) == 8
    assert harness.pool.num_references == 0


def test_a_load_waits_for_free_blocks_and_takes_none_from_what_runs() -> None:
    harness = LoadingHarness(num_blocks=8)
    running = harness.pool.allocate(4)
    harness.loader.wanted(harness.need(KEYS[:6]))
    find = harness.wires.take(FindRequest)
    assert isinstance(find, FindRequest)
    harness.loader.found(FindAnswer(find.number, ("dram",) * 6))
    assert harness.wires.sent == []
    harness.clock.advance(100)
    assert harness.loader.tick()
    harness.pool.release(running)
    harness.loader.pump()
    assert isinstance(harness.wires.take(FetchRequest), FetchRequest)


def test_a_load_that_lacks_blocks_for_long_has_those_behind_it_wait_too() -> None:
    harness = LoadingHarness(num_blocks=8)
    running = harness.pool.allocate(4)
    harness.loader.wanted(harness.need(KEYS[:6]))
    find = harness.wires.take(FindRequest)
    assert isinstance(find, FindRequest)
    harness.loader.found(FindAnswer(find.number, ("dram",) * 6))
    harness.loader.pump()
    assert harness.wires.held == []
    harness.clock.advance(SPACE_PATIENCE_S + 0.1)
    harness.loader.pump()
    harness.loader.pump()
    assert harness.wires.held == [HeldBack.EVERYBODY]
    harness.pool.release(running)
    harness.loader.pump()
    assert harness.wires.held == [HeldBack.EVERYBODY, HeldBack.NOBODY]


def test_a_load_that_lacks_its_share_holds_back_its_group_and_never_everybody() -> None:
    harness = LoadingHarness(shares=GroupShares(1.0, {"t": 0.5}))
    running = harness.pool.allocate(4, "t")
    harness.hold(KEYS[:2])
    harness.loader.wanted(harness.need(KEYS[:7], num_held=2))
    find = harness.wires.take(FindRequest)
    assert isinstance(find, FindRequest)
    harness.loader.found(FindAnswer(find.number, ("dram",) * 5))
    assert harness.wires.held == [HeldBack.GROUP]
    harness.clock.advance(SPACE_PATIENCE_S + 0.1)
    harness.loader.pump()
    assert harness.wires.held == [HeldBack.GROUP]
    others = harness.pool.allocate(10, "u")
    harness.pool.release(running)
    harness.loader.pump()
    assert harness.wires.held == [HeldBack.GROUP, HeldBack.EVERYBODY], "now the device is full"
    running = harness.pool.allocate(4, "t")
    harness.loader.pump()
    assert harness.wires.held[2:] == [HeldBack.GROUP], "or it would wait for those whom it holds back"
    harness.pool.release(running)
    harness.pool.release(others)
    harness.loader.pump()
    assert harness.wires.held[3:] == [HeldBack.NOBODY]
    assert harness.pool.num_used_by("t") == 7


def test_a_load_is_cut_to_the_share() -> None:
    harness = LoadingHarness(shares=GroupShares(0.5))
    harness.hold(KEYS[:2])
    fetch = harness.ask(harness.need(num_held=2), *("dram",) * 6)
    assert fetch.keys == KEYS[2:7], "and one block is left to compute into"


@pytest.mark.parametrize(("num_held", "num_quarantined", "num_asked"), [(0, 0, 5), (2, 0, 3), (2, 2, 1)])
def test_of_a_chain_longer_than_the_pool_only_what_fits_is_loaded(
    num_held: int, num_quarantined: int, num_asked: int
) -> None:
    harness = LoadingHarness(num_blocks=6)
    harness.pool.quarantine(harness.pool.allocate(num_quarantined))
    harness.hold(KEYS[:num_held])
    fetch = harness.ask(harness.need(num_held=num_held), *("dram",) * (8 - num_held))
    assert fetch.keys == KEYS[num_held : num_held + num_asked]


def test_a_chain_whose_head_fills_the_pool_is_computed_on() -> None:
    harness = LoadingHarness(num_blocks=4)
    harness.hold(KEYS[:3])
    harness.loader.wanted(harness.need(num_held=3))
    find = harness.wires.take(FindRequest)
    assert isinstance(find, FindRequest)
    harness.loader.found(FindAnswer(find.number, ("dram",) * 5))
    assert harness.wires.ended == [(harness.need(num_held=3), {})]


def test_what_waits_for_free_blocks_ends_when_the_ranks_lose_the_store() -> None:
    harness = LoadingHarness(num_blocks=8)
    harness.pool.allocate(8)
    harness.loader.wanted(harness.need(KEYS[:6]))
    find = harness.wires.take(FindRequest)
    assert isinstance(find, FindRequest)
    harness.loader.found(FindAnswer(find.number, ("dram",) * 6))
    harness.loader.cannot_copy()
    assert harness.wires.ended == [(harness.need(KEYS[:6]), {})]
    assert harness.loader.is_idle


def test_a_prefix_that_was_evicted_meanwhile_ends_the_load() -> None:
    harness = LoadingHarness(num_blocks=4)
    harness.hold(KEYS[:2])
    harness.loader.wanted(harness.need(KEYS[:4], num_held=2))
    harness.pool.release(harness.pool.allocate(4))
    find = harness.wires.take(FindRequest)
    assert isinstance(find, FindRequest)
    harness.loader.found(FindAnswer(find.number, ("dram", "dram")))
    assert harness.wires.ended == [(harness.need(KEYS[:4], num_held=2), {})]


def test_nothing_is_asked_of_an_owner_that_is_away() -> None:
    harness = LoadingHarness()
    harness.wires.is_up = False
    harness.loader.wanted(harness.need())
    assert harness.wires.ended == [(harness.need(), {})]


# ----------------------------------------------------------------------------------------------
# Early loads, for requests that were announced and have not come.


def early(
    harness: LoadingHarness, *tiers: str, keys: tuple[bytes, ...] = KEYS, num_held: int = 0
) -> LoadNeed:
    """Announce "r", and let its blocks be found."""
    assert harness.announced.add(GATEWAY, "r", "t", keys, harness.clock.now())
    need = LoadNeed("r", 0, 0, "t", keys, num_held)
    harness.loader.begin_early(need)
    find = harness.wires.take(FindRequest)
    assert isinstance(find, FindRequest)
    harness.loader.found(FindAnswer(find.number, tiers))  # type: ignore[arg-type]
    return need


def fetching(harness: LoadingHarness) -> FetchRequest:
    fetch = harness.wires.take(FetchRequest)
    assert isinstance(fetch, FetchRequest)
    return fetch


def submitted_need(num_held: int = 0, keys: tuple[bytes, ...] = KEYS) -> LoadNeed:
    return LoadNeed("r", 1, 3, "t", keys, num_held)


def test_an_announced_prompt_is_on_the_device_when_its_request_comes() -> None:
    harness = LoadingHarness(num_blocks=32)
    early(harness, *("dram",) * 8)
    harness.bring(fetching(harness).number, 0, 8, is_last=True)
    harness.copy_all()
    assert len(harness.pool.match(KEYS)) == 8
    assert harness.pool.num_references == harness.loader.num_references == 0
    assert harness.announced.num_loaded_blocks == 8
    assert harness.wires.ended == [], "no sequence has waited for it"
    harness.loader.submitted("r", 1, 3)
    prompt = harness.announced.forget("r")
    assert prompt is not None
    assert prompt.num_loaded_blocks(8) == {"dram": 8}


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_request_that_comes_meanwhile_waits_for_its_early_load(is_asked: bool) -> None:
    harness = LoadingHarness(num_blocks=32)
    early(harness, *("dram",) * 8)
    fetch = fetching(harness)
    harness.bring(fetch.number, 0, 4, is_last=False)
    harness.announced.forget("r")
    harness.loader.submitted("r", 1, 3)
    if is_asked:
        harness.loader.wanted(submitted_need())
        assert not any(isinstance(it, FindRequest) for it in harness.wires.sent), "nothing is loaded twice"
    harness.bring(fetch.number, 4, 4, is_last=True)
    harness.copy_all()
    assert harness.wires.ended == [(submitted_need(), {"dram": 8})]
    assert harness.announced.num_loaded_blocks == 0
    assert harness.pool.num_references == 0


def test_other_keys_than_were_announced_are_loaded_on_their_own() -> None:
    harness = LoadingHarness(num_blocks=32)
    early(harness, *("dram",) * 4, keys=KEYS[:4])
    harness.loader.submitted("r", 1, 3)
    harness.loader.wanted(submitted_need(keys=KEYS[4:]))
    assert isinstance(harness.wires.take(FindRequest), FindRequest)


def test_an_early_load_leaves_blocks_to_all_that_wait_here_and_holds_up_nobody() -> None:
    harness = LoadingHarness(num_blocks=32)
    harness.wires.counts.num_awaited = 26
    early(harness, *("dram",) * 8)
    harness.clock.advance(SPACE_PATIENCE_S + 1)
    harness.loader.pump()
    assert not any(isinstance(it, FetchRequest) for it in harness.wires.sent)
    assert harness.wires.held == []
    harness.loader.submitted("r", 1, 3)  # now it waits as the others do
    harness.loader.wanted(submitted_need())
    harness.loader.pump()
    assert len(fetching(harness).keys) == 8


def test_early_loads_take_a_part_of_the_device() -> None:
    harness = LoadingHarness(num_blocks=6 * POOL_SHARE)
    harness.announced.add(GATEWAY, "other", "u", KEYS, 0.0)
    harness.announced.begin("other", 0, 2)
    early(harness, *("dram",) * 8)
    assert len(fetching(harness).keys) == 4, "of six"


def test_early_loads_take_a_part_of_the_group_s_share_and_of_what_is_left_of_it() -> None:
    harness = LoadingHarness(num_blocks=64, shares=GroupShares(0.5))
    early(harness, *("dram",) * 8)
    assert len(fetching(harness).keys) == 8, "32 blocks are its share"
    harness = LoadingHarness(num_blocks=32, shares=GroupShares(0.5))
    running = harness.pool.allocate(13, "t")
    early(harness, *("dram",) * 8)
    assert not any(isinstance(it, FetchRequest) for it in harness.wires.sent), "3 of 16 are left"
    assert harness.wires.held == []
    harness.pool.release(running)
    harness.loader.pump()
    assert len(fetching(harness).keys) == 4, "a quarter of 16"


def test_an_early_load_leaves_its_group_s_share_to_those_of_it_that_wait_here() -> None:
    harness = LoadingHarness(num_blocks=128, shares=GroupShares(0.25))
    harness.wires.counts.num_awaited = 26
    early(harness, *("dram",) * 8)
    assert not any(isinstance(it, FetchRequest) for it in harness.wires.sent), "26 of 32 are awaited"
    harness.wires.counts.num_awaited = 24
    harness.loader.pump()
    assert len(fetching(harness).keys) == 8


def test_what_is_withdrawn_before_it_moves_does_not() -> None:
    harness = LoadingHarness(num_blocks=32)
    harness.wires.counts.num_awaited = 32
    early(harness, *("dram",) * 8)
    harness.announced.forget("r")
    harness.loader.withdraw("r")
    assert harness.loader.is_idle
    harness.wires.counts.num_awaited = 0
    early(harness, *("dram",) * 8)
    fetch = fetching(harness)
    harness.announced.forget("r")
    harness.loader.withdraw("r")
    assert not harness.loader.is_idle, "ranks may be copying"
    harness.announced.add(GATEWAY, "r", "t", KEYS, 0.0)
    harness.loader.begin_early(LoadNeed("r", 0, 0, "t", KEYS, 0))  # announced again
    harness.bring(fetch.number, 0, 8, is_last=True)
    harness.copy_all()
    assert harness.loader.is_idle
    assert len(harness.pool.match(KEYS)) == 8


@given(st.data())
@settings(deadline=None, max_examples=examples(150))
def test_every_load_ends_once_and_leaks_nothing(data: st.DataObject) -> None:
    harness = LoadingHarness(num_blocks=24)
    num_needs = data.draw(st.integers(1, 3))
    fetched: Counter[int] = Counter()
    needs: list[LoadNeed] = []
    announced: list[LoadNeed] = []
    for number in range(num_needs):
        keys = tuple(bytes([16 * number + index + 1]) * 16 for index in range(6))
        needs.append(LoadNeed(f"r{number}", 1, 0, "t", keys, 0))
        if data.draw(st.booleans()):
            announced.append(needs[-1])
            harness.announced.add(GATEWAY, f"r{number}", "t", keys, 0.0)
            harness.loader.begin_early(LoadNeed(f"r{number}", 0, 0, "t", keys, 0))
        else:
            harness.loader.wanted(needs[-1])
    for _ in range(data.draw(st.integers(0, 25))):
        finds = [message for message in harness.wires.sent if isinstance(message, FindRequest)]
        fetches = [message for message in harness.wires.sent if isinstance(message, FetchRequest)]
        match data.draw(st.sampled_from(["find", "bring", "copy", "tick", "lost", "submitted", "withdraw"])):
            case "find" if finds:
                find = data.draw(st.sampled_from(finds))
                tiers = ("dram",) * data.draw(st.integers(0, 6))
                harness.loader.found(FindAnswer(find.number, tiers))  # type: ignore[arg-type]
            case "bring" if fetches:
                fetch = data.draw(st.sampled_from(fetches))
                left = len(fetch.keys) - fetched[fetch.number]
                count = data.draw(st.integers(0, left))
                first = fetched[fetch.number]
                fetched[fetch.number] += count
                is_last = count == left or data.draw(st.booleans())
                harness.bring(fetch.number, first, count, is_last=is_last)
                if is_last:
                    harness.wires.sent.remove(fetch)
            case "copy" if harness.wires.orders:
                rank, order = harness.wires.orders.pop(
                    data.draw(st.integers(0, len(harness.wires.orders) - 1))
                )
                assert isinstance(order, StoreGet)
                bad = data.draw(st.sets(st.integers(0, len(order.reads) - 1), max_size=1))
                harness.loader.copied(rank, StoreGetDone(order.number, tuple(bad), 1, 0.1))
            case "tick":
                harness.clock.advance(data.draw(st.sampled_from([0.1, FETCH_PATIENCE_S + 1])))
                harness.loader.tick()
            case "lost":
                harness.loader.lost()
                harness.wires.sent.clear()
            case "submitted" if announced:
                need = announced.pop()
                harness.announced.forget(need.request_id)
                harness.loader.submitted(need.request_id, 1, 0)
                harness.loader.wanted(need)
            case "withdraw" if announced:
                need = data.draw(st.sampled_from(announced))
                harness.loader.withdraw(need.request_id)
        harness.pool.check()
        assert harness.pool.num_references == harness.loader.num_references
        copied_to = {read.block_id for _, order in harness.wires.orders for read in order.reads}  # type: ignore[union-attr]
        assert all(map(harness.pool.is_referenced, copied_to)), (
            "a rank still copies into a block that is free"
        )
    for need in announced:
        harness.loader.submitted(need.request_id, 1, 0)
        harness.loader.wanted(need)
    harness.loader.lost()
    harness.copy_all()
    assert harness.loader.is_idle
    assert not harness.loader.has_orders
    assert {need.request_id: need for need, _ in harness.wires.ended} == {it.request_id: it for it in needs}
    assert len(harness.wires.ended) == num_needs
    assert harness.pool.num_references == 0
