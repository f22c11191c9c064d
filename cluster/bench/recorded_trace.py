"""The latest requests of a running cluster, as a trace that can be replayed, and what came of each."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from cluster.api.admin_client import AdminClient
from cluster.bench.trace_file import TraceRequest
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb

_LATE = {"RESOURCE_EXHAUSTED": "expired", "DEADLINE_EXCEEDED": "timed out"}


class RecordedServing(NamedTuple):
    """What came of a recorded request: a `ServedRequest` at the times of its gateway, in Unix time."""

    sent_at: float
    finished_at: float
    outcome: str
    reason: str
    service_class: str
    num_input: int
    num_cached: int
    num_output: int
    num_samples: int
    # 0: there was no token.
    ttft_s: float

    @property
    def tpot_s(self) -> float | None:
        """The mean time of an output token after the first, samples being decoded in parallel."""
        num_after_first = self.num_output - self.num_samples
        if num_after_first <= 0 or not self.ttft_s:
            return None
        return (self.finished_at - self.sent_at - self.ttft_s) * self.num_samples / num_after_first

    @property
    def gaps_s(self) -> Sequence[float]:
        """Nothing: gateways record no times of single tokens."""
        return ()


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """The requests of all gateways in the order of their arrivals."""

    # As they are replayed.
    requests: list[TraceRequest]
    # What came of each, and of those that were refused before there was a prompt that could be meant.
    served: list[RecordedServing]
    # Unix time of the first arrival; 0: there is none.
    began_at: float
    # Unix time since when all requests are there; None: of no gateway.
    complete_since: float | None
    # Why a gateway gave none or not all, by its id.
    problems: dict[str, str]
    # Requests whose prompt, or whose output, is that of others because they were refused or failed.
    num_assumed: int

    @property
    def block_tokens(self) -> int | None:
        """The size of the blocks; None without a request."""
        return self.requests[0].block_tokens if self.requests else None


async def recorded_trace(client: AdminClient, last_s: float = 0.0) -> RecordedTrace:
    """Return the requests that arrived at any gateway in the last `last_s` seconds; 0: all that are kept.

    A request that was refused or failed has no output of its own, and if it was refused early, no known
    prompt. It gets the median output of the finished requests of its tenant and class (of all, if there are
    none), at most its `max_tokens`, and the length of the last prompt before it of the same tenant and class,
    of blocks that no other request has. Without any finished request, the output is its `max_tokens`.
    """
    found: list[tuple[admin_pb.RecordedRequest, int]] = []
    problems: dict[str, str] = {}
    complete: list[float] = []
    async for part in client.recording(last_s):
        found += [(each, part.block_tokens) for each in part.requests]
        if part.problem:
            problems[part.gateway_id] = part.problem
        if part.HasField("complete_since"):
            complete.append(part.complete_since)
    found.sort(key=lambda item: item[0].arrived_at)
    assumed = _AssumedLengths([each for each, _ in found])
    began_at = found[0][0].arrived_at if found else 0.0
    requests: list[TraceRequest] = []
    served: list[RecordedServing] = []
    number_of, fresh = _numbers()
    for each, block_tokens in found:
        served.append(_served(each))
        num_prompt = assumed.prompt(each)
        if not num_prompt:
            continue
        full = [number_of(block_id) for block_id in each.block_ids]
        num_blocks = -(-num_prompt // block_tokens)
        requests.append(
            TraceRequest(
                timestamp_ms=1e3 * (each.arrived_at - began_at),
                input_length=num_prompt,
                output_length=assumed.output(each),
                hash_ids=(*full, *(fresh() for _ in range(num_blocks - len(full)))),
                block_tokens=block_tokens,
                tenant=each.tenant,
                service_class=name_of(pb.ServiceClass, each.service_class),
            )
        )
    return RecordedTrace(
        requests=requests,
        served=served,
        began_at=began_at,
        complete_since=max(complete, default=None),
        problems=problems,
        num_assumed=assumed.num_assumed,
    )


def _numbers() -> tuple[Callable[[int], int], Callable[[], int]]:
    """Return a function from the numbers of blocks to small ones, in the order of their first use, and one
    that returns a small number that no block has."""
    numbers = count(1)
    known: dict[int, int] = {}

    def number_of(block_id: int) -> int:
        if block_id not in known:
            known[block_id] = next(numbers)
        return known[block_id]

    return number_of, lambda: next(numbers)


class _AssumedLengths:
    """The lengths of recorded requests, and those to assume where a request did not get that far."""

    def __init__(self, requests: Iterable[admin_pb.RecordedRequest]) -> None:
        outputs: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self._last_prompt: dict[tuple[str, int], int] = {}
        self.num_assumed = 0
        for each in requests:
            if each.state == "finished":
                outputs[each.tenant, each.service_class].append(each.num_output_tokens)
        self._outputs = {flow: round(statistics.median(values)) for flow, values in outputs.items()}
        every = [value for values in outputs.values() for value in values]
        self._any_output = round(statistics.median(every)) if every else 0

    def prompt(self, request: admin_pb.RecordedRequest) -> int:
        """Return the tokens of the prompt; 0: none is known that could be meant. Call it in the order of the
        arrivals."""
        flow = request.tenant, request.service_class
        if request.num_prompt_tokens:
            self._last_prompt[flow] = request.num_prompt_tokens
            return request.num_prompt_tokens
        return self._last_prompt.get(flow, 0)

    def output(self, request: admin_pb.RecordedRequest) -> int:
        """Return the tokens of the output."""
        if request.state in ("finished", "cancelled"):
            return request.num_output_tokens
        self.num_assumed += 1
        most = request.max_output_tokens * max(request.num_samples, 1)
        usual = self._outputs.get((request.tenant, request.service_class), self._any_output) or most
        return max(min(usual, most or usual), request.num_output_tokens)


def _served(request: admin_pb.RecordedRequest) -> RecordedServing:
    """Return what came of it. A cancelled request is "failed": it was not served to its end."""
    outcome = {"finished": "ok", "refused": "refused"}.get(request.state) or _LATE.get(request.code, "failed")
    return RecordedServing(
        sent_at=request.arrived_at,
        finished_at=request.arrived_at + request.e2e_s,
        outcome=outcome,
        reason="" if outcome == "ok" else request.code,
        service_class=name_of(pb.ServiceClass, request.service_class),
        num_input=request.num_prompt_tokens,
        num_cached=request.num_cached_tokens,
        num_output=request.num_output_tokens,
        num_samples=request.num_samples,
        ttft_s=request.ttft_s,
    )
