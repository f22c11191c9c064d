"""One running request: asks the router, writes to the replicas, keeps the timers, and buffers the output.

One `RequestTask` per request; everything happens on the gateway's event loop, without locks.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeVarTuple

from msgspec.structs import replace

from cluster.admission.admission import RequestAdmission
from cluster.admission.held import Candidacy, HeldRequest
from cluster.admission.queued_bytes import ByteHold
from cluster.admission.retries import CAPACITY_WAIT_S, Retry
from cluster.errors import (
    AbandonedError,
    InternalError,
    OverloadedError,
    RequestError,
    SlowClientError,
    is_failure,
)
from cluster.gateway.output_buffer import MAX_UNREAD, OutputBuffer, UnreadOutput
from cluster.gateway.request_state import RequestPhase, RequestState
from cluster.gateway.sample_output import Output
from cluster.metrics.ended_request import Summary
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
    """What a request needs of `cluster.gateway.replica_connections.ReplicaConnections`."""

    def target(self, replica_id: str) -> HandOverTarget | None:
        """Return the connected replica of this id; None when there is none."""

    def send(self, replica: ReplicaIdentity, message: Announce | Submission | Cancel | Move) -> bool:
        """Queue the message for this life of the replica; False when it is not connected."""

    def release(self, request_id: str) -> None:
        """Note that the request's attempt is over, or that its stream does not move: it probes no replica."""


# Replicas forget what was announced to them 30 s ago.
ANNOUNCE_AGAIN_S = 20.0
# A request that was submitted later after it was placed has waited.
AT_ONCE_S = 0.005


class Router(Protocol):
    """What a request needs of `router.service.RouterService`."""

    def route(
        self,
        request: RouteRequest,
        *,
        is_held: bool = False,
        held_part: float = 1.0,
        prefers_capacity: bool = False,
    ) -> Decision:
        """Place the request; `NoReplicaError` when there is no place."""

    def route_move(self, request: RouteRequest) -> str:
        """Return the decode replica that a running stream must move to; `NoReplicaError` without one."""

    def on_refused(self, replica_id: str) -> None:
        """Note that the replica has no capacity now."""

    def on_prefilled(self, request_id: str) -> None: ...

    def on_finished(self, request_id: str) -> None: ...


@contextlib.contextmanager
def ended_by_faults(task: RequestTask) -> Iterator[None]:
    """End a request that has begun when anything is raised within, before somebody reads its output."""
    try:
        yield
    except BaseException:
        task.abandon(InternalError())
        raise


