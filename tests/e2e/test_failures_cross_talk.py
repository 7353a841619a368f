"""Many requests at once whose answers can only be their own: nobody ever gets what was computed for another."""

from __future__ import annotations

import pytest

from tests.support.client import Answer, complete, completion_body, metric, post, together, wait_settled
from tests.support.models import VOCAB_SIZE
from tests.support.reference import FIRST_TOKEN, Reference, random_tokens
from tests.support.service import Service

NUM_REQUESTS = 64
NUM_TOKENS = 8
STEM = random_tokens(96, seed=210)


def forced_token(index: int) -> int:
    return FIRST_TOKEN + index * ((VOCAB_SIZE - FIRST_TOKEN) // NUM_REQUESTS)


def test_answers_of_64_requests_at_once_when_first_tokens_are_forced_apart_then_each_has_its_own(
    service: Service, reference: Reference
) -> None:
    """Half share a stem, half share nothing; the forced first token marks the request, what follows must be that which
    transformers says after this prompt and this token."""

    def prompt(index: int) -> list[int]:
        stem = STEM if index % 2 else random_tokens(80 + 16 * (index % 3), seed=220 + index)
        return [*stem, *random_tokens(9 + index % 4, seed=300 + index)]

    def ask(index: int) -> Answer:
        body = completion_body(prompt(index), NUM_TOKENS, logit_bias={str(forced_token(index)): 100.0})
        # A bias of 100 would force the token forever: what follows is asked for by a second request, over the cache.
        return Answer(post(service.url, "/v1/completions", body))

    answers = together([lambda index=index: ask(index) for index in range(NUM_REQUESTS)])  # type: ignore[misc]
    for index, answer in enumerate(answers):
        assert answer.token_ids() == [forced_token(index)] * NUM_TOKENS, f"request {index}: {answer.token_ids()}"

    def go_on(index: int) -> Answer:
        return complete(service.url, [*prompt(index), forced_token(index)], NUM_TOKENS)

    continued = together([lambda index=index: go_on(index) for index in range(NUM_REQUESTS)])  # type: ignore[misc]
    reference.generate([[*prompt(index), forced_token(index)] for index in range(NUM_REQUESTS)], NUM_TOKENS)
    for index, answer in enumerate(continued):
        expected = reference.greedy([*prompt(index), forced_token(index)], NUM_TOKENS)
        mismatch = expected.mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance)
        assert mismatch is None, f"request {index}: {mismatch}"
    assert len({tuple(answer.token_ids()) for answer in continued}) > NUM_REQUESTS / 2, "the answers tell nothing apart"
    wait_settled(*service.prefill, *service.decode)


@pytest.mark.full
def test_answers_of_240_requests_at_once_without_faults_then_all_are_right_and_no_alarm_is_false(
    service: Service, reference: Reference
) -> None:
    nodes = (*service.prefill, *service.decode)

    def alarms() -> list[float]:
        names = ("late_reads_rejected_total", "transfer_failures_total")
        return [metric(node, name) for node in nodes for name in names]

    before = alarms()
    prompts = [random_tokens(40 + index % 90, seed=index % 400) for index in range(240)]
    answers = together([lambda prompt=prompt: complete(service.url, prompt, NUM_TOKENS) for prompt in prompts])  # type: ignore[misc]
    reference.generate(prompts, NUM_TOKENS)
    for prompt, answer in zip(prompts, answers, strict=True):
        mismatch = reference.greedy(prompt, NUM_TOKENS).mismatch(
            answer.token_ids(), answer.logprobs(), reference.tolerance
        )
        assert mismatch is None, mismatch
    wait_settled(*nodes)
    assert alarms() == before
