"""Which request the running code works for, so that each log line can name it, and each call to another process.

One context variable: a task inherits it from the task that made it. The ``Gate`` sets it at a request's begin;
tracing adds its ids. Code outside of requests (start, polling, the engine's thread) has none.
"""

from __future__ import annotations

import contextvars
import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogContext:
    """Ids of one request; ``trace_id`` (32 hex digits) and ``span_id`` (16) only while it is traced."""

    request_id: str
    trace_id: str | None = None
    span_id: str | None = None


_CURRENT: contextvars.ContextVar[LogContext | None] = contextvars.ContextVar("tandem_log_context", default=None)


def current_context() -> LogContext | None:
    return _CURRENT.get()


def current_request_id() -> str | None:
    context = _CURRENT.get()
    return None if context is None else context.request_id


def enter_request(request_id: str) -> None:
    """From here on this task, and those that it makes, work for ``request_id``."""
    _CURRENT.set(LogContext(request_id))


def name_span(trace_id: str, span_id: str) -> None:
    """The request that this task works for is traced under these ids. Nothing happens outside of a request."""
    context = _CURRENT.get()
    if context is not None:
        _CURRENT.set(dataclasses.replace(context, trace_id=trace_id, span_id=span_id))
