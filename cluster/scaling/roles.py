"""Which replicas play another role than their pool's: leases, sans-I/O.

A lease says which role a replica shall play; of several the one with the highest epoch holds, and a replica
without one keeps its role. Epochs are Unix milliseconds, moved up where needed: they grow over all lives of
whoever grants, and say since when a lease holds.

    home --assign--> assigned --restore--> home   each step is a lease with a higher epoch
      ^                |
      +--- replaced ---+                          the next life of the replica begins at home
"""

from __future__ import annotations

from cluster.roster.messages import ReplicaRecord, RoleLease, RosterView
from kvtransfer.messages import ReplicaIdentity

_MS = 1000


class RoleTable:
    """The leases of one view of the roster, and the changes to them at Unix time `wall`."""

    def __init__(self, view: RosterView, wall: float) -> None:
        self._replicas = {record.identity.replica_id: record for record in view.replicas}
        self._leases = {lease.replica.replica_id: lease for lease in view.leases}
        epochs = [lease.epoch for lease in view.leases] + [record.role_epoch for record in view.replicas]
        self._epoch = max([round(wall * _MS) - 1, *epochs])

    def assign(self, replica_id: str, role: str, reason: str) -> RoleLease | None:
        """Let the replica play `role`; None where it is gone, leaving, or plays it already."""
        record = self._replicas.get(replica_id)
        if record is None or record.leaving or self.effective_role(record) == role:
            return None
        return self._grant(record, role, reason)

    def restore(self, replica_id: str, reason: str) -> RoleLease | None:
        """Let the replica play its pool's role again; None where it is gone or does."""
        record = self._replicas.get(replica_id)
        if record is None or self.effective_role(record) == home_role(record):
            return None
        return self._grant(record, home_role(record), reason)

    def restore_all(self, reason: str) -> list[RoleLease]:
        """Let every replica play its pool's role again."""
        leases = (self.restore(replica_id, reason) for replica_id in sorted(self._replicas))
        return [lease for lease in leases if lease is not None]

    def assigned(self) -> dict[str, float]:
        """Return the replicas that shall play another role than their pool's, and since when (Unix time)."""
        return {
            replica_id: lease.epoch / _MS
            for replica_id, record in sorted(self._replicas.items())
            if (lease := self._lease(record)) is not None and lease.role != home_role(record)
        }

    def expired(self) -> list[ReplicaIdentity]:
        """Return the lives of replicas that hold a lease and are gone."""
        return [
            lease.replica
            for replica_id, lease in sorted(self._leases.items())
            if replica_id not in self._replicas or self._replicas[replica_id].identity != lease.replica
        ]

    def strays(self) -> list[RoleLease]:
        """Return leases for replicas that play another role although no lease is known: they go home."""
        return [
            self._grant(record, home_role(record), "its lease is not known any more")
            for _, record in sorted(self._replicas.items())
            if self._lease(record) is None and record.role != home_role(record)
        ]

    def effective_role(self, record: ReplicaRecord) -> str:
        """Return the role that the replica shall play: that of its lease, else the one that it plays."""
        lease = self._lease(record)
        return lease.role if lease is not None else record.role

    def _lease(self, record: ReplicaRecord) -> RoleLease | None:
        lease = self._leases.get(record.identity.replica_id)
        return lease if lease is not None and lease.replica == record.identity else None

    def _grant(self, record: ReplicaRecord, role: str, reason: str) -> RoleLease:
        self._epoch += 1
        lease = RoleLease(record.identity, role, self._epoch, reason)
        self._leases[record.identity.replica_id] = lease
        return lease


def home_role(record: ReplicaRecord) -> str:
    """Return the role of the replica's pool."""
    return record.home_role or record.role


def role_of(replica: ReplicaIdentity, view: RosterView, epoch: int) -> tuple[str, int] | None:
    """Return the action of this replica for its lease: play (role, epoch), or continue as before (None).
    `epoch` is that of the lease it follows."""
    for lease in view.leases:
        if lease.replica == replica and lease.epoch > epoch:
            return lease.role, lease.epoch
    return None
