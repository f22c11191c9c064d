"""A call of a client of the simulated cluster: a request's task, whose output is counted and not read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cluster.admission.admission import RequestAdmission
from cluster.admission.queued_request import QueuedRequest
from cluster.errors import RequestError
from cluster.gateway.output_buffer import UnreadOutput
from cluster.gateway.request_task import Connections, RequestStart, RequestTask
from cluster.gateway.sample_output import Output
from cluster.simulation.virtual_time import EventQueue
from cluster.text.sample_text import SampleText, TextStep
from kvtransfer.blocks.keys import TOKEN_BYTES
from kvtransfer.request_facts import ServiceClass
from router.service import RouterService

_UNREAD = UnreadOutput(float("inf"))


class SimulatedRequest(NamedTuple):
    """A request before it arrives: its prompt as token ids (uint32, little-endian), and the tokens that its
    answer will have."""

    prompt: bytes
    num_output: int
    tenant: str = "tenant"
    service_class: ServiceClass = "standard"
    weight: float = 1.0

    @property
    def num_prompt(self) -> int:
        return len(self.prompt) // TOKEN_BYTES


@dataclass(slots=True, eq=False)
class CallRecord:
    """What became of a request; times are seconds of virtual time, None where it did not come so far."""

    number: int
    tenant: str
    service_class: ServiceClass
    num_prompt: int
    num_output: int
    arrived_at: float
    gateway: str = ""
    first_token_at: float | None = None
    ended_at: float | None = None
    # Why it was refused or failed, in words; "": it was not.
    error: str = ""
    # The reason by which it was refused: "late", "aged" and so on; "failed" for other errors.
    refusal: str = ""
    num_cached: int = 0
    num_attempts: int = 0
    num_moves: int = 0
    prefill: str = ""
    decode: str = ""

    @property
    def is_good(self) -> bool:
        """Whether all its tokens came."""
        return self.ended_at is not None and not self.error

    @property
    def ttft_s(self) -> float:
        return float("inf") if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def tpot_s(self) -> float:
        """The mean time of an output token after the first; 0 where there is no other."""
        if self.ended_at is None or self.first_token_at is None:
            return float("inf")
        return (self.ended_at - self.first_token_at) / max(1, self.num_output - 1)


class CountedText(SampleText):
    """The text of a sample whose tokens mean nothing."""

    def __init__(self) -> None:
        self.num_reasoning_tokens = 0

    def push(self, tokens: bytes, finish: str) -> TextStep:
        return TextStep(len(tokens) // TOKEN_BYTES, "", finish)


class SimulatedCall(RequestTask):
    """One running request. Its timers are events of virtual time."""

    def __init__(
        self,
        start: RequestStart,
        queued: QueuedRequest,
        events: EventQueue,
        *,
        connections: Connections,
        router: RouterService,
        admission: RequestAdmission,
        on_end: Callable[[RequestError | None], None],
    ) -> None:
        self._events = events
        super().__init__(
            start,
            queued,
            connections=connections,
            router=router,
            clock=events.clock,
            admission=admission,
            unread=_UNREAD,
            on_end=on_end,
        )

    def emit(self, delta: Output) -> None:
        """Drop the output: `RequestState` has counted it."""

    def _start_timer(self, delay_s: float, act: Callable[[], None]) -> None:
        def fire() -> None:
            if not self._has_ended:
                self._act(act)

        self._events.after(max(0.0, delay_s), fire)
