"""Each symbol of Ray beyond its public API that we use: that it is there, and what it does in a real Ray
cluster. A version of Ray in which one is gone, or behaves differently, fails here by name."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray_probe
from import_path import import_path
from packaging.requirements import Requirement
from ray import serve
from ray._private import services
from serving import ROOT, environment

from cluster.roster.ray_roster import AT_HEAD
from cluster.serve import ray_private
from cluster.serve.ray_private import HEAD_RESOURCE, with_version

TOKEN = "token-of-the-probe-0123456789"
TOKENS = """
import sys
from cluster.serve.ray_private import ray_token
from cluster.serve.ray_token import using_token_file
for path in sys.argv[1:]:
    with using_token_file(path):
        print(ray_token())
"""
AGENT_PORTS = (
    "dashboard_agent_listen_port",
    "metrics_agent_port",
    "metrics_export_port",
    "runtime_env_agent_port",
)
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Each function, with its parameters.
PARAMETERS = {
    "ray._private.state.available_resources_per_node": [],
    "ray._private.node.Node.get_logs_dir_path": ["self"],
    "ray._private.authentication.http_token_authentication.get_auth_headers_if_auth_enabled": [
        "user_headers"
    ],
    "ray._private.services.find_node_ids": [],
    "ray._private.services.resolve_ip_for_localhost": ["host"],
    "ray.serve._private.replica.add_port_to_grpc_server": ["server", "address"],
    "ray.experimental.internal_kv._internal_kv_get": ["key", "namespace"],
    "ray.experimental.internal_kv._internal_kv_put": ["key", "value", "overwrite", "namespace"],
    "ray.experimental.internal_kv._internal_kv_del": ["key", "del_by_prefix", "namespace"],
    "ray.serve._private.controller.ServeController.get_app_configs": ["self"],
}
# Each name, with its value in a process outside of a Ray cluster.
VALUES: dict[str, object] = {
    "ray._common.constants.HEAD_NODE_RESOURCE_NAME": "node:__internal_head__",
    "ray._private.ray_constants.DASHBOARD_ADDRESS": "dashboard",
    "ray._private.ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR": "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
    "ray._private.ray_constants.KV_NAMESPACE_DASHBOARD": b"dashboard",
    "ray._private.worker._global_node": None,
    # Each is the default of an environment variable of this name.
    "ray.autoscaler._private.constants.AUTOSCALER_METRIC_PORT": 44217,
    "ray.dashboard.consts.DASHBOARD_METRIC_PORT": 44227,
    "ray.serve._private.constants.SERVE_CONTROLLER_NAME": "SERVE_CONTROLLER_ACTOR",
    "ray.serve._private.constants.SERVE_NAMESPACE": "serve",
}


def symbol(path: str) -> Any:
    """The object of this dotted path."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return getattr(symbol(module), name)


def test_one_minor_version_of_ray_is_asked_for() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    (wanted,) = [Requirement(line.strip(' ",')) for line in lines if line.strip().startswith('"ray[')]
    assert wanted.specifier.contains("2.60.3")
    assert not wanted.specifier.contains("2.61.0")
    assert not wanted.specifier.contains("2.59.9")


@pytest.mark.parametrize("path", PARAMETERS)
def test_a_function_takes_what_we_give_it(path: str) -> None:
    assert list(inspect.signature(symbol(path)).parameters) == PARAMETERS[path]


@pytest.mark.parametrize("path", VALUES)
def test_a_name_has_its_value(path: str) -> None:
    assert symbol(path) == VALUES[path]


def test_a_deployment_takes_a_version_from_within() -> None:
    deployment = with_version(serve.deployment(ray_probe.Probe), "one")
    assert deployment._version == "one"
    assert with_version(deployment, "two")._version == "two"


def test_the_ports_of_agents_can_be_named() -> None:
    parameters = inspect.signature(symbol("ray._private.parameter.RayParams")).parameters
    assert set(AGENT_PORTS) <= set(parameters)


