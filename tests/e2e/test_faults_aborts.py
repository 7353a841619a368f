"""Clients that hang up: in each phase of a request, in each shape of a request, one by one and many at once.

Whatever the moment, the memory of the request is free again on both nodes, leases are gone, and requests before, beside
and after it are answered as if it had never been.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from common.wire.routes import TEST_TRANSFER_FAULT_ROUTE
from tests.e2e.conftest import FAMILY, TIGHT_FLAGS
from tests.support import foreign
from tests.support.client import Answer, complete, completion_body, info, metric, together, wait_settled
from tests.support.hangup import OpenRequest, stopped, wait_until
from tests.support.models import checkpoint
from tests.support.reference import Greedy, Reference, random_tokens
from tests.support.service import Node, Service

ROUTE = "/v1/completions"
CHECK_PROMPT = random_tokens(100, seed=351)
SHAPES = ("whole", "stream", "n", "list")
SHORT_TIER_SHAPES = {
    "queued for prefill": ("stream",),
    "prefilling": ("list",),
    "transferring": ("n",),
    "queued for decode": ("whole",),
    "decoding": ("whole", "n"),
}


@pytest.fixture(autouse=True)
def same_before_and_after(tight_service: Service, reference: Reference) -> Iterator[None]:
    """All is given back after each test, and a prompt that may be cached is still answered as transformers does.

    Asked before too: the nodes have shaken hands then, and no test stops a holder in the middle of that.
    """
    check_right(complete(tight_service.url, CHECK_PROMPT, 12), reference.greedy(CHECK_PROMPT, 12), reference)
    wait_settled(*tight_service.prefill, *tight_service.decode)
    yield
    wait_settled(*tight_service.prefill, *tight_service.decode)
    check_right(complete(tight_service.url, CHECK_PROMPT, 12), reference.greedy(CHECK_PROMPT, 12), reference)
    wait_settled(*tight_service.prefill, *tight_service.decode)


def check_right(answer: Answer, expected: Greedy, reference: Reference, choice: int = 0) -> None:
    mismatch = expected.mismatch(answer.token_ids(choice), answer.logprobs(choice), reference.tolerance)
    assert mismatch is None, mismatch


def body_of(shape: str, num_prompt_tokens: int, num_tokens: int, seed: int) -> dict[str, Any]:
    """A long-running request of one shape; 3 continuations or 3 prompts where there are several."""
    prompt: Any = random_tokens(num_prompt_tokens, seed)
    if shape == "list":
        prompt = [random_tokens(num_prompt_tokens, seed + index) for index in range(3)]
    fields: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 1} if shape == "n" else {}
    return completion_body(prompt, num_tokens, stream=shape == "stream", **fields)


@contextlib.contextmanager
def reads_held_back(node: Node, count: int) -> Iterator[None]:
    """The next ``count`` reads of data of ``node`` are in flight until the end, when they write their destinations.

    Their holder lives on: one that stands still for longer than a moment is given up, and UCX may end it when it wakes.
    """
    url = node.url + TEST_TRANSFER_FAULT_ROUTE
    httpx.post(url, json={"kind": "hang", "count": count}, timeout=10).raise_for_status()
    try:
        yield
    finally:
        httpx.post(url, json={"kind": "clear"}, timeout=10).raise_for_status()


def is_running(node: Node, count: int = 1) -> bool:
    return int(info(node)["running"]) >= count


def is_waiting(node: Node, count: int = 1) -> bool:
    return int(info(node)["waiting"]) >= count


def num_aborted(node: Node) -> float:
    return metric(node, "requests_total", outcome="abort")


def cases() -> list[Any]:
    return [
        pytest.param(phase, shape, marks=() if shape in short else pytest.mark.full, id=f"{phase}, {shape}")
        for phase, short in SHORT_TIER_SHAPES.items()
        for shape in SHAPES
    ]


@pytest.mark.parametrize(("phase", "shape"), cases())
def test_client_when_it_hangs_up_then_everything_is_given_back(tight_service: Service, phase: str, shape: str) -> None:
    prefill, decode = tight_service.prefill[0], tight_service.decode[0]
    url = tight_service.url
    aborted = num_aborted(tight_service.proxy)
    fresh = 1000 * (1 + SHAPES.index(shape))  # what an aborted prompt had computed stays cached
    if phase == "queued for prefill":
        with OpenRequest(url, ROUTE, body_of("whole", 1500, 400, seed=352 + fresh)) as other:
            wait_until(lambda: is_running(prefill), "the first prompt to be computed")
            with contextlib.ExitStack() as stack:
                with stopped(prefill):  # so that the second one is there long before the first is finished
                    request = stack.enter_context(OpenRequest(url, ROUTE, body_of(shape, 60, 400, seed=360 + fresh)))
                    wait_until(lambda: metric(tight_service.proxy, "requests_running") == 2, "its legs to be sent")
                wait_until(lambda: is_waiting(prefill), "the second prompt to queue")
                assert not request.has_answer
            wait_until(lambda: not is_waiting(prefill), "the queued prompt to leave")
            assert not other.has_answer
        wait_until(lambda: num_aborted(tight_service.proxy) == aborted + 2, "two aborts")
        return
    if phase == "prefilling":
        with OpenRequest(url, ROUTE, body_of(shape, 1800, 240, seed=370 + fresh)) as request:
            wait_until(lambda: is_running(prefill), "the prompt to be computed")
            assert not request.has_answer
    elif phase == "transferring":
        body = body_of(shape, 300, 400, seed=380)
        prompts = body["prompt"] if shape == "list" else [body["prompt"]]
        params = [foreign.prefill(prefill.url, {**body, "prompt": prompt}) for prompt in prompts]
        aborted = num_aborted(decode)
        held = decode.check_cache()
        with reads_held_back(decode, len(prompts)):
            with OpenRequest(decode.url, ROUTE, {**body, "kv_transfer_params": params}) as request:
                # Before a read is posted an abort has nothing to wait for, and frees the blocks at once.
                wait_until(lambda: metric(decode, "transfers_in_flight") == len(prompts), "the reads to start")
                assert not request.has_answer
            wait_until(lambda: num_aborted(decode) == aborted + 1, "the decode node to see it")
            state: Any = decode.check_cache()
            assert held["sequences"] == 0
            assert (state["sequences"], state["blocks"]["held"]) == (len(prompts), 19 * len(prompts))  # not free yet
        return
    elif phase == "queued for decode":
        with OpenRequest(url, ROUTE, body_of("n", 20, 1500, seed=391) | {"n": 6}) as other:
            wait_until(lambda: is_running(decode, 6), "six continuations to run")
            with OpenRequest(url, ROUTE, body_of(shape, 60, 400, seed=392)) as request:
                wait_until(lambda: is_waiting(decode), "the request to queue")
                num_leases = 3 if shape == "list" else 1
                wait_until(lambda: prefill.check_cache()["leases"] == num_leases, "all its prompts to be leased")
                assert not request.has_answer
            wait_until(lambda: not is_waiting(decode), "the queued request to leave")
            wait_until(lambda: prefill.check_cache()["leases"] == 0, "its leases to end")
            assert not other.has_answer
        wait_until(lambda: num_aborted(tight_service.proxy) == aborted + 2, "two aborts")
        return
    else:
        assert phase == "decoding"
        with OpenRequest(url, ROUTE, body_of(shape, 60, 1500, seed=400)) as request:
            if shape == "stream":
                request.read_events(3)
            else:
                wait_until(lambda: is_running(decode, 1 if shape == "whole" else 3), "tokens to come")
                assert not request.has_answer
    wait_until(lambda: num_aborted(tight_service.proxy) == aborted + 1, "the abort to be counted")


def test_abort_of_a_sequence_that_holds_the_pool_when_a_pull_waits_for_it_then_the_pull_gets_right_bytes(
    tight_service: Service, reference: Reference
) -> None:
    """The freed blocks are the pull's destination at once, while the step that was running may still be writing."""
    decode = tight_service.decode[0]
    small = random_tokens(700, seed=410)
    assert 16 * int(info(decode)["num_blocks"]) < 1500 + 700
    large = body_of("stream", 1500, 500, seed=411)
    with OpenRequest(tight_service.url, ROUTE, large) as request:
        request.read_events(2)
        answers: list[Answer] = []
        waiting = threading.Thread(target=lambda: answers.append(complete(tight_service.url, small, 24)))
        waiting.start()
        wait_until(lambda: is_waiting(decode), "the pull to wait for memory")
        request.hang_up()
    waiting.join(60)
    [answer] = answers
    check_right(answer, reference.greedy(small, 24), reference)
    assert answer.trace["placement"] == "remote"
    assert answer.trace["transferred_blocks"] == 44


