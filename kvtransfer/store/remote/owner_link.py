"""The requesting side: a link to each holder, and the landings of what it sends.

requested --RecordsSent--> records that were sent are the caller's, other slots are free once LandingClosed
  |
  timeout, cancel, link lost --> quarantined --RecordsSent, or all its connections gone--> slots free
                                               (either only after LandingClosed)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtransfer.errors import IncompatibleError, PeerGoneError, TransferError, WireError
from kvtransfer.messages import RankEndpoints, ReplicaIdentity
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.rpc.stream import FrameStream, open_tcp
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.messages.owner_codec import (
    FROM_OWNER_CODEC,
    MAX_OWNER_BYTES,
    STORE_PROTOCOL,
    TO_OWNER_CODEC,
    ToOwner,
    expect,
)
from kvtransfer.store.messages.record_exchange import OwnerHello, RecordsSent, SendRecords, StopSending
from kvtransfer.store.messages.records import RecordId
from kvtransfer.store.record import image_bytes
from kvtransfer.transfer_orders import OpenLanding
from kvtransfer.transfer_reports import LandingClosed, WriterGone

# A node that is gone must not hold up a fetch for long.
_OPEN_S = 3.0


class Wanted(NamedTuple):
    """A record that another node holds, with a payload of `num_bytes`, and the offset of its slot here."""

    record: RecordId
    offset: int
    num_bytes: int


class OwnerLink:
    """A proven connection to the owner `holder`, whose arena has the same granules."""

    def __init__(self, holder: ReplicaIdentity, stream: FrameStream) -> None:
        self.holder = holder
        # Why the connection has ended.
        self.lost = ""
        self._stream = stream

    def send(self, message: ToOwner) -> None:
        """Queue a message; does nothing once the connection has ended."""
        self._stream.send(TO_OWNER_CODEC.encode(message))

    async def receive(self) -> RecordsSent:
        """Return the next answer. `TransferError` at the end."""
        while (answer := FROM_OWNER_CODEC.decode_known(await self._stream.next_frame())) is None:
            pass
        return expect(answer, RecordsSent)

    def abort(self) -> None:
        """End the connection at once."""
        self._stream.abort()


async def open_link(
    holder: ReplicaIdentity, address: str, trust: Trust, requester: ReplicaIdentity, granule_bytes: int
) -> OwnerLink:
    """Connect and exchange hellos. The text of `TransferError` gives the reason of a failure: a wrong secret,
    another epoch of the owner, other granules."""
    try:
        async with asyncio.timeout(_OPEN_S):
            stream = await open_tcp(address, trust, requester.replica_id, max_bytes=MAX_OWNER_BYTES)
            try:
                stream.send(TO_OWNER_CODEC.encode(OwnerHello(STORE_PROTOCOL, requester, granule_bytes)))
                answer = expect(FROM_OWNER_CODEC.decode(await stream.next_frame()), OwnerHello)
                _check_hello(answer, holder, granule_bytes)
            except (TransferError, asyncio.CancelledError):
                stream.abort()
                raise
    except TimeoutError as error:
        raise PeerGoneError(f"the owner at {address} does not answer within {_OPEN_S} s") from error
    return OwnerLink(holder, stream)


def _check_hello(answer: OwnerHello, holder: ReplicaIdentity, granule_bytes: int) -> None:
    if answer.owner != holder:
        raise IncompatibleError(f"expected {holder}, found {answer.owner}")
    if answer.granule_bytes != granule_bytes:
        raise IncompatibleError(f"granule_bytes: {granule_bytes} here, {answer.granule_bytes} there")


class RecordLanding:
    """One fetch, which holds its slots until they are taken or no writer can reach them."""

    def __init__(
        self, link: OwnerLink, wanted: Sequence[Wanted], granule_bytes: int, on_free: Callable[[int], None]
    ) -> None:
        """`on_free(offset)` is called for each slot that was not taken, once nothing can write it any
        more."""
        self.id = draw_id()
        self.link = link
        self.wanted = tuple(wanted)
        self.num_bytes = sum(image_bytes(each.num_bytes) for each in wanted)
        # Set when `sent` is there, or the link is lost.
        self.answered = asyncio.Event()
        self.sent: RecordsSent | None = None
        # The caller waits for it no more.
        self.has_ended = False
        self.slots = {each.offset for each in wanted}
        self._on_free = on_free
        self._granules = tuple(_granules(each, granule_bytes) for each in wanted)
        self._is_closed = False
        self._connections: set[bytes] = set()

    def open(self) -> OpenLanding:
        """Return the order that opens the landing at our agent."""
        granules = tuple(granule for granules in self._granules for granule in granules)
        return OpenLanding(self.id, self.link.holder, granules)

    def request(self, endpoints: RankEndpoints) -> None:
        """Request the records from the holder."""
        records = tuple(each.record for each in self.wanted)
        self.link.send(SendRecords(self.id, endpoints, records, self._granules))

    def answer(self, sent: RecordsSent) -> None:
        """Take the holder's answer, after which it writes nothing more. `WireError` when the answer names
        records that were not requested."""
        indices = [index for index, _ in sent.sent]
        if len(set(indices)) != len(indices) or not set(indices) <= set(range(len(self.wanted))):
            raise WireError("the answer names records that were not requested")
        self.sent = sent
        self.answered.set()
        self._settle()

    def end(self) -> dict[RecordId, int]:
        """End the wait, after the agent has closed the landing. Return the records that are whole, with their
        checksums, if the holder has answered; otherwise send it a stop, and keep all slots in quarantine."""
        fetched: dict[RecordId, int] = {}
        if self.sent is None:
            self.link.send(StopSending(self.id))
        else:
            for index, checksum in self.sent.sent:
                fetched[self.wanted[index].record] = checksum
                self.slots.discard(self.wanted[index].offset)
        self.has_ended = True
        self._settle()
        return fetched

    def closed(self, report: LandingClosed) -> None:
        """Note that our agent accepts nothing more; only connections that the report names could still
        write."""
        self._is_closed = True
        self._connections.update(report.connections)
        self._settle()

    def writer_gone(self, report: WriterGone) -> None:
        """Note that one of those connections has ended."""
        self._connections.discard(report.connection)
        self._settle()

    @property
    def is_over(self) -> bool:
        """Whether nothing can write its slots any more, and the caller waits for it no more."""
        is_unreachable = self._is_closed and (self.sent is not None or not self._connections)
        return self.has_ended and is_unreachable

    def _settle(self) -> None:
        if self.is_over:
            for offset in self.slots:
                self._on_free(offset)
            self.slots.clear()


def _granules(wanted: Wanted, granule_bytes: int) -> tuple[int, ...]:
    first, rest = divmod(wanted.offset, granule_bytes)
    assert rest == 0, f"a record at {wanted.offset} in granules of {granule_bytes}"
    return tuple(range(first, first - -image_bytes(wanted.num_bytes) // granule_bytes))
