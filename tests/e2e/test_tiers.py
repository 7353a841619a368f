"""What was computed once is not computed again after a restart, nor by another pair on the same folder: real processes,
a folder on a real disk."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support.client import Answer, complete, metric, wait_settled
from tests.support.models import checkpoint
from tests.support.reference import random_tokens, reference
from tests.support.service import Node, Service

OTHERS = ("qwen3_5", "lfm2", "jamba", "kimi_linear", "llama")
CASES = [
    (FAMILY, signal.SIGTERM),
    pytest.param(FAMILY, signal.SIGKILL, marks=pytest.mark.full),
    *(pytest.param(family, signal.SIGTERM, marks=pytest.mark.full) for family in OTHERS),
]
"""A family of each kind of mixer; which files are there after a kill does not depend on that."""
NUM_TOKENS = 12
PATIENCE_S = 60.0
QUIET_S = 2.5
"""Seconds without a write after which a node has written what it will: it looks at all it has after one."""


def tier_flags(folder: Path, *more: str) -> tuple[str, ...]:
    return (*NODE_FLAGS, "--kv-tier", f"disk:{folder}?size=1GiB", *more)


def service(family: str, flags: Sequence[str]) -> Service:
    return Service(checkpoint(family), prefill_flags=flags, decode_flags=flags)


def wait_written(*nodes: Node) -> None:
    deadline, since, last = time.monotonic() + PATIENCE_S, time.monotonic(), -1.0
    while time.monotonic() - since < QUIET_S or not last:
        written = sum(metric(node, "tier_bytes_total", op="write") for node in nodes)
        if written != last:
            since, last = time.monotonic(), written
        assert time.monotonic() < deadline
        time.sleep(0.1)


def assert_right(family: str, prompt: Sequence[int], answer: Answer) -> None:
    expected = reference(family).greedy(prompt, NUM_TOKENS)
    assert expected.mismatch(answer.token_ids(), answer.logprobs(), reference(family).tolerance) is None


@pytest.mark.parametrize(("family", "number"), CASES)
def test_conversation_when_all_processes_start_again_then_nothing_of_it_is_computed_again(
    tmp_path: Path, family: str, number: signal.Signals
) -> None:
    flags = tier_flags(tmp_path / "tier")
    prompt = random_tokens(3000, 71)
    with service(family, flags) as running:
        first = complete(running.url, prompt, NUM_TOKENS)
        if number is signal.SIGKILL:
            wait_written(*running.prefill, *running.decode)
        for node in running.nodes:
            node.process.popen.send_signal(number)
        for node in running.nodes:
            node.process.popen.wait(PATIENCE_S)
    turn = [*prompt, *first.token_ids(), *random_tokens(40, 72)]
    with service(family, flags) as running:
        for node in (*running.prefill, *running.decode):
            wait_known(node)
        second = complete(running.url, turn, NUM_TOKENS)
        # The last token of an answer was sampled and never computed.
        assert second.cached_tokens == len(prompt) + NUM_TOKENS - 1
        assert_right(family, turn, second)
        # The same once more: an exact repeat of the first prompt computes nothing.
        again = complete(running.url, prompt, NUM_TOKENS)
        assert again.cached_tokens == len(prompt)
        assert again.token_ids() == first.token_ids()
        for node in (*running.prefill, *running.decode):
            assert metric(node, "tier_read_errors_total") == 0
        wait_settled(*running.prefill, *running.decode)


def wait_known(node: Node) -> None:
    """Until the node has found what its folder holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not metric(node, "tier_objects"):
        assert time.monotonic() < deadline, node.process.tail()
        time.sleep(0.05)
