"""Tracing that is on: request spans and phases as OpenTelemetry spans, sent by a background thread over OTLP/HTTP.

Recording costs the caller a few dictionaries; batching, encoding and sending happen in the exporter's thread. A
collector that is away costs spans, never requests. The SDK's own variables work: ``OTEL_TRACES_SAMPLER`` (a client's
sampling decision is kept by default), ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_BSP_*``, ``OTEL_RESOURCE_ATTRIBUTES``.
"""

from __future__ import annotations

import re
import threading
import time
import urllib.parse
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace import Tracer as OtelSdkTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.telemetry.context import name_span
from common.telemetry.tracing import RequestSpan, Tracer, Value

TRACES_PATH = "/v1/traces"
"""Route of OTLP over HTTP at a collector."""
STATE_MEMBER = "tandem"
"""Our member of ``tracestate``: the request span's id, and its begin in nanoseconds since 1970."""
CLOSE_DEADLINE_S = 3.0
"""Seconds that a process waits at its end for the last spans to be sent."""
MAX_BEFORE_S = 3600.0
"""A begin that lies further back than this many seconds is not believed: a clock is wrong, or somebody made it up."""
EXPORT_TIMEOUT_S = 5.0
"""Seconds for the collector to take one batch."""
FAILED_OUTCOMES = frozenset({"error"})
"""Outcomes of requests (``common.metrics.outcomes``) whose span has the status error."""

_MEMBER = re.compile(r"([0-9a-f]{16})-([0-9a-f]{1,16})")


def create_otlp_tracer(endpoint: str, *, role: str, name: str, version: str) -> OtelTracer:
    """``endpoint``: a collector's base URL, or the whole URL of its traces route."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=EXPORT_TIMEOUT_S)
    return OtelTracer(BatchSpanProcessor(exporter), role=role, name=name, version=version)


def traces_url(endpoint: str) -> str:
    """``http://host:4318`` means ``http://host:4318/v1/traces``; a URL with a path is taken as it is."""
    return endpoint if urllib.parse.urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + TRACES_PATH


class OtelTracer(Tracer):
    """Owns its provider and the processor's thread; nothing global is set."""

    def __init__(self, processor: SpanProcessor, *, role: str, name: str, version: str) -> None:
        resource = Resource.create(
            {"service.name": f"tandem-{role}", "service.instance.id": name, "service.version": version}
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("tandem", version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, route: str, request_id: str, headers: Mapping[str, str], start_s: float) -> RequestSpan:
        # One anchor for all times of a request: phases must fit together even when the wall clock is set.
        epoch_ns = time.time_ns() - int(time.monotonic() * 1e9)
        parent = self._propagator.extract(headers, context=Context())
        span = self._tracer.start_span(
            f"POST {route}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes={"http.request.method": "POST", "http.route": route, "tandem.request_id": request_id},
            start_time=epoch_ns + int(start_s * 1e9),
        )
        context = span.get_span_context()
        name_span(f"{context.trace_id:032x}", f"{context.span_id:016x}")
        return OtelRequestSpan(self._tracer, span, start_s, epoch_ns)

    def close(self) -> None:
        # A daemon thread: sending may retry for long, and Python waits for a thread pool's threads at exit.
        thread = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        thread.start()
        thread.join(CLOSE_DEADLINE_S)


class OtelRequestSpan(RequestSpan):
    """A request's span in this process; its phases go under the request span, be that this one or the proxy's."""

    def __init__(self, tracer: OtelSdkTracer, span: Span, start_s: float, epoch_ns: int) -> None:
        """``epoch_ns``: the wall clock's time when the monotonic clock was 0."""
        self._tracer = tracer
        self._span = span
        self._request_start_s = start_s
        self._phases: list[tuple[str, float, float, Mapping[str, Value]]] = []
        self._epoch_ns = epoch_ns
        context = span.get_span_context()
        self._context = context
        member = _MEMBER.fullmatch(context.trace_state.get(STATE_MEMBER) or "")
        if member is not None:
            above = SpanContext(context.trace_id, int(member[1], 16), True, context.trace_flags)
            self._phase_context = set_span_in_context(NonRecordingSpan(above))
            sent_s = (int(member[2], 16) - epoch_ns) / 1e9
            if start_s - MAX_BEFORE_S < sent_s < start_s:
                self._request_start_s = sent_s
        else:
            self._phase_context = set_span_in_context(span)

    def request_start_s(self, own_s: float) -> float:
        return self._request_start_s

    def headers(self) -> dict[str, str]:
        context = self._context
        span_id = f"{context.span_id:016x}"
        member = f"{span_id}-{self._ns(self._request_start_s):x}"
        state = context.trace_state
        state = (state.delete(STATE_MEMBER) if STATE_MEMBER in state else state).add(STATE_MEMBER, member)
        parent = f"00-{context.trace_id:032x}-{span_id}-{context.trace_flags:02x}"
        return {"traceparent": parent, "tracestate": state.to_header()}

    def phase(self, name: str, start_s: float, end_s: float, **attributes: Value) -> None:
        # Made into a span at the end: until then somebody may wait for the first token.
        self._phases.append((name, start_s, end_s, attributes))

    def end(self, outcome: str, **attributes: Value) -> None:
        if not self._span.is_recording():
            return
        for name, start_s, end_s, named in self._phases:
            phase = self._tracer.start_span(
                name, context=self._phase_context, attributes=_named(named), start_time=self._ns(start_s)
            )
            phase.end(self._ns(end_s))
        self._span.set_attributes({"tandem.outcome": outcome, **_named(attributes)})
        if outcome in FAILED_OUTCOMES:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(self._ns(time.monotonic()))

    def _ns(self, monotonic_s: float) -> int:
        return self._epoch_ns + int(monotonic_s * 1e9)


def _named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {f"tandem.{name}": value for name, value in attributes.items()}