class RequestTask:
    """Runs one `RequestState` to its end, and carries out its effects.

    Transitions run to completion: what an effect leads to at once (a connection that is gone, a client that
    is cut off) waits in `_due` until the transition has returned. So no effect re-enters the machine. Routing
    waits for that too, in `_later`: it may release other requests, before which this one must be sent.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        texts: Sequence[SampleText],
        *,
        connections: Connections,
        router: Router,
        clock: Clock,
        on_end: Callable[[RequestError | None], None],
        started_at: float,
        unread: UnreadOutput,
        admission: RequestAdmission | None = None,
        candidacy: Candidacy | None = None,
        held: HeldRequest | None = None,
        queued: ByteHold | None = None,
        due_at: float | None = None,
    ) -> None:
        """`unread` counts what waits for the clients of all requests; `held` is the place that `admission`
        has found for the request, where it may have to wait, with its `candidacy`; None: it is not judged.
        `queued` counts its bytes while it is not submitted."""
        # Its parts call it back weakly: a request that is over is in no cycle, and goes at once.
        self.state = RequestState(prepared, texts, weakref.proxy(self), started_at, due_at)
        self._request_id = prepared.request_id
        self._connections = connections
        self._router = router
        self._clock = clock
        self._on_end = on_end
        self._admission = admission
        self._candidacy = candidacy
        self._held = held
        self._queued = queued
        self._retry: Retry | None = None
        # Where a prompt that waits was announced.
        self._announced_to: ReplicaIdentity | None = None
        self._unread = unread
        self._buffer = OutputBuffer(unread, weakly(self._cut_off))
        self._timers = SupervisedTasks()
        self._due: deque[Callable[[float], None]] = deque()
        self._later: deque[Callable[[], None]] = deque()
        self._is_applying = False
        self._has_ended = False

    @property
    def waiting_since(self) -> float | None:
        """Since when it has waited for output; None: it has some, or came with some, and went at once."""
        if self._candidacy is None:
            return None
        has_output = self.state.num_output_tokens > self.state.prepared.num_resumed_tokens
        return None if has_output else self._candidacy.arrived_at

    def begin(self) -> None:
        """Start the state machine and the deadline's timer."""
        deadline_at = self.state.prepared.deadline_at
        if deadline_at is not None:
            self._start_timer(deadline_at - self._clock.now(), partial(self.apply, self.state.on_deadline))
        self.apply(self.state.start)

    async def next(self) -> Output | Summary:
        """Return the next output, or the summary after all of it; raise the error of a failed request."""
        return await self._buffer.get()

    def reading(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Read within, and write to the client: `SlowClientError` ends that when the client is cut off."""
        return self._buffer.reading()

    def summary(self) -> Summary:
        """Summarize the request, or as much of it as has happened."""
        return self.state.summary(self._clock.now())

    def abandon(self, error: RequestError | None = None) -> None:
        """Stop the work wherever it is: nobody waits for the output any more. Does nothing after the end."""
        self.apply(self.state.on_cancel, error or AbandonedError("the client cancelled the call"))
        if error is None:
            self._buffer.discard()
            self._buffer.release()

    def apply(self, transition: Callable[[*Args, float], None], *args: *Args) -> None:
        """Run a transition of `state`, at once or after the one that runs. Whatever is raised within ends
        this request alone."""
        self._due.append(lambda now: transition(*args, now))
        if self._is_applying:
            return
        self._is_applying = True
        try:
            while self._due:
                try:
                    self._due.popleft()(self._clock.now())
                except BaseException as error:
                    self._broke(error)
        finally:
            self._is_applying = False
        while self._later and not self._is_applying:
            self._act(self._later.popleft())

    def _act(self, act: Callable[[], None]) -> None:
        """Do what is no transition; as in `apply`, what is raised within ends this request alone."""
        try:
            act()
        except BaseException as error:
            self._broke(error)

    def _broke(self, error: BaseException) -> None:
        """End the request, which a fault has broken: at its replicas as far as that is possible, and for its
        client in any case."""
        if not is_failure(error):
            raise error
        _log.error(
            "request %s broke", self._request_id, exc_info=error, extra={"request_id": self._request_id}
        )
        self._due.clear()
        self._later.clear()
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
        if self._queued is not None:
            self._queued.renew()
        act = partial(self._route, request, needs_capacity=needs_capacity)
        if delay_s <= 0:
            self._later.append(act)
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

    def confirm_placement(self) -> None:
        self._router.on_prefilled(self._request_id)

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
            if self._queued is not None:
                steps.callback(self._queued.release)
            if self._retry is not None and self._admission is not None:
                retry, self._retry = self._retry, None
                steps.callback(self._admission.retries.drop, retry)
            steps.callback(self._withdraw)
            if self._held is not None and self._admission is not None:
                held, self._held = self._held, None
                steps.callback(self._admission.drop, held)

    def _cut_off(self) -> None:
        """End the stream, for whose client most of the unread output of the gateway waits; also when the
        request has ended, but what it brought was not read."""
        num_mb = self._unread.max_bytes / 1e6
        what = f"more than {num_mb:g} MB of output wait in this gateway, most of it for this client"
        self.apply(self._cut, SlowClientError(what, 0.0))

    def _cut(self, error: SlowClientError, now: float) -> None:
        if self.state.phase is RequestPhase.ENDED:
            self._buffer.close(error)
        else:
            self.state.on_cancel(error, now)

    def _route(self, request: RouteRequest, *, needs_capacity: bool = False) -> None:
        if self.state.phase is not RequestPhase.ROUTING:
            return
        if self._admission is not None and self._candidacy is not None and not self.state.attempt:
            self._wait_for_turn(self._admission, self._candidacy, request)
            return
        waits = needs_capacity and self._admission is not None
        try:
            decision = self._router.route(
                request, is_held=waits, held_part=0.0, prefers_capacity=needs_capacity
            )
        except NoReplicaError as error:
            self.apply(self.state.on_no_route, str(error), error.retry_after_s)
            return
        if waits:
            self._wait_for_capacity(request, decision)
        else:
            self._routed(decision)

    def _wait_for_turn(
        self, admission: RequestAdmission, candidacy: Candidacy, request: RouteRequest
    ) -> None:
        """Submit a request that was never sent when admission releases it, which finds a place first where
        there was none."""
        if self._held is None:
            try:
                self._held = admission.admit(request, candidacy)
            except NoReplicaError as error:
                self.apply(self.state.on_no_route, str(error), error.retry_after_s)
                return
            except RequestError as error:
                self.apply(self.state.on_cancel, error)
                return
            self.state.on_placed()
        self._candidacy = candidacy._replace(is_accepted=True)
        self._await_bound(self._held)
        admission.hold(self._held, self)
        if self._held is not None:
            self._announce(self._held)
            self._repeat_announcement(self._held)

    def _wait_for_capacity(self, request: RouteRequest, decision: Decision) -> None:
        """Submit the request, which a replica has refused, when the chosen pair can take it; after
        `CAPACITY_WAIT_S` wherever it costs least."""
        assert self._admission is not None
        retries = self._admission.retries

        def route_anyway() -> None:
            if retries.drop(retry):
                self._route(request)

        def reroute(_: Retry) -> None:
            self.release_placement()
            self._route(request, needs_capacity=True)

        self._retry = retry = Retry(decision, lambda it: self._routed(it.decision), reroute)
        self._start_timer(CAPACITY_WAIT_S, route_anyway)
        retries.hold(retry)

    # ------------------------------------------------ effects of admission (cluster.admission.admission)

    def on_released(self, held: HeldRequest) -> None:
        """Submit the request, which has waited for its turn. What was known of other replicas when it was
        placed holds only for one that did not wait."""
        self._held = None
        has_waited = self._clock.now() > held.routed_at + AT_ONCE_S
        decision = replace(held.decision, most_backlog_tokens=None) if has_waited else held.decision
        self._act(partial(self._routed, decision))

    def on_refused(self, error: OverloadedError) -> None:
        """End the request, which has waited too long for its turn."""
        self._held = None
        self.apply(self.state.on_cancel, error)

    def on_moved(self, held: HeldRequest) -> None:
        """Let the replica that will compute the prompt now load what is stored of it."""
        self._await_bound(held)
        self._act(partial(self._announce, held))

    def on_unplaced(self, reason: str, retry_after_s: float) -> None:
        """Ask admission again later, while patience lasts."""
        self._held = None
        self._act(self._withdraw)
        self.apply(self.state.on_no_route, reason, retry_after_s)

    # ------------------------------------------------------------------------------------------ private

    def _await_bound(self, held: HeldRequest) -> None:
        """Let admission refuse the request when it has waited for as long as it may."""
        if self._admission is not None:
            self._start_timer(held.refused_at - self._clock.now(), self._admission.pump)

    def _repeat_announcement(self, held: HeldRequest) -> None:
        """Announce the request again while it waits: what nobody repeats is forgotten at a replica."""

        def again() -> None:
            if self._held is held:
                self._announce(held)
                self._repeat_announcement(held)

        if held.request.block_keys:
            self._start_timer(ANNOUNCE_AGAIN_S, again)

    def _announce(self, held: HeldRequest) -> None:
        """Let the replica that will compute the prompt load meanwhile what is stored of it, and no other."""
        request, decision = held.request, held.decision
        target = self._connections.target(decision.compute_id)
        if self._announced_to is not None and (target is None or target.identity != self._announced_to):
            self._withdraw()
        if target is None or not request.block_keys:
            return
        group = self.state.prepared.sharing_group
        announce = Announce(request.request_id, group, request.num_tokens, request.block_keys)
        if self._connections.send(target.identity, announce):
            self._announced_to = target.identity

    def _withdraw(self) -> None:
        """The prompt that was announced, if any, does not come."""
        if self._announced_to is not None:
            replica, self._announced_to = self._announced_to, None
            self._connections.send(replica, Cancel(self._request_id, 0))

    def _routed(self, decision: Decision) -> None:
        prefill = self._connections.target(decision.prefill) if decision.prefill else None
        decode = self._connections.target(decision.decode)
        if decode is None or (decision.prefill and prefill is None):
            self.release_placement()
            self._withdraw()
            self.apply(self.state.on_no_route, "the chosen replica has just gone", 1.0)
            return
        if self._announced_to != (prefill or decode).identity:
            self._withdraw()
        self._announced_to = None
        if self._queued is not None:
            self._queued.release()
        computes = prefill.identity if prefill is not None and prefill != decode else None
        self.apply(self.state.on_routed, decision, computes, decode)

    def _start_timer(self, delay_s: float, act: Callable[[], None]) -> None:
        async def wait() -> None:
            await self._clock.sleep(max(0.0, delay_s))
            self._act(act)

        self._timers.spawn(wait(), "request-timer")


def _has_been_told(error: RequestError | None) -> None:
    raise AssertionError(f"a request ends once, and not again with {error!r}")
