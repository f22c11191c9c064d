"""What a journey is told to carry, what it asks its carrier to do, and what it leaves behind.

`journey` decides, `walk` carries. Times are seconds of the gateway's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from cluster.errors import RequestError
from cluster.metrics.ended_request import Summary
from kvtransfer.messages import ReplicaIdentity
from router.messages import RouteRequest
from workers.messages import (
    Cancel,
    Move,
    Submission,
    TokenLogprob,
)


class RequestPhase(Enum):
    """See `journey.RequestState`."""

    NEW = auto()
    ROUTING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class Route:
    """Ask the router after `delay_s`, then tell the journey `on_routed` or `on_no_route`."""

    request: RouteRequest
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Submit:
    """Send the submission to the replica; if that is gone, tell the journey `on_unsent`."""

    replica: ReplicaIdentity
    submission: Submission


@dataclass(frozen=True, slots=True)
class RouteMove:
    """After `delay_s` find a place for `RequestState.move_request`, if it then has one, and tell the journey
    `on_move_routed`."""

    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MoveAt:
    """Send the order to the replica, if it is still there."""

    replica: ReplicaIdentity
    move: Move


@dataclass(frozen=True, slots=True)
class CancelAt:
    """Send the cancel to the replica, if it is still there."""

    replica: ReplicaIdentity
    cancel: Cancel


@dataclass(frozen=True, slots=True)
class NotePrefilled:
    """Tell the router that the prompt is computed, or that the stream has moved."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Release:
    """Tell the router that the attempt is over, or that the stream does not move."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Emit:
    """New tokens and text of one sample, for the client."""

    sample: int
    first_index: int
    tokens: bytes
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The request is complete. Terminal."""

    summary: Summary


@dataclass(frozen=True, slots=True)
class Fail:
    """The request is over without completing. Terminal."""

    error: RequestError


Action = Route | Submit | RouteMove | MoveAt | CancelAt | NotePrefilled | Release | Emit | Finish | Fail