def test_a_node_is_started_with_what_is_said_and_only_then() -> None:
    parameters, resolve = symbol("ray._private.parameter.RayParams"), services.resolve_ip_for_localhost
    with ray_private.with_own_ports(loopback=True):
        made = symbol("ray._private.parameter.RayParams")(metrics_export_port=None)
        ports = {getattr(made, name) for name in AGENT_PORTS}
        assert len(ports) == len(AGENT_PORTS)
        assert 0 < min(ports) < max(ports) < int(EPHEMERAL.read_text().split()[0])
        assert services.resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"
        with pytest.raises(TypeError, match="missing a required argument"):
            services.start_raylet()  # ours, which looks at what it is given
    with ray_private.with_own_ports(loopback=False):
        assert services.resolve_ip_for_localhost is resolve
    with ray_private.with_loopback_kept():
        assert services.canonicalize_bootstrap_address("127.0.0.1:6379") == "127.0.0.1:6379"
    with ray_private.with_nodes_of(lambda: ["ours"]):
        assert services.find_node_ids() == ["ours"]
    assert symbol("ray._private.parameter.RayParams") is parameters
    assert services.resolve_ip_for_localhost is resolve
    assert services.find_node_ids() != ["ours"]


def test_a_port_is_written_where_a_raylet_looks_for_it(tmp_path: Path) -> None:
    assert {"session_dir", "node_id"} <= set(inspect.signature(services.start_raylet).parameters)
    name, node_id = symbol("ray._raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME"), "ab" * 28
    symbol("ray._raylet.persist_port")(str(tmp_path), node_id, name, 20_001)
    assert (tmp_path / f"dashboard_agent_listen_port_{node_id}").read_text() == "20001"


@pytest.mark.slow
def test_the_token_is_read_again_from_another_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"token-{name}-0123456789")
    done = subprocess.run(
        [sys.executable, "-c", TOKENS, str(tmp_path / "one"), str(tmp_path / "two")],
        env={**environment(), "RAY_AUTH_MODE": "token"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["token-one-0123456789", "token-two-0123456789"]


def behaves(test: Callable[[Any], None]) -> Callable[[Any], None]:
    """Mark a test that needs the Ray cluster of `reported`."""
    for mark in (pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(180)):
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def reported() -> Any:
    """What the probe's process found in a Ray cluster of its own."""
    support = str(Path(ray_probe.__file__).parent)
    done = subprocess.run(
        [sys.executable, ray_probe.__file__],
        env={
            **environment(),
            "PYTHONPATH": import_path(ROOT, support),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
        },
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@behaves
def test_free_resources_are_those_that_nobody_holds(reported: Any) -> None:
    assert reported["free_cpus"] == [2.0]


@behaves
def test_the_sessions_logs_are_found_once_ray_runs(reported: Any) -> None:
    assert reported["logs_before"] == ""
    assert reported["logs"].endswith("/logs")


@behaves
def test_no_socket_has_a_longer_path_than_is_reckoned_with(reported: Any) -> None:
    assert reported["raylet_socket"] in reported["sockets"]
    over = [len(path) - len(reported["temp_folder"]) for path in reported["sockets"]]
    assert max(over) <= reported["longest_socket"]


@behaves
def test_the_head_node_has_a_resource_of_its_own(reported: Any) -> None:
    assert HEAD_RESOURCE in reported["node_resources"]
    assert AT_HEAD.keys() == {HEAD_RESOURCE}


@behaves
def test_the_dashboard_is_where_ray_says(reported: Any) -> None:
    assert reported["dashboard"] == reported["dashboard_of_init"]


@behaves
def test_the_token_is_that_of_the_process(reported: Any) -> None:
    assert reported["token"] == TOKEN


@behaves
def test_values_are_stored_replaced_and_removed(reported: Any) -> None:
    assert reported["values"] == ["one", "two", None]


@behaves
def test_replicas_are_replaced_when_their_version_changes_and_only_then(reported: Any) -> None:
    first, same, other = reported["versions"]
    assert first == same
    assert first != other


@behaves
def test_a_build_sees_the_configuration_that_it_belongs_to(reported: Any) -> None:
    seen = reported["config"]
    assert {key: seen[key] for key in ray_probe.DECLARED} == ray_probe.DECLARED


@behaves
def test_there_is_no_configuration_without_serve_or_of_what_was_not_declared(reported: Any) -> None:
    assert (
        reported["config_before"] is reported["config_without_serve"] is reported["config_of_another"] is None
    )
