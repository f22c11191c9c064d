"""What stops a start before Ray does anything, and when it joins a Ray cluster of several nodes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from certificates import write_certificate

from cluster.config import parse_config
from cluster.errors import ClusterError
from cluster.serve.launcher import Service
from kvtransfer.common.clock import SystemClock

TINY = Path(__file__).parents[2] / "models" / "tiny"


def test_files_of_gateways_are_read_before_ray_starts(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    (tmp_path / "text").write_text("no PEM")
    cert_file, key_file = map(str, write_certificate(tmp_path, "a"))
    pair = {"tls_cert_file": cert_file, "tls_key_file": key_file}
    tried: list[tuple[str, dict[str, Any]]] = [
        ("auth.keys_file", {"auth": {"mode": "required", "keys_file": missing}}),
        ("auth.keys_file", {"auth": {"mode": "required", "keys_file": str(tmp_path)}}),
        ("auth.key_root_file", {"auth": {"key_root_file": missing}}),
        ("auth.audit.folder", {"auth": {"audit": {"folder": str(tmp_path / "text" / "below")}}}),
        ("gateway.tls_cert_file", {"gateway": {**pair, "tls_cert_file": missing}}),
        ("gateway.tls_key_file", {"gateway": {**pair, "tls_key_file": str(tmp_path / "text")}}),
        (
            "auth.certificates.ca_file",
            {"gateway": pair, "auth": {"mode": "required", "certificates": {"ca_file": missing}}},
        ),
    ]
    for field, settings in tried:
        assert refusal(settings).startswith(f"{field}: "), field


def refusal(settings: dict[str, Any]) -> str:
    """Why a start with these settings is refused, before it reports its first stage."""
    reported: list[str] = []
    raw = {"model": str(TINY), "pools": [{"name": "all", "role": "both"}], **settings}
    with pytest.raises(ClusterError) as refused:
        Service(parse_config(raw, "test"), SystemClock()).start(
            lambda progress: reported.append(progress.stage), threading.Event()
        )
    assert reported == []
    return str(refused.value)
