"""The engine core of a replica: its Links, its ranks, and the event loop on which it decides. It imports no
torch, and never blocks.

What it decides is in `workers.replica.engine_decisions`. When a rank ends or hangs, every request here fails
over at once, `check_health` raises, and whoever runs the replica replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.errors import TransferError
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.protocol.receiver import LandingTable
from kvtransfer.protocol.sender import SendTable
from kvtransfer.rpc.stream import FrameStream, LinkServer
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.store_client import StoreClient
from kvtransfer.transfer_reports import PeerConnected, PeerConnectFailed, PeerLost
from workers.config import EngineConfig
from workers.disagg.peers import Peers
from workers.errors import RankDiedError
from workers.messages.link import GatewayKey, HandOverTarget, RequestKey, longest_link_frame
from workers.messages.rank_channel import RankReady, RankUp
from workers.replica.engine_decisions import DRAIN_LOOK_S, EngineDecisions, EngineSurroundings
from workers.replica.gateway_links import GatewayLinks
from workers.replica.partition import ReplicaSpec, Shape
from workers.replica.rank_group import RankGroup, RankLauncher
from workers.replica.replica_reports import slowest_start
from workers.replica.step_loop import StepLoop
from workers.replica.step_stats import Capability, StepStats
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.group_pool import GroupPool
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.step_costs import StepCosts
from workers.store_connector.connector import StoreConnector, reaches_store
from workers.store_connector.engine_parts import EngineParts

_log = logging.getLogger("tandem.engine_core")

TICK_S = 0.25


class EngineCore(EngineDecisions):
    """One replica whose ranks have loaded. `launch` makes it; everything runs on one event loop."""

    peers: Peers

    def __init__(
        self, spec: ReplicaSpec, shape: Shape, group: RankGroup, ready: Sequence[RankReady], clock: Clock
    ) -> None:
        """`ready` are the reports of all ranks of the `group`."""
        first, engine, trust = ready[0], spec.engine, group.trust
        has_store = reaches_store(spec.store, ready)
        self.address = ""
        self.stages = shape.stages
        self._group = group
        self._tasks = SupervisedTasks(self.fail)
        self._pump_scheduled = False
        pool = BlockPool(first.num_blocks, engine.block_tokens, spec.group_shares)
        group_pools = _group_pools(first, pool)
        costs = StepCosts()
        scheduler = _scheduler(engine, shape, pool, group_pools, first, costs, has_store)
        has_copies = first.compatibility.is_given_on and shape.parallel.tp > 1 and engine.latent_kv != "split"
        has_states = [it.has_states for it in group_pools]
        super().__init__(
            EngineSurroundings(
                identity=spec.identity,
                pool_name=spec.pool,
                role=spec.role,
                engine=engine,
                ready=ready,
                pool=pool,
                group_pools=group_pools,
                scheduler=scheduler,
                steps=_step_loop(engine, scheduler, shape, group, ready, costs, clock),
                sends=SendTable(spec.transfer, engine.block_tokens, len(ready), has_states),
                landings=LandingTable(spec.transfer, pool, engine.block_tokens, len(ready), group_pools),
                max_migrations=spec.transfer.max_migrations,
                ranks=group,
                gateways=GatewayLinks(clock),
                peers=Peers(
                    identity=spec.identity,
                    compatibility=first.compatibility,
                    ranks=tuple(each.endpoints for each in ready),
                    config=spec.transfer,
                    trust=trust,
                    clock=clock,
                    channel=group,
                    control=self,
                ),
                clock=clock,
                faults=Faults(spec.faults),
                sampling_rank=(shape.parallel.pp - 1) * shape.parallel.tp,
                gives_blocks_on=has_copies,
                connect_store=_store_connection(spec, shape, trust, ready, clock) if has_store else None,
            )
        )
        self._server = LinkServer(trust, self._serve_gateway, self._serve_peer, _longest_frame(engine, first))

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
            _log_start(spec.identity, slowest_start(ready))
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
        self.begin_drain(drain_s)
        deadline = self._clock.now() + drain_s
        while not self.is_drained and self._clock.now() < deadline:
            await self._clock.sleep(DRAIN_LOOK_S)
        self.end_drain()

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

    @property
    def rank_process_ids(self) -> tuple[int, ...]:
        return tuple(ready.process_id for ready in self.ready)

    # ------------------------------------------------------------------------------------- gateways

    def connected_gateways(self) -> set[GatewayKey]:
        """Return the gateways that have a link to this replica."""
        return self._gateways.connected_keys()

    async def _serve_gateway(self, stream: FrameStream) -> None:
        await self._gateways.serve(stream, self.hello, self.take, self.gateway_lost)

    # ------------------------------------------------------------------------------------------ peers

    async def _serve_peer(self, stream: FrameStream) -> None:
        try:
            await self.peers.serve(stream, self.kv_receiver)
        except TransferError as error:
            _log.warning("peer %s sent nonsense: %s", stream.name, error)
        except Exception as error:
            self.fail(error)

    # ------------------------------------------------------------------------------------------ engine

    def _take_report(self, rank: int, message: RankUp) -> None:
        if isinstance(message, PeerConnected | PeerConnectFailed | PeerLost):
            self.peers.path_report(rank, message)
        else:
            super()._take_report(rank, message)

    def wake(self) -> None:
        """Pump once after all events of this turn of the event loop are handled."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        self._pump_scheduled = False
        super().pump()

    async def _tick_forever(self) -> None:
        while not self._death:
            await self._clock.sleep(TICK_S)
            self.tick()

    def _end_ranks(self) -> None:
        self._group.kill()

    def _died(self, reason: str, suspects: Collection[RequestKey]) -> None:
        was_alive = not self._death
        super()._died(reason, suspects)
        if was_alive and self.address:
            self._tasks.spawn(self.peers.close(), "engine-core-death")


