"""The cluster's file: what it accepts, and that every refusal names the field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_checkpoint import write_config
from cluster.config import (
    ClusterConfig,
    PoolConfig,
    default_config,
    load_config,
    parse_config,
)
from cluster.errors import ConfigError
from cluster.secret_files import read_trust, trust_files
from kvtransfer.common.faults import FaultRule
from kvtransfer.rpc.mutual_tls import TlsFiles
from workers.config import Parallel
from workers.model.model_config import read_model_config

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
POOLS = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]


def refused(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw, "cluster.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    "text", ["model: 2020-13-45", "model: 0x_", "[" * 5000, "model: " + "9" * 5000, "\xff"]
)
def test_a_file_that_is_no_yaml_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"cluster\.yaml: "):
        load_config(file)


def test_defaults_are_one_prefill_and_one_decode_replica() -> None:
    config = parse_config({"model": "m", "pools": POOLS}, "test")
    assert [(pool.name, pool.role, pool.replicas, pool.num_ranks) for pool in config.pools] == [
        ("p", "prefill", 1, 1),
        ("d", "decode", 1, 1),
    ]
    assert config.pools[0].health_check_period_s == 2.0
    assert config.pools[0].health_check_timeout_s == 5.0
    assert not config.debug.allow_pins
    assert config.model_name == "m"


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"tp": 0}, "pools[1].tp: must be at least 1, not 0"),
        ({"ep": 0}, "pools[1].ep: must be at least 1, not 0"),
        ({"ep": 2, "tp": 3}, "pools[1]: ep 2 does not divide tp 3"),
        ({"pp": 0}, "pools[1].pp: must be at least 1, not 0"),
        ({"tp": 1 << 70}, "pools[1].tp: must be at most"),
        ({"pp": 1 << 70}, "pools[1].pp: must be at most"),
        (
            {"pp": 2, "layers": [1, 2, 3]},
            "pools[1]: layers needs one entry for each of the pp = 2 stages, not 3",
        ),
        ({"pp": 2, "layers": [3, 0]}, "pools[1].layers[1]: "),
        ({"devices": ["cpu", "cuda"]}, "pools[1]: devices needs one entry for each of the pp = 1 stages"),
        ({"pp": 2, "devices": ["cpu", "tpu"]}, "pools[1].devices[1]: "),
        ({"role": "decoder"}, "pools[1].role: "),
        ({"replicas": 0}, "pools[1].replicas: "),
        ({"engine": {"block_tokens": 48}}, "pools[1].engine.block_tokens: "),
        ({"engine": {"block_token": 64}}, "pools[1].engine.block_token: "),
        ({"colour": "red"}, "pools[1].colour: "),
        ({"cpus_per_rank": -1}, "pools[1].cpus_per_rank: "),
        ({"device": "cuda", "gpus_per_rank": 0}, "pools[1]: device cuda needs gpus_per_rank"),
        (
            {"name": "Not A Name"},
            "pools[1].name: 'Not A Name' must be 1 to 40 lower-case letters and digits, with dashes between "
            "them, such as decode-2",
        ),
    ],
)
def test_bad_pool_field_is_named(change: dict[str, Any], path: str) -> None:
    message = refused({"model": "m", "pools": [POOLS[0], {**POOLS[1], **change}]})
    assert f"cluster.yaml: {path}" in message


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ({"pools": POOLS}, "model: "),
        ({"model": "m"}, "pools: "),
        ({"model": "m", "pools": []}, "pools: "),
        ({"model": "m", "pools": POOLS, "app": "a_b"}, "app: 'a_b' must be 1 to 40 lower-case letters"),
        ({"model": "m", "pools": POOLS, "app": "a\n"}, "app: 'a\\n' must be 1 to 40 lower-case letters"),
        (
            {"model": "m", "pools": POOLS, "store": {"redis_namespace": "a b"}},
            "store.redis_namespace: 'a b' must be 1 to 64 letters, digits, dots, dashes or underscores",
        ),
        (
            {"model": "m", "pools": POOLS, "auth": {"tenants": {"a": {"sharing_group": "g!"}}}},
            "auth.tenants.a.sharing_group: 'g!' must be at most 64 letters, digits, dots",
        ),
        ({"model": "m", "pools": POOLS, "route": {}}, "route: "),
        ({"model": "m", "pools": POOLS, "router": {"policy": "best"}}, "router.policy: "),
        ({"model": "m", "pools": POOLS, "transfer": {"growth_reserve": 2}}, "transfer.growth_reserve: "),
        ({"model": "m", "pools": POOLS, "transfer": {"transports": ["smoke"]}}, "transfer.transports[0]: "),
        ({"model": "m", "pools": POOLS, "transfer": {"transports": []}}, "transfer.transports: "),
        (
            {"model": "m", "pools": POOLS, "transfer": {"transports": ["shm", "tcp", "shm"]}},
            "transfer.transports: shm is named more than once",
        ),
        (
            {"model": "m", "pools": POOLS, "transfer": {"transports": ["cuda_ipc", "nccl"]}},
            "transfer.transports: none of cuda_ipc, nccl moves KV from cpu (pool p) to cpu (pool d); add tcp",
        ),
        (
            {
                "model": "m",
                "pools": [{**POOLS[0], "pp": 2, "devices": ["cpu", "cuda"]}, POOLS[1]],
                "transfer": {"transports": ["cuda_ipc", "shm"]},
            },
            "transfer.transports: none of cuda_ipc, shm moves KV from cuda (pool p) to cpu (pool d); add tcp",
        ),
        ({"model": "m", "pools": POOLS, "gateway": {"port": 70000}}, "gateway.port: "),
        ({"model": "m", "pools": POOLS, "store": {"dram_gb": -1}}, "store.dram_gb: "),
        ({"model": "m", "pools": POOLS, "store": {"dram": 1}}, "store.dram: "),
        ({"model": "m", "pools": POOLS, "store": {"admission": "some"}}, "store.admission: "),
        (
            {"model": "m", "pools": POOLS, "auth": {"tenants": {"a": {"dram_share": 0}}}},
            "auth.tenants.a.dram_share: ",
        ),
        (
            {"model": "m", "pools": POOLS, "auth": {"tenants": {"a": {"device_kv_share": 1.5}}}},
            "auth.tenants.a.device_kv_share: ",
        ),
        (
            {
                "model": "m",
                "pools": POOLS,
                "auth": {"tenants": {"a": {"sharing_group": "b"}, "b": {"nvme_share": 0.5}}},
            },
            "auth: tenants.b.nvme_share: is 0.5, and 1 for a of the same sharing group",
        ),
        ({"model": "m", "pools": POOLS, "store": {"redis_namespace": "a b"}}, "store.redis_namespace: "),
        ({"model": "m", "pools": POOLS, "store": {"lookup_budget_ms": 250}}, "store.lookup_budget_ms: "),
        (
            {"model": "m", "pools": POOLS, "store": {"nvme_path": "/x"}},
            "store: nvme_path and nvme_gb are given together, or neither",
        ),
        (
            {"model": "m", "pools": POOLS, "store": {"nvme_path": "/x", "nvme_gb": 0.5}},
            "store: nvme_gb must hold at least two segments of segment_mb",
        ),
        (
            {"model": "m", "pools": POOLS, "store": {"nvme_path": "/x", "nvme_gb": 5, "dram_gb": 0}},
            "store: nvme_gb needs dram_gb above 0",
        ),
        ({"model": "m", "pools": [POOLS[0]]}, "pools: at least one needs the role decode"),
        ({"model": "m", "pools": [POOLS[1], POOLS[1]]}, "pools: the name 'd' is used more than once"),
    ],
)
def test_bad_field_is_named(raw: dict[str, Any], path: str) -> None:
    assert f"cluster.yaml: {path}" in refused(raw)


@pytest.mark.parametrize(
    ("section", "old", "new"),
    [
        ("scaling", "lend_roles", "change_roles"),
        ("scaling", "lend_after_s", "role_change_after_s"),
        ("transfer", "max_moves", "max_migrations"),
    ],
)
def test_a_key_that_was_renamed_names_the_new_one(section: str, old: str, new: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"model": "m", "pools": POOLS, section: {old: 1}}, "file")
    assert str(caught.value) == f"file: {section}.{old}: is called {new} now; rename it"


def test_every_bad_field_gets_a_line() -> None:
    message = refused({"model": "m", "pools": [{**POOLS[0], "tp": 0}, {**POOLS[1], "pp": 0}], "x": 1})
    assert [line.split(": ")[1] for line in message.splitlines()] == ["pools[0].tp", "pools[1].pp", "x"]


@pytest.mark.parametrize(
    ("field", "change"),
    [("dtype", {"dtype": "bf16"}), ("engine.block_tokens", {"engine": {"block_tokens": 16}})],
)
def test_pools_that_exchange_kv_must_agree(field: str, change: dict[str, Any]) -> None:
    message = refused({"model": "m", "pools": [POOLS[0], {**POOLS[1], **change}]})
    assert f"pools: {field} must be equal" in message


def test_a_transport_is_needed_only_where_kv_moves() -> None:
    pools = [{**POOLS[1], "name": "d1"}, {**POOLS[1], "name": "d2", "device": "cuda"}]
    parse_config({"model": "m", "pools": pools, "transfer": {"transports": ["shm"]}}, "test")


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "models/tiny").mkdir(parents=True)
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "model: models/tiny\nsecret_file: secret\npools:\n  - {name: both, role: both, replicas: 2}\n"
        "store: {nvme_path: kv, nvme_gb: 2}\n"
    )
    config = load_config(file)
    assert config.model == str(tmp_path / "models" / "tiny")
    assert config.secret_file == tmp_path / "secret"
    assert config.store.nvme_path == tmp_path / "kv"
    assert config.pools[0].replicas == 2


@pytest.mark.parametrize("text", ["- a\n- b\n", "model: [unclosed\n", ""])
def test_a_file_that_is_no_mapping_names_the_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_config(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: No such file or directory$"):
        load_config(tmp_path / "absent.yaml")


def test_default_config_shapes() -> None:
    two = default_config(Path("m"), prefill=2, decode=3, port=0, context_tokens=512)
    assert [(pool.role, pool.replicas) for pool in two.pools] == [("prefill", 2), ("decode", 3)]
    assert {pool.engine.block_tokens for pool in two.pools} == {16}
    assert two.gateway.port == 0
    assert two.model_path.is_absolute()
    assert (two.store.dram_gb, two.store.nvme_path) == (1.0, None)
    stored = default_config(Path("m"), nvme=(Path("kv"), 2.0))
    assert (stored.store.nvme_path, stored.store.nvme_gb) == (Path("kv").resolve(), 2.0)
    one = default_config(Path("m"), prefill=0, decode=1, context_tokens=32768)
    assert [(pool.role, pool.engine.block_tokens) for pool in one.pools] == [("both", 64)]


def test_faults_become_rules() -> None:
    fault = {"point": "push.copy", "action": "stop", "marker": "/tmp/x", "after": 2}
    config = parse_config({"model": "m", "pools": POOLS, "debug": {"faults": [fault]}}, "test")
    assert config.debug.fault_rules == (FaultRule("push.copy", "stop", "/tmp/x", 2),)


def test_config_survives_its_own_json() -> None:
    config = default_config(Path("m"))
    assert ClusterConfig.model_validate_json(config.model_dump_json()) == config


def test_gpu_default_follows_the_device() -> None:
    pools = [
        {**POOLS[1], "device": "cuda"},
        {"name": "half", "role": "both", "device": "cuda", "gpus_per_rank": 0.5},
    ]
    config = parse_config({"model": "m", "pools": pools}, "test")
    assert [pool.num_gpus_per_rank for pool in config.pools] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": 9}, "pool p: tp 9, pp 1: tp is more than the model's 8 attention heads"),
        ({"pp": 7}, "pool p: tp 1, pp 7: pp is more than the model's 6 layers"),
        ({"pp": 2, "layers": [2, 3]}, "pool p: layers add up to 5, the model has 6"),
    ],
)
def test_a_split_that_the_model_does_not_allow_is_named(change: dict[str, Any], message: str) -> None:
    pool = PoolConfig.model_validate({**POOLS[0], **change})
    with pytest.raises(ConfigError, match=re.escape(message)):
        pool.check_model(read_model_config(TINY))


def test_ranks_of_experts_are_as_many_as_their_parts_unless_tp_is_given() -> None:
    for settings, tp, ep in (({"ep": 4}, 4, 4), ({"ep": 2, "tp": 6}, 6, 2), ({"tp": 3}, 3, 1)):
        pool = PoolConfig.model_validate({**POOLS[0], **settings})
        assert (pool.tp, pool.ep) == (tp, ep)
        assert pool.parallel == Parallel(tp, 1, ("cpu",), (), ep)


def test_parts_of_experts_that_are_wrong_are_reported_once() -> None:
    message = refused({"model": "m", "pools": [POOLS[0], {**POOLS[1], "ep": 0}]})
    assert message == "cluster.yaml: pools[1].ep: must be at least 1, not 0"


def test_experts_that_cannot_be_divided_are_named_before_anything_starts(tmp_path: Path) -> None:
    pool = PoolConfig.model_validate({**POOLS[0], "ep": 2})
    with pytest.raises(ConfigError, match="pool p: ep 2: the model has no experts to divide"):
        pool.check_model(read_model_config(TINY))
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    write_config(tmp_path, "qwen3_moe", "float32", **experts)
    model = read_model_config(tmp_path)
    pool.check_model(model)
    pool = PoolConfig.model_validate({**POOLS[0], "ep": 4})
    with pytest.raises(ConfigError, match="pool p: ep 4 is more than the 3 experts of a layer"):
        pool.check_model(model)


def test_a_tp_above_the_cells_of_kv_is_named_before_anything_starts(tmp_path: Path) -> None:
    """Layers with four heads and with two are split over two ranks at most, whatever their query heads."""
    heads = {"attention_k_eq_v": True, "num_key_value_heads": 4, "num_global_key_value_heads": 2}
    write_config(tmp_path, "gemma4_text", "float32", num_attention_heads=8, sliding_window=9, **heads)
    model = read_model_config(tmp_path)
    PoolConfig.model_validate({**POOLS[0], "tp": 2}).check_model(model)
    pool = PoolConfig.model_validate({**POOLS[0], "tp": 4})
    with pytest.raises(ConfigError, match=r"pool p: tp 4 is more than 2: .*; take tp 2 and a pp above 1"):
        pool.check_model(model)


def test_files_of_certificates_and_of_the_index_are_relative_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "model: models/tiny\npools:\n  - {name: both, role: both}\nsecret_file: secret\n"
        "inner_tls: {cert_file: tls.crt, key_file: /abs/tls.key, ca_file: ca/ca.crt}\n"
        "store: {redis_url_file: url, redis_ca_file: redis.crt}\n"
    )
    config = load_config(path)
    assert config.inner_tls is not None
    assert trust_files(config).tls == TlsFiles(
        str(tmp_path / "tls.crt"), "/abs/tls.key", str(tmp_path / "ca" / "ca.crt")
    )
    assert (config.store.redis_url_file, config.store.redis_ca_file) == (
        tmp_path / "url",
        tmp_path / "redis.crt",
    )
    (tmp_path / "secret").write_text("s" * 16)
    with pytest.raises(ConfigError, match=r"^inner_tls\.cert_file: .*tls\.crt"):
        read_trust(config)
    assert read_trust(config, certificates=False).secret == b"s" * 16
    pools = {"model": "m", "pools": [{"name": "both", "role": "both"}]}
    with pytest.raises(ConfigError, match=r"inner_tls\.ca_file: is missing"):
        parse_config({**pools, "inner_tls": {"cert_file": "a", "key_file": "b"}}, "x")
    with pytest.raises(ConfigError, match="two places for one URL"):
        parse_config({**pools, "store": {"redis_url": "redis://a", "redis_url_file": "b"}}, "x")
