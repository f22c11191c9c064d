"""The record of a request that has ended, for every part that counts, logs, traces or lists requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from cluster.text.preprocess import PreparedRequest
from kvtransfer.codec import Part
from router.messages import Decision
from workers.messages.link import HandOverReport, PrefillReport


@dataclass(frozen=True, slots=True)
class Caller:
    """Identifies the caller from its credentials, the connection and its metadata; "": unknown."""

    # The name of its identity, such as `key:k3vq7yab`.
    name: str = ""
    # The address as gRPC writes it, such as `ipv4:127.0.0.1:40112`.
    peer: str = ""
    # W3C Trace Context.
    traceparent: str = ""
    tracestate: str = ""
    # When the headers of its call were there, in seconds of the gateway's monotonic clock; 0: not known.
    arrived_at: float = 0.0


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The end of one sample."""

    index: int
    finish: str
    num_tokens: int
    # The reasoning tokens among `num_tokens`.
    num_reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """The outcome of a request: what replicas and gateway measured until it finished, or until now. The
    reports are the last attempt's; None: not received (or nothing moved)."""

    samples: tuple[SampleResult, ...]
    num_prompt_tokens: int
    num_attempts: int
    started_at: float
    # 0: there is none yet.
    first_token_at: float
    # When the request ended; the time of this summary while it runs.
    finished_at: float
    prefill_replica: str
    decode_replica: str
    prefill: PrefillReport | None
    hand_over: HandOverReport | None
    # Moves of the stream, from one decode replica to another, in the last attempt.
    num_moves: int = 0
    # The value to which `max_tokens` was cut; 0: it was not.
    capped_max_tokens: int = 0
    # The samples' tokens that the caller brought to resume the request.
    num_resumed_tokens: int = 0
    # The attempts that ended at once, since a replica had more to do than the gateway knew.
    num_returns: int = 0

    @property
    def num_tries(self) -> int:
        """The attempts that a replica has taken on, and not sent back."""
        return self.num_attempts - self.num_returns

    @property
    def num_output_tokens(self) -> int:
        """The output tokens of all samples, including those that a resumed request came with."""
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def num_cached_tokens(self) -> int:
        """The tokens of the prompt that were not computed in the last attempt."""
        return self.prefill.num_cached_tokens if self.prefill else 0

    @property
    def ttft_s(self) -> float:
        """The time from acceptance to the first token, or to the end without one."""
        return (self.first_token_at or self.finished_at) - self.started_at

    @property
    def e2e_s(self) -> float:
        return self.finished_at - self.started_at

    @property
    def decode_s(self) -> float:
        """The time from the first token to the end."""
        return self.finished_at - (self.first_token_at or self.finished_at)

    @property
    def tpot_s(self) -> float:
        """The mean time of an output token after the first, samples being decoded in parallel; 0: there is
        none."""
        num_after_first = self.num_output_tokens - len(self.samples)
        return self.decode_s * len(self.samples) / num_after_first if num_after_first > 0 else 0.0

    @property
    def queue_s(self) -> float:
        """The time at the replica until the prompt was first scheduled. Like the next two it is a difference
        of times of one host: hosts' clocks are not comparable. 0: not known, or did not happen."""
        return _span_s(self.prefill.times.arrived, self.prefill.times.scheduled) if self.prefill else 0.0

    @property
    def prefill_s(self) -> float:
        return _span_s(self.prefill.times.scheduled, self.prefill.times.prefilled) if self.prefill else 0.0

    @property
    def transfer_s(self) -> float:
        """The time that writing the KV to the decode replica took, by the writer's clock."""
        moved = self.hand_over
        return moved.num_moved_bytes / moved.transfer_gb_s / 1e9 if moved and moved.transfer_gb_s else 0.0


class TimelineEntry(Part, frozen=True):
    """Something that happened to a request, for `Explain`."""

    at: float
    name: str
    detail: str


class RoutedAttempt(Part, frozen=True):
    """A decision of the router, and the attempt that it placed."""

    attempt: int
    decision: Decision


