"""A node of two ranks that computes whole requests: the answers of one process, whatever was cached before, and a
rank's death is its node's: clients are told, no process is left, and whoever started the node starts another one.
What such nodes hand over to others: ``test_two_turns.py``, ``test_ranks_faults.py``."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from common.server.serve import FAILED_STATUS
from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.e2e.test_engine_death import Stream
from tests.support.client import complete, completion_body, info, together, wait_settled
from tests.support.hangup import wait_until
from tests.support.models import checkpoint
from tests.support.reference import Reference, random_tokens
from tests.support.reference import reference as reference_of
from tests.support.restart import start_again
from tests.support.service import Node, Service, start_node, wait_ready
from tests.support.supervised import SMALL_FLAGS, Child, Up, alive, children_of

FLAGS = (*NODE_FLAGS, "--tensor-parallel-size", "2")
END_S = 30.0


def ranks_of(pid: int) -> list[Child]:
    """The processes beside rank 0."""
    return [child for child in children_of(pid) if "common.node.ranks.follower" in child.argv]


def check_no_rank_is_left(ranks: list[Child]) -> None:
    wait_until(lambda: not alive(ranks), "the ranks to end", END_S)


def check(reference: Reference, prompt: list[int], url: str, num_tokens: int = 16) -> int:
    """Tokens and log-probabilities are stock's; how many tokens of the prompt were cached."""
    answer = complete(url, prompt, num_tokens)
    greedy = reference.greedy(prompt, num_tokens)
    mismatch = greedy.mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance)
    assert mismatch is None, mismatch
    assert answer.trace["placement"] == "local"
    return answer.cached_tokens


@pytest.mark.parametrize("starts_again", [False, pytest.param(True, marks=pytest.mark.full)])
def test_service_when_its_node_has_two_ranks_then_answers_as_stock_and_a_dead_rank_is_told(
    reference: Reference, starts_again: bool
) -> None:
    with Service(checkpoint(FAMILY), decode_flags=FLAGS, num_prefill=0) as service:
        [decode] = service.decode
        [rank] = ranks = ranks_of(decode.process.pid)
        assert info(decode)["tensor_parallel_size"] == 2
        prompts = [random_tokens(length, seed=8100 + length) for length in (40, 130, 300, 75)]
        together([lambda prompt=prompt: check(reference, prompt, service.url) for prompt in prompts])  # type: ignore[misc]
        # The next turn goes on from the states that all ranks kept.
        turn = prompts[2] + reference.greedy(prompts[2], 16).token_ids + random_tokens(30, seed=8150)
        assert check(reference, turn, service.url) >= len(prompts[2])
        assert check(reference, turn, service.url) == len(turn)
        wait_settled(decode)

        stream = Stream(service.url, completion_body(random_tokens(60, seed=8160), 3500))
        wait_until(lambda: len(stream.lines) > 3, "the stream to begin")
        kill(rank)
        stream.join()
        assert stream.error is not None
        assert json.loads(stream.error.removeprefix("data: "))["error"]["code"] == "no_node"
        assert decode.process.popen.wait(END_S) == FAILED_STATUS
        assert "rank 1 of 2 was killed by signal 9" in decode.process.log.read_text()
        check_no_rank_is_left(ranks)
        if starts_again:
            start_again(service, decode)
            assert check(reference, prompts[0], service.url) == 0


@pytest.mark.full
def test_node_of_ranks_when_killed_or_stopped_then_leaves_none_of_them(tmp_path: Path) -> None:
    def start() -> tuple[Node, list[Child]]:
        node = start_node("decode", checkpoint(FAMILY), tmp_path, *FLAGS)
        wait_ready(node)
        return node, ranks_of(node.process.pid)

    node, ranks = start()
    assert len(ranks) == 1
    node.process.popen.send_signal(signal.SIGKILL)
    check_no_rank_is_left(ranks)
    node, ranks = start()
    assert node.process.stop() == 0
    assert not alive(ranks)
    node, ranks = start()
    body = {**completion_body(random_tokens(60, seed=8170), 3500), "stream": True}
    with httpx.stream("POST", node.url + "/v1/completions", json=body, timeout=END_S) as response:
        next(response.iter_lines())
        node.process.popen.send_signal(signal.SIGKILL)  # in the middle of a step: a rank waits for rank 0's sums
    check_no_rank_is_left(ranks)


@pytest.mark.full
def test_up_when_a_rank_is_killed_then_has_a_ready_node_again_with_the_same_answers(tmp_path: Path) -> None:
    family = "qwen3_5"
    flags = (*SMALL_FLAGS, "--prefill-nodes", "0", "--tensor-parallel-size", "2", "--model", str(checkpoint(family)))
    drafts = ("--speculative-config", '{"method": "ngram"}')
    with Up(tmp_path, *flags, *drafts) as up:
        up.wait_ready()
        prompt = random_tokens(70, seed=8180)
        assert check(reference_of(family), prompt, up.url) == 0
        killed = up.child("decode_node")
        ranks = ranks_of(killed.pid)
        kill(ranks[0])
        restarted = f"decode-{up.base_port + 200} exited with status {FAILED_STATUS}; restarting it in 1 s"
        wait_until(lambda: restarted in up.output, "the death to be seen", END_S)
        wait_until(lambda: len(up.children()) == 2 and up.child("decode_node").pid != killed.pid, "a new process")
        wait_until(lambda: is_ready(up.url), "the service to be ready again", 120)
        assert check(reference_of(family), prompt, up.url) == 0
        ranks = ranks_of(up.child("decode_node").pid)
        assert up.end(signal.SIGTERM) == 0
        assert not alive(ranks)


@pytest.mark.full
def test_node_of_ranks_when_one_hangs_then_ends_and_leaves_none_of_them(tmp_path: Path) -> None:
    node = start_node("decode", checkpoint(FAMILY), tmp_path, *FLAGS, "--engine-hang-seconds", "5")
    wait_ready(node)
    [rank] = ranks_of(node.process.pid)
    stream = Stream(node.url, completion_body(random_tokens(60, seed=8190), 3500))
    wait_until(lambda: len(stream.lines) > 3, "the stream to begin")
    os.kill(rank.pid, signal.SIGSTOP)
    stream.join()
    assert stream.error is not None
    assert node.process.popen.wait(END_S) == FAILED_STATUS
    assert "a step takes longer than --engine-hang-seconds 5" in node.process.log.read_text()
    check_no_rank_is_left([rank])


def kill(child: Child) -> None:
    os.kill(child.pid, signal.SIGKILL)


def is_ready(url: str) -> bool:
    return httpx.get(url + "/ready", timeout=END_S).status_code == 200
