"""The holding side of the exchange: leases records of the arena and pushes their granules to the requester's.

A record is leased until the push that reads it has ended. `RecordsSent` follows when every push of the
landing has ended, so nothing of it is written afterwards; also when `StopSending` or the end of the
connection stops it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.common.tasks import Spawn, wait_first
from kvtransfer.config import StoreSettings
from kvtransfer.errors import PeerGoneError, WireError
from kvtransfer.messages import RankEndpoints, ReplicaIdentity, Shard
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.rpc.stream import FrameStream
from kvtransfer.store.messages.owner_codec import (
    FROM_OWNER_CODEC,
    STORE_PROTOCOL,
    TO_OWNER_CODEC,
    FromOwner,
    StoreRefusal,
)
from kvtransfer.store.messages.record_exchange import OwnerHello, RecordsSent, SendRecords, StopSending
from kvtransfer.store.messages.records import RecordId
from kvtransfer.store.record import image_bytes
from kvtransfer.transfer_orders import (
    BlockMove,
    ClosePeer,
    ConnectPeer,
    Lane,
    PushOrder,
    StopPush,
    TransferOrder,
)
from kvtransfer.transfer_reports import (
    PeerConnected,
    PeerConnectFailed,
    PeerLost,
    PushDone,
    PushFailed,
    TransferReport,
)

# A granule in terms of a model: one layer, one head.
GRANULE = Shard(0, 1, 0, 1)

# About how much is leased and pushed at a time.
_CHUNK_BYTES = 8 << 20
# Chunks that are leased at most: one is sent while the next is read from NVMe.
_MAX_CHUNKS = 2

_log = logging.getLogger("tandem.store")


class LeasedRecord(NamedTuple):
    """A leased record of this arena: the offset of its header page, and its payload's size and checksum."""

    offset: int
    num_bytes: int
    checksum: int


class LocalRecords(Protocol):
    """The records and the arena of this node, as the exchange uses them."""

    async def lease_record(self, record: RecordId) -> LeasedRecord | None:
        """Lease a record of this node until `release_record`; bring one that is on NVMe only into the arena
        first. None: it is not held, or not available now."""

    def release_record(self, leased: LeasedRecord) -> None:
        """End the lease of one `lease_record`, by its offset: the record may have been dropped since, and put
        again elsewhere."""

    def slot_free(self, offset: int) -> None:
        """Free the slot of a `Wanted` that was not fetched, which no writer can reach any more. Called once
        for each."""


