"""What every process of the service is told at its start, node or proxy."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from common.config.flag import bool_flag, check_fields, choice_flag, flag, int_flag, seconds_flag, size_flag
from common.config.values import GIB, MIB, is_loopback_host, parse_url
from common.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """The flags that nodes and the proxy both have. A process that others can reach has a cluster key: without one it
    cannot tell the service's own processes from them, so that its internal routes are open, or of no use."""

    host: str = flag("127.0.0.1", "address to listen on", metavar="ADDR")
    max_body_bytes: int = size_flag(16 * MIB, "largest request body", 1024, GIB)
    limit_mm_per_prompt: str = flag(
        '{"image": 16}', 'images that one request may bring, as JSON: {"image": N}; 0: none', metavar="JSON"
    )
    max_image_pixels: int = int_flag(
        36_000_000, "largest image, by the size that its header says; it is refused before it is decoded", 1, 10**9
    )
    max_image_bytes: int = size_flag(20 * MIB, "largest encoded image", 1, GIB)
    structured_outputs_config: str = flag(
        "{}",
        "limits of structured output as JSON: backend, max_chars, max_compile_seconds, wait_seconds",
        metavar="JSON",
    )
    drain_timeout_seconds: float = seconds_flag(
        30.0,
        "longest time that admitted requests, and leases of a prefill node, get to end after SIGTERM",
        0.0,
        3600.0,
    )
    api_key_file: str | None = flag(None, "file with the API keys that clients may use, one a line", metavar="FILE")
    cluster_key_file: str | None = flag(None, "file with the key of internal routes", metavar="FILE")
    insecure_internal: bool = bool_flag(
        False, "listen beyond loopback without --cluster-key-file: internal routes are open to whoever reaches the port"
    )
    log_level: str = choice_flag("info", "least severe messages to log", "debug", "info", "warning", "error")
    log_format: str = choice_flag("text", "log lines for people, or one JSON object a line", "text", "json")
    otlp_traces_endpoint: str | None = flag(
        None,
        "collector that gets a trace of each request over OTLP/HTTP, such as http://HOST:4318 (default: no tracing)",
        parse=parse_url,
        metavar="URL",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.is_exposed and not self.insecure_internal:
            raise ConfigError(
                f"--host {self.host} is not a loopback address and there is no --cluster-key-file: whoever reaches the "
                "port could call internal routes (leases, transfers). Give all processes the same --cluster-key-file, "
                "or --insecure-internal where nobody else can reach them",
                param="--host",
            )

    @property
    def is_exposed(self) -> bool:
        """Whether others can reach this process and nothing tells them from the service's own processes."""
        return self.cluster_key_file is None and not is_loopback_host(self.host)

    def warn_if_exposed(self) -> None:
        """To be called once at the start, when logging is configured."""
        if self.is_exposed:
            logger.warning(
                "INSECURE: listening on %s without --cluster-key-file (--insecure-internal): whoever reaches the port "
                "can end leases and read what was computed of any prompt",
                self.host,
            )
