"""A request whose lookup, admission, forward, sampling or detokenisation raises fails alone, with a typed error: fifty
others beside it are right, and nothing of it is left. (Each place of the engine by itself: ``tests/engine``.)"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import pytest

from common.wire.headers import PLACEMENT_HEADER
from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support.client import Answer, completion_body, metric, together, wait_settled
from tests.support.faulty_node import mark
from tests.support.models import checkpoint
from tests.support.reference import Reference, random_tokens
from tests.support.service import Service

pytestmark = pytest.mark.full  # as in tests/engine/test_containment.py

ROUTE = "/v1/completions"
NUM_OTHERS = 50
NUM_TOKENS = 12
PROMPTS = [random_tokens(20 + 15 * (index % 4), seed=7600 + index) for index in range(NUM_OTHERS)]
MARKED_PROMPT = random_tokens(300, seed=7700)  # two chunks
TIMEOUT_S = 120.0
INTERNAL = {"message": "internal error", "type": "server_error", "param": None, "code": "internal_error"}
IN_ENGINE = {**INTERNAL, "message": "the engine failed on this request"}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service(checkpoint(FAMILY), prefill_flags=NODE_FLAGS, decode_flags=NODE_FLAGS, is_faulty=True) as running:
        yield running


def ask(url: str, body: Mapping[str, Any]) -> httpx.Response:
    return httpx.post(url + ROUTE, json=body, headers={PLACEMENT_HEADER: "remote"}, timeout=TIMEOUT_S)


def ask_beside_others(url: str, marked: Mapping[str, Any], salt: str) -> tuple[httpx.Response, Sequence[Answer]]:
    """The marked request's answer and those of the others, all at once; each computes its own prompt."""
    bodies = [completion_body(prompt, NUM_TOKENS, cache_salt=salt) for prompt in PROMPTS]
    bodies.insert(NUM_OTHERS // 2, dict(marked))
    responses = together([lambda body=body: ask(url, body) for body in bodies])  # type: ignore[misc]
    failed = responses.pop(NUM_OTHERS // 2)
    assert [response.status_code for response in responses] == [200] * NUM_OTHERS
    return failed, [Answer(response.json()) for response in responses]


def check_right(answers: Sequence[Answer], reference: Reference) -> None:
    reference.generate(PROMPTS, NUM_TOKENS)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = reference.greedy(prompt, NUM_TOKENS)
        mismatch = expected.mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance)
        assert mismatch is None, mismatch


def check_untouched(service: Service, pids: Sequence[int]) -> None:
    """Nobody died of it, nothing is held for it, and the same nodes serve on."""
    wait_settled(*service.prefill, *service.decode)
    assert [node.process.pid for node in service.nodes if node.process.popen.poll() is None] == pids
    assert metric(service.proxy, "node_up") == 2


@pytest.mark.parametrize(
    ("place", "after", "error"),
    [
        ("lookup", 0, IN_ENGINE),
        ("admission", 0, IN_ENGINE),
        ("forward", 0, IN_ENGINE),
        ("forward", 310, IN_ENGINE),
        ("sampling", 0, IN_ENGINE),
        ("sampling", 310, IN_ENGINE),
        ("detokenise", 0, INTERNAL),
        ("detokenise", 10, INTERNAL),
    ],
)
def test_request_when_a_place_raises_for_it_then_it_fails_alone(
    service: Service, reference: Reference, place: str, after: int, error: Mapping[str, Any]
) -> None:
    """Without a proxy, which would send again what failed beside it."""
    pids = [node.process.pid for node in service.nodes]
    is_begun = after > 0  # the client has a part of the answer
    marked = completion_body(MARKED_PROMPT, 60, stream=True, cache_salt=mark("decode", place, after))
    failed, answers = ask_beside_others(service.decode[0].url, marked, f"beside {place} {after}")
    check_right(answers, reference)
    assert failed.status_code == (200 if is_begun else 500), failed.text
    events = [line.removeprefix("data: ") for line in failed.text.splitlines() if line.startswith("data: ")]
    assert json.loads(events[-1] if is_begun else failed.text) == {"error": error}
    assert (len(events) > 1) == is_begun
    check_untouched(service, pids)


@pytest.mark.parametrize("place", ["lookup", "admission", "forward"])
def test_prefill_leg_when_a_place_raises_for_it_then_only_its_prompt_is_computed_elsewhere(
    service: Service, reference: Reference, place: str
) -> None:
    pids = [node.process.pid for node in service.nodes]
    marked = completion_body(MARKED_PROMPT, NUM_TOKENS, cache_salt=mark("prefill", place))
    answer, answers = ask_beside_others(service.url, marked, f"beside a prefill leg's {place}")
    check_right(answers, reference)
    assert answer.status_code == 200, answer.text
    expected = reference.greedy(MARKED_PROMPT, NUM_TOKENS)
    own = Answer(answer.json())
    assert expected.mismatch(own.token_ids(), own.logprobs(), reference.tolerance) is None
    check_untouched(service, pids)
