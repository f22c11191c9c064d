"""Every use of Ray beyond its public API, each behind one function.

Such symbols may change with any minor version of Ray, which is why `pyproject.toml` pins one. To move the
pin, run `tests/cluster/test_ray_private.py` against the new version: it has a test for each symbol.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray
import ray._private.utils
from ray import serve
from ray._common.constants import HEAD_NODE_RESOURCE_NAME as HEAD_RESOURCE
from ray._private import ray_constants, services
from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled
from ray._private.state import available_resources_per_node
from ray.experimental import internal_kv
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.schema import ServeApplicationSchema

_CONTROLLER_S = 30.0
# How long processes of a local Ray cluster live without its GCS, which is not restarted.
_GIVE_UP_S = 5
_BEARER = "Bearer "

__all__ = [
    "HEAD_RESOURCE",
    "dashboard_address",
    "delete_value",
    "deployed_config",
    "free_resources",
    "out_of_reach",
    "ray_token",
    "read_value",
    "session_logs",
    "with_version",
    "write_value",
]


def free_resources() -> list[dict[str, float]]:
    """Return what each living node has free, by resource."""
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


def write_value(key: bytes, value: bytes, namespace: bytes) -> None:
    """Store a value in the GCS, in place of an earlier one."""
    internal_kv._internal_kv_put(key, value, overwrite=True, namespace=namespace)


def read_value(key: bytes, namespace: bytes) -> bytes | None:
    """Return what `write_value` stored; None where there is nothing."""
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
    """Start what `ray.init` starts in sessions of their own, and keep this process's signal handlers.

    A signal to this process group then does not reach them. Ray's processes still end with this one, by
    PR_SET_PDEATHSIG, but not all that they have started. `on_start` is called with each process.
    """
    popen, set_handler = services.ConsolePopen, ray._private.utils.set_sigterm_handler

    def start(*args: Any, env: Mapping[str, str], **kwargs: Any) -> subprocess.Popen[bytes]:
        env = {**env, "RAY_gcs_rpc_server_reconnect_timeout_s": str(_GIVE_UP_S)}
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
