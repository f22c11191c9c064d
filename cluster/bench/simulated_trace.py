"""Traces for simulations: of a file in Mooncake's format, or of what a running cluster has recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from cluster.bench.trace_file import TraceRequest, read_trace
from cluster.errors import BenchError
from cluster.simulation.trace_requests import TracedRequest
from kvtransfer.request_facts import SERVICE_CLASSES


class FileTrace:
    """The first requests of a file (None: all), at their times, `time_scale` times as far apart."""

    def __init__(self, path: Path, num_requests: int | None = None, time_scale: float = 1.0) -> None:
        """Raises `BenchError` where the file cannot be read, or has no request."""
        self._path = path
        self._num_requests = num_requests
        self._time_scale = time_scale
        first = next(iter(read_trace(path)), None)
        if first is None:
            raise BenchError(f"{path} has no requests")
        self.block_tokens = first.block_tokens
        self._first_ms = first.timestamp_ms

    def __iter__(self) -> Iterator[TracedRequest]:
        requests = islice(read_trace(self._path), self._num_requests)
        return _traced(requests, self._first_ms, self._time_scale)


class RecordedRequests:
    """Requests that were read before, at least one."""

    def __init__(self, requests: list[TraceRequest]) -> None:
        self._requests = requests
        self.block_tokens = requests[0].block_tokens

    def __iter__(self) -> Iterator[TracedRequest]:
        return _traced(self._requests, self._requests[0].timestamp_ms, 1.0)


def _traced(requests: Iterable[TraceRequest], first_ms: float, scale: float) -> Iterator[TracedRequest]:
    for request in requests:
        at_s = max(0.0, request.timestamp_ms - first_ms) / 1e3 * scale
        service_class = request.service_class if request.service_class in SERVICE_CLASSES else "standard"
        yield TracedRequest(
            at_s,
            request.input_length,
            request.output_length,
            request.hash_ids,
            request.tenant or "tenant",
            service_class,
        )
