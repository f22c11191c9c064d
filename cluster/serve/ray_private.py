"""Every use of Ray beyond its public API, each behind one function.

Such symbols may change with any minor version of Ray, which is why `pyproject.toml` pins one. To move the
pin, run `tests/cluster/serve/test_ray_private.py` against the new version: it has a test for each symbol.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import secrets
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
import ray._private.parameter
import ray._private.utils
import ray._raylet
import ray.serve._private.replica
from ray import serve
from ray._common.constants import HEAD_NODE_RESOURCE_NAME as HEAD_RESOURCE
from ray._private import ray_constants, services
from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled
from ray._private.state import available_resources_per_node
from ray.experimental import internal_kv
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.schema import ServeApplicationSchema

_CONTROLLER_S = 30.0
# Settings of the ports of metrics of the dashboard and of the autoscaler, which are fixed otherwise.
_METRICS_PORTS = ("DASHBOARD_METRIC_PORT", "AUTOSCALER_METRIC_PORT")
_LISTEN_PORT = "dashboard_agent_listen_port"
# The names that `RayParams` gives to the ports of a node's agents.
_AGENT_PORTS = (
    _LISTEN_PORT,
    "metrics_agent_port",
    "metrics_export_port",
    "runtime_env_agent_port",
)
# Ports below those that the kernel gives to processes that request any.
_OWN_PORTS = range(20_000, 32_000)
# How long processes of a local Ray cluster live without its GCS, which is not restarted.
_GIVE_UP_S = 5
_BEARER = "Bearer "
# Whether a Ray process may use another address of its host than 127.0.0.1.
_MANY_HOSTS = ray._private.ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR

__all__ = [
    "HEAD_RESOURCE",
    "bind_serve_to_loopback",
    "dashboard_address",
    "delete_value",
    "deployed_config",
    "forget_token",
    "free_resources",
    "longest_socket",
    "out_of_reach",
    "ray_token",
    "raylet_socket",
    "read_value",
    "session_logs",
    "with_loopback_kept",
    "with_nodes_of",
    "with_own_ports",
    "with_version",
    "write_value",
]


def free_resources() -> list[dict[str, float]]:
    """Return the free resources of each living node, by name."""
    return list(available_resources_per_node().values())


def session_logs() -> str:
    """Return the folder of the Ray session's logs on this host; "" outside of a Ray cluster."""
    node = ray._private.worker._global_node
    return node.get_logs_dir_path() if node is not None else ""


def dashboard_address() -> str:
    """Return host:port of the dashboard, "" where there is none. Raises `RayError` or `RuntimeError` while
    the GCS is away."""
    found: bytes | None = internal_kv._internal_kv_get(
        ray_constants.DASHBOARD_ADDRESS, namespace=ray_constants.KV_NAMESPACE_DASHBOARD
    )
    return found.decode() if found else ""


def ray_token() -> str:
    """Return the Ray token of this process; "" where Ray uses none."""
    headers: dict[str, str] = get_auth_headers_if_auth_enabled({})
    return headers.get("authorization", headers.get("Authorization", "")).removeprefix(_BEARER)


def forget_token() -> None:
    """Make Ray read its token again, from the place that the environment names now."""
    loader: Any = ray._raylet
    loader.AuthenticationTokenLoader.instance().reset_cache()


def raylet_socket() -> str:
    """Return the path of the unix socket of the raylet that this process is connected to."""
    node = ray._private.worker._global_node
    assert node is not None, "this process has joined a Ray cluster"
    name: str = node.raylet_socket_name
    return name


def longest_socket() -> int:
    """Return how many bytes longer than Ray's temporary folder the path of its longest unix socket is, for a
    cluster that this process starts."""
    session = f"session_2000-01-01_00-00-00_000000_{os.getpid()}"
    return len(f"/{session}/sockets/dash_MetricsHead")


def write_value(key: bytes, value: bytes, namespace: bytes) -> None:
    """Store a value in the GCS, in place of an earlier one."""
    internal_kv._internal_kv_put(key, value, overwrite=True, namespace=namespace)


def read_value(key: bytes, namespace: bytes) -> bytes | None:
    """Return the value that `write_value` stored; None where there is none."""
    found: bytes | None = internal_kv._internal_kv_get(key, namespace=namespace)
    return found


def delete_value(key: bytes, namespace: bytes) -> None:
    """Remove the value, if there is one."""
    internal_kv._internal_kv_del(key, namespace=namespace)


def with_version(deployment: serve.Deployment, version: str) -> serve.Deployment:
    """Return the deployment with a version of its own: Serve replaces its replicas when that changes.

    Without one Serve draws a version for each deploy, and so replaces every replica. There is no public way.
    """
    return deployment.options(version=version, _internal=True)


