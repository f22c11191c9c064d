"""The gateway: a gRPC server, the request manager, connections to replicas and a router in one process.

Imports neither Ray nor torch: `cluster.serve.app` runs a `Gateway` in a Serve replica, tests run it anywhere.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.api.admin_servicer import AdminServicer
from cluster.api.authentication import Authentication
from cluster.api.grpc_server import ClientPort, bind, open_health, open_server, server_credentials
from cluster.api.replies import StatusService
from cluster.api.servicer import InferenceServicer, TextCalls
from cluster.api.store_admin import StoreAdmin
from cluster.config import ClusterConfig
from cluster.console.http_server import open_console
from cluster.gateway.history import RequestHistory
from cluster.gateway.replica_connections import ReplicaConnections
from cluster.gateway.request_manager import RequestManager
from cluster.gateway.traffic_splitter import TrafficSplitter
from cluster.identity.authenticator import Authenticator
from cluster.identity.key_roots import KeyRoots
from cluster.identity.resume_tokens import RelayTokens, ResumeTokens
from cluster.metrics.ended_request import Observer
from cluster.metrics.gateway_counters import GatewayCounters
from cluster.metrics.logs import log_access, log_relayed
from cluster.metrics.tracing import RequestTracer
from cluster.proto import tandem_pb2 as pb
from cluster.proto import tandem_pb2_grpc
from cluster.roster.messages import GatewayRecord
from cluster.roster.state import RosterClient, ScalingRoster
from cluster.scaling.orders import Operations
from cluster.text.preprocess import Preprocessor, draw_seed
from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.rpc.trust import Trust
from router.service import RouterService

_DRAIN_LOOK_S = 0.05
# How long whoever probes this gateway's health may take to send clients to the others.
_NOTICE_S = 10.0
# How long a gateway that takes a port over waits for its replicas before it listens.
_TAKE_OVER_S = 10.0
# gRPC lets a connection live up to a tenth longer than its age limit.
_AGE_JITTER = 1.1
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name
ADMIN_NAME = pb.DESCRIPTOR.services_by_name["Admin"].full_name


class Gateway:
    """One gateway, from `start` to `stop`. Each call of a client or an operator is authenticated first
    (`cluster.api.authentication`).

        client --gRPC--> InferenceServicer --> RequestManager --> RequestTask (RequestState) --> RouterService
                                                 ^          |
                                                 +-- ReplicaConnections --links--> engine cores

    The caller registers the gateway in the roster. Health is SERVING while a request could be placed.
    `operations` is what the console may order; None: nothing. `open_roster` finds the roster of another
    application, to which requests may be forwarded; None: all are answered here. `advertised_host` is where
    clients reach the gateway, if that is not where it listens. `draw_bytes` draws the key root of a gateway
    that has no file of roots.
    """

    def __init__(
        self,
        *,
        gateway_id: str,
        epoch: int,
        config: ClusterConfig,
        roster: ScalingRoster,
        trust: Trust,
        clock: Clock,
        seeds: Callable[[], int] = draw_seed,
        draw_bytes: Callable[[int], bytes] = secrets.token_bytes,
        operations: Operations | None = None,
        open_roster: Callable[[str], RosterClient] | None = None,
        advertised_host: str = "",
    ) -> None:
        self._gateway_id = gateway_id
        self._advertised_host = advertised_host or config.gateway.host
        self._roster = roster
        self._config = config
        self._clock = clock
        block_tokens = config.pools[0].engine.block_tokens
        router = RouterService(config.router, block_tokens, clock, seeds())
        self._key_roots = KeyRoots(
            config.auth.key_root_file, draw_bytes, block_tokens, router.num_cached_blocks
        )
        self._preprocessor = _open_preprocessor(config, clock, seeds, self._key_roots)
        self._texts = TextCalls(self._preprocessor)
        self.connections = ReplicaConnections(
            gateway_id=gateway_id,
            epoch=epoch,
            block_tokens=block_tokens,
            roster=roster,
            router=router,
            trust=trust,
            clock=clock,
        )
        history = RequestHistory(block_tokens, clock)
        self._tracer = _open_tracer(config, gateway_id, clock)
        log = log_access if config.logs.access else None
        observers: list[Observer | None] = [history.ended, log, self._tracer]
        self.requests = RequestManager(
            preprocessor=self._preprocessor,
            connections=self.connections,
            router=router,
            clock=clock,
            max_requests=config.gateway.max_requests,
            gateway_id=gateway_id,
            auth=config.auth,
            resume_tokens=ResumeTokens(trust.secret, clock, config.auth.resume_s),
            on_members=self._on_members,
            observers=[observer for observer in observers if observer is not None],
            counters=_open_counters(config, self.connections),
        )
        stores = StoreAdmin(self.connections, trust, gateway_id)
        status = StatusService(
            config, self.requests, self.connections, self._preprocessor, stores, clock, history, gateway_id
        )
        self._console = open_console(gateway_id, config, status, self.requests, stores, operations, clock)
        self.console_port = 0  # where the console listens after `start`; 0: there is none
        self._status = status
        self._traffic = TrafficSplitter(
            app=config.app,
            gateway_id=gateway_id,
            model_name=config.model_name,
            roster=roster,
            open_roster=open_roster,
            clock=clock,
            on_end=log_relayed if config.logs.access else None,
        )
        self._servicer = InferenceServicer(
            requests=self.requests,
            connections=self.connections,
            texts=self._texts,
            status=status,
            faults=Faults(config.debug.fault_rules),
            traffic=self._traffic,
        )
        self._admin_servicer = AdminServicer(status=status, stores=stores, traffic=self._traffic)
        self._authenticator = Authenticator(config.auth, clock)
        self._authentication = Authentication(self._authenticator, RelayTokens(trust.secret, clock))
        self._health: health.aio.HealthServicer | None = None
        self._server: grpc.aio.Server | None = None
        self._port: ClientPort | None = None
        self._admin_server: grpc.aio.Server | None = None
        self.admin_port = 0  # where operators' calls are answered, after `start`
        self._health_server: grpc.aio.Server | None = None
        self._is_serving = False
        self._tasks = SupervisedTasks()

    async def status(self) -> pb.StatusResponse:
        """Answer as the call of this name; callers must not change the message."""
        return await self._status.status()

    def configure(self, config: ClusterConfig) -> None:
        """Take over the pools' counts; nothing else of the configuration changes while a gateway runs."""
        self._status.configure(config)

    async def start(self) -> int:
        """Follow the roster, listen, and return the port; `StartError` when somebody else has it.

        An older gateway of the application at the same address shares it until it has left.
        """
        settings = self._config.gateway
        others = (await self._roster.view(-1, 0.0)).gateways
        takes_over = settings.takes_over and any(self._shares_address(it, settings.port) for it in others)
        self._health = health.aio.HealthServicer()
        self._server = self._open_server(SERVICE_NAME)
        tandem_pb2_grpc.add_InferenceServicer_to_server(self._servicer, self._server)
        self._admin_server = self._open_server(ADMIN_NAME)
        tandem_pb2_grpc.add_AdminServicer_to_server(self._admin_servicer, self._admin_server)
        await self._set_health()
        if takes_over:  # connections come as soon as it listens, and the older one could serve them
            self.connections.start(self.requests)
            end_at = self._clock.now() + _TAKE_OVER_S
            await self._wait_while(lambda: not self.connections.has_route(), end_at)
        auth = self._config.auth
        own_tls = server_credentials(settings, auth, "inference")
        self._port = bind(self._server, settings, settings.port, own_tls, is_shared=takes_over)
        admin = f"{self._advertised_host}:{settings.admin_port}"
        shares_admin = takes_over and any(it.admin == admin for it in others)
        admin_tls = server_credentials(settings, auth, "admin")
        self.admin_port = bind(
            self._admin_server, settings, settings.admin_port, admin_tls, is_shared=shares_admin
        ).number
        self._health_server = await open_health(settings, self._health, is_shared=takes_over)
        if self._console is not None:
            self.console_port = await self._console.start(is_shared=takes_over)
        await self._server.start()
        await self._admin_server.start()
        self._tasks.spawn(self._authenticator.follow(), "authenticator")
        self._tasks.spawn(self._key_roots.follow(self._clock), "key-roots")
        if not takes_over:
            self.connections.start(self.requests)
        return self._port.number

    def _open_server(self, service: str) -> grpc.aio.Server:
        """Return a server that authenticates its callers, with health and reflection of one service."""
        assert self._health is not None
        server = open_server(self._config.gateway, [self._authentication])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (service, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        return server

    async def stop(self) -> None:
        """Leave without failing a call, as far as `drain_s` allows.

        While there are other gateways, this one's clients move first: new connections go to the others, and
        open ones are closed at their age, which fails no call. Then no request is taken, and those that run
        may finish. What is left ends with UNAVAILABLE (clients resume at another gateway).
        """
        end_at = self._clock.now() + self._config.gateway.drain_s
        if self._health is not None:
            await self._health.enter_graceful_shutdown()
        if self._console is not None:
            await self._console.stop()
        if self._port is not None:
            await self._move_clients(self._port, end_at)
        self.requests.leave()
        self._traffic.leave()
        await self._wait_while(lambda: self._num_running and self.connections.is_connected(), end_at)
        self.requests.close()
        self._traffic.close()
        for server in (self._server, self._admin_server):
            if server is not None:
                await server.stop(grace=1.0)
        if self._health_server is not None:
            await self._health_server.stop(grace=0.0)
        await self._traffic.stop()
        await self.connections.stop()
        await self._preprocessor.close()
        self._texts.close()
        self._status.close()
        if self._tracer is not None:
            await self._tracer.stop()
        await self._tasks.close()

    async def _move_clients(self, port: ClientPort, end_at: float) -> None:
        """Return when no client is connected any more, or they cannot be moved: no other gateway is there,
        or the application itself stops."""
        settings = self._config.gateway
        others = [it for it in self.connections.gateways if it.gateway_id != self._gateway_id]
        if not others or not self.connections.has_route():
            return
        if any(self._shares_address(it, port.number) for it in others):
            if self._health_server is not None:
                await self._health_server.stop(grace=0.0)
        else:
            await self._wait_while(self.connections.has_route, min(end_at, self._clock.now() + _NOTICE_S))
        port.stop_accepting()
        if settings.max_connection_age_s is not None:
            end_at = min(end_at, self._clock.now() + _AGE_JITTER * settings.max_connection_age_s)
            await self._wait_while(lambda: self.connections.has_route() and port.num_connections(), end_at)

    async def _wait_while(self, condition: Callable[[], object], end_at: float) -> None:
        while condition() and self._clock.now() < end_at:
            await self._clock.sleep(_DRAIN_LOOK_S)

    def _shares_address(self, other: GatewayRecord, port: int) -> bool:
        """Whether it is another gateway at this one's address."""
        own = f"{self._advertised_host}:{port}"
        return other.gateway_id != self._gateway_id and other.address == own

    @property
    def _num_running(self) -> int:
        return self.requests.num_running + self._traffic.num_running

    def _on_members(self) -> None:
        if self.connections.has_route() != self._is_serving:
            self._is_serving = not self._is_serving
            self._tasks.spawn(self._set_health(), "gateway-health")

    async def _set_health(self) -> None:
        assert self._health is not None
        status = health_pb2.HealthCheckResponse.ServingStatus
        value = status.SERVING if self._is_serving else status.NOT_SERVING
        for name in ("", SERVICE_NAME, ADMIN_NAME):
            await self._health.set(name, value)


def _open_preprocessor(
    config: ClusterConfig, clock: Clock, seeds: Callable[[], int], key_roots: KeyRoots
) -> Preprocessor:
    return Preprocessor(
        config.model,
        config.model_name,
        config.gateway,
        clock,
        seeds,
        key_roots=key_roots,
        allow_pins=config.debug.allow_pins,
    )


def _open_counters(config: ClusterConfig, connections: ReplicaConnections) -> GatewayCounters:
    scaling = config.scaling
    return GatewayCounters(
        connections.pool_of,
        connections.token_bytes,
        ttft_slo_s=scaling.ttft_slo_s,
        itl_slo_s=scaling.itl_slo_s,
    )


def _open_tracer(config: ClusterConfig, gateway_id: str, clock: Clock) -> RequestTracer | None:
    """Return what sends traces; None where the configuration wants none."""
    if not config.tracing.endpoint:
        return None
    return RequestTracer(
        config.tracing, app=config.app, gateway_id=gateway_id, model=config.model_name, clock=clock
    )
