"""What load generators and clients of the field send, as their sources have it, is answered; random requests never
bring out an answer that is not documented."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.client import wait_settled
from tests.support.service import Service

USAGE = {"include_usage": True}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "w5 w6 w7 w8"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "w5 w6 w7"}]}]

# name -> route and body, without the model; only what the client sets itself.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm bench serve, completions": (
        "/v1/completions",
        {
            "prompt": "w1 w2 w3",
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": 4,
            "logprobs": None,
            "stream": True,
            "stream_options": USAGE,
            "ignore_eos": True,
        },
    ),
    "vllm bench serve, completions with logprobs": (
        "/v1/completions",
        {
            "prompt": "w1 w2 w3",
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": 4,
            "logprobs": 3,
            "stream": True,
            "stream_options": USAGE,
            "ignore_eos": True,
        },
    ),
    "vllm bench serve, chat": (
        "/v1/chat/completions",
        {
            "messages": PARTS,
            "temperature": 0.0,
            "max_completion_tokens": 4,
            "stream": True,
            "stream_options": USAGE,
            "ignore_eos": True,
        },
    ),
    "guidellm, completions": (
        "/v1/completions",
        {
            "prompt": "w1 w2 w3",
            "max_tokens": 4,
            "max_completion_tokens": 4,
            "stop": None,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {**USAGE, "continuous_usage_stats": True},
        },
    ),
    "guidellm, chat": (
        "/v1/chat/completions",
        {
            "messages": PARTS,
            "max_tokens": 4,
            "max_completion_tokens": 4,
            "stop": None,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {**USAGE, "continuous_usage_stats": True},
        },
    ),
    "aiperf, chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "name": "", "content": "w5 w6 w7"}],
            "max_completion_tokens": 4,
            "min_tokens": 4,
            "ignore_eos": True,
            "stream": True,
            "stream_options": USAGE,
        },
    ),
    "aiperf, completions": (
        "/v1/completions",
        {"prompt": ["w1 w2 w3"], "max_tokens": 4, "min_tokens": 4, "ignore_eos": True, "stream": False},
    ),
    "openai client, chat": (
        "/v1/chat/completions",
        {
            "messages": CHAT,
            "temperature": 0.7,
            "top_p": 0.9,
            "frequency_penalty": 0.1,
            "presence_penalty": 0.1,
            "seed": 7,
            "n": 2,
            "max_completion_tokens": 4,
            "user": "u-1",
            "metadata": {"a": "b"},
            "store": False,
            "service_tier": "auto",
            "parallel_tool_calls": True,
            "response_format": {"type": "text"},
        },
    ),
    "evaluation harness, log-likelihood": (
        "/v1/completions",
        {"prompt": [[5, 6, 7, 8]], "max_tokens": 0, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234},
    ),
    "completion that only echoes, twice": (
        "/v1/completions",
        {"prompt": "def f(x):", "max_tokens": 0, "echo": True, "n": 2},
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_request_when_shaped_as_a_known_client_sends_it_then_is_answered_as_that_client_reads_it(
    service: Service, name: str
) -> None:
    route, body = SHAPES[name]
    answer = httpx.post(service.url + route, json={"model": str(service.model), **body}, timeout=120)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        value = answer.json()
        assert len(value["choices"]) == body.get("n", 1)
        assert value["usage"]["completion_tokens"] <= 4 * body.get("n", 1)
        return
    lines = [line for line in answer.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert chunks[-1]["choices"] == []
    kind = "chat.completion.chunk" if "chat" in route else "text_completion"
    assert {chunk["object"] for chunk in chunks} == {kind}
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]] == ["length"]


JUNK = st.none() | st.booleans() | st.integers(-3, 5) | st.floats(-1e6, 1e6) | st.text(max_size=6)
JUNK |= st.lists(st.integers(-2, 9) | st.text(max_size=3), max_size=3)
JUNK |= st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=3), max_size=2)


def or_junk(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly what the schema says."""
    return st.integers(0, 9).flatmap(lambda number: JUNK if number == 0 else good)


PROMPTS = st.text("w123 ", min_size=1, max_size=30) | st.lists(st.integers(0, 60), min_size=1, max_size=40)
PROMPTS |= st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=9), min_size=1, max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool", "x"]),
            "content": or_junk(st.text(max_size=20)),
        }
    ),
    min_size=1,
    max_size=4,
)
FIELDS = {
    "max_tokens": st.integers(0, 4),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 50),
    "min_p": st.floats(0, 1),
    "n": st.integers(1, 3),
    "seed": st.integers(0, 2**31),
    "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=4),
    "min_tokens": st.integers(0, 4),
    "ignore_eos": st.booleans(),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.5, 2),
    "logit_bias": st.dictionaries(st.integers(0, 60).map(str), st.floats(-100, 100), max_size=3),
    "logprobs": st.integers(0, 5) | st.booleans(),
    "top_logprobs": st.integers(0, 5),
    "echo": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.just(USAGE),
    "return_token_ids": st.booleans(),
    "priority": st.integers(-5, 5),
    "user": st.text(max_size=5),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    "tandem_prompt": JUNK,
    "tandem_sources": JUNK,
    "kv_transfer_params": JUNK,
}
OPTIONS = st.fixed_dictionaries({}, optional={name: or_junk(good) for name, good in FIELDS.items()})
REQUESTS = st.tuples(
    st.just("/v1/completions"), st.tuples(st.fixed_dictionaries({"prompt": or_junk(PROMPTS)}), OPTIONS)
)
REQUESTS |= st.tuples(
    st.just("/v1/chat/completions"), st.tuples(st.fixed_dictionaries({"messages": or_junk(MESSAGES)}), OPTIONS)
)


@pytest.mark.parametrize(
    "count",
    [pytest.param(150, id="150 requests"), pytest.param(2000, id="2000 requests", marks=pytest.mark.full)],
)
def test_requests_when_random_then_each_is_answered_or_refused_by_name_and_nothing_is_left(
    service: Service, count: int
) -> None:
    statuses: dict[int, int] = {}
    with httpx.Client(base_url=service.url, timeout=60) as client:

        @settings(
            max_examples=count,
            suppress_health_check=list(HealthCheck),
        )
        @given(REQUESTS)
        def ask(request: tuple[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
            route, (prompt, options) = request
            body = {"max_tokens": 2, **prompt, **options}
            answer = client.post(route, json=body)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code in (200, 400), (answer.status_code, answer.text, body)
            if answer.status_code == 400:
                error = answer.json()["error"]
                assert error["message"], body
                assert error["type"] == "invalid_request_error", (error, body)
            elif body.get("stream") is True:
                assert '"error"' not in answer.text, (answer.text, body)
                assert answer.text.endswith("data: [DONE]\n\n"), (answer.text, body)

        ask()
    assert statuses[200] > count / 5, statuses
    assert statuses[400] > count / 10, statuses
    wait_settled(*service.prefill, *service.decode)
