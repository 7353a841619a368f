"""A prefix that was computed once is neither computed nor moved again: on the prefill node, on the decode node, on turn
two and for an exact repeat. Counted by what the nodes say of a request and by their own counters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support.client import (
    Answer,
    complete,
    computed_prompt_tokens,
    metric,
    payload_bytes,
    post,
    wait_settled,
)
from tests.support.models import checkpoint
from tests.support.reference import Reference, random_tokens
from tests.support.service import Service

NUM_TOKENS = 24


def assert_equals_stock(reference: Reference, prompt: list[int], answer: Answer) -> None:
    greedy = reference.greedy(prompt, len(answer.token_ids()))
    assert greedy.mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance) is None


def test_exact_repeat_when_the_prompt_has_1000_tokens_then_nothing_is_computed_or_moved(
    service: Service, reference: Reference
) -> None:
    prompt = random_tokens(1000, seed=1401)
    nodes = (service.prefill[0], service.decode[0])
    first = complete(service.url, prompt, NUM_TOKENS)
    assert first.cached_tokens == 0
    before = computed_prompt_tokens(nodes)
    moved = metric(service.decode[0], "transfer_bytes_total")
    assert moved > 0
    again = complete(service.url, prompt, NUM_TOKENS)
    assert again.cached_tokens == 1000
    assert again.trace["placement"] == "remote"
    assert again.trace["prefill_cached_tokens"] == 1000
    assert again.trace["decode_cached_tokens"] == 1000
    assert again.trace["transferred_bytes"] == 0
    assert (again.trace["transferred_blocks"], again.trace["transferred_states"]) == (0, 0)
    assert computed_prompt_tokens(nodes) == before
    assert metric(service.decode[0], "transfer_bytes_total") == moved
    assert again.token_ids() == first.token_ids()
    assert_equals_stock(reference, prompt, again)


def test_shared_prefix_when_sighted_for_the_third_time_then_only_the_rest_is_computed_and_moved(
    service: Service, reference: Reference
) -> None:
    shared = random_tokens(800, seed=1402)
    prompts = [shared + random_tokens(200, seed=1403 + sighting) for sighting in range(3)]
    for prompt in prompts[:2]:
        complete(service.url, prompt, NUM_TOKENS)
    prefill, decode = service.prefill[0], service.decode[0]
    before = computed_prompt_tokens((prefill, decode))
    moved = {kind: metric(decode, "transfer_bytes_total", direction="in", kind=kind) for kind in ("kv", "state")}
    answer = complete(service.url, prompts[2], NUM_TOKENS)
    # The first sighting cannot know where the prompts part; the second finds the junction and keeps its state.
    assert answer.trace["prefill_cached_tokens"] >= 800
    assert answer.trace["decode_cached_tokens"] >= 784
    assert answer.cached_tokens >= 800
    assert computed_prompt_tokens((prefill, decode)) == [before[0] + 200, before[1]]
    num_blocks = 63 - 50  # 1,000 tokens are 63 blocks, 800 of them are 50
    assert (answer.trace["transferred_blocks"], answer.trace["transferred_states"]) == (num_blocks, 1)
    assert answer.trace["transferred_bytes"] == payload_bytes(decode, num_blocks, 1)
    for kind, expected in (("kv", payload_bytes(decode, num_blocks, 0)), ("state", payload_bytes(decode, 0, 1))):
        assert metric(decode, "transfer_bytes_total", direction="in", kind=kind) - moved[kind] == expected
    assert_equals_stock(reference, prompts[2], answer)


def test_turn_two_when_sent_as_token_ids_then_turn_ones_prompt_is_not_computed_again(
    service: Service, reference: Reference
) -> None:
    turn_one = random_tokens(203, seed=1411)
    answer_one = complete(service.url, turn_one, 33)
    before = computed_prompt_tokens(service.prefill + service.decode)
    turn_two = turn_one + answer_one.token_ids() + random_tokens(41, seed=1412)
    answer_two = complete(service.url, turn_two, NUM_TOKENS)
    assert answer_two.cached_tokens >= len(turn_one)
    computed = [b - a for a, b in zip(before, computed_prompt_tokens(service.prefill + service.decode), strict=True)]
    assert sum(computed) == len(turn_two) - answer_two.cached_tokens
    # The decode node generated turn one's answer: its blocks are not moved back to it.
    assert answer_two.trace["decode_cached_tokens"] >= (len(turn_one) + 33 - 1) // 16 * 16
    assert_equals_stock(reference, turn_two, answer_two)


def test_turn_two_when_sent_as_chat_then_turn_ones_messages_are_not_computed_again(service: Service) -> None:
    messages = [
        {"role": "system", "content": "You explain the standard library of a programming language, module by module."},
        {"role": "user", "content": "What is asyncio for, and when would I rather use threads or processes?"},
    ]
    options = {"temperature": 0, "max_tokens": 24}
    first = post(service.url, "/v1/chat/completions", {"messages": messages, **options})
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    whole = post(service.url, "/tokenize", {"messages": messages, "add_generation_prompt": False})
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And what about processes?"}]
    second = post(service.url, "/v1/chat/completions", {"messages": messages, **options})
    assert second["tandem"]["placement"] == "remote"
    assert (
        whole["count"] <= second["usage"]["prompt_tokens_details"]["cached_tokens"] < second["usage"]["prompt_tokens"]
    )


def test_cache_salt_when_it_differs_then_nothing_is_shared(service: Service) -> None:
    prompt = random_tokens(300, seed=1421)
    answers = [complete(service.url, prompt, 8, cache_salt=salt) for salt in ("tenant a", "tenant b", "tenant a")]
    assert [answer.cached_tokens for answer in answers] == [0, 0, 300]
    assert answers[1].trace["decode_cached_tokens"] == 0
    assert answers[1].trace["transferred_bytes"] == answers[0].trace["transferred_bytes"] > 0
    assert answers[2].trace["transferred_bytes"] == 0
    unsalted = complete(service.url, prompt, 8)
    assert unsalted.cached_tokens == 0
    assert len({tuple(answer.token_ids()) for answer in (*answers, unsalted)}) == 1


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("--no-enable-prefix-caching",), id="no-caching", marks=pytest.mark.full),
        pytest.param(("--mamba-cache-mode", "none"), id="mode-none", marks=pytest.mark.full),
    ],
)
def uncached(request: pytest.FixtureRequest) -> Iterator[tuple[str, Service]]:
    flags = (*NODE_FLAGS, *request.param)
    with Service(checkpoint(FAMILY), prefill_flags=flags, decode_flags=flags) as running:
        yield request.param[0], running


def test_answers_when_states_are_not_cached_then_equal_stock_with_nothing_cached(
    uncached: tuple[str, Service], reference: Reference
) -> None:
    flag, service = uncached
    decode = service.decode[0]
    prompts = [random_tokens(1000, seed=1401), random_tokens(100, seed=1431), random_tokens(33, seed=1432)]
    for sighting in range(2):
        for prompt in prompts:
            answer = complete(service.url, prompt, NUM_TOKENS)
            assert_equals_stock(reference, prompt, answer)
            assert answer.trace["placement"] == "remote"
            assert answer.trace["prefill_cached_tokens"] == 0
            assert answer.cached_tokens == 0
            num_blocks = -(-len(prompt) // 16)
            if flag == "--mamba-cache-mode" and sighting:
                num_blocks -= len(prompt) // 16  # attention blocks stay cached; the tail hangs on a state
            assert answer.trace["transferred_bytes"] == payload_bytes(decode, num_blocks, 1)
    wait_settled(service.prefill[0], decode)
    if flag == "--no-enable-prefix-caching":
        for node in (service.prefill[0], decode):
            state: dict[str, Any] = node.check_cache()
            assert (state["blocks"]["cached"], state["slots"]["cached"]) == (0, 0)


def test_memory_when_all_of_the_above_has_run_then_is_free_or_cached_on_both_nodes(service: Service) -> None:
    wait_settled(service.prefill[0], service.decode[0])
