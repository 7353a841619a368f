"""Reads that come when the lease is long over and the memory belongs to somebody else: found out, every one of them."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.conftest import FAMILY
from tests.support import foreign
from tests.support.client import Answer, completion_body, info, metric, together, wait_settled
from tests.support.models import checkpoint
from tests.support.reference import Greedy, Reference, random_tokens
from tests.support.service import Service

pytestmark = pytest.mark.full  # as in tests/transfer; one promise that is over in test_faults_leases.py

NUM_BLOCKS = 24
LEASE_S = 0.05
NUM_TOKENS = 8
NUM_CLIENTS = 8
FLAGS = (
    *("--dtype", "float32"),
    *("--max-model-len", "320"),
    *("--max-num-seqs", "4"),
    *("--kv-lease-seconds", str(LEASE_S)),
    *("--state-memory-share", "0.5"),
)


@pytest.fixture(scope="module", params=["default", "tcp", "ranks"])
def racing(request: pytest.FixtureRequest) -> Iterator[Service]:
    """A prefill node with 24 blocks whose promises hold for 50 ms, also one of two ranks, and a decode node with
    room."""
    memory: tuple[str, ...] = ("--kv-cache-memory", "400KiB")
    if request.param == "ranks":
        memory = ("--kv-cache-memory", "205KiB", "--tensor-parallel-size", "2")
    with Service(
        checkpoint(FAMILY),
        prefill_flags=(*FLAGS, *memory),
        decode_flags=(*FLAGS, "--kv-cache-memory", "8MiB", "--no-enable-prefix-caching"),
        environment={"UCX_TLS": "tcp,self"} if request.param == "tcp" else {},
    ) as running:
        assert int(info(running.prefill[0])["num_blocks"]) - 1 == NUM_BLOCKS
        yield running


@pytest.mark.parametrize(
    ("num_requests", "delay_s"),
    [pytest.param(32, 0.3, id="32 requests"), pytest.param(240, 2.0, id="240 requests")],
)
def test_reads_when_their_lease_is_over_and_memory_is_reused_then_none_is_committed(
    racing: Service, reference: Reference, num_requests: int, delay_s: float
) -> None:
    """Nobody renews between the legs, as with a proxy that dawdles; eight clients write over each other's blocks."""
    prefill, decode = racing.prefill[0], racing.decode[0]
    draw = random.Random(num_requests)
    prompts = [random_tokens(draw.randrange(60, 200, 20), seed=800 + index) for index in range(40)]
    reference.generate(prompts, NUM_TOKENS)
    expected: dict[tuple[int, ...], Greedy] = {tuple(each): reference.greedy(each, NUM_TOKENS) for each in prompts}
    jobs = [draw.choice(prompts) for _ in range(num_requests)]
    lock = threading.Lock()
    outcomes: Counter[str] = Counter()
    rejected = metric(decode, "late_reads_rejected_total")
    fault = {"kind": "delay", "seconds": delay_s, "count": num_requests, "on": "data"}
    httpx.post(decode.url + "/internal/v1/test/transfer-fault", json=fault, timeout=10).raise_for_status()

    def run(prompt: list[int]) -> None:
        body = completion_body(prompt, NUM_TOKENS)
        params = foreign.prefill(prefill.url, body)
        time.sleep(2 * LEASE_S)
        response = foreign.decode(decode.url, body, params)
        assert response.status_code == 200, response.text
        answer = Answer(response.json())
        mismatch = expected[tuple(prompt)].mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance)
        assert mismatch is None, mismatch
        with lock:
            outcomes["pulled" if answer.trace["transferred_bytes"] else "recomputed"] += 1

    def client() -> None:
        while True:
            with lock:
                if not jobs:
                    return
                prompt = jobs.pop()
            run(prompt)

    together([client] * NUM_CLIENTS)
    httpx.post(decode.url + "/internal/v1/test/transfer-fault", json={"kind": "clear"}, timeout=10).raise_for_status()
    caught = metric(decode, "late_reads_rejected_total") - rejected
    print(dict(outcomes), f"late reads rejected: {caught:.0f}")
    assert sum(outcomes.values()) == num_requests
    assert caught == outcomes["recomputed"]
    assert caught > num_requests / 2, "the race was not run"
    wait_settled(prefill, decode)
