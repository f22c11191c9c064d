"""The asking side of the exchange: a link to each holder, and what lands from it.

asked --RecordsSent--> sent ones are the caller's, slots of the others free once LandingClosed
  |
  timeout, cancel, link lost --> quarantined --RecordsSent, or all its connections gone--> slots free
                                               (either only after LandingClosed)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtransfer.errors import IncompatibleError, PeerGoneError, StoreError, TransferError, WireError
from kvtransfer.messages import LandingClosed, OpenLanding, RankEndpoints, ReplicaIdentity, WriterGone
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.rpc.store_stream import FrameStream, open_tcp
from kvtransfer.store.messages import (
    FROM_OWNER_CODEC,
    STORE_PROTOCOL,
    TO_OWNER_CODEC,
    OwnerHello,
    RecordId,
    RecordsSent,
    SendRecords,
    StopSending,
    StoreRefusal,
    ToOwner,
)
from kvtransfer.store.record import image_bytes

# A node that is gone must not hold up a fetch for long.
_OPEN_S = 3.0


class Wanted(NamedTuple):
    """A record that another node holds, whose payload has `num_bytes`, and the slot at `offset` that is
    allocated for it here."""

    record: RecordId
    offset: int
    num_bytes: int


class Link:
    """A proven connection to the owner `holder`, which works with the same granules."""

    def __init__(self, holder: ReplicaIdentity, stream: FrameStream) -> None:
        self.holder = holder
        # Why it has ended.
        self.lost = ""
        self._stream = stream

    def send(self, message: ToOwner) -> None:
        """Nothing, when it has ended."""
        self._stream.send(TO_OWNER_CODEC.encode(message))

    async def receive(self) -> RecordsSent:
        """The next answer. `TransferError` at the end."""
        message = FROM_OWNER_CODEC.decode(await self._stream.receive())
        if isinstance(message, StoreRefusal):
            raise StoreError(f"refused by the owner: {message.reason}")
        if not isinstance(message, RecordsSent):
            raise WireError(f"expected RecordsSent, got {type(message).__name__}")
        return message

    def abort(self) -> None:
        """End it at once."""
        self._stream.abort()


async def open_link(
    holder: ReplicaIdentity, address: str, secret: bytes, asker: ReplicaIdentity, granule_bytes: int
) -> Link:
    """Connect and introduce ourselves. `TransferError` says why it could not be: a wrong secret, another life
    of the owner, other granules."""
    try:
        async with asyncio.timeout(_OPEN_S):
            stream = await open_tcp(address, secret, asker.replica_id)
            try:
                stream.send(TO_OWNER_CODEC.encode(OwnerHello(STORE_PROTOCOL, asker, granule_bytes)))
                answer = FROM_OWNER_CODEC.decode(await stream.receive())
                _check_hello(answer, holder, granule_bytes)
            except (TransferError, asyncio.CancelledError):
                stream.abort()
                raise
    except TimeoutError as error:
        raise PeerGoneError(f"the owner at {address} does not answer within {_OPEN_S} s") from error
    return Link(holder, stream)


def _check_hello(answer: object, holder: ReplicaIdentity, granule_bytes: int) -> None:
    if isinstance(answer, StoreRefusal):
        raise StoreError(f"refused by the owner: {answer.reason}")
    if not isinstance(answer, OwnerHello):
        raise WireError(f"expected OwnerHello, got {type(answer).__name__}")
    if answer.owner != holder:
        raise IncompatibleError(f"expected {holder}, found {answer.owner}")
    if answer.granule_bytes != granule_bytes:
        raise IncompatibleError(f"granule_bytes: {granule_bytes} here, {answer.granule_bytes} there")


class Landing:
    """One fetch: its slots stay its own until they are taken or unreachable."""

    def __init__(
        self, link: Link, wanted: Sequence[Wanted], granule_bytes: int, on_free: Callable[[int], None]
    ) -> None:
        """`on_free(offset)` is told of each slot that was not taken, when nothing can write it any more."""
        self.id = draw_id()
        self.link = link
        self.wanted = tuple(wanted)
        self.num_bytes = sum(image_bytes(each.num_bytes) for each in wanted)
        # `sent` is there, or the link is lost.
        self.answered = asyncio.Event()
        self.sent: RecordsSent | None = None
        # Nobody waits for it any more.
        self.has_ended = False
        self.slots = {each.offset for each in wanted}
        self._on_free = on_free
        self._granules = tuple(_granules(each, granule_bytes) for each in wanted)
        self._is_closed = False
        self._connections: set[bytes] = set()

    def open(self) -> OpenLanding:
        """The order with which it starts."""
        granules = tuple(granule for granules in self._granules for granule in granules)
        return OpenLanding(self.id, self.link.holder, granules)

    def ask(self, endpoints: RankEndpoints) -> None:
        """Ask the holder."""
        records = tuple(each.record for each in self.wanted)
        self.link.send(SendRecords(self.id, endpoints, records, self._granules))

    def answer(self, sent: RecordsSent) -> None:
        """The holder writes nothing more of it. `WireError` when it names what was not asked for."""
        indices = [index for index, _ in sent.sent]
        if len(set(indices)) != len(indices) or not set(indices) <= set(range(len(self.wanted))):
            raise WireError("the answer names records that were not asked for")
        self.sent = sent
        self.answered.set()
        self._settle()

    def end(self) -> dict[RecordId, int]:
        """Nobody waits any more, and the agent takes nothing more for it: the records that are whole, with
        their sums, if the holder has answered. Else it is told to stop, and all slots are in quarantine."""
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
        """Our agent takes nothing more; these connections could still write."""
        self._is_closed = True
        self._connections.update(report.connections)
        self._settle()

    def writer_gone(self, report: WriterGone) -> None:
        """One of them has ended."""
        self._connections.discard(report.connection)
        self._settle()

    @property
    def is_over(self) -> bool:
        """Nothing can write its slots, and nobody waits for it."""
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
