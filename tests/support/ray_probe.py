"""What `cluster.serve.ray_private` returns in a real Ray cluster, as one JSON line. A process with
RAY_AUTH_TOKEN.

`build` is the application that it declares to Ray Serve.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import urllib.request
from pathlib import Path
from typing import Any

import ray
from ray import serve

from cluster.serve import ray_private

NAMESPACE = b"probe"
DECLARED: dict[str, Any] = {
    "name": "declared",
    "import_path": "ray_probe:build",
    "route_prefix": "/declared",
    "args": {"color": "green"},
    "deployments": [{"name": "Probe", "user_config": {"replicas": {"decode": 5}}}],
}
_POLL_S = 0.1


class Probe:
    """A deployment that names its process."""

    def reconfigure(self, settings: Any) -> None:
        """Take the `user_config`."""

    def process_id(self) -> int:
        return os.getpid()


def build(args: dict[str, Any]) -> serve.Application:
    """Note the configuration, of which this build is a part, as the build itself sees it."""
    seen = ray_private.deployed_config("declared")
    ray_private.write_value(b"seen", json.dumps(seen).encode(), NAMESPACE)
    return serve.deployment(Probe).options(ray_actor_options={"num_cpus": 0}).bind()


def versions() -> list[int]:
    """Return the processes of a deployment of version 1, of the same deployed again, and of version 2."""
    process_ids = []
    for version in ("1", "1", "2"):
        deployment = ray_private.with_version(serve.deployment(Probe), version)
        handle = serve.run(deployment.options(ray_actor_options={"num_cpus": 0}).bind(), route_prefix=None)
        process_ids.append(int(handle.process_id.remote().result(timeout_s=30)))
    return process_ids


def declared_config(dashboard: str) -> Any:
    """Return the configuration that `build` got when Serve called it."""
    request = urllib.request.Request(
        f"http://{dashboard}/api/serve/applications/",
        data=json.dumps({"applications": [DECLARED]}).encode(),
        headers={
            "Authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}",
            "Content-Type": "application/json",
        },
        method="PUT",
    )
    urllib.request.urlopen(request, timeout=30).close()
    pause = threading.Event()
    while (seen := ray_private.read_value(b"seen", NAMESPACE)) is None:
        pause.wait(_POLL_S)  # the test that reads the JSON has the deadline
    return json.loads(seen)


def values() -> list[str | None]:
    """Return a value that is stored, replaced and removed, as it is read each time."""
    found = []
    for text in (b"one", b"two"):
        ray_private.write_value(b"key", text, NAMESPACE)
        found.append(ray_private.read_value(b"key", NAMESPACE))
    ray_private.delete_value(b"key", NAMESPACE)
    found.append(ray_private.read_value(b"key", NAMESPACE))
    return [text.decode() if text is not None else None for text in found]


def main() -> None:
    before = {
        "logs_before": ray_private.session_logs(),
        "config_before": ray_private.deployed_config("declared"),
    }
    context = ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=True,
        object_store_memory=128 << 20,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    (node,) = ray.nodes()
    holder = ray.remote(Probe).options(num_cpus=1).remote()
    ray.get(holder.process_id.remote())
    reported = {
        **before,
        "config_without_serve": ray_private.deployed_config("declared"),
        "free_cpus": [free["CPU"] for free in ray_private.free_resources()],
        "logs": ray_private.session_logs(),
        "node_resources": list(node["Resources"]),
        "dashboard": ray_private.dashboard_address(),
        "dashboard_of_init": context.dashboard_url,
        "token": ray_private.ray_token(),
        "values": values(),
        "raylet_socket": ray_private.raylet_socket(),
        "sockets": [str(path) for path in Path(ray_private.raylet_socket()).parent.iterdir()],
        "temp_folder": str(Path(ray_private.raylet_socket()).parents[2]),
        "longest_socket": ray_private.longest_socket(),
    }
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled")
    reported["versions"] = versions()
    reported["config_of_another"] = ray_private.deployed_config("default")
    reported["config"] = declared_config(context.dashboard_url)
    print(json.dumps(reported), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
