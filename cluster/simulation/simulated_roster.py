"""The roster of a simulated cluster: its state is the one that serves, and every call returns at once."""

from __future__ import annotations

from cluster.roster.messages import MemberRecord, ReplicaRecord, RosterOrder, RosterView, ScalingChange
from cluster.roster.state import Roster
from kvtransfer.common.clock import Clock

# The version at which it begins: 0 would be a roster that does not know its members yet.
_FIRST_VERSION = 1


class SimulatedRoster:
    """A `cluster.roster.state.ScalingRoster` in virtual time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._state = Roster(_FIRST_VERSION)
        # All changes of counts and roles; the state remembers the latest.
        self.moves: list[ScalingChange] = []

    @property
    def now(self) -> RosterView:
        """The view at this moment."""
        return self._state.view()

    def list_replicas(self, records: list[ReplicaRecord]) -> None:
        """Let these be the replicas that are registered."""
        listed = {record.identity for record in records}
        for record in self._state.view().replicas:
            if record.identity not in listed:
                self._state.remove(record.member_id, record.epoch)
        for record in records:
            self._state.register(record, self._clock.now())

    async def register(self, record: MemberRecord) -> bool:
        return self._state.register(record, self._clock.now())

    async def remove(self, member_id: str, epoch: int) -> None:
        self._state.remove(member_id, epoch)

    async def view(self, after_version: int, timeout_s: float) -> RosterView:
        return self._state.view()

    async def change(self, order: RosterOrder) -> None:
        self._state.change(order)
        if isinstance(order, ScalingChange):
            self.moves.append(order)
