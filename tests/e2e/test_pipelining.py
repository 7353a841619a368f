"""Prompts that are read while they are computed: both legs at once, parts before the end, and every way out of it.

The prefill node computes two tokens a step, so that a prompt of 800 takes 400 steps: long enough to be interrupted.
(One token would be a decode step: those are replayed, and fast.)
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import FAMILY
from tests.support import foreign
from tests.support.client import (
    Answer,
    complete,
    completion_body,
    computed_prompt_tokens,
    info,
    metric,
    payload_bytes,
    together,
    wait_settled,
)
from tests.support.hangup import OpenRequest, stopped, wait_until
from tests.support.models import checkpoint, tiered
from tests.support.reference import Reference, random_tokens
from tests.support.reference import reference as reference_of
from tests.support.restart import start_again
from tests.support.service import Node, Service, start_node, wait_ready

ROUTE = "/v1/completions"
FLAGS = (
    *("--dtype", "float32"),
    *("--max-model-len", "2048"),
    *("--max-num-seqs", "8"),
    *("--kv-cache-memory", "64MiB"),
    *("--kv-lease-seconds", "5"),
)
SLOW = ("--max-num-batched-tokens", "2")
LONG = 800
RECOVERY_S = 10.0
"""Until a lost node is noticed, on any machine: its beats end, or are missed for 1.5 s. A read alone waits for 30 s."""
TRIES = 10
PHASE_S = 2.0
"""A prompt of 1,600 tokens is computed in less."""


@pytest.fixture(scope="module")
def pipelined() -> Iterator[Service]:
    """A service whose prefill node is slow, and may be killed by a test that starts it again."""
    with Service(checkpoint(FAMILY), prefill_flags=(*FLAGS, *SLOW), decode_flags=FLAGS) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_leaks(pipelined: Service) -> Iterator[None]:
    yield
    wait_settled(*pipelined.prefill, *pipelined.decode)


def check_right(answer: Answer, prompt: list[int], reference: Reference) -> None:
    mismatch = reference.greedy(prompt, len(answer.token_ids())).mismatch(
        answer.token_ids(), answer.logprobs(), reference.tolerance
    )
    assert mismatch is None, mismatch


def num_early(decode: Node) -> float:
    return metric(decode, "transfer_early_parts_total")


def test_long_prompt_when_it_has_many_chunks_then_parts_come_before_its_end_and_the_output_is_right(
    pipelined: Service, reference: Reference
) -> None:
    decode = pipelined.decode[0]
    prompt = random_tokens(LONG, seed=601)
    early = num_early(decode)
    answer = complete(pipelined.url, prompt, 16)
    check_right(answer, prompt, reference)
    assert num_early(decode) > early
    trace = answer.trace
    assert trace["placement"] == "remote"
    assert (trace["transferred_blocks"], trace["transferred_states"]) == (50, 1)
    assert trace["transferred_bytes"] == payload_bytes(decode, 50, 1)
    assert trace["prefill_node"] == info(pipelined.prefill[0])["name"]
    # What moved while the prompt was computed is not what the client waited for after it.
    assert trace["seconds"]["transfer"] < trace["seconds"]["prefill"]
    again = complete(pipelined.url, prompt, 16)
    assert again.token_ids() == answer.token_ids()
    assert (again.trace["transferred_bytes"], again.cached_tokens) == (0, LONG)


@pytest.mark.parametrize("num_tokens", tiered((1, 15, 16, 17, 320, 333), (1, 16, 333)))
def test_prompt_when_of_any_length_then_the_output_is_right_and_the_bytes_exact(
    pipelined: Service, reference: Reference, num_tokens: int
) -> None:
    decode = pipelined.decode[0]
    prompt = random_tokens(num_tokens, seed=602 + num_tokens)
    answer = complete(pipelined.url, prompt, 12)
    check_right(answer, prompt, reference)
    assert answer.trace["transferred_bytes"] == payload_bytes(decode, -(-num_tokens // 16), 1)


def test_shared_prefix_when_pulled_in_parts_then_only_what_is_missing_moves(
    pipelined: Service, reference: Reference
) -> None:
    shared = random_tokens(320, seed=610)
    prompts = [shared + random_tokens(80, seed=611 + index) for index in range(2)]
    first, second = (complete(pipelined.url, prompt, 12) for prompt in prompts)
    for answer, prompt in zip((first, second), prompts, strict=True):
        check_right(answer, prompt, reference)
    assert first.trace["transferred_bytes"] == payload_bytes(pipelined.decode[0], 25, 1)
    assert second.trace["transferred_bytes"] == payload_bytes(pipelined.decode[0], 5, 1)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_other_families_when_pulled_in_parts_then_outputs_are_right(family: str) -> None:
    stock = reference_of(family)
    has_state = family != "llama"
    prompts = [random_tokens(300, seed=620), random_tokens(500, seed=621)]
    with Service(checkpoint(family), prefill_flags=(*FLAGS, *SLOW), decode_flags=FLAGS) as service:
        decode = service.decode[0]
        answers = together([lambda prompt=prompt: complete(service.url, prompt, 12) for prompt in prompts])  # type: ignore[misc]
        for answer, prompt in zip(answers, prompts, strict=True):
            check_right(answer, prompt, stock)
            num_blocks = -(-len(prompt) // 16)
            assert answer.trace["transferred_bytes"] == payload_bytes(decode, num_blocks, int(has_state))
        assert num_early(decode) > 0
        wait_settled(*service.prefill, *service.decode)


def test_list_of_prompts_when_streamed_then_each_follows_its_own_leg(pipelined: Service, reference: Reference) -> None:
    prompts = [random_tokens(80 + 40 * index, seed=630 + index) for index in range(3)]
    answer = complete(pipelined.url, prompts, 8)
    for index, prompt in enumerate(prompts):
        expected = reference.greedy(prompt, 8)
        mismatch = expected.mismatch(answer.token_ids(index), answer.logprobs(index), reference.tolerance)
        assert mismatch is None, mismatch
    assert answer.trace["transferred_states"] == 3


# --- leaving


def prefill_leg(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    leg = {**foreign.PREFILL_PARAMS, "tandem_rendezvous": name}
    return {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": leg}


def is_computing(node: Node) -> bool:
    return int(info(node)["running"]) >= 1


def happens(condition: Callable[[], object]) -> bool:
    """Whether ``condition`` becomes true soon. A phase of a request that a busy machine hid from the test is over."""
    deadline_s = time.monotonic() + PHASE_S
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True


def leaves_in(phase: str, service: Service, seed: int) -> bool:
    """A client leaves in a phase of its request. Whether it was still that phase, and its leg was aborted."""
    prefill, decode = service.prefill[0], service.decode[0]
    aborted = metric(prefill, "requests_total", outcome="abort")
    body = completion_body(random_tokens(1000, seed), 1000, stream=True)
    if phase == "first poll":
        occupying = completion_body(random_tokens(1600, seed + TRIES), 400)
        with OpenRequest(service.url, ROUTE, occupying) as other:
            is_seen = happens(lambda: is_computing(prefill))
            with OpenRequest(service.url, ROUTE, body) as request:
                is_seen = is_seen and happens(lambda: int(info(prefill)["waiting"]) == 1)
                state: Any = decode.check_cache()
                # A prompt that queues holds no memory of the decode node.
                is_seen = is_seen and state["sequences"] <= 1 and not request.has_answer and not other.has_answer
    elif phase == "parts":
        with OpenRequest(service.url, ROUTE, body) as request:
            is_seen = happens(lambda: is_computing(prefill) and is_computing(decode)) and not request.has_answer
    else:
        early = num_early(decode)
        with OpenRequest(service.url, ROUTE, body) as request:
            request.read_events(2)
            wait_until(lambda: num_early(decode) > early, "early parts to be counted")
        return True
    wait_settled(prefill, decode)
    return is_seen and metric(prefill, "requests_total", outcome="abort") > aborted


@pytest.mark.parametrize("phase", tiered(("first poll", "parts", "decoding"), ("parts",)))
def test_client_when_it_leaves_then_the_leg_is_aborted_and_everything_given_back(
    pipelined: Service, reference: Reference, phase: str
) -> None:
    seeds = range(64_000 + 100 * len(phase), 64_000 + 100 * len(phase) + TRIES)
    assert any(leaves_in(phase, pipelined, seed) for seed in seeds), f"not once of {TRIES} times"
    wait_settled(*pipelined.prefill, *pipelined.decode)
    prompt = random_tokens(100, 642 + len(phase))
    check_right(complete(pipelined.url, prompt, 8), prompt, reference)


def test_decode_leg_when_it_is_refused_then_the_prefill_leg_is_aborted(pipelined: Service) -> None:
    prefill = pipelined.prefill[0]
    prompt = random_tokens(1900, seed=650)
    body = completion_body(prompt, 400)  # more than fits behind the prompt: only the decode leg minds
    computed = metric(prefill, "prompt_tokens_total", source="computed")
    response = httpx.post(pipelined.url + ROUTE, json=body, timeout=30)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    wait_settled(*pipelined.prefill, *pipelined.decode)
    assert metric(prefill, "prompt_tokens_total", source="computed") == computed


def test_prefill_leg_when_it_is_refused_then_who_follows_it_hears_the_same(pipelined: Service) -> None:
    prefill, decode = pipelined.prefill[0], pipelined.decode[0]
    name = uuid.uuid4().hex
    body = completion_body(random_tokens(50, seed=651), 4)
    answers: list[httpx.Response] = []
    follow = threading.Thread(
        target=lambda: answers.append(foreign.decode(decode.url, body, foreign.rendezvous(prefill.url, name)))
    )
    follow.start()
    bad = {**prefill_leg(body, name), "prompt": [1, 10_000_000]}
    refused = httpx.post(prefill.url + ROUTE, json=bad, timeout=30)
    follow.join(30)
    assert refused.status_code == 400
    assert answers[0].status_code == 400
    assert answers[0].json()["error"] == refused.json()["error"]


def test_rendezvous_when_its_leg_never_comes_then_prompt_is_computed_here(
    pipelined: Service, reference: Reference
) -> None:
    prefill, decode = pipelined.prefill[0], pipelined.decode[0]
    prompt = random_tokens(60, seed=652)
    failures = metric(decode, "transfer_failures_total", reason="unknown_pull")
    response = foreign.decode(decode.url, completion_body(prompt, 8), foreign.rendezvous(prefill.url, uuid.uuid4().hex))
    assert response.status_code == 200, response.text
    answer = Answer(response.json())
    check_right(answer, prompt, reference)
    assert (answer.trace["placement"], answer.trace["transferred_bytes"]) == ("local", 0)
    assert metric(decode, "transfer_failures_total", reason="unknown_pull") == failures + 1


def test_rendezvous_when_its_name_is_used_twice_then_the_second_leg_is_400(
    pipelined: Service, reference: Reference
) -> None:
    prefill, decode = pipelined.prefill[0], pipelined.decode[0]
    name = uuid.uuid4().hex
    prompt = random_tokens(500, seed=653)
    body = completion_body(prompt, 8)
    with OpenRequest(prefill.url, ROUTE, prefill_leg(body, name)):
        wait_until(lambda: is_computing(prefill), "the leg to be computed")
        again = httpx.post(prefill.url + ROUTE, json=prefill_leg(body, name), timeout=30)
        assert (again.status_code, again.json()["error"]["param"]) == (400, "kv_transfer_params.tandem_rendezvous")
        answer = Answer(foreign.decode(decode.url, body, foreign.rendezvous(prefill.url, name)).json())
    check_right(answer, prompt, reference)
    assert answer.trace["transferred_states"] == 1


# --- losing the prefill node


def num_lost(decode: Node) -> float:
    return metric(decode, "transfer_failures_total")


def answer_without_its_prefill_node(
    service: Service, prompt: list[int], lose: Callable[[], None], *, in_parts: bool
) -> Answer:
    """What the client gets when the prefill node is lost while it computes this prompt, or before it begins to."""
    prefill, decode = service.prefill[0], service.decode[0]
    answers: list[Answer] = []
    lost = num_lost(decode)
    client = threading.Thread(target=lambda: answers.append(complete(service.url, prompt, 12)))
    client.start()
    if in_parts:
        wait_until(lambda: is_computing(prefill) and is_computing(decode), "parts to move")
    else:
        wait_until(lambda: int(info(prefill)["waiting"]) == 1, "the prompt to queue")
    lose()
    wait_until(lambda: num_lost(decode) > lost, "the loss to be noticed", RECOVERY_S)
    client.join(60)
    [answer] = answers
    return answer


@pytest.mark.parametrize(
    "in_parts", [pytest.param(True, id="parts"), pytest.param(False, id="first poll", marks=pytest.mark.full)]
)
def test_prefill_node_when_killed_while_it_is_waited_for_then_prompt_is_computed_here(
    pipelined: Service, reference: Reference, in_parts: bool
) -> None:
    prefill, decode = pipelined.prefill[0], pipelined.decode[0]
    complete(pipelined.url, random_tokens(40, seed=660), 1)  # connected
    prompt = random_tokens(1000, seed=661 + in_parts)
    occupying = completion_body(random_tokens(1600, seed=663), 8)

    def kill() -> None:
        prefill.process.kill()

    if in_parts:
        answer = answer_without_its_prefill_node(pipelined, prompt, kill, in_parts=True)
    else:
        with OpenRequest(prefill.url, ROUTE, prefill_leg(occupying, uuid.uuid4().hex)):
            wait_until(lambda: is_computing(prefill), "another prompt to be computed")
            answer = answer_without_its_prefill_node(pipelined, prompt, kill, in_parts=False)
    check_right(answer, prompt, reference)
    assert answer.trace["placement"] == "local"
    wait_settled(decode)
    start_again(pipelined, prefill)
    computed = computed_prompt_tokens([decode])
    back = random_tokens(200, seed=665 + in_parts)
    answer = complete(pipelined.url, back, 8)
    check_right(answer, back, reference)
    assert (answer.trace["placement"], answer.trace["transferred_states"]) == ("remote", 1)
    assert computed_prompt_tokens([decode]) == computed


def test_prefill_node_when_it_stands_still_while_it_is_waited_for_then_prompt_is_computed_here(
    pipelined: Service, reference: Reference
) -> None:
    prefill, decode = pipelined.prefill[0], pipelined.decode[0]
    complete(pipelined.url, random_tokens(40, seed=670), 1)
    prompt = random_tokens(1000, seed=671)
    answers: list[Answer] = []
    client = threading.Thread(target=lambda: answers.append(complete(pipelined.url, prompt, 12)))
    client.start()
    wait_until(lambda: is_computing(prefill) and is_computing(decode), "parts to move")
    lost = metric(decode, "transfer_failures_total", reason="peer_lost")
    with stopped(prefill):
        wait_until(
            lambda: metric(decode, "transfer_failures_total", reason="peer_lost") == lost + 1,
            "the loss to be noticed",
            RECOVERY_S,
        )
        client.join(60)
    [answer] = answers
    check_right(answer, prompt, reference)
    assert answer.trace["transferred_bytes"] == 0
    after = random_tokens(100, seed=672)
    wait_until(lambda: complete(pipelined.url, after, 4).trace["placement"] == "remote", "the node to be used again")


@pytest.fixture(scope="module")
def strict_decode(pipelined: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A decode node that fails what it cannot pull."""
    folder = tmp_path_factory.mktemp("strict")
    node = start_node("decode", pipelined.model, folder, *FLAGS, "--kv-load-failure-policy", "fail")
    try:
        wait_ready(node)
        yield node
    finally:
        node.process.stop()


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
def test_prefill_node_when_lost_and_the_policy_is_fail_then_502_before_the_first_byte(
    pipelined: Service, strict_decode: Node, stream: bool
) -> None:
    prefill = pipelined.prefill[0]
    warm = completion_body(random_tokens(30, seed=680 + stream), 2)
    foreign.decode(strict_decode.url, warm, foreign.prefill(prefill.url, warm))
    name = uuid.uuid4().hex
    body = completion_body(random_tokens(1000, seed=682 + stream), 12, stream=stream)
    lost = metric(strict_decode, "transfer_failures_total", reason="peer_lost")
    answers: list[httpx.Response] = []
    with OpenRequest(prefill.url, ROUTE, prefill_leg(body, name)):
        params = foreign.rendezvous(prefill.url, name)
        follow = threading.Thread(target=lambda: answers.append(foreign.decode(strict_decode.url, body, params)))
        follow.start()
        wait_until(lambda: is_computing(strict_decode), "parts to move")
        with stopped(prefill):
            follow.join(30)
    [response] = answers
    assert response.status_code == 502, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "transfer_failed")
    assert metric(strict_decode, "transfer_failures_total", reason="peer_lost") == lost + 1
    wait_settled(strict_decode)
