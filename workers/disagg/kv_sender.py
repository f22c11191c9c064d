"""The prefill side of hand-overs: prompts that are computed here and continue at a decode replica. Streams
that move while they decode go the same way; what happens to these is told to `workers.disagg.migration`.

Joins the sans-I/O `kvtransfer.protocol.sender.SendTable` to the scheduler, the Peer links and the ranks. Nothing here
blocks; everything runs on the engine core's loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.config import TransferConfig
from kvtransfer.messages import (
    LandingAbort,
    LandingGrant,
    LandingRefusal,
    LandingRequest,
    LandingResult,
    PushDone,
    PushFailed,
    PushStopped,
    ReplicaIdentity,
    TransferOrder,
)
from kvtransfer.protocol.actions import Granted, HandOverReady, PushAction, Pushed, PushEnded, ToPeer, ToRanks
from kvtransfer.protocol.sender import SendTable
from kvtransfer.rpc.handshake import draw_id
from workers.disagg.peers import Peers
from workers.messages import (
    HandOver,
    PeerLinkMessage,
    RequestFailed,
    SampleState,
    Submission,
)
from workers.replica.gateway_links import GatewayKey
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.step import ChunkDone, LandingNeed, PromptDone

if TYPE_CHECKING:
    from workers.disagg.migration import MigrationManager

_log = logging.getLogger("tandem.handover")

# (request id, attempt).
RequestKey = tuple[str, int]


@dataclass(slots=True)
class _Outgoing:
    submission: Submission
    gateway: GatewayKey
    arrived_at: float
    # A landing that is to be asked for as soon as there is a path.
    need: LandingNeed | None = None
    all_finished: bool = False
    samples: tuple[SampleState, ...] = ()
    trace: list[tuple[str, float]] = field(default_factory=list)


class KvSender:
    """Prompts computed here whose sequences continue elsewhere.

    `on_failed(failure)` tells the gateway that the attempt is over; `on_ended(key)` that the request needs
    nothing of this replica any more; `kill_ranks(reason)` ends ranks that ignore a stop.
    """

    def __init__(
        self,
        *,
        config: TransferConfig,
        block_tokens: int,
        scheduler: Scheduler,
        clock: Clock,
        num_ranks: int,
        order: Callable[[TransferOrder], None],
        on_failed: Callable[[RequestFailed], None],
        on_ended: Callable[[RequestKey], None],
        kill_ranks: Callable[[str], None],
        faults: Faults,
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._order = order
        self._on_failed = on_failed
        self._on_ended = on_ended
        self._kill_ranks = kill_ranks
        self._faults = faults
        self._outgoing: dict[RequestKey, _Outgoing] = {}
        self.book = SendTable(config, block_tokens, num_ranks)
        self.peers: Peers
        self.moving: MigrationManager

    # -------------------------------------------------------------------------------------- engine

    def accept(self, submission: Submission, gateway: GatewayKey) -> None:
        """A submission with a decode target was queued."""
        assert submission.decode is not None
        self._outgoing[submission.request_id, submission.attempt] = _Outgoing(
            submission, gateway, self._clock.now()
        )
        self.peers.ensure(submission.decode)

    def wanted(self, needs: Iterable[LandingNeed]) -> None:
        """These prompts are near the head of the queue: ask for their landings, when the path is ready."""
        for need in needs:
            outgoing = self._outgoing.get((need.request_id, need.attempt))
            if outgoing is not None:  # an earlier need may have found that there is no way to their peer
                outgoing.need = need
                self._ask(outgoing, need)

    def chunk_done(self, chunk: ChunkDone) -> None:
        """A chunk is in the pool: push it while the next one is computed."""
        outgoing = self._outgoing.get((chunk.request_id, chunk.attempt))
        if outgoing is None:
            return
        outgoing.trace.append(("chunk.start", chunk.started_at))
        outgoing.trace.append(("chunk.end", chunk.finished_at))
        if not outgoing.all_finished:
            now = self._clock.now()
            key = chunk.request_id, chunk.attempt
            self._do(self.book.computed(*key, chunk.num_computed_tokens, chunk.block_ids, now))

    def prompt_done(self, prompt: PromptDone) -> None:
        """The prompt is complete: keep what will be handed over. Comes before the prompt's last chunk, which
        is not pushed when nothing is left to hand over."""
        outgoing = self._outgoing.get((prompt.request_id, prompt.attempt))
        if outgoing is not None:
            outgoing.samples = prompt.samples
            outgoing.all_finished = prompt.all_finished

    def finished_here(self, key: RequestKey) -> None:
        """Every sample ended with its first token: the landing is given back."""
        if key in self._outgoing:
            self._end(key)
            self._do(self.book.stop(*key, "finished at the prefill side", self._clock.now()))

    def trace(self, key: RequestKey) -> tuple[tuple[str, float], ...]:
        outgoing = self._outgoing.get(key)
        return () if outgoing is None else tuple(outgoing.trace)

    def cancel(self, key: RequestKey, reason: str) -> None:
        """Stop pushing for this request; the scheduler has dropped it already."""
        if self._outgoing.pop(key, None) is not None or self.moving.forget(key):
            self.stop(key, reason)

    # ------------------------------------------------------------------------------ streams that move

    def ask(self, request: LandingRequest, peer: ReplicaIdentity, connection_id: bytes) -> None:
        """For a place for one of them."""
        self._do(self.book.ask(request, peer, connection_id))

    def computed(self, key: RequestKey, num_tokens: int, block_ids: tuple[int, ...]) -> None:
        """KV of so many of its tokens is in the pool: push what is whole and not yet pushed."""
        self._do(self.book.computed(*key, num_tokens, block_ids, self._clock.now()))

    def has_caught_up(self, key: RequestKey) -> bool:
        """Whether all of it that could be pushed is."""
        return self.book.has_caught_up(*key)

    def end_at(self, key: RequestKey, num_tokens: int) -> None:
        """So many tokens are handed over, with the last of them."""
        self.book.end_at(*key, num_tokens)

    def keep_private(self, tenant: str | None) -> None:
        """Prompts of this tenant (None: all) that are on their way leave nothing where they land."""
        for outgoing in self._outgoing.values():
            if tenant is None or outgoing.submission.tenant == tenant:
                outgoing.submission = replace(outgoing.submission, is_private=True)

    def stop(self, key: RequestKey, reason: str) -> None:
        """Give its landing back."""
        self._do(self.book.stop(*key, reason, self._clock.now()))

    # ---------------------------------------------------------------------------------- peers, ranks

    def peer_ready(self, peer: ReplicaIdentity) -> None:
        """The path to `peer` is measured: ask for what waited for it."""
        for outgoing in list(self._outgoing.values()):
            target = outgoing.submission.decode
            if outgoing.need is not None and target is not None and target.identity == peer:
                self._ask(outgoing, outgoing.need)

    def peer_failed(self, peer: ReplicaIdentity, reason: str) -> None:
        """No way to `peer`: its requests must be routed again."""
        self.moving.peer_lost(peer, reason)
        self._do(self.book.peer_lost(peer, self._clock.now()))
        for key, outgoing in list(self._outgoing.items()):
            target = outgoing.submission.decode
            if target is not None and target.identity == peer:
                self._fail(key, "peer", reason, 0.0)

    def message(self, peer: ReplicaIdentity, message: PeerLinkMessage) -> None:
        """From a decode replica."""
        match message:
            case LandingGrant():
                self._do(self.book.granted(peer, message, self._clock.now()))
            case LandingRefusal():
                self._do(self.book.refused(peer, message))
            case LandingAbort():
                self._do(self.book.aborted(peer, message, self._clock.now()))
            case LandingResult(landing_id, num_tokens, num_bad_pieces):
                if num_bad_pieces:
                    name, about = peer.replica_id, {"request_id": self.book.request_of(landing_id)}
                    what = "%s: %d pieces were bad, %d tokens good"
                    _log.error(what, name, num_bad_pieces, num_tokens, extra=about)
                self._do(self.book.joined(peer, message, self._clock.now()))
            case _:
                _log.warning("%s sent %s to its writer", peer.replica_id, type(message).__name__)

    def report(self, rank: int, report: PushDone | PushFailed | PushStopped) -> None:
        """From a rank."""
        match report:
            case PushDone():
                self._do(self.book.push_done(rank, report, self._clock.now()))
            case PushFailed():
                self._do(self.book.push_failed(rank, report, self._clock.now()))
            case PushStopped():
                self._do(self.book.push_stopped(rank, report))

    def tick(self) -> None:
        """Heartbeats and overdue acknowledgements."""
        self._do(self.book.tick(self._clock.now()))

    # ---------------------------------------------------------------------------------------- private

    def _ask(self, outgoing: _Outgoing, need: LandingNeed) -> None:
        submission = outgoing.submission
        target = submission.decode
        assert target is not None
        connection_id = self.peers.connection(target.identity)
        if connection_id is None:
            self.peers.ensure(target)
            return
        outgoing.need = None
        request = LandingRequest(
            landing_id=draw_id(),
            request_id=submission.request_id,
            attempt=submission.attempt,
            tenant=submission.tenant,
            priority=submission.priority,
            block_keys=submission.block_keys,
            num_tokens=need.num_tokens,
            num_samples=len(submission.samples),
            deadline_s=self._remaining_s(outgoing),
        )
        self._do(self.book.ask(request, target.identity, connection_id))

    def _do(self, actions: list[PushAction]) -> None:
        for action in actions:
            match action:
                case ToPeer(peer, message):
                    self.peers.send_outbound(peer, message)
                case ToRanks(order):
                    self._order(order)
                case Granted(request_id, attempt):
                    if (request_id, attempt) in self.moving:
                        self.moving.granted((request_id, attempt))
                    else:
                        self._scheduler.grant_landing(request_id, attempt)
                case Pushed():
                    self._trace_push(action)
                case HandOverReady():
                    self._hand_over(action)
                case PushEnded(request_id, attempt, error, reason, retry_after_s):
                    if (request_id, attempt) in self.moving:
                        self.moving.ended(action)
                    elif error:
                        self._fail((request_id, attempt), error, reason, retry_after_s)
                    else:
                        self._end((request_id, attempt))
                case _:
                    self._kill_ranks(action.reason)

    def _hand_over(self, ready: HandOverReady) -> None:
        self._faults.at("engine_core.hand_over")
        if (ready.request_id, ready.attempt) in self.moving:
            self.peers.send_outbound(ready.peer, self.moving.hand_over(ready))
            return
        outgoing = self._outgoing[ready.request_id, ready.attempt]
        state = replace(
            outgoing.submission, samples=outgoing.samples, decode=None, deadline_s=self._remaining_s(outgoing)
        )
        self.peers.send_outbound(
            ready.peer,
            HandOver(
                ready.landing_id,
                state,
                *outgoing.gateway,
                ready.num_moved_bytes,
                ready.transport,
                ready.push_started_at,
                ready.push_seconds,
            ),
        )

    def _trace_push(self, pushed: Pushed) -> None:
        if (pushed.request_id, pushed.attempt) in self.moving:
            self.moving.pushed((pushed.request_id, pushed.attempt))
            return
        outgoing = self._outgoing[pushed.request_id, pushed.attempt]
        outgoing.trace.append(("push.start", pushed.started_at))
        outgoing.trace.append(("push.end", pushed.started_at + pushed.seconds))

    def _remaining_s(self, outgoing: _Outgoing) -> float | None:
        deadline_s = outgoing.submission.deadline_s
        if deadline_s is None:
            return None
        return max(0.0, outgoing.arrived_at + deadline_s - self._clock.now())

    def _fail(self, key: RequestKey, code: str, reason: str, retry_after_s: float) -> None:
        outgoing = self._outgoing.pop(key, None)
        if outgoing is None:
            return
        self._scheduler.cancel(*key)
        target = outgoing.submission.decode
        refused_by = target.identity.replica_id if code == "refused" and target is not None else ""
        self._on_failed(RequestFailed(*key, code, reason, retry_after_s, refused_by))

    def _end(self, key: RequestKey) -> None:
        if self._outgoing.pop(key, None) is not None:
            self._scheduler.finish_hand_over(*key)
            self._on_ended(key)
