"""A simulated replica: the decisions of an engine core, behind ranks and links in virtual time."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import NamedTuple

from cluster.simulation.batch_gate import BatchGate, Batching
from cluster.simulation.gateway_end import GatewayEnd, TokenObserver
from cluster.simulation.simulated_peers import LinkedReplica, SimulatedPeers
from cluster.simulation.simulated_ranks import SimulatedRanks
from cluster.simulation.simulated_stores import NodeStore
from cluster.simulation.step_model import KnownCosts, StepModel
from cluster.simulation.step_runs import StepRuns
from cluster.simulation.store_copies import StoreCopies
from cluster.simulation.virtual_time import EventQueue
from kvtransfer.common.faults import Faults
from kvtransfer.config import TransferConfig
from kvtransfer.messages import (
    PROTOCOL_VERSION,
    CompatibilityRecord,
    RankEndpoints,
    ReplicaIdentity,
    Shard,
)
from kvtransfer.protocol.receiver import LandingTable
from kvtransfer.protocol.sender import SendTable
from workers.config import EngineConfig
from workers.messages.link import Cancel, GatewayKey, LinkDown, LinkUp, Submission
from workers.messages.rank_channel import RankReady, RankUp
from workers.replica.engine_decisions import DRAIN_LOOK_S, EngineDecisions, EngineSurroundings
from workers.replica.gateway_links import GatewayLinks
from workers.replica.step_loop import StepLoop
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.decode_run import DecodeRun
from workers.scheduler.scheduler import Scheduler
from workers.store_connector.connector import StoreConnector
from workers.store_connector.engine_parts import EngineParts

# The period in which engine cores look after leases and deadlines, as `workers.replica.engine_core.TICK_S`.
_TICK_S = 0.25
_FINGERPRINT = b"simulated model "
_VOCABULARY = 1 << 31
_ITEM_BYTES = 2


class SimulatedEngine(NamedTuple):
    """What a replica is, beside its steps: the sizes of its engine, and of its KV. A token of KV has
    `token_bytes`."""

    steps: StepModel
    num_blocks: int
    block_tokens: int = 64
    max_batch_tokens: int = 2048
    chunk_tokens: int = 2048
    max_sequences: int = 256
    token_bytes: int = 131072
    max_context_tokens: int = 1 << 20
    batching: Batching = "continuous"
    tpot_objective_s: float | None = None

    @property
    def config(self) -> EngineConfig:
        """The settings of the engine. Blocks may be those of a trace, larger than engines have."""
        config = EngineConfig(
            kv_tokens=self.num_blocks * self.block_tokens,
            max_batch_tokens=self.max_batch_tokens,
            chunk_tokens=self.chunk_tokens,
            max_sequences=self.max_sequences,
            tpot_objective_s=self.tpot_objective_s,
        )
        return config.model_copy(update={"block_tokens": self.block_tokens})

    @property
    def block_bytes(self) -> int:
        """The KV of a block."""
        return self.compatibility.token_bytes * self.block_tokens

    @property
    def compatibility(self) -> CompatibilityRecord:
        """What replicas of this engine share: one layer with one head, as wide as all of them."""
        width = max(1, self.token_bytes // (2 * _ITEM_BYTES))
        return CompatibilityRecord(
            PROTOCOL_VERSION, _FINGERPRINT, "bfloat16", "bfloat16", self.block_tokens, 1, 1, width
        )


def _ready(engine: SimulatedEngine, compatibility: CompatibilityRecord, shard: Shard) -> RankReady:
    """Return the report of the one rank that it has loaded."""
    return RankReady(
        rank=0,
        process_id=0,
        host_id="",
        num_blocks=engine.num_blocks,
        vocab_size=_VOCABULARY,
        max_context_tokens=engine.max_context_tokens,
        eos_token_ids=(),
        compatibility=compatibility,
        endpoints=RankEndpoints(0, shard, "", ()),
        load_s=0.0,
        warm_up_s=0.0,
    )


def _as_it_is(message: LinkUp) -> LinkUp:
    return message


class SimulatedReplica(EngineDecisions):
    """One replica: scheduler, block pool, landings, hand-overs and migration are those that serve."""

    def __init__(
        self,
        identity: ReplicaIdentity,
        role: str,
        engine: SimulatedEngine,
        events: EventQueue,
        find: Callable[[str], LinkedReplica | None],
        links: MutableMapping[ReplicaIdentity, SimulatedPeers],
        skips: bool,
        phase_s: float = 0.0,
        store: NodeStore | None = None,
    ) -> None:
        """`find` returns a replica by its id, and `links` has the links of every one that lives. If it
        `skips`, steps that only decode are done in runs. The first look at leases comes after `phase_s`, so
        that replicas do not look at once. `store` is that of the node; None: there is none."""
        self.engine = engine
        self._events = events
        self._pump_scheduled = False
        self._skips = skips
        self._ends: list[GatewayEnd] = []
        clock, config, shard = events.clock, engine.config, Shard(0, 1, 0, 1)
        compatibility = engine.compatibility
        self.ranks = SimulatedRanks(
            engine.steps,
            events,
            self.on_rank_message,
            self._passes_over,
            engine.block_bytes,
            shard,
            engine.max_sequences,
            None if store is None else StoreCopies(store.link_bytes_s, events.clock),
        )
        self._store = store
        pool = BlockPool(engine.num_blocks, engine.block_tokens)
        costs = KnownCosts(engine.steps)
        scheduler = Scheduler(
            config,
            pool,
            eos_token_ids=(),
            max_context_tokens=engine.max_context_tokens,
            has_store=store is not None,
            costs=costs,
        )
        ready = _ready(engine, compatibility, shard)
        transfer = TransferConfig()
        peers = links[identity] = SimulatedPeers(
            identity, events, find, links, shard, self.catch_up, self.wake
        )
        super().__init__(
            EngineSurroundings(
                identity=identity,
                pool_name=role,
                role=role,
                engine=config,
                ready=(ready,),
                pool=pool,
                group_pools=(),
                scheduler=scheduler,
                steps=StepLoop(scheduler, self.ranks.send, clock, costs=costs),
                sends=SendTable(transfer, engine.block_tokens, 1, []),
                landings=LandingTable(transfer, pool, engine.block_tokens, 1, []),
                max_migrations=transfer.max_migrations,
                ranks=self.ranks,
                gateways=GatewayLinks(clock, _as_it_is),
                peers=peers,
                clock=clock,
                faults=Faults(),
                connect_store=None if store is None else self._store_connection(store, identity, ready),
            )
        )
        decodes = DecodeRun(scheduler)
        self._runs = StepRuns(decodes, self.ranks, self.steps, self._gateways, self._ends, self.table, clock)
        self._gate: BatchGate | None = None
        if engine.batching != "continuous":
            self._gate = BatchGate(engine.batching, engine.max_sequences, events)
        events.after(phase_s or _TICK_S, self._tick)

    def _store_connection(
        self, store: NodeStore, identity: ReplicaIdentity, ready: RankReady
    ) -> Callable[[EngineParts], StoreConnector]:
        def connect(parts: EngineParts) -> StoreConnector:
            return StoreConnector(
                name=store.name,
                connect=lambda hello, events: store.connect(hello, events, self.catch_up),
                identity=identity,
                ready=(ready,),
                engine=parts,
                clock=self._events.clock,
            )

        return connect

    @property
    def _transfers(self) -> bool:
        """Whether the looks at leases concern anything: landings, pushes or the store."""
        return (
            self.connector is not None
            or self.kv_receiver.num_unfinished + self.kv_sender.sends.num_active > 0
        )

    @property
    def is_alive(self) -> bool:
        """Whether anybody answers here."""
        return not self._death

    def connect(
        self,
        gateway: GatewayKey,
        arrive: Callable[[LinkUp], None],
        observer: TokenObserver,
    ) -> None:
        """Open the link of a gateway, as `GatewayEnd` has it."""
        end = GatewayEnd(self._events, arrive, observer)
        self._ends.append(end)
        self._gateways.connected(gateway, end)
        self._gateways.send(gateway, self.hello())

    def receive(self, gateway: GatewayKey, message: LinkDown) -> None:
        """Take a message of a gateway, unless the replica has died."""
        if not self.is_alive:
            return
        self.catch_up()
        if self._gate is not None and isinstance(message, Submission):
            key = message.request_id, message.attempt
            self._gate.put(key, lambda: self.take(gateway, message))
            return
        if self._gate is not None and isinstance(message, Cancel):
            self._gate.drop((message.request_id, message.attempt))
        self.take(gateway, message)

    def on_rank_message(self, rank: int, message: RankUp) -> None:
        self.catch_up()
        super().on_rank_message(rank, message)

    def stop_runs(self) -> None:
        """Send all tokens up to now, and do steps one by one from now on."""
        self._skips = False
        self.send_all()

    def send_all(self) -> None:
        """Send all tokens up to now."""
        self.catch_up()
        self.flush()
        for end in self._ends:
            end.send_kept()

    def end(self, reason: str) -> None:
        """Die, with everything that runs here."""
        if self._store is not None:
            self._store.end()
        self.kill_ranks(reason)

    def drain(self, drain_s: float, on_drained: Callable[[], None]) -> None:
        """Leave, as `workers.replica.engine_core.EngineCore.drain`; `on_drained` is called unless the replica
        dies before."""
        self.send_all()
        self.begin_drain(drain_s)
        deadline = self._clock.now() + drain_s

        def look() -> None:
            if not self.is_drained and self._clock.now() < deadline:
                self._events.after(DRAIN_LOOK_S, look)
            elif self.is_alive:
                self.send_all()
                self.end_drain()
                on_drained()

        look()

    def stop(self) -> None:
        """End after a drain: nothing runs here any more."""
        self._death = "it has left"
        if self._store is not None:
            self._store.end()
        self.ranks.kill()

    def set_role(self, role: str, epoch: int) -> None:
        self.send_all()
        super().set_role(role, epoch)

    def wake(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._events.after(0.0, self.pump)

    def pump(self) -> None:
        self._pump_scheduled = False
        runs = self._runs
        runs.advance()
        if runs.is_intact and self._may_run and self._gate is None:
            # The rest of a turn has nothing to do: what could change that ends the run first.
            self.publish()
            runs.wait()
            return
        runs.end()
        super().pump()
        if self._gate is not None:
            self._gate.review(self.table.__contains__)
        if not runs.is_on:
            runs.begin(self._may_begin_run)
        if runs.is_on:
            runs.wait()

    def _may_begin_run(self) -> bool:
        return self._may_run and self._gateways.have_seen(self.reports.queue())

    @property
    def _may_run(self) -> bool:
        """Whether nothing waits here for which a step may free something."""
        if not self._skips or not (self.connector is None or self.connector.is_idle):
            return False
        landings = self.kv_receiver.landings
        return not (landings.num_waiting or landings.has_claims or len(self.migration))

    def catch_up(self) -> None:
        """Do the steps that are over by now, and those after them one by one until `pump` finds a run."""
        self._runs.end()

    def _passes_over(self) -> bool:
        """Do the steps that are over by now. Return whether the one that is reported now was among them."""
        is_passed = self._runs.passes_over()
        if is_passed:
            self.wake()
        return is_passed

    def _tick(self) -> None:
        if not self.is_alive:
            return
        if self._transfers:
            self.catch_up()
        if not self._runs.passes_look():
            self.tick()
        self._events.after(_TICK_S, self._tick)

    def _end_ranks(self) -> None:
        self.ranks.kill()

    def fail(self, error: BaseException) -> None:
        """Stop the simulation: an error here is one of the code that serves, or of the simulator."""
        raise error
