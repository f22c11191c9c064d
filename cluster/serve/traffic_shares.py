"""Setting which share of an application's requests each application answers, from the command line."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from cluster.errors import StartError
from cluster.roster.actor import find_roster, read_roster


def read_shares(app: str) -> dict[str, float]:
    """By application; all to `app` where nothing was set. `StartError` where it does not run."""
    _check_runs(app)
    return read_roster(app).traffic or {app: 1.0}


def set_shares(app: str, shares: Mapping[str, float]) -> dict[str, float]:
    """Of the requests to `app`; returns what holds then. `StartError` where an application that is to get
    requests does not run, `RosterAwayError` where the shares could not be recorded.

    Applications that got requests so far and are no longer named keep a share of 0, while they run: streams
    that began there and are resumed still find them.
    """
    for name in (app, *(name for name, share in shares.items() if share > 0)):
        _check_runs(name)
    before = [name for name in read_roster(app).traffic if read_roster(name).gateways]
    complete = {name: shares.get(name, 0.0) for name in sorted({*before, *shares, app})}
    asyncio.run(find_roster(app).set_traffic(complete))
    return complete


def parse_shares(texts: Sequence[str]) -> dict[str, float]:
    """`["tandem=90", "tandem-v2=10"]` as shares that sum up to 1; `ValueError` where that is not what they
    say."""
    weights: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = -1.0
        if not name or name in weights or not 0 <= weight < float("inf"):
            raise ValueError(f"expected APPLICATION=WEIGHT, each once, with a weight from 0; not {text!r}")
        weights[name] = weight
    total = sum(weights.values())
    if total <= 0:
        raise ValueError("at least one application needs a weight above 0")
    return {name: weight / total for name, weight in weights.items()}


def _check_runs(app: str) -> None:
    if not read_roster(app).gateways:
        raise StartError(f"no gateway of an application {app!r} serves in this Ray cluster")
