"""What a journey is told to carry, what it asks its carrier to do, and what it leaves behind.

`journey` decides, `walk` carries. Times are seconds of the gateway's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from cluster.errors import RequestError
from kvtransfer.messages import ReplicaIdentity
from router.messages import Decision, RouteRequest
from workers.messages import (
    Cancel,
    HandOverReport,
    Move,
    PrefillReport,
    SamplingParams,
    Submission,
    TokenLogprob,
)


class RequestPhase(Enum):
    """See `journey.RequestState`."""

    NEW = auto()
    ROUTING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class SampleStart:
    """A sample as the client asks for it: `output` and `finish` are empty unless it resumes."""

    index: int
    seed: int
    output: bytes = b""
    finish: str = ""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One request, checked and tokenized. `request_id` is unique on the wire, also among resumed calls."""

    request_id: str
    tenant: str
    priority: int
    prompt: bytes
    block_keys: tuple[bytes, ...]
    sampling: SamplingParams
    samples: tuple[SampleStart, ...]
    deadline_at: float | None
    max_attempts: int = 5
    # How long a new request waits for any route at all.
    first_patience_s: float = 1.0
    # How long a request that lost its replicas waits for others (a replacement starts in seconds).
    patience_s: float = 20.0
    pinned_prefill: str = ""
    pinned_decode: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """Ask the router after `delay_s`, then tell the journey `on_routed` or `on_no_route`."""

    request: RouteRequest
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Submit:
    """Send the submission to the replica; if that is gone, tell the journey `on_unsent`."""

    replica: ReplicaIdentity
    submission: Submission


@dataclass(frozen=True, slots=True)
class RouteMove:
    """After `delay_s` find a place for `RequestState.move_request`, if it then has one, and tell the journey
    `on_move_routed`."""

    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MoveAt:
    """Send the order to the replica, if it is still there."""

    replica: ReplicaIdentity
    move: Move


@dataclass(frozen=True, slots=True)
class CancelAt:
    """Send the cancel to the replica, if it is still there."""

    replica: ReplicaIdentity
    cancel: Cancel


@dataclass(frozen=True, slots=True)
class NotePrefilled:
    """Tell the router that the prompt is computed, or that the stream has moved."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Release:
    """Tell the router that the attempt is over, or that the stream does not move."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Emit:
    """New tokens and text of one sample, for the client."""

    sample: int
    first_index: int
    tokens: bytes
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish: str


@dataclass(frozen=True, slots=True)
class SampleResult:
    """How one sample ended."""

    index: int
    finish: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A finished request. The reports are the last attempt's; None: not received (or nothing moved)."""

    samples: tuple[SampleResult, ...]
    num_prompt_tokens: int
    num_attempts: int
    started_at: float
    first_token_at: float
    finished_at: float
    prefill_replica: str
    decode_replica: str
    prefill: PrefillReport | None
    hand_over: HandOverReport | None
    # Of the stream, from one decode replica to another, in the last attempt.
    num_moves: int = 0

    @property
    def ttft_s(self) -> float:
        """From acceptance to the first token."""
        return self.first_token_at - self.started_at

    @property
    def e2e_s(self) -> float:
        return self.finished_at - self.started_at

    @property
    def decode_s(self) -> float:
        """From the first token to the end."""
        return self.finished_at - self.first_token_at

    @property
    def queue_s(self) -> float:
        """At the replica, until the prompt was first scheduled. Like the next two it is a difference of times
        of one host: hosts' clocks are not comparable. 0: not known, or did not happen."""
        return _span_s(self.prefill.times.arrived, self.prefill.times.scheduled) if self.prefill else 0.0

    @property
    def prefill_s(self) -> float:
        return _span_s(self.prefill.times.scheduled, self.prefill.times.prefilled) if self.prefill else 0.0

    @property
    def transfer_s(self) -> float:
        """What writing the KV to the decode replica took, by the writer's clock."""
        moved = self.hand_over
        return moved.num_moved_bytes / moved.transfer_gb_s / 1e9 if moved and moved.transfer_gb_s else 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """The request is complete. Terminal."""

    summary: Summary


@dataclass(frozen=True, slots=True)
class Fail:
    """The request is over without completing. Terminal."""

    error: RequestError


Action = Route | Submit | RouteMove | MoveAt | CancelAt | NotePrefilled | Release | Emit | Finish | Fail


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """Something that happened to a request, for `Explain`."""

    at: float
    name: str
    detail: str


@dataclass(frozen=True, slots=True)
class RoutedAttempt:
    """A decision of the router, and the attempt that it placed."""

    attempt: int
    decision: Decision


def _span_s(start: float, end: float) -> float:
    return max(0.0, end - start) if start and end else 0.0
