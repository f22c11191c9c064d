"""Tiers of the store: how long they keep what requests leave, against a cache that is simulated, and which
sizes pay."""

from __future__ import annotations

import heapq
import json
import random
from collections import OrderedDict
from typing import Any

import msgspec
import pytest
import yaml
from chart_harness import objects, only
from typer.testing import CliRunner

from cluster.cli.main import cli
from cluster.config import parse_config
from cluster.planning.device_profile import DeviceProfile, device_profile
from cluster.planning.plan import ClusterPlanner, Plan
from cluster.planning.plan_lines import plan_lines
from cluster.planning.planned_model import planned_model
from cluster.planning.replica_rate import PlannedLoad
from cluster.planning.store_tiers import BLOCK_TOKENS, NodeStorage, PrefixReuse, TierPlan
from cluster.planning.tier_sizer import TierSizer, plans_with_tiers

LLAMA = planned_model("llama-3.1-8b", "auto", "auto")
H100 = device_profile("H100")
LOAD = PlannedLoad(2048, 256, ttft_s=1.0, tpot_s=0.04)
REUSE = PrefixReuse(0.6, 300.0)
RATE = 20.0


def planner(profile: DeviceProfile = H100, price: float = 2.5) -> ClusterPlanner:
    return ClusterPlanner(LLAMA, [profile], LOAD, {profile.name: price})


PLAN: Plan = planner().for_rate(RATE)[0]


def tiers_of(reuse: PrefixReuse, profile: DeviceProfile = H100, **most: float) -> TierPlan:
    pools = tuple(pool._replace(profile=profile) for pool in PLAN.pools)
    return TierSizer(PLAN._replace(pools=pools), RATE, reuse, NodeStorage(**most)).plan()


