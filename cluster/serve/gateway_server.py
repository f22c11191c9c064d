"""The gateway: a gRPC server, the request manager, connections to replicas and a router in one process.

Imports neither Ray nor torch: `cluster.serve.gateway_actor` runs a `Gateway` in a Serve replica, tests run
it anywhere.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import NamedTuple

from cluster.admission.admission import RequestAdmission
from cluster.admission.ladder import Rung
from cluster.admission.quotas import Quotas
from cluster.admission.shared_quotas import SharedQuotas
from cluster.api.admin_servicer import AdminServicer
from cluster.api.authentication import Authentication
from cluster.api.call_reading import CallReading
from cluster.api.grpc_server import ClientPort, open_certificate
from cluster.api.prompt_calls import PromptCalls
from cluster.api.public_ports import PublicPorts
from cluster.api.recordings import Recordings
from cluster.api.replies import StatusService
from cluster.api.servicer import InferenceServicer, TextCalls
from cluster.api.store_admin import StoreAdmin
from cluster.config import ClusterConfig
from cluster.console.console_services import ConsoleServices
from cluster.console.http_server import open_console
from cluster.gateway.acceptance import Acceptance
from cluster.gateway.call_charges import CallCharges
from cluster.gateway.device_time import DeviceTime
from cluster.gateway.fleet.fleet import Fleet
from cluster.gateway.fleet.fleet_answers import FleetAnswers
from cluster.gateway.fleet.gateway_port import GatewayPort
from cluster.gateway.fleet.placement_exchange import SNAPSHOT_WAIT_S, PlacementExchange
from cluster.gateway.fleet.placement_feed import PlacementFeed
from cluster.gateway.history import RequestHistory
from cluster.gateway.prompt_relatives import PromptRelatives
from cluster.gateway.replica_connections import ReplicaConnections
from cluster.gateway.request_manager import RequestManager
from cluster.gateway.request_recording import RequestRecording
from cluster.gateway.resume_charges import ResumeCharges
from cluster.gateway.resumed_calls import ResumedCalls
from cluster.gateway.running_requests import RunningRequests
from cluster.gateway.tenant_terms import TenantTerms
from cluster.gateway.traffic_splitter import TrafficSplitter
from cluster.http.server import HttpServices, open_http
from cluster.identity.access_control import AccessControl
from cluster.identity.key_roots import KeyRoots
from cluster.identity.resume_tokens import ResumeTokens
from cluster.metrics.access_log import log_access, log_relayed
from cluster.metrics.ended_request import Observer
from cluster.metrics.exporters import GatewayMetrics
from cluster.metrics.gateway_counters import GatewayCounters, RequestObjectives
from cluster.metrics.tracing import RequestTracer
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.roster.messages import GatewayRecord
from cluster.roster.state import RosterClient, ScalingRoster
from cluster.scaling.orders import Operations, ScalerOrders
from cluster.secret_files import read_redis_url
from cluster.served_model import described_model
from cluster.text.preprocess import Preprocessor, draw_seed
from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.request_facts import SERVICE_CLASSES
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.index.redis_server import with_password
from router.block_history import BlockHistory
from router.service import RouterService

_log = logging.getLogger(__name__)

_DRAIN_LOOK_S = 0.05
# How long whoever probes this gateway's health may take to send clients to the others.
_NOTICE_S = 10.0
# How long a gateway that takes a port over waits for its replicas before it listens.
_TAKE_OVER_S = 10.0
# gRPC lets a connection live up to a tenth longer than its age limit.
_AGE_JITTER = 1.1


class GatewayHosts(NamedTuple):
    """The hosts of a gateway. `advertised` is where clients reach it, "" where it listens (`gateway.host`);
    `inner` is where it listens for the other gateways, "" where ranks listen for KV."""

    advertised: str = ""
    inner: str = ""


class ControlPlane(NamedTuple):
    """The parts of the cluster that decide what runs: the `roster` of this gateway's application, and what
    operators may order (None: nothing). `open_roster` finds the roster of another application, to which
    requests may be forwarded; None: all are answered here."""

    roster: ScalingRoster
    operations: Operations | None = None
    open_roster: Callable[[str], RosterClient] | None = None


class Randomness(NamedTuple):
    """The sources of a gateway's random numbers. `draw_bytes` draws the key root of a gateway that has no
    file of roots, and the keys under which block keys leave in recordings."""

    seeds: Callable[[], int] = draw_seed
    draw_bytes: Callable[[int], bytes] = secrets.token_bytes


_WHERE_IT_LISTENS = GatewayHosts()
_OF_THE_SYSTEM = Randomness()


class Gateway:
    """One gateway, from `start` to `stop`. Each call of a client or an operator is authenticated first
    (`cluster.api.authentication`).

        client --gRPC--> InferenceServicer --> RequestManager --> RequestTask (RequestState) --> RouterService
        client --HTTP----^                       ^          |
                                                 +-- ReplicaConnections --links--> engine cores

    The caller registers the gateway in the roster. Health is SERVING while a request could be placed.
    """

    def __init__(
        self,
        *,
        gateway_id: str,
        epoch: int,
        config: ClusterConfig,
        control: ControlPlane,
        trust: Trust,
        clock: Clock,
        hosts: GatewayHosts = _WHERE_IT_LISTENS,
        randomness: Randomness = _OF_THE_SYSTEM,
    ) -> None:
        self._gateway_id = gateway_id
        self._advertised_host = hosts.advertised or config.gateway.host
        self._inner_host = hosts.inner or config.transfer.data_host
        seeds, draw_bytes = randomness
        self._roster = control.roster
        self._config = config
        self._clock = clock
        block_tokens = config.pools[0].engine.block_tokens
        feed = PlacementFeed(clock)
        router = _open_router(config, gateway_id, feed, clock, seeds())
        self._key_roots = _open_key_roots(config, draw_bytes, router)
        self._preprocessor = _open_preprocessor(config, clock, seeds, self._key_roots)
        self._texts = TextCalls(self._preprocessor)
        self.connections = ReplicaConnections(
            gateway_id=gateway_id,
            epoch=epoch,
            block_tokens=block_tokens,
            roster=control.roster,
            router=router,
            trust=trust,
            clock=clock,
            start_patience_s=config.scaling.start_patience_s,
        )
        history = RequestHistory(block_tokens, clock)
        self._recording = RequestRecording(config.recording, clock)
        self._tracer = _open_tracer(config, gateway_id, clock)
        quotas = Quotas(config.auth, seeds)
        self.requests = self._open_requests(router, quotas, history, trust, seeds)
        self._access = access = AccessControl(config.auth, gateway_id, trust, clock)
        self.reading = CallReading(config, self._preprocessor.limits(0).max_context_tokens)
        self.exchange = PlacementExchange(gateway_id, router, feed, trust, clock)
        self._quotas = self._open_shared_quotas(quotas, trust)
        answers = FleetAnswers(
            self.requests, access.sessions, self.exchange, self._quotas, self._recording, clock
        )
        fleet_port = GatewayPort(gateway_id, answers.serve, self.exchange.serve, trust, clock)
        self.fleet = Fleet(gateway_id, answers, self.connections, fleet_port, trust, clock)
        self.fleet_port = 0  # where the other gateways ask this one, after `start`
        stores = StoreAdmin(self.connections, trust, gateway_id)
        self._status = status = StatusService(
            config, self.requests, self.connections, self._preprocessor, stores, clock, history, self.fleet
        )
        services = ConsoleServices(
            status, self.fleet, self.connections, stores, control.operations, access, self.export
        )
        self._console = open_console(gateway_id, config, services, clock)
        self.console_port = 0  # where the console listens after `start`; 0: there is none
        self._certificate = open_certificate(config.gateway, config.auth, "inference")
        self._traffic = self._open_traffic(control)
        faults, orders = Faults(config.debug.fault_rules), ScalerOrders(control.operations)
        prompts = PromptCalls(self.requests, self._preprocessor, gateway_id)
        servicer = InferenceServicer(
            self.requests, self.connections, self._texts, prompts, status, faults, self._traffic
        )
        front = HttpServices(servicer, self.connections, quotas, access, self.reading, self.requests.unread)
        self._http = open_http(config, front, self._certificate, clock)
        self.http_port = 0  # where it answers over HTTP after `start`; 0: nowhere
        self._ports = PublicPorts(
            config.gateway,
            self._certificate,
            open_certificate(config.gateway, config.auth, "admin"),
            Authentication(access, self.reading),
            self.reading.max_message_bytes,
            servicer,
            AdminServicer(
                status=status,
                stores=stores,
                orders=orders,
                traffic=self._traffic,
                recordings=Recordings(self.fleet, block_tokens, draw_bytes, clock),
            ),
        )
        self._is_serving = False
        self._tasks = SupervisedTasks()

    def _open_traffic(self, control: ControlPlane) -> TrafficSplitter:
        config = self._config
        return TrafficSplitter(
            app=config.app,
            gateway_id=self._gateway_id,
            model_name=config.model_name,
            roster=control.roster,
            open_roster=control.open_roster,
            clock=self._clock,
            relays=self._access.relays,
            certificate=self._certificate,
            on_end=log_relayed if config.logs.access else None,
        )

    def _on_rung(self, rung: Rung) -> None:
        self.connections.pause_batch(rung >= Rung.BATCH_PAUSED)

    def _open_requests(
        self,
        router: RouterService,
        quotas: Quotas,
        history: RequestHistory,
        trust: Trust,
        seeds: Callable[[], int],
    ) -> RequestManager:
        config, clock = self._config, self._clock
        counters = _open_counters(config, self.connections)
        acceptance = Acceptance(
            preprocessor=self._preprocessor,
            connections=self.connections,
            admission=RequestAdmission(config.admission, router, clock, seeds, self._call_at, self._on_rung),
            charges=CallCharges(quotas, counters, clock),
            resumes=ResumeCharges(
                ResumeTokens(trust, clock, config.auth.resume_s, self._gateway_id),
                ResumedCalls(self._gateway_id, clock, lambda claim: self.fleet.judge_resume(claim)),
                quotas,
            ),
            terms=TenantTerms(config.auth),
            running=RunningRequests(self._gateway_id, config.gateway.max_requests, clock.now()),
            clock=clock,
        )
        return RequestManager(
            acceptance,
            connections=self.connections,
            router=router,
            clock=clock,
            max_unread_mb=config.admission.max_unread_mb,
            on_members=self._on_members,
            counters=counters,
            relatives=PromptRelatives(config.pools[0].engine.block_tokens),
            observers=_observers(config, history, self._recording, self._tracer),
        )

    def _call_at(self, at: float, call: Callable[[], None]) -> None:
        """Call at a time of the clock, in a later turn of the event loop."""

        async def wait() -> None:
            await self._clock.sleep(at - self._clock.now())
            call()

        if at <= self._clock.now():
            asyncio.get_running_loop().call_soon(call)
        else:
            self._tasks.spawn(wait(), "admission-timer")

    async def status(self) -> admin_pb.StatusResponse:
        """Answer as the call of this name; callers must not change the message."""
        return await self._status.status()

    async def export(self, metrics: GatewayMetrics) -> None:
        """Set and count this gateway's metrics; the event loop does other work in between."""
        status = await self._status.status()
        admission, num_unheard = self.requests.admission.stats(), len(self.exchange.missing())
        for _ in metrics.update(
            self.requests.counters,
            admission,
            status,
            self._clock.now(),
            num_unheard,
            self._recording,
            self.requests.unread,
        ):
            await self._clock.sleep(0)

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
        # The older gateway keeps its port until it has left.
        fleet_port = 0 if takes_over else settings.fleet_port
        self.fleet_port = await self.fleet.start(self._inner_host, fleet_port)
        self.exchange.start()
        self.exchange.update(others)
        for name, reason in (await self.exchange.wait_current(SNAPSHOT_WAIT_S)).items():
            _log.warning("serves without the placements of gateway %s: %s", name, reason)
        if takes_over:  # connections come as soon as it listens, and the older one could serve them
            self.connections.start(self.requests)
            end_at = self._clock.now() + _TAKE_OVER_S
            await self._wait_while(lambda: not self.connections.has_route(), end_at)
        admin = f"{self._advertised_host}:{settings.admin_port}"
        port = await self._ports.listen(
            is_shared=takes_over,
            is_admin_shared=takes_over and any(it.admin == admin for it in others),
            is_serving=self._is_serving,
        )
        if self._console is not None:
            self.console_port = await self._console.start(is_shared=takes_over)
        if self._http is not None:
            self.http_port = await self._http.start(is_shared=takes_over)
        await self._ports.start()
        self._tasks.spawn(self._access.follow(), "credentials")
        self._tasks.spawn(self._key_roots.follow(self._clock), "key-roots")
        self._quotas.start()
        if not takes_over:
            self.connections.start(self.requests)
        return port

    @property
    def admin_port(self) -> int:
        """The port where operators' calls are answered, after `start`."""
        return self._ports.admin_port

    def certificate_chain(self) -> str:
        """Return the PEM of the chain that the gateway shows to clients now; "" where it speaks no TLS."""
        return self._certificate.chain() if self._certificate is not None else ""

    async def stop(self) -> None:
        """Leave without failing a call, as far as `drain_s` allows.

        While there are other gateways, this one's clients move first: new connections go to the others, and
        open ones are closed at their age, which fails no call. Then no request is taken, and those that run
        may finish. What is left ends with UNAVAILABLE (clients resume at another gateway).
        """
        end_at = self._clock.now() + self._config.gateway.drain_s
        await self._ports.leave()
        if self._console is not None:
            await self._console.stop()
        if self._http is not None:
            self._http.leave()
        if self._ports.clients is not None:
            await self._move_clients(self._ports.clients, end_at)
        self.requests.leave()
        self._traffic.leave()
        await self._wait_while(lambda: self._num_running and self.connections.is_connected(), end_at)
        await self.requests.close()
        self._traffic.close()
        if self._http is not None:
            await self._http.stop()
        await self._ports.stop()
        await self._traffic.stop()
        await self.fleet.stop()
        await self.connections.stop()
        await self.exchange.stop()
        await self._quotas.stop()
        await self._preprocessor.close()
        self._texts.close()
        self._status.close()
        if self._tracer is not None:
            await self._tracer.stop()
        await self._tasks.close()
        self._access.close()

    async def _move_clients(self, port: ClientPort, end_at: float) -> None:
        """Return when no client is connected any more, or they cannot be moved: no other gateway is there,
        or the application itself stops."""
        settings = self._config.gateway
        others = [it for it in self.connections.gateways if it.gateway_id != self._gateway_id]
        if not others or not self.connections.has_route():
            return
        if any(self._shares_address(it, port.number) for it in others):
            await self._ports.stop_health()
        else:
            await self._wait_while(self.connections.has_route, min(end_at, self._clock.now() + _NOTICE_S))
        port.stop_accepting()
        if self._http is not None:
            await self._http.stop_accepting()
        if settings.max_connection_age_s is not None:
            end_at = min(end_at, self._clock.now() + _AGE_JITTER * settings.max_connection_age_s)
            await self._wait_while(
                lambda: self.connections.has_route() and self._num_connections(port), end_at
            )

    def _num_connections(self, port: ClientPort) -> int:
        return port.num_connections() + (self._http.num_connections() if self._http is not None else 0)

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

    def _open_shared_quotas(self, quotas: Quotas, trust: Trust) -> SharedQuotas:
        store = self._config.store
        return SharedQuotas(
            quotas,
            self._gateway_id,
            lambda: [it.gateway_id for it in self.connections.gateways],
            self.requests.counters,
            self._clock,
            url=with_password(read_redis_url(store), trust) if store.has_redis else "",
            ca_file=str(store.redis_ca_file or ""),
            namespace=store.redis_namespace,
        )

    def _on_members(self) -> None:
        self.exchange.update(self.connections.gateways)
        if self.connections.has_route() != self._is_serving:
            self._is_serving = not self._is_serving
            self._tasks.spawn(self._ports.set_health(self._is_serving), "gateway-health")


