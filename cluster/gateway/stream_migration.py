"""Move the stream of one attempt away from a decode replica that leaves (sans-I/O)."""

from __future__ import annotations

from collections.abc import Callable

from kvtransfer.messages import ReplicaIdentity
from workers.messages.link import HandOverTarget, Move

# The pause before the next target is requested, after a migration that failed.
RETRY_PAUSE_S = 0.5
# The pause before a target is requested again, after there was none.
NO_TARGET_PAUSE_S = 1.0
# How long the source of a migration may take to report its outcome after the target was lost.
OVERDUE_S = 5.0


class StreamMigration:
    """Where the stream of an attempt decodes, and its migrations, one after another::

        decodes --begin--> target --switch--> decodes there; the former replica may still owe tokens
           ^                  |
           +------- fail -----+    (the target is left out next time)

    `RequestState` reports the events. A method that returns True requests a new target: the caller must
    schedule one. `note(now, name, detail)` adds to the timeline.
    """

    def __init__(self, request_id: str, note: Callable[[float, str, str], None]) -> None:
        self._request_id = request_id
        self._note = note
        self._leaving: set[ReplicaIdentity] = set()
        self.decode: ReplicaIdentity | None = None
        self.reset(None, 0, can_move=False)

    def reset(self, decode: ReplicaIdentity | None, number: int, *, can_move: bool) -> None:
        """Begin an attempt, whose submission has this number."""
        self.decode = decode
        self.target: ReplicaIdentity | None = None
        # Why the target is gone. Whether it has the stream is for the source to report.
        self.target_lost = ""
        self._target_lost_at = 0.0
        self.num_moves = 0
        # The prompt is computed and handed over.
        self.is_decoding = False
        self._number = number
        self._can_move = can_move
        self._is_seeking = False
        self._had_no_target = False
        self._refused: set[str] = set()
        self._owed: dict[ReplicaIdentity, int] = {}

    # --------------------------------------------------------------------------------------- queries

    @property
    def has_to_move(self) -> bool:
        """Whether the stream decodes on a replica that it must leave, and has no target yet."""
        return self.is_decoding and self._can_move and self.target is None and self.is_leaving(self.decode)

    def is_leaving(self, replica: ReplicaIdentity | None) -> bool:
        """Whether streams must leave this replica."""
        return replica in self._leaving

    def is_former(self, replica: ReplicaIdentity) -> bool:
        """Whether the stream has moved away from this replica."""
        return replica in self._owed

    def owes(self, replica: ReplicaIdentity, num_tokens: int) -> bool:
        """Whether a replica that had the stream has yet to send tokens beyond the first `num_tokens`."""
        return num_tokens < self._owed.get(replica, 0)

    # ---------------------------------------------------------------------------------------- events

    def stay(self, replica: ReplicaIdentity, may_stay: bool) -> bool:
        """Record whether streams may stay on this replica."""
        if may_stay:
            self._leaving.discard(replica)
        else:
            self._leaving.add(replica)
        return self.seek()

    def decodes(self) -> bool:
        """Record that the stream decodes where it was routed to."""
        self.is_decoding = True
        return self.seek()

    def seek(self) -> bool:
        """Return whether a target must be scheduled; False while one is sought already."""
        if not self.has_to_move or self._is_seeking:
            return False
        self._is_seeking = True
        return True

    def excluded(self) -> tuple[str, ...]:
        """Return the ids of replicas that cannot be the target that is requested now."""
        self._is_seeking = False
        assert self.decode is not None
        return tuple(sorted({self.decode.replica_id, *self._refused}))

    def no_target(self, now: float) -> bool:
        """Record that there is no target, so that all replicas may be tried again later."""
        if not self._had_no_target:
            self._note(now, "nowhere to move", "no other decode replica takes it")
        self._had_no_target = True
        self._refused.clear()
        return self.seek()

    def begin(self, target: HandOverTarget, now: float) -> tuple[ReplicaIdentity, Move]:
        """Begin to move to `target`; returns the source and the order for it."""
        assert self.decode is not None
        self.target, self.target_lost = target.identity, ""
        self._note(now, "moving", f"{self.decode.replica_id} -> {target.identity.replica_id}")
        return self.decode, Move(self._request_id, self._number, target)

    def lose_target(self, reason: str, now: float) -> None:
        """Record that the connection to the target has ended."""
        self.target_lost, self._target_lost_at = reason, now

    def is_overdue(self, now: float) -> bool:
        """Whether the source has not reported in time the outcome of a migration to a lost target."""
        is_lost = self.target is not None and bool(self.target_lost)
        return is_lost and now >= self._target_lost_at + OVERDUE_S

    def fail(self, reason: str, now: float) -> bool:
        """Record that the stream stays where it was."""
        assert self.target is not None
        self._note(now, "not moved", f"{self.target.replica_id}: {reason}")
        self._refused.add(self.target.replica_id)
        self.target, self.target_lost = None, ""
        return self.seek()

    def switch(self, first_index: int, now: float) -> bool:
        """Record that the target decodes from this output index on; the source still owes the output
        before."""
        assert self.decode is not None
        assert self.target is not None
        self._note(now, "moved", f"{self.decode.replica_id} -> {self.target.replica_id}")
        self._owed.pop(self.target, None)
        self._owed[self.decode] = first_index
        self.decode, self.target = self.target, None
        self._refused.clear()
        self.num_moves += 1
        return self.seek()
