"""Dashboards and alert rules as they stand in the repository, and what their queries name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from cluster.metrics.definitions import METRICS, Metric

ROOT = Path(__file__).resolve().parent.parent.parent
DASHBOARDS = tuple(sorted((ROOT / "helm" / "tandem" / "dashboards").glob("*.json")))
RULES = ROOT / "helm" / "tandem" / "rules" / "tandem.yaml"


def series_names(metric: Metric) -> tuple[str, ...]:
    """The names that Prometheus has for the metric, without `ray_tandem_`."""
    if metric.kind == "histogram":
        return tuple(f"{metric.name}_{part}" for part in ("bucket", "sum", "count"))
    return (metric.name,)


# By the name at Prometheus.
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
    """Those that show something."""
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
    """The metrics of ours that a query reads, by their names at Prometheus."""
    return set(re.findall(r"\bray_tandem_\w+", text))


def labels_of(query: Query) -> set[str]:
    """All labels that a query, or its legend, names."""
    named: set[str] = set()
    for selector in re.findall(r"\{([^}]*)\}", query.text):
        named |= set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
    for group in re.findall(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)", query.text):
        named |= {label.strip() for label in group.split(",") if label.strip()}
    return named | set(re.findall(r"\{\{(\w+)\}\}", query.legend))


def known_labels(query: Query) -> set[str]:
    """Those that a metric of the query has."""
    known: set[str] = set()
    for name in series_of(query.text):
        known |= set(SERIES[name].labels) | ({"le"} if name.endswith("_bucket") else set())
    return known
