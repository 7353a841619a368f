"""The table of docs/failures.md, cell by cell: a node ends or stands still before, during or after a prefix is read.

Beside the request that is hit runs another one, which must not notice. Whatever happens, the hit request is answered
right or with a typed error, and afterwards nothing is held anywhere and a new request is served.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import FAMILY
from tests.support import foreign
from tests.support.chaos import Question, Tally, ask
from tests.support.client import complete, completion_body, info, metric, payload_bytes, wait_settled
from tests.support.hangup import OpenRequest, wait_until
from tests.support.models import checkpoint
from tests.support.reference import Reference, random_tokens
from tests.support.service import Node, Service, start_proxy, wait_ready

ROUTE = "/v1/completions"
LEASE_S = 3.0
NOTICED_S = 2.0
"""How soon a decode node does something about a lost holder."""
NUM_TOKENS = 24
FLAGS = (
    *("--dtype", "float32"),
    *("--max-model-len", "4096"),
    *("--kv-cache-memory", "64MiB"),
    *("--kv-lease-seconds", str(LEASE_S)),
)
# A prompt takes many steps, so that there is a "before" to be hit in, on a fast machine that is busy too.
SLOW = ("--max-num-batched-tokens", "4")
TRANSPORTS: dict[str, dict[str, str]] = {"default": {}, "tcp": {"UCX_TLS": "tcp,self"}}
PHASES = ("before", "during", "after")
READ_DELAY_S = 3.0
PROMPTS = {phase: random_tokens(3000 if phase == "before" else 120, seed=700) for phase in PHASES}
"""The same in every test: a cache salt of its own makes it new, and stock transformers is asked once."""
BYSTANDER = random_tokens(60, seed=701)


@pytest.fixture(scope="module", params=["default", pytest.param("tcp", marks=pytest.mark.full)])
def hit_service(request: pytest.FixtureRequest) -> Iterator[Service]:
    with Service(
        checkpoint(FAMILY),
        prefill_flags=(*FLAGS, *SLOW),
        decode_flags=(*FLAGS, "--max-num-batched-tokens", "16"),
        proxy_flags=("--node-silence-seconds", "60"),  # a frozen reader is to go on where it was
        environment=TRANSPORTS[request.param],
    ) as running:
        yield running


@dataclass
class Hit:
    """One request in one phase, its client on a thread, and the bystander."""

    service: Service
    question: Question
    tally: Tally
    client: threading.Thread

    @property
    def prefill(self) -> Node:
        return self.service.prefill[0]

    @property
    def decode(self) -> Node:
        return self.service.decode[0]


def delay_next_read(decode: Node) -> None:
    """The next read of data is reported done late."""
    fault = {"kind": "delay", "seconds": READ_DELAY_S, "count": 1, "on": "data"}
    httpx.post(decode.url + "/internal/v1/test/transfer-fault", json=fault, timeout=10).raise_for_status()


@contextlib.contextmanager
def request_in(phase: str, service: Service, reference: Reference, salt: str, url: str) -> Iterator[Hit]:
    """A request through ``url`` that is in ``phase`` while the block runs; its client is waited for at the end."""
    prefill, decode = service.prefill[0], service.decode[0]
    prompt = PROMPTS[phase]
    num_tokens = 400 if phase == "after" else NUM_TOKENS
    question = Question(prompt, reference.greedy(prompt, num_tokens), salt)
    tally = Tally()
    generated = metric(decode, "generation_tokens_total")
    if phase == "during":
        delay_next_read(decode)
    client = threading.Thread(target=ask, args=(url, question, reference, tally), kwargs={"stream": True})
    client.start()
    if phase == "before":
        wait_until(lambda: int(info(prefill)["running"]) >= 1, "the prompt to be computed")
    elif phase == "during":
        wait_until(lambda: int(decode.check_cache()["sequences"]) >= 1, "the pull to start")  # type: ignore[call-overload]
    else:
        wait_until(lambda: metric(decode, "generation_tokens_total") > generated + 3, "tokens to come")
    try:
        yield Hit(service, question, tally, client)
    finally:
        client.join(120)
        assert not client.is_alive(), "the client waits for ever"


@contextlib.contextmanager
def frozen(node: Node, seconds: float) -> Iterator[None]:
    os.kill(node.process.pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(node.process.pid, signal.SIGCONT)


def prefill_killed(hit: Hit) -> None:
    hit.prefill.process.kill()
    hit.client.join(60)


def prefill_frozen(hit: Hit) -> None:
    """Until the hit request has its answer: nothing of it may need the frozen node to move again."""
    with frozen(hit.prefill, 0.0):
        hit.client.join(60)
        assert not hit.client.is_alive(), "the request waits for a frozen node"


def prefill_restarted(hit: Hit) -> None:
    hit.prefill.process.kill()
    hit.service.start_again(hit.prefill)
    hit.client.join(60)


def decode_killed(hit: Hit) -> None:
    hit.decode.process.kill()
    killed_s = time.monotonic()
    wait_until(lambda: _holds_nothing(hit.prefill), "the prefill node to take back its memory", LEASE_S + 20)
    freed_s = time.monotonic() - killed_s
    print(f"memory free after {freed_s:.2f} s")
    assert freed_s < LEASE_S + 1
    hit.client.join(60)


def decode_frozen(hit: Hit) -> None:
    """For longer than its leases last: what it reads after that is late."""
    with frozen(hit.decode, LEASE_S + 1.5):
        pass
    hit.client.join(60)


def _holds_nothing(node: Node) -> bool:
    state: Any = node.check_cache()
    return not (state["leases"] or state["sequences"])


EVENTS: dict[str, Callable[[Hit], None]] = {
    "prefill killed": prefill_killed,
    "prefill frozen": prefill_frozen,
    "prefill restarted": prefill_restarted,
    "decode killed": decode_killed,
    "decode frozen": decode_frozen,
}
SURVIVES = frozenset({"prefill killed", "prefill frozen", "prefill restarted", "decode frozen"})
"""Events after which the hit request itself must be answered right."""
SHORT_TIER = frozenset({("prefill killed", "during")})


def tier(*cell: str) -> Any:
    return () if cell in SHORT_TIER else pytest.mark.full


def cells() -> list[Any]:
    return [
        pytest.param(event, phase, id=f"{event}, {phase}", marks=tier(event, phase))
        for event in EVENTS
        for phase in PHASES
    ]


def bring_back(service: Service) -> None:
    """Starts again what has ended, and waits until the proxy uses everything."""
    for node in (*service.prefill, *service.decode):
        if node.process.popen.poll() is not None:
            service.start_again(node)
        wait_ready(node)
    wait_until(lambda: metric(service.proxy, "node_up") == 2, "the proxy to see both nodes")


@pytest.mark.parametrize(("event", "phase"), cells())
def test_request_when_a_node_is_hit_then_is_right_or_fails_typed_and_nothing_is_held(
    hit_service: Service, reference: Reference, event: str, phase: str
) -> None:
    salt = f"{event}, {phase}"
    bystander = Question(BYSTANDER, reference.greedy(BYSTANDER, 300), salt)
    beside = Tally()
    running = threading.Thread(
        target=ask, args=(hit_service.url, bystander, reference, beside), kwargs={"stream": True}
    )
    decode = hit_service.decode[0]
    generated = metric(decode, "generation_tokens_total")
    running.start()
    wait_until(lambda: metric(decode, "generation_tokens_total") > generated + 3, "the bystander's tokens")
    with request_in(phase, hit_service, reference, salt, hit_service.url) as hit:
        EVENTS[event](hit)
    running.join(60)
    assert not hit.tally.wrong, hit.tally.wrong
    assert not hit.tally.hung, hit.tally.hung
    if event in SURVIVES:
        assert hit.tally.counts == {"right": 1}, hit.tally
        assert beside.counts == {"right": 1}, beside
    assert not beside.wrong, beside.wrong
    assert not beside.hung, beside.hung
    bring_back(hit_service)
    wait_settled(*hit_service.prefill, *hit_service.decode)
    after = Tally()
    ask(hit_service.url, bystander, reference, after, stream=False)
    ask(hit_service.url, hit.question, reference, after, stream=False)
    assert after.counts == {"right": 2}, after
    wait_settled(*hit_service.prefill, *hit_service.decode)


def wait_for_phase(phase: str, request: OpenRequest, prefill: Node, decode: Node) -> None:
    if phase == "before":
        wait_until(lambda: int(info(prefill)["running"]) >= 1, "the prompt to be computed")
    elif phase == "during":
        wait_until(lambda: int(decode.check_cache()["sequences"]) >= 1, "the pull")  # type: ignore[call-overload]
    else:
        request.read_events(3)


@pytest.mark.parametrize("phase", [pytest.param(phase, marks=pytest.mark.full) for phase in PHASES])
def test_request_when_its_proxy_is_killed_then_nodes_give_everything_back(
    hit_service: Service, reference: Reference, phase: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        doomed = start_proxy(hit_service.prefill, hit_service.decode, Path(folder))
        try:
            wait_ready(doomed, 30)
            prompt, salt = PROMPTS[phase], f"proxy, {phase}"
            prefill, decode = hit_service.prefill[0], hit_service.decode[0]
            if phase == "during":
                delay_next_read(decode)
            num_tokens = 500 if phase == "before" else 2000
            body = completion_body(prompt, num_tokens, stream=True, cache_salt=salt)
            with OpenRequest(doomed.url, ROUTE, body) as request:
                wait_for_phase(phase, request, prefill, decode)
                doomed.process.kill()
                wait_settled(*hit_service.prefill, *hit_service.decode)
        finally:
            doomed.process.stop()
    question = Question(prompt, reference.greedy(prompt, NUM_TOKENS), salt)
    tally = Tally()
    ask(hit_service.url, question, reference, tally, stream=False)
    assert tally.counts == {"right": 1}, tally


@pytest.mark.full
@pytest.mark.parametrize("event", ["killed", "frozen"])
def test_waiting_request_when_its_prefill_node_is_lost_then_recompute_begins_within_two_seconds(
    hit_service: Service, reference: Reference, event: str
) -> None:
    """Four requests wait for one node; when the decode node has given up the holder of each is seen in its own
    counters."""
    prefill, decode = hit_service.prefill[0], hit_service.decode[0]
    prompt = PROMPTS["before"]  # long: none is finished before the node is hit
    expected = reference.greedy(prompt, NUM_TOKENS)
    questions = [Question(prompt, expected, f"{event}, {index} of those that wait") for index in range(4)]
    complete(hit_service.url, BYSTANDER, 2, cache_salt=event)  # the nodes know each other
    tally = Tally()
    failures = metric(decode, "transfer_failures_total")
    clients = [
        threading.Thread(target=ask, args=(hit_service.url, each, reference, tally), kwargs={"stream": True})
        for each in questions
    ]
    for client in clients:
        client.start()

    def num_there() -> int:
        state = info(prefill)
        return int(state["running"]) + int(state["waiting"])

    wait_until(lambda: num_there() == 4, "one prompt to be computed and three to queue")
    os.kill(prefill.process.pid, signal.SIGKILL if event == "killed" else signal.SIGSTOP)
    lost_s = time.monotonic()
    try:
        wait_until(lambda: metric(decode, "transfer_failures_total") == failures + 4, "all to give the holder up", 30)
        noticed_s = time.monotonic() - lost_s
        for client in clients:
            client.join(60)
    finally:
        if event == "frozen":
            os.kill(prefill.process.pid, signal.SIGCONT)
    print(f"begun to recompute after {noticed_s:.2f} s")
    assert noticed_s < NOTICED_S
    assert tally.counts == {"right": 4}, tally
    bring_back(hit_service)
    wait_settled(*hit_service.prefill, *hit_service.decode)


@pytest.mark.full
def test_lease_when_its_reader_is_killed_and_nobody_says_so_then_memory_is_free_within_the_lease(
    hit_service: Service,
) -> None:
    """No proxy in between: the reader renews its lease until it dies in the middle of its read."""
    prefill, decode = hit_service.prefill[0], hit_service.decode[0]
    body = completion_body(random_tokens(500, seed=950), NUM_TOKENS)
    params = foreign.prefill(prefill.url, body)
    delay_next_read(decode)
    with OpenRequest(decode.url, ROUTE, {**body, "kv_transfer_params": params}):
        wait_until(lambda: int(decode.check_cache()["sequences"]) >= 1, "the pull to start")  # type: ignore[call-overload]
        time.sleep(LEASE_S / 2)  # it has renewed the lease since
        decode.process.kill()
    killed_s = time.monotonic()
    assert not _holds_nothing(prefill)
    wait_until(lambda: _holds_nothing(prefill), "the lease to run out", LEASE_S + 20)
    freed_s = time.monotonic() - killed_s
    print(f"memory free after {freed_s:.2f} s, the lease is {LEASE_S} s")
    assert freed_s < LEASE_S + 1
    bring_back(hit_service)
    wait_settled(prefill, decode)


@pytest.mark.full
def test_request_when_nothing_is_hit_then_its_prefix_moves_once_and_a_repeat_moves_nothing(
    hit_service: Service, reference: Reference
) -> None:
    prompt = random_tokens(333, seed=960)
    expected = reference.greedy(prompt, NUM_TOKENS)
    for num_blocks, num_states in ((-(-333 // 16), 1), (0, 0)):
        answer = complete(hit_service.url, prompt, NUM_TOKENS)
        assert expected.mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance) is None
        moved = payload_bytes(hit_service.decode[0], num_blocks, num_states)
        assert answer.trace["transferred_bytes"] == moved
    wait_settled(*hit_service.prefill, *hit_service.decode)


@pytest.mark.full
def test_request_when_it_is_refused_then_both_legs_are_over_at_once(hit_service: Service) -> None:
    for wrong in ({"max_tokens": 100_000}, {"prompt": [10**6]}, {"temperature": -1}):
        body = {**completion_body(random_tokens(1500, seed=961), 4), **wrong}
        response = httpx.post(hit_service.url + ROUTE, json=body, timeout=30)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == next(iter(wrong))
        wait_settled(*hit_service.prefill, *hit_service.decode)


@pytest.mark.full
@pytest.mark.parametrize("phase", PHASES)
def test_request_when_its_client_leaves_then_everything_is_given_back(
    hit_service: Service, reference: Reference, phase: str
) -> None:
    prefill, decode = hit_service.prefill[0], hit_service.decode[0]
    prompt, salt = PROMPTS[phase], f"client, {phase}"
    failures = metric(decode, "transfer_failures_total")
    if phase == "during":
        delay_next_read(decode)
    with OpenRequest(hit_service.url, ROUTE, completion_body(prompt, 900, stream=True, cache_salt=salt)) as request:
        wait_for_phase(phase, request, prefill, decode)
    wait_settled(prefill, decode)
    assert metric(decode, "transfer_failures_total") == failures, "a client that leaves is no failed transfer"
    question = Question(prompt, reference.greedy(prompt, NUM_TOKENS), salt)
    tally = Tally()
    ask(hit_service.url, question, reference, tally, stream=False)
    assert tally.counts == {"right": 1}, tally
