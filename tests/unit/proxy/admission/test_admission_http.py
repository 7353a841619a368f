"""Admission as clients meet it: headers, statuses, metrics, limits per key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.errors import ConfigError, DeadlineExceededError, GrammarError
from common.grammar.checker import GrammarChecker
from proxy.admission.key_limits import read_key_limits
from tests.support.http_server import wait_for
from tests.unit.proxy.conftest import Cluster, StartCluster
from tests.unit.proxy.fake_node import Fault

BODY = {"prompt": "abc"}
STREAM = {"prompt": "abc", "stream": True}


@contextlib.contextmanager
def busy(cluster: Cluster) -> Iterator[None]:
    """One request holds the only place for as long as the block runs."""
    cluster.decode[0].fault = Fault.STALL
    with cluster.client.stream("POST", "/v1/completions", json=STREAM) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        cluster.decode[0].fault = Fault.NONE
        yield


def in_thread(cluster: Cluster, answers: dict[str, httpx.Response], name: str, **headers: str) -> threading.Thread:
    def send() -> None:
        answers[name] = cluster.client.post("/v1/completions", json=BODY, headers=headers)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_request_when_all_places_are_taken_then_it_waits_and_is_served(start_cluster: StartCluster) -> None:
    cluster = start_cluster(max_concurrency=1)
    answers: dict[str, httpx.Response] = {}
    with busy(cluster):
        thread = in_thread(cluster, answers, "second")
        wait_for(lambda: cluster.metric("tandem_requests_waiting") == 1, "the second to wait")
        assert cluster.metric("tandem_requests_running") == 1
    thread.join()
    assert answers["second"].status_code == 200
    wait_for(lambda: cluster.metric("tandem_requests_running") == 0, "everything to end")
    assert cluster.metric("tandem_requests_waiting") == 0


def test_client_when_it_leaves_the_queue_then_its_place_is_free(start_cluster: StartCluster) -> None:
    cluster = start_cluster(max_concurrency=1)
    with busy(cluster):
        with (
            httpx.Client(base_url=cluster.client.base_url, trust_env=False) as client,
            contextlib.suppress(httpx.HTTPError),
        ):
            client.post("/v1/completions", json=BODY, timeout=0.3)
        wait_for(lambda: cluster.metric("tandem_requests_waiting") == 0, "the queue to be empty")
        assert len(cluster.decode[0].bodies) == 1
    wait_for(lambda: cluster.metric("tandem_requests_total", outcome="abort") == 2, "both to be counted")


def test_deadline_when_it_passes_before_the_first_byte_then_504_and_legs_are_closed(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster()
    cluster.decode[0].fault = Fault.HANG
    started_s = time.monotonic()
    answer = cluster.client.post("/v1/completions", json=BODY, headers={"X-Request-Deadline-Ms": "2000"})
    assert time.monotonic() - started_s < 10
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert "2000 ms (X-Request-Deadline-Ms)" in answer.json()["error"]["message"]
    assert answer.headers["x-tandem-dropped"] == "evicted-deadline"
    wait_for(lambda: cluster.decode[0].num_aborted == 1, "the leg to be closed")
    wait_for(lambda: cluster.prefill[0].released == ["prefill-0-lease-0"], "the lease's release")
    assert cluster.metric("tandem_requests_dropped_total", reason="evicted-deadline") == 1


def test_deadline_when_it_passes_in_a_stream_then_an_error_event_ends_it(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    cluster.decode[0].fault = Fault.STALL
    answer = cluster.client.post("/v1/completions", json=STREAM, headers={"X-Request-Deadline-Ms": "2000"})
    assert answer.status_code == 200
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert "[DONE]" not in events
    assert json.loads(events[-1])["error"]["code"] == "deadline_exceeded"
    wait_for(lambda: cluster.decode[0].num_aborted == 1, "the leg to be closed")


def test_deadline_when_it_cannot_be_met_from_the_queue_then_429(start_cluster: StartCluster) -> None:
    cluster = start_cluster(max_concurrency=1)
    with busy(cluster):
        answer = cluster.client.post("/v1/completions", json=BODY, headers={"X-Request-Deadline-Ms": "100"})
    assert answer.status_code == 429
    assert answer.headers["x-tandem-dropped"] == "evicted-deadline"
    assert answer.json()["error"]["code"] == "deadline_unreachable"
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("value", ["0", "0.999", "-5", "soon", "86400001", "1e3", "1.", ".5", "1.2345", "", "9" * 40])
def test_deadline_when_malformed_then_400_names_header_value_and_bound(start_cluster: StartCluster, value: str) -> None:
    cluster = start_cluster(0)
    answer = cluster.client.post("/v1/completions", json=BODY, headers={"X-Request-Deadline-Ms": value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "X-Request-Deadline-Ms"
    assert repr(value[:40]) in error["message"]
    assert "from 1 to 86400000" in error["message"]


def test_keys_when_one_is_over_its_limits_then_the_other_is_served(start_cluster: StartCluster, tmp_path: Path) -> None:
    keys, limits = tmp_path / "keys", tmp_path / "limits.json"
    keys.write_text("small\nlarge\n")
    limits.write_text(json.dumps({"keys": {"small": {"requests_per_minute": 1}}}))
    cluster = start_cluster(0, api_key_file=str(keys), api_key_limits_file=str(limits))

    def post(key: str) -> httpx.Response:
        return cluster.client.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"})

    assert post("small").status_code == 200
    refused = post("small")
    assert refused.status_code == 429
    assert refused.headers["x-tandem-dropped"] == "rejected-rate-limit"
    assert 55 <= int(refused.headers["retry-after"]) <= 60
    assert "small" not in refused.text
    assert post("large").status_code == 200
    assert cluster.metric("tandem_requests_dropped_total", reason="rejected-rate-limit") == 1


@pytest.fixture
def limited(start_cluster: StartCluster, tmp_path: Path) -> Cluster:
    """A proxy whose clients may use 120 tokens a minute together; its node has a context of 128."""
    limits = tmp_path / "limits.json"
    limits.write_text(json.dumps({"default": {"tokens_per_minute": 120}}))
    return start_cluster(0, api_key_limits_file=str(limits))


CHAT = {"messages": [{"role": "user", "content": "a" * 76}]}  # 20 tokens, with the role


def test_chat_without_max_tokens_when_it_runs_then_it_holds_what_it_may_use_and_at_its_end_what_it_used(
    limited: Cluster,
) -> None:
    node = limited.decode[0]
    node.has_choices, node.fault = True, Fault.STALL
    post = limited.client.post
    with limited.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        assert next(answer.iter_lines())
        node.fault = Fault.NONE
        refused = post("/v1/chat/completions", json=CHAT)
        assert refused.headers["x-tandem-dropped"] == "rejected-rate-limit"
    # It was left after a prompt of 20 tokens and an answer of one.
    wait_for(lambda: limited.metric("tandem_requests_running") == 0, "the first to end")
    assert post("/v1/completions", json={"prompt": "a" * 40, "max_tokens": 80}).status_code == 200


@pytest.mark.parametrize(
    ("body", "usage", "num_used"),
    [
        ({"stream": True}, None, 23),  # three events with a choice
        ({}, {"prompt_tokens": 19, "completion_tokens": 31}, 50),
        ({}, None, 120),  # nobody says: as much as it may have been
    ],
)
def test_request_when_it_has_ended_then_its_key_has_used_what_it_used(
    limited: Cluster, body: dict[str, bool], usage: dict[str, int] | None, num_used: int
) -> None:
    node = limited.decode[0]
    node.has_choices, node.usage = True, usage
    assert limited.client.post("/v1/chat/completions", json={**CHAT, **body}).status_code == 200
    left = 120 - num_used
    for num_tokens, status in ((min(120, left + 50), 429), *([(left - 10, 200)] if left else [])):
        answer = limited.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": num_tokens - 1})
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_request_when_it_may_use_more_than_its_key_ever_can_then_the_field_that_says_so_is_named(
    limited: Cluster, name: str
) -> None:
    answer = limited.client.post("/v1/chat/completions", json={**CHAT, name: 101})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "over_token_limit", name)
    assert f"and {name} for each" in error["message"]


def test_request_when_nodes_fail_or_refuse_it_then_it_has_used_nothing(limited: Cluster) -> None:
    node = limited.decode[0]
    for node.status in (500, 400):
        node.fault = Fault.STATUS
        assert limited.client.post("/v1/chat/completions", json=CHAT).status_code >= 400
    node.fault = Fault.NONE
    answer = limited.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 110})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_request_when_its_own_deadline_passes_before_the_first_byte_then_it_has_used_nothing(
    limited: Cluster, stream: bool
) -> None:
    node = limited.decode[0]
    node.fault = Fault.HANG
    answer = limited.client.post(
        "/v1/chat/completions", json={**CHAT, "stream": stream}, headers={"X-Request-Deadline-Ms": "700"}
    )
    assert answer.status_code == 504, answer.text
    node.fault = Fault.NONE
    answer = limited.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 110})
    assert answer.status_code == 200, answer.text


def test_stream_when_its_node_tells_of_tokens_that_are_not_shown_then_its_key_has_used_them(limited: Cluster) -> None:
    [node] = limited.decode
    event = f"data: {json.dumps({'choices': [{'index': 0, 'delta': {}, 'finish_reason': None}]})}\n\n"
    node.script = (event, ": tandem-tokens 40\n: at work\n\n", event, "data: [DONE]\n\n")
    answer = limited.client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert answer.status_code == 200
    assert "tandem" not in answer.text
    # 20 of the prompt, 1 + 40 + 1 of the answer: 58 of 120 are left.
    node.script = ()
    for num_tokens, status in ((90, 429), (50, 200)):
        answer = limited.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": num_tokens - 1})
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/tokenize", {"prompt": "abc"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/messages/count_tokens", {"model": "fake", "messages": [{"role": "user", "content": "abc"}]}),
    ],
)
def test_text_when_it_is_tokenised_then_is_one_of_its_keys_requests_and_none_of_its_tokens(
    start_cluster: StartCluster, tmp_path: Path, route: str, body: dict[str, object]
) -> None:
    limits = tmp_path / "limits.json"
    limits.write_text(json.dumps({"default": {"requests_per_minute": 2, "tokens_per_minute": 10}}))
    cluster = start_cluster(0, api_key_limits_file=str(limits))
    assert cluster.client.post("/v1/completions", json={**BODY, "max_tokens": 9}).status_code == 200
    assert cluster.client.post(route, json=body).status_code == 200
    refused = cluster.client.post(route, json=body)
    assert refused.status_code == 429
    assert refused.headers["x-tandem-dropped"] == "rejected-rate-limit"
    assert "requests_per_minute of 2" in refused.json()["error"]["message"]
    assert cluster.metric("tandem_requests_dropped_total", reason="rejected-rate-limit") == 1


class SlowChecker(GrammarChecker):
    """Grammars that name one of these words take until it is ended, or end so. ``asked``: those that were asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: list[str] = []
        self.is_over = False

    async def check(self, grammar: str, *, param: str) -> None:
        self.asked.append(grammar)
        while "slow" in grammar and not self.is_over:
            await asyncio.sleep(0.01)
        if "bad" in grammar:
            raise GrammarError("it is bad", param=param)
        if "late" in grammar:
            raise DeadlineExceededError("it was not checked", param=param)


