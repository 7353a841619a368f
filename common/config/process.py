"""What every process of the service is told at its start, node or proxy."""

from __future__ import annotations

from dataclasses import dataclass

from common.config.flag import choice_flag, flag, seconds_flag, size_flag
from common.config.values import GIB, MIB, parse_url


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """The flags that nodes and the proxy both have."""

    max_body_bytes: int = size_flag(16 * MIB, "largest request body", 1024, GIB)
    drain_timeout_seconds: float = seconds_flag(
        30.0,
        "longest time that admitted requests, and leases of a prefill node, get to end after SIGTERM",
        0.0,
        3600.0,
    )
    api_key_file: str | None = flag(None, "file with the API keys that clients may use, one a line", metavar="FILE")
    cluster_key_file: str | None = flag(None, "file with the key of internal routes", metavar="FILE")
    log_level: str = choice_flag("info", "least severe messages to log", "debug", "info", "warning", "error")
    log_format: str = choice_flag("text", "log lines for people, or one JSON object a line", "text", "json")
    otlp_traces_endpoint: str | None = flag(
        None,
        "collector that gets a trace of each request over OTLP/HTTP, such as http://HOST:4318 (default: no tracing)",
        parse=parse_url,
        metavar="URL",
    )
