"""``tandem bench`` against small services whose answers are known."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from common.cli.bench.client import Sample
from common.cli.bench.progress import Progress
from common.cli.bench.report import as_text, summarize, summarize_traces
from common.cli.bench.run import run_bench
from common.cli.bench.settings import parse_settings
from common.cli.bench.workload import conversations
from common.errors import ConfigError
from tests.support.http_server import serving
from tests.support.service import ROOT, child_environment


class KnownService:
    """Streams ``max_tokens`` tokens per request and says half of the prompt was cached; ``refuse_every`` n-th: 429.

    ``is_stock``: text only, and unknown fields are refused. ``answers``: requests that are answered before all others
    hang. ``together``: no answer begins before so many requests are here.
    """

    def __init__(
        self,
        *,
        refuse_every: int = 0,
        is_cut: bool = False,
        is_stock: bool = False,
        answers: int | None = None,
        together: int = 0,
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_running = self.most_running = 0
        self._refuse_every = refuse_every
        self._is_cut = is_cut
        self._is_stock = is_stock
        self._answers = answers
        self._together = together

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"data": [{"id": "known"}]}

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            body = await request.json()
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            standard = {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
            if self._is_stock and (unknown := set(body) - standard):
                return JSONResponse({"error": {"message": f"{unknown}", "type": "invalid_request_error"}}, 400)
            if self._refuse_every and len(self.bodies) % self._refuse_every == 0:
                return JSONResponse({"error": {"code": "queue_full", "message": "17 wait"}}, 429)
            if self._answers is not None and len(self.bodies) > self._answers:
                await asyncio.sleep(60)
            return StreamingResponse(self._events(body), media_type="text/event-stream")

        return app

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0.01)
        while len(self.bodies) < self._together:
            await asyncio.sleep(0.01)
        for token_id in range(body["max_tokens"]):
            choice = {"text": "x "} if self._is_stock else {"text": "", "token_ids": [token_id]}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        if not self._is_stock:
            num_prompt = len(body["prompt"])
            usage = {
                "prompt_tokens": num_prompt,
                "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": num_prompt // 2},
            }
            trace = {"placement": "remote", "decode_node": "d0", "prefill_node": "p0", "transferred_bytes": 2**20}
            trace |= {"seconds": {"total": 0.5, "prefill": None}}
            yield f"data: {json.dumps({'choices': [], 'usage': usage, 'tandem': trace})}\n\n"
        self.num_running -= 1
        if not self._is_cut:
            yield "data: [DONE]\n\n"


def bench(url: str, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    status = run_bench(["--url", url, "--json", "-", *argv])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, report


# --- figures


def test_bench_when_all_answer_then_counts_are_those_of_the_service(capsys: pytest.CaptureFixture[str]) -> None:
    service = KnownService()
    with serving(service.app()) as server:
        argv = ("--requests", "6", "--concurrency", "3", "--prompt-tokens", "10", "--shared-tokens", "4")
        status, report = bench(server.url, capsys, *argv, "--max-tokens", "5", "--rows")
    figures = report["figures"]
    assert status == 0
    assert (figures["requests"], figures["failed"], figures["errors"]) == (6, 0, {})
    assert (figures["prompt_tokens"], figures["cached_tokens"], figures["output_tokens"]) == (60, 30, 30)
    assert figures["cached_share"] == 0.5
    assert (report["settings"]["concurrency"], report["server"]["models"]) == (3, ["known"])
    prompts = [body["prompt"] for body in service.bodies]
    assert {len(prompt) for prompt in prompts} == {10}
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 1
    assert len({tuple(prompt[4:]) for prompt in prompts}) == 6
    assert {body["model"] for body in service.bodies} == {"known"}
    assert service.most_running <= 3
    assert 0.01 <= figures["ttft_seconds"]["p50"] <= figures["ttft_seconds"]["max"] <= figures["e2e_seconds"]["max"]
    assert [row["output_tokens"] for row in report["rows"]] == [5] * 6
    placement = figures["placement"]
    assert (placement["placements"], placement["transferred_bytes"]) == ({"remote": 6}, 6 * 2**20)
    assert placement["phase_seconds"]["total"]["p50"] == 0.5


def test_bench_when_turns_are_asked_for_then_each_prompt_holds_all_before_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    service = KnownService()
    with serving(service.app()) as server:
        argv = ("--requests", "5", "--turns", "3", "--concurrency", "1", "--prompt-tokens", "10", "--turn-tokens", "4")
        status, report = bench(server.url, capsys, *argv, "--max-tokens", "2")
    assert status == 0
    first, second, third, other, last = [body["prompt"] for body in service.bodies]
    assert second[:12] == [*first, 0, 1]
    assert third[:18] == [*second, 0, 1]
    assert [len(prompt) for prompt in (first, second, third, other, last)] == [10, 16, 22, 10, 16]
    assert other != first
    assert [turn["requests"] for turn in report["figures"]["turns"]] == [2, 2, 1]


def test_bench_when_a_rate_is_given_then_requests_do_not_wait_for_answers(capsys: pytest.CaptureFixture[str]) -> None:
    service = KnownService(together=20)
    with serving(service.app()) as server:
        argv = ("--requests", "20", "--request-rate", "2000", "--timeout-seconds", "20")
        status, report = bench(server.url, capsys, *argv)
    assert status == 0
    assert report["settings"]["request_rate"] == 2000


def test_bench_when_the_server_is_a_stock_one_then_text_mode_gets_figures(capsys: pytest.CaptureFixture[str]) -> None:
    service = KnownService(is_stock=True)
    with serving(service.app()) as server:
        argv = ("--requests", "4", "--turns", "2", "--prompt-tokens", "6", "--shared-prefix-share", "0.5")
        status, report = bench(server.url, capsys, *argv, "--max-tokens", "3", "--text", "--concurrency", "1")
        refused, refusal = bench(server.url, capsys, "--requests", "1")
    figures = report["figures"]
    assert (status, figures["failed"], figures["output_tokens"]) == (0, 0, 12)
    assert (figures["prompt_tokens"], figures["cached_share"]) == (None, None)
    assert "placement" not in figures
    prompts = [body["prompt"].split() for body in service.bodies[:4]]
    assert len(prompts[0]) == 6
    assert prompts[1][:9] == [*prompts[0], "x", "x", "x"]
    assert prompts[2][:3] == prompts[0][:3]
    assert (refused, refusal["figures"]["errors"]) == (1, {"status 400 invalid_request_error": 1})


def test_summarize_when_latencies_are_known_then_percentiles_are_nearest_rank() -> None:
    samples = [Sample(ttft_s=float(value), e2e_s=1.0) for value in range(1, 101)]
    report = summarize(samples, 10.0)
    assert report["ttft_seconds"] == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert report["itl_seconds"] == {}
    assert report["requests_per_second"] == 10.0


def test_summarize_traces_when_phases_did_not_happen_then_only_those_that_did_count() -> None:
    traces = [
        {"placement": "remote", "seconds": {"prefill": 1.0, "transfer": 3.0}},
        {"placement": "local", "prefill_node": None, "seconds": {"prefill": 2.0, "transfer": None}},
    ]
    summary = summarize_traces(traces)
    assert summary["placements"] == {"remote": 1, "local": 1}
    assert summary["prefill_nodes"] == {}
    assert summary["phase_seconds"]["transfer"]["mean"] == 3.0
    assert summary["phase_seconds"]["prefill"]["max"] == 2.0


# --- workload


def test_workload_when_the_seed_is_the_same_then_so_is_everything_and_arrivals_are_poisson() -> None:
    argv = ["--requests", "2000", "--request-rate", "50", "--prompt-tokens", "8", "--length-spread", "0.5"]
    one, again, other = (
        list(conversations(parse_settings([*argv, "--seed", seed]), 2000, seed)) for seed in ("1", "1", "2")
    )
    assert one == again
    assert one != other
    gaps = [after.start_s - before.start_s for before, after in itertools.pairwise(one)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.1)
    # Of an exponential distribution the standard deviation is the mean.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.15)
    lengths = {len(each.additions[0]) for each in one}
    assert lengths == set(range(4, 13))


# --- failures


def test_bench_when_some_are_refused_then_they_are_failures_and_not_latencies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(KnownService(refuse_every=2).app()) as server:
        status, report = bench(server.url, capsys, "--requests", "4", "--concurrency", "1")
    assert status == 1
    assert report["figures"]["errors"] == {"status 429 queue_full": 2}
    assert report["figures"]["prompt_tokens"] == 2 * 256


def test_bench_when_a_turn_fails_then_those_after_it_are_failures_too(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(KnownService(refuse_every=2).app()) as server:
        status, report = bench(server.url, capsys, "--requests", "4", "--turns", "4")
    assert status == 1
    assert report["figures"]["errors"] == {"an earlier turn failed": 2, "status 429 queue_full": 1}
    assert report["figures"]["requests"] == 4


def test_bench_when_a_stream_ends_without_done_then_it_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(KnownService(is_cut=True).app()) as server:
        status, report = bench(server.url, capsys, "--requests", "1")
    assert status == 1
    assert report["figures"]["errors"] == {"the stream ended without [DONE]": 1}


def test_bench_when_nobody_listens_then_every_request_failed(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = bench("http://127.0.0.1:9", capsys, "--requests", "2")
    assert status == 1
    (reason,) = report["figures"]["errors"]
    assert reason.startswith("cannot connect (")
    assert report["figures"]["errors"] == {reason: 2}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--requests", "0"], "--requests 0 is below its minimum of 1"),
        (["--warmup", "-1"], "--warmup -1 is below its minimum of 0"),
        (["--vocab-size", "3"], "--vocab-size 3 is below its minimum of 4"),
        (["--request-rate", "0"], "--request-rate 0 is not a number above 0"),
        (["--request-rate", "nan"], "--request-rate nan is not a number above 0"),
        (["--timeout-seconds", "-2"], "--timeout-seconds -2 is not a number above 0"),
        (["--length-spread", "1.5"], "--length-spread 1.5 is not between 0 and 1"),
        (["--shared-prefix-share", "-1"], "--shared-prefix-share -1 is not between 0 and 1"),
        (["--shared-tokens", "300"], "--shared-tokens 300 is not between 0 and --prompt-tokens 256"),
        (["--concurrency", "2", "--request-rate", "3"], "--concurrency 2 and --request-rate 3 exclude each other"),
        (["--turns", "40"], "--turns 40 is above --requests 32"),
        (["--url", "localhost"], "--url 'localhost' is not a base URL"),
    ],
)
def test_bench_when_a_flag_is_wrong_then_the_error_names_it(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_bench(argv)
    assert message in caught.value.message
    assert caught.value.param in argv


def test_bench_when_the_report_cannot_be_written_then_nothing_is_sent(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--json .*: Is a directory"):
        run_bench(["--url", "http://127.0.0.1:9", "--json", str(tmp_path)])


# --- as a program


def test_bench_when_interrupted_then_it_prints_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    service = KnownService(answers=3)
    with serving(service.app()) as server:
        argv = [sys.executable, "-m", "common.cli", "bench", "--url", server.url, "--concurrency", "2"]
        process = subprocess.Popen(
            [*argv, "--json", str(file), "--no-progress"],
            cwd=ROOT,
            env=child_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # As a script's background job: the signal is ignored when it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        )
        try:
            deadline_s = time.monotonic() + 30
            while time.monotonic() < deadline_s and len(service.bodies) < 5:
                time.sleep(0.05)
            os.kill(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130, err
    report = json.loads(file.read_text())
    assert (report["interrupted"], report["unfinished"]) == (True, 2)
    assert (report["figures"]["requests"], report["figures"]["failed"]) == (3, 0)
    assert "interrupted: 2 requests in flight were given up" in out
    assert "requests   3 (0 failed)" in out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_when_on_a_terminal_then_one_line_is_written_over() -> None:
    stream = Terminal()
    progress = Progress(stream, 4)
    progress.update(num_done=4, num_failed=1, num_in_flight=0)
    progress.close()
    text = stream.getvalue()
    assert text.startswith("\r[########################] 4/4 requests, 0 in flight, 1 failed")
    assert text.count("\n") == 1


def test_progress_when_not_on_a_terminal_then_lines_are_rare() -> None:
    stream = io.StringIO()
    progress = Progress(stream, 1000)
    for done in range(1, 1001):
        progress.update(num_done=done, num_failed=0, num_in_flight=1)
    progress.close()
    assert stream.getvalue().splitlines() == ["tandem bench: 1000/1000 requests, 1 in flight, 0 failed, 0 s"]
    hidden = io.StringIO()
    Progress(hidden, 1, is_shown=False).update(num_done=1, num_failed=0, num_in_flight=0)
    assert hidden.getvalue() == ""


# --- datasets


def repeated_share(units: list[Any], size: int = 3) -> float:
    """Of all runs of ``size`` units, those that came before."""
    runs = [tuple(units[start : start + size]) for start in range(len(units) - size + 1)]
    return 1 - len(set(runs)) / len(runs)


@pytest.mark.parametrize("is_text", [False, True], ids=["ids", "text"])
@pytest.mark.parametrize(("dataset", "least", "most"), [("random", 0.0, 0.05), ("edits", 0.3, 0.5), ("rag", 0.0, 0.1)])
def test_prompts_of_a_dataset_when_drawn_then_are_as_long_as_asked_and_repeat_what_they_should(
    dataset: str, least: float, most: float, is_text: bool
) -> None:
    argv = ["--dataset", dataset, "--prompt-tokens", "300", "--vocab-size", "5000", *(["--text"] if is_text else [])]
    settings = parse_settings(argv)
    prompts = [each.additions[0] for each in conversations(settings, 40, "1")]
    units = [each.split() if isinstance(each, str) else each for each in prompts]
    assert {len(each) for each in units} == {300}
    assert least <= sum(map(repeated_share, units)) / len(units) <= most
    # A model that copies goes on from the end of the prompt: it was there before.
    ends = [tuple(each[-8:]) for each in units]
    found = [sum(tuple(each[at : at + 8]) == end for at in range(292)) for each, end in zip(units, ends, strict=True)]
    assert all(found) if dataset != "random" else not any(found)
    # Passages are those of other prompts too.
    beginnings = [tuple(each[:20]) for each in units]
    assert (len(set(beginnings)) < len(beginnings)) == (dataset == "rag")


@pytest.mark.parametrize("dataset", ["edits", "rag"])
@pytest.mark.parametrize("length", [1, 2, 5, 13])
def test_prompts_of_a_dataset_when_short_then_are_as_long_as_asked(dataset: str, length: int) -> None:
    settings = parse_settings(["--dataset", dataset, "--prompt-tokens", str(length)])
    assert [len(each.additions[0]) for each in conversations(settings, 3, "1")] == [length] * 3


def test_report_when_answers_were_drafted_then_says_how_much_was_right() -> None:
    traces = [{"draft_tokens": 10, "accepted_tokens": 7}, {"draft_tokens": 4, "accepted_tokens": 0}, {}]
    placement = summarize_traces(traces)
    assert (placement["draft_tokens"], placement["accepted_tokens"]) == (14, 7)


@pytest.mark.parametrize("error", [None, "refused"])
def test_report_when_the_client_was_late_then_warns_only_where_it_has_latencies(error: str | None) -> None:
    report = {
        "version": None,
        "settings": parse_settings([]).shown(),
        "interrupted": False,
        "client_lag_seconds": {"p99": 1.0},
        "figures": summarize([Sample(error=error)], 1.0),
    }
    assert ("this client was late itself" in as_text(report)) is (error is None)