def _log_start(identity: ReplicaIdentity, slowest: RankReady) -> None:
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in slowest.phase_to_s.items())
    _log.info(
        "%s: rank %d started in %.1f s: %s; compiler of kernels beside %.1f",
        identity.replica_id,
        slowest.rank,
        sum(slowest.phase_to_s.values()),
        phases,
        slowest.kernels_s,
    )


def _step_loop(
    engine: EngineConfig,
    scheduler: Scheduler,
    shape: Shape,
    group: RankGroup,
    ready: Sequence[RankReady],
    costs: StepCosts,
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
        costs,
    )


def _store_connection(
    spec: ReplicaSpec, shape: Shape, trust: Trust, ready: Sequence[RankReady], clock: Clock
) -> Callable[[EngineParts], StoreConnector]:
    name = spec.store or ""

    def connect(parts: EngineParts) -> StoreConnector:
        return StoreConnector(
            name=name,
            connect=lambda hello, events: StoreClient(name, trust, hello, events, clock, parts.control.fail),
            identity=spec.identity,
            ready=ready,
            engine=parts,
            clock=clock,
            records=shape.records,
        )

    return connect


def _longest_frame(engine: EngineConfig, first: RankReady) -> int:
    return longest_link_frame(first.max_context_tokens, engine.block_tokens, engine.max_sequences)


def _group_pools(first: RankReady, kv: BlockPool) -> list[GroupPool]:
    """Return the pools of the groups of layers behind the first."""
    sizes = zip(first.compatibility.groups[1:], first.num_window_blocks, strict=True)
    return [GroupPool(group.window, size, has_states=group.state_size > 0, kv=kv) for group, size in sizes]


def _scheduler(
    engine: EngineConfig,
    shape: Shape,
    pool: BlockPool,
    group_pools: Sequence[GroupPool],
    first: RankReady,
    costs: StepCosts,
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
        costs=costs,
    )
