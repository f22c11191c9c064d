"""The application as a Serve configuration declares it: what must be said, and what is built of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chart_harness import with_value
from ray import serve
from ray.serve._private.build_app import build_app
from serving import TINY

from cluster.config import parse_config
from cluster.errors import ConfigError
from cluster.identity.key_roots import rotate_key_root
from cluster.scaling.serve_client import declared_counts
from cluster.secret_files import read_redis_url
from cluster.serve.app import build_application
from cluster.serve.entrypoint import build, declared_config, declared_life, with_declared_counts
from workers.errors import WorkerError

SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def args(tmp_path: Path) -> dict[str, Any]:
    """Complete, for the bundled model."""
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    (tmp_path / "url").write_text("redis://:pass@redis:6379/0\n")
    rotate_key_root(tmp_path / "roots", bytes)
    pool = {"cpus_per_rank": 0.5, "dtype": "bf16", "engine": {"block_tokens": 16}}
    return {
        "secret_file": str(tmp_path / "secret"),
        "redis_url_file": str(tmp_path / "url"),
        "config": {
            "model": str(TINY),
            "pools": [
                {"name": "prefill", "role": "prefill", "tp": 2, **pool},
                {"name": "decode", "role": "decode", "resources": {"tandem_pool_decode": 0.001}, **pool},
            ],
            "gateway": {"resources": {"tandem_gateway": 1}},
            "auth": {"key_root_file": str(tmp_path / "roots")},
        },
    }


def test_it_builds_one_deployment_a_pool_and_the_gateway(args: dict[str, Any]) -> None:
    application = build(args)
    assert isinstance(application, serve.Application)
    built = build_app(application, name="tandem")
    deployments = {deployment.name: deployment for deployment in built.deployments}
    assert deployments.keys() == {"Gateway", "Pool-prefill", "Pool-decode"}
    assert built.ingress_deployment_name == "Gateway"
    gateway = deployments["Gateway"].ray_actor_options
    assert gateway["resources"] == {"tandem_gateway": 1}
    bundles = {name: deployments[f"Pool-{name}"]._replica_config for name in ("prefill", "decode")}
    assert bundles["prefill"].placement_group_bundles == [{"CPU": 0.05}, {"CPU": 1.0}]
    assert bundles["decode"].placement_group_bundles == [
        {"CPU": 0.05, "tandem_pool_decode": 0.001},
        {"CPU": 0.5, "tandem_pool_decode": 0.001},
    ]


def test_counts_come_from_the_entry_of_the_gateways_which_may_change_without_a_build(
    args: dict[str, Any],
) -> None:
    config = declared_config(args)
    entry = {"name": "Gateway", "user_config": {"replicas": {"decode": 3, "gone": 2, "prefill": "two"}}}
    reported = with_declared_counts(config, {"name": "tandem", "deployments": [entry]})
    assert [(pool.name, pool.replicas) for pool in reported.pools] == [("prefill", 1), ("decode", 3)]
    for nothing in (None, {"name": "tandem"}, {"deployments": [{"name": "Gateway"}]}):
        assert with_declared_counts(config, nothing) == config


def test_a_count_that_would_go_before_what_was_ordered_is_refused(args: dict[str, Any]) -> None:
    entry = {"deployments": [{"name": "Pool-decode", "num_replicas": 4}]}
    with pytest.raises(
        ConfigError, match=r"Pool-decode\.num_replicas: leave it out.* replicas: \{decode: 4\}"
    ):
        with_declared_counts(declared_config(args), entry)


def test_what_was_ordered_is_bound_and_what_is_declared_is_reported(args: dict[str, Any]) -> None:
    config = with_value(args["config"], "scaling", {})
    application = build_application(
        declared_config({**args, "config": config}),
        {"prefill": 1.0, "decode": 1.0},
        counts={"decode": 5},
    )
    deployments = {each.name: each for each in build_app(application, name="tandem").deployments}
    assert deployments["Pool-decode"]._deployment_config.num_replicas == 5
    assert deployments["Pool-prefill"]._deployment_config.num_replicas == 1
    user_config = deployments["Gateway"]._deployment_config.user_config
    assert declared_counts(user_config) == {"prefill": 1, "decode": 1}


def test_what_the_files_hold_is_used(args: dict[str, Any]) -> None:
    store = declared_config(args).store
    assert "pass" not in store.model_dump_json(), "Serve keeps it; each process reads the file"
    assert read_redis_url(store) == "redis://:pass@redis:6379/0"
    again = {**args, "config": {**args["config"], "secret_file": args.pop("secret_file")}}
    assert declared_config(again).secret_file == Path(again["config"]["secret_file"])


def test_its_life_is_the_same_each_time_and_another_for_another_secret() -> None:
    first = declared_life("tandem", SECRET.encode())
    assert first == declared_life("tandem", SECRET.encode())
    others = {declared_life("tandem-v2", SECRET.encode()), declared_life("tandem", b"f" * 32)}
    assert first not in others
    assert len(others) == 2


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("configuration", {}, r"args\.configuration: unknown; the keys are config, secret_file"),
        ("config", None, r"args\.config: expected a mapping"),
        ("config.model", "org/name", r"args\.config: model: org/name must name a commit"),
        ("config.model", "models/tiny", r"args\.config: model: models/tiny must be an absolute path"),
        ("config.pools", [], r"args\.config: pools: "),
        (
            "config.store",
            {"nvme_path": "nvme", "nvme_gb": 9},
            r"args\.config: store\.nvme_path: nvme must be an absolute",
        ),
        (
            "config.gateway",
            {"tls_cert_file": "c", "tls_key_file": "/k"},
            r"args\.config: gateway\.tls_cert_file: c must be an",
        ),
        (
            "config.auth",
            {"mode": "required", "keys_file": "keys.yaml", "audit": {"folder": "/audit"}},
            r"args\.config: auth\.keys_file: keys\.yaml must be an absolute path",
        ),
        (
            "config.auth",
            {"audit": {"folder": "audit"}},
            r"args\.config: auth\.audit\.folder: audit must be an absolute path",
        ),
        (
            "config.auth",
            {"mode": "required", "jwt": {"keys_file": "jwks", "issuer": "i", "audience": "a"}},
            r"args\.config: auth\.jwt\.keys_file: jwks must be an absolute path",
        ),
        (
            "config.router",
            {"polcy": "cost"},
            r"args\.config: router\.polcy: unknown key; did you mean policy",
        ),
        ("secret_file", "/nowhere/secret", r"secret_file: .*/nowhere/secret"),
        ("secret_file", 7, r"args\.secret_file: expected the path of a file"),
        ("redis_url_file", "/nowhere/url", r"redis_url_file: .*/nowhere/url"),
    ],
)
def test_what_is_wrong_is_named(args: dict[str, Any], path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(with_value(args, path, value))


def test_what_tandem_serve_would_settle_must_be_said(args: dict[str, Any], tmp_path: Path) -> None:
    del args["secret_file"], args["redis_url_file"], args["config"]["auth"]
    del args["config"]["pools"][1]["cpus_per_rank"]
    for pool in args["config"]["pools"]:
        del pool["dtype"]
    with pytest.raises(ConfigError) as caught:
        build(args)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "secret_file",
        "auth.key_root_file",
        "pools[0].dtype",
        "pools[1].cpus_per_rank",
        "pools[1].dtype",
        "store.redis_url",
    ]
    assert all(line.startswith("args.config: ") for line in lines)
    args["config"]["pools"][1]["cpus_per_rank"] = 1
    args["config"]["auth"] = {"key_root_file": str(tmp_path / "roots")}
    for pool in args["config"]["pools"]:
        pool["dtype"] = "bf16"
    without_index = with_value(args, "config.store", {"index": False})
    assert not declared_config({**without_index, "secret_file": str(tmp_path / "secret")}).store.index


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("secret", b"short\n", "secret_file: needs at least 16 bytes, has 5"),
        ("url", b"\n", "redis_url_file: .* is empty"),
        ("url", b"\xff\xfe", "redis_url_file: .* holds no text"),
        ("url", b"http://redis", "store.redis_url_file: must begin with one of redis://"),
    ],
)
def test_files_that_cannot_be_right_are_named(
    args: dict[str, Any], tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        build(args)


def test_the_model_is_looked_at(args: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tp is more than the model's"):
        build(with_value(args, "config.pools", [{**args["config"]["pools"][1], "tp": 64}]))
    with pytest.raises((ConfigError, WorkerError), match="no-model"):
        build(with_value(args, "config.model", str(tmp_path / "no-model")))


def test_a_file_of_tandem_serve_is_a_declared_one_with_four_things_said(args: dict[str, Any]) -> None:
    assert declared_config(args).pools == parse_config(args["config"], "file").pools


def test_on_gpus_auto_needs_nobody_to_look_at_processors(args: dict[str, Any]) -> None:
    for pool in args["config"]["pools"]:
        del pool["dtype"]
        pool["device"] = "cuda"
    assert {pool.dtype for pool in declared_config(args).pools} == {"auto"}