def granule_layout(granule_bytes: int) -> BlockLayout:
    """Return the layout of the arena's granules as blocks of a pool."""
    return BlockLayout(GRANULE, head_dim=granule_bytes // 2, block_tokens=1, item_bytes=1)


@dataclass(eq=False)
class _Connection:
    """A connection of our agent to a requester's. `opened` yields "", or why the connection failed."""

    target: RankEndpoints
    connection_id: bytes
    opened: asyncio.Future[str]


@dataclass(eq=False)
class _Transfer:
    """The state of what is sent into one landing."""

    order: SendRecords
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    sent: list[tuple[int, int]] = field(default_factory=list)
    reason: str = ""


@dataclass(eq=False)
class _Requester:
    """An owner that requests records, over one connection."""

    identity: ReplicaIdentity
    stream: FrameStream
    connection: _Connection | None = None
    transfers: dict[bytes, _Transfer] = field(default_factory=dict)

    def send(self, message: FromOwner) -> None:
        self.stream.send(FROM_OWNER_CODEC.encode(message))


class _Piece(NamedTuple):
    """A leased record, its number in the request, and the requester's granules for it."""

    number: int
    leased: LeasedRecord
    granules: tuple[int, ...]


class RecordSender:
    """Serves all requesters of one owner; `order` is the agent's `handle`."""

    def __init__(
        self,
        settings: StoreSettings,
        records: LocalRecords,
        order: Callable[[TransferOrder], None],
        spawn: Spawn,
    ) -> None:
        self._identity = ReplicaIdentity(settings.node_id, settings.epoch)
        self._settings = settings
        self._records = records
        self._order = order
        self._spawn = spawn
        self._connections: dict[bytes, tuple[_Requester, _Connection]] = {}
        self._pushes: dict[int, asyncio.Future[PushDone | PushFailed]] = {}
        self._push_ids = itertools.count(1)
        self.num_sent_bytes = 0

    async def serve(self, stream: FrameStream, hello: OwnerHello) -> None:
        """Serve a requester until its connection ends. `WireError` when it breaks the protocol."""
        requester = _Requester(hello.owner, stream)
        reason = self._refusal(hello)
        if reason:
            _log.warning("%s requests records and is refused: %s", hello.owner.replica_id, reason)
            requester.send(StoreRefusal(reason))
            stream.close()
            await stream.wait_closed()
            return
        requester.send(OwnerHello(STORE_PROTOCOL, self._identity, self._settings.granule_bytes))
        try:
            while True:
                message = TO_OWNER_CODEC.decode_known(await stream.next_frame())
                if message is not None:
                    self._handle(requester, message)
        except PeerGoneError:
            return
        finally:
            stream.abort()
            for transfer in requester.transfers.values():
                self._stop(transfer)
            if requester.connection is not None:
                self._close_connection(requester, requester.connection)

    def report(self, report: TransferReport) -> None:
        """Take in a report of our agent on connections and pushes."""
        match report:
            case PushDone() | PushFailed():
                future = self._pushes.pop(report.push_id)
                if not future.done():  # else its owner has stopped waiting
                    future.set_result(report)
            case PeerConnected():
                self._connection_opened(report.connection_id, "")
            case PeerConnectFailed() | PeerLost():
                self._connection_opened(report.connection_id, report.reason)

    def _refusal(self, hello: OwnerHello) -> str:
        ours = self._settings.granule_bytes
        if hello.protocol != STORE_PROTOCOL:
            return f"protocol: {STORE_PROTOCOL} here, {hello.protocol} there"
        if hello.granule_bytes != ours:
            return f"granule_bytes: {ours} here, {hello.granule_bytes} there"
        return ""

    def _handle(self, requester: _Requester, message: object) -> None:
        match message:
            case SendRecords():
                self._check(requester, message)
                transfer = requester.transfers[message.landing_id] = _Transfer(message)
                self._spawn(self._run(requester, transfer), "store-send")
            case StopSending(landing_id):
                if landing_id in requester.transfers:  # else it is answered already
                    self._stop(requester.transfers[landing_id])
            case _:
                raise WireError(f"an owner does not send {type(message).__name__} here")

    def _check(self, requester: _Requester, order: SendRecords) -> None:
        if len(order.records) != len(order.granules) or order.landing_id in requester.transfers:
            raise WireError("the request for records is inconsistent")
        if order.target.shard != GRANULE:
            raise WireError(f"the requester's pool is of {order.target.shard}, not of granules")

    def _stop(self, transfer: _Transfer) -> None:
        transfer.stopped.set()
        self._order(StopPush(transfer.order.landing_id))

    # ------------------------------------------------------------------------------------ connections

    async def _connect(
        self, requester: _Requester, target: RankEndpoints, stopped: asyncio.Event
    ) -> _Connection | str:
        """Return the connection to the requester's arena, or why there is none."""
        connection = requester.connection
        if connection is not None and connection.target != target:
            self._close_connection(requester, connection)
            connection = None
        if connection is None:
            connection = _Connection(target, draw_id(), asyncio.get_running_loop().create_future())
            requester.connection = connection
            self._connections[connection.connection_id] = requester, connection
            self._order(
                ConnectPeer(
                    connection_id=connection.connection_id,
                    writer=self._identity,
                    peer=requester.identity,
                    lanes=(Lane(target, GRANULE),),
                    transports=self._settings.transports,
                    min_gb_s=self._settings.remote_min_gb_s,
                )
            )
        await wait_first(connection.opened, stopped.wait())
        if stopped.is_set():
            return "stopped on request"
        return connection.opened.result() or connection

    def _connection_opened(self, connection_id: bytes, reason: str) -> None:
        requester, connection = self._connections.get(connection_id, (None, None))
        if requester is None or connection is None:  # closed by us
            return
        if not connection.opened.done():
            connection.opened.set_result(reason)
        if reason:
            del self._connections[connection_id]
            requester.connection = None

    def _close_connection(self, requester: _Requester, connection: _Connection) -> None:
        self._order(ClosePeer(connection.connection_id))
        self._connection_opened(connection.connection_id, "closed")

    # ---------------------------------------------------------------------------------------- transfer

    async def _run(self, requester: _Requester, transfer: _Transfer) -> None:
        order = transfer.order
        connection = await self._connect(requester, order.target, transfer.stopped)
        if isinstance(connection, str):
            transfer.reason = connection
        else:
            await self._send(connection, transfer)
        del requester.transfers[order.landing_id]
        requester.send(RecordsSent(order.landing_id, tuple(transfer.sent), transfer.reason))

    async def _send(self, connection: _Connection, transfer: _Transfer) -> None:
        """Send the transfer's records; return when nothing of it is read here or written there any more."""
        pushes: list[asyncio.Task[None]] = []
        try:
            for indices in self._chunks(transfer.order):
                if transfer.stopped.is_set() or transfer.reason:
                    break
                pieces = await self._lease(transfer.order, indices)
                pushes.append(asyncio.create_task(self._push(connection, transfer, pieces)))
                if len(pushes) >= _MAX_CHUNKS:
                    await pushes.pop(0)
        finally:
            await asyncio.gather(*pushes)

    def _chunks(self, order: SendRecords) -> Iterator[range]:
        """Yield the indices of consecutive records of about `_CHUNK_BYTES` in all."""
        first, num_bytes = 0, 0
        for index, granules in enumerate(order.granules):
            num_bytes += len(granules) * self._settings.granule_bytes
            if num_bytes >= _CHUNK_BYTES or index + 1 == len(order.granules):
                yield range(first, index + 1)
                first, num_bytes = index + 1, 0

    async def _lease(self, order: SendRecords, indices: Sequence[int]) -> list[_Piece]:
        leased = await asyncio.gather(
            *(self._records.lease_record(order.records[index]) for index in indices)
        )
        pieces: list[_Piece] = []
        for index, each in zip(indices, leased, strict=True):
            if each is None:
                continue
            num_granules = -(-image_bytes(each.num_bytes) // self._settings.granule_bytes)
            if len(order.granules[index]) == num_granules:
                pieces.append(_Piece(index, each, order.granules[index]))
            else:  # the requester takes it for another size
                self._records.release_record(each)
        return pieces

    async def _push(self, connection: _Connection, transfer: _Transfer, pieces: Sequence[_Piece]) -> None:
        """Push these records and end their leases."""
        try:
            if pieces and not transfer.stopped.is_set():
                await self._push_moves(connection, transfer, pieces)
        finally:
            for piece in pieces:
                self._records.release_record(piece.leased)

    async def _push_moves(
        self, connection: _Connection, transfer: _Transfer, pieces: Sequence[_Piece]
    ) -> None:
        push_id = next(self._push_ids)
        future: asyncio.Future[PushDone | PushFailed] = asyncio.get_running_loop().create_future()
        self._pushes[push_id] = future
        moves = tuple(itertools.chain.from_iterable(self._moves(piece) for piece in pieces))
        self._order(
            PushOrder(push_id, connection.connection_id, transfer.order.landing_id, moves, "prefetch")
        )
        result = await future
        if isinstance(result, PushFailed):
            transfer.reason = transfer.reason or result.reason
            return
        self.num_sent_bytes += result.num_bytes
        transfer.sent += [(piece.number, piece.leased.checksum) for piece in pieces]

    def _moves(self, piece: _Piece) -> Iterator[BlockMove]:
        first = piece.leased.offset // self._settings.granule_bytes
        for number, granule in enumerate(piece.granules):
            yield BlockMove(first + number, granule, granule)
