"""Running a request: buffers, timers, links that vanish, no re-entry. Router and connections are
stand-ins."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from admission_at_once import AdmissionAtOnce, request_at_once
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples

from cluster.errors import AbandonedError, DeadlineError, RequestError, SlowClientError, UnavailableError
from cluster.gateway.output_buffer import MAX_UNREAD, OutputBuffer, UnreadOutput
from cluster.gateway.request_state import RequestState
from cluster.gateway.request_task import RequestStart, RequestTask
from cluster.gateway.sample_output import EmbeddingDelta, OutputDelta, PromptLogprobsDelta
from cluster.gateway.stream_migration import NO_TARGET_PAUSE_S
from cluster.metrics.ended_request import Summary
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
    HandOverTarget,
    Move,
    MoveEnded,
    PrefillReport,
    StageTimes,
    Submission,
    TokenDelta,
)
from workers.messages.sampling import PackedLogprobs, SamplingParams, TokenLogprob

D0, D1 = ReplicaIdentity("d0", 1), ReplicaIdentity("d1", 1)


class Nothing:
    """A detokenizer that shows nothing."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Field:
    """Connections to d0 and d1, and a router that takes the first that is not excluded."""

    def __init__(self) -> None:
        self.known = [D0, D1]
        self.gone: set[ReplicaIdentity] = set()
        self.sent: list[tuple[ReplicaIdentity, Announce | Submission | Cancel | Move]] = []
        self.finished: list[str] = []

    def target(self, replica_id: str) -> HandOverTarget | None:
        return next((HandOverTarget(it, "a") for it in self.known if it.replica_id == replica_id), None)

    def send(self, replica: ReplicaIdentity, message: Announce | Submission | Cancel | Move) -> bool:
        if replica in self.gone:
            return False
        self.sent.append((replica, message))
        return True

    def release(self, request_id: str) -> None:
        pass

    def route(self, request: RouteRequest, *, prefers_capacity: bool = False) -> Decision:
        usable = [it for it in self.known if it.replica_id not in request.excluded]
        if not usable:
            raise NoReplicaError("nobody", 3.0)
        return Decision("r", "cost", "", usable[0].replica_id, 0, 0, (), "")

    def route_move(self, request: RouteRequest) -> str:
        return self.route(request).decode

    def with_misses(
        self, decision: Decision, block_keys: tuple[bytes, ...], num_prompt_tokens: int
    ) -> Decision:
        return decision

    def on_refused(self, replica_id: str) -> None:
        pass

    def on_prefilled(self, request_id: str, steps_s: float = 0.0) -> None:
        pass

    def on_finished(self, request_id: str) -> None:
        self.finished.append(request_id)


class Ended:
    """Remembers how requests ended."""

    def __init__(self) -> None:
        self.errors: list[RequestError | None] = []

    def __call__(self, error: RequestError | None) -> None:
        self.errors.append(error)


def make_task(
    field: Field,
    clock: ManualClock,
    deadline_at: float | None = None,
    unread: UnreadOutput | None = None,
) -> tuple[RequestTask, Ended]:
    prepared = PreparedRequest(
        request_id="r",
        facts=RequestFacts(tenant="", sharing_group="", priority=0),
        prompt=tokens(1),
        root_key=b"",
        block_keys=(),
        sampling=SamplingParams(max_tokens=1 << 20),
        samples=(SampleStart(0, 1),),
        deadline_at=deadline_at,
    )
    ended = Ended()
    task = RequestTask(
        RequestStart(prepared, [SampleText(Nothing())], clock.now()),
        request_at_once("r", clock.now()),
        connections=field,
        router=field,
        clock=clock,
        admission=AdmissionAtOnce(field),
        unread=unread or UnreadOutput(1e9),
        on_end=ended,
    )
    return task, ended


def tokens(count: int) -> bytes:
    return np.ones(count, dtype="<u4").tobytes()


def delta(first: int, count: int, finish: str = "") -> TokenDelta:
    return TokenDelta("r", 1, 0, first, tokens(count), (), finish)


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)


async def test_output_that_waits_is_merged() -> None:
    task, ended = make_task(Field(), ManualClock())
    task.begin()
    for first in range(5):
        task.apply(task.state.on_delta, D0, delta(first, 1))
    merged = await task.next()
    assert isinstance(merged, OutputDelta)
    assert (merged.first_index, merged.tokens) == (0, tokens(5))
    task.apply(task.state.on_delta, D0, delta(5, 1, "length"))
    last = await task.next()
    assert isinstance(last, OutputDelta)
    assert (last.first_index, last.finish) == (5, "length")
    assert isinstance(await task.next(), Summary)
    assert ended.errors == [None]