def _open_router(
    config: ClusterConfig, gateway_id: str, feed: PlacementFeed, clock: Clock, seed: int
) -> RouterService:
    return RouterService(
        config.router,
        config.pools[0].engine.block_tokens,
        clock,
        seed,
        salt=gateway_id,
        observer=feed,
        history=BlockHistory(),
    )


def _open_key_roots(
    config: ClusterConfig, draw_bytes: Callable[[int], bytes], router: RouterService
) -> KeyRoots:
    block_tokens = config.pools[0].engine.block_tokens
    return KeyRoots(config.auth.key_root_file, draw_bytes, block_tokens, router.num_cached_blocks)


def _open_preprocessor(
    config: ClusterConfig, clock: Clock, seeds: Callable[[], int], key_roots: KeyRoots
) -> Preprocessor:
    return Preprocessor(
        described_model(config),
        config.model_name,
        config.gateway,
        clock,
        seeds,
        key_roots=key_roots,
        allow_pins=config.debug.allow_pins,
    )


def _observers(
    config: ClusterConfig,
    history: RequestHistory,
    recording: RequestRecording,
    tracer: RequestTracer | None,
) -> list[Observer]:
    """Return the observers of every request that ends."""
    log = log_access if config.logs.access else None
    return [observer for observer in (history.ended, recording.ended, log, tracer) if observer is not None]


def _open_counters(config: ClusterConfig, connections: ReplicaConnections) -> GatewayCounters:
    scaling, admission = config.scaling, config.admission
    class_to_ttft_s: dict[str, float] = {
        name: ttft_s for name in SERVICE_CLASSES if (ttft_s := admission.of(name).ttft_s) is not None
    }
    return GatewayCounters(
        connections.pool_of,
        connections.token_bytes,
        ttft_slo_s=scaling.ttft_slo_s,
        itl_slo_s=scaling.itl_slo_s,
        objectives=RequestObjectives(class_to_ttft_s, scaling.itl_slo_s),
        device_times=DeviceTime(connections),
    )


def _open_tracer(config: ClusterConfig, gateway_id: str, clock: Clock) -> RequestTracer | None:
    """Return the sender of traces; None where the configuration wants none."""
    if not config.tracing.endpoint:
        return None
    return RequestTracer(
        config.tracing, app=config.app, gateway_id=gateway_id, model=config.model_name, clock=clock
    )
