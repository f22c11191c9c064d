"""The figures of served requests, live, recorded or simulated: how they are computed, and shown as one table
or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from rich.table import Table

from cluster.cli.terminal import NONE, made_table

PERCENTILES = (50, 90, 99)
# The knee of a sweep: the highest offered rate of which at least this share was good.
KNEE_SHARE = 0.9
# Later turns of sessions are summed up as this one.
MAX_TURN = 16

# What is shown where there were any.
_LOST = (
    ("refused", "num_refused"),
    ("expired", "num_expired"),
    ("timed out", "num_timed_out"),
    ("failed", "num_failed"),
)
_RATES = (
    ("requests/s", "requests_per_s"),
    ("input tokens/s", "input_tok_s"),
    ("output tokens/s", "output_tok_s"),
)
_TIMES = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("end to end", "e2e_ms"))


class ServedRequest(Protocol):
    """One request and what came of it. Times are seconds of one clock."""

    @property
    def sent_at(self) -> float: ...

    @property
    def finished_at(self) -> float: ...

    @property
    def outcome(self) -> str:
        """ "ok", "refused", "expired" (refused after it had been accepted), "timed out" or "failed"."""

    @property
    def reason(self) -> str:
        """Why it is not "ok"; "": not known."""

    @property
    def service_class(self) -> str: ...

    @property
    def num_input(self) -> int:
        """The tokens of its prompt."""

    @property
    def num_cached(self) -> int:
        """The tokens of its prompt that were not computed."""

    @property
    def num_output(self) -> int: ...

    @property
    def ttft_s(self) -> float:
        """The time to the first token, of a request with output."""

    @property
    def tpot_s(self) -> float | None:
        """The mean time of an output token after the first; None: there is none."""

    @property
    def gaps_s(self) -> Sequence[float]:
        """The times between consecutive tokens; empty where they are not known."""


R = TypeVar("R", bound=ServedRequest)


class TurnRequest(ServedRequest, Protocol):
    """One request of a session."""

    @property
    def turn(self) -> int:
        """Its number in the session, from 1."""


class Objectives(NamedTuple):
    """What a good request keeps, in milliseconds. Classes may have times to the first token of their own."""

    ttft_ms: float
    tpot_ms: float
    class_to_ttft_ms: Mapping[str, float] = MappingProxyType({})

    def of_class(self, service_class: str) -> Objectives:
        """Return those of one class alone."""
        return Objectives(self.class_to_ttft_ms.get(service_class, self.ttft_ms), self.tpot_ms)

    def kept_by(self, request: ServedRequest) -> bool:
        """Return whether the request finished in time."""
        if request.outcome != "ok" or not request.num_output:
            return False
        tpot_s = request.tpot_s
        ttft_ms = self.class_to_ttft_ms.get(request.service_class, self.ttft_ms)
        return request.ttft_s * 1e3 <= ttft_ms and (tpot_s is None or tpot_s * 1e3 <= self.tpot_ms)


@dataclass(frozen=True, slots=True)
class ServingFigures:
    """The figures of one run, by the names that its JSON has.

    Times are milliseconds by percentile ("p50", ...) and "mean", of the requests that finished; None without
    any. `itl_ms` is over all gaps between consecutive tokens (tokens of one delta arrive together: their gaps
    are 0). Rates are over `seconds`, the time from the first sending to the last end. `cached_share` is None
    without a request that finished.
    """

    num_requests: int
    num_ok: int
    num_refused: int
    num_expired: int
    num_timed_out: int
    num_failed: int
    first_reason: str | None
    first_failure: str | None
    seconds: float
    requests_per_s: float
    input_tok_s: float
    output_tok_s: float
    ttft_ms: dict[str, float] | None
    tpot_ms: dict[str, float] | None
    itl_ms: dict[str, float] | None
    e2e_ms: dict[str, float] | None
    slo_ttft_ms: float
    slo_tpot_ms: float
    good_share: float
    goodput_per_s: float
    cached_share: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return asdict(self)


def summarize(requests: Sequence[ServedRequest], objectives: Objectives) -> ServingFigures:
    """Return the figures of one run of at least one request."""
    done = [each for each in requests if each.outcome == "ok"]
    num_good = sum(objectives.kept_by(each) for each in requests)
    seconds = max(each.finished_at for each in requests) - min(each.sent_at for each in requests)
    seconds = max(seconds, 1e-9)
    return ServingFigures(
        num_requests=len(requests),
        num_ok=len(done),
        num_refused=sum(each.outcome == "refused" for each in requests),
        num_expired=sum(each.outcome == "expired" for each in requests),
        num_timed_out=sum(each.outcome == "timed out" for each in requests),
        num_failed=sum(each.outcome == "failed" for each in requests),
        first_reason=next((each.reason for each in requests if each.reason), None),
        first_failure=next((each.reason for each in requests if each.outcome == "failed"), None),
        seconds=seconds,
        requests_per_s=len(done) / seconds,
        input_tok_s=sum(each.num_input for each in done) / seconds,
        output_tok_s=sum(each.num_output for each in done) / seconds,
        ttft_ms=_percentiles([each.ttft_s for each in done]),
        tpot_ms=_percentiles([tpot_s for each in done if (tpot_s := each.tpot_s) is not None]),
        itl_ms=_percentiles([gap_s for each in done for gap_s in each.gaps_s]),
        e2e_ms=_percentiles([each.finished_at - each.sent_at for each in done]),
        slo_ttft_ms=objectives.ttft_ms,
        slo_tpot_ms=objectives.tpot_ms,
        good_share=num_good / len(requests),
        goodput_per_s=num_good / seconds,
        cached_share=_cached_share(done),
    )


def by_turn(requests: Sequence[TurnRequest]) -> list[dict[str, Any]]:
    """Return, for each turn of sessions, the requests that finished, their times to first token and how much
    of their prompts was cached; nothing where all sessions have one turn."""
    done = [each for each in requests if each.outcome == "ok"]
    if all(each.turn == 1 for each in done):
        return []
    turns = sorted({min(each.turn, MAX_TURN) for each in done})
    found = ([each for each in done if min(each.turn, MAX_TURN) == turn] for turn in turns)
    return [
        {
            "turn": turn,
            "or_later": turn == MAX_TURN,
            "num_ok": len(those),
            "input_tokens": sum(each.num_input for each in those) / len(those),
            "ttft_ms": _percentiles([each.ttft_s for each in those]),
            "cached_share": _cached_share(those),
        }
        for turn, those in zip(turns, found, strict=True)
    ]


def by_class(requests: Sequence[R], objectives: Objectives) -> dict[str, ServingFigures]:
    """Return `summarize` of each class; nothing where all requests are of one."""
    names = list(dict.fromkeys(each.service_class for each in requests))
    if len(names) < 2:
        return {}
    return {
        name: summarize([each for each in requests if each.service_class == name], objectives.of_class(name))
        for name in names
    }


def knee(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the highest offered rate up to which all (rate, good share) points were good enough."""
    best = None
    for rate, share in sorted(points):
        if share < KNEE_SHARE:
            break
        best = rate
    return best


