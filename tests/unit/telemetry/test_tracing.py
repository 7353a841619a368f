"""Request spans: off they are nothing, on they are a tree that crosses processes."""

from __future__ import annotations

import contextvars
import re
import subprocess
import sys
import time
from typing import Any

import pytest

from common.engine.outputs import PhaseSeconds
from common.errors import ConfigError
from common.node.serving.request_record import trace_phases
from common.telemetry.context import LogContext, current_context, enter_request
from common.telemetry.create import create_tracer
from common.telemetry.tracing import NO_SPAN, Tracer, passed_on
from tests.support.service import ROOT, child_environment

pytest.importorskip("opentelemetry.sdk", reason="needs OpenTelemetry: deploy/install.py otel")
import itertools

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.telemetry.otel import OtelTracer, traces_url

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ROUTE = "/v1/completions"


class Traced:
    """A proxy's and a node's tracer with one exporter in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.proxy = self.tracer("proxy")
        self.node = self.tracer("decode")

    def tracer(self, role: str) -> OtelTracer:
        return OtelTracer(SimpleSpanProcessor(self.exporter), role=role, name=f"{role}-1", version="1")

    def spans(self) -> dict[str, ReadableSpan]:
        """Finished spans by ``service name``."""
        return {f"{each.resource.attributes['service.name']} {each.name}": each for each in self.spans_in_order()}

    def phases(self) -> list[ReadableSpan]:
        return [each for each in self.spans_in_order() if not each.name.startswith("POST")]

    def spans_in_order(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()


@pytest.fixture
def traced() -> Traced:
    return Traced()


def parent_id(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def test_trace_when_a_request_crosses_processes_then_phases_are_siblings_under_the_request_span(traced: Traced) -> None:
    now = time.monotonic()
    request = traced.proxy.begin(ROUTE, "req-1", {"traceparent": CLIENT, "tracestate": "other=1,tandem=junk"}, now)
    request.phase("queue", now, now + 1)
    sent = request.headers()
    assert re.fullmatch(r"00-0af7651916cd43dd8448eb211c80319c-[0-9a-f]{16}-01", sent["traceparent"])
    assert re.fullmatch(r"tandem=[0-9a-f]{16}-[0-9a-f]+,other=1", sent["tracestate"])
    leg = traced.node.begin(ROUTE, "req-1", sent, now + 0.5)
    assert leg.request_start_s(now + 0.5) == pytest.approx(now, abs=0.01)
    leg.phase("decode", now + 1, now + 3, output_tokens=4)
    leg.end("stop", prompt_tokens=7)
    request.end("stop")
    spans = traced.spans()
    top = spans["tandem-proxy POST /v1/completions"]
    assert f"{parent_id(top):016x}" == "b7ad6b7169203331"
    for name in ("tandem-proxy queue", "tandem-decode decode", "tandem-decode POST /v1/completions"):
        assert parent_id(spans[name]) == span_id(top), name
    assert {each.context.trace_id for each in spans.values() if each.context} == {0x0AF7651916CD43DD8448EB211C80319C}
    decode = spans["tandem-decode decode"]
    assert decode.start_time is not None
    assert decode.end_time is not None
    assert abs(decode.end_time - decode.start_time - 2e9) < 1e3
    assert dict(decode.attributes or {}) == {"tandem.output_tokens": 4}
    assert (top.attributes or {})["tandem.outcome"] == "stop"
    assert abs((top.start_time or 0) / 1e9 - time.time()) < 60


def test_trace_when_a_hop_changes_the_parent_then_phases_still_belong_to_the_request_span(traced: Traced) -> None:
    request = traced.proxy.begin(ROUTE, "r", {}, time.monotonic())
    sent = request.headers()
    trace_id = sent["traceparent"].split("-")[1]
    hop = {**sent, "traceparent": f"00-{trace_id}-00000000000000aa-01"}
    leg = traced.node.begin(ROUTE, "r", hop, time.monotonic())
    leg.phase("pull", 1.0, 2.0)
    leg.end("stop")
    request.end("stop")
    spans = traced.spans()
    assert parent_id(spans["tandem-decode pull"]) == span_id(spans["tandem-proxy POST /v1/completions"])
    assert parent_id(spans["tandem-decode POST /v1/completions"]) == 0xAA


def test_trace_when_there_is_no_proxy_then_the_node_s_span_is_the_request_span(traced: Traced) -> None:
    leg = traced.node.begin(ROUTE, "r", {"traceparent": CLIENT}, time.monotonic())
    leg.phase("queue", 1.0, 2.0)
    leg.end("error")
    leg.end("stop")
    leg.phase("late", 1.0, 2.0)
    spans = traced.spans()
    assert set(spans) == {"tandem-decode queue", "tandem-decode POST /v1/completions"}
    top = spans["tandem-decode POST /v1/completions"]
    assert parent_id(spans["tandem-decode queue"]) == span_id(top)
    assert not top.status.is_ok
    assert (top.attributes or {})["tandem.outcome"] == "error"


def test_trace_when_the_client_does_not_sample_then_nothing_is_recorded_and_nodes_hear_so(traced: Traced) -> None:
    request = traced.proxy.begin(ROUTE, "r", {"traceparent": CLIENT[:-1] + "0"}, time.monotonic())
    sent = request.headers()
    assert sent["traceparent"].endswith("-00")
    leg = traced.node.begin(ROUTE, "r", sent, time.monotonic())
    for span in (leg, request):
        span.phase("queue", 1.0, 2.0)
        span.end("stop")
    assert traced.spans_in_order() == ()


@pytest.mark.parametrize("header", ["", "00-zz-zz-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 5000])
def test_trace_when_the_client_s_header_is_no_trace_context_then_a_trace_begins(traced: Traced, header: str) -> None:
    traced.proxy.begin(ROUTE, "r", {"traceparent": header, "tracestate": "=,=;"}, time.monotonic()).end("stop")
    (span,) = traced.spans_in_order()
    assert span.parent is None


def test_trace_when_it_begins_then_log_lines_of_the_request_carry_its_ids(traced: Traced) -> None:
    def begin() -> tuple[dict[str, str], LogContext | None]:
        enter_request("r")
        return traced.proxy.begin(ROUTE, "r", {}, time.monotonic()).headers(), current_context()

    sent, context = contextvars.copy_context().run(begin)
    assert context is not None
    assert sent["traceparent"].startswith(f"00-{context.trace_id}-{context.span_id}-")


def test_phases_of_a_prompt_lie_back_to_back_from_its_arrival_to_now(traced: Traced) -> None:
    leg = traced.node.begin(ROUTE, "r", {}, time.monotonic())
    start_s = time.monotonic() - 10
    seconds = PhaseSeconds(prefill=3.0, transfer=2.0, first_token=0.9, scheduled_s=start_s + 4)
    trace_phases(leg, seconds, start_s=start_s)
    leg.end("stop")
    spans = sorted(traced.phases(), key=lambda each: each.start_time or 0)
    assert [each.name for each in spans] == ["queue", "pull", "prefill", "first_token"]
    lengths = [((each.end_time or 0) - (each.start_time or 0)) / 1e9 for each in spans]
    assert lengths == pytest.approx([4.0, 2.0, 3.0, 1.0], abs=0.1)
    for before, after in itertools.pairwise(spans):
        assert before.end_time == pytest.approx(after.start_time, abs=1000)


def test_phases_of_a_pulled_prompt_begin_when_it_was_ready_and_have_no_queue(traced: Traced) -> None:
    leg = traced.node.begin(ROUTE, "r", {}, time.monotonic())
    ready_s = time.monotonic() - 1
    trace_phases(leg, PhaseSeconds(transfer=0.25, first_token=0.5, scheduled_s=ready_s - 3), start_s=ready_s)
    leg.end("stop")
    pull, first = sorted(traced.phases(), key=lambda each: each.start_time or 0)
    assert (pull.name, first.name) == ("pull", "first_token")
    assert ((pull.end_time or 0) - (pull.start_time or 0)) / 1e9 == pytest.approx(0.25, abs=0.01)
    assert ((first.end_time or 0) - (pull.start_time or 0)) / 1e9 == pytest.approx(1.0, abs=0.1)


def test_tracer_when_there_is_no_endpoint_then_it_does_nothing() -> None:
    tracer = create_tracer(None, role="proxy", name="proxy", version="1")
    assert type(tracer) is Tracer
    span = tracer.begin(ROUTE, "r", {"traceparent": CLIENT}, 0.0)
    assert span is NO_SPAN
    assert span.headers() == {}
    span.phase("queue", 0.0, 1.0)
    span.end("stop")
    tracer.close()


def test_process_when_tracing_is_off_then_neither_sdk_nor_exporter_is_imported() -> None:
    code = (
        "import sys\n"
        "from common.config.proxy import ProxyConfig\n"
        "from proxy.app import create_app\n"
        "import proxy.__main__, common.node.serving.request_record, common.cli.main\n"
        "import common.telemetry.create as create\n"
        "from fastapi.testclient import TestClient\n"
        "with TestClient(create_app(ProxyConfig(decode=('http://127.0.0.1:9',)))) as client:\n"
        "    assert client.post('/v1/completions', json={'prompt': 'a'}).status_code == 503\n"
        "create.create_tracer(None, role='proxy', name='proxy', version='1')\n"
        "parts = ('opentelemetry.sdk', 'opentelemetry.exporter', 'common.telemetry.otel')\n"
        "print([name for name in sys.modules if name.startswith(parts)])\n"
    )
    # Nor when somebody lets FastAPI set OpenTelemetry up for itself.
    environment = child_environment(
        FASTAPI_OTEL_AUTO_CONFIGURE="true", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout == "[]\n", result.stderr


def test_tracer_when_opentelemetry_is_missing_then_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real_find: Any = __import__("importlib.util").util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(name)
        return real_find(name, package)

    monkeypatch.setattr("importlib.util.find_spec", find)
    wanted = r"--otlp-traces-endpoint http://x:4318 .*deploy/install\.py otel; .*NODE_EXTRAS=node,images,otel\)$"
    with pytest.raises(ConfigError, match=wanted):
        create_tracer("http://x:4318", role="proxy", name="proxy", version="1")


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://x:4318", "http://x:4318/v1/traces"),
        ("http://x:4318/", "http://x:4318/v1/traces"),
        ("https://x/otlp/v1/traces", "https://x/otlp/v1/traces"),
    ],
)
def test_traces_url_when_the_endpoint_has_no_path_then_the_standard_one_is_added(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


def test_passed_on_when_this_process_does_not_trace_then_the_client_s_context_goes_on() -> None:
    headers = {"traceparent": CLIENT, "tracestate": "x" * 2000, "cookie": "secret"}
    assert passed_on(headers) == {"traceparent": CLIENT}


@pytest.mark.parametrize("offset_s", [60.0, -7200.0])
def test_trace_when_clocks_disagree_wildly_then_a_node_counts_from_its_own_begin(
    traced: Traced, offset_s: float
) -> None:
    now = time.monotonic()
    sent = traced.proxy.begin(ROUTE, "r", {}, now + offset_s).headers()
    leg = traced.node.begin(ROUTE, "r", sent, now)
    assert leg.request_start_s(now) == now
