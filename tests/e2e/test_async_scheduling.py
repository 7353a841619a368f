"""Steps that are launched ahead in real processes, on devices that are late: the answers of the ordinary order, stop
strings and clients that leave, and a second turn that goes on from the exact end.

Requests with log-probabilities run in the ordinary order, beside the others of their node too: so the same node gives
what is expected.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.wire.routes import COMPLETIONS_ROUTE
from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support.client import Answer, complete, metric, together, wait_settled
from tests.support.hangup import OpenRequest
from tests.support.models import checkpoint
from tests.support.reference import random_tokens, reference
from tests.support.service import LATE_DEVICE_VARIABLE, Service

pytestmark = pytest.mark.full  # as in tests/engine/test_async_scheduling.py

NUM_TOKENS = 40
PROMPTS = [random_tokens(length, seed=length + 900) for length in (1, 40, 100, 300)]


@pytest.fixture(scope="module")
def ahead() -> Iterator[Service]:
    with Service(
        checkpoint(FAMILY),
        prefill_flags=NODE_FLAGS,
        decode_flags=(*NODE_FLAGS, "--async-scheduling"),
        environment={LATE_DEVICE_VARIABLE: "1"},
        program="tests.support.late_node",
    ) as running:
        yield running


def steps_ahead(service: Service) -> float:
    return metric(service.decode[0], "async_scheduling_steps_total", order="ahead")


def ask(service: Service, prompt: list[int], **fields: object) -> Answer:
    return complete(service.url, prompt, NUM_TOKENS, **{"logprobs": None, **fields})


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "seeded"])
def test_answers_when_steps_are_launched_ahead_equal_those_in_the_ordinary_order(
    ahead: Service, sampling: dict[str, float]
) -> None:
    before = steps_ahead(ahead)
    expected = together([lambda p=prompt: ask(ahead, p, logprobs=0, **sampling) for prompt in PROMPTS])
    assert steps_ahead(ahead) == before
    answers = together([lambda p=prompt: ask(ahead, p, **sampling) for prompt in PROMPTS])
    assert steps_ahead(ahead) > before + NUM_TOKENS / 2
    assert [answer.token_ids() for answer in answers] == [answer.token_ids() for answer in expected]
    if not sampling:
        stock = reference(FAMILY)
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            greedy = stock.greedy(prompt, NUM_TOKENS)
            assert greedy.mismatch(answer.token_ids(), answer.logprobs(), stock.tolerance) is None
    wait_settled(*ahead.prefill, *ahead.decode)


def test_second_turn_when_the_first_ended_with_a_row_in_flight_then_goes_on_from_its_end(ahead: Service) -> None:
    prompt = random_tokens(60, seed=971)
    whole = ask(ahead, prompt, logprobs=0, cache_salt="ordinary")
    end = whole.token_ids()[17]
    place = whole.token_ids().index(end) + 1
    first = ask(ahead, prompt, stop_token_ids=[end])
    assert first.token_ids() == whole.token_ids()[:place]
    second = [*prompt, *first.token_ids(), *random_tokens(20, seed=972)]
    answer = ask(ahead, second, logprobs=0)
    assert answer.cached_tokens >= len(prompt) + place - 1
    stock = reference(FAMILY)
    assert stock.greedy(second, NUM_TOKENS).mismatch(answer.token_ids(), answer.logprobs(), stock.tolerance) is None
    wait_settled(*ahead.prefill, *ahead.decode)


def test_answers_when_others_end_at_a_stop_string_or_leave_then_are_the_same(ahead: Service) -> None:
    prompts = [random_tokens(50, seed=980 + number) for number in range(3)]
    expected = [ask(ahead, prompt, logprobs=0) for prompt in prompts]
    text = expected[1].choices[0]["text"]
    middle = text[len(text) // 2 : len(text) // 2 + 4]

    def leave() -> Answer:
        body = {"prompt": prompts[2], "max_tokens": 400, "ignore_eos": True, "stream": True}
        with OpenRequest(ahead.url, COMPLETIONS_ROUTE, body) as left:
            left.read_events(20)
        return expected[2]

    calls = [lambda: ask(ahead, prompts[0]), lambda: ask(ahead, prompts[1], stop=[middle]), leave]
    whole, stopped, _ = together(calls)
    assert whole.token_ids() == expected[0].token_ids()
    assert stopped.choices[0]["text"] == text[: text.index(middle)]
    assert stopped.choices[0]["finish_reason"] == "stop"
    wait_settled(*ahead.prefill, *ahead.decode)
