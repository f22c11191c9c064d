"""A request's state machine without a cluster: its effects on record, its truth, and messages of replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from cluster.errors import RequestError
from cluster.gateway.request_state import RequestPhase, RequestState
from cluster.gateway.sample_output import EmbeddingDelta, Output, OutputDelta, PromptLogprobsDelta
from cluster.metrics.ended_request import Summary, TimelineEntry
from cluster.text.preprocess import PreparedRequest, SampleStart, sample_seed
from cluster.text.sample_text import SampleText
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.request_facts import Pooling, RequestFacts
from router.messages import Decision, RouteRequest
from workers.messages.link import (
    Cancel,
    HandOverReport,
    HandOverTarget,
    Move,
    PrefillReport,
    PromptLogprobs,
    StageTimes,
    Submission,
    TokenDelta,
)
from workers.messages.sampling import PackedLogprobs, SamplingParams

P0, P1, D0, D1 = (ReplicaIdentity(name, 1) for name in ("p0", "p1", "d0", "d1"))


class Route(NamedTuple):
    request: RouteRequest
    delay_s: float
    needs_capacity: bool = False


class Submit(NamedTuple):
    replica: ReplicaIdentity
    submission: Submission


class CancelAt(NamedTuple):
    replica: ReplicaIdentity
    cancel: Cancel


class ScheduleMove(NamedTuple):
    delay_s: float = 0.0


class RouteMove(NamedTuple):
    request: RouteRequest


class MoveAt(NamedTuple):
    replica: ReplicaIdentity
    move: Move


class Confirm(NamedTuple):
    """The placement, at the router."""


class Release(NamedTuple):
    """The placement, at the router."""


class Finish(NamedTuple):
    summary: Summary


class Fail(NamedTuple):
    error: RequestError


Effect = (
    Route
    | Submit
    | CancelAt
    | ScheduleMove
    | RouteMove
    | MoveAt
    | Confirm
    | Release
    | OutputDelta
    | PromptLogprobsDelta
    | EmbeddingDelta
    | Finish
    | Fail
)


class RecordedEffects:
    """`RequestEffects` that happen nowhere: each is appended to `calls`, after `on_effect`."""

    def __init__(self, on_effect: Callable[[], None]) -> None:
        self.calls: list[Effect] = []
        self._on_effect = on_effect

    def _record(self, effect: Effect) -> None:
        self._on_effect()
        self.calls.append(effect)

    def route(self, request: RouteRequest, delay_s: float, *, needs_capacity: bool = False) -> None:
        self._record(Route(request, delay_s, needs_capacity))

    def submit(self, replica: ReplicaIdentity, submission: Submission) -> None:
        self._record(Submit(replica, submission))

    def cancel(self, replica: ReplicaIdentity, cancel: Cancel) -> None:
        self._record(CancelAt(replica, cancel))

    def schedule_move(self, delay_s: float) -> None:
        self._record(ScheduleMove(delay_s))

    def route_move(self, request: RouteRequest) -> None:
        self._record(RouteMove(request))

    def move(self, replica: ReplicaIdentity, order: Move) -> None:
        self._record(MoveAt(replica, order))

    def confirm_placement(self, steps_s: float = 0.0) -> None:
        self._record(Confirm())

    def release_placement(self) -> None:
        self._record(Release())

    def emit(self, delta: Output) -> None:
        self._record(delta)

    def finish(self, summary: Summary) -> None:
        self._record(Finish(summary))

    def fail(self, error: RequestError) -> None:
        self._record(Fail(error))


class RecordedRequest:
    """A `RequestState` whose transitions, called here by their names, return the effects that they called.

    Each asserts that the state was the same at every effect as at the end: effects come last.
    """

    def __init__(self, prepared: PreparedRequest, texts: list[SampleText]) -> None:
        self._at_effects: list[str] = []
        self._effects = RecordedEffects(lambda: self._at_effects.append(state_of(self.state)))
        self.state = RequestState(prepared, texts, self._effects, 0.0)

    @property
    def prepared(self) -> PreparedRequest:
        return self.state.prepared

    @property
    def phase(self) -> RequestPhase:
        return self.state.phase

    @property
    def timeline(self) -> list[TimelineEntry]:
        return self.state.timeline

    def __getattr__(self, transition: str) -> Callable[..., list[Effect]]:
        if not transition.startswith(("on_", "start")):
            raise AttributeError(transition)

        def call(*args: object, **named: object) -> list[Effect]:
            getattr(self.state, transition)(*args, **named)
            effects, self._effects.calls = self._effects.calls, []
            at_effects, self._at_effects = self._at_effects, []
            assert set(at_effects) <= {state_of(self.state)}, (
                f"{transition} changed the state after an effect"
            )
            return effects

        return call


def state_of(machine: object) -> str:
    """Return all that a state machine and the objects it consists of hold, except its effects."""
    parts = []
    for name, value in vars(machine).items():
        if name in ("_effects", "_note"):
            continue
        if isinstance(value, dict):
            value = {
                key: state_of(item) if hasattr(item, "__dict__") else item for key, item in value.items()
            }
        elif type(value).__module__.startswith("cluster.gateway") and hasattr(value, "__dict__"):
            value = state_of(value)
        parts.append(f"{name}={value!r}")
    return f"{type(machine).__name__}({', '.join(parts)})"


class Letters:
    """A detokenizer for which every token is one letter."""

    def push(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


def raw(ids: list[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


def ids_of(tokens: bytes) -> list[int]:
    return [int(token) for token in np.frombuffer(tokens, dtype="<u4")]


def truth(index: int, count: int) -> list[int]:
    """Return letters a to d, different for every sample, with repetitions."""
    return [ord("a") + (position * position + index * 3 + position // 3) % 4 for position in range(count)]


def cut(tokens: list[int], stops: tuple[str, ...]) -> tuple[int, str, str]:
    """Return (tokens that count, text, finish) by looking at every beginning of the text in turn."""
    text = "".join(chr(token) for token in tokens)
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return end, text[: min(starts)], "stop"
    return len(tokens), text, "length"


def make_request(
    n: int = 1,
    max_tokens: int = 6,
    stops: tuple[str, ...] = (),
    deadline_at: float | None = None,
    max_attempts: int = 5,
    starts: tuple[SampleStart, ...] = (),
    num_prompt_tokens: int = 3,
    num_prompt_logprobs: int | None = None,
    pooling: Pooling | None = None,
    is_grammar_of_tools: bool = False,
) -> RecordedRequest:
    prepared = PreparedRequest(
        request_id="r",
        facts=RequestFacts(tenant="t", sharing_group="t", priority=0, pooling=pooling),
        prompt=raw(list(range(1, num_prompt_tokens + 1))),
        root_key=b"root",
        block_keys=(b"k",),
        sampling=SamplingParams(max_tokens=max_tokens, num_prompt_logprobs=num_prompt_logprobs),
        samples=starts or tuple(SampleStart(index, sample_seed(5, index)) for index in range(n)),
        deadline_at=deadline_at,
        max_attempts=max_attempts,
        is_grammar_of_tools=is_grammar_of_tools,
    )
    return RecordedRequest(prepared, [SampleText(Letters(), stops) for _ in prepared.samples])


def kinds(effects: list[Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def decision(prefill: ReplicaIdentity | None, decode: ReplicaIdentity) -> Decision:
    return Decision("r", "cost", prefill.replica_id if prefill else "", decode.replica_id, 0, 0, (), "")


def route(
    request: RecordedRequest,
    prefill: ReplicaIdentity | None,
    decode: ReplicaIdentity,
    *,
    most_backlog_tokens: int | None = None,
) -> list[Effect]:
    made = replace(decision(prefill, decode), most_backlog_tokens=most_backlog_tokens)
    return request.on_routed(made, prefill, HandOverTarget(decode, "a"), 1.0)


def delta(sample: int, first: int, count: int, total: int, attempt: int = 1, shift: int = 0) -> TokenDelta:
    """Return true tokens, with the finish when they are the last of `total`."""
    finish = "length" if first + count >= total else ""
    tokens = raw([token + shift for token in truth(sample, first + count)[first:]])
    return TokenDelta("r", attempt, sample, first, tokens, (), finish)


def prefilled(attempt: int = 1) -> PrefillReport:
    return PrefillReport("r", attempt, 3, 0, StageTimes())


def handed_over(attempt: int = 1) -> HandOverReport:
    return HandOverReport("r", attempt, 0, 10, 0, "shm", 1.0, StageTimes())


def read_of(first: int, end: int, attempt: int = 1, num_top: int = 2) -> PromptLogprobs:
    """Return true log-probabilities of the prompt's tokens [first, end): those of token i are -i, and of the
    likeliest -i - 0.5, -i - 1.5, ..."""
    indices = np.arange(first, end, dtype="<f4")
    top = -indices[:, None] - 0.5 - np.arange(num_top, dtype="<f4")
    ids = np.tile(np.arange(num_top, dtype="<u4"), (end - first, 1))
    packed = PackedLogprobs(num_top, (-indices).tobytes(), ids.tobytes(), top.astype("<f4").tobytes())
    return PromptLogprobs("r", attempt, first, packed)
