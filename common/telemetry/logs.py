"""What a process logs, to stderr: lines for people (``--log-format text``) or one JSON object a line (``json``).

Both name the request that a line belongs to (``common.telemetry.context``); JSON adds role and node of the process and
the ids of a traced request. Messages never hold prompts, answers or keys: the code that logs must see to
that, nothing is filtered here.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
import threading
from types import TracebackType
from typing import Any, TextIO

from common.telemetry.context import current_context

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Loggers that say something about each request or connection: they begin at warning.
NOISY_LOGGERS = ("httpx", "httpcore", "uvicorn.error", "asyncio", "urllib3")


class TextFormatter(logging.Formatter):
    """One line; the request's id at its end when the message does not name it."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        line = super().formatMessage(record)
        context = current_context()
        if context is None or context.request_id in record.message:
            return line
        return f"{line} request_id={context.request_id}"


class JsonFormatter(logging.Formatter):
    """One object: ts (RFC 3339, UTC), level, logger, message, role, node, and where there is one request_id, trace_id,
    span_id, exception (a traceback as text)."""

    def __init__(self, *, role: str, node: str) -> None:
        super().__init__()
        self._process = {"role": role, "node": node}

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "ts": timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._process,
        }
        context = current_context()
        if context is not None:
            fields["request_id"] = context.request_id
            if context.trace_id is not None:
                fields |= {"trace_id": context.trace_id, "span_id": context.span_id}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


def timestamp(epoch_s: float) -> str:
    """``2026-01-31T12:00:00.123Z``."""
    moment = datetime.datetime.fromtimestamp(epoch_s, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def configure_logging(
    log_level: str, log_format: str = "text", *, role: str = "", node: str = "", stream: TextIO | None = None
) -> None:
    """Log to stderr. Called by each process's main, again when its ``node`` has changed, never by library code.

    With ``json`` Python's warnings and uncaught exceptions become log lines too: the stream holds nothing
    but objects, except for what libraries outside of Python print.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    is_json = log_format == "json"
    handler.setFormatter(JsonFormatter(role=role, node=node) if is_json else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_level.upper())
    for noisy in NOISY_LOGGERS:
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
    if is_json:
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def is_logging_json() -> bool:
    """Whether this process was told to log JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    logging.getLogger("tandem").critical(
        "uncaught %s", kind.__name__, exc_info=(kind, error, traceback) if error is not None else None
    )
