"""Finished blocks on their way into the store; what loading costs; what is told of the tiers."""

from __future__ import annotations

from typing import Any

import pytest
from engine_fakes import HALVES, KEYS, Wires

from kvtransfer.kv_events import BlocksRemoved, BlocksStored
from kvtransfer.store.messages.engine_session import (
    HELD,
    REFUSED,
    PutCommit,
    PutGrant,
    PutRequest,
    TierEvents,
)
from kvtransfer.store.messages.store_orders import StorePutDone
from workers.scheduler.block_pool import ROOT, BlockPool
from workers.scheduler.step import FinishedBlock
from workers.store_connector.block_saver import BlockSaver
from workers.store_connector.tier_costs import TierCosts
from workers.store_connector.tier_view import TierView


class SavingHarness:
    def __init__(self, num_blocks: int = 256) -> None:
        self.wires = Wires()
        self.pool = BlockPool(num_blocks, 16)
        fake: Any = self.wires
        shards = {0: (HALVES[0], 512), 1: (HALVES[1], 512), 2: (HALVES[0], 512)}
        self.saver = BlockSaver(self.pool, shards, 8, fake, fake)

    def finish(self, *keys: bytes, chain: bytes = KEYS[0], group: str = "t") -> list[int]:
        block_ids = self.pool.allocate(len(keys))
        parent = ROOT
        blocks = []
        for block_id, key in zip(block_ids, keys, strict=True):
            self.pool.register(block_id, parent, key, group)
            blocks.append(FinishedBlock(key, parent, chain, group))
            parent = key
        self.pool.release(block_ids)
        self.saver.finished(blocks)
        return block_ids

    def request(self) -> PutRequest:
        self.saver.pump()
        request = self.wires.take(PutRequest)
        assert isinstance(request, PutRequest)
        return request


def test_a_finished_block_is_committed_with_the_sums_of_its_ranks() -> None:
    harness = SavingHarness()
    block_ids = harness.finish(*KEYS[:2])
    request = harness.request()
    assert [(record.key, record.shard) for record in request.records] == [
        (key, shard) for key in KEYS[:2] for shard in HALVES
    ]  # the copy of a KV head that rank 2 holds is not written again
    assert harness.saver.num_references == 2
    harness.saver.granted(PutGrant(request.number, b"a", (0, 4096, HELD, 8192)))
    orders = dict(harness.wires.orders)
    assert [(copy.block_id, copy.offset) for copy in orders[0].copies] == [(block_ids[0], 0)]  # type: ignore[union-attr]
    assert [(copy.block_id, copy.offset) for copy in orders[1].copies] == [  # type: ignore[union-attr]
        (block_ids[0], 4096),
        (block_ids[1], 8192),
    ]
    harness.saver.copied(1, StorePutDone(request.number, (11, 12), 1024, 0.1))
    assert harness.wires.sent == []
    harness.saver.copied(0, StorePutDone(request.number, (10,), 512, 0.1))
    assert harness.wires.take(PutCommit) == PutCommit(((0, 10), (4096, 11), (8192, 12)))
    assert harness.saver.num_stored == 2
    assert harness.saver.is_idle
    assert harness.pool.num_references == 0


def test_what_a_rank_could_not_write_is_abandoned() -> None:
    harness = SavingHarness()
    harness.finish(KEYS[0])
    request = harness.request()
    harness.saver.granted(PutGrant(request.number, b"a", (0, 4096)))
    harness.saver.copied(0, StorePutDone(request.number, (), 0, 0.0, "no arena"))
    harness.saver.copied(1, StorePutDone(request.number, (11,), 512, 0.1))
    assert harness.wires.take(PutCommit) == PutCommit(((4096, 11),), (0,))
    assert harness.saver.num_unstored == {"failed": 1}


@pytest.mark.parametrize("offset", [HELD, REFUSED])
def test_without_capacity_or_need_nothing_is_ordered(offset: int) -> None:
    harness = SavingHarness()
    harness.finish(KEYS[0])
    request = harness.request()
    harness.saver.granted(PutGrant(request.number, b"a", (offset, offset)))
    assert harness.wires.orders == []
    assert harness.saver.is_idle
    assert harness.saver.num_unstored == ({"refused": 1} if offset == REFUSED else {})
    assert harness.pool.num_references == 0


def test_a_full_queue_drops_and_an_evicted_block_is_passed_over() -> None:
    harness = SavingHarness(num_blocks=64)
    harness.finish(*(bytes([index]) * 16 for index in range(1, 11)))
    assert harness.saver.num_unstored == {"queue": 2}
    harness.pool.release(harness.pool.allocate(64))
    harness.saver.pump()
    assert harness.wires.sent == []
    assert harness.saver.num_unstored == {"queue": 2, "evicted": 8}


def test_a_block_behind_one_that_was_moved_out_is_stored_all_the_same() -> None:
    harness = SavingHarness()
    (block_id,) = harness.pool.allocate(1)
    assert not harness.pool.register(block_id, KEYS[0], KEYS[1], "t")
    assert harness.pool.remember(block_id, KEYS[1])
    harness.saver.finished([FinishedBlock(KEYS[1], KEYS[0], KEYS[0], "t")])
    assert [record.key for record in harness.request().records] == [KEYS[1]] * 2
    assert harness.pool.is_shared(block_id), "it could be moved out while ranks copy it"


