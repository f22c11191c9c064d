"""One running request: the effects of its state machine on admission, replicas, timers and the client.

There is one `RequestTask` for each request. Everything runs on the gateway's event loop, without locks.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVarTuple

from cluster.admission.queued_bytes import QueuedBytes
from cluster.admission.queued_request import Outcome, QueuedRequest, Refused, Released
from cluster.errors import (
    AbandonedError,
    InternalError,
    RequestError,
    SlowClientError,
    is_failure,
)
from cluster.gateway.announcement import Announcement
from cluster.gateway.output_buffer import MAX_UNREAD, OutputBuffer, UnreadOutput
from cluster.gateway.request_state import RequestPhase, RequestState
from cluster.gateway.sample_output import Output
from cluster.metrics.ended_request import NO_RELATIVE, Relative, Summary
from cluster.text.preprocess import PreparedRequest
from cluster.text.sample_text import SampleText
from kvtransfer.common.clock import Clock
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.common.weak_calls import weakly
from kvtransfer.messages import ReplicaIdentity
from router.errors import NoReplicaError
from router.messages import Decision, RouteRequest
from workers.messages.link import Announce, Cancel, HandOverTarget, Move, Submission

Args = TypeVarTuple("Args")

_log = logging.getLogger(__name__)


class Connections(Protocol):
    """The part of `cluster.gateway.replica_connections.ReplicaConnections` that a request needs."""

    def target(self, replica_id: str) -> HandOverTarget | None:
        """Return the connected replica of this id, or None."""

    def send(self, replica: ReplicaIdentity, message: Announce | Submission | Cancel | Move) -> bool:
        """Queue the message for this epoch of the replica. Return False if it is not connected."""

    def release(self, request_id: str) -> None:
        """Note that the request's attempt is over, or that its stream does not move: it is the
        probe of no circuit breaker any more."""


class Router(Protocol):
    """The part of `router.service.RouterService` that a request needs."""

    def route_move(self, request: RouteRequest) -> str:
        """Return the decode replica to which a running stream moves. Raises `NoReplicaError` if there is
        none."""

    def with_misses(
        self, decision: Decision, block_keys: tuple[bytes, ...], num_prompt_tokens: int
    ) -> Decision:
        """Return the decision with the reasons for the prompt's blocks that are computed."""

    def on_refused(self, replica_id: str) -> None:
        """Note that the replica has no capacity now."""

    def on_prefilled(self, request_id: str, steps_s: float = 0.0) -> None: ...

    def on_finished(self, request_id: str) -> None: ...


class RetryPlacement(Protocol):
    """The part of `cluster.admission.retries.Retries` that a request needs."""

    def wait_for_capacity(self, queued: QueuedRequest, request: RouteRequest) -> None:
        """Let a request that a replica has refused wait for capacity, and report the outcome, now or later.
        Raises `NoReplicaError`."""

    def send(self, queued: QueuedRequest, request: RouteRequest) -> None:
        """Route the request and report `Released` at once. Raises `NoReplicaError`."""


class PlacementQueue(Protocol):
    """The part of `cluster.admission.admission.RequestAdmission` that a request needs."""

    @property
    def bytes(self) -> QueuedBytes:
        """The count of the bytes of requests that are not submitted yet."""

    @property
    def retries(self) -> RetryPlacement:
        """The placement of requests that were submitted before."""

    def place(self, queued: QueuedRequest, request: RouteRequest) -> None:
        """Queue the request for a replica. Raises `NoReplicaError` if there is none."""

    def wait(self, queued: QueuedRequest) -> None:
        """Report the outcome of a queued request, now or later."""


@contextlib.contextmanager
def ended_by_faults(task: RequestTask) -> Iterator[None]:
    """End a request that has begun if the block raises, since nobody would read its output."""
    try:
        yield
    except BaseException:
        task.abandon(InternalError())
        raise


class RequestStart(NamedTuple):
    """A request that begins, with one of `texts` for each sample. Times are in monotonic seconds. Replicas
    serve requests in order of `due_at` (None: of the arrival there, plus the delay of the class)."""

    prepared: PreparedRequest
    texts: Sequence[SampleText]
    started_at: float
    due_at: float | None = None
    relative: Relative = NO_RELATIVE


