"""A traced request through real processes: one tree of spans, phases beside each other that add up to the whole."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.support.collector import Collector, SpanSeen, collecting
from tests.support.http_server import wait_for
from tests.support.models import checkpoint
from tests.support.reference import random_tokens
from tests.support.service import Service

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs OpenTelemetry: deploy/install.py otel")
pytestmark = pytest.mark.full

FLAGS = ("--dtype", "float32", "--max-num-batched-tokens", "256", "--kv-cache-memory", "128MiB", "--log-format", "json")
PHASES = ("queue", "prefill", "pull", "first_token", "decode")
SERVICES = ("tandem-prefill", "tandem-decode", "tandem-proxy")
NUM_REQUESTS = 7
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 1200, 64


@dataclass
class TracedService:
    service: Service
    collector: Collector

    def complete(self, seed: int) -> list[SpanSeen]:
        """The spans of one request that the client traces."""
        trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
        body = {"prompt": random_tokens(NUM_PROMPT_TOKENS, seed), "max_tokens": NUM_OUTPUT_TOKENS, "ignore_eos": True}
        response = httpx.post(
            self.service.url + "/v1/completions",
            json={**body, "temperature": 0, "stream": True},
            headers={"traceparent": f"00-{trace_id}-{span_id}-01"},
            timeout=120,
        )
        assert response.status_code == 200, response.text
        assert response.text.rstrip().endswith("[DONE]")
        spans = self.spans_of(trace_id)
        assert next(span for span in spans if span.service == "tandem-proxy").parent_id == span_id
        return spans

    def spans_of(self, trace_id: str) -> list[SpanSeen]:
        """All of them: a process's own span of a request ends, and is sent, after the phases that it names."""

        def own_spans() -> set[str]:
            return {span.service for span in self.collector.of(trace_id) if span.name.startswith("POST ")}

        wait_for(lambda: own_spans() == set(SERVICES), f"the spans of {trace_id}")
        return self.collector.of(trace_id)


@pytest.fixture(scope="module")
def traced() -> Iterator[TracedService]:
    with pytest.MonkeyPatch.context() as patch, collecting() as collector:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        flags = (*FLAGS, "--otlp-traces-endpoint", collector.url)
        proxy_flags = ("--log-format", "json", "--otlp-traces-endpoint", collector.url)
        with Service(
            checkpoint("granitemoehybrid"), prefill_flags=flags, decode_flags=flags, proxy_flags=proxy_flags
        ) as service:
            yield TracedService(service, collector)


def test_trace_when_a_request_is_prefilled_remotely_then_phases_are_siblings_in_order_and_add_up(
    traced: TracedService,
) -> None:
    traced.complete(1)  # connections and handshakes
    shares = []
    for seed in range(2, 2 + NUM_REQUESTS):
        spans = traced.complete(seed)
        request = next(span for span in spans if span.service == "tandem-proxy")
        legs = [span for span in spans if span.name == request.name and span is not request]
        phases = [span for span in spans if span.name in PHASES]
        assert len(spans) == 1 + len(legs) + len(phases)
        assert sorted(leg.service for leg in legs) == ["tandem-decode", "tandem-prefill"]
        assert {span.parent_id for span in (*legs, *phases)} == {request.span_id}
        # A decode node that was busy when the prompt was finished says so with a queue of its own.
        late = [span for span in phases if span.name == "queue" and span.service == "tandem-decode"]
        named = [span for span in phases if span not in late]
        assert [span.name for span in named] == list(PHASES)
        assert [span.service.removeprefix("tandem-") for span in named] == ["prefill", "prefill", *["decode"] * 3]
        assert len(late) <= 1
        assert [phases.index(span) for span in late] in ([], [2])
        for before, after in itertools.pairwise(phases):
            assert before.end_s <= after.start_s + 0.005
        decode_leg = next(leg for leg in legs if leg.service == "tandem-decode")
        assert decode_leg.attributes["tandem.output_tokens"] == NUM_OUTPUT_TOKENS
        assert decode_leg.attributes["tandem.transferred_bytes"] > 0
        shares.append(sum(span.seconds for span in phases) / request.seconds)
    check_adds_up(shares)


def test_trace_when_the_decode_node_has_the_prompt_then_nothing_was_pulled_and_phases_add_up(
    traced: TracedService,
) -> None:
    """An exact repeat: the prefill leg is called off, or found everything too."""
    traced.complete(50)
    body = {"prompt": random_tokens(NUM_PROMPT_TOKENS, 50), "max_tokens": NUM_OUTPUT_TOKENS, "ignore_eos": True}
    shares = []
    for _ in range(NUM_REQUESTS):
        trace_id = secrets.token_hex(16)
        headers = {"traceparent": f"00-{trace_id}-{'a' * 16}-01"}
        answer = httpx.post(traced.service.url + "/v1/completions", json=body, headers=headers, timeout=120)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == NUM_PROMPT_TOKENS
        spans = traced.spans_of(trace_id)
        phases = [span for span in spans if span.service == "tandem-decode" and span.name in PHASES]
        assert [span.name for span in phases] == ["queue", "first_token", "decode"]
        [request] = [span for span in spans if span.service == "tandem-proxy"]
        shares.append(sum(span.seconds for span in phases) / request.seconds)
    check_adds_up(shares)


def check_adds_up(shares: list[float]) -> None:
    """Phases leave out the moments in which a process waits for a core of a busy machine: of several requests one has
    next to none. A phase that is missing or counted twice shows in all of them."""
    assert max(shares) == pytest.approx(1.0, abs=0.05), shares


def test_json_logs_when_a_traced_request_is_refused_then_its_lines_carry_its_ids(traced: TracedService) -> None:
    trace_id = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace_id}-{'b' * 16}-01", "X-Request-Id": "refused-1"}
    body = {"prompt": "secret words " * 4000, "max_tokens": 1}
    answer = httpx.post(traced.service.url + "/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 400
    deadline_s = time.monotonic() + 10
    found: list[dict[str, str]] = []
    while not found and time.monotonic() < deadline_s:
        found = [line for line in log_lines(traced.service) if line.get("request_id") == "refused-1"]
    assert found
    assert {line.get("trace_id") for line in found} == {trace_id}
    assert {line["role"] for line in found} <= {"prefill", "decode", "proxy"}
    assert not any("secret words" in line["message"] for line in log_lines(traced.service))


def log_lines(service: Service) -> list[dict[str, str]]:
    """Every line of every process's log; what is no JSON object must not be ours."""
    lines = []
    for node in service.nodes:
        for text in node.process.log.read_text().splitlines():
            if text.startswith("{"):
                lines.append(json.loads(text))
            else:
                assert " tandem" not in text
                assert "common." not in text
                assert "proxy." not in text
    assert {"ts", "level", "logger", "message", "role", "node"} <= set(lines[0])
    return lines
