"""The state machine of one request, without I/O: attempts, retries, migration and the output of its samples.

`cluster.gateway.request_task` reports events, with their time, and carries out the effects. The file is
over 600 lines because all transitions of one machine stand in one place.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import Enum, auto

from cluster.errors import DeadlineError, OverloadedError, RequestError, UnavailableError
from cluster.gateway.request_effects import RequestEffects
from cluster.gateway.retry_policy import RetryPolicy, backoff, refusal_of
from cluster.gateway.sample_output import EmbeddingDelta, Output, PromptProgress, SampleOutput
from cluster.gateway.stream_migration import NO_TARGET_PAUSE_S, OVERDUE_S, RETRY_PAUSE_S, StreamMigration
from cluster.gateway.submissions import by_submission, route_request, submission
from cluster.gateway.suspicion import Suspicion
from cluster.metrics.ended_request import RoutedAttempt, Summary, TimelineEntry
from cluster.text.preprocess import PreparedRequest
from cluster.text.sample_text import SampleText
from kvtransfer.blocks.keys import TOKEN_BYTES
from kvtransfer.common.health import spread_s
from kvtransfer.common.weak_calls import weakly
from kvtransfer.messages import ReplicaIdentity
from router.messages import Decision, RouteRequest
from workers.messages.link import (
    Cancel,
    HandOverReport,
    HandOverTarget,
    IsolationReport,
    MoveEnded,
    PrefillReport,
    PromptEmbedding,
    PromptLogprobs,
    RequestFailed,
    StallReport,
    TokenDelta,
)

# How often replicas may send a request back before one has to take it, whatever waits there. After a return
# the gateway knows more than before, so that two are seldom needed, and hardly ever as many as this.
MOST_RETURNS = 4
_MAX_EARLY_DELTAS = 4096
_MAX_TIMELINE = 200
_FLOAT_BYTES = 4
_UNREADABLE = "sent a stream that cannot be read"


class RequestPhase(Enum):
    """See `RequestState`."""

    NEW = auto()
    ROUTING = auto()
    RUNNING = auto()
    ENDED = auto()


class RequestState:
    """One request from acceptance to its one terminal effect (`finish` or `fail`).

              start            on_routed             every sample finished
        NEW --------> ROUTING ----------> RUNNING --------------------------> ENDED (finish)
                       |  ^                  |
            no route:  |  | replica lost or stopped; failed: refused, peer, internal, leaving
            wait, then |  | (attempt + 1, only what is missing)
            route again+--+------------------+
        NEW, ROUTING, RUNNING -- cancel, deadline, invalid, poison, attempts or patience used up
                                                                                     --> ENDED (fail)

    An attempt is one placement by the router. Its first tokens come from the prefill replica, the others
    from the decode replica, on two connections, so that deltas may arrive early; `SampleOutput` keeps them.
    Deltas of another attempt, and indices that are there already, are dropped. A failed attempt is cancelled
    where it ran, and its unfinished samples are submitted again with the output they have: samples without
    any output together, each other one by itself. Replicas know a submission by its number alone (the field
    `attempt` of the wire), so that each has its own; those of the running attempt are `_numbers`.

    Attempts that end because a replica leaves or breaks do not count. After the second one that may have
    broken because of the request (`Suspicion`), the request is not placed again.

    Within an attempt the decode side moves away from a replica that leaves (`StreamMigration`); several
    samples stay together and do not move.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        texts: Sequence[SampleText],
        effects: RequestEffects,
        now: float,
        due_at: float | None = None,
    ) -> None:
        """At `due_at` the request has waited for the time that its class may (None: as replicas have it)."""
        assert len(texts) == len(prepared.samples)
        self.prepared = prepared
        self.phase = RequestPhase.NEW
        self.attempt = 0
        self.decisions: list[RoutedAttempt] = []
        self.timeline: list[TimelineEntry] = []
        self.started_at = now
        self._due_at = due_at
        # 0 before the first token that this call brought.
        self.first_token_at = 0.0
        self._effects = effects
        self._samples = {
            start.index: SampleOutput(start, text)
            for start, text in zip(prepared.samples, texts, strict=True)
        }
        self._prompt = PromptProgress(prepared)
        self._prefill: ReplicaIdentity | None = None
        self._computed_at: ReplicaIdentity | None = None
        self._prefill_report: PrefillReport | None = None
        self._hand_over_report: HandOverReport | None = None
        self._numbers = range(0)
        self._num_hand_overs = 0
        self._retries = RetryPolicy()
        self._migration = StreamMigration(prepared.request_id, weakly(self._note))
        self._suspicion = Suspicion(prepared.max_attempts)
        # Attempts that ended because a replica leaves or breaks.
        self._num_uncounted = 0
        self._no_route_since: float | None = None
        self._last_failure = ""
        self._was_refused = False
        # How often it was sent back, by replicas with more to do than was known here.
        self._num_returns = 0

    @property
    def num_output_tokens(self) -> int:
        """The output tokens of all samples, including those that a resumed request came with."""
        return sum(sample.num_tokens for sample in self._samples.values())

    def is_current(self, number: int) -> bool:
        """Whether the submission of this number belongs to the running attempt."""
        return self.phase is RequestPhase.RUNNING and number in self._numbers

    def is_at(self, replica: ReplicaIdentity) -> bool:
        """Whether the running attempt has to do with this replica."""
        migration = self._migration
        is_member = replica in (self._prefill, migration.decode, migration.target)
        return self.phase is RequestPhase.RUNNING and (is_member or migration.is_former(replica))

    def summary(self, now: float) -> Summary:
        """Summarize the request, or as much of it as has happened."""
        return Summary(
            samples=tuple(it.result for it in self._samples.values()),
            num_prompt_tokens=self.prepared.num_prompt_tokens,
            num_attempts=self.attempt,
            started_at=self.started_at,
            first_token_at=self.first_token_at,
            finished_at=now,
            prefill_replica=self._computed_at.replica_id if self._computed_at else "",
            decode_replica=self._migration.decode.replica_id if self._migration.decode else "",
            prefill=self._prefill_report,
            hand_over=self._hand_over_report,
            num_moves=self._migration.num_moves,
            capped_max_tokens=self.prepared.capped_max_tokens,
            num_resumed_tokens=self.prepared.num_resumed_tokens,
            num_returns=self._num_returns,
        )

    # ------------------------------------------------------------------------------ start and routing

    def start(self, now: float) -> None:
        """Find a place for the accepted request, or finish a resumed one that misses nothing."""
        assert self.phase is RequestPhase.NEW
        self._note(now, "accepted", f"{self.prepared.num_prompt_tokens} prompt tokens")
        self.phase = RequestPhase.ROUTING
        if not self._unfinished():
            self._finish(now)
        else:
            self._effects.route(self._route_request(), 0.0)

    def on_routed(
        self, decision: Decision, prefill: ReplicaIdentity | None, decode: HandOverTarget, now: float
    ) -> None:
        """Begin an attempt where the router placed it. `prefill` None: the decode replica prefills itself."""
        if self.phase is not RequestPhase.ROUTING:
            self._effects.release_placement()
            return
        self.attempt += 1
        self.phase = RequestPhase.RUNNING
        self.decisions.append(RoutedAttempt(self.attempt, decision))
        self._prefill = prefill
        replica = self._computed_at = prefill or decode.identity
        self._no_route_since = None
        self._retries.routed()
        self._num_hand_overs = 0
        self._prefill_report = self._hand_over_report = None
        place = f"{prefill.replica_id} -> " if prefill else ""
        self._note(now, "routed", f"attempt {self.attempt}: {place}{decode.identity.replica_id}")
        groups = by_submission(self._unfinished())
        first = max(1, self._numbers.stop)
        self._numbers = range(first, first + len(groups))
        self._migration.reset(decode.identity, first, can_move=[len(group) for group in groups] == [1])
        target = decode if prefill is not None else None
        suspect, is_scored = self._suspicion.is_suspect, self._prompt.is_whole
        self._suspicion.routed(self._numbers)
        is_first = self.attempt == 1 + self._num_returns
        may_return = is_first and self._num_returns < MOST_RETURNS and len(groups) == 1
        submissions = [
            submission(
                self.prepared,
                group,
                number,
                target,
                now,
                suspect=suspect,
                is_scored=is_scored,
                most_backlog_tokens=decision.most_backlog_tokens if may_return else None,
                due_at=self._due_at,
            )
            for group, number in zip(groups, self._numbers, strict=True)
        ]
        for made in submissions:
            self._effects.submit(replica, made)

    def on_placed(self) -> None:
        """Note that there is a place again for a request that was never sent, and now waits for its turn."""
        self._no_route_since = None

    def on_no_route(self, reason: str, retry_after_s: float, now: float) -> None:
        """Ask the router again after a pause, without exclusions (but of one side of a broken path instead
        of the other), while patience lasts."""
        if self.phase is not RequestPhase.ROUTING:
            return
        if self._no_route_since is None:
            self._no_route_since = now
            self._note(now, "no route", reason)
        patience_s = self.prepared.patience_s if self.attempt else self.prepared.first_patience_s
        if now - self._no_route_since < patience_s:
            delay_s = self._retries.relent()
            self._effects.route(self._route_request(), delay_s, needs_capacity=self._was_refused)
        elif self._was_refused:
            self._fail(OverloadedError(self._last_failure, self._spread(retry_after_s)), now)
        else:
            why = f"{reason} (after: {self._last_failure})" if self._last_failure else reason
            self._fail(UnavailableError(why, retry_after_s), now)

    # ------------------------------------------------------------------------------------- progress

    def on_prefilled(self, report: PrefillReport, now: float) -> None:
        """Record that the prompt is computed; its first token comes with this."""
        if not self.is_current(report.attempt):
            return
        if self._prefill_report is None:
            self._prefill_report = report
        loaded = "".join(f", {num} of them from {tier}" for tier, num in report.num_loaded_tokens.items())
        self._note(now, "prefilled", f"{report.num_cached_tokens} tokens cached{loaded}")
        seeks = self._prefill is None and self._migration.decodes()
        self._effects.confirm_placement(report.steps_s)
        if seeks:
            self._effects.schedule_move(0.0)

    def on_handed_over(self, source: ReplicaIdentity, report: HandOverReport, now: float) -> None:
        """Record that a decode replica has the sequence: the one before is no longer needed."""
        if not self.is_current(report.attempt):
            return
        if source == self._migration.target:
            self._moved(report.first_index, now)
            return
        if self._migration.num_moves:
            return  # the source of the migration has reported it already
        if self._hand_over_report is None:
            self._hand_over_report = report
        self._num_hand_overs += 1
        what = f"{report.num_moved_bytes} bytes by {report.transport or 'nothing'}"
        self._note(now, "handed over", f"{what}, {report.num_held_tokens} tokens held")
        if self._migration.decodes():
            self._effects.schedule_move(0.0)

    def on_prompt_logprobs(self, source: ReplicaIdentity, part: PromptLogprobs, now: float) -> None:
        """Take log-probabilities of the prompt, some of which another attempt may have brought."""
        if not self.is_current(part.attempt):
            return
        if not self._prompt.is_readable(part):
            self._retry(f"{source.replica_id} {_UNREADABLE}", [source], now)
        elif (new := self._prompt.take(part)) is not None:
            self._effects.emit(new)

    def on_embedding(self, source: ReplicaIdentity, embedding: PromptEmbedding, now: float) -> None:
        """Take the embedding of the prompt, which is the end."""
        if not self.is_current(embedding.attempt):
            return
        if (
            self.prepared.facts.pooling is None
            or not embedding.vector
            or len(embedding.vector) % _FLOAT_BYTES
        ):
            self._retry(f"{source.replica_id} {_UNREADABLE}", [source], now)
            return
        self.first_token_at = now
        for sample in self._samples.values():
            sample.finish = "stop"
        self._finish(now, [EmbeddingDelta(embedding.vector)])

    def on_delta(self, source: ReplicaIdentity, delta: TokenDelta, now: float) -> None:
        """Take new tokens, which may be early, late, repeated or of an old attempt."""
        sample = self._samples.get(delta.sample)
        if not self.is_current(delta.attempt) or sample is None or sample.finish:
            return
        # The content of the first token comes after all requested values of the prompt.
        is_early = delta.first_index == 0 and not self._prompt.is_whole
        if is_early or len(delta.tokens) % TOKEN_BYTES or len(sample.early) >= _MAX_EARLY_DELTAS:
            self._retry(f"{source.replica_id} {_UNREADABLE}", [source], now)
            return
        if source == self._migration.decode:
            sample.is_decoding = True
        output = sample.take(delta)
        if output and not self.first_token_at:
            self.first_token_at = now
            self._note(now, "first token", source.replica_id)
        if not sample.finish:
            for item in output:
                self._effects.emit(item)
            return
        self._note(now, "sample finished", f"{sample.index}: {sample.finish}, {sample.num_tokens} tokens")
        if not self._unfinished():
            self._finish(now, output)
            return
        for item in output:
            self._effects.emit(item)

    def on_isolated(self, source: ReplicaIdentity, report: IsolationReport, now: float) -> None:
        """Record that a suspect begins to run alone there, or is cleared."""
        if self.is_current(report.attempt):
            self._suspicion.isolated(source, report)
            self._note(now, "cleared" if report.is_cleared else "runs alone", source.replica_id)

    def on_stalled(self, source: ReplicaIdentity, report: StallReport, now: float) -> None:
        """Record that the request is in a step of this replica that stands still."""
        if self.is_current(report.attempt):
            self._suspicion.stalled(source)
            self._note(now, "in a step that stands still", source.replica_id)

    # ------------------------------------------------------------------------------------- failures

    def on_failed(self, source: ReplicaIdentity, failure: RequestFailed, now: float) -> None:
        """Handle that a replica gave the attempt up, unless the stream has moved away from it."""
        if not self.is_current(failure.attempt) or self._migration.is_former(source):
            return
        reason = f"{source.replica_id}: {failure.reason}"
        if failure.code == "deadline":
            self._fail(DeadlineError(reason), now)
            return
        if (refusal := refusal_of(failure, self.prepared)) is not None:
            self._fail(refusal, now)
            return
        leaver = source if failure.code == "leaving" else None
        if failure.code in ("refused", "peer") and self._migration.is_leaving(self._migration.decode):
            leaver = self._migration.decode
        if leaver is not None and self._retries.forgive(leaver):
            self._num_uncounted += 1
            self._retry(reason, [leaver], now, at_once=True)
        elif failure.code == "crowded" and self._num_returns < MOST_RETURNS:
            self._num_returns += 1
            self._num_uncounted += 1
            self._retry(reason, [], now, at_once=True)
        elif failure.code == "internal":
            self._broke(source, reason, now, is_suspect=failure.suspect)
        elif failure.code == "refused":
            self._retries.avoid(failure.refused_by or source.replica_id)
            self._retry(reason, [], now, retry_after_s=failure.retry_after_s, refused=True)
        elif failure.code == "peer" and (
            others := [member for member in self._members() if member != source]
        ):
            self._retries.cut_off(source.replica_id)
            self._num_uncounted += all(map(self._suspicion.forgives, others))
            self._retry(reason, others, now)
        else:
            self._retry(reason, [source], now)

    def on_unsent(self, replica: ReplicaIdentity, now: float) -> None:
        """Handle that a submission could not be sent there."""
        if self.phase is RequestPhase.RUNNING:
            reason = f"{replica.replica_id}: its link is gone"
            self._broke(replica, reason, now, is_suspect=False, gone=replica)

    def on_lost(self, replica: ReplicaIdentity, reason: str, now: float) -> None:
        """Handle that a replica is no longer connected. One that has done and sent its part is not missed."""
        if self.phase is not RequestPhase.RUNNING:
            return
        is_target = replica == self._migration.target
        if is_target:
            self._migration.lose_target(reason, now)
        if self._is_missed(replica):
            has_joined = self._hand_over_report or any(it.is_decoding for it in self._unfinished())
            has_it = replica == (self._prefill or replica) or bool(self._migration.num_moves or has_joined)
            self._lost(replica, reason, now, has_it=has_it)
            return
        if replica == self._prefill:
            self._note(now, "prefill replica gone", reason)
        if is_target:
            self._effects.schedule_move(OVERDUE_S)

    def on_stopped(self, replica: ReplicaIdentity, reason: str, includes_streams: bool, now: float) -> None:
        """Leave a replica that stands still, while others do not: at once where this attempt has brought no
        token, else where it `includes_streams`. Where the router knows no other place than one that was left
        already, the request waits there.
        """
        has_left = self._suspicion.has_left(replica)
        if self.phase is not RequestPhase.RUNNING or not self._is_missed(replica) or has_left:
            return
        if not includes_streams and any(sample.has_progressed for sample in self._unfinished()):
            return
        reason = f"{replica.replica_id} stands still: {reason}"
        if self._suspicion.stopped(replica):
            self._broke(replica, reason, now, is_suspect=True)
            return
        self._num_uncounted += self._suspicion.forgives(replica)
        self._retry(reason, [replica], now, at_once=True)

    def on_cancel(self, error: RequestError, now: float) -> None:
        """End the request because the client left, or the gateway gives up; `error` is the one that is
        recorded."""
        if self.phase is not RequestPhase.ENDED:
            self._fail(error, now)

    def on_deadline(self, now: float) -> None:
        """End the request because its deadline has passed."""
        self.on_cancel(DeadlineError("the deadline passed"), now)

    # ------------------------------------------------------------------------------------ migration

    def on_streams(self, replica: ReplicaIdentity, may_stay: bool, now: float) -> None:
        """Handle that streams must leave this replica, which leaves or plays another role, or may stay."""
        if self._migration.stay(replica, may_stay):
            self._effects.schedule_move(0.0)

    def on_move_time(self, now: float) -> None:
        """Ask for a target, if the stream still has to move; give up a migration that is overdue."""
        if self.phase is not RequestPhase.RUNNING:
            return
        target = self._migration.target
        if target is not None and self._migration.is_overdue(now):
            self._lost(target, "in a move", now, has_it=False)
            return
        excluded = self._migration.excluded()
        if self._migration.has_to_move:
            self._effects.route_move(route_request(self.prepared, self._unfinished(), excluded))

    def on_move_routed(self, target: HandOverTarget | None, now: float) -> None:
        """Begin the migration to where the router placed the stream; None: there is no place."""
        if self.phase is not RequestPhase.RUNNING:
            if target is not None:
                self._effects.release_placement()
        elif target is not None:
            self._effects.move(*self._migration.begin(target, now))
        elif self._migration.no_target(now):
            self._effects.schedule_move(NO_TARGET_PAUSE_S)

    def on_move_ended(self, source: ReplicaIdentity, ended: MoveEnded, now: float) -> None:
        """Handle the source's report of how the migration ended; all tokens from there came before it."""
        is_awaited = source == self._migration.decode and ended.target == self._migration.target
        if not self.is_current(ended.attempt) or not is_awaited:
            return
        if not ended.error:
            self._moved(0, now)
            return
        seeks = self._migration.fail(ended.error, now)
        self._effects.release_placement()
        if seeks:
            self._effects.schedule_move(RETRY_PAUSE_S)

    # ---------------------------------------------------------------------- transitions they share

    def _moved(self, first_index: int, now: float) -> None:
        """Note that the target has the stream."""
        target, lost = self._migration.target, self._migration.target_lost
        seeks = self._migration.switch(first_index, now)
        if target is not None and lost:
            self._lost(target, lost, now, has_it=True)
            return
        self._effects.confirm_placement()
        if seeks:
            self._effects.schedule_move(0.0)

    def _lost(self, replica: ReplicaIdentity, reason: str, now: float, *, has_it: bool) -> None:
        """Handle the loss of a replica that may have had the request, and may be lost because of it."""
        is_suspect = (
            has_it and not self._migration.is_leaving(replica) and self._suspicion.may_have_broken(replica)
        )
        reason = f"{replica.replica_id} lost: {reason}"
        self._broke(replica, reason, now, is_suspect=is_suspect, gone=replica)

    def _broke(
        self,
        replica: ReplicaIdentity,
        reason: str,
        now: float,
        *,
        is_suspect: bool,
        gone: ReplicaIdentity | None = None,
    ) -> None:
        """End the attempt because a replica broke, and the request where it `is_suspect` once too often."""
        error = self._suspicion.broke(reason) if is_suspect else None
        if error is not None:
            self._note(now, "attempt failed", reason)
            self._fail(error, now, gone=gone)
            return
        self._num_uncounted += is_suspect or self._suspicion.forgives(replica)
        self._retry(reason, [replica], now, gone=gone)

    def _retry(
        self,
        reason: str,
        blamed: Sequence[ReplicaIdentity],
        now: float,
        *,
        retry_after_s: float = 0.0,
        refused: bool = False,
        at_once: bool = False,
        gone: ReplicaIdentity | None = None,
    ) -> None:
        """End the attempt and place the missing output again, on other replicas than `blamed`."""
        self._note(now, "attempt failed", reason)
        self._last_failure, self._was_refused = reason, refused
        if self.attempt - self._num_uncounted >= self.prepared.max_attempts:
            why = f"{reason} (attempt {self.attempt} of {self.prepared.max_attempts})"
            error = OverloadedError if refused else UnavailableError
            self._fail(error(why, self._spread(max(retry_after_s, 1.0))), now, gone=gone)
            return
        self._retries.exclude(blamed)
        cancels = self._cancels(gone)
        self.phase = RequestPhase.ROUTING
        delay_s = 0.0 if at_once or self.attempt == 1 else backoff(self.attempt - 2)
        request = self._route_request()
        self._end_attempt(cancels)
        self._effects.route(request, delay_s, needs_capacity=refused)

    def _finish(self, now: float, output: Sequence[Output] = ()) -> None:
        """End the request, whose samples are all finished, with this last output."""
        self._note(now, "finished", f"after {self.attempt} attempts")
        # A sample that a stop string ended still runs on its replica.
        was_cut = any(sample.was_cut for sample in self._samples.values())
        cancels = self._cancels(None) if was_cut else []
        self.phase = RequestPhase.ENDED
        for item in output:
            self._effects.emit(item)
        self._end_attempt(cancels)
        self._effects.finish(self.summary(now))

    def _fail(self, error: RequestError, now: float, *, gone: ReplicaIdentity | None = None) -> None:
        self._note(now, "failed", error.logged)
        cancels = self._cancels(gone)
        self.phase = RequestPhase.ENDED
        self._end_attempt(cancels)
        self._effects.fail(error)

    def _end_attempt(self, cancels: Sequence[tuple[ReplicaIdentity, Cancel]]) -> None:
        """Stop the attempt where it runs, and release it at the router, by effects alone."""
        for replica, cancel in cancels:
            self._effects.cancel(replica, cancel)
        if self.attempt:
            self._effects.release_placement()

    # --------------------------------------------------------------------------------------- state

    def _spread(self, retry_after_s: float) -> float:
        """Return the time after which the client may come back, so that not all do at once."""
        return spread_s(retry_after_s, zlib.crc32(self.prepared.request_id.encode()))

    def _route_request(self) -> RouteRequest:
        excluded, is_scored = self._retries.excluded(), self._prompt.is_whole
        return route_request(self.prepared, self._unfinished(), excluded, is_scored=is_scored)

    def _cancels(self, gone: ReplicaIdentity | None) -> list[tuple[ReplicaIdentity, Cancel]]:
        """Return the messages that stop the running attempt everywhere but on `gone`."""
        if self.phase is not RequestPhase.RUNNING:
            return []
        return [
            (member, Cancel(self.prepared.request_id, number))
            for member in dict.fromkeys((*self._members(), *filter(None, [self._migration.target])))
            if member != gone
            for number in self._numbers
        ]

    def _unfinished(self) -> list[SampleOutput]:
        return [sample for sample in self._samples.values() if not sample.finish]

    def _members(self) -> list[ReplicaIdentity]:
        """Return the replicas of the running attempt."""
        return [member for member in (self._prefill, self._migration.decode) if member is not None]

    def _is_missed(self, replica: ReplicaIdentity) -> bool:
        """Whether the running attempt cannot do without this replica."""
        num_tokens = min(sample.num_tokens for sample in self._unfinished())
        if replica == self._migration.decode or self._migration.owes(replica, num_tokens):
            return True
        return replica == self._prefill and not self._is_handed_over()

    def _is_handed_over(self) -> bool:
        """Whether every unfinished sample has its first token and continues without the prefill replica."""
        all_joined = self._num_hand_overs >= len(self._numbers)
        return all(
            sample.has_progressed and (all_joined or sample.is_decoding) for sample in self._unfinished()
        )

    def _note(self, now: float, name: str, detail: str) -> None:
        if len(self.timeline) < _MAX_TIMELINE:
            self.timeline.append(TimelineEntry(now, name, detail))
