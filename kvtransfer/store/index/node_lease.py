"""Renew this node's record in the index, and notice when Redis has lost it."""

from __future__ import annotations

import logging
from enum import Enum, auto

from kvtransfer.errors import StoreError
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.store.index.redis_client import RedisLink, Script
from kvtransfer.store.index.values import (
    LEAVE_SCRIPT,
    RENEW_SCRIPT,
    NodeRecord,
    decode_node,
    encode_node,
    node_key,
    node_number,
    padded,
)

_LOG = logging.getLogger(__name__)
_RENEW = Script(RENEW_SCRIPT)
_LEAVE = Script(LEAVE_SCRIPT)


class Renewal(Enum):
    """The outcome of a renewal."""

    GOOD = auto()
    # Our record was not there, or an older state of it: Redis was flushed, restarted or restored, or evicted
    # it, or we were paused for longer than the lease. Our announcements may be lost too.
    LOST = auto()
    # A later owner of this node has its record there: ours is not written any more.
    SUPERSEDED = auto()


class NodeLease:
    """The record of one owner."""

    def __init__(
        self, link: RedisLink, namespace: str, identity: ReplicaIdentity, address: str, lease_s: float
    ) -> None:
        self._link = link
        self._key = node_key(namespace, node_number(identity.replica_id))
        self._record = NodeRecord(identity.epoch, 0, address, identity.replica_id)
        self._lease_s = lease_s
        # The sequence of the last renewal that was answered; 0: none yet.
        self._confirmed = 0

    @property
    def period_s(self) -> float:
        """The seconds between two renewals."""
        return self._lease_s / 3

    async def renew(self) -> Renewal:
        """Write the record for another lease. `IndexAwayError`."""
        self._record = self._record._replace(sequence=self._record.sequence + 1)
        sequence = self._record.sequence
        written = encode_node(self._record)
        old = _read(await self._link.run(_RENEW, [self._key], [written, int(self._lease_s * 1000)]))
        if old is not None and old.epoch > self._record.epoch:
            return Renewal.SUPERSEDED
        # A renewal whose answer did not come may have been written: `old` may be newer than the confirmed.
        is_lost = old is None or old.epoch != self._record.epoch or old.sequence < self._confirmed
        is_first, self._confirmed = self._confirmed == 0, sequence
        return Renewal.LOST if is_lost and not is_first else Renewal.GOOD

    async def leave(self) -> None:
        """Delete the record, if it is ours. `IndexAwayError`."""
        await self._link.run(_LEAVE, [self._key], [padded(self._record.epoch).encode()])


def _read(value: bytes | None) -> NodeRecord | None:
    if value is None:
        return None
    try:
        return decode_node(value)
    except StoreError as error:
        _LOG.warning("%s; it was overwritten", error)
        return None
