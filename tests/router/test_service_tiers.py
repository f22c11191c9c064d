"""How blocks in the store of a replica's node weigh in a decision."""

from __future__ import annotations

import pytest
from router_harness import BLOCK_TOKENS, RouterHarness, keys_of


def test_a_prefix_in_the_store_attracts_less_than_on_the_device_and_more_than_none() -> None:
    keys = keys_of("x", 50)
    harness = RouterHarness("p0", "p1", "p2", "d0")
    harness.store("p0", keys, "nvme")
    harness.store("p1", keys, "dram")
    costs = {item.replica_id: item for item in harness.route(keys).candidates if item.side == "prefill"}
    assert costs["p1"].load_s == pytest.approx(80e-4), "not measured: a tenth"
    assert costs["p0"].load_s == pytest.approx(400e-4), "not measured: a half"
    assert costs["p1"].cost_s < costs["p0"].cost_s < costs["p2"].cost_s
    harness = RouterHarness("p0", "p1", "p2", "d0")
    harness.store("p0", keys, "nvme")
    assert harness.route(keys).prefill == "p0"
    harness = RouterHarness("p0", "p1", "d0")
    harness.store("p0", keys, "dram")
    harness.store("p1", keys)
    assert harness.route(keys).prefill == "p1"


def test_a_prefix_in_the_store_is_priced_at_its_measured_rate() -> None:
    keys = keys_of("x", 50)
    for load_tok_s, prefill in ((9_000.0, "p1"), (1e6, "p0")):
        harness = RouterHarness("p0", "p1", "d0")
        harness.store("p0", keys, "nvme")
        harness.load("p0", backlog=200, load_tok_s={"nvme": load_tok_s})
        decision = harness.route(keys)
        assert decision.prefill == prefill
        assert decision.prefill_cached_tokens == (800 if prefill == "p0" else 0)


def test_a_decode_replica_beside_a_stored_prefix_serves_alone() -> None:
    """With all but a block in DRAM at a fast rate, nothing is left for the prefill pool to do."""
    keys = keys_of("x", 60)
    harness = RouterHarness("p0", "d0", "d1")
    harness.load("d0", running=50)
    harness.load("d1", running=50, load_tok_s={"dram": 1e6})
    harness.store("d1", keys, "dram")
    decision = harness.route(keys, num_tokens=60 * BLOCK_TOKENS + 10)
    assert (decision.prefill, decision.decode) == ("", "d1")
    assert (decision.prefill_cached_tokens, decision.decode_cached_tokens) == (960, 0)
    assert harness.route(keys_of("y", 60), num_tokens=970).prefill == "p0"


def test_what_is_loaded_is_no_backlog_and_needs_space() -> None:
    keys = keys_of("x", 50)
    harness = RouterHarness("p0", "d0")
    harness.store("p0", keys, "dram")
    harness.route(keys)
    later = [item for item in harness.route((), num_tokens=1000).candidates if item.side == "prefill"]
    assert [item.queue_s for item in later] == [pytest.approx(0.02)]


def test_the_replica_with_most_of_a_chain_counts() -> None:
    """On its device and in its store together."""
    keys = keys_of("x", 50)
    harness = RouterHarness("p0", "p1", "d0")
    assert harness.router.num_cached_blocks(keys) == 0
    harness.store("p0", keys[:20])
    harness.store("p1", keys[:10])
    harness.store("p1", keys[10:30], "dram")
    assert harness.router.num_cached_blocks(keys) == 30
    assert harness.router.num_cached_blocks(keys_of("y", 50)) == 0
