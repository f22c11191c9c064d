"""Requests that have to wait in their gateway: with the real admission, router and breakers, before replicas
that have no capacity. They are announced to the replica that will compute them, wherever that is; and only
one of them finds out whether a replica is well again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from cluster.admission.admission import RequestAdmission
from cluster.admission.config import AdmissionConfig
from cluster.admission.flow import Flow
from cluster.admission.queued_request import QueuedRequest
from cluster.admission.retries import CAPACITY_WAIT_S
from cluster.admission.waiting_requests import REROUTE_PART
from cluster.errors import InternalError, OverloadedError, RequestError
from cluster.gateway.announcement import ANNOUNCE_AGAIN_S
from cluster.gateway.circuit_breaker import FIRST_PAUSE_S, NUM_FAILURES, BreakerState, CircuitBreakers
from cluster.gateway.output_buffer import UnreadOutput
from cluster.gateway.request_task import RequestStart, RequestTask
from cluster.gateway.submissions import first_route_request
from cluster.text.preprocess import PreparedRequest, SampleStart
from cluster.text.sample_text import SampleText
from kvtransfer.common.clock import ManualClock
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.kv_events import KvSnapshot
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.request_facts import RequestFacts
from router.config import RouterConfig
from router.errors import NoReplicaError
from router.messages import QueueState, ReplicaLoad
from router.service import RouterService
from workers.messages.link import Announce, Cancel, HandOverTarget, Move, RequestFailed, Submission
from workers.messages.sampling import SamplingParams

D0 = ReplicaIdentity("d0", 1)
KEYS = tuple(bytes([index]) * 32 for index in range(6))
NUM_TOKENS = 100
MAX_WAIT_S = 10.0


class Nothing:
    """A detokenizer that shows nothing."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Gateway:
    """Its connections to its replicas d0, d1 and so on, its router, breakers and admission."""

    def __init__(
        self, num_backlog_tokens: int, max_wait_s: float = MAX_WAIT_S, num_replicas: int = 1
    ) -> None:
        self.clock = ManualClock()
        self.sent: list[Announce | Submission | Cancel | Move] = []
        self.sent_to: list[str] = []
        self.errors: list[RequestError | None] = []
        self.gone: set[str] = set()
        self.router = RouterService(RouterConfig(), 16, self.clock, 1, salt="g")
        self.breakers = CircuitBreakers(self.router.members, lambda replica, breaker: None, 0.0)
        self.identities = [ReplicaIdentity(f"d{index}", 1) for index in range(num_replicas)]
        for identity in self.identities:
            self.router.add_replica(identity, "both")
            self.router.tree.apply_snapshot(KvSnapshot(identity, 0, ()))
            self.breakers.joined(identity)
            self.report(identity, num_backlog_tokens)
        standard = {"aging_s": 1.0, "max_wait_s": max_wait_s, "ttft_s": max_wait_s}
        config = AdmissionConfig.model_validate({"standard": standard})
        self.tasks = SupervisedTasks()
        self.admission = RequestAdmission(config, self.router, self.clock, lambda: 1, self.call_at)

    def call_at(self, at: float, call: Callable[[], None]) -> None:
        async def wait() -> None:
            await self.clock.sleep(at - self.clock.now())
            call()

        if at <= self.clock.now():
            call()
        else:
            self.tasks.spawn(wait(), "timer")

    def report(self, identity: ReplicaIdentity, num_backlog_tokens: int) -> None:
        self.router.loads.on_load(
            ReplicaLoad(
                identity=identity,
                received_at=self.clock.now(),
                num_running=0,
                num_waiting=0,
                num_landings=0,
                num_backlog_tokens=num_backlog_tokens,
                num_free_blocks=1000,
                num_total_blocks=1000,
                prefill_tok_s=1000.0,
                decode_step_s=0.01,
                transfer_tok_s=1e6,
                prefill_token_s=0.001,
                max_batch_tokens=100,
                max_sequences=10,
            )
        )

    def target(self, replica_id: str) -> HandOverTarget | None:
        return None if replica_id in self.gone else HandOverTarget(ReplicaIdentity(replica_id, 1), "a")

    def send(self, replica: ReplicaIdentity, message: Announce | Submission | Cancel | Move) -> bool:
        assert replica in self.identities
        self.sent.append(message)
        self.sent_to.append(replica.replica_id)
        if isinstance(message, Submission):
            self.breakers.submitted(replica, message.request_id)
        return True

    def release(self, request_id: str) -> None:
        self.breakers.released(request_id)

    def begin(self, keys: tuple[bytes, ...] = KEYS, request_id: str = "r", priority: int = 0) -> RequestTask:
        prepared = PreparedRequest(
            request_id=request_id,
            facts=RequestFacts(tenant="t", sharing_group="group", priority=0),
            prompt=b"\1\0\0\0" * NUM_TOKENS,
            root_key=b"root",
            block_keys=keys,
            sampling=SamplingParams(max_tokens=4),
            samples=(SampleStart(0, 1),),
            deadline_at=None,
        )
        queued = QueuedRequest(request_id, Flow("t", "standard"), self.clock.now(), priority=priority)
        queued.on_close(self.admission.drop, queued)
        with contextlib.suppress(NoReplicaError):
            self.admission.place(queued, first_route_request(prepared))
        task = RequestTask(
            RequestStart(prepared, [SampleText(Nothing())], self.clock.now()),
            queued,
            connections=self,
            router=self.router,
            clock=self.clock,
            admission=self.admission,
            unread=UnreadOutput(1e9),
            on_end=self.errors.append,
        )
        task.begin()
        return task


