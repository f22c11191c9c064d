"""The one place where metrics meet Ray, whose agent on each node shows them to Prometheus."""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from cluster.observe.board import Board


def ray_board(**common: str) -> Board:
    """A board whose metrics Ray exports as `ray_tandem_...`; `common` are label values that all have."""
    return Board(Gauge, Counter, common)
