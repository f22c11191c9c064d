"""Plans: the fewest devices for a rate, the most requests for devices, cost, and files that can be used."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_harness import objects, only
from typer.testing import CliRunner, Result

from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.cli.main import cli
from cluster.cli.terminal import BUNDLED_MODEL
from cluster.config import parse_config
from cluster.errors import ConfigError
from cluster.planning.device_profile import NAME_TO_PROFILE, device_profile
from cluster.planning.device_split import device_splits
from cluster.planning.plan import ClusterPlanner, ModelOnDevices, Plan
from cluster.planning.plan_lines import plan_lines
from cluster.planning.planned_model import PlannedModel, planned_model
from cluster.planning.recommended_config import chart_values, cluster_file
from cluster.planning.replica_rate import CapacityFinder, PlannedLoad

WORKLOAD = PlannedLoad(2048, 256, ttft_s=1.0, tpot_s=0.04)
CPU = {
    "name": "server",
    "memory_gb": 64,
    "read_gb_s": 20,
    "bf16_tflop_s": 1.0,
    "kind": "cpu",
    "devices_per_node": 2,
    "threads": 4,
    "step_us": 0,
    "sequence_us": 20,
}


@pytest.fixture(scope="module")
def llama() -> PlannedModel:
    return planned_model("llama-3.1-8b", "auto", "auto")


def best(model: PlannedModel, rate: float, *names: str, prices: dict[str, float] | None = None) -> Plan:
    profiles = [device_profile(name) for name in names or ("H100",)]
    return ClusterPlanner(model, profiles, WORKLOAD, prices or {}).for_rate(rate)[0]


def test_the_fewest_devices_that_hold_the_rate(llama: PlannedModel) -> None:
    """Against trying every split and number of replicas."""
    plan = best(llama, 100.0)
    assert plan.rate >= 100.0
    profile = device_profile("H100")
    finder = CapacityFinder(llama, profile, WORKLOAD)
    found = {
        (split.num_devices, role): capacity.rate
        for split in device_splits(llama, profile)
        for role in ("prefill", "decode", "both")
        if (capacity := finder.find(split, role)) is not None
    }

    def holds(num_devices: int, role: str) -> bool:
        return any(
            (num_devices // size) * rate >= 100.0 for (size, its), rate in found.items() if its == role
        )

    def has_fewer(num_devices: int) -> bool:
        if holds(num_devices, "both"):
            return True
        return any(
            holds(part, "prefill") and holds(num_devices - part, "decode") for part in range(1, num_devices)
        )

    assert not has_fewer(plan.num_devices - 1)


def test_the_most_that_devices_hold(llama: PlannedModel) -> None:
    planner = ClusterPlanner(llama, [device_profile("H100")], WORKLOAD, {})
    of_devices = {count: planner.for_devices(count)[0] for count in (1, 2, 4, 8, 12)}
    assert all(plan.num_devices <= count for count, plan in of_devices.items())
    assert not of_devices[1].is_disaggregated
    for fewer, more in itertools.pairwise(of_devices.values()):
        assert more.rate > fewer.rate
    # The inverse of `for_rate`.
    assert planner.for_rate(of_devices[8].rate)[0].num_devices <= 8


def test_devices_are_divided_as_by_trying_all_divisions(llama: PlannedModel) -> None:
    kind = ModelOnDevices(llama, device_profile("H100"))
    planner = ClusterPlanner(llama, [kind.profile], WORKLOAD, {})
    for num_devices in (2, 5, 11):
        found = kind.capacities(WORKLOAD, num_devices)
        most = max(
            min(count * prefill.rate, (num_devices - count * size) // decode.split.num_devices * decode.rate)
            for prefill, decode in itertools.product(found["prefill"], found["decode"])
            for size in [prefill.split.num_devices]
            for count in range(1, num_devices // size + 1)
        )
        plan = next(it for it in planner.for_devices(num_devices) if it.is_disaggregated)
        assert plan.rate == pytest.approx(most)


def test_the_cheapest_kind_of_device(llama: PlannedModel) -> None:
    dear = best(llama, 20.0, "H100", "L40S", prices={"H100": 10.0, "L40S": 0.5})
    cheap = best(llama, 20.0, "H100", "L40S", prices={"H100": 0.5, "L40S": 0.9})
    assert (dear.profile.name, cheap.profile.name) == ("L40S", "H100")
    cost = cheap.cost_per_million(20.0)
    assert cost == pytest.approx(1e6 * cheap.num_devices * 0.5 / (3600 * 20 * 2304))


def test_replicas_are_shown_at_their_share_of_the_rate(llama: PlannedModel) -> None:
    plan = best(llama, 30.0)
    for pool in plan.pools:
        assert pool.served is not None
        assert pool.served.rate == pytest.approx(30.0 / pool.num_replicas)
        assert pool.served.ttft_s <= pool.capacity.ttft_s
        assert pool.served.tpot_s <= pool.capacity.tpot_s


def test_every_line_says_how(llama: PlannedModel) -> None:
    plan = best(llama, 100.0, prices={"H100": 2.0})
    lines = {(line.group, line.name): line for line in plan_lines(plan, 100.0, api_price=0.05)}
    assert all(line.formula and line.value for line in lines.values())
    cost = plan.cost_per_million(plan.rate)
    assert cost is not None
    shown = lines["cost", "as cheap as 0.05 a million"].value
    assert shown == (
        "never: the API is cheaper" if cost > 0.05 else f"{cost / 0.05:.0%} of what the plan holds"
    )
    dear = {line.name: line for line in plan_lines(plan, 100.0, api_price=1e-6)}
    assert dear["as cheap as 1e-06 a million"].value == "never: the API is cheaper"


def test_cost_at_a_utilization(llama: PlannedModel) -> None:
    plan = best(llama, 100.0, prices={"H100": 2.0})
    of_share = {
        share: {line.name: line for line in plan_lines(plan, 100.0, api_price=0.05, utilization=share)}
        for share in (1.0, 0.25)
    }
    whole, quarter = (float(lines["a million tokens"].value) for lines in of_share.values())
    assert quarter == pytest.approx(4 * whole, rel=0.02)
    # Where the devices' day costs as much as the API's tokens, whatever the utilization.
    num_millions = 24 * 2.0 * plan.num_devices / 0.05
    for lines in of_share.values():
        assert lines["break-even"].value == f"{num_millions:,.0f} million tokens a day"
    assert "at 25% utilization" in of_share[0.25]["break-even"].formula


def test_prices_of_prompts_and_of_answers_are_weighed(llama: PlannedModel) -> None:
    arguments = ("--model", "llama-3.1-8b", "--rate", 20, "--input", 3000, "--output", 1000)
    done = tandem_plan(*arguments, "--price-per-hour", 2, "--api-price", "0.1:0.5")
    assert done.exit_code == 0, done.output
    assert "as cheap as 0.2 a million" in done.stdout


def test_whether_to_disaggregate_is_answered(llama: PlannedModel) -> None:
    plans = ClusterPlanner(llama, [device_profile("H100")], WORKLOAD, {}).for_rate(100.0)
    assert {plan.is_disaggregated for plan in plans} == {True, False}
    lines = {line.name: line for line in plan_lines(plans[0], 100.0, others=plans)}
    other = plans[1]
    assert f"{other.devices}, {other.rate:.2f} requests/s" in lines["disaggregate"].formula


def test_what_a_replica_has_memory_for(llama: PlannedModel) -> None:
    """The largest batch and the longest context; and from which batch on decoding multiplies."""
    plan = best(llama, 5.0)
    capacity = plan.pools[-1].capacity
    lines = {line.name: line for line in plan_lines(plan, 5.0)}
    num_sequences = min(512, capacity.memory.kv_tokens // (2048 + 256))
    assert lines["largest batch"].value == f"{num_sequences} sequences of 2,304 tokens"
    assert lines["longest context"].value == "131,072 tokens"
    short = best(planned_model("llama-3.1-8b", "auto", "int8"), 5.0)._replace(
        load=WORKLOAD._replace(input_tokens=8, output_tokens=8)
    )
    multiplying = {line.name: line for line in plan_lines(short, 5.0)}["decoding multiplies from"]
    # The ridge of 257, and a little more for KV.
    assert 257 < float(multiplying.value.partition(" ")[0]) < 275


@pytest.mark.parametrize("is_disaggregated", [False, True], ids=["one pool", "two pools"])
def test_the_recommended_files_are_accepted(tmp_path: Path, is_disaggregated: bool) -> None:
    model = planned_model("llama-3.3-70b", "int8", "fp8")
    plans = ClusterPlanner(model, [device_profile("H200")], WORKLOAD, {}).for_rate(5.0)
    plan = next(plan for plan in plans if plan.is_disaggregated == is_disaggregated)
    file = tmp_path / "cluster.yaml"
    file.write_text(cluster_file(plan))
    config = parse_config(yaml.safe_load(file.read_text()), str(file))
    assert [pool.role for pool in config.pools] == [it.capacity.role for it in plan.pools]
    for pool, planned in zip(config.pools, plan.pools, strict=True):
        assert (pool.tp, pool.pp, pool.replicas) == (*planned.capacity.split[:2], planned.num_replicas)
        assert (pool.weight_dtype, pool.engine.kv_dtype) == ("int8", "fp8")
        assert pool.engine.tpot_objective_s == (WORKLOAD.tpot_s if pool.role != "prefill" else None)
        pool.check_model(model.shape)
    rendered = objects(yaml.safe_load(chart_values(plan)))
    groups = only(rendered, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    names = {group["groupName"] for group in groups}
    assert names - {"gateway"} == {f"pool-{it.capacity.role}" for it in plan.pools}


def tandem_plan(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["plan", "--no-check", *map(str, arguments)], env={"COLUMNS": "300"})


def test_a_folder_on_described_cpus(tmp_path: Path) -> None:
    hardware, written = tmp_path / "server.json", tmp_path / "cluster.yaml"
    hardware.write_text(json.dumps(CPU))
    arguments = ("--model", BUNDLED_MODEL, "--hardware", hardware, "--rate", 2, "--out", written)
    done = tandem_plan(*arguments, "--json")
    assert done.exit_code == 0, done.output
    (plan, *_) = json.loads(done.stdout)["plans"]
    assert plan["rate"] >= 2
    assert plan["cluster_yaml"] == written.read_text()
    pools = yaml.safe_load(written.read_text())["pools"]
    assert all(pool["engine"]["num_threads"] == 4 for pool in pools)
    checked = CliRunner().invoke(cli, ["doctor", "-f", str(written), "--json"])
    findings = json.loads(checked.stdout)["findings"]
    # Of the plan itself: the machine that runs the tests may be too small for it.
    of_plan = {"model", "configuration"}
    assert not [it for it in findings if it["severity"] == "error" and it["group"] in of_plan]
    assert any(it["check"] == "model-split" for it in findings)


def test_people_see_formulas_where_they_ask() -> None:
    plain = tandem_plan("--model", "qwen3-8b", "--rate", 5)
    explained = tandem_plan("--model", "qwen3-8b", "--rate", 5, "--explain")
    assert plain.exit_code == explained.exit_code == 0
    assert "Pollaczek" not in plain.stdout
    assert "Pollaczek" in explained.stdout
    known = json.loads(tandem_plan("--model", "qwen3-8b", "--rate", 5, "--json").stdout)["plans"][0]
    assert "2 x 36 layers x 8 heads x 128 x 2 bytes" in {line["formula"] for line in known["lines"]}
    assert "# cluster.yaml (the model was planned by its shape: name its folder)" in plain.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "qwen3-8b"), "give either --rate or --devices"),
        (("--model", "qwen3-8b", "--rate", 1, "--devices", 1), "give either --rate or --devices"),
        (
            ("--model", "qwen3-8b", "--rate", 1, "--gpu", "V100"),
            "--gpu V100: not known; there are H100, H200",
        ),
        (("--model", "qwen3-8b", "--rate", 1, "--precision", "fp6"), "fp6 is none of auto, bf16"),
        (("--model", "qwen3-8b", "--rate", 1, "--price-per-hour", "-1"), "'-1' is no number above 0"),
        (
            ("--model", "qwen3-8b", "--rate", 1, "--gpu", "H100,A100", "--price-per-hour", "2"),
            "name the device of each price, as H100=2",
        ),
        (
            ("--model", "qwen3-8b", "--rate", 1, "--gpu", "H100,A100", "--price-per-hour", "H100=2"),
            "has no price of A100",
        ),
        (
            ("--model", "qwen3-8b", "--rate", 1, "--slo-tpot-ms", "0.5"),
            "even one request at a time does not meet the objectives",
        ),
        (("--model", "llama-3.3-70b", "--devices", 1), "too few devices for a replica"),
        (
            ("--model", "qwen3-8b", "--rate", 1, "--price-per-hour", "V100=1"),
            "--price-per-hour V100=1: no device is called 'V100'; there are H100",
        ),
        (
            ("--model", "qwen3-8b", "--rate", 1, "--price-per-hour", "H100=1,H100=2"),
            "H100 has a price already",
        ),
        (("--model", "qwen3-8b", "--rate", 1, "--price-per-hour", ","), "'' is no number above 0"),
        *(
            (("--model", "qwen3-8b", option, value), f"Invalid value for '{option}'")
            for option in (
                "--rate",
                "--devices",
                "--slo-ttft-ms",
                "--slo-tpot-ms",
                "--hit-rate",
                "--reuse-after",
                "--dram-gb",
                "--nvme-gb",
                "--dram-price",
                "--nvme-price",
                "--utilization",
            )
            for value in ("inf", "nan", "-1", "1e300")
        ),
        (("--model", "no/such", "--rate", 1), "neither a folder"),
        (
            ("--model", "qwen3-8b", "--rate", 1, "--input", 40_800),
            "41056 tokens are more than the model's context of 40960",
        ),
    ],
)
def test_bad_input(arguments: tuple[object, ...], message: str) -> None:
    done = tandem_plan(*arguments)
    assert done.exit_code in (1, 2)
    assert message in done.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_gb": 0}, "memory_gb must be above 0"),
        ({"memory_gb": "much"}, r"Expected `float`, got `str` - at `$.memory_gb`"),
        ({"speed": 3}, "contains unknown field `speed`"),
        ({"step_us": -1}, "step_us must not be below 0"),
        ({"read_gb_s": None}, "give a JSON object with at least name, memory_gb, read_gb_s, bf16_tflop_s"),
    ],
)
def test_bad_descriptions_of_devices(tmp_path: Path, change: dict[str, object], message: str) -> None:
    hardware = tmp_path / "server.json"
    hardware.write_text(json.dumps(CPU | change))
    done = tandem_plan("--model", "qwen3-8b", "--hardware", hardware, "--rate", 1)
    assert done.exit_code == 1
    assert message in done.output.replace("\n", " ")


def test_settings_that_the_engine_refuses_are_planned_without_a_file(tmp_path: Path) -> None:
    """Heads of two sizes are not kept in 8 bits."""
    sizes: dict[str, Any] = {"global_head_dim": 48, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    inputs: dict[str, Any] = {
        "hidden_size_per_layer_input": 7,
        "vocab_size_per_layer_input": 256,
        "sliding_window": 40,
    }
    write_random_checkpoint(tmp_path, "gemma4_text", seed=1, **{**sizes, **inputs})
    arguments = "--model", tmp_path, "--rate", 1, "--kv-dtype"
    assert tandem_plan(*arguments, "auto").exit_code == 0
    done = tandem_plan(*arguments, "int8")
    assert done.exit_code == 0
    assert "no file: the engine does not start this: pool both:" in done.output
    assert "kv_dtype int8" in done.output
    assert "cluster.yaml" not in done.output


def test_latents_are_planned_in_8_bits() -> None:
    lines = plan_lines(best(planned_model("deepseek-v3", "auto", "int8"), 1, "H200"), 1)
    assert any("1 x 61 x 1 x (576 + 8) bytes" in str(line) for line in lines)


def test_an_unsupported_model_is_refused_by_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    done = tandem_plan("--model", file, "--rate", 1)
    assert done.exit_code == 1
    assert "MambaForCausalLM" in done.output
    assert "tandem-plan-" not in done.output, "no folder that is gone is named"


def test_profiles() -> None:
    assert all(name == profile.name for name, profile in NAME_TO_PROFILE.items())
    assert device_profile("rtx 4090").name == "RTX4090"
    assert device_profile("h100").ridge == pytest.approx(257, abs=1)
    with pytest.raises(ConfigError, match="not known"):
        device_profile("H1000")
