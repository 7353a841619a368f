"""Bad requests get the documented status and an OpenAI-shaped error that names the field, from the proxy and from the
nodes; afterwards nothing is held anywhere and good requests are served as before."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.client import complete, metric, wait_settled
from tests.support.reference import random_tokens
from tests.support.service import Service

PROMPT = random_tokens(24, seed=311)
MESSAGES = [{"role": "user", "content": "Hello"}]
TARGETS = ("proxy", "prefill", "decode")
MAX_MODEL_LEN = 4096


@pytest.fixture(scope="module", autouse=True)
def nothing_leaks(service: Service) -> Iterator[None]:
    before = complete(service.url, PROMPT, 8).token_ids()
    yield
    wait_settled(*service.prefill, *service.decode)
    assert complete(service.url, PROMPT, 8).token_ids() == before


@pytest.fixture(params=TARGETS)
def url(service: Service, request: pytest.FixtureRequest) -> str:
    nodes = {"proxy": service.proxy, "prefill": service.prefill[0], "decode": service.decode[0]}
    return nodes[request.param].url


def send(url: str, route: str, content: bytes | dict[str, Any], **headers: str) -> httpx.Response:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return httpx.post(url + route, content=raw, headers={"Content-Type": "application/json", **headers}, timeout=60)


def check_error(response: httpx.Response, status: int, *, code: str, param: str | None = None) -> str:
    """The one shape of all errors. Returns the message."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert isinstance(error["type"], str)
    assert response.headers["X-Request-Id"]
    return str(error["message"])


