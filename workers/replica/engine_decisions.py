"""The decisions of a replica: its scheduler, landings, hand-overs, migrations, store and reports, joined.

It has no socket, task or event loop. `workers.replica.engine_core.EngineCore` runs it behind real Links and
ranks, and the simulator behind virtual ones. What arrives, and the part that handles it:

    gateway  -> submissions, cancels -> Scheduler.submit, .cancel
    peer     -> landings, hand-overs -> KvSender (and MigrationManager), KvReceiver
    rank     -> StepReport           -> Scheduler.settle -> news per gateway -> one StepFrame each
    StepLoop.feed -> Scheduler.plan  -> StepPlan to all ranks, at most pp + 1 unreported at a time

When a rank ends or hangs, every request here fails over at once (`RequestFailed("internal")`, a `suspect` if
it was in flight).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.errors import shown
from kvtransfer.kv_events import KvSnapshotRequest
from kvtransfer.messages import CompatibilityRecord, ReplicaIdentity
from kvtransfer.protocol.receiver import LandingTable
from kvtransfer.protocol.sender import SendTable
from kvtransfer.store.messages.store_orders import StoreAttached, StoreGetDone, StorePutDone
from kvtransfer.transfer_reports import (
    LandingClosed,
    PushDone,
    PushFailed,
    PushStopped,
    Verified,
    WriterGone,
)
from workers.config import EngineConfig
from workers.disagg.kv_hand_overs import HandOverSurroundings, KvHandOvers, KvSizes
from workers.disagg.request_table import RequestTable
from workers.interfaces import PeerLinks, RankChannel
from workers.messages.link import (
    Announce,
    CachePurged,
    Cancel,
    GatewayKey,
    Leaving,
    LinkDown,
    Move,
    PauseBatch,
    PurgeCache,
    ReplicaHello,
    RequestKey,
    RoleChanged,
    Submission,
)
from workers.messages.rank_channel import GrammarCompiled, RankReady, RankUp, StepProgress, StepReport
from workers.replica.gateway_links import GatewayLinks
from workers.replica.replica_reports import ReplicaReports
from workers.replica.requests import Requests
from workers.replica.step_loop import StepLoop
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.group_pool import GroupPool
from workers.scheduler.scheduler import Scheduler
from workers.store_connector.connector import StoreConnector
from workers.store_connector.engine_parts import EngineParts

_log = logging.getLogger("tandem.engine_core")

# The time after which the requests of a step without progress are reported. Gateways leave the replica later
# (`cluster.gateway.circuit_breaker.STALLED_S`).
STALL_REPORT_S = 0.5
# How often a replica that leaves looks whether it is drained.
DRAIN_LOOK_S = 0.05
_LEAVES = "the replica leaves"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSurroundings:
    """What a replica's decisions are made for and with: who it is, the reports of its ranks that they have
    loaded, its blocks, its scheduler with the loop that feeds the ranks, and the ways to ranks, gateways and
    peers."""

    identity: ReplicaIdentity
    pool_name: str
    role: str
    engine: EngineConfig
    ready: Sequence[RankReady]
    pool: BlockPool
    group_pools: Sequence[GroupPool]
    scheduler: Scheduler
    steps: StepLoop
    sends: SendTable
    landings: LandingTable
    max_migrations: int
    ranks: RankChannel
    gateways: GatewayLinks
    peers: PeerLinks
    clock: Clock
    faults: Faults
    # The rank that samples.
    sampling_rank: int = 0
    # Whether blocks that landed are given on among the ranks that hold copies of them.
    gives_blocks_on: bool = False
    # Makes the connection to the node's store; None: there is none.
    connect_store: Callable[[EngineParts], StoreConnector] | None = None


class EngineDecisions:
    """The parts of a replica that decide; see the module's text. Subclasses `wake` it."""

    def __init__(self, around: EngineSurroundings) -> None:
        first = around.ready[0]
        self.identity, self.pool_name = around.identity, around.pool_name
        self.role, self.role_epoch = around.role, 0
        self.ready = around.ready
        self.pool, self.group_pools = around.pool, around.group_pools
        self.scheduler, self.steps, self.peers = around.scheduler, around.steps, around.peers
        self._sampling_rank = around.sampling_rank
        self._engine, self._clock, self._ranks = around.engine, around.clock, around.ranks
        self._gateways = around.gateways
        self._death = ""
        self.table = RequestTable(self._gateways, self)
        of_kv = first.compatibility
        hand_overs = KvHandOvers.of(
            HandOverSurroundings(
                identity=self.identity,
                sizes=KvSizes(
                    around.engine.block_tokens, of_kv.token_bytes, of_kv.state_bytes, first.vocab_size
                ),
                sends=around.sends,
                landings=around.landings,
                scheduler=self.scheduler,
                requests=self.table,
                rates=self.steps.rates,
                max_migrations=around.max_migrations,
                peers=around.peers,
                ranks=around.ranks,
                control=self,
                clock=around.clock,
                faults=around.faults,
                sharing=self.steps if around.gives_blocks_on else None,
            )
        )
        self.kv_sender, self.kv_receiver, self.migration = hand_overs
        self.requests = Requests(
            identity=self.identity,
            table=self.table,
            gateways=self._gateways,
            scheduler=self.scheduler,
            hand_overs=hand_overs,
            work=self.steps.work,
            clock=around.clock,
            vocab_size=first.vocab_size,
        )
        parts = EngineParts(
            self.pool, self.scheduler, around.ranks, self.steps.rates, self, *self._pools_by_kind()
        )
        self.connector = None if around.connect_store is None else around.connect_store(parts)
        self.reports = ReplicaReports(
            identity=self.identity,
            pool=self.pool,
            scheduler=self.scheduler,
            steps=self.steps,
            hand_overs=hand_overs,
            peers=around.peers,
            connector=self.connector,
            ready=around.ready,
        )

    def _pools_by_kind(self) -> tuple[list[GroupPool], list[GroupPool]]:
        """Return the blocks of the groups of layers with a window, and of those with states, which follow
        them."""
        pools = list(zip(self.compatibility.groups[1:], self.group_pools, strict=True))
        windows = [pool for group, pool in pools if not group.state_size]
        states = [pool for group, pool in pools if group.state_size]
        assert [*windows, *states] == list(self.group_pools), "states come last"
        return windows, states

    @property
    def compatibility(self) -> CompatibilityRecord:
        return self.ready[0].compatibility

    @property
    def has_work(self) -> bool:
        """Whether any request, landing or push is here."""
        return len(self.table) + self.kv_receiver.num_unfinished + self.kv_sender.sends.num_active > 0

    def wake(self) -> None:
        """Call `pump` once after all events of this moment are handled."""
        raise NotImplementedError

    def set_role(self, role: str, epoch: int) -> None:
        """Take this role: gateways send other work from now on, and move streams away that do not fit the
        role. Requests that still come under the old role are served. Does nothing unless `epoch` is above
        that of the last change."""
        if epoch <= self.role_epoch:
            return
        self.role, self.role_epoch = role, epoch
        _log.info("%s: role %s from epoch %d on", self.identity.replica_id, role, epoch)
        self._gateways.broadcast(RoleChanged(role, epoch))

    def begin_drain(self, drain_s: float) -> None:
        """Accept no more requests, and hand back those that have not begun. Gateways let streams move away;
        `end_drain` follows when none is left, or after `drain_s`."""
        self._gateways.broadcast(Leaving(drain_s))
        self.requests.leave(_LEAVES)
        self.kv_receiver.leave(_LEAVES)
        self.wake()

    @property
    def is_drained(self) -> bool:
        """Whether nothing has to leave any more."""
        return bool(self._death) or not self.has_work

    def end_drain(self) -> None:
        """Hand back what is left: it resumes at another replica, which recomputes its KV."""
        self.requests.hand_back_all()
        self.flush()

    def hello(self) -> ReplicaHello:
        """Return the greeting to a gateway."""
        return ReplicaHello(
            self.identity,
            self.pool_name,
            self.role,
            self.compatibility,
            self.scheduler.limits.max_local_tokens,
            self.reports.load(),
            self.role_epoch,
        )

    # ------------------------------------------------------------------------------------- gateways

    def take(self, gateway: GatewayKey, message: LinkDown) -> None:
        """Handle a message of a gateway. One that cannot be handled ends the replica, unless it is a request
        that has changed nothing yet."""
        try:
            self._take(gateway, message)
        except Exception as error:
            if not (isinstance(message, Submission) and self.requests.blame(gateway, message, error)):
                self.fail(error)
        self.wake()

    def gateway_lost(self, gateway: GatewayKey) -> None:
        """Handle that the Link of a gateway has ended."""
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

    # ---------------------------------------------------------------------------------------- ranks

    def on_rank_message(self, rank: int, message: RankUp) -> None:
        """Handle a report of a rank."""
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
            case _:
                _log.warning("rank %d sent %s", rank, type(message).__name__)

    # ----------------------------------------------------------------------------------------- turns

    def pump(self) -> None:
        """Do what follows from all that was handled since the last call: plan steps, ask for landings and
        loads, and send the news. An error here ends the replica: no request may hang in a live process."""
        try:
            self._pump()
        except Exception as error:
            self.fail(error)

    def _pump(self) -> None:
        if self._death:
            self.flush()
            return
        for order in self.scheduler.life.grammars.take_orders():
            self._ranks.send_to(self._sampling_rank, order)
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
        self.publish()

    def publish(self) -> None:
        """Send the news: of blocks first, then those for each gateway."""
        self._publish_kv()
        self.flush()

    def tick(self) -> None:
        """Look after leases, deadlines and gateways that are gone; called a few times a second."""
        for gateway in self._gateways.expired():
            self.requests.cancel_all_of(gateway)
        self.kv_sender.tick()
        self.kv_receiver.tick()
        if self.connector is not None:
            self.connector.tick()
        if self.steps.probe(self._engine.canary_idle_s):
            self.reports.check_when_idle()
        self.wake()

    def flush(self) -> None:
        """Send the news to the gateways."""
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

    # ------------------------------------------------------------------------------------------ death

    def fail(self, error: BaseException) -> None:
        """End the replica after an error in the engine core, whose state may be wrong now. The request that
        the scheduler was handling is a suspect."""
        _log.error("%s: the engine core failed", self.identity.replica_id, exc_info=error)
        handled = self.scheduler.isolation.handled
        self._died(f"the engine core failed: {error!r}", () if handled is None else (handled,))

    def kill_ranks(self, reason: str) -> None:
        """End all ranks, and with them the replica."""
        self._died(reason, self.scheduler.in_flight(self.steps.steps_under_way()))

    def _died(self, reason: str, suspects: Collection[RequestKey]) -> None:
        if self._death:
            return
        self._death = self.requests.refusal = reason
        _log.error("%s: %s", self.identity.replica_id, reason)
        self._end_ranks()
        self.table.fail_all(reason, suspects)
        self.flush()

    def _end_ranks(self) -> None:
        """End the ranks of a replica that has died."""
        raise NotImplementedError
