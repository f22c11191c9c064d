"""The alert rules in the hands of Prometheus' own tool."""

from __future__ import annotations

import subprocess
from pathlib import Path

from optional_programs import find_program, needs_promtool
from prometheus import RULES

pytestmark = needs_promtool


def promtool(*arguments: str) -> str:
    command = [find_program("promtool"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_accepts_the_rules() -> None:
    assert "SUCCESS" in promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))


def test_alerts_fire_when_they_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(Path(__file__).with_name("alerts.yaml")))
