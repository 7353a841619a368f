"""Requests that come together with the same new beginning, over several real nodes: no node computes it again.

Which nodes get them is decided by measured times, so nothing here depends on it; that one node gets them all, as long
as it is not too busy, is held by ``tests/unit/proxy/placement/test_in_progress.py`` with times of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import httpx
import pytest

from common.wire.headers import PLACEMENT_HEADER
from common.wire.routes import COMPLETIONS_ROUTE
from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support.client import (
    REQUEST_TIMEOUT_S,
    TRACE_HEADERS,
    Answer,
    complete,
    completion_body,
    computed_prompt_tokens,
    metric,
    post,
    together,
)
from tests.support.hangup import wait_until
from tests.support.models import checkpoint
from tests.support.reference import Reference, random_tokens
from tests.support.service import Service

NUM_REQUESTS = 6
SHARED, OWN = 960, 20
NUM_BRANCHES, HISTORY, NEW = 4, 500, 400
BLOCK_SIZE = 16
SMALL = 3 * BLOCK_SIZE
"""A prompt's own tokens, and what blocks and templates add."""


@pytest.fixture(scope="module")
def wide() -> Iterator[Service]:
    with Service(
        checkpoint(FAMILY),
        prefill_flags=NODE_FLAGS,
        decode_flags=NODE_FLAGS,
        proxy_flags=("--policy", "cost"),
        num_prefill=2,
        num_decode=2,
    ) as running:
        for seed in range(4):  # every node has computed something: nobody waits for its first step
            complete(running.url, random_tokens(100, seed=9400 + seed), 2)
        yield running


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def chat(url: str, messages: list[dict[str, str]]) -> Answer:
    return Answer(post(url, "/v1/chat/completions", {"messages": messages, "max_tokens": 4, "temperature": 0}))


def computing_node(answer: Answer) -> str:
    """The node that computed the prompt."""
    return answer.trace["decode_node" if answer.trace["placement"] == "local" else "prefill_node"]


def shares(answers: list[Answer]) -> list[tuple[str, int, int]]:
    """Who computed each prompt, how long it was, and what of it was there."""
    return [(computing_node(a), a.body["usage"]["prompt_tokens"], a.cached_tokens) for a in answers]


def num_computing_nodes(answers: list[Answer]) -> int:
    return len({computing_node(answer) for answer in answers})


def num_computed(service: Service) -> float:
    """Prompt tokens that any node has computed."""
    return sum(computed_prompt_tokens([*service.prefill, *service.decode]))


def test_chats_when_they_begin_alike_and_come_together_then_no_node_computes_the_beginning_twice(
    wide: Service,
) -> None:
    system = " ".join(f"rule {number} of seventeen" for number in range(60))
    chats = [[message("system", system), message("user", f"question {number}")] for number in range(NUM_REQUESTS)]
    before = num_computed(wide)
    answers = together([partial(chat, wide.url, messages) for messages in chats])
    longest = max(answer.body["usage"]["prompt_tokens"] for answer in answers)
    assert longest > 2 * NUM_REQUESTS * SMALL
    at_most = num_computing_nodes(answers) * longest + NUM_REQUESTS * SMALL
    assert num_computed(wide) - before <= at_most, shares(answers)


def test_requests_when_they_begin_alike_and_come_together_then_no_node_computes_the_beginning_a_third_time(
    wide: Service,
) -> None:
    """Token ids do not say where others will part from them. Whoever comes while the first one is past that place
    computes it again, and keeps a state there."""
    shared = random_tokens(SHARED, seed=9410)
    prompts = [shared + random_tokens(OWN, seed=9420 + number) for number in range(NUM_REQUESTS)]
    before = num_computed(wide)
    answers = together([partial(complete, wide.url, prompt, 4) for prompt in prompts])
    at_most = num_computing_nodes(answers) * 2 * SHARED + NUM_REQUESTS * SMALL
    assert num_computed(wide) - before <= at_most, shares(answers)
    seeds = itertools.count(9440)

    def is_known() -> bool:
        later = complete(wide.url, shared + random_tokens(OWN, seed=next(seeds)), 4)
        return later.cached_tokens >= SHARED - BLOCK_SIZE

    wait_until(is_known, "the index to know what was computed")


def ask(service: Service, prompt: list[int], num_tokens: int = 4) -> Answer:
    """Of the pair, whose prefill node computes the prompt."""
    body, headers = completion_body(prompt, num_tokens), {**TRACE_HEADERS, PLACEMENT_HEADER: "remote"}
    response = httpx.post(service.url + COMPLETIONS_ROUTE, json=body, headers=headers, timeout=REQUEST_TIMEOUT_S)
    assert response.status_code == 200, response.text
    answer = Answer(response.json())
    assert answer.trace["placement"] == "remote"
    return answer


def check_right(prompts: list[list[int]], answers: list[Answer], reference: Reference) -> None:
    reference.generate(prompts, 4)
    for prompt, answer in zip(prompts, answers, strict=True):
        greedy = reference.greedy(prompt, 4)
        assert greedy.mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance) is None


def test_requests_when_they_begin_alike_and_come_together_then_the_beginning_is_moved_once(
    service: Service, reference: Reference
) -> None:
    shared = random_tokens(SHARED, seed=9460)
    prompts = [shared + random_tokens(OWN, seed=9470 + number) for number in range(NUM_REQUESTS)]
    answers = together([partial(ask, service, prompt) for prompt in prompts])
    moved = [answer.trace["transferred_blocks"] for answer in answers]
    assert SHARED // BLOCK_SIZE <= sum(moved) <= (SHARED + NUM_REQUESTS * SMALL) // BLOCK_SIZE, moved
    check_right(prompts, answers, reference)


def test_branches_when_they_come_together_then_their_history_is_not_computed_again_and_what_is_new_is_once(
    service: Service, reference: Reference
) -> None:
    """The history ends with an answer, so that its state is on the decode node alone."""
    [decode] = service.decode

    def num_known() -> float:
        return metric(service.proxy, "prefix_index_entries", node=decode.url)

    first, known = random_tokens(100, seed=9480), num_known()
    history = [*first, *ask(service, first, HISTORY).token_ids()]
    wait_until(lambda: num_known() - known >= HISTORY // BLOCK_SIZE, "the index to know of the answer")
    turn = history + random_tokens(NEW, seed=9481)
    prompts = [turn + random_tokens(OWN, seed=9490 + number) for number in range(NUM_BRANCHES)]
    before = num_computed(service)
    answers = together([partial(ask, service, prompt) for prompt in prompts])
    assert NEW <= num_computed(service) - before <= NEW + NUM_BRANCHES * SMALL
    check_right(prompts, answers, reference)
