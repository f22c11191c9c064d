"""The recording of a gateway: its latest requests as numbers, from which a simulator replays them.

Keeps lengths, times and the leading blocks of prompts by shortened keys, and nothing of any text. Sans-I/O,
bounded in bytes and in time, not thread-safe.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple

from cluster.metrics.config import RecordingConfig
from cluster.metrics.ended_request import EndedRequest
from kvtransfer.codec import Part
from kvtransfer.common.clock import Clock

# The bytes of a block key that are kept: enough to tell the blocks of a recording apart.
SHORT_KEY_BYTES = 8
# The memory that a recorded request takes beside its keys.
_REQUEST_BYTES = 400
# A page of a recording ends with the request that exceeds one of these.
_MAX_PAGE_BYTES = 1 << 20
_MAX_PAGE_REQUESTS = 2000


class RecordedRequest(Part, frozen=True):
    """A request that has ended, without its text."""

    # Seconds of a gateway's monotonic clock.
    arrived_at: float
    # "finished", "cancelled", "failed", or "refused": it was not accepted.
    state: str
    # The name of the gRPC status, "OK" when it finished.
    code: str
    tenant: str
    service_class: str
    # 0: the request was refused before its prompt was tokenized.
    num_prompt_tokens: int
    num_cached_tokens: int
    # The output of all samples.
    num_output_tokens: int
    num_samples: int
    # The largest output that was asked of a sample; 0: not named.
    max_output_tokens: int
    # From arrival to the first token (0: there was none), and to the end.
    ttft_s: float
    e2e_s: float
    # The shortened keys of the prompt's full blocks, `SHORT_KEY_BYTES` each. Empty where no other request may
    # reuse the prompt.
    short_keys: bytes

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        return _REQUEST_BYTES + len(self.short_keys)


class RecordingPage(NamedTuple):
    """Recorded requests in the order of their ends. `next_number` is that of the page behind this one; None:
    this is the last one. Requests that arrived up to `complete_since` may lack."""

    requests: tuple[RecordedRequest, ...]
    next_number: int | None
    complete_since: float


class RequestRecording:
    """The latest requests of one gateway. `ended` is an `Observer`.

    A request that is older than `max_age_s`, or for which there is no space, is forgotten, the first that
    ended before all others. Every request has a number, by which pages continue while others are recorded and
    forgotten.
    """

    def __init__(self, config: RecordingConfig, clock: Clock) -> None:
        self._max_bytes = int(config.max_mb * 1e6)
        self._max_age_s = config.max_age_s
        self._clock = clock
        self._requests: deque[RecordedRequest] = deque()
        self._first_number = 0
        self._complete_since = clock.now()
        self._num_bytes = 0

    @property
    def is_on(self) -> bool:
        """Whether anything is recorded."""
        return self._max_bytes > 0

    @property
    def num_requests(self) -> int:
        """The number of requests that are kept."""
        self._forget()
        return len(self._requests)

    @property
    def num_bytes(self) -> int:
        """The memory that they take."""
        self._forget()
        return self._num_bytes

    def ended(self, request: EndedRequest) -> None:
        """Record a request."""
        if self.is_on:
            recorded = _recorded(request)
            self._requests.append(recorded)
            self._num_bytes += recorded.num_bytes
            self._forget()

    def page(self, arrived_since: float, first_number: int = 0) -> RecordingPage:
        """Return the requests that have arrived since then, from this number on."""
        self._forget()
        first = max(first_number - self._first_number, 0)
        found: list[RecordedRequest] = []
        num_bytes = 0
        for number, request in enumerate(islice(self._requests, first, None), self._first_number + first):
            if request.arrived_at < arrived_since:
                continue
            found.append(request)
            num_bytes += request.num_bytes
            if num_bytes >= _MAX_PAGE_BYTES or len(found) >= _MAX_PAGE_REQUESTS:
                return RecordingPage(tuple(found), number + 1, self._complete_since)
        return RecordingPage(tuple(found), None, self._complete_since)

    def _forget(self) -> None:
        """Forget what is too old or too much."""
        oldest = self._clock.now() - self._max_age_s
        while self._requests:
            first = self._requests[0]
            if self._num_bytes <= self._max_bytes and first.arrived_at + first.e2e_s >= oldest:
                return
            self._requests.popleft()
            self._first_number += 1
            self._num_bytes -= first.num_bytes
            self._complete_since = max(self._complete_since, first.arrived_at)


def _recorded(request: EndedRequest) -> RecordedRequest:
    prepared, summary = request.prepared, request.summary
    keys = () if prepared is None or prepared.facts.is_private else prepared.block_keys
    return RecordedRequest(
        arrived_at=request.started_at,
        state=request.state,
        code=request.code,
        tenant=request.tenant,
        service_class=request.service_class,
        num_prompt_tokens=prepared.num_prompt_tokens if prepared else 0,
        num_cached_tokens=summary.num_cached_tokens if summary else 0,
        num_output_tokens=request.num_output_tokens,
        num_samples=len(prepared.samples) if prepared else 1,
        max_output_tokens=prepared.sampling.max_tokens if prepared else request.max_tokens,
        ttft_s=request.ttft_s or 0.0,
        e2e_s=request.ended_at - request.started_at,
        short_keys=b"".join(key[:SHORT_KEY_BYTES] for key in keys),
    )
