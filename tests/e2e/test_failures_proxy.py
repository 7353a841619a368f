"""Real nodes of each kind that are killed, frozen and started again under load: what retries and moves leave of it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support.chaos import Tally, ask, clients, make_questions, strike
from tests.support.client import metric, wait_settled
from tests.support.hangup import wait_until
from tests.support.models import checkpoint
from tests.support.reference import Reference
from tests.support.service import Service

NUM_CLIENTS = 4
NUM_TOKENS = 16
FREEZE_S = 3.0
PROXY_FLAGS = (
    *("--migration-limit", "2"),
    *("--stream-idle-timeout-seconds", "2"),
    *("--breaker-failures", "3"),
    *("--breaker-open-seconds", "2"),
)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    flags = (*NODE_FLAGS, "--kv-lease-seconds", "5")
    with Service(
        checkpoint(FAMILY),
        prefill_flags=flags,
        decode_flags=flags,
        proxy_flags=PROXY_FLAGS,
        num_prefill=2,
        num_decode=2,
    ) as running:
        yield running


@pytest.mark.full
@pytest.mark.parametrize("freeze_s", [0.0, FREEZE_S], ids=["killed", "frozen"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_service_when_a_node_is_hit_under_load_then_every_answer_is_right(
    service: Service, reference: Reference, role: str, freeze_s: float
) -> None:
    """Nobody is told of it: what had no byte is asked again, what had goes on, and the node comes back by itself."""
    node = (service.prefill if role == "prefill" else service.decode)[0]
    questions = make_questions(reference, 6, NUM_TOKENS, seed=800)
    tally = Tally()
    with clients(service.url, questions, reference, tally, count=NUM_CLIENTS, seed=3):
        time.sleep(1.0)
        strike(service, node, freeze_s=freeze_s)
        wait_until(lambda: metric(service.proxy, "node_up") == 4, "the proxy to see every node")
        time.sleep(1.0)
    assert not tally.wrong, tally.wrong[:5]
    assert not tally.hung, tally.hung[:5]
    assert set(tally.counts) <= {"right", "left", "hostile", "hostile cut", "half open"}, tally.counts
    assert tally.counts["right"] > 10, tally.counts
    assert metric(service.proxy, "proxy_retries_refused_total") == 0
    assert metric(service.proxy, "breaker_state", node=node.url) == 0  # it is another process now
    before = metric(node, "requests_total")
    for question in questions[:4]:
        ask(service.url, question, reference, tally, stream=True)
    assert metric(node, "requests_total") > before
    wait_settled(*service.prefill, *service.decode)