@dataclass
class Tenants:
    """Key A may have one request at once, and three a minute."""

    cluster: Cluster
    checker: SlowChecker

    def post(self, key: str, *choices: str, timeout_s: float = 20) -> httpx.Response:
        body = {**BODY, "guided_choice": list(choices)} if choices else BODY
        headers = {"Authorization": f"Bearer {key}"}
        return self.cluster.client.post("/v1/completions", json=body, headers=headers, timeout=timeout_s)


@pytest.fixture
def tenants(start_cluster: StartCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tenants:
    checkers: list[SlowChecker] = []

    def create(*args: Any, **kwargs: Any) -> SlowChecker:
        checkers.append(SlowChecker(*args, **kwargs))
        return checkers[-1]

    monkeypatch.setattr("proxy.app.GrammarChecker", create)
    keys, limits = tmp_path / "keys", tmp_path / "limits.json"
    keys.write_text("A\nB\n")
    limits.write_text(json.dumps({"keys": {"A": {"max_concurrency": 1, "requests_per_minute": 3}}}))
    cluster = start_cluster(0, api_key_file=str(keys), api_key_limits_file=str(limits))
    [checker] = checkers
    return Tenants(cluster, checker)


def test_grammars_when_a_key_has_all_it_may_have_being_checked_then_no_more_of_its_own_are(tenants: Tenants) -> None:
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(tenants.post("A", "slow")))
    thread.start()
    wait_for(lambda: len(tenants.checker.asked) == 1, "the check to begin")
    for number in range(5):
        refused = tenants.post("A", f"slow {number}")
        assert refused.status_code == 429
        assert refused.headers["x-tandem-dropped"] == "rejected-concurrency"
    assert len(tenants.checker.asked) == 1
    assert tenants.post("B", "x", "y").status_code == 200
    tenants.checker.is_over = True
    thread.join()
    assert [answer.status_code for answer in answers] == [200]
    assert tenants.post("A").status_code == 200
    assert tenants.cluster.metric("tandem_requests_dropped_total", reason="rejected-concurrency") == 5


