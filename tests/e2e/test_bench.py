"""``tandem bench`` against a real service: what it reports is what another client sees."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.reference import random_tokens
from tests.support.service import ROOT, Service, child_environment

NUM_REQUESTS = 12
NUM_PROMPT_TOKENS = 600


def bench(url: str, file: Path, *flags: str) -> tuple[int, dict[str, Any], subprocess.CompletedProcess[str]]:
    argv = [sys.executable, "-m", "common.cli", "bench", "--url", url, "--json", str(file), *flags]
    done = subprocess.run(
        argv, cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=240, check=False
    )
    return done.returncode, json.loads(file.read_text()), done


def plain_ttft_s(client: httpx.Client, seed: int) -> float:
    """Of one request, which is read to its end: what an aborted one leaves behind would slow the next."""
    body = {"prompt": random_tokens(NUM_PROMPT_TOKENS, seed), "max_tokens": 8, "stream": True, "ignore_eos": True}
    start_s, first_s = time.perf_counter(), 0.0
    with client.stream("POST", "/v1/completions", json={**body, "return_token_ids": True}) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not first_s and line.startswith("data: {") and json.loads(line[6:])["choices"][0].get("token_ids"):
                first_s = time.perf_counter() - start_s
    assert first_s
    return first_s


@pytest.mark.full
def test_bench_when_compared_with_a_plain_client_then_ttft_is_the_same(service: Service, tmp_path: Path) -> None:
    flags = ("--requests", str(NUM_REQUESTS), "--concurrency", "1", "--prompt-tokens", str(NUM_PROMPT_TOKENS))
    reported, plain = [], []
    for turn in range(5):  # one after the other, so that what else runs on the machine meets both
        seed = str(9000 + turn)
        status, report, done = bench(service.url, tmp_path / "report.json", *flags, "--max-tokens", "8", "--seed", seed)
        assert status == 0, done.stderr
        reported.append(report["figures"]["ttft_seconds"]["p50"])
        # One client: making one (certificates are read) and connecting take longer than a first token.
        with httpx.Client(base_url=service.url, timeout=60, trust_env=False) as client:
            seeds = range(300 + turn * 20, 300 + turn * 20 + NUM_REQUESTS)
            plain.append(statistics.median(plain_ttft_s(client, seed) for seed in seeds))
    ratio = statistics.median(ours / theirs for ours, theirs in zip(reported, plain, strict=True))
    print(f"ratio {ratio:.3f}; seconds by tandem bench: {reported}, by a plain client: {plain}")
    assert 1 / 1.25 < ratio < 1.25, (reported, plain)


def test_bench_when_a_service_runs_then_its_cache_and_placements_are_reported(service: Service, tmp_path: Path) -> None:
    flags = ("--requests", "8", "--concurrency", "2", "--turns", "2", "--prompt-tokens", "128", "--max-tokens", "8")
    status, report, done = bench(service.url, tmp_path / "report.json", *flags, "--seed", "77", "--rows")
    assert status == 0, done.stderr
    figures = report["figures"]
    assert (figures["requests"], figures["failed"]) == (8, 0)
    assert figures["output_tokens"] == 8 * 8
    first, second = figures["turns"]
    assert first["cached_tokens"] == 0
    assert second["cached_share"] > 0.5
    assert sum(figures["placement"]["placements"].values()) == 8
    assert figures["placement"]["transferred_bytes"] > 0
    assert {"total", "first_token"} <= set(figures["placement"]["phase_seconds"])
    assert len(report["rows"]) == 8
    assert "8 requests, 0 in flight, 0 failed" not in done.stdout
    assert "tandem bench: 8/8 requests, 0 in flight, 0 failed" in done.stderr
    assert "TTFT" in done.stdout


def test_bench_when_requests_are_refused_then_it_says_why_and_fails(service: Service, tmp_path: Path) -> None:
    flags = ("--requests", "2", "--prompt-tokens", "5000")
    status, report, done = bench(service.url, tmp_path / "report.json", *flags)
    assert status == 1
    (reason,) = report["figures"]["errors"]
    assert reason.startswith("status 400 ")
    assert f"failed: 2 x {reason}" in done.stdout
