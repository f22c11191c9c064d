"""Announce the prompt of a waiting request to the replica that will compute it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from cluster.admission.queued_request import QueuedRequest
from kvtransfer.messages import ReplicaIdentity
from workers.messages.link import Announce, Cancel, HandOverTarget

# Replicas forget what was announced to them 30 s ago.
ANNOUNCE_AGAIN_S = 20.0


class AnnouncedTo(Protocol):
    """The part of `cluster.gateway.replica_connections.ReplicaConnections` that an announcement needs."""

    def target(self, replica_id: str) -> HandOverTarget | None:
        """Return the connected replica of this id; None when there is none."""

    def send(self, replica: ReplicaIdentity, message: Announce | Cancel) -> bool:
        """Queue the message for this life of the replica; False when it is not connected."""


class Announcement:
    """The announcement of one prompt: the replica loads the stored KV of the prompt before its request
    comes."""

    def __init__(
        self,
        connections: AnnouncedTo,
        sharing_group: str,
        start_timer: Callable[[float, Callable[[], None]], None],
        act: Callable[[Callable[[], None]], None],
    ) -> None:
        """`start_timer` calls after this many seconds, `act` now; an exception within ends this request
        alone."""
        self._connections = connections
        self._sharing_group = sharing_group
        self._start_timer = start_timer
        self._act = act
        self._replica: ReplicaIdentity | None = None
        # The number of places for which the prompt was announced: the announcement of an earlier one ends.
        self._round = 0

    def announce(self, queued: QueuedRequest) -> None:
        """Announce the prompt to the replica that will compute it, and to no other; again and again, until
        `submitted` or `withdraw`."""
        if queued.route_request.block_keys:
            self._round += 1
            self._act(partial(self._announce, queued, self._round))

    def submitted(self, replica: ReplicaIdentity, request_id: str) -> None:
        """End the announcement: the request goes to `replica`."""
        if self._replica == replica:
            self._replica = None
        self.withdraw(request_id)

    def withdraw(self, request_id: str) -> None:
        """Let the replica know that the prompt, if it was announced, does not come."""
        self._round += 1
        if self._replica is not None:
            replica, self._replica = self._replica, None
            self._connections.send(replica, Cancel(request_id, 0))

    def _announce(self, queued: QueuedRequest, number: int) -> None:
        if number != self._round:
            return  # it waits for another replica now, or for none
        request = queued.route_request
        target = self._connections.target(queued.decision.compute_id)
        if self._replica is not None and (target is None or target.identity != self._replica):
            self._connections.send(self._replica, Cancel(queued.request_id, 0))
            self._replica = None
        if target is not None and self._connections.send(
            target.identity,
            Announce(request.request_id, self._sharing_group, request.num_tokens, request.block_keys),
        ):
            self._replica = target.identity
        self._start_timer(ANNOUNCE_AGAIN_S, partial(self._announce, queued, number))
