"""The walk of one request through the cluster, as a state machine without I/O.

`cluster.gateway.request_task` tells it what happened, with the time, and carries out the actions that it answers. The
file is over 400 lines because all transitions of one machine stand in one place.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import (
    DeadlineError,
    FieldViolation,
    InvalidRequestError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from cluster.gateway.actions import (
    Action,
    CancelAt,
    Fail,
    Finish,
    NotePrefilled,
    Release,
    RequestPhase,
    Route,
    Submit,
)
from cluster.gateway.migration import StreamMigration
from cluster.gateway.retry_policy import (
    MAX_BACKOFF_S,
    RetryPolicy,
    Suspicion,
    backoff,
    by_submission,
    route_request,
    submission,
)
from cluster.gateway.sample_output import Sample
from cluster.metrics.ended_request import RoutedAttempt, SampleResult, Summary, TimelineEntry
from cluster.text.preprocess import PreparedRequest
from cluster.text.tokenizer import SampleText
from kvtransfer.blocks.keys import TOKEN_BYTES
from kvtransfer.messages import ReplicaIdentity
from router.messages import Decision, RouteRequest
from workers.messages import (
    Cancel,
    HandOverReport,
    HandOverTarget,
    IsolationReport,
    MoveEnded,
    PrefillReport,
    RequestFailed,
    TokenDelta,
)

_MAX_HELD_DELTAS = 4096
_MAX_TIMELINE = 200


class RequestState:
    """One request from acceptance to its one terminal action (`Finish` or `Fail`).

              start            on_routed             every sample finished
        NEW --------> ROUTING ----------> RUNNING --------------------------> ENDED (Finish)
                       |  ^                  |
            no route:  |  | replica lost; failed: refused, peer, internal, leaving
            wait, then |  | (attempt + 1, only what is missing)
            route again+--+------------------+
        NEW, ROUTING, RUNNING -- cancel, deadline, invalid, poison, attempts or patience used up
                                                                                     --> ENDED (Fail)

    An attempt is one placement by the router. Its first tokens come from the prefill replica, the others
    from the decode replica, on two Links, so that deltas may arrive early; they wait in `held`. Deltas of
    another attempt, and indices that are there already, are dropped. A failed attempt is cancelled where
    it ran, and its unfinished samples are submitted again with the output they have: samples without any
    output together, each other one by itself. Replicas know a submission by its number alone (the field
    `attempt` of the wire), so that each has its own; those of the running attempt are `_numbers`.

    Attempts that end because a replica leaves or breaks do not count. After the second one that may have
    broken because of the request (`suspicion`), it is not placed again.

    Within an attempt the decode side moves away from a replica that leaves (`stream_moves`); several samples
    stay together and do not move.
    """

    def __init__(self, plan: PreparedRequest, texts: Sequence[SampleText], now: float) -> None:
        assert len(texts) == len(plan.samples)
        self.plan = plan
        self.state = RequestPhase.NEW
        self.attempt = 0
        self.decisions: list[RoutedAttempt] = []
        self.timeline: list[TimelineEntry] = []
        self._samples = {
            start.index: Sample(start, text) for start, text in zip(plan.samples, texts, strict=True)
        }
        self.started_at = now
        self._first_token_at = 0.0
        self._prefill: ReplicaIdentity | None = None
        self._computed_at: ReplicaIdentity | None = None
        self._prefill_report: PrefillReport | None = None
        self._hand_over_report: HandOverReport | None = None
        self._numbers = range(0)
        self._num_hand_overs = 0
        self._avoiding = RetryPolicy()
        self._moves = StreamMigration(plan.request_id, self._note)
        self._suspicion = Suspicion(plan.max_attempts)
        # Attempts that ended because a replica leaves or breaks.
        self._num_uncounted = 0
        self._no_route_since: float | None = None
        self._last_failure = ""
        self._was_refused = False

    @property
    def first_token_at(self) -> float:
        """0 before the first token that this call brought."""
        return self._first_token_at

    @property
    def num_output_tokens(self) -> int:
        """Of all samples, with what a resumed request came with."""
        return sum(sample.num_tokens for sample in self._samples.values())

    def is_current(self, number: int) -> bool:
        """Whether the submission of this number belongs to the running attempt."""
        return self.state is RequestPhase.RUNNING and number in self._numbers

    # ------------------------------------------------------------------------------------- events

    def start(self, now: float) -> list[Action]:
        """Accepted: find it a place (or finish at once when a resumed request misses nothing)."""
        assert self.state is RequestPhase.NEW
        self._note(now, "accepted", f"{len(self.plan.prompt) // TOKEN_BYTES} prompt tokens")
        self.state = RequestPhase.ROUTING
        if not self._unfinished():
            return self._finish(now)
        return [self._route(0.0)]

    def on_routed(
        self, decision: Decision, prefill: ReplicaIdentity | None, decode: HandOverTarget, now: float
    ) -> list[Action]:
        """The router chose. `prefill` None: the decode replica prefills by itself."""
        if self.state is not RequestPhase.ROUTING:
            return [Release(self.plan.request_id)]
        self.attempt += 1
        self.state = RequestPhase.RUNNING
        self.decisions.append(RoutedAttempt(self.attempt, decision))
        self._prefill = prefill
        self._computed_at = prefill or decode.identity
        self._no_route_since = None
        self._avoiding.routed()
        self._num_hand_overs = 0
        self._prefill_report = self._hand_over_report = None
        place = f"{prefill.replica_id} -> " if prefill else ""
        self._note(now, "routed", f"attempt {self.attempt}: {place}{decode.identity.replica_id}")
        groups = by_submission(self._unfinished())
        first = max(1, self._numbers.stop)
        self._numbers = range(first, first + len(groups))
        self._moves.reset(decode.identity, first, can_move=[len(group) for group in groups] == [1])
        target = decode if prefill is not None else None
        suspect = self._suspicion.is_suspect
        self._suspicion.routed(self._numbers)
        return [
            Submit(
                prefill or decode.identity,
                submission(self.plan, group, number, target, now, suspect=suspect),
            )
            for group, number in zip(groups, self._numbers, strict=True)
        ]

    def on_no_route(self, reason: str, retry_after_s: float, now: float) -> list[Action]:
        """The router found no place: wait and ask again, without exclusions (but by the one side of a broken
        path instead of the other), while patience lasts."""
        if self.state is not RequestPhase.ROUTING:
            return []
        if self._no_route_since is None:
            self._no_route_since = now
            self._note(now, "no route", reason)
        patience_s = self.plan.patience_s if self.attempt else self.plan.first_patience_s
        if now - self._no_route_since >= patience_s:
            if self._was_refused:
                return self._fail(OverloadedError(self._last_failure, retry_after_s), now)
            why = f"{reason} (after: {self._last_failure})" if self._last_failure else reason
            return self._fail(UnavailableError(why, retry_after_s), now)
        return [self._route(self._avoiding.relent())]

    def on_prefilled(self, report: PrefillReport, now: float) -> list[Action]:
        """The prompt is computed; its first token comes with this."""
        if not self.is_current(report.attempt):
            return []
        if self._prefill_report is None:
            self._prefill_report = report
        loaded = "".join(f", {num} of them from {tier}" for tier, num in report.num_loaded_tokens.items())
        self._note(now, "prefilled", f"{report.num_cached_tokens} tokens cached{loaded}")
        decodes = [] if self._prefill else self._moves.decodes()
        return [NotePrefilled(self.plan.request_id), *decodes]

    def on_handed_over(self, source: ReplicaIdentity, report: HandOverReport, now: float) -> list[Action]:
        """A decode replica has the sequence: the replica before it is no longer needed."""
        if not self.is_current(report.attempt):
            return []
        if source == self._moves.target:
            return self._moved(report.first_index, now)
        if self._moves.num_moves:
            return []  # the one that it came from has told it already
        if self._hand_over_report is None:
            self._hand_over_report = report
        self._num_hand_overs += 1
        what = f"{report.num_moved_bytes} bytes by {report.transport or 'nothing'}"
        self._note(now, "handed over", f"{what}, {report.num_held_tokens} tokens held")
        return self._moves.decodes()

    def on_delta(self, source: ReplicaIdentity, delta: TokenDelta, now: float) -> list[Action]:
        """New tokens, maybe early, late, twice or of an old attempt."""
        sample = self._samples.get(delta.sample)
        if not self.is_current(delta.attempt) or sample is None or sample.finish:
            return []
        if len(delta.tokens) % TOKEN_BYTES or len(sample.held) >= _MAX_HELD_DELTAS:
            return self._retry(f"{source.replica_id} sent a stream that cannot be read", [source], now)
        if source == self._moves.decode:
            sample.is_decoding = True
        sample.hold(delta)
        actions: list[Action] = []
        while (ready := sample.next_delta()) is not None:
            if not self._first_token_at:
                self._first_token_at = now
                self._note(now, "first token", source.replica_id)
            actions.append(sample.apply(ready))
        if sample.finish:
            self._note(now, "sample finished", f"{sample.index}: {sample.finish}, {sample.num_tokens} tokens")
        if not self._unfinished():
            actions.extend(self._finish(now))
        return actions

    def on_failed(self, source: ReplicaIdentity, failure: RequestFailed, now: float) -> list[Action]:
        """A replica gave the attempt up; from one that it has moved away from, that is no news."""
        if not self.is_current(failure.attempt) or self._moves.is_former(source):
            return []
        reason = f"{source.replica_id}: {failure.reason}"
        if failure.code == "deadline":
            return self._fail(DeadlineError(reason), now)
        if failure.code == "invalid":
            return self._fail(InvalidRequestError(FieldViolation("prompt", failure.reason)), now)
        leaver = source if failure.code == "leaving" else None
        if failure.code in ("refused", "peer") and self._moves.is_leaving(self._moves.decode):
            leaver = self._moves.decode
        if leaver is not None and self._avoiding.forgive(leaver):
            self._num_uncounted += 1
            return self._retry(reason, [leaver], now, at_once=True)
        if failure.code == "internal":
            return self._broke(source, reason, now, is_suspect=failure.suspect)
        if failure.code == "refused":
            self._avoiding.avoid(failure.refused_by or source.replica_id)
            return self._retry(reason, [], now, retry_after_s=failure.retry_after_s, refused=True)
        others = [member for member in self._members() if member != source]
        if failure.code != "peer" or not others:
            return self._retry(reason, [source], now)
        self._avoiding.cut_off(source.replica_id)
        self._num_uncounted += all(map(self._suspicion.forgives, others))
        return self._retry(reason, others, now)

    def on_isolated(self, source: ReplicaIdentity, report: IsolationReport, now: float) -> list[Action]:
        """A suspect begins to run alone there, or is cleared."""
        if self.is_current(report.attempt):
            self._suspicion.isolated(source, report)
            self._note(now, "cleared" if report.is_cleared else "runs alone", source.replica_id)
        return []

    def on_unsent(self, replica: ReplicaIdentity, now: float) -> list[Action]:
        """A submission could not be sent there."""
        reason = f"{replica.replica_id}: its link is gone"
        if self.state is not RequestPhase.RUNNING:
            return []
        return self._broke(replica, reason, now, is_suspect=False, gone=replica)

    def on_lost(self, replica: ReplicaIdentity, reason: str, now: float) -> list[Action]:
        """The Link to a replica ended. One that has done its part, and told all of it, is not missed."""
        if self.state is not RequestPhase.RUNNING:
            return []
        waits = self._moves.lose_target(reason, now) if replica == self._moves.target else []
        num_tokens = min(sample.num_tokens for sample in self._unfinished())
        if replica != self._moves.decode and not self._moves.owes(replica, num_tokens):
            if replica != self._prefill:
                return waits
            if self._is_handed_over():
                self._note(now, "prefill replica gone", reason)
                return waits
        has_joined = self._hand_over_report or any(it.is_decoding for it in self._unfinished())
        has_it = replica == (self._prefill or replica) or bool(self._moves.num_moves or has_joined)
        return self._lost(replica, reason, now, has_it=has_it)

    def on_streams(self, replica: ReplicaIdentity, may_stay: bool) -> list[Action]:
        """Streams shall leave this replica, which leaves or plays another role; or may stay after all."""
        return self._moves.stay(replica, may_stay)

    def on_move_time(self, now: float) -> list[Action]:
        """Before `move_request`: the time for a `RouteMove` has come."""
        target = self._moves.target
        if self.state is not RequestPhase.RUNNING or target is None or not self._moves.is_overdue(now):
            return []
        return self._lost(target, "in a move", now, has_it=False)

    def move_request(self) -> RouteRequest | None:
        """The place that is to be found for the stream now; None when it need not move (any more)."""
        excluded = self._moves.excluded()
        if self.state is not RequestPhase.RUNNING or not self._moves.has_to_move:
            return None
        return route_request(self.plan, self._unfinished(), excluded)

    def on_move_routed(self, target: HandOverTarget | None, now: float) -> list[Action]:
        """The router found a place for `move_request`, or none."""
        return self._moves.routed(target, now)

    def on_move_ended(self, source: ReplicaIdentity, ended: MoveEnded, now: float) -> list[Action]:
        """The replica that it moves from has told how that ended, after all tokens from there."""
        is_awaited = source == self._moves.decode and ended.target == self._moves.target
        if not self.is_current(ended.attempt) or not is_awaited:
            return []
        return self._moves.failed(ended.error, now) if ended.error else self._moved(0, now)

    def on_cancel(self, error: RequestError, now: float) -> list[Action]:
        """The client left, or the gateway gives up; `error` is what is recorded."""
        return [] if self.state is RequestPhase.ENDED else self._fail(error, now)

    def on_deadline(self, now: float) -> list[Action]:
        """The deadline has passed."""
        return self.on_cancel(DeadlineError("the deadline passed"), now)

    def summary(self, now: float) -> Summary:
        """What it came to, or what there is of it so far."""
        return Summary(
            samples=tuple(SampleResult(it.index, it.finish, it.num_tokens) for it in self._samples.values()),
            num_prompt_tokens=len(self.plan.prompt) // TOKEN_BYTES,
            num_attempts=self.attempt,
            started_at=self.started_at,
            first_token_at=self._first_token_at or now,
            finished_at=now,
            prefill_replica=self._computed_at.replica_id if self._computed_at else "",
            decode_replica=self._moves.decode.replica_id if self._moves.decode else "",
            prefill=self._prefill_report,
            hand_over=self._hand_over_report,
            num_moves=self._moves.num_moves,
        )

    # ------------------------------------------------------------------------------------ answers

    def _route(self, delay_s: float) -> Route:
        return Route(route_request(self.plan, self._unfinished(), self._avoiding.ids()), delay_s)

    def _lost(self, replica: ReplicaIdentity, reason: str, now: float, *, has_it: bool) -> list[Action]:
        """A replica is gone that may have had the request, and may be so because of it."""
        is_suspect = (
            has_it and not self._moves.is_leaving(replica) and self._suspicion.may_have_broken(replica)
        )
        reason = f"{replica.replica_id} lost: {reason}"
        return self._broke(replica, reason, now, is_suspect=is_suspect, gone=replica)

    def _broke(
        self,
        replica: ReplicaIdentity,
        reason: str,
        now: float,
        *,
        is_suspect: bool,
        gone: ReplicaIdentity | None = None,
    ) -> list[Action]:
        """A replica broke: end the attempt, and the request where it `is_suspect` once too often."""
        error = self._suspicion.broke(reason) if is_suspect else None
        if error is not None:
            self._note(now, "attempt failed", reason)
            return self._fail(error, now, gone=gone)
        self._num_uncounted += is_suspect or self._suspicion.forgives(replica)
        return self._retry(reason, [replica], now, gone=gone)

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
    ) -> list[Action]:
        """End the attempt and place what is missing again, elsewhere than at `blamed`."""
        self._note(now, "attempt failed", reason)
        self._last_failure, self._was_refused = reason, refused
        if self.attempt - self._num_uncounted >= self.plan.max_attempts:
            why = f"{reason} (attempt {self.attempt} of {self.plan.max_attempts})"
            error = OverloadedError if refused else UnavailableError
            return self._fail(error(why, max(retry_after_s, 1.0)), now, gone=gone)
        self._avoiding.exclude(blamed)
        actions = self._stop(gone)
        self.state = RequestPhase.ROUTING
        delay_s = 0.0 if at_once or self.attempt == 1 else backoff(self.attempt - 2)
        if refused:
            delay_s = min(max(retry_after_s, backoff(self.attempt - 1)), MAX_BACKOFF_S)
        return [*actions, self._route(delay_s)]

    def _finish(self, now: float) -> list[Action]:
        self._note(now, "finished", f"after {self.attempt} attempts")
        samples = self._samples.values()
        # A sample that a stop string ended still runs at its replica.
        actions = self._stop(None) if any(sample.was_cut for sample in samples) else self._released()
        self.state = RequestPhase.ENDED
        return [*actions, Finish(self.summary(now))]

    def _fail(self, error: RequestError, now: float, *, gone: ReplicaIdentity | None = None) -> list[Action]:
        self._note(now, "failed", str(error))
        actions = self._stop(gone)
        self.state = RequestPhase.ENDED
        return [*actions, Fail(error)]

    def _stop(self, gone: ReplicaIdentity | None) -> list[Action]:
        """Cancel the running attempt wherever it is, and release it at the router."""
        if self.state is not RequestPhase.RUNNING:
            return self._released()
        cancels: list[Action] = [
            CancelAt(member, Cancel(self.plan.request_id, number))
            for member in dict.fromkeys((*self._members(), *filter(None, [self._moves.target])))
            if member != gone
            for number in self._numbers
        ]
        return cancels + self._released()

    def _released(self) -> list[Action]:
        return [Release(self.plan.request_id)] if self.attempt else []

    # --------------------------------------------------------------------------------------- state

    def _unfinished(self) -> list[Sample]:
        return [sample for sample in self._samples.values() if not sample.finish]

    def _members(self) -> list[ReplicaIdentity]:
        """The replicas of the running attempt."""
        return [member for member in (self._prefill, self._moves.decode) if member is not None]

    def _moved(self, first_index: int, now: float) -> list[Action]:
        """The target has the stream."""
        target, lost = self._moves.target, self._moves.target_lost
        actions = self._moves.switch(first_index, now)
        if target is None or not lost:
            return actions
        return self._lost(target, lost, now, has_it=True)

    def _is_handed_over(self) -> bool:
        """Whether every unfinished sample has its first token and goes on without the prefill replica."""
        all_joined = self._num_hand_overs >= len(self._numbers)
        return all(
            sample.has_progressed and (all_joined or sample.is_decoding) for sample in self._unfinished()
        )

    def _note(self, now: float, name: str, detail: str) -> None:
        if len(self.timeline) < _MAX_TIMELINE:
            self.timeline.append(TimelineEntry(now, name, detail))
