"""A simulated replica: the decisions of an engine core, behind ranks and links in virtual time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, MutableMapping
from typing import NamedTuple

from cluster.simulation.batch_gate import BatchGate, Batching
from cluster.simulation.gateway_end import GatewayEnd, TokenObserver
from cluster.simulation.simulated_peers import LinkedReplica, SimulatedPeers
from cluster.simulation.simulated_ranks import SimulatedRanks
from cluster.simulation.simulated_stores import NodeStore
from cluster.simulation.step_model import KnownCosts, StepModel
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

    @property
    def config(self) -> EngineConfig:
        """The settings of the engine. Blocks may be those of a trace, larger than engines have."""
        config = EngineConfig(
            kv_tokens=self.num_blocks * self.block_tokens,
            max_batch_tokens=self.max_batch_tokens,
            chunk_tokens=self.chunk_tokens,
            max_sequences=self.max_sequences,
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


class _StepRun(NamedTuple):
    """Steps that are passed over, at most so many, and when each and those after them are done."""

    num_steps: int
    times: list[float]


def _never() -> bool:
    return False


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
        may_skip: Callable[[], bool],
        phase_s: float = 0.0,
        store: NodeStore | None = None,
    ) -> None:
        """`find` returns a replica by its id, and `links` has the links of every one that lives. While it
        `may_skip`, steps that only decode are done in runs. The first look at leases comes after `phase_s`,
        so that replicas do not look at once. `store` is that of the node; None: there is none."""
        self.engine = engine
        self._events = events
        self._pump_scheduled = False
        self._may_skip = may_skip
        self._run: _StepRun | None = None
        self._ends: list[GatewayEnd] = []
        clock, config, shard = events.clock, engine.config, Shard(0, 1, 0, 1)
        compatibility = engine.compatibility
        self.ranks = SimulatedRanks(
            engine.steps,
            events,
            self.on_rank_message,
            self.catch_up,
            engine.block_bytes,
            shard,
            engine.max_sequences,
            None if store is None else StoreCopies(store.link_bytes_s, events.clock),
        )
        self._store = store
        pool = BlockPool(engine.num_blocks, engine.block_tokens)
        scheduler = Scheduler(
            config,
            pool,
            eos_token_ids=(),
            max_context_tokens=engine.max_context_tokens,
            has_store=store is not None,
        )
        ready = RankReady(
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
                steps=StepLoop(scheduler, self.ranks.send, clock, costs=KnownCosts(engine.steps)),
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
        self._decodes = DecodeRun(scheduler)
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
    def is_alive(self) -> bool:
        """Whether anybody answers here."""
        return not self._death

    def connect(
        self,
        gateway: GatewayKey,
        arrive: Callable[[LinkUp], None],
        is_quiet: Callable[[], bool],
        observer: TokenObserver,
    ) -> None:
        """Open the link of a gateway, as `GatewayEnd` has it."""
        end = GatewayEnd(self._events, arrive, is_quiet, observer)
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
        self._may_skip = _never
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
        super().pump()
        if self._gate is not None:
            self._gate.review(self.table.__contains__)
        if self._may_skip():
            self._begin_run()

    def _begin_run(self) -> None:
        """Pass over the steps that change nothing but positions and tokens, up to the last one before more
        happens: a step that ends or needs a block, or a report of the load that is due."""
        num_steps = self._decodes.num_steps(self.steps.depth)
        if num_steps < 2 or self._run is not None or self.kv_receiver.landings.num_waiting:
            return
        if self.connector is not None and not self.connector.is_idle:
            return
        if len(self.migration) or not self._gateways.have_seen(self.reports.queue()):
            return
        num_decodes = len(self._decodes.sequences)
        times = self.ranks.run_of_steps(num_steps, num_decodes, self._decodes.num_context_tokens)
        num_steps = min(num_steps, bisect_left(times, self._gateways.next_load_at))
        if num_steps < 2:
            return
        self._run = _StepRun(num_steps, times)
        self.ranks.report_first_at(times[num_steps])

    def catch_up(self) -> None:
        """Do the steps of the run that are over by now."""
        run, self._run = self._run, None
        if run is None:
            return
        num_steps = min(run.num_steps, bisect_right(run.times, self._clock.now()))
        if not num_steps:
            self.ranks.report_first_at(run.times[0])
            return
        sequences, began_at = self._decodes.sequences, self.ranks.began_at
        slots = [sequence.slot for sequence in sequences]
        deltas = self._decodes.repeat(num_steps, [self.ranks.token_of(slot) for slot in slots])
        past = run.times[:num_steps]
        for end in self._ends:
            end.pass_over(past, deltas)
        self.ranks.skip(num_steps, run.times, slots)
        took_s = [end - begin for begin, end in zip([began_at, *past], past, strict=False)]
        self.steps.skip(took_s, len(slots), past[-1])
        self._gateways.passed(past)
        for delta in deltas:
            self.table.post_delta(delta)

    def _tick(self) -> None:
        if self.is_alive:
            self.catch_up()
            self.tick()
            self._events.after(_TICK_S, self._tick)

    def _end_ranks(self) -> None:
        self.ranks.kill()

    def fail(self, error: BaseException) -> None:
        """Stop the simulation: an error here is one of the code that serves, or of the simulator."""
        raise error
