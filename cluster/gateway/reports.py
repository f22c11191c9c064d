"""What the gateway knows, as the messages of its API: status, models, explanations, ends of requests."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Collection

import numpy as np

from cluster.config import ClusterConfig
from cluster.gateway.actions import Emit, Summary
from cluster.gateway.desk import Desk, RequestRecord
from cluster.gateway.intake import Intake
from cluster.gateway.pools import moves_of, pools_of
from cluster.gateway.recent import Lately
from cluster.gateway.replica_view import ReplicaView
from cluster.gateway.replicas import ReplicaLinks
from cluster.observe.meters import cached_by_tier
from cluster.proto import tandem_pb2 as pb
from cluster.stores.admin import StoreAdmin
from kvtransfer.clock import Clock
from kvtransfer.messages import ReplicaIdentity
from router.messages import Decision
from workers.messages import LoadReport, PathMeasure, PrefillReport

_PACKAGES = ("tandem-serve", "ray", "torch", "grpcio", "tokenizers", "msgspec")


class Reporter:
    """Answers the questions that concern no single stream."""

    def __init__(
        self,
        config: ClusterConfig,
        desk: Desk,
        links: ReplicaLinks,
        intake: Intake,
        stores: StoreAdmin,
        clock: Clock,
        lately: Lately,
    ) -> None:
        self._lately = lately
        self._config = config
        self._desk = desk
        self._links = links
        self._intake = intake
        self._stores = stores
        self._clock = clock
        self._started_at = clock.now()
        self._versions = _versions()

    def configure(self, config: ClusterConfig) -> None:
        """Another deploy has set other counts."""
        self._config = config

    def model(self) -> pb.Model:
        compatibility = self._links.compatibility
        return pb.Model(
            name=self._config.model_name,
            max_context_tokens=self._links.max_context_tokens,
            vocab_size=self._desk.limits().vocab_size,
            has_chat_template=self._intake.has_chat_template,
            fingerprint=compatibility.model_fingerprint.hex() if compatibility else "",
            block_tokens=self._config.pools[0].engine.block_tokens,
        )

    def status(self) -> pb.StatusResponse:
        counters = self._desk.counters
        now = self._clock.now()
        views = self._links.views()
        known = {view.record.identity for view in views}
        return pb.StatusResponse(
            model=self.model(),
            replicas=[_replica(view, now, known) for view in views],
            gateways=[
                pb.GatewayStatus(
                    gateway_id=record.gateway_id,
                    epoch=record.epoch,
                    address=record.address,
                    process_id=record.process_id,
                    console=record.console,
                )
                for record in self._links.gateways
            ],
            uptime_s=now - self._started_at,
            versions=self._versions,
            num_running_requests=self._desk.num_running,
            num_finished_requests=counters.num_finished,
            num_failed_requests=counters.num_failed,
            num_cancelled_requests=counters.num_cancelled,
            ready=self._links.has_route(),
            wall_time_s=self._clock.wall(),
            recent=self._lately.recent(),
            prefixes=self._lately.prefixes(),
            stores=self._stores.members(),
            pools=pools_of(self._config, self._links),
            moves=moves_of(self._links.roster_view),
            traffic=self._links.roster_view.traffic,
            demand=pb.Demand(**dataclasses.asdict(self._desk.meters.demand)),
        )

    def explain(self, request_id: str) -> pb.ExplainResponse:
        """`UnknownRequestError` when the request is neither running nor recent."""
        return _explanation(self._desk.record(request_id))


def delta_of(emit: Emit) -> pb.GenerateResponse:
    """The stream's message for new output of one sample."""
    return pb.GenerateResponse(
        delta=pb.Delta(
            sample=emit.sample,
            first_index=emit.first_index,
            token_ids=np.frombuffer(emit.tokens, dtype="<u4").tolist(),
            text=emit.text,
            logprobs=[
                pb.TokenLogprob(
                    logprob=item.logprob,
                    top=[pb.TopLogprob(token_id=token, logprob=logprob) for token, logprob in item.top],
                )
                for item in emit.logprobs
            ],
            finish_reason=emit.finish,
        )
    )


def finished_of(summary: Summary) -> pb.GenerateResponse:
    """The stream's last message."""
    return pb.GenerateResponse(
        finished=pb.Finished(
            samples=[
                pb.SampleEnd(sample=item.index, finish_reason=item.finish, num_tokens=item.num_tokens)
                for item in summary.samples
            ],
            usage=pb.Usage(
                prompt_tokens=summary.num_prompt_tokens,
                cached=_cached(summary.prefill),
                completion_tokens=sum(item.num_tokens for item in summary.samples),
            ),
            timing=_timing(summary),
            prefill_replica=summary.prefill_replica,
            decode_replica=summary.decode_replica,
        )
    )


