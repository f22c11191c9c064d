"""A journey without a cluster: its plan, its truth, and the messages that replicas would send."""

from __future__ import annotations

import numpy as np

from cluster.gateway.actions import Action
from cluster.gateway.request_state import RequestState
from cluster.text.preprocess import PreparedRequest, SampleStart, sample_seed
from cluster.text.tokenizer import SampleText
from kvtransfer.messages import ReplicaIdentity
from router.messages import Decision
from workers.messages import (
    HandOverReport,
    HandOverTarget,
    PrefillReport,
    SamplingParams,
    StageTimes,
    TokenDelta,
)

P0, P1, D0, D1 = (ReplicaIdentity(name, 1) for name in ("p0", "p1", "d0", "d1"))


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
    """Letters a to d, different for every sample, with repetitions."""
    return [ord("a") + (position * position + index * 3 + position // 3) % 4 for position in range(count)]


def cut(tokens: list[int], stops: tuple[str, ...]) -> tuple[int, str, str]:
    """(tokens that count, text, finish) by looking at every beginning of the text in turn."""
    text = "".join(chr(token) for token in tokens)
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return end, text[: min(starts)], "stop"
    return len(tokens), text, "length"


def make_journey(
    n: int = 1,
    max_tokens: int = 6,
    stops: tuple[str, ...] = (),
    deadline_at: float | None = None,
    max_attempts: int = 5,
    starts: tuple[SampleStart, ...] = (),
) -> RequestState:
    plan = PreparedRequest(
        request_id="r",
        tenant="t",
        priority=0,
        prompt=raw([1, 2, 3]),
        block_keys=(b"k",),
        sampling=SamplingParams(max_tokens=max_tokens),
        samples=starts or tuple(SampleStart(index, sample_seed(5, index)) for index in range(n)),
        deadline_at=deadline_at,
        max_attempts=max_attempts,
    )
    return RequestState(plan, [SampleText(Letters(), stops) for _ in plan.samples], 0.0)


def decision(prefill: ReplicaIdentity | None, decode: ReplicaIdentity) -> Decision:
    return Decision("r", "cost", prefill.replica_id if prefill else "", decode.replica_id, 0, 0, (), "")


def route(journey: RequestState, prefill: ReplicaIdentity | None, decode: ReplicaIdentity) -> list[Action]:
    return journey.on_routed(decision(prefill, decode), prefill, HandOverTarget(decode, "a"), 1.0)


def delta(sample: int, first: int, count: int, total: int, attempt: int = 1, shift: int = 0) -> TokenDelta:
    """True tokens; with the finish when they are the last of `total`."""
    finish = "length" if first + count >= total else ""
    tokens = raw([token + shift for token in truth(sample, first + count)[first:]])
    return TokenDelta("r", attempt, sample, first, tokens, (), finish)


def prefilled(attempt: int = 1) -> PrefillReport:
    return PrefillReport("r", attempt, 3, 0, StageTimes())


def handed_over(attempt: int = 1) -> HandOverReport:
    return HandOverReport("r", attempt, 0, 10, 0, "shm", 1.0, StageTimes())
