"""A request that has to wait in its gateway is announced to the replica that will compute it: with the real
admission and router, before one replica that has no capacity."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cluster.admission.admission import Candidacy, RequestAdmission
from cluster.admission.config import AdmissionConfig
from cluster.admission.fair_queue import Flow
from cluster.errors import OverloadedError, RequestError
from cluster.gateway.attempt import first_route_request
from cluster.gateway.request_task import ANNOUNCE_AGAIN_S, RequestTask, UnreadOutput
from cluster.text.preprocess import PreparedRequest, SampleStart
from cluster.text.sample_text import SampleText
from kvtransfer.common.clock import ManualClock
from kvtransfer.messages import KvSnapshot, ReplicaIdentity
from router.config import RouterConfig
from router.messages import QueueState, ReplicaLoad
from router.service import RouterService
from workers.messages.link import Announce, Cancel, HandOverTarget, Move, Submission
from workers.messages.sampling import SamplingParams

REPLICA = ReplicaIdentity("d0", 1)
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
    """Its connections to one replica, its router and its admission."""

    def __init__(self, num_backlog_tokens: int, max_wait_s: float = MAX_WAIT_S) -> None:
        self.clock = ManualClock()
        self.sent: list[Announce | Submission | Cancel | Move] = []
        self.errors: list[RequestError | None] = []
        self.is_gone = False
        self.router = RouterService(RouterConfig(), 16, self.clock, 1, salt="g")
        self.router.add_replica(REPLICA, "both")
        self.router.on_snapshot(KvSnapshot(REPLICA, 0, ()))
        self.router.on_load(
            ReplicaLoad(
                identity=REPLICA,
                received_at=0.0,
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
        standard = {"aging_s": 1.0, "max_wait_s": max_wait_s, "ttft_s": max_wait_s}
        config = AdmissionConfig.model_validate({"standard": standard})
        self.admission = RequestAdmission(config, self.router, self.clock, lambda: 1)

    def target(self, replica_id: str) -> HandOverTarget | None:
        return None if self.is_gone else HandOverTarget(REPLICA, "a")

    def send(self, replica: ReplicaIdentity, message: Announce | Submission | Cancel | Move) -> bool:
        assert replica == REPLICA
        self.sent.append(message)
        return True

    def begin(self, keys: tuple[bytes, ...] = KEYS) -> RequestTask:
        prepared = PreparedRequest(
            request_id="r",
            tenant="t",
            sharing_group="group",
            priority=0,
            prompt=b"\1\0\0\0" * NUM_TOKENS,
            root_key=b"root",
            block_keys=keys,
            sampling=SamplingParams(max_tokens=4),
            samples=(SampleStart(0, 1),),
            deadline_at=None,
        )
        candidacy = Candidacy(Flow("t", "standard"), 1.0, 0, self.clock.now(), None, 1)
        task = RequestTask(
            prepared,
            [SampleText(Nothing())],
            connections=self,
            router=self.router,
            clock=self.clock,
            on_end=self.errors.append,
            started_at=self.clock.now(),
            unread=UnreadOutput(1e9),
            admission=self.admission,
            held=self.admission.admit(first_route_request(prepared), candidacy),
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
    gateway.router.on_queue(REPLICA, QueueState(0, 0, 0, 0, 1000), gateway.clock.now())
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


async def test_an_announcement_is_withdrawn_when_the_request_is_placed_anew() -> None:
    gateway = Gateway(num_backlog_tokens=5000)
    task = gateway.begin()
    gateway.is_gone = True
    gateway.admission.on_gone("d0")
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
    assert len(gateway.admission) == 0
