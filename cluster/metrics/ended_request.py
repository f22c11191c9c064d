"""What is known of a request when it has ended, for everyone who counts, logs or traces requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cluster.gateway.actions import PreparedRequest, RoutedAttempt, Summary, TimelineEntry


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, as the connection and its metadata tell it; "": they do not."""

    # As gRPC writes it, such as `ipv4:127.0.0.1:40112`.
    peer: str = ""
    # W3C Trace Context.
    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """One request, ended. Times are seconds of the gateway's monotonic clock."""

    # The client's, or the one it was given; "" when it was refused without one.
    request_id: str
    # What replicas know it by; "" when it was refused before it had one.
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
    # What it came to, finished or not; None when it was refused.
    summary: Summary | None = None
    decisions: tuple[RoutedAttempt, ...] = ()
    timeline: tuple[TimelineEntry, ...] = ()
    # What it asked for; None when it was refused.
    plan: PreparedRequest | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None without one."""
        if self.summary is None or not self.num_output_tokens:
            return None
        return self.summary.first_token_at - self.started_at

    @property
    def num_output_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.summary.samples) if self.summary else 0


class RelayedRequest(NamedTuple):
    """A request that was passed on to another application, which has answered it."""

    request_id: str
    tenant: str
    peer: str
    application: str
    code: str
    e2e_ms: float


# Is told every ended request, on the gateway's event loop: it must not wait.
Observer = Callable[[EndedRequest], None]
