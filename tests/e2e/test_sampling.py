"""Several answers to one prompt, several prompts in one request, and log-probabilities of the prompt itself."""

from __future__ import annotations

import pytest
from torch import Tensor

from tests.support.client import Answer, complete, computed_prompt_tokens, payload_bytes, wait_settled
from tests.support.reference import Reference, random_tokens
from tests.support.service import Service

NUM_TOKENS = 20


def assert_drawn_from(reference: Reference, prompt: list[int], answer: Answer, choice: int) -> None:
    """The log-probabilities of a sampled answer are stock's own for these tokens, the first one included."""
    token_ids, logprobs = answer.token_ids(choice), answer.logprobs(choice)
    assert len(token_ids) == len(logprobs) == NUM_TOKENS
    rows = reference.score_answer(prompt, token_ids)
    for token_id, logprob, row in zip(token_ids, logprobs, rows, strict=True):
        assert logprob == pytest.approx(float(row[token_id]), abs=reference.tolerance)


def test_three_answers_when_seeded_then_differ_and_come_from_one_prefill(
    service: Service, reference: Reference
) -> None:
    prompt = random_tokens(333, seed=1501)
    nodes = (service.prefill[0], service.decode[0])
    before = computed_prompt_tokens(nodes)
    first = complete(service.url, prompt, NUM_TOKENS, n=3, seed=7, temperature=1.0)
    assert first.trace["placement"] == "remote"
    assert computed_prompt_tokens(nodes) == [before[0] + 333, before[1]]
    assert first.trace["transferred_bytes"] == payload_bytes(service.decode[0], 21, 1)
    assert [choice["index"] for choice in first.choices] == [0, 1, 2]
    answers = [first.token_ids(choice) for choice in range(3)]
    assert len({tuple(answer) for answer in answers}) == 3
    assert first.body["usage"]["completion_tokens"] == 3 * NUM_TOKENS
    for choice in range(3):
        assert_drawn_from(reference, prompt, first, choice)
    again = complete(service.url, prompt, NUM_TOKENS, n=3, seed=7, temperature=1.0)
    assert again.cached_tokens == 333
    assert computed_prompt_tokens(nodes) == [before[0] + 333, before[1]]
    assert [again.token_ids(choice) for choice in range(3)] == answers
    other = complete(service.url, prompt, NUM_TOKENS, n=3, seed=8, temperature=1.0)
    assert [other.token_ids(choice) for choice in range(3)] != answers
    wait_settled(*nodes)


def test_list_of_prompts_when_each_has_two_answers_then_every_choice_belongs_to_its_prompt(
    service: Service, reference: Reference
) -> None:
    prompts = [random_tokens(length, seed=1510 + length) for length in (21, 80, 145)]
    before = computed_prompt_tokens(service.prefill)
    answer = complete(service.url, prompts, NUM_TOKENS, n=2)
    assert answer.trace["placement"] == "remote"
    assert [choice["index"] for choice in answer.choices] == list(range(6))
    for choice in range(6):
        greedy = reference.greedy(prompts[choice // 2], NUM_TOKENS)
        assert greedy.mismatch(answer.token_ids(choice), answer.logprobs(choice), reference.tolerance) is None
    assert answer.body["usage"]["prompt_tokens"] == 21 + 80 + 145
    assert answer.body["usage"]["completion_tokens"] == 6 * NUM_TOKENS
    assert answer.trace["transferred_blocks"] == 2 + 5 + 10
    assert answer.trace["transferred_states"] == 3
    assert computed_prompt_tokens(service.prefill) == [before[0] + 21 + 80 + 145]
    assert complete(service.url, prompts, NUM_TOKENS, n=2).cached_tokens == 21 + 80 + 145


def assert_echoed(rows: Tensor, token_ids: list[int], answer: Answer, tolerance: float) -> None:
    """``rows``: stock's log-probabilities after each of ``token_ids``."""
    assert answer.token_ids() == token_ids
    logprobs = answer.logprobs()
    assert len(logprobs) == len(token_ids)
    assert logprobs[0] is None
    for index in range(1, len(token_ids)):
        assert logprobs[index] == pytest.approx(float(rows[index - 1, token_ids[index]]), abs=tolerance)


@pytest.mark.parametrize("length", [1, 16, 700])
def test_echo_when_asked_with_logprobs_and_no_new_token_then_gives_stocks_prompt_logprobs(
    service: Service, reference: Reference, length: int
) -> None:
    prompt = random_tokens(length, seed=1520 + length)
    rows = reference.score(prompt)
    for cached in (False, True):
        if cached:
            complete(service.url, prompt, 1)
        answer = complete(service.url, prompt, 0, echo=True)
        assert answer.trace["placement"] == "local"
        assert answer.trace["decode_cached_tokens"] == 0
        assert answer.body["usage"]["completion_tokens"] == 0
        assert_echoed(rows, prompt, answer, reference.tolerance)


def test_echo_when_tokens_are_generated_too_then_their_logprobs_follow_the_prompts(
    service: Service, reference: Reference
) -> None:
    prompt = random_tokens(90, seed=1530)
    answer = complete(service.url, prompt, 12, echo=True)
    greedy = reference.greedy(prompt, 12)
    assert_echoed(reference.score([*prompt, *greedy.token_ids]), [*prompt, *greedy.token_ids], answer, 1e-3)
    # What an echo computed is cached for others all the same.
    assert complete(service.url, prompt, 12).trace["decode_cached_tokens"] > 0


def test_echo_when_without_logprobs_then_prompt_and_answer_come_back(service: Service, reference: Reference) -> None:
    prompt = random_tokens(40, seed=1531)
    answer = complete(service.url, prompt, 12, echo=True, logprobs=None)
    assert answer.token_ids() == prompt + reference.greedy(prompt, 12).token_ids
    assert answer.trace["placement"] == "remote"


def test_prompt_logprobs_when_asked_for_then_are_stocks_and_computed_locally(
    service: Service, reference: Reference
) -> None:
    prompt = random_tokens(40, seed=1540)
    rows = reference.score(prompt)
    answer = complete(service.url, prompt, 1, logprobs=None, prompt_logprobs=2)
    assert answer.trace["placement"] == "local"
    first, *rest = answer.body["choices"][0]["prompt_logprobs"]
    assert first is None
    for place, table in enumerate(rest):
        own = table[str(prompt[place + 1])]
        assert own["logprob"] == pytest.approx(float(rows[place, prompt[place + 1]]), abs=reference.tolerance)
        assert 2 <= len(table) <= 3
