"""The engine core of a replica: all decisions of its engine, and its Links. It imports no torch, and never
blocks.

What arrives, and the part that handles it:

    Link (gateway)  -> submissions, cancels -> Scheduler.submit, .cancel
    Peer link       -> landings, hand-overs -> KvSender (and MigrationManager), KvReceiver
    rank            -> StepReport           -> Scheduler.settle -> news per gateway -> one StepFrame each
    StepLoop.feed   -> Scheduler.plan       -> StepPlan to all ranks, at most pp + 1 unreported at a time

When a rank ends or hangs, every request here fails over at once (`RequestFailed("internal")`, a `suspect` if
it was in flight), `check_health` raises, and whoever runs the replica replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.errors import TransferError, shown
from kvtransfer.kv_events import KvSnapshotRequest
from kvtransfer.messages import CompatibilityRecord
from kvtransfer.protocol.receiver import LandingTable
from kvtransfer.protocol.sender import SendTable
from kvtransfer.rpc.stream import FrameStream, LinkServer
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.messages.store_orders import StoreAttached, StoreGetDone, StorePutDone
from kvtransfer.transfer_reports import (
    LandingClosed,
    PeerConnected,
    PeerConnectFailed,
    PeerLost,
    PushDone,
    PushFailed,
    PushStopped,
    Verified,
    WriterGone,
)
from workers.config import EngineConfig
from workers.disagg.kv_hand_overs import KvHandOvers
from workers.disagg.kv_receiver import KvReceiver
from workers.disagg.kv_sender import KvSender
from workers.disagg.migration import MigrationManager
from workers.disagg.peers import Peers
from workers.disagg.request_table import RequestTable
from workers.errors import RankDiedError
from workers.messages.link import (
    Announce,
    CachePurged,
    Cancel,
    GatewayKey,
    HandOverTarget,
    Leaving,
    LinkDown,
    Move,
    PauseBatch,
    PurgeCache,
    ReplicaHello,
    RequestKey,
    RoleChanged,
    Submission,
    longest_link_frame,
)
from workers.messages.rank_channel import GrammarCompiled, RankReady, RankUp, StepProgress, StepReport
from workers.replica.gateway_links import GatewayLinks
from workers.replica.partition import ReplicaSpec, Shape
from workers.replica.rank_group import RankGroup, RankLauncher
from workers.replica.replica_reports import ReplicaReports
from workers.replica.requests import Requests
from workers.replica.step_loop import StepLoop
from workers.replica.step_stats import Capability, StepStats
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.group_pool import GroupPool
from workers.scheduler.scheduler import Scheduler
from workers.store_connector.connector import StoreConnector, reaches_store
from workers.store_connector.engine_parts import EngineParts

_log = logging.getLogger("tandem.engine_core")

TICK_S = 0.25
# The time after which the requests of a step without progress are reported. Gateways leave the replica later
# (`cluster.gateway.circuit_breaker.STALLED_S`).
STALL_REPORT_S = 0.5
_LEAVES = "the replica leaves"


class EngineCore:
    """One replica whose ranks have loaded. `launch` makes it; everything runs on one event loop."""

    def __init__(
        self, spec: ReplicaSpec, shape: Shape, group: RankGroup, ready: Sequence[RankReady], clock: Clock
    ) -> None:
        """`ready` are the reports of all ranks of the `group`."""
        first, engine, faults, trust = ready[0], spec.engine, Faults(spec.faults), group.trust
        has_store = reaches_store(spec.store, ready)
        self.identity, self.pool_name = spec.identity, spec.pool
        self.role, self.role_epoch = spec.role, 0
        self.address, self.ready = "", ready
        self.stages = shape.stages
        self._sampling_rank = (shape.parallel.pp - 1) * shape.parallel.tp
        self._engine, self._clock, self._group = engine, clock, group
        self._tasks = SupervisedTasks(self.fail)
        self._pump_scheduled = False
        self._death = ""
        self.pool = BlockPool(first.num_blocks, engine.block_tokens, spec.group_shares)
        self.group_pools = _group_pools(first, self.pool)
        self.scheduler = _scheduler(engine, shape, self.pool, self.group_pools, first, has_store)
        self.steps = _step_loop(engine, self.scheduler, shape, group, ready, clock)
        self._gateways = GatewayLinks(clock)
        self.table = RequestTable(self._gateways, self)
        self.peers = Peers(
            identity=spec.identity,
            compatibility=first.compatibility,
            ranks=tuple(each.endpoints for each in ready),
            config=spec.transfer,
            trust=trust,
            clock=clock,
            channel=group,
            control=self,
        )
        self.kv_sender = KvSender(
            sends=SendTable(spec.transfer, engine.block_tokens, len(ready), _has_states(self.group_pools)),
            scheduler=self.scheduler,
            requests=self.table,
            peers=self.peers,
            ranks=group,
            control=self,
            clock=clock,
            faults=faults,
        )
        has_copies = first.compatibility.is_given_on and shape.parallel.tp > 1 and engine.latent_kv != "split"
        self.kv_receiver = KvReceiver(
            landings=LandingTable(
                spec.transfer, self.pool, engine.block_tokens, len(ready), self.group_pools
            ),
            block_tokens=engine.block_tokens,
            vocab_size=first.vocab_size,
            scheduler=self.scheduler,
            requests=self.table,
            peers=self.peers,
            ranks=group,
            clock=clock,
            faults=faults,
            sharing=self.steps if has_copies else None,
        )
        self.migration = MigrationManager(
            identity=spec.identity,
            scheduler=self.scheduler,
            requests=self.table,
            sender=self.kv_sender,
            rates=self.steps.rates,
            control=self,
            clock=clock,
            max_active=spec.transfer.max_migrations,
            token_bytes=first.compatibility.token_bytes,
            state_bytes=first.compatibility.state_bytes,
        )
        self.requests = Requests(
            identity=spec.identity,
            table=self.table,
            gateways=self._gateways,
            scheduler=self.scheduler,
            hand_overs=KvHandOvers(self.kv_sender, self.kv_receiver, self.migration),
            clock=clock,
            vocab_size=first.vocab_size,
        )
        self.connector = self._store_connector(spec, shape, trust, ready) if has_store else None
        self.reports = ReplicaReports(
            identity=spec.identity,
            pool=self.pool,
            scheduler=self.scheduler,
            steps=self.steps,
            hand_overs=KvHandOvers(self.kv_sender, self.kv_receiver, self.migration),
            peers=self.peers,
            connector=self.connector,
            ready=ready,
        )
        self._server = LinkServer(trust, self._serve_gateway, self._serve_peer, _longest_frame(engine, first))

    def _store_connector(
        self, spec: ReplicaSpec, shape: Shape, trust: Trust, ready: Sequence[RankReady]
    ) -> StoreConnector:
        return StoreConnector(
            name=spec.store or "",
            trust=trust,
            identity=spec.identity,
            ready=ready,
            engine=EngineParts(
                self.pool,
                self.scheduler,
                self._group,
                self.steps.rates,
                self,
                *self._pools_by_kind(),
            ),
            clock=self._clock,
            records=shape.records,
        )

    def _pools_by_kind(self) -> tuple[list[GroupPool], list[GroupPool]]:
        """Return the blocks of the groups of layers with a window, and of those with states, which follow
        them."""
        pools = list(zip(self.compatibility.groups[1:], self.group_pools, strict=True))
        states = [pool for group, pool in pools if group.state_size]
        num_windows = len(pools) - len(states)
        assert states == self.group_pools[num_windows:], "states come last"
        return self.group_pools[:num_windows], states

    # ------------------------------------------------------------------------------- start and stop

    @classmethod
    async def launch(
        cls,
        spec: ReplicaSpec,
        launcher: RankLauncher,
        clock: Clock,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> EngineCore:
        """Load and warm up the ranks, build the engine core from what they report, and listen. `on_phase` is
        told the phase of the last of the ranks, for people.

        Raises `RankDiedError` with the reason when the ranks cannot serve, and `TrustError` when the files of
        `spec.trust` cannot be used; then nothing is left running.
        """
        shape, trust = Shape(spec), Trust.read(spec.trust)
        core: EngineCore
        group = RankGroup(
            trust,
            launcher,
            lambda rank, message: core.on_rank_message(rank, message),
            lambda reason: core.kill_ranks(reason),
            clock=clock,
            start_stall_s=spec.engine.start_stall_s,
            on_phase=on_phase,
        )
        async with contextlib.AsyncExitStack() as failed:
            failed.push_async_callback(group.stop)
            ready = await group.start(shape.specs, spec.host, shape.plan_stages)
            times = max(it.load_s for it in ready), max(it.warm_up_s for it in ready)
            _log.info("%s: loaded in %.1f s, warmed up in %.1f s", spec.identity.replica_id, *times)
            core = cls(spec, shape, group, ready, clock)
            failed.pop_all()
            failed.push_async_callback(core.stop)
            await core._listen(spec.host)
            failed.pop_all()
        return core

    async def _listen(self, host: str) -> None:
        if self.connector is not None:
            await self.connector.start()
        self.address = f"{host}:{await self._server.start(host)}"
        self._tasks.spawn(self._tick_forever(), "engine-core-tick")

    async def stop(self) -> None:
        """End everything at once."""
        await self._tasks.close()
        await self.peers.close()
        if self.connector is not None:
            await self.connector.close()
        self._gateways.close()
        await self._server.stop()
        await self._group.stop()

    async def drain(self, drain_s: float) -> None:
        """Accept no more requests, and hand back those that have not begun. Return when all running ones have
        finished or moved, or when `drain_s` is over: the rest then resume at another replica, which
        recomputes their KV."""
        self._gateways.broadcast(Leaving(drain_s))
        self.requests.leave(_LEAVES)
        self.kv_receiver.leave(_LEAVES)
        self.wake()
        deadline = self._clock.now() + drain_s
        while self._has_work and not self._death and self._clock.now() < deadline:
            await self._clock.sleep(TICK_S / 5)
        self.requests.hand_back_all()
        self._gateways.flush(self.reports.load, self.reports.queue)

    @property
    def _has_work(self) -> bool:
        return len(self.table) + self.kv_receiver.num_unfinished + self.kv_sender.sends.num_active > 0

    def check_health(self) -> None:
        """Raise `RankDiedError` if a rank has ended or hangs in a step."""
        if not self._death and self.steps.is_stalled(self._engine.stall_s):
            self.kill_ranks(f"no rank has progressed with a step for {self._engine.stall_s} s")
        if self._death:
            raise RankDiedError(self._death)

    def join_peers(self, targets: Sequence[HandOverTarget]) -> None:
        """Open and measure the paths to all these decode replicas, before they are needed."""
        self.peers.forget_others([target.identity for target in targets])
        for target in targets:
            if target.identity != self.identity:
                self.peers.ensure(target, self.kv_sender)

    def set_role(self, role: str, epoch: int) -> None:
        """Take this role: gateways send other work from now on, and move streams away that do not fit the
        role. Requests that still come under the old role are served. Does nothing unless `epoch` is above
        that of the last change."""
        if epoch <= self.role_epoch:
            return
        self.role, self.role_epoch = role, epoch
        _log.info("%s: role %s from epoch %d on", self.identity.replica_id, role, epoch)
        self._gateways.broadcast(RoleChanged(role, epoch))

    @property
    def compatibility(self) -> CompatibilityRecord:
        return self.ready[0].compatibility

    @property
    def rank_process_ids(self) -> tuple[int, ...]:
        return tuple(ready.process_id for ready in self.ready)

    # ------------------------------------------------------------------------------------- gateways

    def connected_gateways(self) -> set[GatewayKey]:
        """Return the gateways that have a link to this replica."""
        return self._gateways.connected_keys()

    async def _serve_gateway(self, stream: FrameStream) -> None:
        await self._gateways.serve(stream, self._hello, self._on_gateway_message, self._on_gateway_lost)

    def _hello(self) -> ReplicaHello:
        return ReplicaHello(
            self.identity,
            self.pool_name,
            self.role,
            self.compatibility,
            self.scheduler.limits.max_local_tokens,
            self.reports.load(),
            self.role_epoch,
        )

    def _on_gateway_message(self, gateway: GatewayKey, message: LinkDown) -> None:
        try:
            self._take(gateway, message)
        except Exception as error:
            if not (isinstance(message, Submission) and self.requests.blame(gateway, message, error)):
                self.fail(error)
        self.wake()

    def _on_gateway_lost(self, gateway: GatewayKey) -> None:
        if self.connector is not None:
            self.connector.lost(gateway)
            self.wake()

    def _take(self, gateway: GatewayKey, message: LinkDown) -> None:
        match message:
            case Submission():
                self.requests.submit(gateway, message)
                if self.connector is not None:
                    self.connector.arrived(message)
            case Announce():
                if self.connector is not None and self.requests.takes_new:
                    self.connector.announce(gateway, message)
            case Cancel(request_id, attempt):
                self.requests.cancel((request_id, attempt))
                if self.connector is not None:
                    self.connector.withdraw(request_id)
            case Move():
                self.migration.start(message)
            case PauseBatch(is_paused):
                self._gateways.pause_batch(gateway, is_paused)
            case PurgeCache():
                purged = self._purge(message)
                self._publish_kv()
                self._gateways.send(gateway, purged)
            case KvSnapshotRequest():
                self._publish_kv()
                reports = self.reports
                whole = not message.takes_parts
                snapshot = reports.kv_snapshot() if whole else reports.kv_snapshot_part(message.part)
                self._gateways.send(gateway, snapshot)
            case _:
                _log.warning("gateway %s introduced itself twice", shown(gateway[0]))

    def _purge(self, order: PurgeCache) -> CachePurged:
        """Forget a group's cached blocks, and its blocks on their way to or from the store. Running requests
        keep their blocks until they end, and no other request finds these blocks afterwards."""
        if self.connector is not None:
            self.connector.purge(order.sharing_group)
        num_requests = self.scheduler.life.keep_private(order.sharing_group)
        num_blocks, num_held = self.pool.purge(order.sharing_group)
        for pool in self.group_pools:
            pool.purge(order.sharing_group)
        num_landings = self.kv_receiver.num_of(order.sharing_group)
        return CachePurged(order.number, num_blocks, num_held, num_requests + num_landings)

    # ------------------------------------------------------------------------------------------ peers

    async def _serve_peer(self, stream: FrameStream) -> None:
        try:
            await self.peers.serve(stream, self.kv_receiver)
        except TransferError as error:
            _log.warning("peer %s sent nonsense: %s", stream.name, error)
        except Exception as error:
            self.fail(error)

    # ------------------------------------------------------------------------------------------ engine

    def on_rank_message(self, rank: int, message: RankUp) -> None:
        try:
            self._take_report(rank, message)
        except Exception as error:
            self.fail(error)
        self.wake()

    def _take_report(self, rank: int, message: RankUp) -> None:
        match message:
            case StepReport():
                outcome = self.steps.settle(rank, message)
                if outcome is not None:
                    self.requests.settle(outcome)
            case GrammarCompiled():
                self.scheduler.grammar_compiled(message)
            case StepProgress():
                self.steps.progressed(rank, message.step)
            case PushDone() | PushFailed() | PushStopped():
                self.kv_sender.report(rank, message)
            case Verified() | LandingClosed() | WriterGone():
                self.kv_receiver.report(rank, message)
            case StoreAttached() | StorePutDone() | StoreGetDone():
                if self.connector is not None:
                    self.connector.report(rank, message)
            case PeerConnected() | PeerConnectFailed() | PeerLost():
                self.peers.path_report(rank, message)
            case _:
                _log.warning("rank %d sent %s", rank, type(message).__name__)

    def wake(self) -> None:
        """Run the main loop once after all events of this turn of the event loop are handled."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._main)

    def _main(self) -> None:
        """Run the main loop once. An error here ends the replica: no request may hang in a live process."""
        self._pump_scheduled = False
        try:
            self._pump()
        except Exception as error:
            self.fail(error)

    def _pump(self) -> None:
        if self._death:
            self._gateways.flush(self.reports.load, self.reports.queue)
            return
        for order in self.scheduler.life.grammars.take_orders():
            self._group.send_to(self._sampling_rank, order)
        self.scheduler.pause.ask(self._gateways.is_batch_paused)
        self.kv_receiver.grant()
        if self.connector is not None:
            self.connector.pump()
        self.kv_sender.ask_for_landings(self.scheduler.landings_wanted(self._clock.now()))
        self.steps.feed()
        self.migration.pump()
        if self.scheduler.has_new_load_needs():
            self.wake()
        for failure in self.scheduler.take_failures():
            self.requests.dropped(failure)
        for report in self.scheduler.isolation.take_reports():
            self.requests.isolated(report)
        self._report_stall()
        self._publish_kv()
        self._gateways.flush(self.reports.load, self.reports.queue)

    def _report_stall(self) -> None:
        """Report the requests of a step that stands still, before gateways leave this replica because of
        it."""
        is_stalled = self.steps.stalled_s >= STALL_REPORT_S
        in_flight = self.scheduler.in_flight(self.steps.steps_under_way()) if is_stalled else set()
        self.requests.stalled(in_flight)

    def _publish_kv(self) -> None:
        events = self.reports.kv_events()
        if events is not None:
            self._gateways.broadcast(events)

    async def _tick_forever(self) -> None:
        while not self._death:
            await self._clock.sleep(TICK_S)
            for gateway in self._gateways.expired():
                self.requests.cancel_all_of(gateway)
            self.kv_sender.tick()
            self.kv_receiver.tick()
            if self.connector is not None:
                self.connector.tick()
            if self.steps.probe(self._engine.canary_idle_s):
                self.reports.check_when_idle()
            self.wake()

    # ------------------------------------------------------------------------------------------ death

    def fail(self, error: BaseException) -> None:
        """End the replica after an error in the engine core, whose state may be wrong now. The request that
        the scheduler was handling is a suspect."""
        _log.error("%s: the engine core failed", self.identity.replica_id, exc_info=error)
        handled = self.scheduler.isolation.handled
        self._died(f"the engine core failed: {error!r}", () if handled is None else (handled,))

    def kill_ranks(self, reason: str) -> None:
        self._died(reason, self.scheduler.in_flight(self.steps.steps_under_way()))

    def _died(self, reason: str, suspects: Collection[RequestKey]) -> None:
        if self._death:
            return
        self._death = self.requests.refusal = reason
        _log.error("%s: %s", self.identity.replica_id, reason)
        self._group.kill()
        self.table.fail_all(reason, suspects)
        self._gateways.flush(self.reports.load, self.reports.queue)
        if self.address:
            self._tasks.spawn(self.peers.close(), "engine-core-death")


