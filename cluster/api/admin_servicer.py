"""The methods of `tandem.v1.Admin`, on a port of its own: each translates, calls the gateway, and ends in one
reply."""

from __future__ import annotations

from cluster.api.authentication import Context, abort, caller_identity
from cluster.api.recordings import Recordings
from cluster.api.replies import StatusService, scale_reply
from cluster.api.servicer import explain, list_requests
from cluster.api.store_admin import StoreAdmin
from cluster.errors import FieldViolation, InvalidRequestError, RequestError
from cluster.gateway.traffic_splitter import TrafficSplitter
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.scaling.orders import ScalerOrders


class AdminServicer:
    """Serves the calls of viewers and operators, for all tenants."""

    def __init__(
        self,
        *,
        status: StatusService,
        stores: StoreAdmin,
        orders: ScalerOrders,
        traffic: TrafficSplitter,
        recordings: Recordings,
    ) -> None:
        self._status = status
        self._orders = orders
        self._stores = stores
        self._traffic = traffic
        self._recordings = recordings

    async def Status(self, request: admin_pb.StatusRequest, context: Context) -> admin_pb.StatusResponse:
        return await self._status.status()

    async def Paths(self, request: admin_pb.PathsRequest, context: Context) -> None:
        async for message in self._status.paths(frozenset(request.replica_ids)):
            await context.write(message)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        tenant = request.tenant if request.HasField("tenant") else None
        return await explain(self._status, self._traffic, request, tenant, context)

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: Context
    ) -> pb.ListRequestsResponse:
        return await list_requests(self._status, request, None, context)

    async def Recording(self, request: admin_pb.RecordingRequest, context: Context) -> None:
        try:
            async for message in self._recordings.parts(request):
                await context.write(message)
        except RequestError as error:
            await abort(context, error)

    async def StoreStat(
        self, request: admin_pb.StoreStatRequest, context: Context
    ) -> admin_pb.StoreStatResponse:
        return await self._stores.stat(context.time_remaining())

    async def StoreList(
        self, request: admin_pb.StoreListRequest, context: Context
    ) -> admin_pb.StoreListResponse:
        try:
            return await self._stores.records(request, context.time_remaining())
        except RequestError as error:
            await abort(context, error)

    async def StoreVerify(
        self, request: admin_pb.StoreVerifyRequest, context: Context
    ) -> admin_pb.StoreVerifyResponse:
        try:
            return await self._stores.verify(request, context.time_remaining())
        except RequestError as error:
            await abort(context, error)

    async def StorePurge(
        self, request: admin_pb.StorePurgeRequest, context: Context
    ) -> admin_pb.StorePurgeResponse:
        try:
            return await self._stores.purge(request, context.time_remaining())
        except RequestError as error:
            await abort(context, error)

    async def Scale(self, request: admin_pb.ScaleRequest, context: Context) -> admin_pb.ScaleResponse:
        try:
            if not (request.replicas or request.dry_run):
                raise InvalidRequestError(FieldViolation("replicas", "is empty; name a pool and its count"))
            who = caller_identity().name
            return scale_reply(await self._orders.scale(request.replicas, by=who, is_dry_run=request.dry_run))
        except RequestError as error:
            await abort(context, error)

    async def Release(self, request: admin_pb.ReleaseRequest, context: Context) -> admin_pb.ReleaseResponse:
        try:
            if not request.pools:
                raise InvalidRequestError(FieldViolation("pools", "is empty; name the pools to release"))
            await self._orders.release(request.pools, by=caller_identity().name)
            return admin_pb.ReleaseResponse()
        except RequestError as error:
            await abort(context, error)

    async def Traffic(self, request: admin_pb.TrafficRequest, context: Context) -> admin_pb.TrafficResponse:
        try:
            return admin_pb.TrafficResponse(shares=await self._traffic.set_shares(request.weights))
        except RequestError as error:
            await abort(context, error)
