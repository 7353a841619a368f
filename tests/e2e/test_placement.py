"""Placement over real nodes: what `benchmarks.placement` measures, with less of everything.

Which way is the better one is decided by measured times, so no test here expects one of them:
``tests/unit/proxy/placement`` (``test_placer.py``, ``test_simulation.py``) does, with times of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.placement.services import ChosenModel, session_service, way_service
from benchmarks.placement.sessions import Traffic, run_sessions
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


def test_cost_when_a_conversation_goes_on_then_whoever_computes_it_computes_the_little_that_is_new(
    placed: Service,
) -> None:
    prompt = random_tokens(1200, seed=7001)
    first = _complete(placed, prompt, 8, "remote")
    assert first.trace["placement"] == "remote"
    longer = [*prompt, *first.token_ids(), *random_tokens(20, seed=7002)]
    _wait_known(placed)
    second = _complete(placed, longer, 4)
    assert second.cached_tokens >= 1200
    placement = second.trace["placement"]
    assert metric(placed.proxy, "proxy_decisions_total", policy="cost", placement=placement) >= 1
    third = _complete(placed, [*longer, *second.token_ids(), *random_tokens(20, seed=7003)], 4, "local")
    assert (third.trace["placement"], third.trace["transferred_blocks"]) == ("local", 0)
    assert third.cached_tokens >= len(longer)


def test_nodes_when_they_have_worked_then_say_how_fast_they_are(placed: Service) -> None:
    for seed in range(4):
        _complete(placed, random_tokens(300 + 150 * seed, seed=7010 + seed), 4, "remote")
    prefill, decode = (info(node)["load"] for node in (placed.prefill[0], placed.decode[0]))
    # Of either part alone nothing can be said: on a busy machine a longer prompt may take less.
    line = prefill["prefill"]
    assert 0 < line["seconds_per_step"] + 500 * line["seconds_per_token"] < 5
    assert min(line["seconds_per_step"], line["seconds_per_token"]) >= 0
    assert prefill["prefill"]["observations"] >= 4
    assert 0 < decode["decode_step_seconds"] < 5
    totals = prefill["prompt_totals"]
    assert totals["tokens"] >= totals["steps"] > totals["rows"] == 0
    assert 0 < totals["seconds"] < 5 * totals["steps"]
    totals = decode["decode_totals"]
    assert totals["rows"] >= totals["steps"] > 0
    assert 0 < totals["seconds"] < 5 * totals["steps"]
    pull = decode["pull"]
    assert 0 < pull["seconds_per_pull"] + 1e6 * pull["seconds_per_byte"] < 5
    assert decode["kv_bytes_per_token"] * 16 == info(placed.decode[0])["block_bytes"]
    assert (decode["running"], decode["waiting"], decode["uncomputed_prompt_tokens"]) == (0, 0, 0)


@pytest.mark.full
@pytest.mark.parametrize("share", [None, 0.5])
def test_sessions_when_they_interleave_over_two_pairs_then_each_turn_is_answered_and_mostly_cached(
    model: ChosenModel, share: float | None
) -> None:
    traffic = Traffic(num_sessions=16, num_turns=5, vocab_size=VOCAB_SIZE)
    with session_service(model, traffic, "cost", 2, share, sources=True) as service:
        result = asyncio.run(run_sessions(service.url, traffic))
    # Whichever node computes a turn, it finds what any node has of the turns before, as far as memory holds it.
    assert result.num_cached_tokens >= (0.5 if share is None else 0.3) * traffic.num_cacheable_tokens


@pytest.mark.full
def test_ways_when_measured_then_every_request_went_the_way_that_it_was_told(placed: Service) -> None:
    suffix = asyncio.run(measure_suffix(placed.url, rounds=2, vocab_size=VOCAB_SIZE))
    cold = asyncio.run(measure_cold(placed.url, prompt=1500, stream_tokens=6_000, rounds=1, vocab_size=VOCAB_SIZE))
    for ways in (suffix, cold):
        assert set(ways["local"].placed) == {"local"}
        assert set(ways["remote"].placed) == {"remote"}
        assert set(ways["auto"].placed) <= {"local", "remote"}
        assert all(way.median_ms > 0 for way in ways.values())


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
