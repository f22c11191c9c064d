"""OpenTelemetry traces: one for each sampled request, made from the facts that are known when it has ended.

Nothing is done for a trace while the request runs. Spans wait in a bounded queue for a thread of the library
that sends them; when the collector is away they are dropped, and requests do not notice.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from typing import TYPE_CHECKING

from cluster.errors import ConfigError
from cluster.metrics.config import TracingConfig
from cluster.metrics.ended_request import EndedRequest
from cluster.metrics.request_stages import Stage, request_stages
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
    """Raise `ConfigError` where traces are configured and cannot be made."""
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
        """Send the waiting traces, for a few seconds at most."""
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
    """Return the caller's span, where the caller sent one that can be parsed."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if not ended.caller.traceparent:
        return None
    headers = {"traceparent": ended.caller.traceparent, "tracestate": ended.caller.tracestate}
    return TraceContextTextMapPropagator().extract(headers)


def _nanoseconds(unix_s: float) -> int:
    return int(unix_s * 1e9)
