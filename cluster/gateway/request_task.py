"""One running request: asks the router, writes to the replicas, keeps the timers, and buffers the output.

One `RequestTask` per request; everything happens on the gateway's event loop, without locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Protocol, TypeVarTuple

from msgspec.structs import replace

from cluster.admission.admission import RequestAdmission
from cluster.admission.held import Candidacy, HeldRequest
from cluster.admission.lane import ByteHold
from cluster.admission.retries import CAPACITY_WAIT_S, Retry
from cluster.errors import AbandonedError, OverloadedError, RequestError, SlowClientError
from cluster.gateway.attempt import EmbeddingDelta, Output, OutputDelta, PromptLogprobsDelta
from cluster.gateway.request_state import RequestPhase, RequestState
from cluster.metrics.ended_request import Summary
from cluster.text.output_parsers.pieces import joined_calls
from cluster.text.preprocess import PreparedRequest
from cluster.text.sample_text import SampleText
from kvtransfer.blocks.keys import TOKEN_BYTES
from kvtransfer.common.clock import Clock
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.messages import ReplicaIdentity
from router.errors import NoReplicaError
from router.messages import Decision, RouteRequest
from workers.messages.link import Announce, Cancel, HandOverTarget, Move, Submission

# Tokens, each with its log-probabilities counted too, that one stream holds for a client that does not read.
# A slower client is cut off with RESOURCE_EXHAUSTED; no other stream waits for it meanwhile.
MAX_UNREAD = 65536
# The same of what waits and is sent as one message.
MAX_MERGED = 4096
# What output takes in memory: a delta beside its texts, a log-probability, and an alternative to its token.
_DELTA_BYTES = 176
_LOGPROB_BYTES = 112
_TOP_BYTES = 120
# A part of a tool call beside its arguments.
_CALL_BYTES = 240

Args = TypeVarTuple("Args")


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


class WaitingOutput(Protocol):
    """What waits for one client: an `OutputBuffer`, or an answer that is kept until it is whole."""

    @property
    def num_unread_bytes(self) -> int:
        """How much is counted now: what waits, and what was taken and may not be read yet."""

    @property
    def cut_off(self) -> Callable[[], None]:
        """Drops what is counted, and ends the request."""


class UnreadOutput:
    """All output of a gateway that waits for clients to read it, bounded in bytes together: beyond
    `max_bytes` the slowest reader is cut off, who has most bytes to read."""

    def __init__(self, max_bytes: float) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._waiting: set[WaitingOutput] = set()

    def added(self, output: WaitingOutput, num_bytes: int) -> None:
        """Count bytes that wait from now on."""
        self.num_bytes += num_bytes
        self._waiting.add(output)
        if self.num_bytes > self.max_bytes:
            max(self._waiting, key=lambda it: it.num_unread_bytes).cut_off()

    def removed(self, output: WaitingOutput, num_bytes: int) -> None:
        """Count bytes that were read, or dropped."""
        self.num_bytes -= num_bytes
        if not output.num_unread_bytes:
            self._waiting.discard(output)


class OutputBuffer:
    """Output on its way to the client. What was read of the prompt comes first. Tokens that wait are merged
    per sample, so a slow reader gets fewer, longer deltas; the end comes last. What was taken last counts as
    unread until the next is asked for, or the reader is cut off, which ends what it does in `reading`."""

    def __init__(self, unread: UnreadOutput, cut_off: Callable[[], None]) -> None:
        """`cut_off` is called when this is the slowest reader, and too much waits."""
        self.cut_off = cut_off
        self._unread = unread
        self._of_prompt: deque[PromptLogprobsDelta | EmbeddingDelta] = deque()
        self._waiting: dict[int, deque[OutputDelta]] = {}
        self._end: Summary | RequestError | None = None
        self._ready = asyncio.Event()
        self._scope: asyncio.Timeout | None = None
        self._num_taken_bytes = 0
        self.num_unread = 0
        self.num_waiting_bytes = 0

    @property
    def num_unread_bytes(self) -> int:
        """How much waits, with what was taken last."""
        return self.num_waiting_bytes + self._num_taken_bytes

    def put(self, delta: Output) -> None:
        """Append output of one sample, or what was read of the prompt."""
        if isinstance(delta, OutputDelta):
            self._waiting.setdefault(delta.sample, deque()).append(delta)
            self.num_unread += _weight(delta)
        else:
            self._of_prompt.append(delta)
        self._ready.set()
        num_bytes = _num_bytes(delta)
        self.num_waiting_bytes += num_bytes
        self._unread.added(self, num_bytes)

    def close(self, end: Summary | RequestError) -> None:
        """Append the end; `SlowClientError` drops what waits before it, and ends what is done in `reading`,
        so that what was taken is dropped too."""
        if isinstance(end, SlowClientError) and not isinstance(self._end, SlowClientError):
            self.discard()
            self.release()
            if self._scope is not None:
                self._scope.reschedule(asyncio.get_running_loop().time())
        self._end = end
        self._ready.set()

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Read within: when the reader is cut off, what is done here ends with `SlowClientError`, also a
        write that waits for the client."""
        is_cut_off = isinstance(self._end, SlowClientError)
        try:
            async with asyncio.timeout(0.0 if is_cut_off else None) as self._scope:
                yield
        except TimeoutError:
            if not isinstance(self._end, SlowClientError):
                raise
            # Not `_end` itself, which would keep what was taken: its traceback leads there.
            raise SlowClientError(str(self._end), self._end.retry_after_s) from None
        finally:
            self._scope = None

    def discard(self) -> None:
        """Drop what waits: nobody will read it."""
        self._of_prompt.clear()
        self._waiting.clear()
        num_bytes, self.num_waiting_bytes, self.num_unread = self.num_waiting_bytes, 0, 0
        self._unread.removed(self, num_bytes)

    def release(self) -> None:
        """Count what was taken last as read."""
        num_bytes, self._num_taken_bytes = self._num_taken_bytes, 0
        self._unread.removed(self, num_bytes)

    async def get(self) -> Output | Summary:
        """Return the next output, at last the summary, or raise the error; the end again and again."""
        self.release()
        await self._ready.wait()
        if self._of_prompt or self._waiting:
            output = self._next()
            if not (self._of_prompt or self._waiting) and self._end is None:
                self._ready.clear()
            return output
        assert self._end is not None
        if isinstance(self._end, RequestError):
            raise self._end
        return self._end

    def _next(self) -> Output:
        """Take what is read next."""
        if not self._of_prompt:
            return _merged(self._take())
        output = self._of_prompt.popleft()
        self._taken(_num_bytes(output))
        return output

    def _taken(self, num_bytes: int) -> None:
        self.num_waiting_bytes -= num_bytes
        self._num_taken_bytes += num_bytes

    def _take(self) -> list[OutputDelta]:
        """Take what waits of the sample whose turn it is, as much as goes into one message."""
        sample = next(iter(self._waiting))
        queue = self._waiting.pop(sample)
        deltas: list[OutputDelta] = []
        weight = 0
        while queue and (not deltas or weight + _weight(queue[0]) <= MAX_MERGED):
            deltas.append(queue.popleft())
            weight += _weight(deltas[-1])
        if queue:  # the other samples have their turns first
            self._waiting[sample] = queue
        self.num_unread -= weight
        self._taken(sum(map(_num_bytes, deltas)))
        return deltas


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
        self.state = RequestState(prepared, texts, self, started_at, due_at)
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
        self._buffer = OutputBuffer(unread, self._cut_off)
        self._timers = SupervisedTasks()
        self._due: deque[Callable[[float], None]] = deque()
        self._later: deque[Callable[[], None]] = deque()
        self._is_applying = False

    @property
    def waiting_since(self) -> float | None:
        """Since when it has waited for output; None: it has some, or came with some, and went at once."""
        if self._candidacy is None:
            return None
        num_claimed = sum(len(sample.output) for sample in self.state.prepared.samples) // TOKEN_BYTES
        return None if self.state.num_output_tokens > num_claimed else self._candidacy.arrived_at

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
        """Run a transition of `state`, at once or after the one that runs."""
        if self._is_applying:
            self._due.append(lambda now: transition(*args, now))
            return
        self._is_applying = True
        try:
            transition(*args, self._clock.now())
            while self._due:
                self._due.popleft()(self._clock.now())
        finally:
            self._is_applying = False
        while self._later and not self._is_applying:
            self._later.popleft()()

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
        if self._held is not None and self._admission is not None:
            held, self._held = self._held, None
            self._admission.drop(held)
        self._withdraw()
        if self._retry is not None and self._admission is not None:
            self._admission.retries.drop(self._retry)
        if self._queued is not None:
            self._queued.release()
        self._timers.cancel()
        self._buffer.close(end)
        self._on_end(error)

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
        self._routed(replace(held.decision, most_backlog_tokens=None) if has_waited else held.decision)

    def on_refused(self, error: OverloadedError) -> None:
        """End the request, which has waited too long for its turn."""
        self._held = None
        self.apply(self.state.on_cancel, error)

    def on_moved(self, held: HeldRequest) -> None:
        """Let the replica that will compute the prompt now load what is stored of it."""
        self._await_bound(held)
        self._announce(held)

    def on_unplaced(self, reason: str, retry_after_s: float) -> None:
        """Ask admission again later, while patience lasts."""
        self._held = None
        self._withdraw()
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
            act()

        self._timers.spawn(wait(), "request-timer")