def simulated_hits(size_tokens: float, num_requests: int) -> float:
    """Return the share of the prompts' tokens that a cache of this size finds, which evicts what was not used
    for longest. Conversations go on after gaps that are exponential; those that end begin anew."""
    source, now = random.Random(5), 0.0
    load, tokens_of_turn = LOAD, LOAD.input_tokens + LOAD.output_tokens
    returning = REUSE.hit_rate * load.input_tokens
    # A turn's tokens come back in the next one with this chance.
    chance = returning / tokens_of_turn
    waiting: list[tuple[float, int]] = []
    cache: OrderedDict[int, None] = OrderedDict()
    num_found = 0
    for number in range(num_requests):
        now += source.expovariate(RATE)
        while waiting and waiting[0][0] <= now:
            at, returned = heapq.heappop(waiting)
            if returned in cache:
                cache.move_to_end(returned)
                num_found += number > num_requests // 2
            else:
                cache[returned] = None
            if source.random() < chance:
                heapq.heappush(waiting, (at + source.expovariate(1 / REUSE.gap_s), returned))
        # So many turns begin that, with those that come back, there are `RATE` a second.
        if source.random() < 1 - chance:
            cache[number] = None
            if source.random() < chance:
                heapq.heappush(waiting, (now + source.expovariate(1 / REUSE.gap_s), number))
        while len(cache) * tokens_of_turn > size_tokens:
            cache.popitem(last=False)
    return num_found * tokens_of_turn / (num_requests - num_requests // 2) / load.input_tokens


@pytest.mark.parametrize("kept_s", [100.0, 300.0, 900.0])
def test_what_a_size_keeps_is_what_a_cache_finds(kept_s: float) -> None:
    sizer = TierSizer(PLAN, RATE, REUSE)
    size_tokens = sizer.held_bytes(kept_s) / 131_072
    assert simulated_hits(size_tokens, 60_000) == pytest.approx(REUSE.found(kept_s), rel=0.05)


def test_a_block_of_each_tier_takes_its_bytes_over_its_rate() -> None:
    tiers = tiers_of(REUSE)
    name_to_tier = {tier.name: tier for tier in tiers.tiers}
    block_bytes = BLOCK_TOKENS * 131_072
    assert name_to_tier["dram"].block_load_s == pytest.approx(block_bytes / 47.5e9)
    assert name_to_tier["nvme"].block_load_s == pytest.approx(block_bytes / 6e9)
    # Of 2048 tokens, one at a time: benchmarks/README.md has 97.3 ms for 4096.
    assert tiers.block_s == pytest.approx(97.3e-3 * BLOCK_TOKENS / 4096, rel=0.05)


def test_a_tier_that_is_slower_than_computing_does_not_pay() -> None:
    slow = msgspec.structs.replace(H100, nvme_gb_s=5.0)
    *_, nvme = tiers_of(REUSE, slow).tiers
    assert nvme.num_bytes == nvme.hit_rate == 0.0
    assert nvme.why == "a block is computed sooner than loaded"


def test_no_tier_is_larger_than_finds_what_comes_back_or_than_the_nodes_have() -> None:
    device, dram, nvme = tiers_of(REUSE, dram_gb=100, nvme_gb=10_000).tiers
    assert dram.num_bytes == 100e9
    assert device.kept_s < dram.kept_s < nvme.kept_s == pytest.approx(3 * REUSE.gap_s)
    found = device.hit_rate + dram.hit_rate + nvme.hit_rate
    assert found == pytest.approx(0.95 * REUSE.hit_rate, rel=0.01)
    _, none, all_of_it = tiers_of(REUSE, dram_gb=0, nvme_gb=10_000).tiers
    assert none.num_bytes == 0.0
    assert all_of_it.num_bytes == nvme.num_bytes


def test_no_more_is_found_than_can_be_read() -> None:
    """Disks that read a block in little less than a replica computes one are busy with few of the hits."""
    slow = msgspec.structs.replace(H100, nvme_gb_s=5.8)
    _, _, fast_nvme = tiers_of(REUSE, H100, dram_gb=0).tiers
    pools = tuple(pool._replace(profile=slow) for pool in PLAN.pools)
    sizer = TierSizer(PLAN._replace(pools=pools), 10 * RATE, REUSE, NodeStorage(0, 100_000))
    _, _, nvme = sizer.plan().tiers
    read_gb_s = nvme.hit_rate * 10 * RATE * LOAD.input_tokens * 131_072 / 1e9
    assert read_gb_s == pytest.approx(0.8 * 5.8)
    assert nvme.hit_rate < fast_nvme.hit_rate
    assert nvme.why.endswith("; finds no more than can be read")


def test_the_store_keeps_all_tokens_of_layers_with_a_window() -> None:
    model = planned_model("gpt-oss-20b", "auto", "auto")
    assert model.stored_token_bytes == 2 * 24 * 8 * 64 * 2
    assert LLAMA.stored_token_bytes == 131_072
    plan = ClusterPlanner(model, [H100], LOAD, {}).for_rate(RATE)[0]
    sizer = TierSizer(plan, RATE, REUSE)
    assert sizer.held_bytes(300.0) == pytest.approx(
        TierSizer(PLAN, RATE, REUSE).held_bytes(300.0) * model.stored_token_bytes / 131_072
    )
    # Of these only half of the layers are loaded whole.
    dram = sizer.plan().tiers[1]
    assert dram.block_load_s == pytest.approx(BLOCK_TOKENS * model.stored_token_bytes / 2 / 47.5e9)
    assert any("all layers keep all tokens" in line.formula for line in plan_lines(plan, RATE))


def test_a_dear_tier_is_smaller() -> None:
    """Its last GB saves what it costs."""
    reuse = REUSE._replace(dram_price=0.0003)
    cheap, dear = tiers_of(REUSE, dram_gb=10_000), tiers_of(reuse, dram_gb=10_000)
    size = dear.tiers[1].num_bytes
    assert 0 < size < cheap.tiers[1].num_bytes
    assert dear.token_price is not None
    sizer = TierSizer(PLAN, RATE, reuse)
    kept_s = dear.tiers[1].kept_s
    more_gb = (sizer.held_bytes(kept_s + 1) - sizer.held_bytes(kept_s)) / 1e9
    saved = (reuse.found(kept_s + 1) - reuse.found(kept_s)) * RATE * LOAD.input_tokens
    assert 3600 * saved * dear.token_price == pytest.approx(0.0003 * more_gb, rel=0.02)
    assert tiers_of(REUSE._replace(dram_price=1.0)).tiers[1].num_bytes == 0.0


def test_devices_and_hits_agree() -> None:
    found = plans_with_tiers(planner(), LOAD, REUSE, NodeStorage(50), rate=100.0)[0]
    assert found.tiers is not None
    assert found.load.hit_rate == pytest.approx(found.tiers.hit_rate, abs=0.003)
    assert found.load.hit_rate < REUSE.hit_rate
    without = planner().for_rate(100.0)[0]
    assert found.num_devices < without.num_devices
    few = plans_with_tiers(planner(), LOAD, REUSE, NodeStorage(50), rate=None, num_devices=2)[0]
    assert few.rate > planner().for_devices(2)[0].rate


def test_every_tier_says_how() -> None:
    found = plans_with_tiers(planner(), LOAD, REUSE, NodeStorage(250), rate=RATE)[0]
    lines = {line.name: line for line in plan_lines(found, RATE) if line.group == "store"}
    assert list(lines) == ["device", "DRAM", "NVMe", "found again"]
    assert all(line.value and line.formula for line in lines.values())
    assert "0.18 ms to load" in lines["DRAM"].formula
    assert "all that nodes have: 250 GB" in lines["DRAM"].formula


def run(*arguments: object) -> Any:
    done = CliRunner().invoke(cli, ["plan", "--no-check", *map(str, arguments)], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    return done


def test_the_files_have_the_tiers() -> None:
    arguments = ("--model", "llama-3.1-8b", "--rate", RATE, "--hit-rate", 0.6, "--reuse-after", 300)
    plan = json.loads(run(*arguments, "--dram-gb", 100, "--nvme-gb", 900, "--json").stdout)["plans"][0]
    config = parse_config(yaml.safe_load(plan["cluster_yaml"]), "cluster.yaml")
    assert (config.store.dram_gb, config.store.nvme_gb) == (100, 900)
    assert [tier["name"] for tier in plan["tiers"]] == ["device", "dram", "nvme"]
    values = yaml.safe_load(plan["values_yaml"])
    assert values["config"]["store"]["dram_gb"] == 100 // plan["pools"][0]["replicas"]
    assert only(objects(values), "RayService")
    text = run(*arguments, "--dram-gb", 0, "--nvme-gb", 0).stdout
    assert "does not pay" in text


def test_hits_without_tiers_are_on_the_devices() -> None:
    found = json.loads(run("--model", "llama-3.1-8b", "--rate", RATE, "--hit-rate", 0.5, "--json").stdout)[
        "plans"
    ][0]
    assert found["hit_rate"] == 0.5
    assert found["tiers"] == []
    assert "store" not in yaml.safe_load(found["cluster_yaml"])
