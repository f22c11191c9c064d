"""What a check has to say: what was seen, why it matters, what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from cluster.config import ClusterConfig
from cluster.serve.machine import Machine
from cluster.serve.memory import Needs
from kvtransfer.common.clock import Clock

Figure = int | float | str | bool
Figures = dict[str, Figure]


class Severity(StrEnum):
    """`NOTE`: to know of; `WARNING`: works, but slower or less safely; `ERROR`: does not work."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        """Higher is worse."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`seen` has the figures in words, `figures` for programs, with the unit in each name."""

    severity: Severity
    seen: str
    why: str = ""
    remedy: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict with the name and the group of the check that gave it."""

    check: str
    group: str
    verdict: Verdict

    @property
    def severity(self) -> Severity:
        return self.verdict.severity


def ok(seen: str, /, **figures: Figure) -> Verdict:
    return Verdict(Severity.OK, seen, figures=figures)


def note(seen: str, why: str = "", remedy: str = "", /, **figures: Figure) -> Verdict:
    return Verdict(Severity.NOTE, seen, why, remedy, figures)


def warning(seen: str, why: str, remedy: str, /, **figures: Figure) -> Verdict:
    return Verdict(Severity.WARNING, seen, why, remedy, figures)


def error(seen: str, why: str, remedy: str, /, **figures: Figure) -> Verdict:
    return Verdict(Severity.ERROR, seen, why, remedy, figures)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first; equal ones stay in their order."""
    return sorted(findings, key=lambda finding: -finding.severity.rank)


def exit_status(findings: Iterable[Finding]) -> int:
    """1 when something does not work, else 0."""
    return int(any(finding.severity is Severity.ERROR for finding in findings))


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """Stable keys: `ok`, `counts` by severity, and `findings`, worst first, each with `check`, `group`,
    `severity`, `seen`, `why`, `remedy` and `figures`."""
    ordered = worst_first(findings)
    counts = {str(severity): 0 for severity in Severity}
    for finding in ordered:
        counts[finding.severity] += 1
    listed = [{"check": item.check, "group": item.group, **_fields(item.verdict)} for item in ordered]
    return {"ok": not exit_status(ordered), "counts": counts, "findings": listed}


def _fields(verdict: Verdict) -> dict[str, Any]:
    fields = asdict(verdict)
    return {**fields, "severity": str(verdict.severity), "figures": dict(verdict.figures)}


# ----------------------------------------------------------------------------------------------
# What a check before start is given, and what makes a function a check.

C = TypeVar("C")


@dataclass(frozen=True)
class CheckContext:
    """This machine, and what is to run on it."""

    machine: Machine
    config: ClusterConfig
    # None: the model folder cannot be read.
    needs: Needs | None
    environment: Mapping[str, str]
    clock: Clock
    ray_address: str = "auto"
    # The cluster of this configuration runs already: its ports and its memory are taken by itself.
    is_running: bool = False


class Check(NamedTuple, Generic[C]):
    """`look` says nothing where the question does not arise."""

    name: str
    group: str
    # For the documentation: what is looked at.
    question: str
    look: Callable[[C], Iterable[Verdict]]

    def findings(self, case: C) -> list[Finding]:
        return [Finding(self.name, self.group, verdict) for verdict in self.look(case)]