def _weight(delta: OutputDelta) -> int:
    return len(delta.tokens) // TOKEN_BYTES + sum(1 + len(it.top) for it in delta.logprobs)


def _num_bytes(delta: Output) -> int:
    if isinstance(delta, PromptLogprobsDelta):
        return _DELTA_BYTES + delta.logprobs.num_bytes
    if isinstance(delta, EmbeddingDelta):
        return _DELTA_BYTES + len(delta.vector)
    num_top = sum(len(it.top) for it in delta.logprobs)
    logprob_bytes = len(delta.logprobs) * _LOGPROB_BYTES + num_top * _TOP_BYTES
    call_bytes = sum(_CALL_BYTES + sys.getsizeof(call.arguments) for call in delta.tool_calls)
    text_bytes = sys.getsizeof(delta.text) + sys.getsizeof(delta.reasoning)
    return _DELTA_BYTES + len(delta.tokens) + text_bytes + logprob_bytes + call_bytes


def _merged(deltas: list[OutputDelta]) -> OutputDelta:
    if len(deltas) == 1:
        return deltas[0]
    return OutputDelta(
        sample=deltas[0].sample,
        first_index=deltas[0].first_index,
        tokens=b"".join(delta.tokens for delta in deltas),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(item for delta in deltas for item in delta.logprobs),
        finish=deltas[-1].finish,
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=joined_calls(call for delta in deltas for call in delta.tool_calls),
        matched_stop=deltas[-1].matched_stop,
    )
