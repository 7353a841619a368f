"""Nodes of several ranks that hand over to each other, when something of that goes wrong at one rank: nothing of it is
used, the answer is stock's or a typed error, and no memory is lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from common.server.serve import FAILED_STATUS
from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.e2e.test_engine_death import Stream
from tests.e2e.test_ranks import END_S, check_no_rank_is_left, ranks_of
from tests.support.client import Answer, complete, completion_body, metric, post, wait_settled
from tests.support.hangup import wait_until
from tests.support.models import checkpoint
from tests.support.reference import Mismatch, Reference, random_tokens
from tests.support.restart import start_again
from tests.support.service import Node, Service
from tests.support.supervised import Child

NUM_TOKENS = 24
LEASE_S = 2
FLAGS = (*NODE_FLAGS, "--tensor-parallel-size", "2", "--kv-lease-seconds", str(LEASE_S))


@pytest.fixture(scope="module")
def divided() -> Iterator[Service]:
    with Service(checkpoint(FAMILY), prefill_flags=FLAGS, decode_flags=FLAGS) as running:
        yield running


def mismatch(reference: Reference, prompt: list[int], answer: Answer) -> Mismatch | None:
    greedy = reference.greedy(prompt, NUM_TOKENS)
    return greedy.mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance)


def arm(node: Node, route: str, **fields: Any) -> None:
    post(node.url, f"/internal/v1/test/{route}", fields)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["post_error", "partial", "stale"])
def test_pull_when_the_read_of_one_rank_fails_then_nothing_of_it_is_used(
    divided: Service, reference: Reference, kind: str, rank: int
) -> None:
    [prefill], [decode] = divided.prefill, divided.decode
    prompt = random_tokens(150, seed=8200 + 10 * rank + len(kind))
    failures = metric(decode, "transfer_failures_total")
    # Of bytes other than the holder's only the generations' are known to be wrong without digests.
    arm(decode, "transfer-fault", kind=kind, rank=rank, on="generations" if kind == "stale" else "data")
    answer = complete(divided.url, prompt, NUM_TOKENS)
    assert mismatch(reference, prompt, answer) is None
    assert answer.trace["transferred_states"] == 0
    assert metric(decode, "transfer_failures_total") == failures + 1
    wait_settled(prefill, decode)
    again = complete(divided.url, [*prompt, *random_tokens(40, seed=8201)], NUM_TOKENS)
    assert again.trace["transferred_states"] == 1


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_control_when_a_rank_has_other_bytes_than_were_read_then_the_answer_is_another(
    divided: Service, reference: Reference, rank: int
) -> None:
    prompt = random_tokens(150, seed=8230 + rank)
    arm(divided.decode[0], "damage", target="state", rank=rank)
    answer = complete(divided.url, prompt, NUM_TOKENS, cache_salt="damaged")
    assert answer.trace["transferred_states"] == 1
    assert mismatch(reference, prompt, answer) is not None


@pytest.mark.full
def test_control_when_a_node_announces_its_ranks_in_another_order_then_the_answer_is_another(
    reference: Reference,
) -> None:
    """Nothing that is compared can tell its ranks apart: their order is what readers go by."""
    program = "tests.support.swapped_ranks"
    with Service(checkpoint(FAMILY), prefill_flags=FLAGS, decode_flags=NODE_FLAGS, program=program) as service:
        prompt = random_tokens(150, seed=8240)
        answer = complete(service.url, prompt, NUM_TOKENS)
        assert answer.trace["transferred_states"] == 1
        assert mismatch(reference, prompt, answer) is not None


@pytest.mark.full
def test_transfer_when_a_rank_of_either_node_is_killed_in_it_then_recomputed_or_told_and_nothing_is_lost(
    divided: Service, reference: Reference
) -> None:
    [prefill], [decode] = divided.prefill, divided.decode

    def kill_in_transfer(node: Node, prompt: list[int]) -> httpx.Response:
        """The answer to a request during whose transfer a rank of ``node`` was killed."""
        ranks = ranks_of(node.process.pid)
        arm(decode, "transfer-fault", kind="hang", rank=1)
        with ThreadPoolExecutor(1) as pool:
            body = completion_body(prompt, NUM_TOKENS)
            asked: Future[httpx.Response] = pool.submit(
                httpx.post, divided.url + "/v1/completions", json=body, timeout=60
            )
            wait_until(lambda: metric(decode, "transfers_in_flight") > 0, "the transfer to begin")
            os.kill(ranks[0].pid, signal.SIGKILL)
            response = asked.result(60)
        assert node.process.popen.wait(END_S) == FAILED_STATUS
        check_no_rank_is_left(ranks)
        return response

    prompt = random_tokens(170, seed=8250)
    response = kill_in_transfer(prefill, prompt)
    assert mismatch(reference, prompt, Answer(response.json())) is None
    arm(decode, "transfer-fault", kind="clear")
    wait_settled(decode)
    start_again(divided, prefill)

    response = kill_in_transfer(decode, random_tokens(170, seed=8260))
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_node"
    wait_settled(prefill)
    start_again(divided, decode)
    last = random_tokens(170, seed=8270)
    answer = complete(divided.url, last, NUM_TOKENS)
    assert mismatch(reference, last, answer) is None
    assert answer.trace["transferred_states"] == 1
    wait_settled(prefill, decode)


@pytest.mark.full
def test_request_when_a_rank_freezes_in_a_step_of_it_then_recomputed_or_told_and_nothing_is_lost(
    reference: Reference,
) -> None:
    """A frozen rank ends no step: its node gives up after ``--engine-hang-seconds``; nothing of it was seen."""
    flags = (*FLAGS, "--engine-hang-seconds", "5")
    with Service(checkpoint(FAMILY), prefill_flags=flags, decode_flags=flags) as service:
        [prefill], [decode] = service.prefill, service.decode

        def freeze(node: Node) -> list[Child]:
            ranks = ranks_of(node.process.pid)
            os.kill(ranks[0].pid, signal.SIGSTOP)
            return ranks

        def check_is_gone(node: Node, ranks: list[Child]) -> None:
            assert node.process.popen.wait(END_S) == FAILED_STATUS
            assert "a step takes longer than --engine-hang-seconds 5" in node.process.log.read_text()
            check_no_rank_is_left(ranks)

        ranks = freeze(prefill)
        prompt = random_tokens(170, seed=8280)
        answer = complete(service.url, prompt, NUM_TOKENS)
        assert mismatch(reference, prompt, answer) is None
        assert answer.trace["transferred_states"] == 0
        check_is_gone(prefill, ranks)
        wait_settled(decode)
        start_again(service, prefill)

        stream = Stream(service.url, completion_body(random_tokens(60, seed=8290), 3500))
        wait_until(lambda: len(stream.lines) > 3, "the stream to begin")
        ranks = freeze(decode)
        stream.join()
        assert stream.error is not None
        assert json.loads(stream.error.removeprefix("data: "))["error"]["code"] == "no_node"
        check_is_gone(decode, ranks)
        wait_settled(prefill)
        start_again(service, decode)
        last = random_tokens(170, seed=8300)
        answer = complete(service.url, last, NUM_TOKENS)
        assert mismatch(reference, last, answer) is None
        assert answer.trace["transferred_states"] == 1
        wait_settled(prefill, decode)