def test_what_a_purged_tenant_has_not_stored_yet_is_never_stored() -> None:
    harness = SavingHarness()
    harness.finish(KEYS[0])
    harness.finish(KEYS[1], chain=KEYS[1])
    harness.finish(KEYS[2], chain=KEYS[2], group="u")
    copied, asked = harness.request(), harness.request()
    harness.finish(KEYS[3], chain=KEYS[3])
    harness.saver.granted(PutGrant(copied.number, b"a", (0, 4096)))
    harness.saver.drop("t")
    assert harness.saver.num_unstored == {"purged": 1}
    for rank in (0, 1):
        harness.saver.copied(rank, StorePutDone(copied.number, (1,), 512, 0.1))
    assert harness.wires.take(PutCommit) == PutCommit((), (0, 4096)), "it was being copied"
    harness.saver.granted(PutGrant(asked.number, b"a", (8192, HELD)))
    assert harness.wires.take(PutCommit) == PutCommit((), (8192,)), "space was requested; the other was there"
    assert harness.wires.orders[2:] == []
    assert harness.request().sharing_group == "u"
    harness.saver.pump()
    assert not any(isinstance(message, PutRequest) for message in harness.wires.sent)


def test_a_request_holds_blocks_of_one_chain_and_tenant() -> None:
    harness = SavingHarness()
    harness.finish(KEYS[0])
    harness.finish(KEYS[1], chain=KEYS[1])
    harness.finish(KEYS[2], chain=KEYS[1], group="u")
    harness.saver.pump()
    requests = [message for message in harness.wires.sent if isinstance(message, PutRequest)]
    assert [(request.chain, request.sharing_group) for request in requests] == [
        (KEYS[0], "t"),
        (KEYS[1], "t"),
    ]


def test_when_the_owner_is_lost_only_copies_under_way_hold_blocks() -> None:
    harness = SavingHarness()
    harness.finish(KEYS[0])
    harness.finish(KEYS[1], chain=KEYS[1])
    first, _ = harness.request(), harness.request()
    harness.saver.granted(PutGrant(first.number, b"a", (0, 4096)))
    harness.saver.lost()
    assert harness.saver.num_references == 1
    assert harness.saver.has_orders
    harness.wires.is_up = False
    for rank in (0, 1):
        harness.saver.copied(rank, StorePutDone(first.number, (1,), 512, 0.1))
    assert harness.saver.num_references == harness.pool.num_references == 0


# ------------------------------------------------------------------------------------------ costs and view


def test_a_block_is_loaded_only_where_that_is_faster_than_computing_it() -> None:
    costs = TierCosts(16, 1_000_000)
    costs.measured({"dram": 10}, 0.16)  # 1,000 tokens a second
    costs.measured({"nvme": 10}, 1.6)  # 100
    assert costs.num_worth_loading(("dram",) * 4, 500) == 4
    assert costs.num_worth_loading(("dram",) * 4, 2000) == 0
    assert costs.num_worth_loading(("dram", "dram", "nvme"), 500) == 2
    # Slow blocks are loaded where fast ones behind them make up for it.
    assert costs.num_worth_loading(("nvme", *("dram",) * 9), 500) == 10
    assert costs.num_worth_loading(("nvme",), 0) == 1


def test_a_bad_measurement_is_forgotten() -> None:
    costs = TierCosts(16, 1_000_000)
    costs.measured({"dram": 1}, 16.0)
    tries = iter(range(1000))
    assert any(costs.num_worth_loading(("dram",), 100.0) for _ in tries)
    assert next(tries) > 5


def test_a_rate_that_is_only_assumed_does_not_decide_for_ever() -> None:
    costs = TierCosts(block_tokens=16, block_bytes=16 << 17)
    assumed = costs.tok_s("dram")
    tries = next(number for number in range(100) if costs.num_worth_loading(["dram"], 1.5 * assumed))
    assert 5 < tries < 20, "the tier is tried, and measured, after some prompts that were computed"
    assert costs.measured_tok_s == {}
    costs.measured({"dram": 1}, 16 / assumed)
    assert costs.tok_s("dram") == pytest.approx(assumed)


def test_the_owner_s_rate_stands_in_until_a_load_was_measured() -> None:
    costs = TierCosts(16, 1_000_000)
    costs.set_store_rates({"nvme": 2.0})
    assert costs.tok_s("nvme") == 2.0e9 / 1_000_000 * 16
    costs.measured({"nvme": 1, "dram": 1}, 1.0)  # of two tiers: says nothing of either
    assert costs.measured_tok_s == {}


def test_the_view_tells_net_changes_and_starts_over_with_a_new_owner() -> None:
    view = TierView()
    view.apply(
        TierEvents((BlocksStored(ROOT, KEYS[:3], "dram"), BlocksStored(KEYS[2], KEYS[3:4], "nvme")), ())
    )
    stored, removed = view.take_events()
    assert stored == (BlocksStored(ROOT, KEYS[:3], "dram"), BlocksStored(KEYS[2], KEYS[3:4], "nvme"))
    assert removed == ()
    view.apply(TierEvents((BlocksStored(KEYS[1], KEYS[2:3], "nvme"),), KEYS[3:4]))
    view.apply(TierEvents((BlocksStored(KEYS[2], KEYS[3:4], "dram"),), ()))
    view.restart()
    view.apply(TierEvents((BlocksStored(ROOT, KEYS[:1], "nvme"),), ()))
    stored, removed = view.take_events()
    assert stored == (BlocksStored(ROOT, KEYS[:1], "nvme"),)
    assert [set(each.keys) for each in removed] == [set(KEYS[1:4])]
    assert isinstance(removed[0], BlocksRemoved)
    assert removed[0].tier == "store"
    assert view.snapshot() == (BlocksStored(ROOT, KEYS[:1], "nvme"),)
    assert view.take_events() == ((), ())
