"""Probes of circuit breakers against the attempts of requests: a probe is over when its attempt is, however
that ends. Requests and breakers are real; Links and router are stand-ins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

from admission_at_once import AdmissionAtOnce, request_at_once
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from request_state_harness import D0, D1, P0, Letters, decision, raw
from slow_cases import examples

from cluster.gateway.circuit_breaker import NUM_FAILURES, STALLED_S, CircuitBreakers
from cluster.gateway.output_buffer import UnreadOutput
from cluster.gateway.request_state import RequestPhase
from cluster.gateway.request_task import RequestStart, RequestTask
from cluster.text.preprocess import PreparedRequest, SampleStart
from cluster.text.sample_text import SampleText
from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.request_facts import RequestFacts
from router.errors import NoReplicaError
from router.messages import Decision, RouteRequest
from workers.messages.link import (
    Announce,
    Cancel,
    HandOverReport,
    HandOverTarget,
    Move,
    PrefillReport,
    RequestFailed,
    StageTimes,
    Submission,
    TokenDelta,
)
from workers.messages.sampling import SamplingParams

REPLICAS = (P0, D0, D1)
FailureCode = Literal["internal", "refused", "crowded", "peer", "leaving", "deadline"]
FAILURE_CODES: tuple[FailureCode, ...] = get_args(FailureCode)
_MAX_TOKENS = 1 << 20


class Gateway:
    """Links to the replicas of `linked`, and a router that avoids those that are not usable."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.linked = set(REPLICAS)
        self.usable = {replica.replica_id: True for replica in REPLICAS}
        self.preferred = D0
        self.disaggregates = True
        self.breakers = CircuitBreakers(self, lambda replica, breaker: None, 0.0)
        for replica in REPLICAS:
            self.breakers.joined(replica)
        self.tasks: dict[str, RequestTask] = {}
        # Of each request that runs: where the prompt of its last submission is computed.
        self.submitted: dict[str, tuple[ReplicaIdentity, Submission]] = {}

    def begin(self) -> None:
        """Accept one more request."""
        request_id = f"r{len(self.tasks)}"
        prepared = PreparedRequest(
            request_id=request_id,
            facts=RequestFacts(tenant="", sharing_group="", priority=0),
            prompt=raw([1, 2, 3]),
            root_key=b"",
            block_keys=(),
            sampling=SamplingParams(max_tokens=_MAX_TOKENS),
            samples=(SampleStart(0, 1),),
            deadline_at=None,
        )
        task = self.tasks[request_id] = RequestTask(
            RequestStart(prepared, [SampleText(Letters())], self.clock.now()),
            request_at_once(request_id, self.clock.now()),
            connections=self,
            router=self,
            clock=self.clock,
            admission=AdmissionAtOnce(self),
            unread=UnreadOutput(1e9),
            on_end=lambda error: None,
        )
        task.begin()

    def running(self) -> list[RequestTask]:
        return [task for task in self.tasks.values() if task.state.phase is RequestPhase.RUNNING]

    def members(self, task: RequestTask) -> tuple[ReplicaIdentity, ReplicaIdentity]:
        """Where the prompt of its attempt is computed, and where it decodes."""
        computes, submission = self.submitted[task.state.prepared.request_id]
        return computes, computes if submission.decode is None else submission.decode.identity

    # ------------------------------------------------------------------- of the connections

    def set_usable(self, replica_id: str, is_usable: bool) -> None:
        self.usable[replica_id] = is_usable

    def target(self, replica_id: str) -> HandOverTarget | None:
        return next((HandOverTarget(it, "a") for it in self.linked if it.replica_id == replica_id), None)

    def send(self, replica: ReplicaIdentity, message: Announce | Submission | Cancel | Move) -> bool:
        if replica not in self.linked:
            return False
        if isinstance(message, Submission):
            self.submitted[message.request_id] = replica, message
            self.breakers.submitted(replica, message.request_id)
            if message.decode is not None:
                self.breakers.submitted(message.decode.identity, message.request_id)
        return True

    def release(self, request_id: str) -> None:
        self.breakers.released(request_id)

    # ------------------------------------------------------------------------ of the router

    def route(
        self,
        request: RouteRequest,
        *,
        prefers_capacity: bool = False,
    ) -> Decision:
        allowed = [it for it in REPLICAS if it in self.linked and it.replica_id not in request.excluded]
        decodes = [it for it in allowed if it is not P0]
        if not decodes:
            raise NoReplicaError("nobody", 1.0)
        decode = min(decodes, key=lambda it: (not self.usable[it.replica_id], it is not self.preferred))
        prefills = self.disaggregates and P0 in allowed and self.usable["p0"]
        return decision(P0 if prefills else None, decode)

    def route_move(self, request: RouteRequest) -> str:
        raise NoReplicaError("nobody", 1.0)

    def with_misses(
        self, decision: Decision, block_keys: tuple[bytes, ...], num_prompt_tokens: int
    ) -> Decision:
        return decision

    def on_refused(self, replica_id: str) -> None: ...

    def on_prefilled(self, request_id: str, steps_s: float = 0.0) -> None: ...

    def on_finished(self, request_id: str) -> None: ...


