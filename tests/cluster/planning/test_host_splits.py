"""Plans for small cards, which leave experts or KV to host memory, and for devices of several kinds."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
import yaml
from chart_harness import objects, only
from typer.testing import CliRunner

from cluster.cli.main import cli
from cluster.config import parse_config
from cluster.errors import ConfigError
from cluster.planning.device_profile import DeviceProfile, device_profile
from cluster.planning.device_split import DeviceSplit, held_memory, host_splits, refusal
from cluster.planning.plan import ClusterPlanner
from cluster.planning.planned_model import planned_model
from cluster.planning.recommended_config import chart_values, cluster_file
from cluster.planning.replica_rate import PlannedLoad
from cluster.planning.step_times import StepTimes

EXPERTS = planned_model("qwen3-30b-a3b", "auto", "auto")
LLAMA = planned_model("llama-3.1-8b", "auto", "auto")
CARD = device_profile("RTX4090")
# So slow that even a small card with experts in host memory is soon enough.
PATIENT = PlannedLoad(1024, 128, ttft_s=20.0, tpot_s=1.0)


def planner(profile: DeviceProfile = CARD, load: PlannedLoad = PATIENT, **settings: bool) -> ClusterPlanner:
    return ClusterPlanner(EXPERTS, [profile], load, {}, **settings)


def test_experts_go_to_the_host_where_a_card_cannot_hold_them() -> None:
    plan = planner().for_devices(1)[0]
    (pool,) = plan.pools
    split, memory = pool.capacity.split, pool.capacity.memory
    assert split.num_devices == 1
    assert 0 < split.expert_offload <= 128
    # Host memory has all experts: 48 layers of 128 of three products of 2048 x 768.
    assert memory.host_bytes == 48 * 128 * 3 * 2048 * 768 * 2
    everything = held_memory(EXPERTS, CARD, DeviceSplit(1), 512)
    assert everything is None
    config = parse_config(yaml.safe_load(cluster_file(plan)), "cluster.yaml")
    assert config.pools[0].engine.expert_offload == split.expert_offload
    config.pools[0].check_model(EXPERTS.shape)
    # Several cards hold all of them, and nothing has to go.
    assert not planner().for_devices(8)[0].pools[0].capacity.split.has_host
    assert any(pool.capacity.split.has_host for pool in planner(tries_host=True).for_devices(1)[0].pools)


def test_the_more_experts_are_in_host_memory_the_longer_steps_take() -> None:
    of_offload = [
        StepTimes(EXPERTS, CARD, DeviceSplit(1, expert_offload=num)).parts_of_step(4, 1000)
        for num in (0, 32, 64, 128)
    ]
    assert of_offload[0].host_experts_s == 0.0
    for fewer, more in itertools.pairwise(of_offload):
        assert more.total_s > fewer.total_s
        assert more.read_s < fewer.read_s
    # The CPU reads what four tokens choose of all 128 experts.
    chosen = 128 * (1 - (1 - 8 / 128) ** 4) * 48 * 3 * 2048 * 768 * 2
    launched_s = 48 * CARD.host_layer_us / 1e6
    assert of_offload[-1].host_experts_s - launched_s == pytest.approx(chosen / 200e9, rel=0.01)


def test_kv_goes_to_the_host_where_a_context_is_longer_than_a_device_has() -> None:
    card = msgspec.structs.replace(device_profile("RTX4090"), memory_gb=24, devices_per_node=1)
    long = PlannedLoad(60_000, 200, ttft_s=200.0, tpot_s=3.0)
    alone = held_memory(LLAMA, card, DeviceSplit(1), 512)
    assert alone is not None
    assert alone.kv_tokens < 60_000
    plan = ClusterPlanner(LLAMA, [card], long, {}).for_devices(1)[0]
    capacity = plan.pools[0].capacity
    assert capacity.memory.all_tokens >= 60_200
    assert capacity.split.offload_tokens <= 9 * capacity.memory.kv_tokens
    config = parse_config(yaml.safe_load(cluster_file(plan)), "cluster.yaml")
    assert config.pools[0].engine.offload_tokens == capacity.split.offload_tokens
    # What is beyond the device comes over the bus in every step.
    times = StepTimes(LLAMA, card, capacity.split, capacity.memory.kv_tokens)
    beyond = 60_000 - capacity.memory.kv_tokens
    assert times.decode_s(1, 60_000) == pytest.approx(beyond * 131_072 / (47.5e9 / 2), rel=0.001)
    assert times.decode_s(1, 1000) == StepTimes(LLAMA, card, DeviceSplit(1)).decode_s(1, 1000)


def test_nothing_goes_to_the_host_on_cpus() -> None:
    assert list(host_splits(EXPERTS, device_profile("EPYC9755"), 1000, 8)) == []
    assert "on device cpu" in refusal(EXPERTS, device_profile("EPYC9755"), DeviceSplit(1, expert_offload=8))


def test_prompts_on_gpus_and_decoding_on_cpus_where_that_is_cheaper() -> None:
    load = PlannedLoad(4096, 128, ttft_s=1.0, tpot_s=0.2)
    kinds = [device_profile("H100"), device_profile("EPYC9755")]
    small = planned_model("qwen3-0.6b", "auto", "auto")
    cheap = ClusterPlanner(small, kinds, load, {"H100": 9.0, "EPYC9755": 0.01}).for_rate(60.0)
    found = next(plan for plan in cheap if len({pool.profile.name for pool in plan.pools}) == 2)
    assert [pool.profile.name for pool in found.pools] == ["H100", "EPYC9755"]
    assert found.price_per_hour == pytest.approx(
        9.0 * found.pools[0].num_devices + 0.01 * found.pools[1].num_devices
    )
    config = parse_config(yaml.safe_load(cluster_file(found)), "cluster.yaml")
    for pool in config.pools:
        pool.check_model(small.shape)
    groups = only(objects(yaml.safe_load(chart_values(found))), "RayService")["spec"]["rayClusterConfig"]
    names = {group["groupName"] for group in groups["workerGroupSpecs"]}
    assert names == {"gateway", "pool-prefill", "pool-decode"}
    pools = yaml.safe_load(cluster_file(found))["pools"]
    assert [(pool["role"], pool["device"]) for pool in pools] == [("prefill", "cuda"), ("decode", "cpu")]
    assert pools[1]["engine"]["num_threads"] == 128
    # Without prices kinds are not mixed.
    plans = ClusterPlanner(small, kinds, load, {}).for_rate(60.0)
    assert all(len({pool.profile.name for pool in plan.pools}) == 1 for plan in plans)


def tandem_plan(*arguments: object) -> Any:
    return CliRunner().invoke(cli, ["plan", "--no-check", *map(str, arguments)], env={"COLUMNS": "300"})


def test_latents_that_ranks_divide_are_planned_on_cpus_and_refused_on_gpus() -> None:
    shape = "layers=8,hidden=1024,heads=16,latent=512,intermediate=4096,vocab=32000"
    load = ("--rate", 1, "--input", 4000, "--slo-tpot-ms", 200, "--latent-kv", "split")
    done = tandem_plan("--shape", shape, "--gpu", "EPYC9755", *load, "--json")
    assert done.exit_code == 0, done.output
    (plan, *_) = json.loads(done.stdout)["plans"]
    assert yaml.safe_load(plan["cluster_yaml"])["pools"][0]["engine"]["latent_kv"] == "split"
    done = tandem_plan("--shape", shape, *load)
    assert done.exit_code == 0, done.output
    assert "engine.latent_kv split: it is not yet validated on a card" in done.output
    assert "cluster.yaml" not in done.output
    done = tandem_plan("--model", "qwen3-8b", *load)
    assert "the model has keys and values of several heads, which ranks divide" in done.output


def test_ranks_that_divide_latents_read_their_parts_of_them() -> None:
    model = planned_model("deepseek-v3", "auto", "auto")
    split, profile = DeviceSplit(8), device_profile("H200")
    near, far = 1000, 101_000
    of_kind = {
        kind: StepTimes(model._replace(latent_kv=kind), profile, split) for kind in ("replicated", "split")
    }
    longer = {
        kind: times.parts_of_step(1, far).kv_s - times.parts_of_step(1, near).kv_s
        for kind, times in of_kind.items()
    }
    assert longer["split"] == pytest.approx(longer["replicated"] / 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--reuse-after", 60), "needs a --hit-rate above 0"),
        (("--latent-kv", "halved"), "halved is none of replicated, split"),
        (("--gpu", "H100,h100"), "--gpu: H100 is named more than once"),
        (("--api-price", "1:2:3"), "give one price, or those of prompts and answers"),
        (("--api-price", "free"), "--api-price free: 'free' is no number above 0"),
        (("--utilization", 0), "greater than or equal to 0.001"),
    ],
)
def test_bad_input(arguments: tuple[object, ...], message: str) -> None:
    done = tandem_plan("--model", "qwen3-8b", "--rate", 1, *arguments)
    assert done.exit_code in (1, 2)
    assert message in done.output.replace("\n", " ")


def test_why_a_model_fits_nowhere_is_said() -> None:
    with pytest.raises(ConfigError, match="of weights do not fit beside KV"):
        ClusterPlanner(
            planned_model("llama-3.3-70b", "auto", "auto"),
            [msgspec.structs.replace(CARD, devices_per_node=1, memory_gb=1.0)],
            PATIENT,
            {},
        ).for_rate(1.0)