def _cached(report: PrefillReport | None) -> pb.CachedTokens:
    return pb.CachedTokens() if report is None else pb.CachedTokens(**cached_by_tier(report))


def _timing(summary: Summary) -> pb.Timing:
    moved = summary.hand_over
    return pb.Timing(
        queue_ms=1e3 * summary.queue_s,
        prefill_ms=1e3 * summary.prefill_s,
        transfer_ms=1e3 * summary.transfer_s,
        decode_ms=1e3 * summary.decode_s,
        ttft_ms=1e3 * summary.ttft_s,
        e2e_ms=1e3 * summary.e2e_s,
        transfer_gb_s=moved.transfer_gb_s if moved else 0.0,
        transport=moved.transport if moved else "",
        transfer_bytes=moved.num_moved_bytes if moved else 0,
        attempts=summary.num_attempts,
    )


def _explanation(record: RequestRecord) -> pb.ExplainResponse:
    return pb.ExplainResponse(
        request_id=record.request_id,
        state=record.state,
        reason=record.reason,
        decisions=[_decision(item.attempt, item.decision) for item in record.decisions],
        timeline=[
            pb.TimelineEvent(at_ms=1e3 * (entry.at - record.started_at), name=entry.name, detail=entry.detail)
            for entry in record.timeline
        ],
    )


def _decision(attempt: int, decision: Decision) -> pb.Decision:
    return pb.Decision(
        attempt=attempt,
        policy=decision.policy,
        prefill=decision.prefill,
        decode=decision.decode,
        prefill_cached_tokens=decision.prefill_cached_tokens,
        decode_cached_tokens=decision.decode_cached_tokens,
        candidates=[
            pb.Candidate(
                replica_id=item.replica_id,
                side=item.side,
                matched_tokens=item.matched_tokens,
                uncached_tokens=item.uncached_tokens,
                backlog_tokens=item.backlog_tokens,
                transfer_tokens=item.transfer_tokens,
                pressure_tokens=item.pressure_tokens,
                cost=item.cost,
                note=item.note,
            )
            for item in decision.candidates
        ],
        reason=decision.reason,
    )


def _replica(view: ReplicaView, now: float, known: Collection[ReplicaIdentity]) -> pb.Replica:
    """`known`: the replicas there are; paths to others are history."""
    record = view.record
    return pb.Replica(
        replica_id=record.identity.replica_id,
        epoch=record.identity.epoch,
        pool=record.pool,
        role=view.role,
        address=record.address,
        state=str(view.state),
        note=view.note,
        process_id=record.process_id,
        rank_process_ids=record.rank_process_ids,
        load=_load(view.load, now - view.load_at) if view.load else None,
        paths=[_path(path) for path in view.paths if path.peer in known],
        tp=record.tp,
        stage_layers=[end - start for start, end in record.stages],
        home_role=record.home_role or record.role,
        role_epoch=view.hello.role_epoch if view.hello else record.role_epoch,
    )


def _load(load: LoadReport, age_s: float) -> pb.Load:
    return pb.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_landings=load.num_landings,
        num_backlog_tokens=load.num_backlog_tokens,
        num_free_blocks=load.num_free_blocks,
        num_cached_blocks=load.num_cached_blocks,
        num_quarantined_blocks=load.num_quarantined_blocks,
        num_total_blocks=load.num_total_blocks,
        num_leaked_blocks=load.num_leaked_blocks,
        prefill_tok_s=load.prefill_tok_s,
        decode_step_ms=1e3 * load.decode_step_s,
        num_steps=load.num_steps,
        num_checksum_failures=load.num_checksum_failures,
        num_preemptions=load.num_preemptions,
        transfer_gb_s=load.transfer_gb_s,
        age_s=age_s,
        num_stored_blocks=load.num_stored_blocks,
        num_unstored_blocks=load.num_unstored_blocks,
        num_loaded_tokens=load.num_loaded_tokens,
        load_tok_s=load.load_tok_s,
        num_store_checksum_failures=load.num_store_checksum_failures,
        num_offloaded_blocks=load.num_offloaded_blocks,
        num_waiting_landings=load.num_waiting_landings,
    )


def _path(path: PathMeasure) -> pb.Path:
    return pb.Path(
        peer_replica_id=path.peer.replica_id,
        rank=path.rank,
        peer_rank=path.peer_rank,
        transport=path.transport,
        gb_s=path.gb_s,
        latency_us=path.latency_us,
        device=path.device,
        instead_of=path.instead_of,
    )


def _versions() -> dict[str, str]:
    """Of what matters when something is reported; "" where it is not installed as a distribution."""
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found
