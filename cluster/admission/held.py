"""A request that a gateway has taken and not yet sent to its replicas: what it is, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cluster.admission.fair_queue import Flow, Waiting
from cluster.errors import OverloadedError
from cluster.metrics.gateway_counters import Predicted
from router.messages import Decision, RouteRequest


class Candidacy(NamedTuple):
    """What admission must know of a request beside what the router must."""

    flow: Flow
    # Of its tenant.
    weight: float
    priority: int
    arrived_at: float
    deadline_at: float | None
    # It waits for its turn like all others, but is not judged: it was taken before.
    is_accepted: bool = False


class HeldEffects(Protocol):
    """What becomes of a request that is held: any number of moves, and one of the others, once."""

    def on_released(self, held: HeldRequest) -> None:
        """Submit the request: its replicas can take it."""

    def on_refused(self, error: OverloadedError) -> None:
        """End the request: it has waited too long."""

    def on_moved(self, held: HeldRequest) -> None:
        """Note that the request waits for other replicas now."""

    def on_unplaced(self, reason: str, retry_after_s: float) -> None:
        """Ask again later (`RequestAdmission.admit`): no replica is there that could take the request."""


@dataclass(slots=True, eq=False)
class HeldRequest:
    """A request that was taken: where it was placed, and what it waits for."""

    candidacy: Candidacy
    request: RouteRequest
    decision: Decision
    waiting: Waiting
    # When it was taken.
    predicted: Predicted
    # Waits no longer than until then; `bound` names what says so.
    refused_at: float
    bound: str
    routed_at: float
    # None until `RequestAdmission.hold`.
    effects: HeldEffects | None = None


@dataclass(slots=True)
class HeldLoad:
    """What waits in a gateway for one replica."""

    # Requests whose prompts it will compute, and the tokens of these that are not cached.
    num_prompts: int = 0
    num_tokens: int = 0
    # Sequences that it will decode.
    num_sequences: int = 0
