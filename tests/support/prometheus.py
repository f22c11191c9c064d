"""A real Prometheus that scrapes a running cluster, asked over its API."""

from __future__ import annotations

import json
import math
import subprocess
import threading
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError

from child_processes import killed_on_error
from optional_programs import find_program
from patience import START_S
from serving import free_port

from kvtransfer.common.clock import SystemClock

_START_S = START_S
_CONFIG = """
global: {{scrape_interval: {scrape_s}s, scrape_timeout: {scrape_s}s, evaluation_interval: 5s}}
scrape_configs:
  - job_name: ray
    file_sd_configs: [{{files: [{discovery}], refresh_interval: 2s}}]
rule_files: [{rules}]
"""


class Sample(NamedTuple):
    """One series of an answer, now."""

    labels: dict[str, str]
    value: float


class Prometheus:
    """Started on a free port of this host, with its data in `folder`; `stop` ends it."""

    def __init__(self, folder: Path, discovery: Path, rules: Path, scrape_s: int = 2) -> None:
        """`discovery` is the file in which Ray lists its metrics ports."""
        config = folder / "prometheus.yml"
        config.write_text(
            _CONFIG.format(
                scrape_s=scrape_s, discovery=json.dumps(str(discovery)), rules=json.dumps(str(rules))
            )
        )
        self._clock = SystemClock()
        self._address = f"127.0.0.1:{free_port()}"
        self._log = (folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [
                find_program("prometheus"),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self._address}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        with killed_on_error(self._process):
            self._wait_ready()

    def query(self, text: str) -> list[Sample]:
        """The series that it answers with now, those whose value is not a number left out."""
        found = self._get("query", query=text)
        samples = [Sample(item["metric"], float(item["value"][1])) for item in found["result"]]
        return [sample for sample in samples if not math.isnan(sample.value)]

    def rule_errors(self) -> dict[str, str]:
        """By rule: why its last evaluation failed."""
        groups = self._get("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return {rule["name"]: rule["lastError"] for rule in rules if rule.get("lastError")}

    def stop(self) -> None:
        """End it, and wait for that."""
        with self._log, killed_on_error(self._process):
            self._process.terminate()
            self._process.wait(30)

    def _wait_ready(self) -> None:
        deadline, pause = self._clock.now() + _START_S, threading.Event()
        while self._clock.now() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=5):
                    return
            except URLError:
                pause.wait(0.1)
        self.stop()
        raise AssertionError("Prometheus did not come up; see its log")

    def _get(self, what: str, **arguments: str) -> Any:
        url = f"http://{self._address}/api/v1/{what}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            answer = json.loads(reply.read())
        assert answer["status"] == "success", answer
        return answer["data"]
