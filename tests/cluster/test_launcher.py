"""What stops a start before Ray does anything."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cluster.config import parse_config
from cluster.errors import ConfigError
from cluster.serve.launcher import Service
from kvtransfer.common.clock import SystemClock

TINY = Path(__file__).parents[2] / "models" / "tiny"


def test_files_of_callers_are_read_before_ray_starts(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    raw = {
        "model": str(TINY),
        "pools": [{"name": "all", "role": "both"}],
        "auth": {"mode": "required", "keys_file": str(keys)},
    }
    reported: list[str] = []
    with pytest.raises(ConfigError, match=rf"auth\.keys_file: .*{keys}"):
        Service(parse_config(raw, "test"), SystemClock()).start(
            lambda progress: reported.append(progress.stage), threading.Event()
        )
    assert reported == []
