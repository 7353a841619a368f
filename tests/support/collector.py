"""An OTLP/HTTP collector for tests: keeps the spans that processes send, in plain form."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.http_server import wait_for


@dataclass(frozen=True)
class SpanSeen:
    """Ids are hex, ``parent_id`` is empty without a parent; times in seconds since the epoch."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    is_error: bool

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Collector:
    """``spans`` grows while processes send."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[SpanSeen] = []
        self.num_posts = 0

    def of(self, trace_id: str) -> list[SpanSeen]:
        """A trace's spans by their begin."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start_s)

    def wait_for(self, trace_id: str, num_spans: int) -> list[SpanSeen]:
        wait_for(lambda: len(self.of(trace_id)) >= num_spans, f"{num_spans} spans of {trace_id}")
        return self.of(trace_id)

    def take(self, path: str, content: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert path == "/v1/traces", path
        self.num_posts += 1
        for resource in ExportTraceServiceRequest.FromString(content).resource_spans:
            about = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [_seen(about, span) for span in scope.spans]


def _seen(about: dict[str, str], span: Any) -> SpanSeen:
    values = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
    return SpanSeen(
        service=about["service.name"],
        instance=about["service.instance.id"],
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        attributes=values,
        is_error=span.status.code == 2,
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free loopback port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                content = gzip.decompress(content)
            collector.take(self.path, content)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
