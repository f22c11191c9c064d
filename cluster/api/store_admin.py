"""The gateway's side of `tandem store`: every node's store is queried, and each that does not answer is
named."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from msgspec import structs

from cluster.api.listing_limits import DEFAULT_LIMIT, MAX_LIMIT
from cluster.errors import FieldViolation, InvalidRequestError
from cluster.gateway.replica_connections import ReplicaConnections
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.roster.messages import StoreRecord
from kvtransfer.errors import PeerGoneError, TransferError
from kvtransfer.rpc.stream import FrameStream, open_tcp
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.messages.admin_requests import (
    AdminAnswer,
    AdminFailed,
    AdminHello,
    AdminRequest,
    IndexStat,
    ListedRecord,
    ListRequest,
    PurgeRequest,
    PurgeResult,
    StatRequest,
    StoreListing,
    StoreStat,
    TierStat,
    VerifyRequest,
    VerifyResult,
)
from kvtransfer.store.messages.owner_codec import (
    FROM_OWNER_CODEC,
    MAX_OWNER_BYTES,
    STORE_PROTOCOL,
    TO_OWNER_CODEC,
    StoreRefusal,
)

# A store that takes longer to report its state hangs.
STAT_S = 3.0
_CONNECT_S = 3.0
# A part of the caller's deadline that is kept for the answer that names the late stores.
_MARGIN_S = 0.5

M = TypeVar("M", admin_pb.StoreTier, admin_pb.StoreIndex)
T = TypeVar("T", StoreStat, StoreListing, VerifyResult, PurgeResult)


class Filter(NamedTuple):
    """Selects records of a sharing group, and of models whose fingerprint begins so; None: of all."""

    sharing_group: str | None
    model: str | None


class StoreAdmin:
    """Asks all registered stores at once, over new connections for each call."""

    def __init__(self, connections: ReplicaConnections, trust: Trust, name: str) -> None:
        self._connections = connections
        self._trust = trust
        self._name = name

    def members(self) -> list[admin_pb.StoreMember]:
        return [_member(record) for record in self._connections.stores]

    async def stat(self, remaining_s: float | None) -> admin_pb.StoreStatResponse:
        limit_s = min(_limit(remaining_s) or STAT_S, STAT_S)
        return admin_pb.StoreStatResponse(
            nodes=await self._ask_all(StatRequest(), StoreStat, _stat, admin_pb.StoreNodeStat, limit_s)
        )

    async def records(
        self, request: admin_pb.StoreListRequest, remaining_s: float | None
    ) -> admin_pb.StoreListResponse:
        limit = request.limit if request.HasField("limit") else DEFAULT_LIMIT
        if not 1 <= limit <= MAX_LIMIT:
            raise InvalidRequestError(FieldViolation("limit", f"must be from 1 to {MAX_LIMIT}, not {limit}"))
        wanted = ListRequest(*_filter(request.filter), limit)
        return admin_pb.StoreListResponse(
            nodes=await self._ask_all(
                wanted, StoreListing, _listing, admin_pb.StoreNodeList, _limit(remaining_s)
            )
        )

    async def verify(
        self, request: admin_pb.StoreVerifyRequest, remaining_s: float | None
    ) -> admin_pb.StoreVerifyResponse:
        wanted = VerifyRequest(*_filter(request.filter))
        return admin_pb.StoreVerifyResponse(
            nodes=await self._ask_all(
                wanted, VerifyResult, None, admin_pb.StoreNodeVerified, _limit(remaining_s)
            )
        )

    async def purge(
        self, request: admin_pb.StorePurgeRequest, remaining_s: float | None
    ) -> admin_pb.StorePurgeResponse:
        wanted = _filter(request.filter)
        if wanted == Filter(None, None) and not request.all:
            problem = "names neither a sharing group nor a model; to delete everything, set `all`"
            raise InvalidRequestError(FieldViolation("filter", problem))
        if wanted != Filter(None, None) and request.all:
            raise InvalidRequestError(FieldViolation("all", "contradicts `filter`; give one of them"))
        # Replicas first: what they still write to the store is void before it is purged.
        now = asyncio.get_running_loop().time
        began_at = now()
        replicas = await self._connections.purge_caches(*wanted, remaining_s)
        if remaining_s is not None:
            remaining_s = max(0.0, remaining_s - (now() - began_at))
        return admin_pb.StorePurgeResponse(
            nodes=await self._ask_all(
                PurgeRequest(*wanted), PurgeResult, None, admin_pb.StoreNodePurged, _limit(remaining_s)
            ),
            replicas=replicas,
        )

    async def _ask_all(
        self,
        request: AdminRequest,
        expected: type[T],
        translate: Callable[[admin_pb.StoreMember, T], Any] | None,
        message: Callable[..., Any],
        limit_s: float | None,
    ) -> list[Any]:
        """Return one message a node, with its answer or why there is none. Without `translate` the fields of
        the answer are those of the message."""

        async def ask(record: StoreRecord) -> Any:
            member = _member(record)
            answer = await self._ask(record.address, request, limit_s)
            if isinstance(answer, expected):
                if translate is not None:
                    return translate(member, answer)
                return message(member=member, **structs.asdict(answer))
            return message(member=member, error=answer if isinstance(answer, str) else f"answered {answer!r}")

        return await asyncio.gather(*(ask(record) for record in self._connections.stores))

    async def _ask(self, address: str, request: AdminRequest, limit_s: float | None) -> AdminAnswer | str:
        """Return the store's answer, or in words why there is none and whether it may have begun."""
        try:
            async with asyncio.timeout(_CONNECT_S if limit_s is None else min(_CONNECT_S, limit_s)):
                stream = await open_tcp(address, self._trust, self._name, max_bytes=MAX_OWNER_BYTES)
        except (TransferError, TimeoutError) as error:
            return f"not reached, nothing was done: {error or f'no answer within {_CONNECT_S:g} s'}"
        try:
            async with asyncio.timeout(limit_s):
                return await _exchange(stream, request)
        except TimeoutError:
            return f"no answer within {limit_s:g} s; it may still complete what was asked"
        except TransferError as error:
            return f"lost before it answered, which part was done is not known: {error}"
        finally:
            stream.abort()


