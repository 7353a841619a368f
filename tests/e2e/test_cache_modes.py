"""Every way of keeping states, through proxy, prefill node, NIXL and decode node: the answers are stock's, and each
mode resumes where it says. Mode ``auto`` is the shared service; ``none`` is tested with switched-off caching.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support.client import Answer, complete, metric, post, wait_settled
from tests.support.models import checkpoint
from tests.support.reference import Reference, random_tokens
from tests.support.service import Service

pytestmark = pytest.mark.full  # as in tests/engine/test_cache_modes.py

NUM_TOKENS = 40


RESUMED = {"align": 256, "align-64": 256, "all": 496, "all-64": 448, "auto-64": 448}
"""Of 500 shared tokens, by mode and retention interval."""


def assert_equals_stock(reference: Reference, prompt: list[int], answer: Answer) -> None:
    greedy = reference.greedy(prompt, len(answer.token_ids()))
    assert greedy.mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance) is None


@pytest.fixture(
    scope="module",
    params=[
        "align",
        "all-64",
        "all",
        "align-64",
        "auto-64",
    ],
)
def by_block(request: pytest.FixtureRequest) -> Iterator[tuple[str, Service]]:
    mode, _, interval = request.param.partition("-")
    flags = (*NODE_FLAGS, "--mamba-cache-mode", mode)
    if interval:
        flags += ("--prefix-cache-retention-interval", interval)
    with Service(checkpoint(FAMILY), prefill_flags=flags, decode_flags=flags) as running:
        yield request.param, running


def test_answers_when_cold_repeated_and_continued_in_each_mode_then_equal_stock(
    by_block: tuple[str, Service], reference: Reference
) -> None:
    kind, service = by_block
    mode = kind.split("-")[0]
    prefill, decode = service.prefill[0], service.decode[0]
    prompts = [random_tokens(count, seed=count) for count in (1000, 256, 100, 33)]
    for prompt in prompts:
        answers = [complete(service.url, prompt, NUM_TOKENS) for _ in range(2)]
        longer = prompt + answers[1].token_ids() + random_tokens(20, seed=441)
        answers.append(complete(service.url, longer, NUM_TOKENS))
        for tokens, answer in zip((prompt, prompt, longer), answers, strict=True):
            assert_equals_stock(reference, tokens, answer)
            assert answer.trace["placement"] == "remote"
        # By block: at least the last boundary. A prompt's end that needs no slot of its own may be there as well.
        least = len(prompt) if mode == "auto" else (len(prompt) - 1) // 16 * 16
        assert answers[0].cached_tokens == 0
        assert [answer.cached_tokens >= least for answer in answers[1:]] == [True, True]
        assert answers[1].trace["transferred_bytes"] <= answers[0].trace["transferred_bytes"]
    # Chunks of 256 tokens, or every 64th token; attention has all of the 500 shared ones in full blocks.
    parted = prompts[0][:500] + random_tokens(30, seed=442)
    answer = complete(service.url, parted, NUM_TOKENS)
    assert_equals_stock(reference, parted, answer)
    assert answer.trace["prefill_cached_tokens"] == RESUMED[kind]
    assert metric(prefill, "prefix_cache_lost_tokens_total", reason="no_state") >= 496 - RESUMED[kind]
    for node in (prefill, decode):
        assert metric(node, "checkpoints_total", event="saved") > 0
        assert metric(node, "prefix_cache_hit_tokens_total", group="attention") > 0
    assert metric(prefill, "prefix_cache_hit_tokens_total", group="state") > 0
    wait_settled(prefill, decode)


SEGMENTS = [
    {"role": "system", "content": "You know the standard library of a programming language by heart. " * 6},
    {"role": "user", "content": "Here is the first part of the text that I want to talk about with you. " * 6},
    {"role": "assistant", "content": "I have read the first part and I am waiting for what comes next. " * 6},
    {"role": "user", "content": "And this is the long end of it, which both conversations have in common. " * 20},
]
INSERTED = [
    {"role": "user", "content": "Before you go on, here is a piece that was forgotten the first time. " * 6},
    {"role": "assistant", "content": "Thank you, this piece comes in between. " * 6},
]


def chat(service: Service, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return post(
        service.url, "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 8, **fields}
    )


def num_tokens(service: Service, messages: list[dict[str, Any]]) -> int:
    body = {"messages": messages, "add_generation_prompt": False}
    return int(post(service.decode[0].url, "/tokenize", body)["count"])


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_chat_when_its_middle_is_new_then_the_messages_before_it_are_resumed_at_the_second_sighting(
    service: Service,
) -> None:
    salted = {"cache_salt": "five segments"}
    assert cached_tokens(chat(service, SEGMENTS, **salted)) == 0
    longer = [*SEGMENTS[:3], *INSERTED, *SEGMENTS[3:]]
    assert cached_tokens(chat(service, longer, **salted)) == num_tokens(service, SEGMENTS[:3])
    only_system = [SEGMENTS[0], {"role": "user", "content": "Something else."}]
    assert cached_tokens(chat(service, only_system, **salted)) == num_tokens(service, SEGMENTS[:1])


def test_chat_when_a_part_is_marked_for_caching_then_the_prompt_up_to_it_is_resumed(service: Service) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    document = {"type": "text", "text": "A long document that many questions will be asked about. " * 8}

    def ask(question: str, marked: dict[str, Any]) -> dict[str, Any]:
        content = [{**document, **marked}, {"type": "text", "text": question}]
        return chat(service, [{"role": "user", "content": content}], cache_salt=f"marked {len(marked)}")

    whole = num_tokens(service, [{"role": "user", "content": document["text"]}])
    hits = [[cached_tokens(ask(question, marked)) for question in ("Who?", "Why?")] for marked in ({}, mark)]
    assert hits[0] == [0, 0]
    assert hits[1][0] == 0
    assert whole - 2 <= hits[1][1] <= whole
