"""The gRPC servers of a gateway: for clients, for operators, and for probes that speak no TLS."""

from __future__ import annotations

from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.api.admin_servicer import AdminServicer
from cluster.api.authentication import Authentication
from cluster.api.grpc_server import Certificate, ClientPort, bind, open_health, open_server
from cluster.api.last_resort import LastResort
from cluster.api.servicer import InferenceServicer
from cluster.config import GatewayConfig
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import admin_pb2_grpc, inference_pb2_grpc
from cluster.proto.tandem.v1 import inference_pb2 as pb

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name
ADMIN_NAME = admin_pb.DESCRIPTOR.services_by_name["Admin"].full_name
_GRACE_S = 1.0


class PublicPorts:
    """Serves both services from `start` to `stop`, each on its port, with the health of the gateway."""

    def __init__(
        self,
        settings: GatewayConfig,
        certificate: Certificate | None,
        admin_certificate: Certificate | None,
        authentication: Authentication,
        max_message_bytes: int,
        servicer: InferenceServicer,
        admin_servicer: AdminServicer,
    ) -> None:
        self._certificate = certificate
        self._admin_certificate = admin_certificate
        self._settings = settings
        self._authentication = authentication
        self._max_message_bytes = max_message_bytes
        self._servicer = servicer
        self._admin_servicer = admin_servicer
        self._health: Any = None
        self._servers: list[grpc.aio.Server] = []
        self._health_server: grpc.aio.Server | None = None
        # Present after `listen`.
        self.clients: ClientPort | None = None
        self.admin_port = 0

    async def listen(self, *, is_shared: bool, is_admin_shared: bool, is_serving: bool) -> int:
        """Take the ports, answer on that of probes, and return that of clients. `is_shared`: an older gateway
        listens at the address of clients, and this one takes over from it; `is_admin_shared`: at that of
        operators. `StartError` when anybody else has a port."""
        settings = self._settings
        self._health = health.aio.HealthServicer()
        await self.set_health(is_serving)
        inference = self._open(SERVICE_NAME)
        inference_pb2_grpc.add_InferenceServicer_to_server(self._servicer, inference)
        admin = self._open(ADMIN_NAME)
        admin_pb2_grpc.add_AdminServicer_to_server(self._admin_servicer, admin)
        self.clients = bind(inference, settings, settings.port, self._certificate, is_shared=is_shared)
        self.admin_port = bind(
            admin, settings, settings.admin_port, self._admin_certificate, is_shared=is_admin_shared
        ).number
        self._health_server = await open_health(settings, self._health, is_shared=is_shared)
        return self.clients.number

    async def start(self) -> None:
        """Answer clients and operators."""
        for server in self._servers:
            await server.start()

    async def set_health(self, is_serving: bool) -> None:
        """Report whether a request could be placed."""
        if self._health is None:
            return
        status = health_pb2.HealthCheckResponse.ServingStatus
        value = status.SERVING if is_serving else status.NOT_SERVING
        for name in ("", SERVICE_NAME, ADMIN_NAME):
            await self._health.set(name, value)

    async def leave(self) -> None:
        """Report that this gateway serves no more, whatever `set_health` is given."""
        if self._health is not None:
            await self._health.enter_graceful_shutdown()

    async def stop_health(self) -> None:
        """Leave the port of probes to another gateway."""
        if self._health_server is not None:
            await self._health_server.stop(grace=0.0)

    async def stop(self) -> None:
        """End all calls and connections."""
        for server in self._servers:
            await server.stop(grace=_GRACE_S)
        await self.stop_health()

    def _open(self, service: str) -> grpc.aio.Server:
        """Return a server that authenticates its callers, with health and reflection of one service."""
        server = open_server(self._settings, [LastResort(), self._authentication], self._max_message_bytes)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (service, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        self._servers.append(server)
        return server