async def _exchange(stream: FrameStream, request: AdminRequest) -> AdminAnswer | str:
    stream.send(TO_OWNER_CODEC.encode(AdminHello(STORE_PROTOCOL)))
    stream.send(TO_OWNER_CODEC.encode(request))
    answer = FROM_OWNER_CODEC.decode(await stream.next_frame())
    if isinstance(answer, AdminFailed):
        return f"failed: {answer.reason}"
    if isinstance(answer, StoreRefusal):
        return f"refused, nothing was done: {answer.reason}"
    if isinstance(answer, StoreStat | StoreListing | VerifyResult | PurgeResult):
        return answer
    raise PeerGoneError(f"it answered with {type(answer).__name__}")


def _limit(remaining_s: float | None) -> float | None:
    """Return each store's share of the time that the caller still waits."""
    return None if remaining_s is None else max(remaining_s - _MARGIN_S, remaining_s / 2)


def _filter(asked: admin_pb.StoreFilter) -> Filter:
    group = asked.sharing_group if asked.HasField("sharing_group") else None
    model = asked.model if asked.HasField("model") else None
    if model is not None and not re.fullmatch("[0-9a-f]+", model):
        known = "a served model or the beginning of a fingerprint (lower-case hexadecimal)"
        problem = f"must be {known}, not {model[:64]!r}"
        raise InvalidRequestError(FieldViolation("filter.model", problem))
    return Filter(group, model)


def _member(record: StoreRecord) -> admin_pb.StoreMember:
    return admin_pb.StoreMember(
        node_id=record.node_id,
        epoch=record.epoch,
        address=record.address,
        process_id=record.process_id,
        host=record.host,
    )


def _stat(member: admin_pb.StoreMember, stat: StoreStat) -> admin_pb.StoreNodeStat:
    return admin_pb.StoreNodeStat(
        member=member,
        tiers=[_in_ms(tier, admin_pb.StoreTier) for tier in stat.tiers],
        index=_in_ms(stat.index, admin_pb.StoreIndex),
        bytes_by_sharing_group=stat.bytes_by_group,
        num_sessions=stat.num_sessions,
    )


def _in_ms(stat: TierStat | IndexStat, kind: Callable[..., M]) -> M:
    same = {name: getattr(stat, name) for name in stat.__struct_fields__ if name != "latency_s"}
    return kind(**same, latency_ms=1e3 * stat.latency_s)


def _listing(member: admin_pb.StoreMember, listing: StoreListing) -> admin_pb.StoreNodeList:
    return admin_pb.StoreNodeList(
        member=member,
        records=[_record(item) for item in listing.records],
        num_matching=listing.num_matching,
    )


def _record(listed: ListedRecord) -> admin_pb.StoreRecord:
    info = listed.info
    shard = info.id.shard
    return admin_pb.StoreRecord(
        key=info.id.key.hex(),
        parent=info.parent.hex(),
        sharing_group=info.sharing_group,
        model=info.model.hex(),
        layer_start=shard.layer_start,
        layer_end=shard.layer_end,
        head_start=shard.head_start,
        head_end=shard.head_end,
        num_bytes=info.num_bytes,
        tiers=listed.tiers,
        num_hits=listed.num_hits,
    )
