"""Writes KV to other replicas: prompts that are computed here and decoded there, and streams that migrate.

`KvSender` owns every push. It joins the sans-I/O `kvtransfer.protocol.sender.SendTable` to the peer links and
the ranks, and calls the request's `Push` for what follows: a `PromptPush` below, or a
`workers.disagg.migration.Migration`. Nothing here blocks; everything runs on the engine core's event loop.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable

from kvtransfer.common.clock import Clock
from kvtransfer.common.faults import Faults
from kvtransfer.messages import BlockSpan, ReplicaIdentity
from kvtransfer.peer_messages import LandingAbort, LandingGrant, LandingRefusal, LandingRequest, LandingResult
from kvtransfer.protocol.actions import (
    Granted,
    HandOverReady,
    KillRanks,
    PushAction,
    Pushed,
    PushEnded,
    ToPeer,
    ToRanks,
)
from kvtransfer.protocol.sender import SendTable
from kvtransfer.transfer_reports import PushDone, PushFailed, PushStopped
from workers.disagg.request_table import ActiveRequest, Push, RequestTable
from workers.interfaces import EngineControl, PeerLinks, RankChannel
from workers.messages.link import HandOverTarget, RequestFailed, RequestKey, Submission
from workers.messages.peer_link import HandOver, PeerLinkMessage
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.step import ChunkDone, LandingNeed, PromptDone

_log = logging.getLogger("tandem.handover")


class KvSender:
    """Owns all pushes of one replica; see the module's text."""

    def __init__(
        self,
        *,
        sends: SendTable,
        scheduler: Scheduler,
        requests: RequestTable,
        peers: PeerLinks,
        ranks: RankChannel,
        control: EngineControl,
        clock: Clock,
        faults: Faults,
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._peers = peers
        self._ranks = ranks
        self._control = control
        self._clock = clock
        self._faults = faults
        self.sends = sends

    # ------------------------------------------------------------------------------------ prompts

    def accept(self, record: ActiveRequest, target: HandOverTarget) -> None:
        """Prepare the hand-over of a prompt that was queued: open the path to its decode replica."""
        record.push = PromptPush(record, target, self, self._scheduler, self._requests)
        self._peers.ensure(target, self)

    def ask_for_landings(self, needs: Iterable[LandingNeed]) -> None:
        """Ask for the landings of prompts that are near the head of the queue, once there is a path."""
        for need in needs:
            record = self._requests.get((need.request_id, need.attempt))
            # An earlier need may have found that there is no way to their peer.
            if record is not None and isinstance(record.push, PromptPush):
                record.push.need = need
                record.push.peer_ready()

    def prompt_done(self, prompt: PromptDone) -> None:
        """Take in that the prompt is complete; called before `chunk_done` of its last chunk, which is not
        pushed when nothing is left to hand over."""
        record = self._requests.get((prompt.request_id, prompt.attempt))
        if record is not None and isinstance(record.push, PromptPush):
            record.push.is_over = prompt.all_finished

    def note_chunk(self, chunk: ChunkDone) -> None:
        """Note a chunk that is computed in the trace of its request."""
        record = self._requests.get((chunk.request_id, chunk.attempt))
        if record is not None:
            record.trace.append(("chunk.start", chunk.started_at))
            record.trace.append(("chunk.end", chunk.finished_at))

    def chunk_done(self, chunk: ChunkDone) -> None:
        """Push a chunk that is in the pool while the next one is computed."""
        record = self._requests.get((chunk.request_id, chunk.attempt))
        if record is None:
            return
        if isinstance(record.push, PromptPush) and not record.push.is_over:
            self.computed(record.key, chunk.num_computed_tokens, chunk.block_ids, chunk.windows)

    # ---------------------------------------------------------------------------------- any push

    def now(self) -> float:
        """Return the time on the clock of this replica's reports."""
        return self._clock.now()

    def has_path(self, target: HandOverTarget) -> bool:
        """Return whether a landing can be asked for now; if not, begin to open the path."""
        if self._peers.connection(target.identity) is not None:
            return True
        self._peers.ensure(target, self)
        return False

    def ask(
        self,
        target: HandOverTarget,
        submission: Submission,
        num_tokens: int,
        block_keys: tuple[bytes, ...],
        deadline: float | None,
        *,
        is_growing: bool = False,
    ) -> None:
        """Ask `target` for a landing of `num_tokens` until `deadline` (None: without limit); there is a path
        to it. `is_growing`: the sequence decodes at the same time and may end with fewer."""
        connection_id = self._peers.connection(target.identity)
        assert connection_id is not None
        request = LandingRequest(
            landing_id=secrets.token_bytes(16),
            request_id=submission.request_id,
            attempt=submission.attempt,
            sharing_group=submission.facts.sharing_group,
            priority=submission.facts.priority,
            block_keys=block_keys,
            num_tokens=num_tokens,
            num_samples=len(submission.samples),
            deadline_s=None if deadline is None else max(0.0, deadline - self._clock.now()),
            is_growing=is_growing,
            standing=submission.facts,
        )
        self._do(self.sends.ask(request, target.identity, connection_id))

    def computed(
        self,
        key: RequestKey,
        num_tokens: int,
        block_ids: tuple[int, ...],
        windows: tuple[BlockSpan, ...] = (),
    ) -> None:
        """Push the whole blocks of the first `num_tokens` tokens that are not yet pushed; `windows` are those
        that the sequence has in each group of layers behind the first."""
        self._do(self.sends.computed(*key, num_tokens, block_ids, self._clock.now(), windows))

    def stop(self, key: RequestKey, reason: str) -> None:
        """Stop pushing for this request, and give its landing back."""
        self._do(self.sends.stop(*key, reason, self._clock.now()))

    def cancel(self, record: ActiveRequest, reason: str) -> None:
        """End the push of a request that is over here."""
        if record.push is not None:
            record.push = None
            self.stop(record.key, reason)

    # ----------------------------------------------------------------------------- peers, ranks

    def peer_ready(self, peer: ReplicaIdentity) -> None:
        """Ask for the landings that waited for the path to `peer`, which is measured now."""
        for _, push in self._requests.pushing_to(peer):
            push.peer_ready()

    def peer_failed(self, peer: ReplicaIdentity, reason: str) -> None:
        """End the pushes to `peer`: there is no way to it."""
        for _, push in self._requests.pushing_to(peer):
            push.peer_failed(reason)
        self._do(self.sends.peer_lost(peer, self._clock.now()))

    def message(self, peer: ReplicaIdentity, message: PeerLinkMessage) -> None:
        """Take a message from a decode replica."""
        match message:
            case LandingGrant():
                self._do(self.sends.granted(peer, message, self._clock.now()))
            case LandingRefusal():
                self._do(self.sends.refused(peer, message))
            case LandingAbort():
                self._do(self.sends.aborted(peer, message, self._clock.now()))
            case LandingResult(landing_id, num_tokens, num_bad_pieces):
                if num_bad_pieces:
                    name, about = peer.replica_id, {"request_id": self.sends.request_of(landing_id)}
                    what = "%s: %d pieces were bad, %d tokens good"
                    _log.error(what, name, num_bad_pieces, num_tokens, extra=about)
                self._do(self.sends.joined(peer, message, self._clock.now()))
            case _:
                _log.warning("%s sent %s to its writer", peer.replica_id, type(message).__name__)

    def report(self, rank: int, report: PushDone | PushFailed | PushStopped) -> None:
        """Take a report of a rank."""
        match report:
            case PushDone():
                self._do(self.sends.push_done(rank, report, self._clock.now()))
            case PushFailed():
                self._do(self.sends.push_failed(rank, report, self._clock.now()))
            case PushStopped():
                self._do(self.sends.push_stopped(rank, report))

    def tick(self) -> None:
        """Send heartbeats, and notice overdue acknowledgements."""
        self._do(self.sends.tick(self._clock.now()))

    # ---------------------------------------------------------------------------------- private

    def _do(self, actions: list[PushAction]) -> None:
        for action in actions:
            match action:
                case ToPeer(peer, message):
                    self._peers.send_to_reader(peer, message)
                case ToRanks(order):
                    self._ranks.send(order)
                case KillRanks(reason):
                    self._control.kill_ranks(reason)
                case _:
                    record = self._requests.get((action.request_id, action.attempt))
                    if record is not None and record.push is not None:
                        self._advance(record, record.push, action)

    def _advance(
        self, record: ActiveRequest, push: Push, action: Granted | Pushed | HandOverReady | PushEnded
    ) -> None:
        match action:
            case Granted():
                push.granted()
            case Pushed():
                push.pushed(action)
            case HandOverReady():
                self._faults.at("engine_core.hand_over")
                push.handed_over()
                self._hand_over(record, action)
            case PushEnded():
                push.ended(action)

    def _hand_over(self, record: ActiveRequest, ready: HandOverReady) -> None:
        self._peers.send_to_reader(
            ready.peer,
            HandOver(
                ready.landing_id,
                self._scheduler.held_state(record.key, self._clock.now()),
                *record.gateway,
                ready.num_moved_bytes,
                ready.transport,
                ready.push_started_at,
                ready.push_seconds,
            ),
        )


class PromptPush:
    """The hand-over of one prompt, which is computed here and decoded at `target`."""

    def __init__(
        self,
        record: ActiveRequest,
        target: HandOverTarget,
        sender: KvSender,
        scheduler: Scheduler,
        requests: RequestTable,
    ) -> None:
        self.target = target
        # A landing that is to be asked for as soon as there is a path.
        self.need: LandingNeed | None = None
        # Every sample ended with its first token: nothing is handed over.
        self.is_over = False
        self._record = record
        self._sender = sender
        self._scheduler = scheduler
        self._requests = requests

    def peer_ready(self) -> None:
        """Ask for the landing, if it is needed by now."""
        need = self.need
        if need is not None and self._sender.has_path(self.target):
            self.need = None
            submission = need.submission
            is_scored = submission.sampling.num_prompt_logprobs is not None  # it takes nothing from caches
            keys = () if is_scored else submission.block_keys
            self._record.trace.append(("landing.asked", self._sender.now()))
            self._sender.ask(self.target, submission, need.num_tokens, keys, need.deadline)

    def peer_failed(self, reason: str) -> None:
        """Fail the request, which must be routed again."""
        self._fail("peer", reason)

    def granted(self) -> None:
        """Admit the prompt: its KV has a place to go."""
        self._record.trace.append(("landing.granted", self._sender.now()))
        self._scheduler.grant_landing(*self._record.key)

    def pushed(self, pushed: Pushed) -> None:
        """Note the push in the request's trace."""
        self._record.trace.append(("push.start", pushed.started_at))
        self._record.trace.append(("push.end", pushed.started_at + pushed.seconds))

    def handed_over(self) -> None:
        """Change nothing until the target has joined."""

    def ended(self, ended: PushEnded) -> None:
        """Release the prompt's blocks; the request continues at the target, or has failed."""
        if ended.error:
            self._fail(ended.error, ended.reason, ended.retry_after_s)
        else:
            self._record.push = None
            self._scheduler.finish_hand_over(*self._record.key)
            self._requests.remove(self._record.key)

    def _fail(self, code: str, reason: str, retry_after_s: float = 0.0) -> None:
        self._record.push = None
        self._scheduler.cancel(*self._record.key)
        refused_by = self.target.identity.replica_id if code == "refused" else ""
        self._requests.fail(RequestFailed(*self._record.key, code, reason, retry_after_s, refused_by))