def deployed_config(app: str) -> dict[str, Any] | None:
    """Return the entry of `app` in the latest configuration that Serve was sent, the one that it builds just
    now included; None where Serve does not run here, or the application was not declared.

    Raises `RayError` (also `GetTimeoutError`) while Serve's controller does not answer.
    """
    if not ray.is_initialized():
        return None
    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return None
    configs: dict[str, ServeApplicationSchema] = ray.get(
        controller.get_app_configs.remote(), timeout=_CONTROLLER_S
    )
    return configs[app].model_dump(exclude_unset=True) if app in configs else None


@contextlib.contextmanager
def out_of_reach(on_start: Callable[[subprocess.Popen[bytes]], None]) -> Iterator[None]:
    """Start the processes of `ray.init` in sessions of their own, and keep this process's signal handlers.

    A signal to this process group then does not reach them. None has a port that another Ray of this host may
    have. Ray's processes still end with this one, by
    PR_SET_PDEATHSIG, but not all that they have started. `on_start` is called with each process.
    """
    popen, set_handler = services.ConsolePopen, ray._private.utils.set_sigterm_handler

    own = {name: str(port) for name, port in _free_ports(_METRICS_PORTS).items()}

    def start(*args: Any, env: Mapping[str, str], **kwargs: Any) -> subprocess.Popen[bytes]:
        env = {**env, **own, "RAY_gcs_rpc_server_reconnect_timeout_s": str(_GIVE_UP_S)}
        process: subprocess.Popen[bytes] = popen(*args, env=env, start_new_session=True, **kwargs)
        on_start(process)
        return process

    def set_no_handler(handler: Callable[..., object]) -> None:
        """Take the place of Ray's handler, which would end the process at any point."""

    services.ConsolePopen, ray._private.utils.set_sigterm_handler = start, set_no_handler
    try:
        yield
    finally:
        services.ConsolePopen, ray._private.utils.set_sigterm_handler = popen, set_handler


def _free_ports(names: Sequence[str]) -> dict[str, int]:
    """Return a port for each name that nobody has on this host now: none of those that the kernel gives to
    others by itself before Ray's processes listen there."""
    found: dict[str, int] = {}
    with contextlib.ExitStack() as held:
        while len(found) < len(names):
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", _OWN_PORTS.start + secrets.randbelow(len(_OWN_PORTS))))
                found[names[len(found)]] = probe.getsockname()[1]
    return found


@contextlib.contextmanager
def with_own_ports(*, loopback: bool) -> Iterator[None]:
    """Make `ray.init` start a node none of whose ports is a fixed one that another Ray of this host may have;
    on `loopback`, at 127.0.0.1.

    The ports of its agents are chosen here, and the raylet finds them as if the agents had already written
    them: where it has to wait for that, it ends when a busy host needs more than 15 s to start an agent.
    """
    parameters = ray._private.parameter.RayParams
    start_raylet, own = services.start_raylet, _free_ports(_AGENT_PORTS)

    def start(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(start_raylet).bind(*args, **kwargs).arguments
        name: str = raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME
        raylet.persist_port(given["session_dir"], given["node_id"], name, own[_LISTEN_PORT])
        return start_raylet(*args, **kwargs)

    def with_ports(**given: Any) -> Any:
        return parameters(**{**given, **own})

    raylet: Any = ray._raylet
    ray._private.parameter.RayParams, services.start_raylet = with_ports, start
    try:
        with with_loopback_kept() if loopback else contextlib.nullcontext():
            yield
    finally:
        ray._private.parameter.RayParams, services.start_raylet = parameters, start_raylet


@contextlib.contextmanager
def with_loopback_kept() -> Iterator[None]:
    """Make `ray.init` and the processes that it starts use 127.0.0.1 where it is named; Ray would replace it
    by an address of this host that others reach."""
    resolve, before = services.resolve_ip_for_localhost, os.environ.get(_MANY_HOSTS)
    services.resolve_ip_for_localhost = _unchanged
    os.environ[_MANY_HOSTS] = "0"  # such as the dashboard, which joins by itself
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = resolve
        if before is None:
            del os.environ[_MANY_HOSTS]
        else:
            os.environ[_MANY_HOSTS] = before


def _unchanged(host: str) -> str:
    return host


@contextlib.contextmanager
def with_nodes_of(node_ids: Callable[[], list[str]]) -> Iterator[None]:
    """Make `ray.init` choose the node to connect to among those of `node_ids`, in place of all nodes that any
    process of this host names."""
    find = services.find_node_ids
    services.find_node_ids = node_ids
    try:
        yield
    finally:
        services.find_node_ids = find


def bind_serve_to_loopback() -> None:
    """Make Serve listen at 127.0.0.1 alone, where this node is there, with the port that each replica opens
    for other deployments. To be called in the constructor of a deployment, before Serve opens the port."""
    if ray.util.get_node_ip_address() == "127.0.0.1":
        replica = ray.serve._private.replica
        replica.add_port_to_grpc_server = functools.partial(_add_port, replica.add_port_to_grpc_server)


def _add_port(add: Callable[[Any, str], int], server: Any, address: str) -> int:
    return add(server, address.replace("[::]", "127.0.0.1"))
