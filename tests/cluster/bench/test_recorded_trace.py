"""A recording as a trace: order, block ids, and the lengths of requests that did not get so far."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from cluster.api.admin_client import AdminClient
from cluster.bench.recorded_trace import RecordedTrace, recorded_trace
from cluster.bench.serving_figures import Objectives, figures_table, summarize
from cluster.bench.trace_file import read_trace, write_trace
from cluster.cli.durations import read_duration_s
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb

BLOCK_TOKENS = 16


def recorded(arrived_at: float, num_prompt: int, *block_ids: int, **fields: Any) -> admin_pb.RecordedRequest:
    given = {
        "state": "finished",
        "code": "OK",
        "tenant": "acme",
        "service_class": pb.SERVICE_CLASS_STANDARD,
        "num_output_tokens": 10,
        "num_samples": 1,
        "max_output_tokens": 50,
        "ttft_s": 0.5,
        "e2e_s": 1.4,
        **fields,
    }
    return admin_pb.RecordedRequest(
        arrived_at=arrived_at, num_prompt_tokens=num_prompt, block_ids=block_ids, **given
    )


class RecordingClient:
    """A client of gateways that gave these parts."""

    def __init__(self, *parts: admin_pb.RecordingPart) -> None:
        self.parts = parts

    async def recording(self, last_s: float) -> AsyncIterator[admin_pb.RecordingPart]:
        for part in self.parts:
            yield part


def part(gateway_id: str, requests: Sequence[admin_pb.RecordedRequest], **fields: Any) -> Any:
    return admin_pb.RecordingPart(
        gateway_id=gateway_id, requests=requests, block_tokens=BLOCK_TOKENS, **fields
    )


async def read(*parts: admin_pb.RecordingPart) -> RecordedTrace:
    return await recorded_trace(cast(AdminClient, RecordingClient(*parts)), 600.0)


async def test_requests_of_all_gateways_are_in_the_order_of_their_arrivals(tmp_path: Path) -> None:
    trace = await read(
        part("g0", [recorded(1000.5, 40, 1 << 52, 77), recorded(1000.0, 20, 1 << 52)], complete_since=900.0),
        part("g1", [recorded(1000.25, 16, 5)], complete_since=950.0),
        part("g2", [], problem="is away"),
    )
    assert [it.timestamp_ms for it in trace.requests] == [0.0, 250.0, 500.0]
    assert [it.input_length for it in trace.requests] == [20, 16, 40]
    # The first block of the first and the last is the same, and every partial one is new.
    assert [it.hash_ids for it in trace.requests] == [(1, 2), (3,), (1, 4, 5)]
    assert (trace.block_tokens, trace.began_at, trace.complete_since) == (BLOCK_TOKENS, 1000.0, 950.0)
    assert trace.problems == {"g2": "is away"}
    assert {(it.tenant, it.service_class) for it in trace.requests} == {("acme", "standard")}
    write_trace(tmp_path / "trace.jsonl", trace.requests)
    assert list(read_trace(tmp_path / "trace.jsonl")) == trace.requests


async def test_what_did_not_finish_has_the_lengths_of_others() -> None:
    refused = {"state": "refused", "code": "RESOURCE_EXHAUSTED", "num_output_tokens": 0, "ttft_s": None}
    batch = {"service_class": pb.SERVICE_CLASS_BATCH}
    requests = [
        recorded(0.5, 0, **refused),  # nothing is known before it
        recorded(1.0, 40, 1, 2),
        recorded(2.0, 40, 1, 2, num_output_tokens=30),
        recorded(3.0, 0, **refused, max_output_tokens=0),
        recorded(4.0, 32, 8, 9, **refused, max_output_tokens=15),
        recorded(5.0, 32, 8, 9, **{**refused, **batch}),
        recorded(6.0, 32, 8, 9, state="cancelled", code="CANCELLED", num_output_tokens=2),
        recorded(7.0, 32, 8, 9, **{**refused, "state": "failed", "code": "UNAVAILABLE"}),
    ]
    trace = await read(part("g0", requests))
    lengths = [(it.input_length, it.output_length) for it in trace.requests]
    assert lengths == [(40, 10), (40, 30), (40, 20), (32, 15), (32, 20), (32, 2), (32, 20)]
    assert set(trace.requests[2].hash_ids).isdisjoint(trace.requests[0].hash_ids)
    assert trace.num_assumed == 4
    (alone,) = (await read(part("g0", [recorded(0.0, 20, 3, **refused)]))).requests
    assert alone.output_length == 50


async def test_what_came_of_the_requests_has_the_figures_of_a_benchmark() -> None:
    trace = await read(
        part(
            "g0",
            [
                recorded(0.0, 100, num_cached_tokens=25),
                recorded(1.0, 100, num_output_tokens=20, num_samples=2, e2e_s=2.3),
                recorded(1.5, 0, state="refused", code="RESOURCE_EXHAUSTED", ttft_s=None),
                recorded(2.0, 50, state="failed", code="RESOURCE_EXHAUSTED", num_output_tokens=0),
                recorded(2.0, 50, state="failed", code="DEADLINE_EXCEEDED", num_output_tokens=1),
                recorded(2.0, 50, state="cancelled", code="CANCELLED", num_output_tokens=1),
            ],
        )
    )
    figures = summarize(trace.served, Objectives(ttft_ms=600.0, tpot_ms=150.0))
    assert (figures.num_ok, figures.num_refused, figures.num_expired) == (2, 1, 1)
    assert (figures.num_timed_out, figures.num_failed) == (1, 1)
    assert figures.tpot_ms is not None
    assert figures.tpot_ms["mean"] == pytest.approx((100.0 + 200.0) / 2)
    assert figures.itl_ms is None
    assert figures.cached_share == pytest.approx(0.125)
    assert figures.good_share == pytest.approx(1 / 6)
    rows = list(figures_table([("recorded", figures)], "recorded").columns[0].cells)
    assert "TTFT p50, ms" in rows


def test_spans_of_time_are_read() -> None:
    assert [read_duration_s(text, "--last") for text in ("90", "90s", "1.5m", "2h")] == [90, 90, 90, 7200]
    for text in ("", "0m", "-5s", "10 minutes", "1d"):
        with pytest.raises(typer.BadParameter, match="such as 90s, 10m or 2h"):
            read_duration_s(text, "--last")
