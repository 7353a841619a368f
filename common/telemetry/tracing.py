"""Spans of requests, made from times that the code measured anyway.

Life of a trace: 1 the client may send a W3C ``traceparent``, 2 the proxy begins the *request span* under it and sends
it on to every node: ``traceparent`` for the ordinary parent, and its id and begin once more as the member ``tandem`` of
``tracestate``, which survives hops in between, 3 each process names the phases it saw, with begin and end; phases are
the request span's children whoever names them, so that they stand beside each other: ``queue``, ``prefill``, ``pull``,
``first_token``, ``decode``. ``queue`` covers everything before the first work on the prompt, at the proxy too; across
hosts it is as exact as their clocks agree. Each node also has a span of its own, the request's leg there. Without a
proxy the node's span is the request span. 4 ``end``, on every way out; a span that was never ended is never exported.

Here is what everybody uses, as it is while tracing is off: objects that do nothing. ``common.telemetry.otel`` has those
that record. Names and attributes come from small fixed sets, or are counts and ids: never from what is asked or
answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONTEXT_HEADERS = ("traceparent", "tracestate")
"""Names of W3C Trace Context."""
MAX_HEADER_CHARS = 1024
"""Characters of one of them that are passed on; a longer one is dropped."""

# Given to FastAPI: else it traces and logs by itself where OpenTelemetry is configured, with what clients sent.
NO_FRAMEWORK_TELEMETRY: Any = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": False,
}

Value = str | bool | int | float


class RequestSpan:
    """One request in one process, not traced. Times are on ``time.monotonic``."""

    def request_start_s(self, own_s: float) -> float:
        """When the request came to the process that has the request span; ``own_s``: when it came here."""
        return own_s

    def headers(self) -> dict[str, str]:
        """What to send on to other processes; empty: leave the client's own headers as they are."""
        return {}

    def phase(self, name: str, start_s: float, end_s: float, **attributes: Value) -> None:
        """Something of the request took from ``start_s`` to ``end_s``."""

    def end(self, outcome: str, **attributes: Value) -> None:
        """The request is over. Later calls do nothing."""


NO_SPAN = RequestSpan()


class Tracer:
    """Tracing that is off."""

    def begin(self, route: str, request_id: str, headers: Mapping[str, str], start_s: float) -> RequestSpan:
        """A request to ``route`` came at ``start_s``; ``headers`` are the client's."""
        return NO_SPAN

    def close(self) -> None:
        """Send what is left. May block for a few seconds; nothing is recorded any more."""


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """A client's trace context as it goes on when this process does not trace itself."""
    found = {name: headers.get(name) for name in CONTEXT_HEADERS}
    return {name: value for name, value in found.items() if value is not None and len(value) <= MAX_HEADER_CHARS}
