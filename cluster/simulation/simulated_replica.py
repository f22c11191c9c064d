"""A simulated replica: the decisions of an engine core, behind ranks and links in virtual time."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

from cluster.simulation.simulated_peers import NETWORK_S, LinkedReplica, SimulatedPeers
from cluster.simulation.simulated_ranks import SimulatedRanks
from cluster.simulation.step_model import StepModel
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
from workers.messages.link import GatewayKey, LinkDown, LinkUp
from workers.messages.rank_channel import RankReady
from workers.replica.engine_decisions import EngineDecisions, EngineSurroundings
from workers.replica.gateway_links import GatewayLinks
from workers.replica.step_loop import StepLoop
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.scheduler import Scheduler

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
    def compatibility(self) -> CompatibilityRecord:
        """What replicas of this engine share: one layer with one head, as wide as all of them."""
        width = max(1, self.token_bytes // (2 * _ITEM_BYTES))
        return CompatibilityRecord(
            PROTOCOL_VERSION, _FINGERPRINT, "bfloat16", "bfloat16", self.block_tokens, 1, 1, width
        )


class GatewayEnd(NamedTuple):
    """The gateway's end of a link: what is sent arrives there after the time of the network."""

    events: EventQueue
    arrive: Callable[[LinkUp], None]

    def send(self, frame: Any) -> None:
        self.events.after(NETWORK_S, lambda: self.arrive(frame))

    def close(self) -> None:
        """The gateway hears of a replica's end from the cluster."""


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
        phase_s: float = 0.0,
    ) -> None:
        """`find` returns a replica by its id, and `links` has the links of every one that lives. The first
        look at leases comes after `phase_s`, so that replicas do not look at once."""
        self.engine = engine
        self._events = events
        self._pump_scheduled = False
        clock, config, shard = events.clock, engine.config, Shard(0, 1, 0, 1)
        compatibility = engine.compatibility
        block_bytes = compatibility.token_bytes * engine.block_tokens
        self.ranks = SimulatedRanks(
            engine.steps, events, self.on_rank_message, block_bytes, shard, engine.max_sequences
        )
        pool = BlockPool(engine.num_blocks, engine.block_tokens)
        scheduler = Scheduler(
            config, pool, eos_token_ids=(), max_context_tokens=engine.max_context_tokens
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
        peers = links[identity] = SimulatedPeers(identity, events, find, links, shard, self.wake)
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
                steps=StepLoop(scheduler, self.ranks.send, clock),
                sends=SendTable(transfer, engine.block_tokens, 1, []),
                landings=LandingTable(transfer, pool, engine.block_tokens, 1, []),
                max_migrations=transfer.max_migrations,
                ranks=self.ranks,
                gateways=GatewayLinks(clock, _as_it_is),
                peers=peers,
                clock=clock,
                faults=Faults(),
            )
        )
        events.after(phase_s or _TICK_S, self._tick)

    @property
    def is_alive(self) -> bool:
        """Whether anybody answers here."""
        return not self._death

    def connect(self, gateway: GatewayKey, arrive: Callable[[LinkUp], None]) -> None:
        """Open the link of a gateway, which `arrive` reads."""
        self._gateways.connected(gateway, GatewayEnd(self._events, arrive))
        self._gateways.send(gateway, self.hello())

    def receive(self, gateway: GatewayKey, message: LinkDown) -> None:
        """Take a message of a gateway, unless the replica has died."""
        if self.is_alive:
            self.take(gateway, message)

    def end(self, reason: str) -> None:
        """Die, with everything that runs here."""
        self.kill_ranks(reason)

    def wake(self) -> None:
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._events.after(0.0, self.pump)

    def pump(self) -> None:
        self._pump_scheduled = False
        super().pump()

    def _tick(self) -> None:
        if self.is_alive:
            self.tick()
            self._events.after(_TICK_S, self._tick)

    def _end_ranks(self) -> None:
        self.ranks.kill()

    def fail(self, error: BaseException) -> None:
        """Stop the simulation: an error here is one of the code that serves, or of the simulator."""
        raise error
