"""``tandem bench`` against a small service whose answers are known."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from common.cli.bench import Sample, run_bench, summarize
from tests.support.http_server import serving


class KnownService:
    """Streams ``max_tokens`` tokens per request and says half of the prompt was cached; ``refuse_every`` n-th: 429."""

    def __init__(self, *, refuse_every: int = 0, is_cut: bool = False) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._refuse_every = refuse_every
        self._is_cut = is_cut

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            if self._refuse_every and len(self.bodies) % self._refuse_every == 0:
                return JSONResponse({}, 429)
            return StreamingResponse(self._events(body), media_type="text/event-stream")

        return app

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        for token_id in range(body["max_tokens"]):
            yield f"data: {json.dumps({'choices': [{'text': '', 'token_ids': [token_id]}]})}\n\n"
        num_prompt = len(body["prompt"])
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": num_prompt // 2},
        }
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        if not self._is_cut:
            yield "data: [DONE]\n\n"


def bench(url: str, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    status = run_bench(["--url", url, "--json", *argv])
    return status, json.loads(capsys.readouterr().out)


def test_bench_when_all_answer_then_counts_are_those_of_the_service(capsys: pytest.CaptureFixture[str]) -> None:
    service = KnownService()
    with serving(service.app()) as server:
        argv = ("--requests", "6", "--concurrency", "3", "--prompt-tokens", "10", "--shared-tokens", "4")
        status, report = bench(server.url, capsys, *argv, "--max-tokens", "5")
    assert status == 0
    assert (report["requests"], report["failed"], report["errors"]) == (6, 0, {})
    assert (report["prompt_tokens"], report["cached_tokens"], report["output_tokens"]) == (60, 30, 30)
    assert report["cached_share"] == 0.5
    assert report["settings"]["concurrency"] == 3
    prompts = [body["prompt"] for body in service.bodies]
    assert {len(prompt) for prompt in prompts} == {10}
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 1
    assert len({tuple(prompt[4:]) for prompt in prompts}) == 6
    assert 0 < report["ttft_seconds"]["p50"] <= report["ttft_seconds"]["max"] <= report["e2e_seconds"]["max"]


def test_bench_when_some_are_refused_then_they_are_failures_and_not_latencies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(KnownService(refuse_every=2).app()) as server:
        status, report = bench(server.url, capsys, "--requests", "4", "--concurrency", "1")
    assert status == 1
    assert report["errors"] == {"status 429": 2}
    assert report["prompt_tokens"] == 2 * 256


def test_bench_when_a_stream_ends_without_done_then_it_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(KnownService(is_cut=True).app()) as server:
        status, report = bench(server.url, capsys, "--requests", "1")
    assert status == 1
    assert report["errors"] == {"the stream ended without [DONE]": 1}


def test_bench_when_nobody_listens_then_every_request_failed(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = bench("http://127.0.0.1:9", capsys, "--requests", "2")
    assert status == 1
    assert report["errors"] == {"ConnectError": 2}


def test_summarize_when_latencies_are_known_then_percentiles_are_nearest_rank() -> None:
    samples = [Sample(ttft_s=float(value), e2e_s=1.0) for value in range(1, 101)]
    report = summarize(samples, 10.0)
    assert report["ttft_seconds"] == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert report["itl_seconds"] == {}
    assert report["requests_per_second"] == 10.0