class RequestTask:
    """Runs one `RequestState` to its end, and carries out its effects.

    A transition always runs to completion. If one of its effects causes another transition at once (a
    connection that is gone, a client that is cut off), that one waits in `_transitions`, so no effect
    re-enters the machine. Routing waits in `_routings` for the same reason, and because it may release other
    requests, which must not be sent before this one.
    """

    def __init__(
        self,
        start: RequestStart,
        queued: QueuedRequest,
        *,
        connections: Connections,
        router: Router,
        clock: Clock,
        admission: PlacementQueue,
        unread: UnreadOutput,
        on_end: Callable[[RequestError | None], None],
    ) -> None:
        """`queued` is the request as `admission` sees it. `unread` counts the output that the clients of all
        requests have not read yet. `on_end` is called once, with the error of a request that failed."""
        # The parts call this object through weak references: a request that is over is in no reference cycle,
        # and its memory is freed at once.
        self.state = RequestState(
            start.prepared, start.texts, weakref.proxy(self), start.started_at, start.due_at
        )
        self.relative = start.relative
        self._request_id = start.prepared.request_id
        self._connections = connections
        self._router = router
        self._clock = clock
        self._on_end = on_end
        self._admission = admission
        self._queued = queued
        self._announcement = Announcement(
            connections, start.prepared.facts.sharing_group, weakly(self._start_timer), weakly(self._act)
        )
        self._unread = unread
        self._buffer = OutputBuffer(unread, weakly(self._cut_off))
        self._timers = SupervisedTasks()
        self._transitions: deque[Callable[[float], None]] = deque()
        self._routings: deque[Callable[[], None]] = deque()
        self._is_applying = False
        self._has_ended = False

    @property
    def waiting_since(self) -> float | None:
        """The time since which the request waits for its first output. None: it has output, or it resumed a
        stream with output and was submitted at once."""
        if self._queued.goes_at_once:
            return None
        has_output = self.state.num_output_tokens > self.state.prepared.num_resumed_tokens
        return None if has_output else self._queued.arrived_at

    def begin(self) -> None:
        """Start the state machine, and the timer of the deadline."""
        self._queued.report = weakly(self._on_outcome)
        self._queued.announcer = self._announcement
        self._queued.on_close(self._announcement.withdraw, self._request_id)
        deadline_at = self.state.prepared.deadline_at
        if deadline_at is not None:
            self._start_timer(deadline_at - self._clock.now(), partial(self.apply, self.state.on_deadline))
        self.apply(self.state.start)

    async def next(self) -> Output | Summary:
        """Return the next output, or, after all of it, the summary. Raises the error of a failed request."""
        return await self._buffer.get()

    def reading(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Enclose all reading of output and writing to the client. `SlowClientError` ends the block when the
        client is cut off."""
        return self._buffer.reading()

    def summary(self) -> Summary:
        """Summarize the request so far."""
        return self.state.summary(self._clock.now())

    def abandon(self, error: RequestError | None = None) -> None:
        """Cancel the request wherever it is, since its client left (`error` None) or for this error. Does
        nothing to a request that has ended."""
        self.apply(self.state.on_cancel, error or AbandonedError("the client cancelled the call"))
        if error is None:
            self._buffer.discard()
            self._buffer.release()

    def apply(self, transition: Callable[[*Args, float], None], *args: *Args) -> None:
        """Run a transition of `state`, at once or after the one that runs now. An exception ends this request
        and no other."""
        if self._is_applying:
            self._transitions.append(lambda now: transition(*args, now))
            return
        self._is_applying = True
        try:
            try:
                transition(*args, self._clock.now())
            except BaseException as error:
                self._broke(error)
            while self._transitions:
                try:
                    self._transitions.popleft()(self._clock.now())
                except BaseException as error:
                    self._broke(error)
        finally:
            self._is_applying = False
        while self._routings and not self._is_applying:
            self._act(self._routings.popleft())

    def _act(self, act: Callable[[], None]) -> None:
        """Do work that is no transition. As in `apply`, an exception ends this request and no other."""
        try:
            act()
        except BaseException as error:
            self._broke(error)

    def _broke(self, error: BaseException) -> None:
        """End a request in which a fault has occurred: for its client in any case, and at its replicas as far
        as possible."""
        if not is_failure(error):
            raise error
        _log.error(
            "request %s broke", self._request_id, exc_info=error, extra={"request_id": self._request_id}
        )
        self._transitions.clear()
        self._routings.clear()
        end = InternalError()
        try:
            self.state.on_cancel(end, self._clock.now())
            if not self._has_ended:
                self._end(end, end)
        except BaseException as again:
            if not is_failure(again):
                raise
            _log.error("request %s did not end cleanly", self._request_id, exc_info=again)
            if not self._has_ended:
                self._end(end, end)

    # ------------------------------------------------------------ effects (cluster.gateway.request_state)

    def route(self, request: RouteRequest, delay_s: float, *, needs_capacity: bool = False) -> None:
        self._admission.bytes.count(self._queued, self._queued.num_bytes)
        act = partial(self._route, request, needs_capacity)
        if delay_s <= 0:
            self._routings.append(act)
        else:
            self._start_timer(delay_s, act)

    def submit(self, replica: ReplicaIdentity, submission: Submission) -> None:
        if not self._connections.send(replica, submission):
            self.apply(self.state.on_unsent, replica)

    def cancel(self, replica: ReplicaIdentity, cancel: Cancel) -> None:
        self._connections.send(replica, cancel)

    def schedule_move(self, delay_s: float) -> None:
        act = partial(self.apply, self.state.on_move_time)
        if delay_s <= 0:
            act()
        else:
            self._start_timer(delay_s, act)

    def route_move(self, request: RouteRequest) -> None:
        target = None
        with contextlib.suppress(NoReplicaError):
            target = self._connections.target(self._router.route_move(request))
            if target is None:  # it has just gone
                self.release_placement()
        self.apply(self.state.on_move_routed, target)

    def move(self, replica: ReplicaIdentity, order: Move) -> None:
        self._connections.send(replica, order)

    def confirm_placement(self, steps_s: float = 0.0) -> None:
        self._router.on_prefilled(self._request_id, steps_s)

    def release_placement(self) -> None:
        self._connections.release(self._request_id)
        self._router.on_finished(self._request_id)

    def emit(self, delta: Output) -> None:
        self._buffer.put(delta)
        if self._buffer.num_unread > MAX_UNREAD:
            self.abandon(
                SlowClientError(f"more than {MAX_UNREAD} tokens wait for the client to read them", 0.0)
            )

    def finish(self, summary: Summary) -> None:
        self._end(summary, None)

    def fail(self, error: RequestError) -> None:
        self._end(error, error)

    def _end(self, end: Summary | RequestError, error: RequestError | None) -> None:
        self._has_ended = True
        with contextlib.ExitStack() as steps:  # the last one first, each of them, whatever another raises
            on_end, self._on_end = self._on_end, _has_been_told
            steps.callback(on_end, error)
            steps.callback(self._buffer.close, end)
            steps.callback(self._timers.cancel)
            steps.callback(self._queued.close)

    def _cut_off(self) -> None:
        """End the stream, since the largest part of the gateway's unread output waits for this client. The
        request itself may have ended already."""
        num_mb = self._unread.max_bytes / 1e6
        what = f"more than {num_mb:g} MB of output wait in this gateway, most of it for this client"
        self.apply(self._cut, SlowClientError(what, 0.0))

    def _cut(self, error: SlowClientError, now: float) -> None:
        if self.state.phase is RequestPhase.ENDED:
            self._buffer.close(error)
        else:
            self.state.on_cancel(error, now)

    # ------------------------------------------------------------------------------------- placement

    def _route(self, request: RouteRequest, needs_capacity: bool) -> None:
        """Let the request wait in `admission`: a new one for its turn, one that a replica has refused for
        capacity. Any other is submitted at once."""
        if self.state.phase is not RequestPhase.ROUTING:
            return
        admission, queued = self._admission, self._queued
        try:
            if not (self.state.attempt or queued.goes_at_once):
                admission.place(queued, request)
                self.state.on_placed()
                admission.wait(queued)
            elif needs_capacity:
                admission.retries.wait_for_capacity(queued, request)
            else:
                admission.retries.send(queued, request)
        except NoReplicaError as error:
            self.apply(self.state.on_no_route, str(error), error.retry_after_s)
        except RequestError as error:
            self.apply(self.state.on_cancel, error)

    def _on_outcome(self, outcome: Outcome) -> None:
        """Carry out the decision of admission (`QueuedRequest.report`)."""
        if isinstance(outcome, Released):
            self._act(partial(self._submit_to, outcome.decision))
        elif isinstance(outcome, Refused):
            self.apply(self.state.on_cancel, outcome.error)
        else:
            self._act(partial(self._announcement.withdraw, self._request_id))
            self.apply(self.state.on_no_route, *outcome)

    def _submit_to(self, decision: Decision) -> None:
        prefill = self._connections.target(decision.prefill) if decision.prefill else None
        decode = self._connections.target(decision.decode)
        if decode is None or (decision.prefill and prefill is None):
            self.release_placement()
            self._announcement.withdraw(self._request_id)
            self.apply(self.state.on_no_route, "the chosen replica has just gone", 1.0)
            return
        self._announcement.submitted((prefill or decode).identity, self._request_id)
        computes = prefill.identity if prefill is not None and prefill != decode else None
        prepared = self.state.prepared
        decision = self._router.with_misses(decision, prepared.block_keys, prepared.num_prompt_tokens)
        self.apply(self.state.on_routed, decision, computes, decode)

    # ------------------------------------------------------------------------------------------ private

    def _start_timer(self, delay_s: float, act: Callable[[], None]) -> None:
        async def wait() -> None:
            await self._clock.sleep(max(0.0, delay_s))
            self._act(act)

        self._timers.spawn(wait(), "request-timer")


def _has_been_told(error: RequestError | None) -> None:
    raise AssertionError(f"a request ends once, and not again with {error!r}")
