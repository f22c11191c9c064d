"""OpenTelemetry traces: one for each sampled request, made from what is known when it has ended.

Nothing is done for a trace while the request runs. Spans wait in a bounded queue for a thread of the library
that sends them; when the collector is away they are dropped, and requests do not notice.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.errors import ConfigError
from cluster.metrics.config import TracingConfig
from cluster.metrics.ended_request import EndedRequest, Summary, TimelineEntry
from cluster.shown_urls import without_secrets
from kvtransfer.common.clock import Clock

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind

_QUEUE_SPANS = 4096
_BATCH_SPANS = 512
_SEND_EVERY_MS = 1000
_EXPORT_TIMEOUT_S = 5.0
_STOP_S = 6.0
_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc"
_SERVICE = "tandem-gateway"

_log = logging.getLogger(__name__)


def check_tracing(config: TracingConfig) -> None:
    """`ConfigError` where traces are asked for and cannot be made."""
    if not config.endpoint:
        return
    try:
        found = importlib.util.find_spec(_EXPORTER) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ConfigError("tracing.endpoint: traces need OpenTelemetry's exporter: pip install '.[tracing]'")
    if not config.endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"tracing.endpoint: {without_secrets(config.endpoint)!r} must begin with http:// or https://, "
            "such as http://collector:4317"
        )


class RequestTracer:
    """An `Observer` that makes a trace of each ended request and sends it in the background."""

    def __init__(self, config: TracingConfig, *, app: str, gateway_id: str, model: str, clock: Clock) -> None:
        """`ConfigError` as `check_tracing`."""
        check_tracing(config)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        self._clock = clock
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=Resource.create(
                {
                    "service.name": _SERVICE,
                    "service.namespace": app,
                    "service.instance.id": gateway_id,
                    "tandem.model": model,
                }
            ),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(endpoint=config.endpoint, timeout=_EXPORT_TIMEOUT_S),
                max_queue_size=_QUEUE_SPANS,
                max_export_batch_size=_BATCH_SPANS,
                schedule_delay_millis=_SEND_EVERY_MS,
            )
        )
        self._tracer = self._provider.get_tracer("tandem")

    def __call__(self, ended: EndedRequest) -> None:
        from opentelemetry.trace import SpanKind

        root = request_stages(ended)
        unix_offset_s = self._clock.wall() - self._clock.now()
        self._send(root, _parent(ended), unix_offset_s, SpanKind.SERVER)

    async def stop(self) -> None:
        """Send what waits, for a few seconds at most."""
        stopping = asyncio.to_thread(self._provider.shutdown)
        try:
            async with asyncio.timeout(_STOP_S):
                await stopping
        except TimeoutError:
            _log.warning("some traces were not sent within %g s", _STOP_S)

    def _send(self, stage: Stage, parent: Context | None, offset_s: float, kind: SpanKind) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        span = self._tracer.start_span(
            stage.name,
            context=parent,
            kind=kind,
            attributes=stage.attributes,
            start_time=_nanoseconds(stage.start + offset_s),
        )
        if not span.is_recording():
            return
        for name, detail, at in stage.events:
            span.add_event(name, {"detail": detail} if detail else None, _nanoseconds(at + offset_s))
        if stage.error:
            span.set_status(Status(StatusCode.ERROR, stage.error))
        inside = set_span_in_context(span)
        for part in stage.stages:
            self._send(part, inside, offset_s, SpanKind.INTERNAL)
        span.end(_nanoseconds(max(stage.end, stage.start) + offset_s))


def _parent(ended: EndedRequest) -> Context | None:
    """The caller's span, where it sent one that can be parsed."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if not ended.caller.traceparent:
        return None
    headers = {"traceparent": ended.caller.traceparent, "tracestate": ended.caller.tracestate}
    return TraceContextTextMapPropagator().extract(headers)


def _nanoseconds(unix_s: float) -> int:
    return int(unix_s * 1e9)


