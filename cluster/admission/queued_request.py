"""A request that a gateway has accepted: whose it is, where it will go, and how long it may wait.

`cluster.gateway.acceptance` creates it. `RequestAdmission` queues it for a replica, and reports one outcome
for each wait. The object lives until the request ends: `close` then returns everything that was taken for it.
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
    """The replicas of the decision have capacity: the request is submitted to them now."""

    decision: Decision


class Refused(NamedTuple):
    """The request has waited for too long, or could not be placed because of a fault: it ends with this
    error."""

    error: OverloadedError | InternalError


class Unplaced(NamedTuple):
    """No replica is left that could run the request: its task tries again after `retry_after_s`."""

    reason: str
    retry_after_s: float


Outcome = Released | Refused | Unplaced


class PromptAnnouncer(Protocol):
    """Names waiting prompts to the replicas that will compute them (`cluster.gateway.announcement`)."""

    def announce(self, queued: QueuedRequest) -> None:
        """Tell the replica that will compute the prompt to load the stored part of it. A replica that was
        told before, and will not compute it any more, forgets the prompt."""


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """An accepted request, with the facts by which admission queues and releases it."""

    request_id: str
    flow: Flow
    # In monotonic seconds, like all times here. A call that takes over a waiting call inherits its arrival.
    arrived_at: float
    # The tenant's weight in the fair order.
    weight: float = 1.0
    priority: int = 0
    deadline_at: float | None = None
    # The memory of this gateway that the request takes while it waits.
    num_bytes: int = 0
    # Whether admission has taken the request already: it still waits for its turn, but the load does not
    # refuse it any more.
    is_judged: bool = False
    # Whether the request resumes a stream that has output: it is submitted without waiting for a turn.
    goes_at_once: bool = False

    # Whether its prompt alone would take too long by a price that nothing has measured for long: it is taken
    # all the same, so that the price is measured again.
    tests_price: bool = False

    # The question to the router, and its answer. Admission sets these and the fields below when it queues the
    # request for a replica.
    route_request: RouteRequest = field(init=False)
    decision: Decision = field(init=False)
    routed_at: float = -math.inf
    predicted: Predicted = NOT_PREDICTED
    # The predicted time for which the request occupies its replica: its price in the fair order.
    cost_s: float = 0.0
    # The tokens of the prompt that are not cached there.
    num_tokens: int = 0
    # From this time on the request goes before all that have waited less (`aging_s`).
    due_at: float = math.inf
    # The end of the longest wait, and the limit that sets it, in words.
    waits_until: float = math.inf
    bound: str = ""

    # Called with the outcome of each wait. None until the request's task has begun.
    report: Callable[[Outcome], None] | None = None
    announcer: PromptAnnouncer | None = None
    _closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def announce(self) -> None:
        """Announce the prompt to the replica for which the request waits."""
        if self.announcer is not None:
            self.announcer.announce(self)

    def on_close(self, release: Callable[..., object], *args: object) -> None:
        """Call `release` with `args` when the request ends: it returns something that the request has
        taken."""
        self._closing.callback(release, *args)

    def close(self) -> None:
        """Return everything that the request has taken, the last first, even if a step raises. A second call
        does nothing."""
        self._closing.close()

    @contextlib.contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Close the request if the block raises."""
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            yield
            failed.pop_all()