def _step_loop(
    engine: EngineConfig,
    scheduler: Scheduler,
    shape: Shape,
    group: RankGroup,
    ready: Sequence[RankReady],
    clock: Clock,
) -> StepLoop:
    work = shape.work
    capability = Capability(
        work=work,
        flop_s=sum(each.flop_s for each in ready),
        byte_s=sum(each.byte_s for each in ready),
    )
    parallel = shape.parallel
    piece_flops = work.largest_piece_flops(
        engine.max_batch_tokens, engine.max_sequences, ready[0].max_context_tokens, parallel.tp
    )
    slowest_flop_s = min(each.flop_s for each in ready)
    return StepLoop(
        scheduler,
        group.send,
        clock,
        parallel.tp,
        parallel.pp,
        StepStats(capability),
        piece_flops / slowest_flop_s if slowest_flop_s else 0.0,
        shape.expert_copies(engine.expert_copies, clock.now()),
    )


def _longest_frame(engine: EngineConfig, first: RankReady) -> int:
    return longest_link_frame(first.max_context_tokens, engine.block_tokens, engine.max_sequences)


def _group_pools(first: RankReady, kv: BlockPool) -> list[GroupPool]:
    """Return the pools of the groups of layers behind the first."""
    sizes = zip(first.compatibility.groups[1:], first.num_window_blocks, strict=True)
    return [GroupPool(group.window, size, has_states=group.state_size > 0, kv=kv) for group, size in sizes]


def _has_states(pools: Sequence[GroupPool]) -> list[bool]:
    return [pool.has_states for pool in pools]


def _scheduler(
    engine: EngineConfig,
    shape: Shape,
    pool: BlockPool,
    group_pools: Sequence[GroupPool],
    first: RankReady,
    has_store: bool,
) -> Scheduler:
    return Scheduler(
        engine,
        pool,
        eos_token_ids=first.eos_token_ids,
        max_context_tokens=first.max_context_tokens,
        num_stages=shape.parallel.pp,
        attention_ratio=shape.attention_ratio,
        has_store=has_store,
        num_offload_blocks=first.num_offload_blocks,
        group_pools=group_pools,
    )
