"""The declared application with replicas that do nothing, and a Ray cluster to deploy it to.

`build` is `cluster.serve.entrypoint:build` with another class for the replicas of the pools: gateway, roster,
scaler and every count are real. Run as a process, it is a Ray cluster that ends with its input.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import ray
from ray import serve

from cluster.serve import app, entrypoint


class DummyReplica:
    """Running as soon as it is made; ends as soon as it is told."""

    def __init__(self, *_arguments: object) -> None: ...


def build(args: dict[str, Any]) -> serve.Application:
    """As `cluster.serve.entrypoint.build`."""
    vars(app)["ReplicaActor"] = DummyReplica  # what `build_application` finds
    return entrypoint.build(args)


def main() -> None:
    """Start the cluster, print where it is as JSON, and wait for the end of the input."""
    context = ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=True,
        object_store_memory=128 << 20,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    print(
        json.dumps({"ray": context.address_info["gcs_address"], "dashboard": context.dashboard_url}),
        flush=True,
    )
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