async def test_a_client_that_never_reads_is_cut_off() -> None:
    field = Field()
    task, ended = make_task(field, ManualClock())
    task.begin()
    task.apply(task.state.on_delta, D0, delta(0, MAX_UNREAD + 1))
    with pytest.raises(SlowClientError):
        await task.next()
    assert [type(error) for error in ended.errors] == [SlowClientError]
    assert isinstance(field.sent[-1][1], Cancel)


async def test_of_all_readers_the_slowest_is_cut_off_first() -> None:
    unread = UnreadOutput(10_000)
    (slow, slow_end), (fast, fast_end) = (make_task(Field(), ManualClock(), unread=unread) for _ in range(2))
    slow.begin()
    fast.begin()
    slow.apply(slow.state.on_delta, D0, delta(0, 2000))
    for first in range(0, 4000, 100):
        fast.apply(fast.state.on_delta, D0, delta(first, 100))
        assert isinstance(await fast.next(), OutputDelta)
        assert unread.num_bytes <= unread.max_bytes
    assert slow_end.errors == []
    fast.apply(fast.state.on_delta, D0, delta(4000, 1000))
    assert [type(error) for error in slow_end.errors] == [SlowClientError]
    with pytest.raises(SlowClientError, match=r"0\.01 MB of output wait in this gateway"):
        await slow.next()
    assert isinstance(await fast.next(), OutputDelta)
    assert fast_end.errors == []
    fast.abandon()
    assert unread.num_bytes == 0


async def test_a_slow_reader_is_cut_off_after_the_end_of_its_request_too() -> None:
    unread = UnreadOutput(10_000)
    (slow, slow_end), (fast, _) = (make_task(Field(), ManualClock(), unread=unread) for _ in range(2))
    slow.begin()
    slow.apply(slow.state.on_delta, D0, delta(0, 2000, "length"))
    assert slow_end.errors == [None]
    fast.begin()
    fast.apply(fast.state.on_delta, D0, delta(0, 1000))
    assert unread.num_bytes < 5000
    with pytest.raises(SlowClientError):
        await slow.next()
    assert slow_end.errors == [None], "it ended once"


async def test_a_reader_that_is_slowest_itself_is_cut_off_within_its_own_transition() -> None:
    unread = UnreadOutput(10_000)
    task, ended = make_task(Field(), ManualClock(), unread=unread)
    task.begin()
    task.apply(task.state.on_delta, D0, delta(0, 3000))
    assert [type(error) for error in ended.errors] == [SlowClientError]
    assert unread.num_bytes == 0


@pytest.mark.parametrize("bound", ["of all", "its own"])
async def test_a_reader_that_is_cut_off_ends_though_it_waits_to_write(bound: str) -> None:
    unread = UnreadOutput(10_000 if bound == "of all" else 1e9)
    task, ended = make_task(Field(), ManualClock(), unread=unread)
    task.begin()
    task.apply(task.state.on_delta, D0, delta(0, 1000))

    async def read() -> None:
        async with task.reading():
            await task.next()
            await asyncio.Event().wait()  # as a write that the client does not take

    reader = asyncio.create_task(read())
    await settle()
    assert unread.num_bytes > 4000
    task.apply(task.state.on_delta, D0, delta(1000, 2000 if bound == "of all" else MAX_UNREAD + 1))
    assert unread.num_bytes == 0, "what it took counts no more"
    with pytest.raises(SlowClientError):
        await reader
    assert [type(error) for error in ended.errors] == [SlowClientError]
    with pytest.raises(SlowClientError):
        async with task.reading():
            await asyncio.Event().wait()


async def test_what_a_reader_took_counts_when_the_slowest_is_sought() -> None:
    unread = UnreadOutput(10_000)
    (slow, slow_end), (fast, fast_end) = (make_task(Field(), ManualClock(), unread=unread) for _ in range(2))
    slow.begin()
    fast.begin()
    slow.apply(slow.state.on_delta, D0, delta(0, 1500))
    await slow.next()
    fast.apply(fast.state.on_delta, D0, delta(0, 900))
    assert unread.num_bytes == slow._buffer.num_unread_bytes + fast._buffer.num_unread_bytes
    fast.apply(fast.state.on_delta, D0, delta(900, 200))
    assert [type(error) for error in slow_end.errors] == [SlowClientError]
    assert fast_end.errors == []
    assert unread.num_bytes == fast._buffer.num_unread_bytes


async def test_a_reader_that_ends_for_another_reason_ends_with_that() -> None:
    task, _ = make_task(Field(), ManualClock())
    task.begin()
    with pytest.raises(TimeoutError):
        async with task.reading(), asyncio.timeout(0.0):
            await task.next()

    async def read() -> None:
        async with task.reading():
            await task.next()

    reader = asyncio.create_task(read())
    await settle()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    task.abandon()