@pytest.mark.parametrize(("word", "status", "param"), [("bad", 400, "guided_choice"), ("late", 504, "guided_choice")])
def test_grammar_when_it_is_refused_then_its_key_has_its_place_again_and_one_request_less(
    tenants: Tenants, word: str, status: int, param: str
) -> None:
    for number in range(3):
        refused = tenants.post("A", f"{word} {number}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    assert tenants.post("A", f"{word} 3").headers["x-tandem-dropped"] == "rejected-rate-limit"
    assert len(tenants.checker.asked) == 3
    assert tenants.post("B", "x").status_code == 200


def test_grammar_when_its_client_leaves_while_it_is_checked_then_its_key_has_its_place_again(tenants: Tenants) -> None:
    with contextlib.suppress(httpx.HTTPError):
        tenants.post("A", "slow", timeout_s=0.3)
    wait_for(lambda: tenants.cluster.metric("tandem_requests_total", outcome="abort") == 1, "the client's leaving")
    assert tenants.post("A").status_code == 200
    assert tenants.cluster.decode[0].bodies[-1].get("guided_choice") is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "not JSON"),
        ("[]", "must be {"),
        ('{"defaults": {}}', "not ['defaults']"),
        ('{"default": {"rpm": 1}}', "default has rpm; the limits are max_concurrency"),
        ('{"default": {"max_concurrency": 0}}', "max_concurrency must be a whole number from 1 to"),
        ('{"default": {"max_concurrency": true}}', "got True"),
        ('{"default": {"best_priority": 0.5}}', "best_priority must be a whole number from -1000000000000 to"),
        ('{"keys": {"secret": {}}}', "entry 1 of keys is not a key of --api-key-file"),
        ('{"keys": {"known": 5}}', "entry 1 of keys must be an object, got int"),
    ],
)
def test_limits_file_when_wrong_then_error_names_file_and_entry_but_no_key(
    tmp_path: Path, text: str, what: str
) -> None:
    path = tmp_path / "limits.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_key_limits(str(path), ["known"])
    assert what in caught.value.message
    assert str(path) in caught.value.message
    assert "--api-key-limits-file" in caught.value.message
    assert "secret" not in caught.value.message
