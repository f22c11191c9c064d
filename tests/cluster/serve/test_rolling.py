"""What an update of the configuration rolls, what it leaves alone, what it refuses. Nothing is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from serving import TINY

from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.cli.update import plan_json, plan_view
from cluster.config import ClusterConfig, parse_config
from cluster.errors import ConfigError
from cluster.serve.app import build_application
from cluster.serve.deployed import Deployed
from cluster.serve.rollout import (
    SettingChange,
    carried_over,
    changes,
    check_update,
    gateway_version,
    plan_rolls,
    pool_version,
    with_replicas,
)
from cluster.serve.update import UpdatePlan

CPUS = {"prefill": 0.1, "decode": 0.1, "extra": 0.1}


def make(
    prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **rest: Any
) -> ClusterConfig:
    """Two pools with these settings, and other parts of the file."""
    engine = {"block_tokens": 16}
    pools = []
    for name, changed in (("prefill", prefill or {}), ("decode", decode or {})):
        own = {"name": name, "role": name, **changed}
        own["engine"] = {**engine, **changed.get("engine", {})}
        pools.append(own)
    raw = {"model": str(TINY), "pools": [*pools, *rest.pop("more_pools", [])], **rest}
    return parse_config(raw, "test")


def actions(old: ClusterConfig, new: ClusterConfig) -> dict[str, str]:
    rolls = plan_rolls(old, new, (CPUS, CPUS), {})
    return {roll.pool or "gateways": roll.action for roll in rolls}


STAY = {"prefill": "stay", "decode": "stay", "gateways": "stay"}


@pytest.mark.parametrize(
    ("changed", "rolled"),
    [
        ({"decode": {"engine": {"max_sequences": 8}}}, {"decode"}),
        ({"decode": {"drain_s": 20}}, {"decode"}),
        ({"prefill": {"tp": 2}}, {"prefill"}),
        ({"decode": {"gpus_per_rank": 0.5}}, {"decode"}),
        ({"decode": {"resources": {"node-a": 1}}}, {"decode"}),
        ({"decode": {"role": "both"}}, {"decode", "gateways"}),
        ({"transfer": {"data_host": "auto"}}, {"prefill", "decode"}),
        ({"logs": {"format": "json"}}, {"prefill", "decode", "gateways"}),
        ({"router": {"skip_prefill_tokens": 1}}, {"gateways"}),
        ({"admission": {"max_queue_mb": 2}}, {"gateways"}),
        ({"tracing": {"endpoint": "http://a:1"}}, {"gateways"}),
        ({"recording": {"max_mb": 2}}, {"gateways"}),
        ({"costs": {"device_hour": 2.5}}, {"gateways"}),
        ({"gateway": {"max_requests": 7}}, {"gateways"}),
        ({"scaling": {"ttft_slo_s": 9.0}}, {"gateways"}),
        ({"gateway": {"model_name": "other"}}, {"prefill", "decode", "gateways"}),
        ({"debug": {"allow_pins": True}}, {"gateways"}),
        ({"auth": {"resume_s": 60}}, {"gateways"}),
        ({"model_cache": "models"}, {"prefill", "decode", "gateways"}),
        ({"decode": {"replicas": 3}}, set()),
        ({"download": {"offline": True}}, {"prefill", "decode", "gateways"}),
        ({"gateway": {"replicas": 2}}, set()),
        ({"decode": {"health_check_period_s": 1.0}}, set()),
        ({"decode": {"surge": False}}, set()),
    ],
)
def test_only_what_a_change_concerns_is_rolled(changed: dict[str, Any], rolled: set[str]) -> None:
    old, new = make(), make(**changed)
    check_update(old, new)
    assert actions(old, new) == STAY | dict.fromkeys(rolled, "roll")
    assert len(changes(old, new)) >= 1


def test_every_setting_is_some_deployment_s_or_changes_without_a_restart() -> None:
    """A setting that nobody looks at would be changed in the file and nowhere else."""
    live = {"replicas", "surge", "cpus_per_rank", "health_check_period_s", "health_check_timeout_s"}
    pool_fields = set(make().pools[0].model_dump())
    assert live < pool_fields
    parts = set(ClusterConfig.model_fields)
    used = {
        "app",
        "model",
        "download",
        "model_cache",
        "pools",
        "router",
        "admission",
        "transfer",
        "store",
        "gateway",
        "scaling",
        "logs",
        "tracing",
        "recording",
        "costs",
        "debug",
        "auth",
    }
    assert parts - used == {"secret_file", "inner_tls"}, "an update refuses to change them"


def test_the_same_file_rolls_nothing() -> None:
    assert actions(make(), make()) == STAY
    assert changes(make(), make()) == []


def test_what_ray_is_asked_for_counts_as_a_change() -> None:
    rolls = plan_rolls(make(), make(), (CPUS, CPUS | {"decode": 0.2}), {})
    assert [roll.action for roll in rolls] == ["stay", "roll", "stay"]


def test_pools_come_and_go_without_the_others() -> None:
    extra = [{"name": "extra", "role": "decode", "engine": {"block_tokens": 16}}]
    more = make(more_pools=extra)
    assert actions(make(), more) == STAY | {"extra": "start", "gateways": "roll"}
    assert actions(more, make()) == STAY | {"extra": "stop", "gateways": "roll"}


def test_what_somebody_asked_for_outlives_the_update() -> None:
    new = make(decode={"replicas": 2})
    rolls = plan_rolls(make(), new, (CPUS, CPUS), {"decode": 3, "prefill": 1}, frozenset({"decode"}))
    counts = {roll.pool: (roll.num_replicas, roll.kept) for roll in rolls}
    assert counts["prefill"] == (1, "")
    assert counts["decode"] == (3, "3, as an operator chose; the file says 2")
    limits = {"decode": {"min": 1, "max": 4}}
    autoscaled = make(decode={"replicas": 2}, scaling={"autoscale": True, "pools": limits})
    (_, decode, _) = plan_rolls(make(), autoscaled, (CPUS, CPUS), {"decode": 3})
    assert decode.kept == "3, as the autoscaler chose; the file says 2"
    (_, decode, _) = plan_rolls(make(), make(logs={"format": "json"}), (CPUS, CPUS), {"decode": 3})
    assert decode.kept == "3, as was ordered last; the file says 1"


def test_a_pool_that_nobody_pins_follows_another_count_in_the_file() -> None:
    new = make(decode={"replicas": 2})
    (_, decode, _) = plan_rolls(make(), new, (CPUS, CPUS), {"decode": 3})
    assert (decode.num_replicas, decode.kept) == (2, "")


def test_new_ones_start_first_unless_the_file_says_otherwise() -> None:
    assert [roll.surges for roll in plan_rolls(make(), make(), (CPUS, CPUS), {})] == [True, True, True]
    tight = make(gateway={"surge": False}, decode={"surge": False})
    assert [roll.surges for roll in plan_rolls(tight, tight, (CPUS, CPUS), {})] == [True, False, False]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (
            {"prefill": {"engine": {"block_tokens": 32}}, "decode": {"engine": {"block_tokens": 32}}},
            "block_tokens",
        ),
        ({"prefill": {"dtype": "fp16"}, "decode": {"dtype": "fp16"}}, "dtype"),
        ({"store": {"dram_gb": 2}}, r"store\.dram_gb"),
    ],
)
def test_what_cannot_change_while_it_runs_is_refused_by_name(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        check_update(make(), make(**changed))


def test_another_model_goes_beside(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "llama", seed=1, dtype="float32")
    other = make().model_copy(update={"model": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"^model: .*deploy the other one beside this application"):
        check_update(make(), other)


def test_the_index_server_of_the_start_is_kept_and_no_other_is_taken() -> None:
    store = make().store.model_copy(update={"redis_url": "redis://a:1"})
    running = make().model_copy(update={"store": store})
    assert carried_over(running, make()).store.redis_url == "redis://a:1"
    drawn = make().with_key_root_file(Path("/drawn"))
    assert carried_over(drawn, make()) == drawn
    assert carried_over(drawn, make().with_key_root_file(Path("/named"))) == make().with_key_root_file(
        Path("/named")
    )
    assert carried_over(running, running) == running
    moved = make(store={"redis_url": "redis://b:1"})
    with pytest.raises(ConfigError, match=r"store\.redis_url"):
        carried_over(running, moved)


def test_shares_of_the_store_stay_while_stores_run() -> None:
    new = make(auth={"tenants": {"a": {"nvme_share": 0.5}}})
    with pytest.raises(ConfigError, match=r"^auth\.tenants: nvme_share differs: an update does not restart"):
        check_update(make(), new)
    check_update(new, make(auth={"tenants": {"a": {"nvme_share": 0.5, "max_priority": 3}}}))


def test_shares_of_the_device_roll_the_replicas() -> None:
    old, new = make(), make(auth={"tenants": {"a": {"device_kv_share": 0.5}}})
    check_update(old, new)
    assert pool_version(old, "decode") != pool_version(new, "decode")
    other = make(auth={"tenants": {"a": {"max_priority": 3}}})
    assert pool_version(old, "decode") == pool_version(other, "decode")


def test_certificates_between_hosts_come_and_go_with_the_application_only() -> None:
    files = {"cert_file": "a.crt", "key_file": "a.key", "ca_file": "ca.crt"}
    bare, encrypted = make(), make(inner_tls=files)
    for old, new in (
        (bare, encrypted),
        (encrypted, bare),
        (encrypted, make(inner_tls={**files, "key_file": "b"})),
    ):
        with pytest.raises(ConfigError, match=r"^inner_tls.*renewed in its file"):
            check_update(old, new)
    check_update(encrypted, make(inner_tls=files))


def test_changes_are_named_by_their_path() -> None:
    new = make(decode={"engine": {"max_sequences": 8}}, gateway={"port": 9000})
    reported = changes(make(), new)
    assert SettingChange("pools.decode.engine.max_sequences", "auto", 8) in reported
    assert SettingChange("gateway.port", 8780, 9000) in reported


def test_the_deployed_application_carries_the_versions() -> None:
    config = make(decode={"surge": False}, gateway={"surge": False})
    application = build_application(config, CPUS, life="l", counts={"decode": 3})
    gateway = application._bound_deployment
    bound = [it for it in gateway.init_args if not isinstance(it, str | bytes)]
    pools = [pool._bound_deployment for pool in bound]
    assert [gateway._version, *(pool._version for pool in pools)] == [
        gateway_version(config),
        pool_version(config, "prefill"),
        pool_version(config, "decode"),
    ]
    assert [pool._deployment_config.num_replicas for pool in pools] == [1, 3]
    assert [pool._deployment_config.max_surge_percent for pool in pools] == [1, 0]
    assert gateway._deployment_config.max_surge_percent == 0
    surging = build_application(make(), CPUS)._bound_deployment
    assert surging._deployment_config.max_surge_percent == 1
    assert all(int(100 * pool._deployment_config.rolling_update_percentage) == 1 for pool in pools)
    assert gateway._deployment_config.user_config["replicas"] == {"prefill": 1, "decode": 1}
    assert with_replicas(config, {"decode": 5}).pools[1].replicas == 5


def test_a_plan_is_shown_and_printed_as_json() -> None:
    old, new = make(), make(decode={"engine": {"max_sequences": 8}})
    plan = UpdatePlan(tuple(changes(old, new)), tuple(plan_rolls(old, new, (CPUS, CPUS), {"decode": 3})))
    reported = plan_json(plan, applied=True)
    assert reported["applied"] is True
    assert reported["changes"] == [
        {"path": "pools.decode.engine.max_sequences", "before": "auto", "after": 8}
    ]
    assert [(it["pool"], it["action"]) for it in reported["deployments"]] == [
        ("prefill", "stay"),
        ("decode", "roll"),
        ("gateways", "stay"),
    ]
    assert plan_json(UpdatePlan((), ()), applied=True)["applied"] is False
    assert len(plan_view(plan).renderables) == 2
    assert len(plan_view(UpdatePlan((), plan.rolls)).renderables) == 1


def test_what_was_deployed_is_read_back_as_it_was() -> None:
    config = make(gateway={"port": 9000})
    assert Deployed(config.model_dump_json(), CPUS, "l").config == config