numbers = st.integers(0, 2)
replicas = st.sampled_from(REPLICAS)


class Machine(RuleBasedStateMachine):
    """Requests whose attempts end in every way, and replicas that break, stand still, go and come."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.gateway = Gateway()

    def teardown(self) -> None:
        try:
            for task in self.gateway.tasks.values():
                self.run(task.abandon)
            self.is_no_orphan()
        finally:
            self.loop.close()

    def run(self, act: Callable[[], None]) -> None:
        """Act on the event loop, and let the timers that are due run."""

        async def acting() -> None:
            act()
            for _ in range(4):
                await asyncio.sleep(0)

        self.loop.run_until_complete(acting())

    def picked(self, number: int) -> list[RequestTask]:
        """One of the requests that run; one begins where none does, and can."""
        if not self.gateway.running():
            self.run(self.gateway.begin)
        running = self.gateway.running()
        return [running[number % len(running)]] if running else []

    @initialize(replica=replicas)
    def is_half_open(self, replica: ReplicaIdentity) -> None:
        """What may be a probe is of interest."""
        self.breaks(replica)
        self.wait(2.0)

    @rule(preferred=st.sampled_from([D0, D1]), disaggregates=st.booleans())
    def begin(self, preferred: ReplicaIdentity, disaggregates: bool) -> None:
        self.gateway.preferred, self.gateway.disaggregates = preferred, disaggregates
        self.run(self.gateway.begin)

    @rule(number=numbers, has_token=st.booleans())
    def compute(self, number: int, has_token: bool) -> None:
        """The prompt is computed, and the first token perhaps here."""
        for task in self.picked(number):
            source, _ = self.gateway.members(task)
            if source in self.gateway.linked:
                request_id, attempt = self.key(task)
                self.gateway.breakers.succeeded(source, request_id, self.gateway.clock.now())
                report = PrefillReport(request_id, attempt, 3, 0, StageTimes())
                self.run(partial(task.apply, task.state.on_prefilled, report))
                if has_token:
                    self.token(task, source)

    @rule(number=numbers, has_token=st.booleans())
    def join(self, number: int, has_token: bool) -> None:
        """The decode replica has taken the prompt over."""
        for task in self.picked(number):
            source, decode = self.gateway.members(task)
            if decode is not source and decode in self.gateway.linked:
                request_id, attempt = self.key(task)
                self.gateway.breakers.succeeded(decode, request_id, self.gateway.clock.now())
                report = HandOverReport(request_id, attempt, 0, 10, 0, "shm", 1.0, StageTimes())
                self.run(partial(task.apply, task.state.on_handed_over, decode, report))
                if has_token:
                    self.token(task, decode)

    @rule(number=numbers)
    def finish(self, number: int) -> None:
        for task in self.picked(number):
            self.token(task, self.gateway.members(task)[1], "length")

    @rule(number=numbers, code=st.sampled_from(FAILURE_CODES), is_decode=st.booleans())
    def fail(self, number: int, code: FailureCode, is_decode: bool) -> None:
        """One side of the attempt gives it up."""
        for task in self.picked(number):
            source = self.gateway.members(task)[is_decode]
            if source in self.gateway.linked:
                request_id, attempt = self.key(task)
                if code == "internal":
                    self.gateway.breakers.failed(source, request_id, "a bug", self.gateway.clock.now())
                failure = RequestFailed(request_id, attempt, code, "no")
                self.run(partial(task.apply, task.state.on_failed, source, failure))

    @rule(number=numbers)
    def cancel(self, number: int) -> None:
        for task in self.picked(number):
            self.run(task.abandon)

    @rule(replica=replicas)
    def lose(self, replica: ReplicaIdentity) -> None:
        """The Link to the replica ends."""
        if replica in self.gateway.linked:
            self.gateway.linked.discard(replica)
            self.gateway.breakers.left(replica, "reset", self.gateway.clock.now())
            for task in self.gateway.tasks.values():
                self.run(partial(task.apply, task.state.on_lost, replica, "reset"))

    @rule(replica=replicas)
    def link(self, replica: ReplicaIdentity) -> None:
        if replica not in self.gateway.linked:
            self.gateway.linked.add(replica)
            self.gateway.set_usable(replica.replica_id, True)
            self.gateway.breakers.joined(replica)

    @rule(replica=replicas, includes_streams=st.booleans())
    def stand_still(self, replica: ReplicaIdentity, includes_streams: bool) -> None:
        if replica in self.gateway.linked:
            self.gateway.breakers.reported(replica, STALLED_S, self.gateway.clock.now())
            for task in self.gateway.tasks.values():
                self.run(partial(task.apply, task.state.on_stopped, replica, "still", includes_streams))

    @rule(replica=replicas)
    def breaks(self, replica: ReplicaIdentity) -> None:
        """Requests that are of no interest fail there."""
        for _ in range(NUM_FAILURES):
            self.gateway.breakers.failed(replica, "other", "broke", self.gateway.clock.now())

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 40.0]))
    def wait(self, seconds: float) -> None:
        def act() -> None:
            self.gateway.clock.advance(seconds)
            for replica in self.gateway.linked:
                self.gateway.breakers.heard(replica)
                self.gateway.breakers.reported(replica, 0.0, self.gateway.clock.now())
            self.gateway.breakers.advance(self.gateway.clock.now())

        self.run(act)

    @invariant()
    def is_no_orphan(self) -> None:
        """Every probe is a running attempt on its replica."""
        running = {it.state.prepared.request_id: self.gateway.members(it) for it in self.gateway.running()}
        for replica in REPLICAS:
            breaker = self.gateway.breakers.of(replica)
            assert breaker is not None
            assert not breaker.probe or replica in running.get(breaker.probe, ())

    def key(self, task: RequestTask) -> tuple[str, int]:
        """The request and the number of its last submission."""
        request_id = task.state.prepared.request_id
        return request_id, self.gateway.submitted[request_id][1].attempt

    def token(self, task: RequestTask, source: ReplicaIdentity, finish: str = "") -> None:
        """The next token comes from there."""
        if task.state.phase is RequestPhase.RUNNING:
            request_id, attempt = self.key(task)
            first = task.state.num_output_tokens
            delta = TokenDelta(request_id, attempt, 0, first, raw([97]), (), finish)
            self.run(lambda: task.apply(task.state.on_delta, source, delta))


Machine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
TestMachine = Machine.TestCase