class Relative(Part, frozen=True):
    """The earlier prompt at the same gateway with which a prompt has the longest beginning in common, of
    those that are remembered. They part in the block behind `num_shared_tokens`, or one ends there."""

    # "": there is none.
    request_id: str = ""
    tenant: str = ""
    num_tokens: int = 0
    num_shared_tokens: int = 0


NO_RELATIVE = Relative()


class RequestInfo(Part, frozen=True):
    """The known facts of a request, as gateways send them to each other. `state` is "running", "finished",
    "cancelled" or "failed"; times are those of the gateway's clock."""

    request_id: str
    state: str
    reason: str
    started_at: float
    decisions: tuple[RoutedAttempt, ...]
    timeline: tuple[TimelineEntry, ...]
    tenant: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    # The cached tokens of the prompt, in the last attempt.
    num_cached_tokens: int = 0
    # 0: there is none yet.
    first_token_at: float = 0.0
    # 0: it is running.
    ended_at: float = 0.0
    relative: Relative = NO_RELATIVE


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended: the record from which logs, metrics, traces and answers are made. Times are
    seconds of the gateway's monotonic clock."""

    # The client's, or the one it was given; "" when it was refused without one.
    request_id: str
    # The id by which replicas know the request; "" when it was refused before it had one.
    wire_id: str
    tenant: str
    caller: Caller
    # "finished", "cancelled", "failed", or "refused": it was not accepted.
    state: str
    # Name of the gRPC status, "OK" when it finished.
    code: str
    reason: str
    started_at: float
    ended_at: float
    # The outcome, finished or not; None when the request was refused.
    summary: Summary | None = None
    decisions: tuple[RoutedAttempt, ...] = ()
    timeline: tuple[TimelineEntry, ...] = ()
    # The request as it was prepared; None when it was refused before.
    prepared: PreparedRequest | None = None
    # Its class; "": it was refused before it had one.
    service_class: str = ""
    # The `max_tokens` that the client named; 0: none.
    max_tokens: int = 0
    relative: Relative = NO_RELATIVE

    @property
    def ttft_s(self) -> float | None:
        """The time from acceptance to the first token."""
        if self.summary is None or not self.num_output_tokens:
            return None
        return self.summary.ttft_s

    @property
    def num_output_tokens(self) -> int:
        return self.summary.num_output_tokens if self.summary else 0

    def info(self) -> RequestInfo:
        """Return the facts for lists and explanations; the request was accepted."""
        assert self.summary is not None
        return request_info(
            self.request_id,
            self.tenant,
            self.state,
            self.reason,
            self.summary,
            self.decisions,
            self.timeline,
            self.relative,
        )


class RelayedRequest(NamedTuple):
    """A request that was passed on to another application, which has answered it."""

    request_id: str
    tenant: str
    peer: str
    application: str
    code: str
    e2e_ms: float


# Receives every ended request on the gateway's event loop: it must not block.
Observer = Callable[[EndedRequest], None]


def request_info(
    request_id: str,
    tenant: str,
    state: str,
    reason: str,
    summary: Summary,
    decisions: Iterable[RoutedAttempt],
    timeline: Iterable[TimelineEntry],
    relative: Relative = NO_RELATIVE,
) -> RequestInfo:
    """Return the facts for lists and explanations of a request that was accepted; `state` as there."""
    return RequestInfo(
        request_id=request_id,
        state=state,
        reason=reason,
        started_at=summary.started_at,
        decisions=tuple(decisions),
        timeline=tuple(timeline),
        tenant=tenant,
        num_prompt_tokens=summary.num_prompt_tokens,
        num_output_tokens=summary.num_output_tokens,
        num_cached_tokens=summary.num_cached_tokens,
        first_token_at=summary.first_token_at,
        ended_at=0.0 if state == "running" else summary.finished_at,
        relative=relative,
    )


def _span_s(start: float, end: float) -> float:
    return max(0.0, end - start) if start and end else 0.0