def test_connection_when_closed_in_the_middle_of_the_body_then_nothing_is_left(tight_service: Service) -> None:
    for node in (tight_service.proxy, *tight_service.prefill, *tight_service.decode):
        port = int(node.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\nContent-Type: application/json\r\n\r\n"
            connection.sendall(head.encode() + b'{"prompt": ')


def churn(service: Service, reference: Reference, *, num_requests: int, seed: int) -> tuple[int, int]:
    """Eight clients at once: two thirds hang up at a random moment, the others check their answers."""
    draw = random.Random(seed)
    stems = [random_tokens(draw.randrange(60, 400), seed=420 + index) for index in range(3)]
    prompts = [
        stem[: draw.randrange(20, len(stem) + 1)] + random_tokens(9, seed=430 + i) for i, stem in enumerate(stems * 3)
    ]
    expected = {tuple(prompt): reference.greedy(prompt, 16) for prompt in prompts}
    jobs = [
        (draw.choice(prompts), draw.choice(SHAPES), draw.random() < 0.66, draw.random()) for _ in range(num_requests)
    ]
    lock = threading.Lock()
    counts = [0, 0]

    def good(prompt: list[int], shape: str) -> None:
        many: Any = [prompt, prompts[0]] if shape == "list" else prompt
        answer = complete(service.url, many, 16, **({"n": 2} if shape == "n" else {}))
        check_right(answer, expected[tuple(prompt)], reference)
        if shape in ("n", "list"):
            check_right(answer, expected[tuple(prompt if shape == "n" else prompts[0])], reference, choice=1)

    def bad(prompt: list[int], shape: str, moment: float) -> None:
        body = completion_body([prompt, prompts[1]] if shape == "list" else prompt, 300, stream=shape == "stream")
        with OpenRequest(service.url, ROUTE, body | ({"n": 3} if shape == "n" else {})) as request:
            if shape == "stream" and moment > 0.5:
                request.read_events(1 + int(moment * 10))
            else:
                threading.Event().wait(moment * 0.4)

    def client() -> None:
        while True:
            with lock:
                if not jobs:
                    return
                prompt, shape, hangs_up, moment = jobs.pop()
                counts[hangs_up] += 1
            if hangs_up:
                bad(prompt, shape, moment)
            else:
                good(prompt, shape)

    together([client] * 8)
    return counts[0], counts[1]


@pytest.mark.full  # as in tests/engine/test_core.py
def test_churn_of_aborts_in_small_pools_when_other_requests_run_then_all_their_outputs_are_right(
    tight_service: Service, reference: Reference
) -> None:
    num_good, num_bad = churn(tight_service, reference, num_requests=60, seed=1)
    assert num_good >= 12
    assert num_bad >= 30
    assert num_aborted(tight_service.proxy) >= num_bad / 2


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 6))
def test_long_churn_of_aborts_in_small_pools_when_other_requests_run_then_all_their_outputs_are_right(
    tight_service: Service, reference: Reference, seed: int
) -> None:
    num_good, num_bad = churn(tight_service, reference, num_requests=150, seed=seed)
    assert num_good + num_bad == 150


@pytest.mark.full
def test_churn_of_aborts_without_prefix_caching_then_every_block_and_slot_is_free_again(reference: Reference) -> None:
    flags = (
        *TIGHT_FLAGS,
        "--no-enable-prefix-caching",
        "--max-num-batched-tokens",
        "64",
        "--kv-cache-memory",
        "1400KiB",
    )
    with Service(checkpoint(FAMILY), prefill_flags=flags, decode_flags=flags) as service:
        nodes = (*service.prefill, *service.decode)
        before = [node.check_cache() for node in nodes]
        num_good, num_bad = churn(service, reference, num_requests=80, seed=7)
        assert min(num_good, num_bad) >= 15
        wait_settled(*nodes)
        assert [node.check_cache() for node in nodes] == before
        assert all(state["blocks"]["cached"] == 0 for state in before)  # type: ignore[index]
