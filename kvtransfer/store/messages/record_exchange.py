"""Owner and owner: records that one node sends to another."""

from __future__ import annotations

from kvtransfer.codec import Message
from kvtransfer.messages import RankEndpoints, ReplicaIdentity
from kvtransfer.store.messages.records import RecordId


class OwnerHello(Message, frozen=True):
    """Owner to owner, first, over TCP: identifies the sender. Records are exchanged in granules of the
    arenas."""

    protocol: int
    owner: ReplicaIdentity
    granule_bytes: int


class SendRecords(Message, frozen=True):
    """Owner to owner: write these records into the requester's arena. `granules[i]` are its granules for
    record i, header first; `target` are the endpoints of its transfer agent. Answered by `RecordsSent`."""

    landing_id: bytes
    target: RankEndpoints
    records: tuple[RecordId, ...]
    granules: tuple[tuple[int, ...], ...]


class RecordsSent(Message, frozen=True):
    """Answer: the records that are written completely, as (index in the request, checksum of the payload).
    The others are no longer held, or could not be sent. Nothing of the landing is written after this."""

    landing_id: bytes
    sent: tuple[tuple[int, int], ...]
    reason: str = ""


class StopSending(Message, frozen=True):
    """Owner to owner: stop sending. `RecordsSent` still follows, once nothing is written any more."""

    landing_id: bytes
