"""The dataset `mooncake`: the requests of a trace at their times, whose blocks are drawn by their ids."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

from cluster.bench.dataset_load import DatasetSettings, Load, RunSettings
from cluster.bench.drawn_tokens import BLOCK, drawn_tokens
from cluster.bench.serving_load import PlannedTurn, Session
from cluster.bench.trace_file import TraceRequest, read_trace
from cluster.errors import BenchError


def mooncake_load(path: Path, settings: DatasetSettings, run: RunSettings) -> Load:
    """Return the trace's first requests, at their times."""
    sessions: list[Session] = []
    first_ms: float | None = None
    num_left_out = 0
    for request in read_trace(path):
        num_output = max(1, min(request.output_length, settings.output_tokens or request.output_length))
        if run.context_tokens and request.input_length + num_output > run.context_tokens:
            num_left_out += 1
            continue
        first_ms = request.timestamp_ms if first_ms is None else first_ms
        at_s = max(0.0, request.timestamp_ms - first_ms) / 1e3 * settings.time_scale
        make = partial(block_prompt, request, run.vocab_size, run.seed)
        sessions.append(Session((PlannedTurn(make, num_output),), at_s))
        if len(sessions) == settings.num_requests:
            break
    if not sessions:
        raise BenchError(f"{path} has no request that fits into the model's context")
    return Load(sessions, num_left_out)


def block_prompt(request: TraceRequest, vocab_size: int, seed: int) -> list[int]:
    """Return a prompt of the request's length whose blocks are equal where their ids are."""
    blocks = (
        drawn_tokens(request.block_tokens, vocab_size, seed, BLOCK, block) for block in request.hash_ids
    )
    return list(itertools.islice(itertools.chain.from_iterable(blocks), request.input_length))
