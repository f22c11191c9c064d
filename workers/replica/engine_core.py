"""The engine core of a replica: every decision of its engine, and its Links. It never imports torch, never blocks.

Queues and who empties them:

    Link (gateway)  -> submissions, cancels -> Scheduler.submit, .cancel
    Peer link       -> landings, hand-overs -> KvSender (and MigrationManager), KvReceiver
    rank            -> StepReport           -> Scheduler.settle -> news per gateway -> one StepFrame each
    StepLoop.feed   -> Scheduler.plan       -> StepPlan to all ranks, at most pp + 1 unreported at a time

When a rank ends or hangs, every request here fails over at once (`RequestFailed("internal")`, a `suspect` if
it was in flight), `check_health` raises, and whoever runs the replica replaces it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import FaultRule, Faults
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.config import TransferConfig
from kvtransfer.errors import TransferError
from kvtransfer.messages import (
    CompatibilityRecord,
    KvSnapshotRequest,
    LandingClosed,
    PeerConnected,
    PeerConnectFailed,
    PeerLost,
    PushDone,
    PushFailed,
    PushStopped,
    ReplicaIdentity,
    Verified,
    WriterGone,
)
from kvtransfer.rpc.stream import FrameStream, LinkServer
from kvtransfer.store.messages import StoreAttached, StoreGetDone, StorePutDone
from workers.config import EngineConfig, Parallel
from workers.disagg.kv_sender import RequestKey
from workers.errors import RankDiedError
from workers.messages import (
    Cancel,
    HandOverTarget,
    Leaving,
    LinkDown,
    Move,
    PurgeCache,
    RankReady,
    RankUp,
    ReplicaHello,
    RoleChanged,
    StepProgress,
    StepReport,
    Submission,
)
from workers.replica.components import Components
from workers.replica.gateway_links import GatewayKey, GatewayLinks, Gateways
from workers.replica.partition import Shape, Stages
from workers.replica.rank_group import RankGroup, RankLauncher
from workers.store_connector.connector import StoreConnector

_log = logging.getLogger("tandem.engine_core")

TICK_S = 0.25
_LEAVES = "the replica leaves"


class EngineCore:
    """One replica; see the module's drawing. Built plain, run by `start` and `stop` on one event loop."""

    def __init__(
        self,
        *,
        identity: ReplicaIdentity,
        pool: str,
        role: str,
        model_dir: str,
        dtype: str,
        parallel: Parallel,
        engine: EngineConfig,
        transfer: TransferConfig,
        secret: bytes,
        launcher: RankLauncher,
        clock: Clock,
        host: str,
        store: str | None = None,
        faults: Sequence[FaultRule] = (),
    ) -> None:
        """`store` is the socket of the node's store (None: there is none)."""
        self.identity = identity
        self.pool_name = pool
        self.role = role
        self.role_epoch = 0
        self._engine = engine
        self._transfer = transfer
        self._secret = secret
        self._clock = clock
        self._host = host
        self._store = store
        self._faults = Faults(faults)
        self._shape = Shape(
            identity=identity,
            role=role,
            model_dir=model_dir,
            dtype=dtype,
            parallel=parallel,
            engine=engine,
            transfer=transfer,
            secret=secret,
            faults=faults,
        )
        self._group = RankGroup(
            secret,
            launcher,
            self._on_rank_message,
            self._on_rank_died,
            clock=clock,
            start_stall_s=engine.start_stall_s,
        )
        self._gateways = Gateways(clock, lambda: self.reports.load())
        links = GatewayLinks(self._gateways, self._hello, self._on_gateway_message)
        self._server = LinkServer(secret, links.serve, self._serve_peer)
        self._tasks = SupervisedTasks(self._broke)
        self._pump_scheduled = False
        self._death = ""
        self.address = ""
        self.ready: list[RankReady] = []
        self.tiers: StoreConnector | None = None

    # ------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Load and warm up the ranks, then listen. `RankDiedError` tells why they cannot serve."""
        self.ready = await self._group.start(self._shape.specs, self._host, self._shape.plan_stages)
        times = max(it.load_s for it in self.ready), max(it.warm_up_s for it in self.ready)
        _log.info("%s: loaded in %.1f s, warmed up in %.1f s", self.identity.replica_id, *times)
        self._furnish()
        if self.tiers is not None:
            await self.tiers.start()
        port = await self._server.start(self._host)
        self.address = f"{self._host}:{port}"
        self._tasks.spawn(self._tick_forever(), "engine-core-tick")

    def _furnish(self) -> None:
        """Build the rooms, now that the ranks have told their sizes."""
        rooms = Components(
            identity=self.identity,
            engine=self._engine,
            transfer=self._transfer,
            secret=self._secret,
            clock=self._clock,
            faults=self._faults,
            shape=self._shape,
            group=self._group,
            ready=self.ready,
            gateways=self._gateways,
            store=self._store,
            wake=self._wake,
            kill_ranks=self._on_rank_died,
            on_error=self._broke,
        )
        self.pool, self.scheduler, self.steps = rooms.pool, rooms.scheduler, rooms.steps
        self.outbound, self.inbound, self.peers = rooms.outbound, rooms.inbound, rooms.peers
        self.moving, self.purging = rooms.moving, rooms.purging
        self.requests, self.reports, self.tiers = rooms.requests, rooms.reports, rooms.tiers

    async def stop(self) -> None:
        """End everything at once."""
        await self._tasks.close()
        if self.address:
            await self.peers.close()
        if self.tiers is not None:
            await self.tiers.close()
        self._gateways.close()
        await self._server.stop()
        await self._group.stop()

    async def drain(self, drain_s: float) -> None:
        """Take no new work, hand back what has not begun, and return when all that runs has finished or
        moved, or `drain_s` is over; what is left then is resumed elsewhere, its KV computed again."""
        self._gateways.broadcast(Leaving(drain_s))
        self.requests.leave(_LEAVES)
        self.inbound.leave(_LEAVES)
        self._wake()
        deadline = self._clock.now() + drain_s
        while self._has_work and not self._death and self._clock.now() < deadline:
            await self._clock.sleep(TICK_S / 5)
        self.requests.hand_back_all()
        self._gateways.flush()

    @property
    def _has_work(self) -> bool:
        return bool(self.requests) or self.inbound.book.num_open + self.outbound.book.num_active > 0

    def check_health(self) -> None:
        """Raise `RankDiedError` when a rank ended, or hangs in a step."""
        if not self._death and self.steps.is_stalled(self._engine.stall_s):
            self._on_rank_died(f"no rank has progressed with a step for {self._engine.stall_s} s")
        if self._death:
            raise RankDiedError(self._death)

    def join_peers(self, targets: Sequence[HandOverTarget]) -> None:
        """Open and measure the paths to these decode replicas, all that there are, before they are needed."""
        self.peers.forget_others([target.identity for target in targets])
        for target in targets:
            if target.identity != self.identity:
                self.peers.ensure(target)

    def set_role(self, role: str, epoch: int) -> None:
        """Play this role from now on: gateways send other work, and move away what it should no longer do.
        What comes under the old role is served all the same. Does nothing unless `epoch` is above that of
        the last change."""
        if epoch <= self.role_epoch:
            return
        self.role, self.role_epoch = role, epoch
        _log.info("%s: role %s from epoch %d on", self.identity.replica_id, role, epoch)
        self._gateways.broadcast(RoleChanged(role, epoch))

    @property
    def compatibility(self) -> CompatibilityRecord:
        return self.ready[0].compatibility

    @property
    def stages(self) -> Stages:
        return self._shape.stages

    @property
    def rank_process_ids(self) -> tuple[int, ...]:
        return tuple(ready.process_id for ready in self.ready)

    # ------------------------------------------------------------------------------------- gateways

    def _hello(self) -> ReplicaHello:
        return ReplicaHello(
            self.identity,
            self.pool_name,
            self.role,
            self.compatibility,
            self.scheduler.max_local_tokens,
            self.reports.load(),
            self.role_epoch,
        )

    def _on_gateway_message(self, gateway: GatewayKey, message: LinkDown) -> None:
        try:
            self._take(gateway, message)
        except Exception as error:
            if isinstance(message, Submission) and self.requests.blame(gateway, message, error):
                return
            self._broke(error)

    def _take(self, gateway: GatewayKey, message: LinkDown) -> None:
        match message:
            case Submission():
                self.requests.submit(gateway, message)
                if self.tiers is not None:
                    self.tiers.arrived(message)
            case Cancel(request_id, attempt):
                self.requests.cancel((request_id, attempt))
            case Move():
                self.moving.ask(gateway, message)
            case PurgeCache():
                purged = self.purging.purge(message)
                self._publish_kv()
                self._gateways.send(gateway, purged)
            case KvSnapshotRequest():
                self._publish_kv()
                self._gateways.send(gateway, self.reports.kv_snapshot())
            case _:
                _log.warning("gateway %s introduced itself twice", gateway[0])

    # ------------------------------------------------------------------------------------------ peers

    async def _serve_peer(self, stream: FrameStream) -> None:
        try:
            await self.peers.serve(stream)
        except TransferError as error:
            _log.warning("peer %s sent nonsense: %s", stream.name, error)
        except Exception as error:
            self._broke(error)

    # ------------------------------------------------------------------------------------------ engine

    def _on_rank_message(self, rank: int, message: RankUp) -> None:
        try:
            self._take_report(rank, message)
        except Exception as error:
            self._broke(error)
        self._wake()

    def _take_report(self, rank: int, message: RankUp) -> None:
        match message:
            case StepReport():
                outcome = self.steps.settle(rank, message)
                if outcome is not None:
                    self.requests.settle(outcome)
            case StepProgress():
                self.steps.progressed(rank, message.step)
            case PushDone() | PushFailed() | PushStopped():
                self.outbound.report(rank, message)
            case Verified() | LandingClosed() | WriterGone():
                self.inbound.report(rank, message)
            case StoreAttached() | StorePutDone() | StoreGetDone():
                if self.tiers is not None:
                    self.tiers.report(rank, message)
            case PeerConnected() | PeerConnectFailed() | PeerLost():
                self.peers.path_report(rank, message)
            case _:
                _log.warning("rank %d sent %s", rank, type(message).__name__)

    def _wake(self) -> None:
        """Plan after the events of this turn of the loop have all been taken in."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._main)

    def _main(self) -> None:
        """The actor's main loop: an error of ours must not leave requests hanging in a live process."""
        self._pump_scheduled = False
        try:
            self._pump()
        except Exception as error:
            self._broke(error)

    def _pump(self) -> None:
        if self._death:
            self._gateways.flush()
            return
        self.inbound.grant()
        if self.tiers is not None:
            self.tiers.pump()
        self.outbound.wanted(self.scheduler.landings_wanted(self._clock.now()))
        self.steps.feed()
        self.moving.pump()
        if self.scheduler.has_new_load_needs():
            self._wake()
        for failure in self.scheduler.take_failures():
            self.requests.dropped(failure)
        for report in self.scheduler.isolation.take_reports():
            self.requests.isolated(report)
        self._publish_kv()
        self._gateways.flush()

    def _publish_kv(self) -> None:
        events = self.reports.kv_events()
        if events is not None:
            self._gateways.broadcast(events)

    async def _tick_forever(self) -> None:
        while not self._death:
            await self._clock.sleep(TICK_S)
            for gateway in self._gateways.expired():
                self.requests.cancel_all_of(gateway)
            self.outbound.tick()
            self.inbound.tick()
            if self.tiers is not None:
                self.tiers.tick()
            if self.steps.probe(self._engine.canary_idle_s):
                self.reports.check_when_idle()
            self._wake()

    # ------------------------------------------------------------------------------------------ death

    def _broke(self, error: BaseException) -> None:
        """An error of ours: what this replica holds may be wrong. Suspect is what the scheduler was at."""
        _log.error("%s: the engine core failed", self.identity.replica_id, exc_info=error)
        handled = self.scheduler.isolation.handled
        self._died(f"the engine core failed: {error!r}", () if handled is None else (handled,))

    def _on_rank_died(self, reason: str) -> None:
        self._died(reason, self.scheduler.in_flight(self.steps.steps_under_way()))

    def _died(self, reason: str, suspects: Collection[RequestKey]) -> None:
        if self._death:
            return
        self._death = self.requests.refusal = reason
        _log.error("%s: %s", self.identity.replica_id, reason)
        self._group.kill()
        self.requests.fail_all(reason, suspects)
        self._gateways.flush()
        if self.address:
            self._tasks.spawn(self.peers.close(), "engine-core-death")
