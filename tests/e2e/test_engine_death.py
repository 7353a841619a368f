"""An engine thread that dies under a stream: clients and peers are told at once, the process ends with a status that
says so, whoever started it starts another one, and the pair serves on."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.server.serve import FAILED_STATUS
from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support.client import complete, completion_body, metric, wait_settled
from tests.support.faulty_node import mark
from tests.support.hangup import wait_until
from tests.support.models import checkpoint
from tests.support.reference import Reference, random_tokens
from tests.support.restart import start_again
from tests.support.service import Node, Service
from tests.support.supervised import SMALL_FLAGS, Up

ROUTE = "/v1/completions"
TIMEOUT_S = 60.0
TOLD_S = 5.0
"""Bound of the time until everybody is told; it takes a tenth of it. Each deadline that would tell them is longer."""
END_S = 30.0


class Stream:
    """One streamed request on a thread of its own: its raw lines, and when each came."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.lines: list[str] = []
        self.times: list[float] = []
        self._url, self._body = url, {**body, "stream": True}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with httpx.stream("POST", self._url + ROUTE, json=self._body, timeout=TIMEOUT_S) as response:
            assert response.status_code == 200, response.read()
            for line in filter(None, response.iter_lines()):
                self.lines.append(line)
                self.times.append(time.monotonic())

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    @property
    def token_ids(self) -> list[int]:
        events = [json.loads(line.removeprefix("data: ")) for line in self.lines if line != "data: [DONE]"]
        return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]

    @property
    def error(self) -> str | None:
        """The error event that it ended with; None: it ended otherwise."""
        return self.lines[-1] if self.lines and self.lines[-1].startswith('data: {"error"') else None


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """One prefill node; ``param``: fields of the service that are not the usual ones."""
    fields = {"prefill_flags": NODE_FLAGS, "decode_flags": NODE_FLAGS, **getattr(request, "param", {})}
    with Service(checkpoint(FAMILY), is_faulty=True, **fields) as running:
        yield running


def name_of(node: Node) -> str:
    return f"{node.role}-{node.url.rpartition(':')[2]}"


def check_ended(node: Node) -> None:
    """The process has ended by itself, its status and its log say what happened."""
    try:
        assert node.process.popen.wait(END_S) == FAILED_STATUS
    except subprocess.TimeoutExpired:
        raise AssertionError(f"still there after {END_S} s:\n{node.process.tail()}") from None
    log = node.process.log.read_text()
    assert "the engine cannot go on" in log
    assert "InjectedError: engine_thread" in log
    assert re.search(rf"node dead name={name_of(node)}: the engine stopped: InjectedError", log)


def check_serves(service: Service, reference: Reference, seed: int) -> None:
    prompt = random_tokens(140, seed=seed)
    answer = complete(service.url, prompt, 12)
    mismatch = reference.greedy(prompt, 12).mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance)
    assert mismatch is None, mismatch
    assert answer.trace["placement"] == "remote"
    wait_settled(*service.prefill, *service.decode)


@pytest.mark.full  # in the short tier: that of a dead rank, in test_ranks.py
def test_streams_when_the_engine_under_them_dies_then_are_told_and_the_node_that_replaces_it_serves(
    service: Service, reference: Reference
) -> None:
    prefill, decode = service.prefill[0], service.decode[0]
    others = [
        Stream(service.url, completion_body(random_tokens(60 + index, seed=7800 + index), 3500)) for index in range(4)
    ]
    for each in others:
        wait_until(lambda each=each: len(each.lines) > 3, "a stream to begin")  # type: ignore[misc]
    salt = mark(name_of(decode), "engine_thread", after=120)
    marked = Stream(service.url, completion_body(random_tokens(80, seed=7810), 3500, cache_salt=salt))
    streams = [*others, marked]
    for each in streams:
        each.join()
        assert each.error is not None, each.lines[-1]
        assert '"code":"no_node"' in each.error.replace(" ", "")
    told_s = max(each.times[-1] for each in streams) - max(each.times[-2] for each in streams)
    print(f"the last stream was told {told_s:.3f} s after the last token")
    assert told_s < TOLD_S
    check_ended(decode)
    assert prefill.process.popen.poll() is None
    start_again(service, decode)
    check_serves(service, reference, seed=7811)


