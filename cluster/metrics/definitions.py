"""What a metric is declared with. The declarations are in `gateway_catalogue` and `replica_catalogue`."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """One metric. `why_empty` says when it has no series on a healthy run; "": it always has one."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    help: str
    why_empty: str = ""
    buckets: tuple[float, ...] = ()


NEEDS_FAULT = "something must fail first"
NEEDS_HAND_OVER = "needs a hand-over: separate pools, and prompts of more than a block"