async def test_what_a_client_left_unread_when_it_went_counts_no_more() -> None:
    unread = UnreadOutput(10_000)
    task, _ = make_task(Field(), ManualClock(), unread=unread)
    task.begin()
    task.apply(task.state.on_delta, D0, delta(0, 100))
    await task.next()
    task.apply(task.state.on_delta, D0, delta(100, 100, "length"))
    assert unread.num_bytes > 800
    task.abandon()
    assert unread.num_bytes == 0


async def test_one_message_holds_no_more_than_its_share_of_what_waits() -> None:
    buffer = OutputBuffer(UnreadOutput(1e9), lambda: None)
    for first in range(3):
        buffer.put(OutputDelta(0, first * 3000, tokens(3000), "", (), ""))
    buffer.put(OutputDelta(1, 0, tokens(1), "", (), ""))
    taken = [await buffer.get() for _ in range(4)]
    assert [(it.sample, it.first_index) for it in taken if isinstance(it, OutputDelta)] == [
        (0, 0),
        (1, 0),
        (0, 3000),
        (0, 6000),
    ]


@settings(max_examples=examples(60), deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["put", "put", "get", "leave"]), st.integers(1, 900)),
        max_size=60,
    )
)
def test_all_that_waits_is_bounded_and_who_reads_is_never_cut_off_before_who_does_not(
    steps: list[tuple[int, str, int]],
) -> None:
    """Against counts of what was put and not taken, by buffer."""

    async def run() -> None:
        unread = UnreadOutput(8000)
        cut: list[int] = []
        buffers: list[OutputBuffer] = []
        taken = [0] * 4
        for number in range(4):

            def cut_off(number: int = number) -> None:
                assert buffers[number].num_unread_bytes == max(it.num_unread_bytes for it in buffers)
                cut.append(number)
                taken[number] = 0
                buffers[number].close(SlowClientError("slow", 0.0))

            buffers.append(OutputBuffer(unread, cut_off))
        for number, action, size in steps:
            buffer = buffers[number]
            if action == "put" and number not in cut:
                buffer.put(
                    PromptLogprobsDelta(1, PackedLogprobs(0, bytes(4 * size)))
                    if size % 5 == 0
                    else OutputDelta(size % 2, 0, tokens(size), "", (), "")
                )
            elif action == "get" and buffer.num_waiting_bytes:
                before = buffer.num_waiting_bytes
                await buffer.get()
                taken[number] = before - buffer.num_waiting_bytes
            elif action == "leave":
                buffer.discard()
                buffer.release()
                taken[number] = 0
            assert unread.num_bytes == sum(it.num_waiting_bytes for it in buffers) + sum(taken)
            assert unread.num_bytes <= unread.max_bytes
        for buffer in buffers:
            buffer.discard()
            buffer.release()
        assert unread.num_bytes == 0

    asyncio.run(run())


async def test_logprobs_count_as_unread_too() -> None:
    buffer = OutputBuffer(UnreadOutput(1e9), lambda: None)
    logprob = TokenLogprob(-1.0, ((1, -1.0), (2, -2.0)))
    buffer.put(OutputDelta(0, 0, tokens(2), "", (logprob, logprob), ""))
    assert buffer.num_unread == 8
    await buffer.get()
    assert buffer.num_unread == 0


async def test_what_is_read_of_the_prompt_comes_first_and_counts_in_bytes_alone() -> None:
    """20 log-probabilities at each of 32k places are more than the unread tokens that a client may have."""
    unread = UnreadOutput(1e9)
    buffer = OutputBuffer(unread, lambda: None)
    buffer.put(OutputDelta(0, 0, tokens(1), "", (), ""))
    size = 20 * 4 * 1024
    part = PackedLogprobs(20, bytes(4 * 1024), bytes(size), bytes(size))
    parts = [PromptLogprobsDelta(1 + 1024 * number, part) for number in range(32)]
    for each in parts:
        buffer.put(each)
    assert buffer.num_unread == 1
    assert unread.num_bytes > 32 * part.num_bytes == 32 * 1024 * 164
    assert [await buffer.get() for _ in parts] == parts
    buffer.put(EmbeddingDelta(bytes(4096)))
    assert await buffer.get() == EmbeddingDelta(bytes(4096))
    assert isinstance(await buffer.get(), OutputDelta)
    buffer.release()
    assert unread.num_bytes == 0


async def test_a_link_that_is_gone_at_submission_means_another_replica() -> None:
    field = Field()
    field.gone.add(D0)
    task, _ = make_task(field, ManualClock())
    task.begin()
    ((replica, message),) = field.sent
    assert replica == D1
    assert isinstance(message, Submission)
    assert message.attempt == 2


