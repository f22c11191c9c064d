"""The possible effects of a request's state machine on the world. `cluster.gateway.request_task` carries them
out."""

from __future__ import annotations

from typing import Protocol

from cluster.errors import RequestError
from cluster.gateway.sample_output import Output
from cluster.metrics.ended_request import Summary
from kvtransfer.messages import ReplicaIdentity
from router.messages import RouteRequest
from workers.messages.link import Cancel, Move, Submission


class RequestEffects(Protocol):
    """The effects of a request's state machine on the world around it.

    A transition changes its state first and calls the effects last; no effect may call the machine back
    before the transition has returned.
    """

    def route(self, request: RouteRequest, delay_s: float, *, needs_capacity: bool = False) -> None:
        """Ask the router after `delay_s`, then report `on_routed` or `on_no_route`; where the request
        `needs_capacity`, because a replica has refused it, when replicas that can take it are found."""

    def submit(self, replica: ReplicaIdentity, submission: Submission) -> None:
        """Send the submission; report `on_unsent` when there is no connection to the replica."""

    def cancel(self, replica: ReplicaIdentity, cancel: Cancel) -> None:
        """Send the cancel, if the replica is still connected."""

    def schedule_move(self, delay_s: float) -> None:
        """Report `on_move_time` after `delay_s`."""

    def route_move(self, request: RouteRequest) -> None:
        """Ask the router for another decode replica, then report `on_move_routed`."""

    def move(self, replica: ReplicaIdentity, order: Move) -> None:
        """Send the order to the replica that decodes, if it is still connected."""

    def confirm_placement(self, steps_s: float = 0.0) -> None:
        """Report to the router that the prompt is computed, or that the stream has moved. `steps_s` is how
        long the replica's steps until then should have taken; 0: not known."""

    def release_placement(self) -> None:
        """Report to the router that the attempt is over, or that the stream does not move."""

    def emit(self, delta: Output) -> None:
        """Pass output on to the client."""

    def finish(self, summary: Summary) -> None:
        """End the request, which is complete. Terminal."""

    def fail(self, error: RequestError) -> None:
        """End the request, which is not complete. Terminal."""
