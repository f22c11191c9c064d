"""A client of `tandem.v1.Admin`, for operators. The command line uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

import grpc.aio

from cluster.api.channel import UNARY_TIMEOUT_S, GatewayCaller, call_error
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import admin_pb2_grpc
from cluster.proto.tandem.v1 import inference_pb2 as pb

# The scaler may wait for Ray's dashboard.
SCALE_TIMEOUT_S = 45.0


class AdminClient(GatewayCaller):
    """Calls one of several gateways, at the addresses of their `admin_port`. Use it inside one event loop;
    `async with` closes it.

    `host:port` is reached without TLS, `tls://host:port` with it.
    """

    stub_type = admin_pb2_grpc.AdminStub

    async def status(self) -> admin_pb.StatusResponse:
        reply: admin_pb.StatusResponse = await self._unary("Status", admin_pb.StatusRequest())
        return reply

    async def paths(self, replica_ids: Sequence[str] = ()) -> list[admin_pb.ReplicaPaths]:
        """Return the measured paths from these replicas, by default from all."""
        call = self.stub().Paths(
            admin_pb.PathsRequest(replica_ids=replica_ids), timeout=UNARY_TIMEOUT_S, metadata=self.metadata()
        )
        try:
            return [message async for message in call]
        except grpc.aio.AioRpcError as error:
            raise call_error(error) from error

    async def explain(self, request_id: str, tenant: str | None = None) -> pb.ExplainResponse:
        """Return where a running or recent request went, and why. `tenant` None: the latest with this id."""
        request = pb.ExplainRequest(request_id=request_id, tenant=tenant)
        reply: pb.ExplainResponse = await self._unary("Explain", request)
        return reply

    async def requests(self, limit: int | None = None) -> pb.ListRequestsResponse:
        """Return the running and recent requests of all tenants, the latest arrivals first."""
        reply: pb.ListRequestsResponse = await self._unary(
            "ListRequests", pb.ListRequestsRequest(limit=limit)
        )
        return reply

    async def recording(self, last_s: float = 0.0) -> AsyncIterator[admin_pb.RecordingPart]:
        """Yield the requests that all gateways have recorded, of those that arrived in the last `last_s`
        seconds; 0: of all. One gateway comes after the other, in any number of parts."""
        call = self.stub().Recording(admin_pb.RecordingRequest(last_s=last_s), metadata=self.metadata())
        try:
            async for part in call:
                yield part
        except grpc.aio.AioRpcError as error:
            raise call_error(error) from error

    async def store_stat(self) -> admin_pb.StoreStatResponse:
        reply: admin_pb.StoreStatResponse = await self._unary("StoreStat", admin_pb.StoreStatRequest())
        return reply

    async def store_list(self, request: admin_pb.StoreListRequest) -> admin_pb.StoreListResponse:
        reply: admin_pb.StoreListResponse = await self._unary("StoreList", request)
        return reply

    async def store_verify(
        self, request: admin_pb.StoreVerifyRequest, timeout_s: float | None = None
    ) -> admin_pb.StoreVerifyResponse:
        """Read all matching records, which may take as much time as the disk needs; without `timeout_s` there
        is no limit."""
        reply: admin_pb.StoreVerifyResponse = await self._unary("StoreVerify", request, timeout_s)
        return reply

    async def store_purge(
        self, request: admin_pb.StorePurgeRequest, timeout_s: float | None = None
    ) -> admin_pb.StorePurgeResponse:
        reply: admin_pb.StorePurgeResponse = await self._unary("StorePurge", request, timeout_s)
        return reply

    async def scale(self, replicas: Mapping[str, int], *, dry_run: bool = False) -> admin_pb.ScaleResponse:
        """Set how many replicas each of these pools has. `dry_run`: only say what would change; of all pools
        where none is named."""
        request = admin_pb.ScaleRequest(replicas=replicas, dry_run=dry_run)
        reply: admin_pb.ScaleResponse = await self._unary("Scale", request, SCALE_TIMEOUT_S)
        return reply

    async def release(self, pools: Sequence[str]) -> None:
        """Let the autoscaler change these pools again."""
        await self._unary("Release", admin_pb.ReleaseRequest(pools=pools), SCALE_TIMEOUT_S)

    async def traffic(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Split the application's requests by these weights; returns the share of each application."""
        reply: admin_pb.TrafficResponse = await self._unary(
            "Traffic", admin_pb.TrafficRequest(weights=weights)
        )
        return dict(reply.shares)
