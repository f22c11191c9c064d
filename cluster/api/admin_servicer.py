"""The methods of `tandem.v1.Admin`, on a port of its own: each translates, calls the gateway, and ends in one
reply."""

from __future__ import annotations

from cluster.api.authentication import Context, abort
from cluster.api.replies import StatusService
from cluster.api.servicer import check_explain
from cluster.api.store_admin import StoreAdmin
from cluster.errors import RequestError
from cluster.gateway.traffic_splitter import TrafficSplitter
from cluster.proto import tandem_pb2 as pb


class AdminServicer:
    """Serves the calls of viewers and operators, for all tenants."""

    def __init__(self, *, status: StatusService, stores: StoreAdmin, traffic: TrafficSplitter) -> None:
        self._status = status
        self._stores = stores
        self._traffic = traffic

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        return await self._status.status()

    async def Paths(self, request: pb.PathsRequest, context: Context) -> None:
        async for message in self._status.paths(frozenset(request.replica_ids)):
            await context.write(message)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        try:
            check_explain(request)
            tenant = request.tenant if request.HasField("tenant") else None
            if (reply := await self._traffic.explain(request, tenant, context)) is not None:
                return reply
            return self._status.explain(request.request_id, tenant)
        except RequestError as error:
            await abort(context, error)

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: Context
    ) -> pb.ListRequestsResponse:
        try:
            return self._status.list_requests(request, None)
        except RequestError as error:
            await abort(context, error)

    async def StoreStat(self, request: pb.StoreStatRequest, context: Context) -> pb.StoreStatResponse:
        return await self._stores.stat(context.time_remaining())

    async def StoreList(self, request: pb.StoreListRequest, context: Context) -> pb.StoreListResponse:
        try:
            return await self._stores.records(request, context.time_remaining())
        except RequestError as error:
            await abort(context, error)

    async def StoreVerify(self, request: pb.StoreVerifyRequest, context: Context) -> pb.StoreVerifyResponse:
        try:
            return await self._stores.verify(request, context.time_remaining())
        except RequestError as error:
            await abort(context, error)

    async def StorePurge(self, request: pb.StorePurgeRequest, context: Context) -> pb.StorePurgeResponse:
        try:
            return await self._stores.purge(request, context.time_remaining())
        except RequestError as error:
            await abort(context, error)

    async def Traffic(self, request: pb.TrafficRequest, context: Context) -> pb.TrafficResponse:
        try:
            return pb.TrafficResponse(shares=await self._traffic.set_shares(request.weights))
        except RequestError as error:
            await abort(context, error)
