"""A trace in Mooncake's format, as simulations read it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from cluster.bench.trace_file import TRACE_BLOCK_TOKENS, read_trace
from cluster.errors import BenchError
from cluster.simulation.trace_requests import TracedRequest


class MooncakeTrace:
    """The first requests of a file (None: all), at their times, `time_scale` times as far apart."""

    block_tokens = TRACE_BLOCK_TOKENS

    def __init__(self, path: Path, num_requests: int | None = None, time_scale: float = 1.0) -> None:
        """Raises `BenchError` where the file cannot be read, or has no request."""
        self._path = path
        self._num_requests = num_requests
        self._time_scale = time_scale
        first = next(iter(read_trace(path)), None)
        if first is None:
            raise BenchError(f"{path} has no requests")
        self._first_ms = first.timestamp_ms

    def __iter__(self) -> Iterator[TracedRequest]:
        for request in islice(read_trace(self._path), self._num_requests):
            at_s = max(0.0, request.timestamp_ms - self._first_ms) / 1e3 * self._time_scale
            yield TracedRequest(at_s, request.input_length, request.output_length, request.hash_ids)
