"""Placement over real nodes: what `benchmarks.placement` measures, with less of everything."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.placement.services import ChosenModel, session_service, way_service
from benchmarks.placement.sessions import Result, Traffic, names, run_sessions
from benchmarks.placement.ways import measure_cold, measure_suffix
from tests.support.client import REQUEST_TIMEOUT_S, TRACE_HEADERS, Answer, completion_body, info, metric
from tests.support.models import VOCAB_SIZE, checkpoint
from tests.support.reference import random_tokens
from tests.support.service import Service

FAMILY = "granitemoehybrid"


@pytest.fixture(scope="module")
def model() -> ChosenModel:
    return ChosenModel.of(checkpoint(FAMILY), chunk=256)


@pytest.fixture(scope="module")
def placed(model: ChosenModel) -> Iterator[Service]:
    """One pair under the default policy."""
    with way_service(model) as service:
        yield service


def test_cost_when_a_conversation_goes_on_then_its_decode_node_computes_the_little_that_is_new(placed: Service) -> None:
    prompt = random_tokens(1200, seed=7001)
    first = _complete(placed, prompt, 8, "remote")
    assert first.trace["placement"] == "remote"
    longer = [*prompt, *first.token_ids(), *random_tokens(20, seed=7002)]
    _wait_known(placed)
    second = _complete(placed, longer, 4)
    assert second.trace["placement"] == "local"
    assert second.cached_tokens >= 1200
    assert metric(placed.proxy, "proxy_decisions_total", policy="cost", placement="local") >= 1


def test_nodes_when_they_have_worked_then_say_how_fast_they_are(placed: Service) -> None:
    for seed in range(4):
        _complete(placed, random_tokens(300 + 150 * seed, seed=7010 + seed), 4, "remote")
    prefill, decode = (info(node)["load"] for node in (placed.prefill[0], placed.decode[0]))
    assert 1e-7 < prefill["prefill"]["seconds_per_token"] < 1
    assert prefill["prefill"]["observations"] >= 4
    assert 0 < decode["decode_step_seconds"] < 5
    assert 0 < decode["pull"]["seconds_per_byte"] < 1e-3
    assert decode["kv_bytes_per_token"] * 16 == info(placed.decode[0])["block_bytes"]
    assert (decode["running"], decode["waiting"], decode["uncomputed_prompt_tokens"]) == (0, 0, 0)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("share", [None, 0.5])
def test_cost_when_sessions_interleave_then_caches_like_one_pair_and_spreads(
    model: ChosenModel, share: float | None
) -> None:
    traffic = Traffic(num_sessions=16, num_turns=5, vocab_size=VOCAB_SIZE)

    def run(policy: str, number: int, *, sources: bool = True) -> tuple[Result, float]:
        with session_service(model, traffic, policy, number, share, sources=sources) as service:
            result = asyncio.run(run_sessions(service.url, traffic))
            return result, max(result.spread(names(service, role)) for role in ("prefill", "decode"))

    pair, _ = run("cost", 1)
    turns, _ = run("round_robin", 2, sources=False)
    least = max(0.95 * pair.num_cached_tokens, 1.5 * turns.num_cached_tokens)
    # Prices are measured times: on a machine with other work one of two equal nodes may really be the slower one.
    tries = []
    for _ in range(3):
        cost, spread = run("cost", 2)
        tries.append((cost.num_cached_tokens, round(spread, 2)))
        if cost.num_cached_tokens >= least and spread <= 0.25:
            return
    raise AssertionError(f"(cached tokens, spread) {tries}: not once {least} and 0.25")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_cost_when_a_suffix_is_short_or_a_prompt_cold_then_takes_the_better_way(placed: Service) -> None:
    suffix = asyncio.run(measure_suffix(placed.url, rounds=5, vocab_size=VOCAB_SIZE))
    assert set(suffix["auto"].placed) == {"local"}
    assert suffix["auto"].median_ms < suffix["remote"].median_ms
    cold = asyncio.run(measure_cold(placed.url, rounds=3, vocab_size=VOCAB_SIZE))
    assert statistics.mode(cold["auto"].placed) == "remote"
    assert cold["auto"].p99_ms < cold["local"].p99_ms


def _complete(service: Service, prompt: list[int], num_tokens: int, way: str = "auto") -> Answer:
    headers = {**TRACE_HEADERS, "X-Tandem-Placement": way}
    body = completion_body(prompt, num_tokens)
    answer = httpx.post(service.url + "/v1/completions", json=body, headers=headers, timeout=REQUEST_TIMEOUT_S)
    return Answer(answer.raise_for_status().json())


def _wait_known(service: Service) -> None:
    """Until the proxy's index has heard of what the decode node has."""
    deadline_s = time.monotonic() + 20
    url = service.decode[0].url
    while metric(service.proxy, "prefix_index_entries", node=url) < 1200 // 16:
        assert time.monotonic() < deadline_s, "the index heard nothing"
        time.sleep(0.1)