BAD_COMPLETION_FIELDS: list[tuple[str, Any]] = [
    ("prompt", None),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", 5),
    ("prompt", {"text": "a"}),
    ("prompt", [1, "a"]),
    ("prompt", [1.5]),
    ("prompt", [True]),
    ("prompt", [-1]),
    ("prompt", [2**40]),
    ("prompt", ["a", 3]),
    ("model", 3),
    ("max_tokens", "8"),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", 0),
    ("max_completion_tokens", True),
    ("min_tokens", 9),
    ("temperature", "hot"),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 0.5),
    ("min_p", 2),
    ("n", 0),
    ("n", "3"),
    ("n", 129),
    ("seed", "x"),
    ("stop", 5),
    ("stop", [""]),
    ("stop", ["a"] * 17),
    ("stop_token_ids", "5"),
    ("stop_token_ids", [1.0]),
    ("ignore_eos", "yes"),
    ("presence_penalty", 3),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0),
    ("logit_bias", [1]),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "1"}),
    ("logprobs", True),
    ("logprobs", 21),
    ("echo", 1),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("skip_special_tokens", 0),
    ("return_token_ids", "no"),
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("priority", "high"),
]
BAD_CHAT_FIELDS: list[tuple[str, Any]] = [
    ("messages", None),
    ("messages", []),
    ("messages", "Hello"),
    ("messages", [{"content": "no role"}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", ["Hello"]),
    ("tools", {}),
    ("tools", ["a"]),
    ("logprobs", 2),
    ("top_logprobs", 2),
    ("max_tokens", 0),
    ("add_generation_prompt", "yes"),
    ("chat_template_kwargs", []),
]
UNBUILT_FIELDS: list[tuple[str, Any]] = [
    ("functions", [{"name": "f"}]),
    ("guided_wat", {}),
    ("best_of", 2),
    ("suffix", "end"),
    ("logits_processors", ["x"]),
]


@pytest.mark.parametrize(("field", "value"), BAD_COMPLETION_FIELDS, ids=repr)
def test_completion_field_of_wrong_type_or_range_when_sent_then_is_400_and_named(
    service: Service, field: str, value: Any
) -> None:
    response = send(service.url, "/v1/completions", {"prompt": PROMPT, "max_tokens": 8, field: value})
    message = check_error(response, 400, code="invalid_value", param=field)
    assert field in message


@pytest.mark.parametrize(("field", "value"), BAD_CHAT_FIELDS, ids=repr)
def test_chat_field_of_wrong_type_or_range_when_sent_then_is_400_and_named(
    service: Service, field: str, value: Any
) -> None:
    response = send(service.url, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8, field: value})
    assert response.status_code == 400, response.text
    param = response.json()["error"]["param"]
    assert param == field or re.match(rf"{field}[.\[]", param), param


@pytest.mark.parametrize(("field", "value"), UNBUILT_FIELDS, ids=repr)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_recognised_field_that_is_not_built_when_sent_then_is_400_and_named(
    service: Service, route: str, field: str, value: Any
) -> None:
    prompt = {"messages": MESSAGES} if "chat" in route else {"prompt": PROMPT}
    response = send(service.url, route, {**prompt, "max_tokens": 8, field: value})
    message = check_error(response, 400, code="unsupported_parameter", param=field)
    assert "not supported" in message


@pytest.mark.parametrize("field", ["prompt", "temperature", "n", "logprobs", "response_format"])
def test_bad_field_when_sent_to_any_process_then_is_400_and_named(url: str, field: str) -> None:
    response = send(url, "/v1/completions", {"prompt": PROMPT, field: "" if field == "prompt" else {"type": "x"}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_unknown_field_when_sent_then_is_ignored(service: Service) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "no_such_field": {"a": 1}, "user": "me", "model": None}
    assert send(service.url, "/v1/completions", body).status_code == 200


def test_unknown_model_when_named_then_is_404(url: str) -> None:
    for route in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        response = send(url, route, {"model": "nobody", "prompt": "a", "messages": MESSAGES})
        message = check_error(response, 404, code="model_not_found", param="model")
        assert "nobody" in message


@pytest.mark.parametrize(
    ("num_prompt_tokens", "fields", "param", "numbers"),
    [
        (4000, {"max_tokens": 97}, "max_tokens", ("4000", "97", "4097", "4096")),
        (4096, {}, "prompt", ("4096",)),
        (4097, {"max_tokens": 1}, "prompt", ("4097", "4096")),
        (4097, {"max_tokens": 0, "echo": True}, "prompt", ("4097", "4096")),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_and_max_tokens_when_over_the_context_then_is_400_with_both_numbers(
    service: Service, num_prompt_tokens: int, fields: dict[str, Any], param: str, numbers: tuple[str, ...], stream: bool
) -> None:
    body = {"prompt": random_tokens(num_prompt_tokens, seed=312), "stream": stream, **fields}
    for url in (service.url, service.decode[0].url):
        message = check_error(send(url, "/v1/completions", body), 400, code="context_length_exceeded", param=param)
        assert set(numbers) <= set(re.findall(r"\d+", message)), message


def test_token_id_beyond_the_vocabulary_when_sent_then_is_400_with_both_numbers(url: str) -> None:
    for field, value in (("prompt", [6, 512]), ("stop_token_ids", [600]), ("logit_bias", {"512": 1})):
        body = {"prompt": PROMPT, "max_tokens": 4, field: value}
        message = check_error(send(url, "/v1/completions", body), 400, code="invalid_value", param=field)
        assert "512" in message


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"prompt": "a",}', "line 1 column"),
        (b'{"prompt": NaN}', "NaN"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 12"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b"[1, 2]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested deeper"),
    ],
    ids=lambda value: repr(value)[:40],
)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_body_that_is_no_json_object_when_sent_then_is_400(url: str, route: str, raw: bytes, words: str) -> None:
    message = check_error(send(url, route, raw), 400, code="invalid_json")
    assert words in message


def test_body_over_the_limit_when_declared_then_is_413(url: str) -> None:
    body = {"prompt": "a" * (16 * 2**20), "max_tokens": 1}
    message = check_error(send(url, "/v1/completions", body), 413, code="body_too_large")
    assert str(16 * 2**20) in message


def test_body_over_the_limit_when_sent_in_chunks_then_is_413(url: str) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(17):
            yield b"a" * 2**20
        yield b'"}'

    response = httpx.post(
        url + "/v1/completions", content=chunks(), headers={"Content-Type": "application/json"}, timeout=60
    )
    check_error(response, 413, code="body_too_large")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/nothing", 404)],
)
def test_unknown_route_or_method_when_asked_then_is_an_openai_shaped_error(
    url: str, method: str, path: str, status: int
) -> None:
    response = httpx.request(method, url + path)
    check_error(response, status, code="not_found" if status == 404 else "method_not_allowed")


def test_request_id_when_given_then_comes_back_and_a_bad_one_is_replaced(url: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    assert send(url, "/v1/completions", body, **{"X-Request-Id": "mine-1"}).headers["X-Request-Id"] == "mine-1"
    replaced = send(url, "/v1/completions", body, **{"X-Request-Id": "not a word!"}).headers["X-Request-Id"]
    assert re.fullmatch(r"[A-Za-z0-9._:\-]{1,128}", replaced)


def test_error_answers_when_counted_then_are_rejections_and_no_prompt_was_computed(service: Service) -> None:
    nodes = (*service.prefill, *service.decode)
    computed = [metric(node, "prompt_tokens_total", source="computed") for node in nodes]
    rejected = metric(service.proxy, "requests_total", outcome="rejected")
    for body in ({"prompt": PROMPT, "temperature": 9}, {"prompt": PROMPT, "model": "nobody"}, {"prompt": ""}):
        assert send(service.url, "/v1/completions", body).status_code in (400, 404)
    assert metric(service.proxy, "requests_total", outcome="rejected") == rejected + 3
    assert [metric(node, "prompt_tokens_total", source="computed") for node in nodes] == computed


def test_tokenize_and_detokenize_when_joined_then_give_the_text_back(url: str) -> None:
    text = "Grüße, 世界! The fox."
    answer = send(url, "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) > 5
    assert answer["max_model_len"] == MAX_MODEL_LEN
    assert send(url, "/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}
    chat = send(url, "/tokenize", {"messages": MESSAGES}).json()
    assert chat["count"] == len(chat["tokens"]) > 3
    check_error(send(url, "/tokenize", {}), 400, code="invalid_value", param="prompt")
    check_error(send(url, "/detokenize", {"tokens": [512]}), 400, code="invalid_value", param="tokens")


def test_version_when_asked_then_names_the_installed_packages(url: str) -> None:
    versions = httpx.get(url + "/version").json()
    assert set(versions) == {"tandem", "torch", "transformers", "nixl"}
    assert versions["transformers"].startswith("5.23.")
