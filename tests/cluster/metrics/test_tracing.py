"""Traces of requests, received over real OTLP by a collector on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_harness import PROMPT, GatewayHarness, encode, until
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from cluster.api.generate_options import GenerateOptions
from cluster.config import ClusterConfig
from cluster.errors import CallError, ConfigError
from cluster.metrics.config import TracingConfig
from cluster.metrics.ended_request import Caller, EndedRequest, Summary, TimelineEntry
from cluster.metrics.request_stages import Stage, request_stages
from cluster.metrics.tracing import check_tracing
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.proto.tandem.v1 import inference_pb2_grpc
from kvtransfer.common.clock import SystemClock
from workers.messages.link import HandOverReport, PrefillReport, RequestFailed, StageTimes

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What a collector of OTLP over gRPC would store."""

    def __init__(self) -> None:
        self.exports: list[trace_service_pb2.ExportTraceServiceRequest] = []
        self._server = grpc.server(ThreadPoolExecutor(1))
        register: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        register(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:
        self.exports.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self) -> list[trace_pb2.Span]:
        return [
            span
            for export in self.exports
            for resource in export.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    opened = Collector()
    yield opened
    opened.close()


def traced(harness: GatewayHarness, endpoint: str, **tracing: float) -> ClusterConfig:
    return harness.config().model_copy(update={"tracing": TracingConfig(endpoint=endpoint, **tracing)})


async def a_pair(harness: GatewayHarness, config: ClusterConfig) -> str:
    """The address of its gateway."""
    await harness.add_replica("p0", "prefill")
    await harness.add_replica("d0", "decode")
    _, address = await harness.add_gateway(config)
    return address


def attributes(span: trace_pb2.Span) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value") or "") for item in span.attributes}


def children(spans: list[trace_pb2.Span], parent: trace_pb2.Span) -> dict[str, trace_pb2.Span]:
    return {span.name: span for span in spans if span.parent_span_id == parent.span_id}


async def test_a_request_is_a_trace_with_a_span_for_each_stage(
    harness: GatewayHarness, collector: Collector
) -> None:
    before = SystemClock().wall()
    client = harness.client(await a_pair(harness, traced(harness, collector.endpoint)))
    harness.replicas["p0"].script.loaded = {"dram": 4}
    await client.complete(PROMPT, GenerateOptions(request_id="mine", tenant="acme", max_tokens=5))
    await until(lambda: len(collector.spans()) == 8, "every span was received")
    spans = collector.spans()
    (root,) = (span for span in spans if not span.parent_span_id)
    assert {span.trace_id for span in spans} == {root.trace_id}
    told = attributes(root)
    assert (root.name, told["tandem.request_id"], told["tandem.tenant"]) == ("generate", "mine", "acme")
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (11, 5)
    assert (told["tandem.prefill_replica"], told["tandem.decode_replica"]) == ("p0", "d0")
    assert told["rpc.grpc.status"] == "OK"
    assert set(children(spans, root)) == {"accept", "route", "attempt"}
    attempt = children(spans, root)["attempt"]
    stages = children(spans, attempt)
    assert set(stages) == {"queue", "prefill", "transfer", "decode"}
    assert attributes(stages["prefill"])["tandem.cached_tokens.device"] == 6
    assert attributes(stages["prefill"])["tandem.cached_tokens.dram"] == 4
    assert attributes(stages["transfer"])["tandem.transport"] == "shm"
    assert attributes(stages["transfer"])["tandem.moved_bytes"] == 4096
    assert before * 1e9 <= root.start_time_unix_nano <= root.end_time_unix_nano
    for span in spans:
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    resource = collector.exports[0].resource_spans[0].resource
    names = {item.key: item.value.string_value for item in resource.attributes}
    assert names["service.name"] == "tandem-gateway"
    assert (names["service.namespace"], names["service.instance.id"]) == ("tandem", "g0")


async def call(address: str, traceparent: str) -> None:
    """As a client with OpenTelemetry of its own would."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=encode(PROMPT)), max_tokens=2)
        async for _ in stub.Generate(request, metadata=(("traceparent", traceparent),)):
            pass


async def test_the_caller_s_span_is_the_parent_and_its_decision_holds(
    harness: GatewayHarness, collector: Collector
) -> None:
    """With a ratio of 0 only what callers want traced is traced."""
    address = await a_pair(harness, traced(harness, collector.endpoint, sample_ratio=0.0))
    await call(address, f"00-{'1' * 32}-{SPAN_ID}-00")
    await call(address, "nonsense")
    await harness.client(address).complete(PROMPT, GenerateOptions(max_tokens=2))
    await call(address, f"00-{TRACE_ID}-{SPAN_ID}-01")
    await harness.gateways[0].stop()
    harness.gateways.clear()
    spans = collector.spans()
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
    (root,) = (span for span in spans if span.name == "generate")
    assert root.parent_span_id.hex() == SPAN_ID


async def test_what_waits_is_sent_when_the_gateway_stops(
    harness: GatewayHarness, collector: Collector
) -> None:
    client = harness.client(await a_pair(harness, traced(harness, collector.endpoint)))
    for _ in range(3):
        await client.complete(PROMPT, GenerateOptions(max_tokens=2))
    await harness.gateways[0].stop()
    harness.gateways.clear()
    assert sum(span.name == "generate" for span in collector.spans()) == 3


async def test_failed_attempts_and_refusals_are_errors(harness: GatewayHarness, collector: Collector) -> None:
    client = harness.client(await a_pair(harness, traced(harness, collector.endpoint)))
    harness.replicas["p0"].script.failure = RequestFailed("", 0, "internal", "a kernel broke")
    await client.complete(PROMPT, GenerateOptions(request_id="twice", max_tokens=3))
    with pytest.raises(CallError):
        await client.complete(PROMPT, GenerateOptions(request_id="bad", temperature=-1.0))
    await harness.gateways[0].stop()
    harness.gateways.clear()
    spans = collector.spans()
    roots = {attributes(span)["tandem.request_id"]: span for span in spans if not span.parent_span_id}
    inner = [span for span in spans if span.parent_span_id == roots["twice"].span_id]
    error = trace_pb2.Status.STATUS_CODE_ERROR
    told = [
        (span.name, span.status.code == error)
        for span in sorted(inner, key=lambda it: it.start_time_unix_nano)
    ]
    assert told == [
        ("accept", False),
        ("route", False),
        ("attempt", True),
        ("route", False),
        ("attempt", False),
    ]
    assert any("a kernel broke" in span.status.message for span in inner)
    assert roots["twice"].status.code != error
    assert roots["bad"].status.code == error
    assert "temperature" in roots["bad"].status.message


async def test_requests_do_not_notice_that_the_collector_is_away(harness: GatewayHarness) -> None:
    client = harness.client(await a_pair(harness, traced(harness, "http://127.0.0.1:1")))
    for number in range(20):
        done = await client.complete(PROMPT, GenerateOptions(seed=number, max_tokens=3))
        assert done.finish_reasons == ("length",)


def test_an_endpoint_must_be_a_url() -> None:
    check_tracing(TracingConfig())
    check_tracing(TracingConfig(endpoint="https://collector:4317"))
    with pytest.raises(ConfigError, match=r"tracing\.endpoint: 'collector:4317' must begin with http://"):
        check_tracing(TracingConfig(endpoint="collector:4317"))


# ------------------------------------------------------------------------------------ stages by themselves


def ended(
    timeline: list[tuple[float, str]], end: float, state: str = "finished", **summary: Any
) -> EndedRequest:
    known: dict[str, Any] = {"prefill": None, "hand_over": None, "num_attempts": 1, **summary}
    return EndedRequest(
        request_id="r",
        wire_id="r~1",
        tenant="",
        caller=Caller(),
        state=state,
        code="OK",
        reason="why" if state == "failed" else "",
        started_at=10.0,
        ended_at=end,
        summary=Summary(
            samples=(),
            num_prompt_tokens=3,
            started_at=10.0,
            first_token_at=end,
            finished_at=end,
            prefill_replica="p0",
            decode_replica="d0",
            **known,
        ),
        timeline=tuple(TimelineEntry(at, name, "") for at, name in timeline),
    )


def flatten(stage: Stage) -> list[Stage]:
    """The stage and all within it, outer ones first."""
    return [stage, *(inner for part in stage.stages for inner in flatten(part))]


def times(stage: Stage) -> dict[str, tuple[float, float]]:
    return {part.name: (part.start, part.end) for part in flatten(stage)}


WHOLE = [
    (10.1, "accepted"),
    (10.2, "routed"),
    (11.0, "prefilled"),
    (11.0, "first token"),
    (11.3, "handed over"),
    (12.0, "finished"),
]


def test_other_hosts_times_are_only_subtracted() -> None:
    """Their clocks are years apart from the gateway's and from each other's."""
    report = PrefillReport("r", 1, 3, 0, StageTimes(arrived=9000.0, scheduled=9000.3, prefilled=9000.7))
    moved = HandOverReport("r", 1, 0, 9, 0, "tcp", 1.0, StageTimes(9000.0, 0, 0, 9000.5, 77.0, 77.0))
    stages = times(request_stages(ended(WHOLE, 12.0, prefill=report, hand_over=moved)))
    assert stages == {
        "generate": (10.0, 12.0),
        "accept": (10.0, 10.1),
        "route": (10.1, 10.2),
        "attempt": (10.2, 12.0),
        "queue": (pytest.approx(10.3), pytest.approx(10.6)),
        "prefill": (pytest.approx(10.6), 11.0),
        "transfer": (pytest.approx(10.8), 11.3),
        "decode": (11.3, 12.0),
    }


def test_a_stage_never_begins_before_its_attempt() -> None:
    report = PrefillReport("r", 1, 3, 0, StageTimes(arrived=1.0, scheduled=50.0, prefilled=99.0))
    stages = times(request_stages(ended(WHOLE, 12.0, prefill=report)))
    assert stages["queue"] == (10.2, 10.2)
    assert stages["prefill"] == (10.2, 11.0)


def test_attempts_follow_one_another_and_the_last_failure_is_the_request_s() -> None:
    timeline = [
        (10.1, "accepted"),
        (10.2, "routed"),
        (10.5, "prefilled"),
        (10.6, "attempt failed"),
        (10.9, "routed"),
        (11.0, "attempt failed"),
        (11.0, "failed"),
    ]
    root = request_stages(ended(timeline, 11.001, "failed", num_attempts=2))
    assert [(part.name, part.start, part.end) for part in root.stages] == [
        ("accept", 10.0, 10.1),
        ("route", 10.1, 10.2),
        ("attempt", 10.2, 10.6),
        ("route", 10.6, 10.9),
        ("attempt", 10.9, 11.0),
    ]
    assert root.error == "why"
    assert [part.name for part in root.stages[2].stages] == ["prefill", "decode"]
    assert [part.name for part in root.stages[4].stages] == ["prefill"]


def test_a_request_without_a_place_has_looked_for_one_to_its_end() -> None:
    timeline = [(10.1, "accepted"), (10.2, "no route"), (13.0, "failed")]
    root = request_stages(ended(timeline, 13.001, "failed", num_attempts=0))
    assert [(part.name, part.start, part.end, part.error) for part in root.stages] == [
        ("accept", 10.0, 10.1, ""),
        ("route", 10.1, 13.0, "why"),
    ]


async def test_no_span_says_what_a_prompt_says(harness: GatewayHarness, collector: Collector) -> None:
    canary = "canaryquux"
    prompt, options = f"{canary} {PROMPT}", GenerateOptions(max_tokens=3)
    client = harness.client(await a_pair(harness, traced(harness, collector.endpoint)))
    await client.complete(prompt, options)
    with pytest.raises(CallError, match="temperature"):
        await client.complete(prompt, GenerateOptions(temperature=-1.0))
    harness.replicas["p0"].script.failure = RequestFailed("", 0, "invalid", "made up")
    with pytest.raises(CallError, match="made up"):
        await client.complete(prompt, options)
    harness.replicas["p0"].script.failure = RequestFailed("", 0, "grammar", f"a rank's words: {canary}")
    with pytest.raises(CallError, match=canary):  # for the caller alone
        await client.complete(prompt, options)
    await until(lambda: len({span.trace_id for span in collector.spans()}) == 4, "every trace was received")
    assert canary not in str(collector.exports)
