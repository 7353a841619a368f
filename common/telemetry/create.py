"""Which tracer a process gets. OpenTelemetry's SDK and exporter need not be installed while tracing is off, and are not
imported then (its API may be: FastAPI imports that for itself).
"""

from __future__ import annotations

import importlib.util

from common.errors import ConfigError, how_to_install
from common.telemetry.tracing import Tracer

ENDPOINT_FLAG = "--otlp-traces-endpoint"


def create_tracer(endpoint: str | None, *, role: str, name: str, version: str) -> Tracer:
    """``endpoint`` None: tracing is off. ``name``: of this process, among those of its ``role``.

    Raises ConfigError when OpenTelemetry is not installed.
    """
    if endpoint is None:
        return Tracer()
    check_tracing(endpoint)
    from common.telemetry.otel import create_otlp_tracer  # here: not installed where tracing is off

    return create_otlp_tracer(endpoint, role=role, name=name, version=version)


def check_tracing(endpoint: str | None) -> None:
    """Raise ConfigError when ``endpoint`` is set and OpenTelemetry is not installed. Imports none of its modules but
    empty packages."""
    if endpoint is not None and not _is_installed():
        raise ConfigError(
            f"{ENDPOINT_FLAG} {endpoint} needs OpenTelemetry ({how_to_install('otel')})", param=ENDPOINT_FLAG
        )


def _is_installed() -> bool:
    try:
        names = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
        return all(importlib.util.find_spec(name) is not None for name in names)
    except ModuleNotFoundError:  # of a parent package
        return False
