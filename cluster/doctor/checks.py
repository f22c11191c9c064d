"""The results of checks: what was seen, why it matters, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

Figure = int | float | str | bool
Figures = dict[str, Figure]


class Severity(StrEnum):
    """Rates a result. `NOTE`: good to know; `WARNING`: works, but slower or less safely; `ERROR`: does not
    work."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        """Higher is worse."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Represents one result: `seen` has the numbers in words, `figures` for programs, with units in the
    names."""

    severity: Severity
    seen: str
    why: str = ""
    remedy: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finding:
    """Represents a result with the name and the group of its check."""

    check: str
    group: str
    result: CheckResult

    @property
    def severity(self) -> Severity:
        return self.result.severity


def ok(seen: str, /, **figures: Figure) -> CheckResult:
    """Return the result of something that works."""
    return CheckResult(Severity.OK, seen, figures=figures)


def note(seen: str, why: str = "", remedy: str = "", /, **figures: Figure) -> CheckResult:
    """Return a result that is good to know."""
    return CheckResult(Severity.NOTE, seen, why, remedy, figures)


def warning(seen: str, why: str, remedy: str, /, **figures: Figure) -> CheckResult:
    """Return the result of something that works, but slower or less safely."""
    return CheckResult(Severity.WARNING, seen, why, remedy, figures)


def error(seen: str, why: str, remedy: str, /, **figures: Figure) -> CheckResult:
    """Return the result of something that does not work."""
    return CheckResult(Severity.ERROR, seen, why, remedy, figures)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Sort the findings, the worst first; equal ones keep their order."""
    return sorted(findings, key=lambda finding: -finding.severity.rank)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 1 when something does not work, else 0."""
    return int(any(finding.severity is Severity.ERROR for finding in findings))


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """Return a JSON object with stable keys: `ok`, `counts` by severity, and `findings`, worst first, each
    with `check`, `group`, `severity`, `seen`, `why`, `remedy` and `figures`."""
    ordered = worst_first(findings)
    counts = {str(severity): 0 for severity in Severity}
    for finding in ordered:
        counts[finding.severity] += 1
    listed = [{"check": item.check, "group": item.group, **asdict(item.result)} for item in ordered]
    return {"ok": not exit_status(ordered), "counts": counts, "findings": listed}


C = TypeVar("C")
