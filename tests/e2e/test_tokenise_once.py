"""The proxy tokenises, the nodes do not, and nobody can tell the difference by the answers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.client import metric, post
from tests.support.http_server import wait_for
from tests.support.service import Node, Service

SYSTEM = "You are an assistant of few words, and you know the sea, its ships and its weather. " * 3
MESSAGES = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "Which ship is the oldest one in the harbour? " * 3},
    {"role": "assistant", "content": "The grey one, built before the war, and painted twice since. " * 2},
    {"role": "user", "content": "And the newest?"},
]
CHAT = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, "return_token_ids": True}


@pytest.fixture(scope="module", autouse=True)
def has_tokenizer(service: Service) -> None:
    def is_there() -> bool:
        post(service.url, "/v1/completions", {"prompt": "warm up", "max_tokens": 1})
        return metric(service.proxy, "prompts_tokenised_total") > 0

    wait_for(is_there, "the proxy to have the tokenizer")


def tokenised(service: Service) -> list[float]:
    nodes = (service.proxy, *service.prefill, *service.decode)
    return [metric(node, "prompts_tokenised_total") for node in nodes]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/v1/completions", {"prompt": SYSTEM, "max_tokens": 4}),
        ("/v1/completions", {"prompt": SYSTEM * 8, "max_tokens": 4}),
    ],
    ids=["chat", "stream", "text", "long"],
)
def test_request_when_the_proxy_has_the_tokenizer_then_no_node_tokenises(
    service: Service, route: str, body: dict[str, Any]
) -> None:
    before = tokenised(service)
    assert httpx.post(service.url + route, json=body, timeout=60).status_code == 200
    assert [new - old for new, old in zip(tokenised(service), before, strict=True)] == [1, 0, 0]


def test_chat_when_tokenised_by_the_proxy_then_answer_and_kept_states_are_those_of_a_node_that_tokenises(
    service: Service,
) -> None:
    prefill = service.prefill[0]

    def ask(url: str, salt: str) -> tuple[dict[str, Any], float]:
        before = saved_boundaries(prefill)
        return post(url, "/v1/chat/completions", {**CHAT, "cache_salt": salt}), saved_boundaries(prefill) - before

    through_proxy, num_saved = ask(service.url, "tokenised by the proxy")
    direct, num_saved_direct = ask(prefill.url, "tokenised by the node")
    assert through_proxy["choices"] == direct["choices"]
    assert through_proxy["usage"] == direct["usage"]
    assert num_saved == num_saved_direct >= 3


def saved_boundaries(node: Node) -> float:
    return metric(node, "checkpoints_total", event="saved", reason="semantic")


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"tokenize": False}}),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"conversations": 1}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "far too long " * 9000}]}),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 5000}),
        ("/v1/completions", {"prompt": "far too long " * 9000}),
        ("/v1/completions", {"prompt": "far too long " * 900, "max_tokens": 4000}),
        ("/v1/completions", {"prompt": [1, 2, 99_999]}),
        ("/v1/chat/completions", {"tandem_prompt": {"token_ids": [1, 2]}, "max_tokens": 2}),
    ],
)
def test_request_when_refused_then_the_client_hears_the_nodes_own_words(
    service: Service, route: str, body: dict[str, Any]
) -> None:
    through_proxy = httpx.post(service.url + route, json=body, timeout=60)
    direct = httpx.post(service.decode[0].url + route, json=body, timeout=60)
    if "tandem_prompt" in body:  # without a cluster key a node takes it from anybody
        assert direct.status_code == 200
        assert (through_proxy.status_code, through_proxy.json()["error"]["param"]) == (400, "messages")
        return
    assert (through_proxy.status_code, through_proxy.json()) == (direct.status_code, direct.json())
    assert direct.status_code == 400


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "tandem_prompt"),
        ({}, "tandem_prompt.token_ids"),
        ({"token_ids": [1, -1]}, "tandem_prompt.token_ids"),
        ({"token_ids": [1, 99_999]}, "tandem_prompt.token_ids"),
        ({"token_ids": [1, 2], "boundaries": [3]}, "tandem_prompt.boundaries"),
        ({"token_ids": [1] * 9, "boundaries": [1, 2, 3, 4, 5, 6, 7]}, "tandem_prompt.boundaries"),
    ],
)
def test_tandem_prompt_when_it_is_wrong_then_400_names_the_key(service: Service, prompt: object, param: str) -> None:
    answer = httpx.post(service.decode[0].url + "/v1/chat/completions", json={"tandem_prompt": prompt})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
