"""All targets, in groups that are opened together."""

from __future__ import annotations

from tests.fuzz import (
    target_connections,
    target_credentials,
    target_files,
    target_frames,
    target_gateway,
    target_http,
    target_http_port,
    target_nvme,
    target_replica,
    target_requests,
    target_transports,
)
from tests.fuzz.target import OpenTargets

GROUPS: dict[str, OpenTargets] = {
    "frames": target_frames.open_targets,
    "transports": target_transports.open_targets,
    "connections": target_connections.open_targets,
    "credentials": target_credentials.open_targets,
    "files": target_files.open_targets,
    "gateway": target_gateway.open_targets,
    "http": target_http.open_targets,
    "http port": target_http_port.open_targets,
    "nvme": target_nvme.open_targets,
    "replica": target_replica.open_targets,
    "requests": target_requests.open_targets,
}