# ----------------------------------------------------------------------------------------------
# The stages of an ended request on the gateway's clock: what a trace of it shows. No OpenTelemetry here.

_LEAST_S = 1e-9
_ENDS = ("finished", "failed")


@dataclass(slots=True)
class Stage:
    """A span of time [start, end] in seconds of the gateway's monotonic clock, and those within it."""

    name: str
    start: float
    end: float
    attributes: dict[str, str | int | float] = field(default_factory=dict)
    # (name, detail, when)
    events: list[tuple[str, str, float]] = field(default_factory=list)
    # Why it failed; "" when it did not.
    error: str = ""
    stages: list[Stage] = field(default_factory=list)


def request_stages(ended: EndedRequest) -> Stage:
    """The whole request, with `accept`, and for each attempt `route` and `attempt`; within an attempt
    `queue`, `prefill`, `transfer` and `decode`, as far as it came.

    Other hosts' times are comparable with nothing but times of the same host, so only their differences are
    used: the prefill ends when its report reaches the gateway, and queue, prefill and the transfer's begin
    lie before or after that by what the prefill replica measured. Of earlier attempts, whose reports are
    not kept, the gateway's own times alone are known.
    """
    root = Stage("generate", ended.started_at, ended.ended_at)
    root.attributes |= _request_attributes(ended)
    if ended.state in ("failed", "refused"):
        root.error = ended.reason or ended.code
    first = next((entry.at for entry in ended.timeline if entry.name == "accepted"), ended.ended_at)
    root.stages.append(Stage("accept", ended.started_at, first))
    if ended.state == "refused":
        root.stages[0].error = root.error
        return root
    for number, attempt in enumerate(_attempts(ended), 1):
        root.stages.append(attempt.route)
        if attempt.ran is not None:
            root.stages.append(attempt.ran)
            is_last = ended.summary is not None and number == ended.summary.num_attempts
            _fill(attempt, ended.summary if is_last else None)
    return root


@dataclass(slots=True)
class _Attempt:
    """What the timeline says of one attempt; `ran` is None while it looked for a place."""

    route: Stage
    ran: Stage | None = None
    entries: list[TimelineEntry] = field(default_factory=list)

    def when(self, name: str) -> float | None:
        return next((entry.at for entry in self.entries if entry.name == name), None)


def _attempts(ended: EndedRequest) -> list[_Attempt]:
    """From one end of routing to the next."""
    attempts: list[_Attempt] = []
    now: _Attempt | None = None
    for entry in ended.timeline:
        if entry.name == "accepted":
            now = _Attempt(Stage("route", entry.at, ended.ended_at))
            attempts.append(now)
        elif now is None:
            continue
        elif entry.name == "routed":
            now.route.end = entry.at
            now.ran = Stage("attempt", entry.at, ended.ended_at)
            now.ran.attributes["tandem.attempt"] = len(attempts)
        elif entry.name == "attempt failed" and now.ran is not None:
            now.ran.end, now.ran.error = entry.at, entry.detail
            now = _Attempt(Stage("route", entry.at, ended.ended_at))
            attempts.append(now)
        else:
            now.entries.append(entry)
            place = now.ran or now.route
            if entry.name in _ENDS:
                place.end = entry.at
            place.events.append((entry.name, entry.detail, entry.at))
    if now is not None and ended.state == "failed":
        (now.ran or now.route).error = ended.reason
    if now is not None and now.ran is None and now.route.end - now.route.start < _LEAST_S:
        attempts.pop()  # the last attempt that there might be had failed: nothing was looked for
    for number, decision in enumerate(ended.decisions):
        if number < len(attempts) and (ran := attempts[number].ran) is not None:
            ran.attributes["tandem.prefill_replica"] = decision.decision.compute_id
            ran.attributes["tandem.decode_replica"] = decision.decision.decode
            ran.attributes["tandem.policy"] = decision.decision.policy
    return attempts