async def test_what_goes_at_once_is_not_announced() -> None:
    gateway = Gateway(num_backlog_tokens=0)
    task = gateway.begin()
    assert [type(message) for message in gateway.sent] == [Submission]
    task.abandon()


async def test_a_request_that_waits_is_announced_once_and_then_submitted() -> None:
    gateway = Gateway(num_backlog_tokens=5000)
    task = gateway.begin()
    assert gateway.sent == [Announce("r", "group", NUM_TOKENS, KEYS)]
    gateway.admission.pump()
    gateway.router.loads.on_queue(D0, QueueState(0, 0, 0, 0, 1000), gateway.clock.now())
    gateway.admission.pump()
    assert [type(message) for message in gateway.sent] == [Announce, Submission]
    task.abandon()
    assert gateway.sent[2:] == [Cancel("r", 1)], "the announcement was forgotten with the submission"


async def test_an_announcement_is_repeated_while_its_request_waits() -> None:
    gateway = Gateway(num_backlog_tokens=5000, max_wait_s=100.0)
    task = gateway.begin()
    for number in range(1, 4):
        assert gateway.sent == [Announce("r", "group", NUM_TOKENS, KEYS)] * number
        for _ in range(3):
            await asyncio.sleep(0)
        gateway.clock.advance(ANNOUNCE_AGAIN_S)
        for _ in range(3):
            await asyncio.sleep(0)
    task.abandon()
    assert gateway.sent[-1] == Cancel("r", 0)


async def test_a_prompt_without_a_full_block_is_not_announced() -> None:
    gateway = Gateway(num_backlog_tokens=5000)
    task = gateway.begin(())
    assert gateway.sent == []
    task.abandon()
    assert gateway.sent == []


def _abandon(gateway: Gateway, task: RequestTask) -> None:
    task.abandon()


async def test_an_announcement_is_withdrawn_when_there_is_no_replica_any_more() -> None:
    gateway = Gateway(num_backlog_tokens=5000)
    task = gateway.begin()
    gateway.gone.add("d0")
    gateway.router.remove_replica("d0")
    gateway.admission.leave("d0")
    assert gateway.sent[1:] == [Cancel("r", 0)]
    task.abandon()
    assert gateway.sent[2:] == []


def _wait_too_long(gateway: Gateway, task: RequestTask) -> None:
    gateway.clock.advance(MAX_WAIT_S)
    gateway.admission.pump()


@pytest.mark.parametrize("end", [_abandon, _wait_too_long])
async def test_an_announcement_is_withdrawn_when_the_request_ends(
    end: Callable[[Gateway, RequestTask], None],
) -> None:
    gateway = Gateway(num_backlog_tokens=5000)
    task = gateway.begin()
    end(gateway, task)
    assert gateway.sent == [Announce("r", "group", NUM_TOKENS, KEYS), Cancel("r", 0)]
    assert len(gateway.errors) == 1
    if end is _wait_too_long:
        assert isinstance(gateway.errors[0], OverloadedError)
    gateway.admission.check()
    assert len(gateway.admission.waiting) == 0


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_request_that_moves_is_announced_where_it_waits_now_and_withdrawn_where_it_waited() -> None:
    gateway = Gateway(num_backlog_tokens=5000, num_replicas=2)
    task = gateway.begin()
    (first,) = gateway.sent_to
    (other,) = {"d0", "d1"} - {first}
    gateway.report(ReplicaIdentity(other, 1), 1000)
    gateway.clock.advance(REROUTE_PART * MAX_WAIT_S)
    gateway.admission.pump()
    announce = Announce("r", "group", NUM_TOKENS, KEYS)
    assert gateway.sent == [announce, Cancel("r", 0), announce]
    assert gateway.sent_to == [first, first, other]
    task.abandon()
    assert gateway.sent[3:] == [Cancel("r", 0)]
    assert gateway.sent_to[3:] == [other]


