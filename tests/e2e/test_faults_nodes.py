"""Nodes that are killed and come back: what clients see, and that nothing is served from a life that is over."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support import foreign
from tests.support.client import Answer, complete, completion_body, info, metric, wait_settled
from tests.support.hangup import OpenRequest, wait_until
from tests.support.models import DEMO, checkpoint
from tests.support.reference import Reference, random_tokens
from tests.support.reference import reference as reference_of
from tests.support.service import Node, Service, start_node, wait_ready

ROUTE = "/v1/completions"


@pytest.fixture(scope="module", params=[FAMILY, pytest.param(DEMO, marks=pytest.mark.full)])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(family: str) -> Reference:
    return reference_of(family)


@pytest.fixture(scope="module")
def own_service(family: str) -> Iterator[Service]:
    """A service whose nodes may be killed; each test that does so starts them again."""
    with Service(checkpoint(family), prefill_flags=NODE_FLAGS, decode_flags=NODE_FLAGS) as running:
        yield running


@pytest.fixture(autouse=True)
def settled(own_service: Service) -> Iterator[None]:
    yield
    wait_settled(*own_service.prefill, *own_service.decode)


def kill(node: Node) -> None:
    node.process.stop(signal.SIGKILL)


def restart(service: Service, node: Node) -> None:
    """Starts the node again on its port and waits until the proxy uses it."""
    port = int(node.url.rpartition(":")[2])
    folder = Path(tempfile.mkdtemp(dir=node.process.log.parent))
    node.process = start_node(node.role, service.model, folder, *NODE_FLAGS, port=port).process
    wait_ready(node)
    wait_until(lambda: metric(service.proxy, "node_up") == 2, "the proxy to see both nodes")


def check_right(answer: Answer, prompt: list[int], reference: Reference) -> None:
    expected = reference.greedy(prompt, len(answer.token_ids()))
    mismatch = expected.mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance)
    assert mismatch is None, mismatch


def check_recomputed(decode: Node, body: dict[str, Any], params: dict[str, Any], reference: Reference) -> None:
    """A decode leg whose holder is gone: right, and nothing was moved."""
    response = foreign.decode(decode.url, body, params)
    assert response.status_code == 200, response.text
    answer = Answer(response.json())
    check_right(answer, list(body["prompt"]), reference)
    assert answer.trace["transferred_bytes"] == 0


@pytest.mark.full  # as a cell of test_failures_matrix
def test_prefill_node_when_killed_while_it_computes_then_decode_node_computes_until_it_is_back(
    own_service: Service, reference: Reference
) -> None:
    prefill, decode = own_service.prefill[0], own_service.decode[0]
    assert complete(own_service.url, random_tokens(120, seed=511), 4).trace["placement"] == "remote"
    orphans = [completion_body(random_tokens(75, seed=seed), 12) for seed in (512, 516)]
    params = [foreign.prefill(prefill.url, orphan) for orphan in orphans]
    prompt = random_tokens(3500, seed=515)
    answers: list[Answer] = []
    waiting = threading.Thread(target=lambda: answers.append(complete(own_service.url, prompt, 8)))
    waiting.start()
    wait_until(lambda: info(prefill)["running"] == 1, "the prompt to be computed")
    kill(prefill)
    waiting.join(120)
    [answer] = answers
    check_right(answer, prompt, reference)
    assert answer.trace["placement"] == "local"

    other = random_tokens(130, seed=513)
    local = complete(own_service.url, other, 12)
    check_right(local, other, reference)
    assert (local.trace["placement"], local.trace["prefill_node"]) == ("local", None)
    assert local.trace["transferred_bytes"] == 0
    ready = httpx.get(own_service.url + "/ready")
    assert ready.status_code == 503
    assert "no prefill node is ready" in ready.text
    check_recomputed(decode, orphans[0], params[0], reference)

    restart(own_service, prefill)
    assert httpx.get(own_service.url + "/ready").status_code == 200
    back = complete(own_service.url, random_tokens(140, seed=514), 12)
    assert back.trace["placement"] == "remote"
    assert back.trace["transferred_states"] == 1
    # The new life has other prompts in the blocks that the old one's manifest names, in the same generations.
    others = [foreign.prefill(prefill.url, completion_body(random_tokens(75, seed=520 + i), 1)) for i in range(3)]
    assert any(set(params[1]["remote_block_ids"][0]) & set(other["remote_block_ids"][0]) for other in others)
    check_recomputed(decode, orphans[1], params[1], reference)
    for other in others:
        foreign.release(prefill.url, other)


def test_decode_node_when_killed_then_requests_get_503_until_it_is_back(
    own_service: Service, reference: Reference
) -> None:
    decode = own_service.decode[0]
    prompt = random_tokens(80, seed=517)
    complete(own_service.url, prompt, 4)
    with OpenRequest(own_service.url, ROUTE, completion_body(prompt, 3000, stream=True)) as stream:
        stream.read_events(2)
        kill(decode)
        rest = stream.read_to_end()
    assert b"[DONE]" not in rest
    [event] = [line for line in rest.split(b"\n") if line.startswith(b'data: {"error"')]
    assert b'"no_node"' in event

    for stream_field in (False, True):
        body: dict[str, Any] = completion_body(prompt, 4, stream=stream_field)
        response = httpx.post(own_service.url + ROUTE, json=body, timeout=30)
        assert response.status_code == 503, response.text
        error = response.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("server_error", "no_node", None)
    assert httpx.get(own_service.url + "/health").status_code == 200
    assert httpx.get(own_service.url + "/ready").status_code == 503
    assert metric(own_service.proxy, "node_up", node=decode.url) == 0
    with (
        openai.OpenAI(base_url=own_service.url + "/v1", api_key="unused", max_retries=0) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.completions.create(model=str(own_service.model), prompt="a", max_tokens=1)
    assert (caught.value.status_code, caught.value.code) == (503, "no_node")

    restart(own_service, decode)
    answer = complete(own_service.url, prompt, 12)
    check_right(answer, prompt, reference)
    assert answer.trace["placement"] == "remote"
    assert answer.trace["transferred_states"] == 1
