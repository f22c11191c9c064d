"""The brain of a replica: every decision of its engine, and its Links. It never imports torch, never blocks.

Queues and who empties them:

    Link (gateway)  -> submissions, cancels -> Scheduler.submit, .cancel
    Peer link       -> landings, hand-overs -> Outbound, Inbound (workers.handover)
    rank            -> StepReport           -> Scheduler.settle -> news per gateway -> one StepFrame each
    `_pump`         -> Scheduler.plan       -> StepPlan to the ranks, at most two unreported at a time

Step n+1 is planned while step n runs. When a rank ends or hangs, every request here fails over at once
(`RequestFailed("internal")`), `check_health` raises, and whoever runs the replica replaces it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

from kvtransfer.clock import Clock
from kvtransfer.config import TransferConfig
from kvtransfer.errors import TransferError
from kvtransfer.faults import FaultRule, Faults
from kvtransfer.messages import (
    CompatibilityRecord,
    KvEvents,
    KvSnapshot,
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
from workers.config import EngineConfig
from workers.engine.batch import PromptDone, StepOutcome
from workers.engine.blocks import BlockPool
from workers.engine.scheduler import Scheduler
from workers.errors import CapacityError, QueueFullError, RankDiedError
from workers.gateways import GatewayKey, Gateways
from workers.handover import Inbound, Outbound, RequestKey
from workers.links import FrameStream, LinkServer
from workers.messages import (
    LINK_DOWN_CODEC,
    Cancel,
    GatewayHello,
    HandOver,
    HandOverReport,
    HandOverTarget,
    Leaving,
    LoadReport,
    PrefillReport,
    RankReady,
    RankSpec,
    RankUp,
    ReplicaHello,
    RequestFailed,
    StepPlan,
    StepReport,
    Submission,
    TokenDelta,
)
from workers.peers import Peers
from workers.ranks import RankGroup, RankLauncher

_log = logging.getLogger("tandem.brain")

PIPELINE_DEPTH = 2
"""Plans that may be unreported: one runs while the next is on its way."""
TICK_S = 0.25
_CANARY = StepPlan(0, (), (), (), ())
"""An empty step: proves that idle ranks are alive."""


@dataclass(slots=True)
class _Request:
    gateway: GatewayKey
    samples: set[int]
    outbound: bool


@dataclass(slots=True)
class _Rates:
    """Moving averages from step reports (0: not yet known)."""

    prefill_tok_s: float = 0.0
    decode_step_s: float = 0.0

    def add(self, num_tokens: int, has_prefill: bool, seconds: float) -> None:
        if seconds <= 0 or num_tokens == 0:
            return
        if has_prefill:
            rate = num_tokens / seconds
            self.prefill_tok_s = rate if not self.prefill_tok_s else 0.8 * self.prefill_tok_s + 0.2 * rate
        else:
            self.decode_step_s = (
                seconds if not self.decode_step_s else 0.9 * self.decode_step_s + 0.1 * seconds
            )


@dataclass(slots=True)
class _Inflight:
    plan: StepPlan
    sent_at: float


class Brain:
    """One replica; see the module's drawing. Built plain, run by `start` and `stop` on one event loop."""

    def __init__(
        self,
        *,
        identity: ReplicaIdentity,
        pool: str,
        role: str,
        model_dir: str,
        dtype: str,
        device: str,
        engine: EngineConfig,
        transfer: TransferConfig,
        secret: bytes,
        launcher: RankLauncher,
        clock: Clock,
        host: str,
        faults: Sequence[FaultRule] = (),
    ) -> None:
        self.identity = identity
        self.pool_name = pool
        self.role = role
        self._engine = engine
        self._transfer = transfer
        self._secret = secret
        self._clock = clock
        self._host = host
        self._faults = Faults(faults)
        self._spec = RankSpec(
            replica=identity,
            rank=0,
            num_ranks=1,
            brain_address="",
            secret=secret,
            model_dir=model_dir,
            dtype=dtype,
            device=device,
            num_threads=engine.num_threads,
            block_tokens=engine.block_tokens,
            num_kv_tokens=engine.kv_tokens,
            max_batch_tokens=engine.max_batch_tokens,
            max_sequences=engine.max_sequences,
            data_host=transfer.data_host,
            transports=transfer.transports,
            faults=tuple(faults),
        )
        self._group = RankGroup(secret, launcher, self._on_rank_message, self._on_rank_died)
        self._server = LinkServer(secret, self._serve_gateway, self._serve_peer)
        self._gateways = Gateways(clock, self._load_report)
        self._requests: dict[RequestKey, _Request] = {}
        self._inflight: deque[_Inflight] = deque()
        self._rates = _Rates()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pump_scheduled = False
        self._leaving = False
        self._death = ""
        self._last_step_at = 0.0
        self._kv_sequence = 0
        self._load_sequence = 0
        self._num_steps = 0
        self.address = ""
        self.ready: RankReady

    # ------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Load and warm up the ranks, then listen. `RankDiedError` tells why they cannot serve."""
        (self.ready,) = await self._group.start([self._spec], self._host)
        ready = self.ready
        self.pool = BlockPool(ready.num_blocks, self._engine.block_tokens)
        self.scheduler = Scheduler(
            self._engine,
            self.pool,
            eos_token_ids=ready.eos_token_ids,
            max_context_tokens=ready.max_context_tokens,
            fingerprint=ready.compatibility.model_fingerprint,
        )
        self.outbound = Outbound(
            config=self._transfer,
            block_tokens=self._engine.block_tokens,
            scheduler=self.scheduler,
            clock=self._clock,
            order=self._group.send,
            on_failed=self._attempt_failed,
            on_ended=self._forget,
            kill_ranks=self._kill_ranks,
        )
        self.inbound = Inbound(
            config=self._transfer,
            block_tokens=self._engine.block_tokens,
            pool=self.pool,
            scheduler=self.scheduler,
            clock=self._clock,
            order=self._group.send,
            on_joined=self._joined,
        )
        self.peers = Peers(
            identity=self.identity,
            compatibility=ready.compatibility,
            ranks=(ready.endpoints,),
            config=self._transfer,
            secret=self._secret,
            order=self._group.send,
            on_inbound=self._on_inbound,
            on_outbound=self._on_outbound,
            on_ready=self._on_peer_ready,
            on_failed=self._on_peer_failed,
            on_writer_lost=self._on_writer_lost,
        )
        self.outbound.peers = self.inbound.peers = self.peers
        self._last_step_at = self._clock.now()
        port = await self._server.start(self._host)
        self.address = f"{self._host}:{port}"
        self._spawn(self._tick_forever(), "brain-tick")

    async def stop(self) -> None:
        """End everything at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.address:
            await self.peers.close()
        self._gateways.close()
        await self._server.stop()
        await self._group.stop()

    async def drain(self, drain_s: float) -> None:
        """Take no new work, and return when all that runs has finished or `drain_s` is over; what is left
        then fails over to other replicas, which resume it."""
        self._leaving = True
        self._gateways.broadcast(Leaving(drain_s))
        deadline = self._clock.now() + drain_s
        while self._requests and not self._death and self._clock.now() < deadline:
            await self._clock.sleep(TICK_S / 5)
        self._fail_all("the replica leaves")
        self._gateways.flush()

    def check_health(self) -> None:
        """Raise `RankDiedError` when a rank ended, or hangs in a step."""
        if self._death:
            raise RankDiedError(self._death)
        if self._inflight:
            waited_s = self._clock.now() - max(self._inflight[0].sent_at, self._last_step_at)
            if waited_s > self._engine.stall_s:
                self._on_rank_died(f"step {self._inflight[0].plan.step} has run for {waited_s:.1f} s")
                raise RankDiedError(self._death)

    def join_peers(self, targets: Sequence[HandOverTarget]) -> None:
        """Open and measure the paths to these decode replicas before they are needed."""
        for target in targets:
            if target.identity != self.identity:
                self.peers.ensure(target)

    @property
    def compatibility(self) -> CompatibilityRecord:
        return self.ready.compatibility

    @property
    def max_context_tokens(self) -> int:
        return self.ready.max_context_tokens

    @property
    def rank_process_ids(self) -> tuple[int, ...]:
        return (self.ready.process_id,)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    # ------------------------------------------------------------------------------------- gateways

    async def _serve_gateway(self, stream: FrameStream) -> None:
        frame = await stream.receive()
        hello = None if frame is None else LINK_DOWN_CODEC.decode(frame)
        if not isinstance(hello, GatewayHello):
            return
        key = hello.gateway_id, hello.epoch
        self._gateways.connected(key, stream)
        self._gateways.send(
            key,
            ReplicaHello(
                self.identity,
                self.pool_name,
                self.role,
                self.compatibility,
                self.max_context_tokens,
                self._load_report(),
            ),
        )
        try:
            while (frame := await stream.receive()) is not None:
                self._on_gateway_message(key, frame)
        except TransferError as error:
            _log.warning("gateway %s sent nonsense: %s", hello.gateway_id, error)
        finally:
            self._gateways.disconnected(key, stream)

    def _on_gateway_message(self, gateway: GatewayKey, frame: bytes) -> None:
        message = LINK_DOWN_CODEC.decode(frame)
        match message:
            case Submission():
                self._submit(gateway, message)
            case Cancel(request_id, attempt):
                self._cancel((request_id, attempt))
            case KvSnapshotRequest():
                self._publish_kv()
                self._gateways.send(
                    gateway, KvSnapshot(self.identity, self._kv_sequence, self.pool.snapshot())
                )
            case _:
                _log.warning("gateway %s introduced itself twice", gateway[0])

    def _submit(self, gateway: GatewayKey, submission: Submission) -> None:
        key = submission.request_id, submission.attempt
        refusal = ""
        if self._death or self._leaving:
            refusal = "refused"
            reason = self._death or "the replica leaves"
        elif max(memoryview(submission.prompt).cast("I"), default=0) >= self.ready.vocab_size:
            refusal, reason = "invalid", f"prompt: a token id is not below {self.ready.vocab_size}"
        else:
            try:
                self.scheduler.submit(submission, self._clock.now())
            except CapacityError as error:
                refusal, reason = "invalid", str(error)
            except QueueFullError as error:
                refusal, reason = "refused", str(error)
        if refusal:
            self._gateways.post(gateway, RequestFailed(*key, refusal, reason, retry_after_s=1.0))
            self._gateways.flush()
            return
        samples = {sample.index for sample in submission.samples}
        self._requests[key] = _Request(gateway, samples, outbound=submission.decode is not None)
        if submission.decode is not None:
            self.outbound.accept(submission, gateway)
        self._wake()

    def _cancel(self, key: RequestKey) -> None:
        self.inbound.cancel(key)
        request = self._requests.pop(key, None)
        if request is not None:
            self.scheduler.cancel(*key)
            self.outbound.cancel(key, "cancelled")
            self._wake()

    def _attempt_failed(self, failure: RequestFailed) -> None:
        request = self._requests.pop((failure.request_id, failure.attempt), None)
        if request is not None:
            self._gateways.post(request.gateway, failure)
            self._wake()

    def _forget(self, key: RequestKey) -> None:
        self._requests.pop(key, None)
        self._wake()

    # ------------------------------------------------------------------------------------------ peers

    async def _serve_peer(self, stream: FrameStream) -> None:
        try:
            await self.peers.serve(stream)
        except TransferError as error:
            _log.warning("peer %s sent nonsense: %s", stream.name, error)

    def _on_inbound(self, writer: ReplicaIdentity, message: object) -> None:
        self.inbound.message(writer, message)  # type: ignore[arg-type]
        self._wake()

    def _on_outbound(self, peer: ReplicaIdentity, message: object) -> None:
        self.outbound.message(peer, message)  # type: ignore[arg-type]
        self._wake()

    def _on_peer_ready(self, peer: ReplicaIdentity) -> None:
        self.outbound.peer_ready(peer)
        self._wake()

    def _on_peer_failed(self, peer: ReplicaIdentity, reason: str) -> None:
        self.outbound.peer_failed(peer, reason)
        self._wake()

    def _on_writer_lost(self, writer: ReplicaIdentity) -> None:
        self.inbound.writer_lost(writer)
        self._wake()

    def _joined(self, hand_over: HandOver, report: HandOverReport) -> None:
        submission = hand_over.submission
        key = submission.request_id, submission.attempt
        gateway = hand_over.gateway_id, hand_over.gateway_epoch
        samples = {sample.index for sample in submission.samples}
        self._requests[key] = _Request(gateway, samples, outbound=False)
        self._gateways.post(gateway, report)
        self._wake()

    # ------------------------------------------------------------------------------------------ engine

    def _on_rank_message(self, rank: int, message: RankUp) -> None:
        match message:
            case StepReport():
                self._on_step(message)
            case PushDone() | PushFailed() | PushStopped():
                self.outbound.report(message)
            case Verified() | LandingClosed() | WriterGone():
                self.inbound.report(message)
            case PeerConnected() | PeerConnectFailed() | PeerLost():
                self.peers.path_report(message)
            case _:
                _log.warning("rank %d sent %s", rank, type(message).__name__)
        self._wake()

    def _on_step(self, report: StepReport) -> None:
        plan = self._inflight.popleft().plan
        assert plan.step == report.step, f"report of step {report.step}, expected {plan.step}"
        self._last_step_at = self._clock.now()
        if not plan.entries:
            return
        self._num_steps += 1
        num_tokens = sum(entry.num_tokens for entry in plan.entries)
        has_prefill = any(entry.num_tokens > 1 for entry in plan.entries)
        self._rates.add(num_tokens, has_prefill, report.finished_at - report.started_at)
        self._settle(self.scheduler.settle(report, self._clock.now()))

    def _settle(self, outcome: StepOutcome) -> None:
        for prompt in outcome.prompts:
            self.outbound.prompt_done(prompt)
        for chunk in outcome.chunks:
            self.outbound.chunk_done(chunk)
        for prompt in outcome.prompts:
            self._report_prefill(prompt)
        for delta in outcome.tokens:
            self._post_delta(delta)
        for prompt in outcome.prompts:
            if prompt.all_finished:
                self.outbound.finished_here((prompt.request_id, prompt.attempt))
        for failure in outcome.failures:
            self._fail_locally(failure)

    def _report_prefill(self, prompt: PromptDone) -> None:
        key = prompt.request_id, prompt.attempt
        request = self._requests.get(key)
        if request is not None:
            report = PrefillReport(
                *key,
                len(prompt.submission.prompt) // 4,
                prompt.num_cached_tokens,
                prompt.times,
                self.outbound.trace(key),
            )
            self._gateways.post(request.gateway, report)

    def _post_delta(self, delta: TokenDelta) -> None:
        key = delta.request_id, delta.attempt
        request = self._requests.get(key)
        if request is None:
            return
        self._gateways.post(request.gateway, delta)
        if delta.finish:
            request.samples.discard(delta.sample)
            if not request.samples and not request.outbound:
                del self._requests[key]

    def _fail_locally(self, failure: RequestFailed) -> None:
        self.outbound.cancel((failure.request_id, failure.attempt), failure.reason)
        self._attempt_failed(failure)

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
            _log.exception("%s: the brain failed", self.identity.replica_id)
            self._on_rank_died(f"the brain failed: {error!r}")

    def _pump(self) -> None:
        if self._death:
            self._gateways.flush()
            return
        now = self._clock.now()
        self.inbound.grant()
        self.outbound.wanted([(wish.request_id, wish.attempt) for wish in self.scheduler.landings_wanted()])
        while len(self._inflight) < PIPELINE_DEPTH and (plan := self.scheduler.plan(now)) is not None:
            self._send_plan(plan, now)
        for failure in self.scheduler.take_failures():
            self._fail_locally(failure)
        self._publish_kv()
        self._gateways.flush()

    def _send_plan(self, plan: StepPlan, now: float) -> None:
        self._inflight.append(_Inflight(plan, now))
        self._group.send(plan)

    async def _tick_forever(self) -> None:
        while not self._death:
            await self._clock.sleep(TICK_S)
            now = self._clock.now()
            for gateway in self._gateways.expired():
                for key in [key for key, item in self._requests.items() if item.gateway == gateway]:
                    self._cancel(key)
            self.outbound.tick()
            self.inbound.tick()
            if not self._inflight and now > self._last_step_at + self._engine.canary_idle_s:
                self._send_plan(_CANARY, now)
            self._wake()

    # ---------------------------------------------------------------------------------------- reports

    def _publish_kv(self) -> None:
        stored, removed = self.pool.take_events()
        if stored or removed:
            self._kv_sequence += 1
            self._gateways.broadcast(KvEvents(self.identity, self._kv_sequence, stored, removed))

    def _load_report(self) -> LoadReport:
        self._load_sequence += 1
        scheduler, pool = self.scheduler, self.pool
        quiet = scheduler.is_idle and not self._requests and self.outbound.book.num_active == 0
        quiet = quiet and self.inbound.book.num_open == 0
        return LoadReport(
            identity=self.identity,
            sequence=self._load_sequence,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_landings=self.inbound.book.num_open + self.inbound.book.num_waiting,
            num_backlog_tokens=scheduler.num_backlog_tokens,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_quarantined_blocks=pool.num_quarantined,
            num_total_blocks=pool.num_total,
            num_leaked_blocks=pool.num_referenced if quiet else 0,
            prefill_tok_s=self._rates.prefill_tok_s,
            decode_step_s=self._rates.decode_step_s,
            num_steps=self._num_steps,
            num_checksum_failures=self.inbound.num_checksum_failures,
            num_preemptions=scheduler.num_preemptions,
            transfer_gb_s=self.outbound.book.counters.gb_s,
            paths=self.peers.paths(),
        )

    # ------------------------------------------------------------------------------------------ death

    def _kill_ranks(self, reason: str) -> None:
        _log.error("%s: ranks are killed: %s", self.identity.replica_id, reason)
        self._group.kill()

    def _on_rank_died(self, reason: str) -> None:
        if self._death:
            return
        self._death = reason
        _log.error("%s: %s", self.identity.replica_id, reason)
        self._group.kill()
        self._fail_all(reason)
        self._gateways.flush()
        if self.address:
            self._spawn(self.peers.close(), "brain-death")

    def _fail_all(self, reason: str) -> None:
        for key, request in list(self._requests.items()):
            self._gateways.post(request.gateway, RequestFailed(*key, "internal", reason))
        self._requests.clear()

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