async def test_a_routed_replica_that_vanished_is_asked_for_again() -> None:
    field, clock = Field(), ManualClock()
    field.target = lambda replica_id: None  # type: ignore[method-assign]
    task, _ = make_task(field, clock)
    task.begin()
    assert field.finished == ["r"]
    del field.target
    await settle()
    clock.advance(1.0)
    await settle()
    assert [replica for replica, _ in field.sent] == [D0]
    task.abandon()


async def test_a_stream_that_has_nowhere_to_move_asks_again_after_a_pause() -> None:
    field, clock = Field(), ManualClock()
    task, _ = make_task(field, clock)
    task.begin()
    task.apply(task.state.on_prefilled, PrefillReport("r", 1, 1, 0, StageTimes()))
    task.apply(task.state.on_delta, D0, delta(0, 1))
    field.known = [D0]
    task.apply(task.state.on_streams, D0, False)
    assert [type(message) for _, message in field.sent] == [Submission]
    field.known = [D0, D1]
    await settle()
    clock.advance(NO_TARGET_PAUSE_S)
    await settle()
    assert field.sent[1:] == [(D0, Move("r", 1, HandOverTarget(D1, "a")))]
    task.apply(task.state.on_move_ended, D0, MoveEnded("r", 1, D1))
    task.abandon()
    assert field.sent[2:] == [(D1, Cancel("r", 1))]


async def test_a_target_that_vanished_is_taken_back_at_the_router() -> None:
    field, clock = Field(), ManualClock()
    task, _ = make_task(field, clock)
    task.begin()
    task.apply(task.state.on_prefilled, PrefillReport("r", 1, 1, 0, StageTimes()))
    field.target = lambda replica_id: None  # type: ignore[method-assign]
    task.apply(task.state.on_streams, D0, False)
    assert field.finished == ["r"]
    task.abandon()


async def test_patience_runs_on_the_clock() -> None:
    field, clock = Field(), ManualClock()
    field.known = []
    task, ended = make_task(field, clock)
    task.begin()
    for _ in range(20):
        await settle()
        clock.advance(0.2)
    await settle()
    assert [type(error) for error in ended.errors] == [UnavailableError]


async def test_the_deadline_runs_on_the_clock() -> None:
    field, clock = Field(), ManualClock()
    task, ended = make_task(field, clock, deadline_at=5.0)
    task.begin()
    await settle()
    clock.advance(4.9)
    await settle()
    assert ended.errors == []
    clock.advance(0.1)
    await settle()
    assert [type(error) for error in ended.errors] == [DeadlineError]
    with pytest.raises(DeadlineError):
        await task.next()
    task.abandon()
    assert len(ended.errors) == 1


class Reentering(Field):
    """Answers everything at once: sends fail or come with the end of a link, the client does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.task: RequestTask
        self.num_failing = 3

    def send(self, replica: ReplicaIdentity, message: Announce | Submission | Cancel | Move) -> bool:
        if isinstance(message, Cancel):
            self.task.apply(self.task.state.on_lost, replica, "it ends in the middle of a send")
        elif isinstance(message, Submission) and self.num_failing:
            self.num_failing -= 1
            return False
        return super().send(replica, message)

    def on_finished(self, request_id: str) -> None:
        self.task.abandon()
        super().on_finished(request_id)


class Depth:
    """How deep transitions of the state machine are nested, and how many there were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.deepest = self.num_transitions = 0
        for name in vars(RequestState):
            if name.startswith("on_") or name == "start":
                monkeypatch.setattr(RequestState, name, self.counted(getattr(RequestState, name)))

    def counted(self, transition: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(transition)
        def call(*args: Any) -> None:
            self.now += 1
            self.num_transitions += 1
            self.deepest = max(self.deepest, self.now)
            transition(*args)
            self.now -= 1

        return call


async def test_no_effect_re_enters_the_state_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    depth, field = Depth(monkeypatch), Field()
    field.gone.add(D0)
    task, _ = make_task(field, ManualClock())
    task.begin()
    task.apply(task.state.on_prefilled, PrefillReport("r", 2, 1, 0, StageTimes()))
    field.known = [D0]  # there is a target at once
    task.apply(task.state.on_streams, D1, False)
    assert field.sent[1:] == [(D1, Move("r", 2, HandOverTarget(D0, "a")))]
    task.apply(task.state.on_delta, D1, TokenDelta("r", 2, 0, 0, tokens(MAX_UNREAD + 1), (), ""))
    with pytest.raises(SlowClientError):
        await task.next()
    # start, routed, unsent, routed; prefilled; streams, move time, move routed; delta, cancel
    assert (depth.deepest, depth.num_transitions) == (1, 10)


async def test_effects_that_come_back_at_once_wait_for_the_end_of_the_transition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    depth, field = Depth(monkeypatch), Reentering()
    field.task, ended = make_task(field, ManualClock())
    field.task.begin()
    assert depth.deepest == 1
    assert [type(error) for error in ended.errors] == [AbandonedError]
    assert not depth.now