def _fill(attempt: _Attempt, summary: Summary | None) -> None:
    """The stages within an attempt. `summary` has the reports of the last one."""
    ran = attempt.ran
    assert ran is not None
    prefilled_at = attempt.when("prefilled")
    end = ran.end if prefilled_at is None else prefilled_at
    start = ran.start
    prefill = Stage("prefill", start, end)
    report = summary.prefill if summary else None
    if report is not None and prefilled_at is not None and report.times.prefilled:
        times = report.times
        computing = Stage("prefill", prefilled_at - max(0.0, times.prefilled - times.scheduled), prefilled_at)
        computing.start = max(start, computing.start) if times.scheduled else start
        if times.scheduled and times.arrived:
            waited_s = max(0.0, times.scheduled - times.arrived)
            ran.stages.append(Stage("queue", max(start, computing.start - waited_s), computing.start))
        computing.events += [(name, "", prefilled_at + at - times.prefilled) for name, at in report.trace]
        num_loaded = sum(report.num_loaded_tokens.values())
        computing.attributes["tandem.cached_tokens.device"] = max(0, report.num_cached_tokens - num_loaded)
        for tier, num in report.num_loaded_tokens.items():
            computing.attributes[f"tandem.cached_tokens.{tier}"] = num
        prefill = computing
    if prefilled_at is None:
        prefill.error = ran.error
    ran.stages.append(prefill)
    handed_at = attempt.when("handed over")
    if handed_at is not None:
        ran.stages.append(_transfer(summary, prefilled_at, handed_at, start))
    decodes_from = max(
        (at for at in (attempt.when("first token"), handed_at) if at is not None), default=None
    )
    if decodes_from is None:
        decodes_from = prefilled_at
    if decodes_from is not None:
        ran.stages.append(Stage("decode", decodes_from, ran.end, error=ran.error))


def _transfer(summary: Summary | None, prefilled_at: float | None, handed_at: float, start: float) -> Stage:
    """It begins while the prompt is still computed: both times are the writer's."""
    begin = handed_at if prefilled_at is None else prefilled_at
    moved = summary.hand_over if summary else None
    report = summary.prefill if summary else None
    if (
        moved
        and report
        and prefilled_at is not None
        and moved.times.transfer_start
        and report.times.prefilled
    ):
        begin = prefilled_at + moved.times.transfer_start - report.times.prefilled
    stage = Stage("transfer", min(max(begin, start), handed_at), handed_at)
    if moved is not None:
        stage.attributes |= {
            "tandem.transport": moved.transport,
            "tandem.moved_bytes": moved.num_moved_bytes,
            "tandem.held_tokens": moved.num_held_tokens,
            "tandem.bad_pieces": moved.num_bad_pieces,
        }
    return stage


def _request_attributes(ended: EndedRequest) -> dict[str, str | int | float]:
    summary = ended.summary
    attributes: dict[str, str | int | float] = {
        "tandem.request_id": ended.request_id,
        "tandem.tenant": ended.tenant,
        "tandem.state": ended.state,
        "rpc.grpc.status": ended.code,
        "client.address": ended.caller.peer,
    }
    if summary is not None:
        attributes |= {
            "tandem.wire_id": ended.wire_id,
            "tandem.attempts": summary.num_attempts,
            "tandem.moves": summary.num_moves,
            "tandem.prefill_replica": summary.prefill_replica,
            "tandem.decode_replica": summary.decode_replica,
            "tandem.cached_tokens": summary.prefill.num_cached_tokens if summary.prefill else 0,
            "gen_ai.usage.input_tokens": summary.num_prompt_tokens,
            "gen_ai.usage.output_tokens": ended.num_output_tokens,
        }
        if ended.ttft_s is not None:
            attributes["tandem.ttft_ms"] = 1e3 * ended.ttft_s
    return attributes
