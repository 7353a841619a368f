"""The proxy's part of a trace: the request span, what nodes are told of it, and nothing while tracing is off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.collector import Collector, collecting
from tests.unit.proxy.conftest import StartCluster
from tests.unit.proxy.fake_node import Fault

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs OpenTelemetry: deploy/install.py otel")

TRACE_ID, CLIENT_SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENT = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN_ID}-01", "tracestate": "other=1"}
BODY = {"prompt": "some words", "max_tokens": 3, "stream": True}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with collecting() as running:
        yield running


@pytest.mark.parametrize("pull", [False, True])
def test_trace_when_a_request_is_answered_then_nodes_hear_of_its_span(
    start_cluster: StartCluster, collector: Collector, pull: bool
) -> None:
    cluster = start_cluster(pull=pull, otlp_traces_endpoint=collector.url)
    assert cluster.client.post("/v1/completions", json=BODY, headers=CLIENT).status_code == 200
    (request,) = collector.wait_for(TRACE_ID, 1)
    assert (request.name, request.service, request.parent_id) == (
        "POST /v1/completions",
        "tandem-proxy",
        CLIENT_SPAN_ID,
    )
    assert request.attributes["tandem.outcome"] == "stop"
    assert not request.is_error
    assert "some words" not in str(request.attributes)
    legs = [leg for node in (*cluster.prefill, *cluster.decode) for leg in node.received if "/v1/" in leg.path]
    assert len(legs) == 2
    for leg in legs:
        assert leg.headers["traceparent"].startswith(f"00-{TRACE_ID}-{request.span_id}-")
        start_ns = round(request.start_s * 1e9)
        member, other = leg.headers["tracestate"].split(",")
        span_id, _, sent_ns = member.removeprefix("tandem=").partition("-")
        assert (span_id, other) == (request.span_id, "other=1")
        assert abs(int(sent_ns, 16) - start_ns) < 1e4


def test_trace_when_no_node_can_answer_then_the_request_span_is_an_error(
    start_cluster: StartCluster, collector: Collector
) -> None:
    cluster = start_cluster(0, 1, otlp_traces_endpoint=collector.url)
    cluster.decode[0].fault = Fault.BREAK_EARLY
    assert cluster.client.post("/v1/completions", json=BODY, headers=CLIENT).status_code >= 500
    (request,) = collector.wait_for(TRACE_ID, 1)
    assert request.is_error
    assert request.attributes["tandem.outcome"] == "error"


def test_trace_when_the_collector_is_away_then_requests_are_answered(start_cluster: StartCluster) -> None:
    cluster = start_cluster(otlp_traces_endpoint="http://127.0.0.1:9")
    assert cluster.client.post("/v1/completions", json=BODY).status_code == 200


def test_trace_when_off_then_no_span_is_sent_and_the_client_s_context_goes_on(
    start_cluster: StartCluster, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)  # the SDK's variable does not turn it on
    cluster = start_cluster()
    assert cluster.client.post("/v1/completions", json=BODY, headers=CLIENT).status_code == 200
    for node in (cluster.prefill[0], cluster.decode[0]):
        assert {name: node.received[-1].headers[name] for name in CLIENT} == CLIENT
    assert collector.num_posts == 0
