"""Somebody with the Ray token, curl and `tandem status`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving import RunningCluster

from cluster.proto import tandem_pb2 as pb


class Operator:
    """Orders and looks through the dashboard of a running cluster."""

    def __init__(self, cluster: RunningCluster) -> None:
        self.dashboard = cluster.addresses["dashboard"]
        self.token_file = cluster.addresses["Ray token"].removeprefix("in ")
        self.token = Path(self.token_file).read_text().strip()

    def ask(self, path: str, body: dict[str, int] | None = None) -> Any:
        request = urllib.request.Request(
            self.dashboard + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            error.close()
            raise

    def scale(self, pool: str, num_replicas: int) -> None:
        path = f"/api/v1/applications/tandem/deployments/Pool-{pool}/scale"
        self.ask(path, {"target_num_replicas": num_replicas})

    def target(self, pool: str) -> int:
        instance = self.ask("/api/serve/applications/")
        found: int = instance["applications"]["tandem"]["deployments"][f"Pool-{pool}"]["target_num_replicas"]
        return found

    def process_ids(self, class_name: str) -> list[int]:
        rows = self.ask("/api/v0/actors?detail=1&limit=1000")["data"]["result"]["result"]
        return [
            row["pid"] for row in rows if row["state"] == "ALIVE" and row["class_name"].startswith(class_name)
        ]


def ready(pool: str, num_replicas: int) -> Callable[[pb.StatusResponse], bool]:
    """So many replicas of the pool, all ready, and none on its way out."""

    def holds(status: pb.StatusResponse) -> bool:
        states = [replica.state for replica in status.replicas if replica.pool == pool]
        return states == ["ready"] * num_replicas

    return holds


def pool_of(status: pb.StatusResponse, name: str) -> pb.Pool:
    return next(pool for pool in status.pools if pool.name == name)
