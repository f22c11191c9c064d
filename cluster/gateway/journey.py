"""The walk of one request through the cluster, as a state machine without I/O.

`cluster.gateway.walk` tells it what happened, with the time, and carries out the actions that it answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

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
    JourneyPlan,
    NotePrefilled,
    Release,
    Route,
    RoutedAttempt,
    SampleResult,
    Submit,
    Summary,
    TimelineEntry,
)
from cluster.gateway.samples import Sample
from cluster.gateway.text import SampleText
from kvtransfer.keys import TOKEN_BYTES
from kvtransfer.messages import ReplicaIdentity
from router.messages import Decision, RouteRequest
from workers.messages import (
    Cancel,
    HandOverReport,
    HandOverTarget,
    PrefillReport,
    RequestFailed,
    SampleState,
    Submission,
    TokenDelta,
)

_MAX_HELD_DELTAS = 4096
_MAX_TIMELINE = 200
_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0


class JourneyState(Enum):
    """See `Journey`."""

    NEW = auto()
    ROUTING = auto()
    RUNNING = auto()
    ENDED = auto()


class Journey:
    """One request from acceptance to its one terminal action (`Finish` or `Fail`).

              start            on_routed             every sample finished
        NEW --------> ROUTING ----------> RUNNING --------------------------> ENDED (Finish)
                       |  ^                  |
            no route:  |  | replica lost; failed: refused, peer, internal
            wait, then |  | (attempt + 1, only what is missing)
            route again+--+------------------+
        NEW, ROUTING, RUNNING -- cancel, deadline, invalid, attempts or patience used up --> ENDED (Fail)

    An attempt is one placement by the router. Its first tokens come from the prefill replica, the others
    from the decode replica, on two Links, so that deltas may arrive early; they wait in `held`. Deltas of
    another attempt, and indices that are there already, are dropped. A failed attempt is cancelled where
    it ran, and its unfinished samples are submitted again with the output they have: samples without any
    output together, each other one by itself. Replicas know a submission by its number alone (the field
    `attempt` of the wire), so that each has its own; those of the running attempt are `_numbers`.
    """

    def __init__(self, plan: JourneyPlan, texts: Sequence[SampleText], now: float) -> None:
        assert len(texts) == len(plan.samples)
        self.plan = plan
        self.state = JourneyState.NEW
        self.attempt = 0
        self.decisions: list[RoutedAttempt] = []
        self.timeline: list[TimelineEntry] = []
        self._samples = {
            start.index: Sample(start, text) for start, text in zip(plan.samples, texts, strict=True)
        }
        self.started_at = now
        self._first_token_at = 0.0
        self._prefill: ReplicaIdentity | None = None
        self._decode: ReplicaIdentity | None = None
        self._prefill_report: PrefillReport | None = None
        self._hand_over_report: HandOverReport | None = None
        self._numbers = range(0)
        self._num_hand_overs = 0
        self._excluded: set[str] = set()
        self._avoided: set[str] = set()
        self._cut_off: set[str] = set()
        """Prefill replicas that had no way to a decode replica; without another, the latter goes on alone."""
        self._no_route_since: float | None = None
        self._num_no_routes = 0
        self._last_failure = ""
        self._was_refused = False

    def is_current(self, number: int) -> bool:
        """Whether the submission of this number belongs to the running attempt."""
        return self.state is JourneyState.RUNNING and number in self._numbers

    # ------------------------------------------------------------------------------------- events

    def start(self, now: float) -> list[Action]:
        """Accepted: find it a place (or finish at once when a resumed request misses nothing)."""
        assert self.state is JourneyState.NEW
        self._note(now, "accepted", f"{len(self.plan.prompt) // TOKEN_BYTES} prompt tokens")
        self.state = JourneyState.ROUTING
        if not self._unfinished():
            return self._finish(now)
        return [self._route(0.0)]

    def on_routed(
        self, decision: Decision, prefill: ReplicaIdentity | None, decode: HandOverTarget, now: float
    ) -> list[Action]:
        """The router chose. `prefill` None: the decode replica prefills by itself."""
        if self.state is not JourneyState.ROUTING:
            return [Release(self.plan.request_id)]
        self.attempt += 1
        self.state = JourneyState.RUNNING
        self.decisions.append(RoutedAttempt(self.attempt, decision))
        self._prefill, self._decode = prefill, decode.identity
        self._no_route_since, self._num_no_routes = None, 0
        self._avoided.clear()
        self._num_hand_overs = 0
        self._prefill_report = self._hand_over_report = None
        place = f"{prefill.replica_id} -> " if prefill else ""
        self._note(now, "routed", f"attempt {self.attempt}: {place}{decode.identity.replica_id}")
        groups = self._groups()
        first = max(1, self._numbers.stop)
        self._numbers = range(first, first + len(groups))
        target = decode if prefill is not None else None
        return [
            Submit(prefill or decode.identity, self._submission(group, number, target, now))
            for group, number in zip(groups, self._numbers, strict=True)
        ]

    def on_no_route(self, reason: str, retry_after_s: float, now: float) -> list[Action]:
        """The router found no place: wait and ask again, without exclusions (but by the one side of a broken
        path instead of the other), while patience lasts."""
        if self.state is not JourneyState.ROUTING:
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
        had_exclusions = bool(self._excluded or self._avoided)
        self._excluded.clear()
        self._avoided.clear()
        self._excluded, self._cut_off = self._cut_off, self._excluded
        delay_s = 0.0 if had_exclusions and self._num_no_routes == 0 else _backoff(self._num_no_routes)
        self._num_no_routes += 1
        return [self._route(delay_s)]

    def on_prefilled(self, report: PrefillReport, now: float) -> list[Action]:
        """The prompt is computed; its first token comes with this."""
        if not self.is_current(report.attempt):
            return []
        if self._prefill_report is None:
            self._prefill_report = report
        loaded = "".join(f", {num} of them from {tier}" for tier, num in report.num_loaded_tokens.items())
        self._note(now, "prefilled", f"{report.num_cached_tokens} tokens cached{loaded}")
        return [NotePrefilled(self.plan.request_id)]

    def on_handed_over(self, report: HandOverReport, now: float) -> list[Action]:
        """The decode replica has the sequence: the prefill replica is no longer needed."""
        if not self.is_current(report.attempt):
            return []
        if self._hand_over_report is None:
            self._hand_over_report = report
        self._num_hand_overs += 1
        what = f"{report.num_moved_bytes} bytes by {report.transport or 'nothing'}"
        self._note(now, "handed over", f"{what}, {report.num_held_tokens} tokens held")
        return []

    def on_delta(self, source: ReplicaIdentity, delta: TokenDelta, now: float) -> list[Action]:
        """New tokens, maybe early, late, twice or of an old attempt."""
        sample = self._samples.get(delta.sample)
        if not self.is_current(delta.attempt) or sample is None or sample.finish:
            return []
        if len(delta.tokens) % TOKEN_BYTES or len(sample.held) >= _MAX_HELD_DELTAS:
            return self._retry(f"{source.replica_id} sent a stream that cannot be read", [source], now)
        if source == self._decode:
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
        """A replica gave the attempt up."""
        if not self.is_current(failure.attempt):
            return []
        reason = f"{source.replica_id}: {failure.reason}"
        if failure.code == "deadline":
            return self._fail(DeadlineError(reason), now)
        if failure.code == "invalid":
            return self._fail(InvalidRequestError(FieldViolation("prompt", failure.reason)), now)
        if failure.code == "refused":
            self._avoided.add(failure.refused_by or source.replica_id)
            return self._retry(reason, [], now, retry_after_s=failure.retry_after_s, refused=True)
        others = [member for member in self._members() if member != source]
        if failure.code != "peer" or not others:
            return self._retry(reason, [source], now)
        self._cut_off.add(source.replica_id)
        return self._retry(reason, others, now)

    def on_lost(self, replica: ReplicaIdentity, reason: str, now: float) -> list[Action]:
        """The Link to a replica ended. A prefill replica that has done its part is not missed."""
        if self.state is not JourneyState.RUNNING or replica not in self._members():
            return []
        if replica != self._decode and self._is_handed_over():
            self._note(now, "prefill replica gone", reason)
            return []
        return self._retry(f"{replica.replica_id} lost: {reason}", [replica], now, gone=replica)

    def on_cancel(self, error: RequestError, now: float) -> list[Action]:
        """The client left, or the gateway gives up; `error` is what is recorded."""
        return [] if self.state is JourneyState.ENDED else self._fail(error, now)

    def on_deadline(self, now: float) -> list[Action]:
        """The deadline has passed."""
        return self.on_cancel(DeadlineError("the deadline passed"), now)

    # ------------------------------------------------------------------------------------ answers

    def _route(self, delay_s: float) -> Route:
        unfinished = self._unfinished()
        longest = max(sample.num_tokens for sample in unfinished)
        shortest = min(sample.num_tokens for sample in unfinished)
        return Route(
            RouteRequest(
                request_id=self.plan.request_id,
                tenant=self.plan.tenant,
                block_keys=self.plan.block_keys,
                num_tokens=len(self.plan.prompt) // TOKEN_BYTES + longest,
                max_new_tokens=max(1, self.plan.sampling.max_tokens - shortest),
                num_samples=len(unfinished),
                excluded=tuple(sorted(self._excluded | self._avoided)),
                pinned_prefill=self.plan.pinned_prefill,
                pinned_decode=self.plan.pinned_decode,
            ),
            delay_s,
        )

    def _groups(self) -> list[list[Sample]]:
        """The unfinished samples by submission."""
        unfinished = self._unfinished()
        fresh = [sample for sample in unfinished if not sample.output]
        groups = [[sample] for sample in unfinished if sample.output]
        return [fresh, *groups] if fresh else groups

    def _submission(
        self, group: list[Sample], number: int, target: HandOverTarget | None, now: float
    ) -> Submission:
        for sample in group:
            sample.begin_attempt()
        deadline_at = self.plan.deadline_at
        return Submission(
            request_id=self.plan.request_id,
            attempt=number,
            tenant=self.plan.tenant,
            priority=self.plan.priority,
            prompt=self.plan.prompt,
            block_keys=self.plan.block_keys,
            samples=tuple(SampleState(sample.index, sample.seed, bytes(sample.output)) for sample in group),
            sampling=self.plan.sampling,
            decode=target,
            deadline_s=None if deadline_at is None else max(0.0, deadline_at - now),
        )

    def _retry(
        self,
        reason: str,
        blamed: Sequence[ReplicaIdentity],
        now: float,
        *,
        retry_after_s: float = 0.0,
        refused: bool = False,
        gone: ReplicaIdentity | None = None,
    ) -> list[Action]:
        """End the attempt and place what is missing again, elsewhere than at `blamed`."""
        self._note(now, "attempt failed", reason)
        self._last_failure, self._was_refused = reason, refused
        if self.attempt >= self.plan.max_attempts:
            why = f"{reason} (attempt {self.attempt} of {self.plan.max_attempts})"
            error = OverloadedError if refused else UnavailableError
            return self._fail(error(why, max(retry_after_s, 1.0)), now, gone=gone)
        self._excluded.update(replica.replica_id for replica in blamed)
        actions = self._stop(gone)
        self.state = JourneyState.ROUTING
        delay_s = 0.0 if self.attempt == 1 else _backoff(self.attempt - 2)
        if refused:
            delay_s = min(max(retry_after_s, _backoff(self.attempt - 1)), _MAX_BACKOFF_S)
        return [*actions, self._route(delay_s)]

    def _finish(self, now: float) -> list[Action]:
        self._note(now, "finished", f"after {self.attempt} attempts")
        samples = self._samples.values()
        # A sample that a stop string ended still runs at its replica.
        actions = self._stop(None) if any(sample.was_cut for sample in samples) else self._released()
        self.state = JourneyState.ENDED
        prefill = self._prefill or self._decode
        summary = Summary(
            samples=tuple(SampleResult(it.index, it.finish, it.num_tokens) for it in samples),
            num_prompt_tokens=len(self.plan.prompt) // TOKEN_BYTES,
            num_attempts=self.attempt,
            started_at=self.started_at,
            first_token_at=self._first_token_at or now,
            finished_at=now,
            prefill_replica=prefill.replica_id if prefill else "",
            decode_replica=self._decode.replica_id if self._decode else "",
            prefill=self._prefill_report,
            hand_over=self._hand_over_report,
        )
        return [*actions, Finish(summary)]

    def _fail(self, error: RequestError, now: float, *, gone: ReplicaIdentity | None = None) -> list[Action]:
        self._note(now, "failed", str(error))
        actions = self._stop(gone)
        self.state = JourneyState.ENDED
        return [*actions, Fail(error)]

    def _stop(self, gone: ReplicaIdentity | None) -> list[Action]:
        """Cancel the running attempt wherever it is, and release it at the router."""
        if self.state is not JourneyState.RUNNING:
            return self._released()
        cancels: list[Action] = [
            CancelAt(member, Cancel(self.plan.request_id, number))
            for member in self._members()
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
        return [member for member in (self._prefill, self._decode) if member is not None]

    def _is_handed_over(self) -> bool:
        """Whether every unfinished sample has its first token and goes on without the prefill replica."""
        all_joined = self._num_hand_overs >= len(self._numbers)
        return all(
            sample.has_progressed and (all_joined or sample.is_decoding) for sample in self._unfinished()
        )

    def _note(self, now: float, name: str, detail: str) -> None:
        if len(self.timeline) < _MAX_TIMELINE:
            self.timeline.append(TimelineEntry(now, name, detail))


def _backoff(num_failures: int) -> float:
    return min(_BACKOFF_S * 2.0**num_failures, _MAX_BACKOFF_S)
