"""The options of `tandem serve`: the same configuration as a file, alone and beside one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import TINY, tandem
from slow_cases import examples

from cluster.cli.serve_options import ServeOptions, change_line, config_yaml, serve_config
from cluster.config import ClusterConfig, load_config, parse_config
from cluster.errors import ConfigError
from cluster.serve.rollout import changes
from cluster.shown_urls import without_secrets

FILE = f"""
model: {TINY}
pools:
  - {{name: first, role: prefill, replicas: 2}}
  - {{name: second, role: decode, replicas: 3, tp: 2, engine: {{kv_tokens: 8192}}}}
gateway: {{port: 7000}}
store: {{dram_gb: 2}}
"""


def of_options(**options: Any) -> ClusterConfig:
    """The configuration without a file."""
    return serve_config(None, ServeOptions(model=str(TINY), **options)).config


def written(folder: Path, text: str = FILE) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return file


def test_options_build_what_a_file_would() -> None:
    pool = {"device": "cuda", "tp": 4, "dtype": "bf16", "engine": {"block_tokens": 16, "kv_tokens": 4096}}
    raw = {
        "model": TINY,
        "pools": [
            {"name": "prefill", "role": "prefill", "replicas": 2, **pool},
            {"name": "decode", "role": "decode", "replicas": 3, **pool},
        ],
        "gateway": {"host": "0.0.0.0", "port": 9000, "model_name": "small", "http": {"port": 9002}},
        "store": {"dram_gb": 4, "nvme_path": "/mnt/kv", "nvme_gb": 40},
        "auth": {"mode": "required", "keys_file": "/etc/keys.yaml"},
    }
    assert of_options(
        device="cuda",
        tp=4,
        dtype="bf16",
        kv_tokens="4096",
        prefill=2,
        decode=3,
        host="0.0.0.0",
        port=9000,
        http_port=9002,
        model_name="small",
        dram_gb=4,
        nvme=Path("/mnt/kv"),
        nvme_gb=40,
        keys_file=Path("/etc/keys.yaml"),
    ) == parse_config(raw, "test")


def test_ep_is_a_setting_of_every_pool_and_tp_with_it(tmp_path: Path) -> None:
    config, changes, _ = serve_config(written(tmp_path), ServeOptions(ep=2))
    assert [(pool.tp, pool.ep) for pool in config.pools] == [(2, 2)] * 2
    assert changes == ()
    with pytest.raises(ConfigError, match="ep 3 does not divide tp 2"):
        serve_config(written(tmp_path), ServeOptions(ep=3))


def test_without_prefill_replicas_there_is_one_pool() -> None:
    (pool,) = of_options(prefill=0, decode=2, pp=2).pools
    assert (pool.name, pool.role, pool.replicas, pool.pp) == ("both", "both", 2, 2)


@pytest.mark.parametrize(
    ("options", "num_gpus", "roles"),
    [
        ({}, 1, ["both"]),
        ({"decode": 1}, 1, ["both"]),
        ({}, 2, ["prefill", "decode"]),
        ({}, None, ["prefill", "decode"]),
        ({"tp": 2}, 2, ["both"]),
        ({"tp": 2}, 3, ["both"]),
        ({"tp": 2}, 4, ["prefill", "decode"]),
        ({"tp": 2, "pp": 2}, 7, ["both"]),
        ({"decode": 3}, 3, ["both"]),
        ({"decode": 3}, 1, ["prefill", "decode"]),  # not even the decode replicas have a GPU each
        ({"prefill": 1}, 1, ["prefill", "decode"]),
        ({"device": "cpu"}, 1, ["prefill", "decode"]),
    ],
)
def test_few_gpus_get_one_pool_of_both_roles(
    options: dict[str, Any], num_gpus: int | None, roles: list[str]
) -> None:
    given = ServeOptions(model=str(TINY), **{"device": "cuda", **options})
    config, _, reason = serve_config(None, given, num_gpus)
    assert [pool.role for pool in config.pools] == roles
    assert bool(reason) == (roles == ["both"])


def test_a_file_names_its_pools_whatever_gpus_there_are(tmp_path: Path) -> None:
    config, _, reason = serve_config(written(tmp_path), ServeOptions(device="cuda"), 1)
    assert ([pool.role for pool in config.pools], reason) == (["prefill", "decode"], "")


@settings(max_examples=examples(60), deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "device": st.sampled_from(["cpu", "cuda"]),
            "tp": st.integers(1, 8),
            "ep": st.just(1),
            "pp": st.integers(1, 6),
            "dtype": st.sampled_from(["auto", "fp32", "bf16", "fp16"]),
            "prefill": st.integers(0, 9),
            "decode": st.integers(1, 9),
            "kv_tokens": st.sampled_from(["auto", "4096"]),
            "threads": st.integers(1, 9),
            "host": st.sampled_from(["127.0.0.1", "auto", "10.0.0.1"]),
            "port": st.integers(0, 9000),
            "admin_port": st.integers(9001, 9999),
            "http_port": st.integers(10_000, 10_999),
            "dram_gb": st.floats(0.5, 64),
            "model_name": st.text("abc-/:#'", max_size=9),
        },
    )
)
def test_the_printed_configuration_means_the_same(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]
) -> None:
    config = of_options(insecure=True, **options)
    assert load_config(written(tmp_path_factory.mktemp("printed"), config_yaml(config))) == config


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ("store: {dram_gb: 1, redis_url: 'redis://user:PASSED@host:6379/0'}", "redis://user:***@host:6379/0"),
        ("store: {dram_gb: 1, redis_url: 'rediss://:PASSED@[::1]:6379'}", "rediss://:***@[::1]:6379"),
        ("store: {dram_gb: 1, redis_url: 'redis://host:1/0?db=1&password=PASSED'}", "db=1&password=***"),
        ("store: {dram_gb: 1, redis_url: 'redis://host:1/0?ssl_Password=PASSED'}", "ssl_Password=***"),
        ("tracing: {endpoint: 'http://user:PASSED@collector:4317'}", "http://user:***@collector:4317"),
        ("tracing: {endpoint: 'https://collector:4317/?token=PASSED'}", "token=***"),
        ("tracing: {endpoint: 'https://u:PASSED[@x'}", "***"),
    ],
)
def test_no_password_is_printed(tmp_path: Path, settings: str, shown: str) -> None:
    text = f"model: {TINY}\npools: [{{name: both, role: both}}]\n{settings}\n"
    config = serve_config(written(tmp_path, text), ServeOptions()).config
    printed = config_yaml(config)
    assert "PASSED" not in printed
    assert shown in printed
    changed = serve_config(written(tmp_path, text.replace("PASSED", "ANOTHER")), ServeOptions()).config
    assert "PASSED" not in repr(found := changes(config, changed))
    assert "ANOTHER" not in repr(found)
    assert len(found) == 1


@pytest.mark.parametrize("text", ["redis://host:6379/0?db=2", "http://a@b/?q=1", "no URL: a@b", "a://"])
def test_what_has_no_password_is_printed_as_it_is(text: str) -> None:
    assert without_secrets(text) == text


def test_relative_paths_of_a_file_are_printed_as_absolute_ones(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    text = """
model: model
pools: [{name: both, role: both, layers: []}]
store: {nvme_path: kv, nvme_gb: 3}
auth: {mode: required, keys_file: keys.yaml, audit: {folder: audit}}
"""
    config = serve_config(written(tmp_path / "here", text), ServeOptions()).config
    assert load_config(written(tmp_path / "there", config_yaml(config))) == config
    assert "model_name" not in config_yaml(config)


def test_options_go_before_the_file_and_each_replaced_setting_is_named(tmp_path: Path) -> None:
    file = written(tmp_path)
    options = ServeOptions(
        tp=4, decode=5, port=7001, dtype="bf16", kv_tokens="8192", dram_gb=3, model=str(TINY)
    )
    config, changes, _ = serve_config(file, options)
    assert [(pool.tp, pool.replicas, pool.dtype) for pool in config.pools] == [(4, 2, "bf16"), (4, 5, "bf16")]
    assert (config.gateway.port, config.gateway.console_port, config.store.dram_gb) == (7001, 0, 3)
    assert [change_line(change, Path("cluster.yaml")) for change in changes] == [
        "--port 7001 replaces 7000, gateway.port of cluster.yaml",
        "--dram-gb 3 replaces 2, store.dram_gb of cluster.yaml",
        "--tp 4 replaces 2, pools[1].tp of cluster.yaml",
        "--decode 5 replaces 3, pools[1].replicas of cluster.yaml",
    ]


def test_a_file_that_needs_an_option_is_valid_with_it(tmp_path: Path) -> None:
    file = written(tmp_path, f"model: {TINY}\npools: [{{name: b, role: both}}]\ngateway: {{host: auto}}\n")
    with pytest.raises(ConfigError, match=r"gateway\.host: auto can be reached"):
        serve_config(file, ServeOptions())
    assert serve_config(file, ServeOptions(insecure=True)).config.auth.insecure


def test_replicas_that_do_both_are_counted_by_decode(tmp_path: Path) -> None:
    file = written(tmp_path, f"model: {TINY}\npools: [{{name: b, role: both}}]\n")
    assert serve_config(file, ServeOptions(decode=4)).config.pools[0].replicas == 4
    with pytest.raises(typer.BadParameter, match="no pool of the role prefill") as raised:
        serve_config(file, ServeOptions(prefill=2))
    assert raised.value.param_hint == "--prefill"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"nvme": Path("kv")}, "--nvme, --nvme-gb"),
        ({"nvme_gb": 3}, "--nvme, --nvme-gb"),
        ({"insecure": True, "keys_file": Path("keys")}, "--insecure, --keys-file"),
        ({"port": 9000, "admin_port": 9000}, "--port, --admin-port"),
        ({"admin_port": 9001, "http_port": 9001}, "--admin-port, --http-port"),
        ({"nvme": Path("kv"), "nvme_gb": 3, "dram_gb": 0}, "--dram-gb, --nvme"),
    ],
)
def test_options_that_contradict_each_other_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(typer.BadParameter) as raised:
        of_options(**options)
    assert raised.value.param_hint == named


@pytest.mark.parametrize(
    ("change", "options", "error"),
    [
        ({"auth": {"mode": "required", "keys_file": "k"}}, {"insecure": True},
         "--insecure contradicts auth.mode: required of "),
        ({"auth": {"insecure": True}}, {"keys_file": Path("k")},
         "cluster.yaml with --keys-file: auth: insecure contradicts mode required"),
        ({"pools": [{"name": "p", "role": "both", "pp": 2, "layers": [3, 3]}]}, {"pp": 3},
         "cluster.yaml with --pp: pools[0]: layers needs one entry for each of the pp = 3 stages, not 2"),
        ({"pools": [{"name": "p", "role": "both", "pp": 2, "devices": ["cuda", "cpu"]}]}, {"device": "cpu"},
         "contradicts pools[0].devices of "),
        ({"pools": [{"name": "a", "role": "decode"}, {"name": "b", "role": "decode"}]}, {"decode": 2},
         "has 2 pools of the role decode"),
        ({}, {"prefill": 0}, "remove the pool there instead"),
        ({}, {"device": "gpu"}, "with --device: pools[0].device: must be 'cpu' or 'cuda', not 'gpu'"),
        ({"pools": "none"}, {"tp": 2}, "pools: must be a list"),
        ({"gateway": 7}, {"port": 2}, "gateway: must be a mapping"),
    ],
)  # fmt: skip
def test_options_that_contradict_the_file_are_named(
    tmp_path: Path, change: dict[str, Any], options: dict[str, Any], error: str
) -> None:
    file = written(tmp_path, yaml.safe_dump(yaml.safe_load(FILE) | change))
    with pytest.raises((ConfigError, typer.BadParameter)) as raised:
        serve_config(file, ServeOptions(**options))
    assert error in str(raised.value)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"dtype": "int8"},
            "command line: pools[0].dtype: must be 'auto', 'fp32', 'bf16' or 'fp16', not 'int8'",
        ),
        ({"kv_tokens": "many"}, "'many' is neither a whole number nor auto"),
        ({"host": "0.0.0.0"}, "gateway.host: 0.0.0.0 can be reached from other hosts"),
        ({"tp": 16}, "pool prefill: tp 16, pp 1: tp is more than the model's 8 attention heads"),
    ],
)
def test_options_are_checked_as_a_file_is(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        of_options(**options)
    assert error in str(raised.value)


def test_what_a_gateway_has_in_a_file_stays_there(tmp_path: Path) -> None:
    text = f"model: {TINY}\npools: [{{name: both, role: both}}]\ngateway: {{host: auto, port: 7000}}\n"
    file = written(tmp_path, text + "auth: {insecure: true}\n")

    def places(**options: Any) -> tuple[str, int, int]:
        gateway = serve_config(file, ServeOptions(**options)).config.gateway
        return gateway.host, gateway.port, gateway.admin_port

    assert places() == ("auto", 7000, 0)
    assert places(host="10.0.0.1") == ("10.0.0.1", 7000, 0)
    assert places(port=0, admin_port=7002) == ("auto", 0, 7002)


def test_the_command_prints_a_file_and_says_what_it_replaced(tmp_path: Path) -> None:
    file = written(tmp_path)
    done = tandem("serve", "-f", str(file), "--tp", "1", "--print-config")
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"--tp 1 replaces 2, pools[1].tp of {file}\n"
    printed = written(tmp_path, done.stdout)
    assert [pool.tp for pool in load_config(printed).pools] == [1, 1]


def test_contradictory_options_of_the_command_are_a_usage_error() -> None:
    done = tandem("serve", "--insecure", "--keys-file", "keys.yaml", "--print-config")
    assert done.returncode == 2
    assert "--insecure, --keys-file" in done.stderr