async def test_a_request_that_moves_and_goes_at_once_is_withdrawn_where_it_waited() -> None:
    gateway = Gateway(num_backlog_tokens=5000, num_replicas=2)
    task = gateway.begin()
    (first,) = gateway.sent_to
    (other,) = {"d0", "d1"} - {first}
    gateway.clock.advance(1.0)
    gateway.report(ReplicaIdentity(other, 1), 0)
    gateway.admission.pump(other)
    assert [type(message) for message in gateway.sent] == [Announce, Cancel, Submission]
    assert gateway.sent_to == [first, first, other]
    task.abandon()


async def test_a_request_without_a_replica_waits_for_its_turn_at_one_that_comes() -> None:
    gateway = Gateway(num_backlog_tokens=5000)
    gateway.router.remove_replica("d0")
    task = gateway.begin()
    assert len(gateway.admission.waiting) == 0
    gateway.router.add_replica(D0, "both")
    gateway.report(D0, 5000)
    for _ in range(10):
        await settle()
        gateway.clock.advance(0.05)
    await settle()
    assert len(gateway.admission.waiting) == 1, "it is full"
    assert gateway.sent == [Announce("r", "group", NUM_TOKENS, KEYS)]
    gateway.report(D0, 0)
    gateway.admission.pump()
    assert [type(message) for message in gateway.sent] == [Announce, Submission]
    task.abandon()


async def test_one_of_those_that_wait_is_sent_to_a_replica_that_may_be_well_again() -> None:
    gateway = Gateway(num_backlog_tokens=5000, num_replicas=2)
    for index in range(NUM_FAILURES):
        gateway.breakers.failed(D0, f"f{index}", "a bug", 0.0)
    gateway.clock.advance(FIRST_PAUSE_S + 0.1)
    gateway.breakers.advance(gateway.clock.now())
    breaker = gateway.breakers.of(D0)
    assert breaker is not None
    assert breaker.state is BreakerState.HALF_OPEN
    gateway.report(D0, 400)  # cheaper than the other, and without capacity
    tasks = [gateway.begin(request_id=f"r{index}") for index in range(5)]
    assert {*gateway.sent_to} == {"d0"}
    gateway.report(D0, 0)
    tasks.append(gateway.begin(request_id="r5", priority=9))
    submitted = [it.request_id for it in gateway.sent if isinstance(it, Submission)]
    assert submitted == ["r5"], "what comes releases what waits behind it"
    assert breaker.probe == "r5"
    gateway.breakers.succeeded(D0, "r5", gateway.clock.now())
    gateway.admission.pump()
    assert len([it for it in gateway.sent if isinstance(it, Submission)]) == 6, "they share a prompt"
    for task in tasks:
        task.abandon()
    gateway.admission.check()


class SlowEnds(list[RequestError | None]):
    """Notes the ends of requests, each of which takes some time."""

    def __init__(self, clock: ManualClock, took_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._took_s = took_s

    def append(self, error: RequestError | None) -> None:
        super().append(error)
        self._clock.advance(self._took_s)


async def test_a_bound_that_passes_while_another_request_is_refused_is_not_missed() -> None:
    gateway = Gateway(num_backlog_tokens=5000)
    gateway.errors = SlowEnds(gateway.clock, 0.005)
    tasks = []
    for index in range(3):
        tasks.append(gateway.begin((), request_id=f"r{index}"))
        gateway.clock.advance(0.003)
    await settle()
    gateway.clock.advance(MAX_WAIT_S - NUM_TOKENS * 0.001 - 0.009)
    await settle()
    assert [type(error) for error in gateway.errors] == [OverloadedError] * 3
    assert len(gateway.admission.waiting) == 0


async def test_a_retry_that_cannot_be_placed_by_a_fault_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway(num_backlog_tokens=0)
    task = gateway.begin()
    gateway.router.on_refused("d0")
    task.apply(task.state.on_failed, D0, RequestFailed("r", 1, "refused", "full"))
    await settle()
    assert len(gateway.admission.retries.queue) == 1

    def break_down(*_: object, **__: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(gateway.router, "decide", break_down)
    gateway.clock.advance(CAPACITY_WAIT_S)
    await settle()
    assert [type(error) for error in gateway.errors] == [InternalError]
    assert gateway.admission.bytes.num_bytes == 0
    assert gateway.router.num_placements == 0
