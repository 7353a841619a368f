"""A stream that is cut after any of its events and goes on at a node: the client sees what it would have seen.

Nodes are asked directly here, as the proxy asks them; what the proxy makes of it is in ``test_migration``.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
import pytest

from common.wire.resume import RESUME_KEY, STATE_PREFIX, STREAM_STATE_KEY, read_state_line
from common.wire.routes import HAND_OVER_ROUTE, LEASE_RELEASE_ROUTE
from tests.support import foreign
from tests.support.client import info, metric, wait_settled
from tests.support.reference import random_tokens
from tests.support.service import Service

HEADERS = {"X-Request-Id": "resumed"}
NUM_TOKENS = 24
LONG = 1500
"""Tokens of a stream that is not at its end before its node is asked to hand it over, however busy the machine is."""
PROMPT = random_tokens(70, seed=7100)
BODY: dict[str, Any] = {
    "max_tokens": NUM_TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
SEEDED = {"temperature": 1.0, "seed": 77, "top_p": 0.95}
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 2, "return_token_ids": True},
    "seeded": {**SEEDED, "logprobs": 1},
    "penalties": {**SEEDED, **PENALTIES},
    "long minimum": {**SEEDED, "min_tokens": NUM_TOKENS - 2, "stop_token_ids": [30], "logit_bias": {"30": 50}},
    "echo": {"echo": True},
}

Event = tuple[tuple[int, ...], dict[str, Any] | None]


def stream(url: str, body: dict[str, Any], route: str = "/v1/completions") -> tuple[list[Event], dict[str, Any]]:
    """Events with the tokens that they made known (None: the [DONE]), and what the first one said of the answer."""
    events: list[Event] = []
    first: dict[str, Any] = {}
    response = httpx.post(url + route, json={**body, STREAM_STATE_KEY: True}, headers=HEADERS, timeout=60)
    assert response.status_code == 200, response.text
    for block in response.content.removesuffix(b"\n\n").split(b"\n\n"):
        lines = block.split(b"\n")
        token_ids: tuple[int, ...] = ()
        if lines[0].startswith(STATE_PREFIX):
            state = read_state_line(lines.pop(0))
            token_ids = state.token_ids
            if state.num_cached_tokens is not None:
                first = {"created": state.created, "num_cached_tokens": state.num_cached_tokens}
        [data] = lines
        data = data.removeprefix(b"data: ")
        events.append((token_ids, None if data == b"[DONE]" else json.loads(data)))
    assert events[-1][1] is None
    return events, first


def resumed_body(body: dict[str, Any], events: list[Event], cut: int, first: dict[str, Any]) -> dict[str, Any]:
    """``body`` for who goes on after ``cut`` events."""
    known = [token_id for token_ids, _ in events[:cut] for token_id in token_ids]
    return {**body, RESUME_KEY: {"output_token_ids": known, **first}}


def assert_same(got: list[Event], expected: list[Event]) -> None:
    assert [token_ids for token_ids, _ in got] == [token_ids for token_ids, _ in expected]
    for (_, event), (_, other) in zip(got, expected, strict=True):
        assert (event is None) == (other is None)
        if event is not None and other is not None:
            logprobs = [[choice.pop("logprobs") for choice in each["choices"]] for each in (event, other)]
            assert event == other
            for block, other_block in zip(*logprobs, strict=True):
                _assert_near(block, other_block)


def _assert_near(block: dict[str, Any] | None, other: dict[str, Any] | None) -> None:
    if block is None or other is None:
        assert block == other
        return
    assert block["tokens"] == other["tokens"]
    assert block["text_offset"] == other["text_offset"]
    assert block["token_logprobs"] == pytest.approx(other["token_logprobs"], abs=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_stream_when_cut_and_resumed_then_goes_on_as_if_it_had_not_been(service: Service, case: str) -> None:
    url = service.decode[0].url
    body = {**BODY, **CASES[case], "prompt": PROMPT, "cache_salt": case}
    whole, first = stream(url, body)
    assert len(whole) > 5
    usage = whole[-2][1]
    assert usage is not None
    num_tokens = NUM_TOKENS - 1 if "stop_token_ids" in body else NUM_TOKENS
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (len(PROMPT), num_tokens)
    for cut in (1, 2, len(whole) // 2, len(whole) - 3):
        events, _ = stream(url, resumed_body(body, whole, cut, first))
        assert_same(events, copy.deepcopy(whole[cut:]))


def test_stream_when_a_stop_string_lies_across_the_cut_then_ends_where_it_would_have(service: Service) -> None:
    url = service.decode[0].url
    body = {**BODY, **SEEDED, "prompt": PROMPT, "cache_salt": "stop"}
    text = "".join(event["choices"][0]["text"] for _, event in stream(url, body)[0][:-2] if event is not None)
    middle = len(text) // 2
    body["stop"] = [text[middle : middle + 6]]
    whole, first = stream(url, body)
    assert whole[-3][1] is not None
    assert whole[-3][1]["choices"][0]["stop_reason"] == body["stop"][0]
    for cut in range(1, len(whole) - 2):
        assert_same(stream(url, resumed_body(body, whole, cut, first))[0], copy.deepcopy(whole[cut:]))


def test_chat_stream_when_cut_then_goes_on_without_a_second_role(service: Service) -> None:
    url, route = service.decode[0].url, "/v1/chat/completions"
    body = {**BODY, **SEEDED, "messages": [{"role": "user", "content": "tell me something"}], "logprobs": True}
    whole, first = stream(url, body, route)
    cut = len(whole) // 2
    events, _ = stream(url, resumed_body(body, whole, cut, first), route)
    texts = [[e["choices"][0]["delta"] for _, e in part if e is not None and e["choices"]] for part in (events, whole)]
    assert texts[0] == texts[1][cut:]
    assert events[-2][1]["usage"] == whole[-2][1]["usage"]  # type: ignore[index]


def test_resumed_stream_when_its_tokens_are_prefilled_elsewhere_then_they_are_pulled(service: Service) -> None:
    [prefill], [decode] = service.prefill, service.decode
    prompt = random_tokens(150, seed=7101)
    body = {**BODY, **SEEDED, "prompt": prompt}
    whole, first = stream(decode.url, {**body, "cache_salt": "first"})
    resumed = {**resumed_body(body, whole, 12, first), "cache_salt": "second"}
    params = foreign.prefill(prefill.url, resumed)
    known = [*prompt, *resumed[RESUME_KEY]["output_token_ids"]]
    assert params["prompt_token_ids"] == known
    before = metric(decode, "prompt_tokens_total", source="computed")
    events, _ = stream(decode.url, {**resumed, "kv_transfer_params": params})
    assert_same(events, whole[12:])
    assert metric(decode, "prompt_tokens_total", source="computed") == before
    wait_settled(prefill, decode)


def read_and_hand_over(url: str, body: dict[str, Any], lease_id: str) -> tuple[list[Event], dict[str, Any]]:
    """The events of a stream whose node is asked to hand it over at its third event, as far as they go."""
    events: list[Event] = []
    first: dict[str, Any] = {}
    token_ids: tuple[int, ...] = ()
    content = {**body, STREAM_STATE_KEY: True}
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", url + "/v1/completions", json=content, headers=HEADERS) as response,
    ):
        for line in map(str.encode, response.iter_lines()):
            if line.startswith(STATE_PREFIX):
                state = read_state_line(line)
                token_ids = state.token_ids
                if state.num_cached_tokens is not None:
                    first = {"created": state.created, "num_cached_tokens": state.num_cached_tokens}
                    stream_id = state.stream_id
            elif line:
                events.append((token_ids, json.loads(line.removeprefix(b"data: "))))
                if len(events) == 3:
                    asked = client.post(url + HAND_OVER_ROUTE, json={"id": stream_id, "lease_id": lease_id})
                    assert asked.status_code == 200, asked.text
    return events, first


@pytest.mark.parametrize("keeps", [True, False], ids=["leased", "control"])
def test_stream_when_handed_over_then_the_next_node_computes_its_last_token_alone(
    service: Service, keeps: bool
) -> None:
    [prefill], [decode] = service.prefill, service.decode
    body = {
        **BODY,
        **SEEDED,
        "prompt": random_tokens(150, seed=7103),
        "max_tokens": LONG,
        "cache_salt": f"over {keeps}",
    }
    events, first = read_and_hand_over(prefill.url, body, f"lease-{keeps}")
    [*told, (_, error)] = events
    assert error is not None
    assert error["error"]["code"] == "handed_over"
    known = [token_id for token_ids, _ in events for token_id in token_ids]
    assert 3 <= len(known) < LONG
    state = info(prefill)
    source = {"url": prefill.url, "epoch": state["epoch"], "lease_id": f"lease-{keeps}"}
    resumed = {**body, RESUME_KEY: {"output_token_ids": known, **first}}
    before = [metric(decode, "prompt_tokens_total", source=name) for name in ("computed", "transferred")]
    rest, _ = stream(decode.url, {**resumed, "tandem_sources": [source]} if keeps else resumed)
    after = [metric(decode, "prompt_tokens_total", source=name) for name in ("computed", "transferred")]
    num_known = 150 + len(known)
    expected = [1, num_known - 1] if keeps else [num_known, 0]
    assert [new - old for new, old in zip(after, before, strict=True)] == expected
    whole, _ = stream(decode.url, {**body, "cache_salt": f"whole {keeps}"})
    texts = [
        "".join(event["choices"][0]["text"] for _, event in part if event and event["choices"])
        for part in (told + rest, whole)
    ]
    assert texts[0] == texts[1]
    assert rest[-2][1]["usage"] == whole[-2][1]["usage"]  # type: ignore[index]
    if not keeps:
        httpx.post(prefill.url + LEASE_RELEASE_ROUTE, json={"lease_ids": [f"lease-{keeps}"]}).raise_for_status()
    wait_settled(prefill, decode)


def test_hand_over_when_it_is_no_stream_of_the_node_then_nothing_is_leased(service: Service) -> None:
    [prefill] = service.prefill
    answer = httpx.post(prefill.url + HAND_OVER_ROUTE, json={"id": "nobody-1", "lease_id": "lease-2"})
    assert (answer.status_code, answer.json()) == (200, {"num_tokens": 0})
    for body, param in (({"id": "a"}, "lease_id"), ({"lease_id": "b"}, "id"), ({"id": 3, "lease_id": "b"}, "id")):
        refused = httpx.post(prefill.url + HAND_OVER_ROUTE, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    wait_settled(prefill)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({RESUME_KEY: []}, "an object"),
        ({RESUME_KEY: {"output_token_ids": []}}, "at least one token id"),
        ({RESUME_KEY: {"output_token_ids": [1, -1]}}, "output_token_ids[1]"),
        ({RESUME_KEY: {"output_token_ids": [10**6]}}, "output_token_ids holds token id 1000000"),
        ({RESUME_KEY: {"output_token_ids": [7] * NUM_TOKENS}}, f"fewer than max_tokens {NUM_TOKENS}"),
        ({RESUME_KEY: {"output_token_ids": [7]}, "n": 2}, "n 1"),
        ({RESUME_KEY: {"output_token_ids": [7]}, "stream": False, "stream_options": None}, "stream true"),
        ({RESUME_KEY: {"output_token_ids": [7]}, "prompt": [[5], [6]]}, "one prompt"),
        ({STREAM_STATE_KEY: True, "echo": True, "logprobs": 1}, "no echo with logprobs"),
    ],
)
def test_resume_when_it_cannot_be_then_400_names_it(service: Service, fields: dict[str, Any], names: str) -> None:
    body = {**BODY, "prompt": [5, 6, 7], **fields}
    response = httpx.post(service.decode[0].url + "/v1/completions", json=body, timeout=30)
    assert response.status_code == 400
    assert names in response.json()["error"]["message"]
    assert response.json()["error"]["param"].startswith("tandem_")
