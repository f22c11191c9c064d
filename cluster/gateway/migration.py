"""Where the stream of one attempt decodes, and how it moves on from a replica that leaves (sans-I/O)."""

from __future__ import annotations

from collections.abc import Callable

from cluster.gateway.actions import Action, MoveAt, NotePrefilled, Release, RouteMove
from kvtransfer.messages import ReplicaIdentity
from workers.messages import HandOverTarget, Move

# After a move that did not come about, until the next target is asked for.
MOVE_PAUSE_S = 0.5
# Until a target is asked for again when there was none.
NOWHERE_PAUSE_S = 1.0
# After the target was lost: what the replica that it moves from has not told by then is not waited for.
OVERDUE_S = 5.0


class StreamMigration:
    """The moves of an attempt, one after another; `RequestState` tells it what happens::

        decodes --find--> target --switch--> decodes there; the former replica may still owe tokens
           ^                 |
           +------ fail -----+    (the target is left out next time)

    `note(now, name, detail)` tells the timeline.
    """

    def __init__(self, request_id: str, note: Callable[[float, str, str], None]) -> None:
        self._request_id = request_id
        self._note = note
        self._leaving: set[ReplicaIdentity] = set()
        self.decode: ReplicaIdentity | None = None
        self.reset(None, 0, can_move=False)

    def reset(self, decode: ReplicaIdentity | None, number: int, *, can_move: bool) -> None:
        """A new attempt, whose submission has this number."""
        self.decode = decode
        self.target: ReplicaIdentity | None = None
        # Why the target is gone: whether it has the stream is told by the replica that it moves from.
        self.target_lost = ""
        self._target_lost_at = 0.0
        self.num_moves = 0
        # Its prompt is done, and handed over.
        self.is_decoding = False
        self._number = number
        self._can_move = can_move
        self._is_asking = False
        self._was_nowhere = False
        self._refused: set[str] = set()
        self._owed: dict[ReplicaIdentity, int] = {}

    # -------------------------------------------------------------------------------------- questions

    @property
    def has_to_move(self) -> bool:
        """Whether it decodes at a replica that it shall leave, and is not on its way yet."""
        return self.is_decoding and self._can_move and self.target is None and self.is_leaving(self.decode)

    def is_leaving(self, replica: ReplicaIdentity | None) -> bool:
        return replica in self._leaving

    def is_former(self, replica: ReplicaIdentity) -> bool:
        """Whether the stream has moved away from this replica."""
        return replica in self._owed

    def owes(self, replica: ReplicaIdentity, num_tokens: int) -> bool:
        """Whether a replica that had the stream has not told all its tokens, when there are so many."""
        return num_tokens < self._owed.get(replica, 0)

    def excluded(self) -> tuple[str, ...]:
        """Ids of replicas that it shall not move to; it is being asked for another."""
        self._is_asking = False
        assert self.decode is not None
        return tuple(sorted({self.decode.replica_id, *self._refused}))

    # ----------------------------------------------------------------------------------------- events

    def stay(self, replica: ReplicaIdentity, may_stay: bool) -> list[Action]:
        """Streams may stay at this replica from now on, or shall leave it."""
        if may_stay:
            self._leaving.discard(replica)
        else:
            self._leaving.add(replica)
        return self.seek(0.0)

    def decodes(self) -> list[Action]:
        """The stream is where it shall decode."""
        self.is_decoding = True
        return self.seek(0.0)

    def seek(self, delay_s: float) -> list[Action]:
        """Ask for a target, if it has to move."""
        if not self.has_to_move or self._is_asking:
            return []
        self._is_asking = True
        return [RouteMove(delay_s)]

    def routed(self, target: HandOverTarget | None, now: float) -> list[Action]:
        """There is a target, or none: then all may be tried again, after a pause."""
        assert self.decode is not None
        if target is None:
            if not self._was_nowhere:
                self._note(now, "nowhere to move", "no other decode replica takes it")
            self._was_nowhere = True
            self._refused.clear()
            return self.seek(NOWHERE_PAUSE_S)
        self.target, self.target_lost = target.identity, ""
        self._note(now, "moving", f"{self.decode.replica_id} -> {target.identity.replica_id}")
        return [MoveAt(self.decode, Move(self._request_id, self._number, target))]

    def lose_target(self, reason: str, now: float) -> list[Action]:
        """Its Link has ended."""
        self.target_lost, self._target_lost_at = reason, now
        return [RouteMove(OVERDUE_S)]

    def is_overdue(self, now: float) -> bool:
        """Whether nobody tells what became of a move to a replica that is gone."""
        is_lost = self.target is not None and bool(self.target_lost)
        return is_lost and now >= self._target_lost_at + OVERDUE_S

    def failed(self, reason: str, now: float) -> list[Action]:
        """It goes on where it was."""
        assert self.target is not None
        self._note(now, "not moved", f"{self.target.replica_id}: {reason}")
        self._refused.add(self.target.replica_id)
        self.target, self.target_lost = None, ""
        return [Release(self._request_id), *self.seek(MOVE_PAUSE_S)]

    def switch(self, first_index: int, now: float) -> list[Action]:
        """It goes on at the target, from this output index on; what it had before is told by where it was."""
        assert self.decode is not None
        assert self.target is not None
        self._note(now, "moved", f"{self.decode.replica_id} -> {self.target.replica_id}")
        self._owed.pop(self.target, None)
        self._owed[self.decode] = first_index
        self.decode, self.target = self.target, None
        self._refused.clear()
        self.num_moves += 1
        return [NotePrefilled(self._request_id), *self.seek(0.0)]
