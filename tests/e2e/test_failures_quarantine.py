"""Memory whose read never ends, in a whole service: set aside, got back by a new transfer agent, used again, and never
written by the holder that wakes up later."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import FAMILY, TIGHT_FLAGS
from tests.support import foreign
from tests.support.client import Answer, complete, completion_body, metric, wait_settled
from tests.support.hangup import stopped, wait_until
from tests.support.models import checkpoint
from tests.support.reference import Reference, random_tokens
from tests.support.service import Node, Service

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def freezable_service() -> Iterator[Service]:
    """Over TCP, where a holder that stands still keeps a read in flight; a pool of which a prompt is a large part."""
    flags = (*TIGHT_FLAGS, "--kv-cache-memory", "1400KiB", "--kv-transfer-verify", "all")
    with Service(
        checkpoint(FAMILY), prefill_flags=flags, decode_flags=flags, environment={"UCX_TLS": "tcp,self"}
    ) as running:
        yield running


def quarantined(node: Node) -> int:
    state: Any = node.check_cache()
    assert state["ok"], state
    return int(state["blocks"]["quarantined"] + state["slots"]["quarantined"])


def check_right(answer: Answer, prompt: list[int], reference: Reference) -> None:
    expected = reference.greedy(prompt, NUM_TOKENS)
    mismatch = expected.mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance)
    assert mismatch is None, mismatch


@pytest.mark.full
def test_holder_when_frozen_under_a_read_then_memory_comes_back_by_a_new_agent_and_stays_right_when_it_wakes(
    freezable_service: Service, reference: Reference
) -> None:
    prefill, decode = freezable_service.prefill[0], freezable_service.decode[0]
    warm = completion_body(random_tokens(40, seed=700), 2)
    assert foreign.decode(decode.url, warm, foreign.prefill(prefill.url, warm)).status_code == 200
    prompt = random_tokens(200, seed=701)
    body = completion_body(prompt, NUM_TOKENS)
    params = foreign.prefill(prefill.url, body)
    recreated = metric(decode, "agent_recreations_total")
    others = [random_tokens(length, seed=702 + length) for length in (150, 220, 310, 180, 260)]

    with stopped(prefill):
        answer = Answer(foreign.decode(decode.url, body, params).json())
        check_right(answer, prompt, reference)
        assert answer.trace["transferred_bytes"] == 0
        wait_until(lambda: metric(decode, "agent_recreations_total") == recreated + 1, "a new agent")
        wait_until(lambda: quarantined(decode) == 0, "the quarantine to end")
        for other in others:  # more than the pool holds: what was in quarantine is used again
            check_right(complete(decode.url, other, NUM_TOKENS), other, reference)

    time.sleep(0.5)  # what the woken holder still had to send has left it
    for other in reversed(others):  # the last ones are still cached, in the memory that was set aside
        check_right(complete(decode.url, other, NUM_TOKENS), other, reference)
    freezable_service.bring_back(prefill, 0.0)
    again = random_tokens(170, seed=710)
    body = completion_body(again, NUM_TOKENS)
    answer = Answer(foreign.decode(decode.url, body, foreign.prefill(prefill.url, body)).json())
    check_right(answer, again, reference)
    assert answer.trace["transferred_bytes"] > 0
    wait_settled(prefill, decode)
