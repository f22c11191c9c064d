"""The rooms of an engine core, built and joined when its ranks have told their sizes. Called by the engine core, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.config import TransferConfig
from kvtransfer.messages import ReplicaIdentity
from workers.config import EngineConfig
from workers.disagg.kv_receiver import KvReceiver
from workers.disagg.kv_sender import KvSender
from workers.disagg.migration import MigrationManager
from workers.disagg.peers import Peers
from workers.messages import RankReady
from workers.replica.gateway_links import Gateways
from workers.replica.partition import Shape
from workers.replica.purging import Purging
from workers.replica.rank_group import RankGroup
from workers.replica.replica_reports import ReplicaReports
from workers.replica.requests import Requests
from workers.replica.stats import Capability, StepStats
from workers.replica.step_loop import StepLoop
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.scheduler import Scheduler
from workers.store_connector.connector import StoreConnector, reaches_store


class Components:
    """Who is who is drawn in `workers/README.md`. `tiers` is None without a store."""

    def __init__(
        self,
        *,
        identity: ReplicaIdentity,
        engine: EngineConfig,
        transfer: TransferConfig,
        secret: bytes,
        clock: Clock,
        faults: Faults,
        shape: Shape,
        group: RankGroup,
        ready: Sequence[RankReady],
        gateways: Gateways,
        store: str | None,
        wake: Callable[[], None],
        kill_ranks: Callable[[str], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """`wake` asks the engine core to plan again; after `on_error` nothing here may be trusted."""
        first = ready[0]
        has_store = reaches_store(store, ready)
        self.pool = BlockPool(first.num_blocks, engine.block_tokens)
        self.scheduler = _scheduler(engine, shape, self.pool, first, has_store)
        self.steps = _step_loop(engine, self.scheduler, shape, group, ready, clock)
        self._build_sides(engine, transfer, clock, faults, group, len(ready), kill_ranks)
        self.requests = Requests(
            identity=identity,
            scheduler=self.scheduler,
            gateways=gateways,
            outbound=self.outbound,
            inbound=self.inbound,
            clock=clock,
            vocab_size=first.vocab_size,
            wake=wake,
        )
        self.peers = Peers(
            identity=identity,
            compatibility=first.compatibility,
            ranks=tuple(each.endpoints for each in ready),
            config=transfer,
            secret=secret,
            clock=clock,
            order=group.send,
            order_to=group.send_to,
            prefill_side=self.outbound,
            decode_side=self.inbound,
            wake=wake,
            on_error=on_error,
        )
        self.outbound.peers = self.inbound.peers = self.peers
        self.outbound.moving = self.moving = MigrationManager(
            identity=identity,
            scheduler=self.scheduler,
            outbound=self.outbound,
            gateways=gateways,
            clock=clock,
            most=transfer.max_moves,
            token_bytes=first.compatibility.token_bytes,
            decode_step_s=lambda: self.steps.rates.decode_step_s,
            on_ended=self.requests.ended,
            on_failed=self.requests.failed,
            wake=wake,
        )
        self.tiers: StoreConnector | None = None
        if has_store:
            self.tiers = StoreConnector(
                name=store or "",
                secret=secret,
                identity=identity,
                ranks=ready,
                pool=self.pool,
                scheduler=self.scheduler,
                engine=engine,
                clock=clock,
                order_to=group.send_to,
                prefill_tok_s=lambda: self.steps.rates.prefill_tok_s,
                wake=wake,
                on_error=on_error,
            )
        self.purging = Purging(self.pool, self.scheduler, self.outbound, self.inbound, self.tiers)
        self.reports = ReplicaReports(
            identity=identity,
            pool=self.pool,
            scheduler=self.scheduler,
            steps=self.steps,
            outbound=self.outbound,
            inbound=self.inbound,
            peers=self.peers,
            tiers=self.tiers,
        )

    def _build_sides(
        self,
        engine: EngineConfig,
        transfer: TransferConfig,
        clock: Clock,
        faults: Faults,
        group: RankGroup,
        num_ranks: int,
        kill_ranks: Callable[[str], None],
    ) -> None:
        """Both sides of a hand-over."""
        self.outbound = KvSender(
            config=transfer,
            block_tokens=engine.block_tokens,
            scheduler=self.scheduler,
            clock=clock,
            num_ranks=num_ranks,
            order=group.send,
            on_failed=lambda failure: self.requests.failed(failure),
            on_ended=lambda key: self.requests.ended(key),
            kill_ranks=kill_ranks,
            faults=faults,
        )
        self.inbound = KvReceiver(
            config=transfer,
            block_tokens=engine.block_tokens,
            pool=self.pool,
            scheduler=self.scheduler,
            clock=clock,
            num_ranks=num_ranks,
            order=group.send,
            order_to=group.send_to,
            on_joined=lambda *news: self.requests.joined(*news),
            faults=faults,
        )


def _step_loop(
    engine: EngineConfig,
    scheduler: Scheduler,
    shape: Shape,
    group: RankGroup,
    ready: Sequence[RankReady],
    clock: Clock,
) -> StepLoop:
    capability = Capability(
        work=shape.work,
        flop_s=sum(each.flop_s for each in ready),
        byte_s=sum(each.byte_s for each in ready),
    )
    parallel = shape.parallel
    piece_flops = shape.work.largest_piece_flops(
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
    )


def _scheduler(
    engine: EngineConfig, shape: Shape, pool: BlockPool, first: RankReady, has_store: bool
) -> Scheduler:
    return Scheduler(
        engine,
        pool,
        eos_token_ids=first.eos_token_ids,
        max_context_tokens=first.max_context_tokens,
        fingerprint=first.compatibility.model_fingerprint,
        num_stages=shape.parallel.pp,
        attention_ratio=shape.attention_ratio,
        has_store=has_store,
        num_offload_blocks=first.num_offload_blocks,
    )
