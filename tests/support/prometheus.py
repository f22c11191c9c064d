"""What Prometheus sees: a real one that scrapes a running cluster, the queries of the dashboards and
alert rules in the repository, and the metric tables of docs/observability.md. Run this file to print the
tables."""

from __future__ import annotations

import json
import math
import re
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError

import yaml
from child_processes import killed_on_error
from optional_programs import find_program
from patience import START_S
from serving import free_port

from cluster.metrics.definitions import METRICS, SECTIONS
from cluster.metrics.metric import Metric
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
        """Return the series with which Prometheus answers now, except those whose value is not a number."""
        found = self._get("query", query=text)
        samples = [Sample(item["metric"], float(item["value"][1])) for item in found["result"]]
        return [sample for sample in samples if not math.isnan(sample.value)]

    def rule_errors(self) -> dict[str, str]:
        """Return, by rule, why its last evaluation failed."""
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


ROOT = Path(__file__).resolve().parent.parent.parent
DASHBOARDS = tuple(sorted((ROOT / "helm" / "tandem" / "dashboards").glob("*.json")))
RULES = ROOT / "helm" / "tandem" / "rules" / "tandem.yaml"


def series_names(metric: Metric) -> tuple[str, ...]:
    """Return the names that Prometheus has for the metric, without `ray_tandem_`."""
    if metric.kind == "histogram":
        return tuple(f"{metric.name}_{part}" for part in ("bucket", "sum", "count"))
    return (metric.name,)


# The metrics by the name at Prometheus.
SERIES: dict[str, Metric] = {
    f"ray_tandem_{name}": metric for metric in METRICS.values() for name in series_names(metric)
}


class Query(NamedTuple):
    """One query of a panel or a rule; `where` names it for people."""

    where: str
    text: str
    legend: str = ""


def dashboard(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def panels(path: Path) -> list[dict[str, Any]]:
    """Return the panels that show something."""
    return [panel for panel in dashboard(path)["panels"] if panel["type"] != "row"]


def panel_queries(path: Path) -> list[Query]:
    return [
        Query(f"{path.stem} / {panel['title']} / {target['refId']}", target["expr"], target["legendFormat"])
        for panel in panels(path)
        for target in panel["targets"]
    ]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def rule_queries() -> list[Query]:
    return [Query(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]


def series_of(text: str) -> set[str]:
    """Return the metrics of ours that a query reads, by their names at Prometheus."""
    return set(re.findall(r"\bray_tandem_\w+", text))


def labels_of(query: Query) -> set[str]:
    """Return all labels that a query, or its legend, names."""
    named: set[str] = set()
    for selector in re.findall(r"\{([^}]*)\}", query.text):
        named |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
    for group in re.findall(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)", query.text):
        named |= {label.strip() for label in group.split(",") if label.strip()}
    return named | set(re.findall(r"\{\{(\w+)\}\}", query.legend))


def known_labels(query: Query) -> set[str]:
    """Return the labels that a metric of the query has."""
    known: set[str] = set()
    for name in series_of(query.text):
        known |= set(SERIES[name].labels) | ({"le"} if name.endswith("_bucket") else set())
    return known


HEAD = "| metric | kind | labels | meaning | empty while |\n|---|---|---|---|---|\n"


def table(metrics: Iterable[Metric]) -> str:
    """Return the table of one section, as it stands in the page."""
    return HEAD + "".join(map(_row, metrics))


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    unit = f" ({metric.unit})" if metric.unit else ""
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help}{unit} | {metric.why_empty} |\n"


if __name__ == "__main__":
    for title, metrics in SECTIONS.items():
        print(f"### {title}\n\n{table(metrics)}")
