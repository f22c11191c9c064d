"""The gateway: the gRPC server in front of a desk, its Links and its router, all in this process.

No Ray and no torch here: `cluster.app` runs a `Gateway` in a Serve replica; tests and benchmarks anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.config import ClusterConfig
from cluster.errors import StartError
from cluster.gateway.desk import Desk
from cluster.gateway.intake import Intake
from cluster.gateway.replicas import ReplicaLinks
from cluster.gateway.reports import Reporter
from cluster.gateway.servicer import InferenceServicer
from cluster.proto import tandem_pb2 as pb
from cluster.proto import tandem_pb2_grpc
from cluster.roster import RosterClient
from cluster.store_admin import StoreAdmin
from kvtransfer.clock import Clock
from kvtransfer.faults import Faults
from kvtransfer.secret import draw_id
from router.service import RouterService

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name


def draw_seed() -> int:
    """64 random bits."""
    return int.from_bytes(draw_id()[:8], "little")


class Gateway:
    """One gateway, from `start` to `stop`.

        client --gRPC--> InferenceServicer --> Desk --> Walk (Journey) --> RouterService
                                                 ^          |
                                                 +-- ReplicaLinks --Links--> brains

    Registration in the roster is the caller's. Health says SERVING while a request could be placed.
    """

    def __init__(
        self,
        *,
        gateway_id: str,
        epoch: int,
        config: ClusterConfig,
        roster: RosterClient,
        secret: bytes,
        clock: Clock,
        seeds: Callable[[], int] = draw_seed,
    ) -> None:
        self._config = config
        block_tokens = config.pools[0].engine.block_tokens
        router = RouterService(config.router, block_tokens, clock, seeds())
        self._intake = Intake(config, clock, seeds)
        self._links = ReplicaLinks(
            gateway_id=gateway_id,
            epoch=epoch,
            block_tokens=block_tokens,
            roster=roster,
            router=router,
            secret=secret,
            clock=clock,
        )
        self.desk = Desk(
            intake=self._intake,
            links=self._links,
            router=router,
            clock=clock,
            max_requests=config.gateway.max_requests,
            on_members=self._on_members,
        )
        stores = StoreAdmin(lambda: self._links.stores, secret, gateway_id)
        self._servicer = InferenceServicer(
            desk=self.desk,
            intake=self._intake,
            reporter=Reporter(config, self.desk, self._links, self._intake, stores, clock),
            stores=stores,
            faults=Faults(config.debug.fault_rules),
        )
        self._health: health.aio.HealthServicer | None = None
        self._server: grpc.aio.Server | None = None
        self._is_serving = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def links(self) -> ReplicaLinks:
        return self._links

    async def start(self) -> int:
        """Listen, follow the roster, and return the port; `StartError` when the port is taken."""
        host, port = self._config.gateway.host, self._config.gateway.port
        max_bytes = self._config.gateway.max_message_bytes
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ]
        )
        tandem_pb2_grpc.add_InferenceServicer_to_server(self._servicer, self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        await self._set_health()
        try:
            bound = int(self._server.add_insecure_port(f"{host}:{port}"))
        except RuntimeError as error:
            problem = "the port is taken, or the address is not one of this host"
            raise StartError(f"the gateway cannot listen on {host}:{port}: {problem}") from error
        await self._server.start()
        self._links.start(self.desk)
        return bound

    async def stop(self) -> None:
        """End every request with UNAVAILABLE (clients resume at another gateway), then close."""
        self.desk.close()
        if self._health is not None:
            await self._health.enter_graceful_shutdown()
        if self._server is not None:
            await self._server.stop(grace=1.0)
        await self._links.stop()
        await self._intake.close()

    def _on_members(self) -> None:
        if self._links.has_route() != self._is_serving:
            self._is_serving = not self._is_serving
            task = asyncio.create_task(self._set_health())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _set_health(self) -> None:
        assert self._health is not None
        status = health_pb2.HealthCheckResponse.ServingStatus
        value = status.SERVING if self._is_serving else status.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, value)
