"""No body keeps the event loop of a proxy or a node busy for long at a time: 100 ms, or as much longer as this machine
is slower than the one of which that is said (``tests.support.loop_busy``).

Each shape goes to the proxy and to a node. Every process tells how late its loop woke, and how much of that it can have
caused itself (``tandem_event_loop_lag_seconds``): time that its threads ran, not time that they waited for a processor.
What a busy machine adds to that changes all the time: a shape that was slow is sent again, and fails when it is slow
every time. What this holds against takes seconds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from common.wire.routes import HEALTH_ROUTE, MESSAGES_ROUTE, RESPONSES_ROUTE
from tests.support.loop_busy import TIMEOUT_S, busy_limit_s, lags, was_busy
from tests.support.service import Node, Service
from tests.support.worst_bodies import CORPUS, FULL

TRIES = 5
MAX_SILENCE_S = 10.0
"""Of ``/health``: on any machine."""
SETTLE_S = 0.1
"""Until what an answer leaves behind is given up, and the loop has been looked at again."""

FEW = ("numbers within the count", "escapes")


@contextlib.contextmanager
def polled(node: Node) -> Iterator[list[float]]:
    """Asks for the health of ``node`` all the time; gives the seconds of each answer."""
    seconds: list[float] = []
    stopped = threading.Event()

    def poll() -> None:
        with httpx.Client(timeout=TIMEOUT_S) as client:
            while not stopped.wait(0.02):
                started_s = time.monotonic()
                assert client.get(node.url + HEALTH_ROUTE).status_code == 200
                seconds.append(time.monotonic() - started_s)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield seconds
    finally:
        stopped.set()
        thread.join()


def sent() -> Iterator[Any]:
    """Each shape to each role; a proxy takes some fields out of what nodes get, so their shapes go to a node alone."""
    for name, shape in CORPUS.items():
        is_of_proxy = shape.route in (RESPONSES_ROUTE, MESSAGES_ROUTE)
        for role in ("proxy",) if is_of_proxy else ("decode",) if shape.only_nodes else ("proxy", "decode"):
            marks = () if name in FEW else pytest.mark.full
            yield pytest.param(role, name, marks=marks, id=f"{role}-{name.replace(' ', '-')}")


@pytest.mark.parametrize(("role", "name"), list(sent()))
def test_loop_when_a_worst_body_is_sent_then_never_busy_for_long_and_health_answers(
    service: Service, role: str, name: str
) -> None:
    shape = CORPUS[name]
    target = service.proxy if role == "proxy" else service.decode[0]
    body = shape.make()
    assert len(body) <= FULL
    slow: list[str] = []
    for _ in range(TRIES):
        before, limit_s = {node.url: lags(node) for node in service.nodes}, busy_limit_s()
        with polled(target) as seconds:
            answer = httpx.post(target.url + shape.route, content=body, timeout=TIMEOUT_S)
            time.sleep(SETTLE_S)
        assert answer.status_code in shape.statuses, answer.text[:500]
        assert max(seconds) < MAX_SILENCE_S
        limit_s = max(limit_s, busy_limit_s())
        slow = [node.role for node in service.nodes if was_busy(before[node.url], lags(node), limit_s)]
        if not slow:
            return
    pytest.fail(f"busy for more than {limit_s:.3f} s in each of {TRIES} tries: {', '.join(slow)}")


def test_corpus_has_fifty_shapes_and_most_are_of_full_size() -> None:
    assert len(CORPUS) >= 50
    assert set(FEW) <= CORPUS.keys()
