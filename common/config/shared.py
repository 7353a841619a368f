"""Words of the flags that nodes and the proxy both have."""

from __future__ import annotations

DRAIN_HELP = "longest time that admitted requests, and leases of a prefill node, get to end after SIGTERM"
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
OTLP_HELP = "collector that gets a trace of each request over OTLP/HTTP, such as http://HOST:4318 (default: no tracing)"
