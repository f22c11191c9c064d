"""A request between its acceptance and its replicas: who it is of, where it would go, and what it waits for.

One object for all of that time. `cluster.gateway.acceptance` makes it, `RequestAdmission` places and orders
it, and reports one outcome each time it has waited; when the request ends, `close` gives back what it took.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cluster.admission.flow import Flow
from cluster.errors import InternalError, OverloadedError
from cluster.metrics.gateway_counters import NOT_PREDICTED, Predicted
from router.messages import Decision, RouteRequest


class Released(NamedTuple):
    """The replicas of the decision can take the request: submit it to them."""

    decision: Decision


class Refused(NamedTuple):
    """The request has waited for too long, or a fault keeps it from being placed: end it."""

    error: OverloadedError | InternalError


class Unplaced(NamedTuple):
    """No replica is left that could take the request: ask again after a pause."""

    reason: str
    retry_after_s: float


Outcome = Released | Refused | Unplaced


class PromptAnnouncer(Protocol):
    """Tells replicas of prompts that they will have to compute (`cluster.gateway.announcement`)."""

    def announce(self, queued: QueuedRequest) -> None:
        """Let the replica that will compute the prompt load the stored part of it, and no other replica."""


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request that a gateway has taken, and that its replicas have not."""

    request_id: str
    flow: Flow
    # Monotonic seconds. A call that takes over another one has arrived when that one did.
    arrived_at: float
    # The weight of its tenant.
    weight: float = 1.0
    priority: int = 0
    deadline_at: float | None = None
    # The bytes that the request takes in this gateway's memory while it waits.
    num_bytes: int = 0
    # The request was judged before: it waits for its turn like all others, but is not refused because of the
    # load.
    is_judged: bool = False
    # The request goes on with output it has, and waits for no turn.
    goes_at_once: bool = False

    # How it is routed, and where it would go: set by `QueuePlacement.place`.
    route_request: RouteRequest = field(init=False)
    decision: Decision = field(init=False)
    routed_at: float = -math.inf
    predicted: Predicted = NOT_PREDICTED
    # The time for which the request will occupy its replica, and the tokens of its prompt that must be
    # computed.
    cost_s: float = 0.0
    num_tokens: int = 0
    # When it may go before those that have waited less.
    due_at: float = math.inf
    # The end of the time that it may wait; `bound` names the limit.
    refused_at: float = math.inf
    bound: str = ""

    # Called with each outcome. None until somebody is there who can submit the request.
    report: Callable[[Outcome], None] | None = None
    announcer: PromptAnnouncer | None = None
    _closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def announce(self) -> None:
        """Let the replica for which the request waits know of it."""
        if self.announcer is not None:
            self.announcer.announce(self)

    def on_close(self, release: Callable[..., object], *args: object) -> None:
        """Call this when the request ends: it gives something back that the request has taken."""
        self._closing.callback(release, *args)

    def close(self) -> None:
        """Give back all that the request has taken, the last first, whatever one of the steps raises; again:
        do nothing."""
        self._closing.close()

    @contextlib.contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Close the request when anything is raised within."""
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            yield
            failed.pop_all()
