"""What stops a start before Ray does anything, and when it joins a Ray cluster of several nodes."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from certificates import write_certificate

from cluster.config import parse_config
from cluster.errors import ClusterError, StartError
from cluster.serve.launcher import Service
from cluster.serve.local_ray import check_length
from cluster.serve.private_folder import living_folders
from kvtransfer.common.clock import SystemClock

TINY = Path(__file__).parents[3] / "models" / "tiny"


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


def test_a_temporary_folder_with_too_long_a_path_is_said_to_be_so() -> None:
    """For the unix sockets that Ray makes below it."""
    check_length(Path("/tmp/tandem-runs-4294967294/1/ray"))
    with pytest.raises(StartError, match=r"more than 107 bytes; set TMPDIR to .* at least \d+ bytes shorter"):
        check_length(Path("/tmp") / ("x" * 80) / "ray")


def test_a_start_that_is_refused_leaves_no_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the path is too long before any process has been started."""
    temporary = tmp_path / ("x" * 80)
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    raw = {"model": str(TINY), "pools": [{"name": "all", "role": "both"}]}
    service = Service(parse_config(raw, "test"), SystemClock())
    with pytest.raises(StartError, match="set TMPDIR"):
        service.start(lambda progress: None, threading.Event())
    (folder,) = living_folders()
    assert (folder / "ray-token").exists()
    service.stop()
    assert living_folders() == []
    assert not folder.exists()
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ
