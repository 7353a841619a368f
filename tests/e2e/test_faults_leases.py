"""What a prefill node promised, read too late: leases run out, their memory is used for other prompts, and no answer
ever comes from what is in it then."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import TIGHT_FLAGS
from tests.support import foreign
from tests.support.client import Answer, complete, completion_body, info, metric, payload_bytes, wait_settled
from tests.support.hangup import OpenRequest, stopped, wait_until
from tests.support.models import tiered
from tests.support.reference import Reference, random_tokens
from tests.support.service import Node, Service, start_node, wait_ready

POLICIES = ("recompute", "fail")


@contextlib.contextmanager
def decode_node(service: Service, folder: Path, *flags: str) -> Iterator[Node]:
    """One more decode node for the models of ``service``."""
    flags = (*TIGHT_FLAGS, "--kv-cache-memory", "1400KiB", *flags)
    node = start_node("decode", service.model, folder, *flags, UCX_TLS="tcp,self")
    try:
        wait_ready(node)
        yield node
    finally:
        node.process.stop()


@pytest.fixture(scope="module")
def strict_decode(tight_service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A second decode node, which fails a request whose prefix could not be pulled, and soon."""
    flags = ("--kv-load-failure-policy", "fail", "--kv-transfer-timeout-seconds", "1")
    with decode_node(tight_service, tmp_path_factory.mktemp("strict"), *flags) as node:
        yield node


@pytest.fixture(params=POLICIES)
def decode(tight_service: Service, strict_decode: Node, request: pytest.FixtureRequest) -> Node:
    return tight_service.decode[0] if request.param == "recompute" else strict_decode


@pytest.fixture(autouse=True)
def nothing_leaks(tight_service: Service, strict_decode: Node) -> Iterator[None]:
    yield
    wait_settled(*tight_service.prefill, *tight_service.decode, strict_decode)


def num_leases(node: Node) -> Any:
    return node.check_cache()["leases"]


def num_requests(node: Node) -> int:
    state = info(node)
    return int(state["running"]) + int(state["waiting"])


def reuse_all_memory(prefill: Node, seed: int) -> None:
    """Computes other prompts until each block that is not leased has been written again."""
    num_blocks = int(info(prefill)["num_blocks"]) - 1
    for index in range(-(-num_blocks // 100) + 1):
        params = foreign.prefill(prefill.url, completion_body(random_tokens(1600, seed + index), 1))
        foreign.release(prefill.url, params)


def check_answer_or_typed_error(
    response: httpx.Response, decode: Node, strict_decode: Node, prompt: list[int], reference: Reference
) -> None:
    """The node that recomputes gives the right answer, the strict one the documented error; never anything else."""
    if decode is strict_decode:
        assert response.status_code == 502, response.text
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("server_error", None)
        assert error["code"] in ("transfer_failed", "peer_restarted", "peer_unreachable")
        assert error["message"]
        return
    assert response.status_code == 200, response.text
    answer = Answer(response.json())
    mismatch = reference.greedy(prompt, 12).mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance)
    assert mismatch is None, mismatch
    assert answer.trace["transferred_bytes"] == 0


def test_lease_when_nobody_comes_then_expires_and_is_counted(tight_service: Service) -> None:
    prefill = tight_service.prefill[0]
    expired = metric(prefill, "leases_expired_total")
    foreign.prefill(prefill.url, completion_body(random_tokens(100, seed=451), 4))
    state: Any = prefill.check_cache()
    assert (state["leases"], state["blocks"]["leased"], state["slots"]["leased"]) == (1, 7, 1)
    assert metric(prefill, "leases", state="active") == 1
    wait_until(lambda: num_leases(prefill) == 0, "the lease to expire")
    assert metric(prefill, "leases_expired_total") == expired + 1
    state = prefill.check_cache()
    assert (state["blocks"]["leased"], state["slots"]["leased"]) == (0, 0)


def test_lease_when_its_request_queues_for_longer_than_it_lasts_then_is_renewed_and_the_prefix_still_pulled(
    tight_service: Service, reference: Reference
) -> None:
    prefill, decode = tight_service.prefill[0], tight_service.decode[0]
    expired = metric(prefill, "leases_expired_total")
    prompt = random_tokens(90, seed=452)
    answers: list[Answer] = []
    # Six run at a time and preempt each other; all of them take far longer than a lease lasts, on a fast machine too.
    occupy = completion_body(random_tokens(20, seed=453), 1900, n=24, temperature=1.0)
    with OpenRequest(decode.url, "/v1/completions", occupy):
        wait_until(lambda: num_requests(decode) >= 20, "the continuations to run or wait")
        waiting = threading.Thread(target=lambda: answers.append(complete(tight_service.url, prompt, 12)))
        waiting.start()
        wait_until(lambda: num_leases(prefill) == 1, "the prompt to be computed and to queue")
        # A lease that begins now and that nobody renews marks the time.
        mark = foreign.prefill(prefill.url, completion_body(random_tokens(17, seed=454), 1))
        wait_until(lambda: metric(prefill, "leases_expired_total") == expired + 1, "the unrenewed lease to expire")
        assert mark["tandem_lease_id"]
        assert num_leases(prefill) == 1
    waiting.join(60)
    [answer] = answers
    assert answer.trace["transferred_bytes"] == payload_bytes(decode, 6, 1)
    mismatch = reference.greedy(prompt, 12).mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance)
    assert mismatch is None, mismatch


@pytest.mark.parametrize("decode", tiered(POLICIES, ("recompute",)), indirect=True)
def test_decode_leg_when_lease_expired_but_memory_was_not_reused_then_pulls_the_same_bytes(
    tight_service: Service, decode: Node, reference: Reference
) -> None:
    prefill = tight_service.prefill[0]
    prompt = random_tokens(100, seed=455)
    body = completion_body(prompt, 12)
    params = foreign.prefill(prefill.url, body)
    wait_until(lambda: num_leases(prefill) == 0, "the lease to expire")
    response = foreign.decode(decode.url, body, params)
    assert response.status_code == 200, response.text
    answer = Answer(response.json())
    assert answer.trace["transferred_bytes"] == payload_bytes(decode, 7, 1)
    mismatch = reference.greedy(prompt, 12).mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance)
    assert mismatch is None, mismatch


@pytest.mark.parametrize("decode", tiered(POLICIES, ("recompute",)), indirect=True)
def test_decode_leg_when_lease_expired_and_memory_was_reused_then_is_detected(
    tight_service: Service, strict_decode: Node, decode: Node, reference: Reference
) -> None:
    prefill = tight_service.prefill[0]
    prompt = random_tokens(100, seed=456 + (decode is strict_decode))
    body = completion_body(prompt, 12)
    params = foreign.prefill(prefill.url, body)
    expired = metric(prefill, "leases_expired_total")
    wait_until(lambda: metric(prefill, "leases_expired_total") == expired + 1, "the lease to expire")
    reuse_all_memory(prefill, seed=460)
    rejected = metric(decode, "late_reads_rejected_total")
    failures = metric(decode, "transfer_failures_total", reason="stale")
    response = foreign.decode(decode.url, body, params)
    check_answer_or_typed_error(response, decode, strict_decode, prompt, reference)
    assert metric(decode, "late_reads_rejected_total") == rejected + 1
    assert metric(decode, "transfer_failures_total", reason="stale") == failures + 1
    if decode is not strict_decode:  # the other one refuses it with a status, a stream too
        refused = foreign.decode(strict_decode.url, {**body, "stream": True}, params)
        assert (refused.status_code, refused.json()["error"]["code"]) == (502, "transfer_failed")


@pytest.mark.full  # the test of reuse streams one too
def test_stale_manifest_when_streaming_then_has_a_status_and_not_a_broken_stream(
    tight_service: Service, strict_decode: Node
) -> None:
    prefill = tight_service.prefill[0]
    body = completion_body(random_tokens(60, seed=470), 8, stream=True)
    params = foreign.prefill(prefill.url, body)
    foreign.release(prefill.url, params)
    reuse_all_memory(prefill, seed=480)
    response = foreign.decode(strict_decode.url, body, params)
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "transfer_failed"


@pytest.mark.full  # reuse is detected below, right answers above
def test_manifest_when_replayed_after_release_and_reuse_then_answer_is_right_on_every_node(
    tight_service: Service, strict_decode: Node, reference: Reference
) -> None:
    """The node that pulled it once still has the prefix; another one finds other bytes in its place."""
    prefill, first = tight_service.prefill[0], tight_service.decode[0]
    prompt = random_tokens(100, seed=490)
    body = completion_body(prompt, 12)
    params = foreign.prefill(prefill.url, body)
    answers = [Answer(foreign.decode(first.url, body, params).json()) for _ in range(2)]
    assert [answer.trace["transferred_blocks"] for answer in answers] == [7, 0]
    wait_until(lambda: num_leases(prefill) == 0, "the release")
    reuse_all_memory(prefill, seed=495)
    answers.append(Answer(foreign.decode(first.url, body, params).json()))
    for answer in answers:
        mismatch = reference.greedy(prompt, 12).mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance)
        assert mismatch is None, mismatch
    replayed = foreign.decode(strict_decode.url, body, params)
    assert replayed.status_code == 502, replayed.text


def test_lease_when_released_or_renewed_by_an_unknown_id_then_the_id_is_named(tight_service: Service) -> None:
    url = tight_service.prefill[0].url
    for action in ("renew", "release"):
        response = httpx.post(f"{url}/internal/v1/leases/{action}", json={"lease_ids": ["nobody"]})
        assert (response.status_code, response.json()) == (200, {"unknown": ["nobody"]})
        for bad in ({}, {"lease_ids": "a"}, {"lease_ids": [1]}, {"lease_ids": ["a"] * 10_001}):
            refused = httpx.post(f"{url}/internal/v1/leases/{action}", json=bad)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lease_ids")


def pull_from_a_holder_that_stands_still(service: Service, decode: Node, body: dict[str, Any]) -> httpx.Response:
    """The decode leg's answer while no thread of the holder runs; memory of the read is set aside, then free again."""
    prefill = service.prefill[0]
    warm = completion_body(random_tokens(20, seed=500), 2)
    assert foreign.decode(decode.url, warm, foreign.prefill(prefill.url, warm)).status_code == 200
    params = foreign.prefill(prefill.url, body)
    failures = _num_lost_reads(decode)
    recreations = metric(decode, "agent_recreations_total")
    with stopped(prefill):
        response = foreign.decode(decode.url, body, params)
        state: Any = decode.check_cache()
        assert state["ok"], state
        # So much of a pool is got back by a new agent within half a second; a slow answer comes after that.
        if metric(decode, "agent_recreations_total") == recreations:
            assert (state["blocks"]["quarantined"], state["slots"]["quarantined"]) == (13, 1)
    assert _num_lost_reads(decode) == failures + 1
    wait_settled(decode)
    service.bring_back(prefill)
    return response


def _num_lost_reads(decode: Node) -> float:
    """The read's deadline, or the holder's silence where a busy machine began the read late."""
    return sum(metric(decode, "transfer_failures_total", reason=reason) for reason in ("timed_out", "peer_lost"))


def test_holder_when_it_stands_still_then_request_fails_and_memory_of_the_read_is_kept_until_it_is_over(
    tight_service: Service, strict_decode: Node, reference: Reference
) -> None:
    prefill = tight_service.prefill[0]
    prompt = random_tokens(200, seed=501)
    body = completion_body(prompt, 12)
    response = pull_from_a_holder_that_stands_still(tight_service, strict_decode, body)
    check_answer_or_typed_error(response, strict_decode, strict_decode, prompt, reference)
    again = Answer(foreign.decode(strict_decode.url, body, foreign.prefill(prefill.url, body)).json())
    mismatch = reference.greedy(prompt, 12).mismatch(again.token_ids(), again.logprobs(), reference.tolerance)
    assert mismatch is None, mismatch


@pytest.mark.full
def test_holder_when_it_stands_still_then_prompt_is_recomputed(
    tight_service: Service, strict_decode: Node, reference: Reference, tmp_path: Path
) -> None:
    prompt = random_tokens(200, seed=502)
    with decode_node(tight_service, tmp_path, "--kv-transfer-timeout-seconds", "1") as node:
        body = completion_body(prompt, 12)
        response = pull_from_a_holder_that_stands_still(tight_service, node, body)
        check_answer_or_typed_error(response, node, strict_decode, prompt, reference)