def figures_table(runs: Sequence[tuple[str, ServingFigures]], title: str) -> Table:
    """Return one column for each run, headed by its label."""
    table = made_table(title, "", numbers=[label for label, _ in runs])
    figures = [each for _, each in runs]
    table.add_row("finished", *(f"{each.num_ok} of {each.num_requests}" for each in figures))
    for name, field in _LOST:
        if any(getattr(each, field) for each in figures):
            table.add_row(name, *(str(getattr(each, field)) for each in figures))
    for name, field in _RATES:
        table.add_row(name, *(f"{getattr(each, field):.1f}" for each in figures))
    for name, field in _TIMES:
        times = [getattr(each, field) for each in figures]
        for rank in PERCENTILES:
            cells = (f"{each[f'p{rank}']:.1f}" if each else NONE for each in times)
            table.add_row(f"{name} p{rank}, ms", *cells)
    table.add_row("goodput, requests/s", *(f"{each.goodput_per_s:.1f}" for each in figures))
    table.add_row("good", *(f"{each.good_share:.0%}" for each in figures))
    table.add_row("prompt tokens cached", *(percent(each.cached_share) for each in figures))
    return table


def percent(share: float | None) -> str:
    """Return the share as a cell of a table."""
    return NONE if share is None else f"{share:.0%}"


def _cached_share(done: Sequence[ServedRequest]) -> float | None:
    """Return the part of the prompts' tokens that was not computed; None without a request."""
    num_input = sum(each.num_input for each in done)
    return sum(each.num_cached for each in done) / num_input if num_input else None


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return the milliseconds at each percentile and the mean; None without samples."""
    if not seconds:
        return None
    values = np.percentile(np.asarray(seconds), PERCENTILES) * 1e3
    stats = {f"p{rank}": float(value) for rank, value in zip(PERCENTILES, values, strict=True)}
    return {**stats, "mean": float(np.mean(seconds)) * 1e3}