@pytest.mark.full
@pytest.mark.parametrize("service", [{"num_decode": 2, "proxy_flags": ("--migration-limit", "1")}], indirect=True)
def test_streams_when_they_may_move_and_the_engine_under_them_dies_then_go_on_elsewhere(
    service: Service, reference: Reference
) -> None:
    num_tokens = 400
    victim = service.decode[0]
    salt = mark(name_of(victim), "engine_thread", after=150)
    prompts = [random_tokens(60, seed=7820 + index) for index in range(6)]
    bodies = [completion_body(prompt, num_tokens, cache_salt=salt) for prompt in prompts]
    streams = [Stream(service.url, body) for body in bodies]
    for each in streams:
        each.join()
        assert each.lines[-1] == "data: [DONE]", each.lines[-1]
    check_ended(victim)
    assert metric(service.proxy, "proxy_migrations_total", outcome="resumed") > 0
    start_again(service, victim)
    for prompt, stream in zip(prompts, streams, strict=True):  # as if nobody had died
        assert stream.token_ids == complete(service.url, prompt, num_tokens).token_ids()
    check_serves(service, reference, seed=7830)


@pytest.mark.full
def test_prompts_when_the_engine_of_their_prefill_node_dies_then_decode_node_hears_at_once_and_computes_them(
    service: Service, reference: Reference
) -> None:
    """The prompt is read while it is computed: no deadline passes, the reader is told."""
    prefill, decode = service.prefill[0], service.decode[0]
    prompt = random_tokens(3500, seed=7840)
    salt = mark(name_of(prefill), "engine_thread", after=2000)
    answer = complete(service.url, prompt, 8, cache_salt=salt)
    mismatch = reference.greedy(prompt, 8).mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance)
    assert mismatch is None, mismatch
    assert answer.trace["placement"] == "local"
    told = {reason: metric(decode, "transfer_failures_total", reason=reason) for reason in ("leg_failed", "peer_lost")}
    assert sum(told.values()) == metric(decode, "transfer_failures_total") == 1, told
    check_ended(prefill)
    start_again(service, prefill)
    check_serves(service, reference, seed=7841)


@pytest.mark.full
@pytest.mark.parametrize("service", [{"decode_flags": (*NODE_FLAGS, "--engine-hang-seconds", "5")}], indirect=True)
def test_stream_when_a_step_under_it_hangs_then_is_told_and_the_process_ends_although_its_engine_does_not(
    service: Service,
) -> None:
    prefill, decode = service.prefill[0], service.decode[0]
    salt = mark(name_of(decode), "hang", after=120)
    stream = Stream(service.url, completion_body(random_tokens(80, seed=7812), 3500, cache_salt=salt))
    stream.join()
    assert stream.error is not None
    assert '"code":"no_node"' in stream.error.replace(" ", "")
    assert decode.process.popen.wait(END_S) == FAILED_STATUS
    log = decode.process.log.read_text()
    assert f"node dead name={name_of(decode)}: a step takes longer than --engine-hang-seconds 5" in log
    assert prefill.process.popen.poll() is None


@pytest.mark.full
def test_up_when_the_engine_of_a_node_dies_then_has_a_ready_node_again_and_the_pair_serves(tmp_path: Path) -> None:
    flags = (*SMALL_FLAGS, "--policy", "round_robin", "--model", str(checkpoint(FAMILY)))
    with Up(tmp_path, *flags, program="tests.support.faulty_up") as up:
        up.wait_ready()
        prompt = random_tokens(70, seed=7850)
        before = complete(up.url, prompt, 8)
        assert before.trace["placement"] == "remote"
        killed = up.child("decode")
        stream = Stream(
            up.url,
            completion_body(random_tokens(80, seed=7851), 3500, cache_salt=mark("decode", "engine_thread", after=120)),
        )
        stream.join()
        assert stream.error is not None
        restarted = f"decode-{up.base_port + 200} exited with status {FAILED_STATUS}; restarting it in 1 s"
        wait_until(lambda: restarted in up.output, "the death to be seen")
        wait_until(lambda: len(up.children()) == 3 and up.child("decode").pid != killed.pid, "a new process")
        wait_until(lambda: httpx.get(up.url + "/ready").status_code == 200, "the service to be ready again", TIMEOUT_S)
        after = complete(up.url, prompt, 8)
        assert after.token_ids() == before.token_ids()
        assert after.trace["placement"] == "remote"
        assert after.trace["transferred_states"] == 1
