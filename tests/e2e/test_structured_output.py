"""Constrained answers through proxy, prefill node, NIXL and decode node, of a random model that emits no sense."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import httpx
import openai
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.e2e.test_migration import Stream, run_all, run_and_strike
from tests.support.client import metric
from tests.support.models import checkpoint
from tests.support.reference import random_tokens
from tests.support.restart import start_again
from tests.support.service import Service

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["round", "square"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


def ask(service: Service, **fields: Any) -> httpx.Response:
    body = {"prompt": random_tokens(300, fields.pop("prompt_seed", 61)), "max_tokens": 400, "seed": 3, **fields}
    return httpx.post(service.url + "/v1/completions", json=body, timeout=120)


def check(text: str) -> None:
    Draft202012Validator(SCHEMA).validate(json.loads(text))


def test_answers_when_constrained_then_fit_their_schema_wherever_the_prompt_was_computed(service: Service) -> None:
    before = metric(service.decode[0], "grammar_mask_seconds_count")
    moved = metric(service.decode[0], "transfer_bytes_total")
    response = ask(service, response_format=FORMAT, n=3, logprobs=2, min_tokens=390)
    assert response.status_code == 200, response.text
    for choice in response.json()["choices"]:
        assert choice["finish_reason"] == "stop"
        check(choice["text"])
    assert metric(service.decode[0], "transfer_bytes_total") > moved
    assert metric(service.decode[0], "grammar_mask_seconds_count") > before
    # Again: the prompt is where it is needed, the grammar is kept.
    local = ask(service, guided_json=SCHEMA, ignore_eos=True)
    check(local.json()["choices"][0]["text"])
    free = ask(service)
    with pytest.raises(ValueError, match=r"."):
        check(free.json()["choices"][0]["text"])


def test_openai_client_when_it_asks_for_a_schema_then_its_answer_parses(service: Service) -> None:
    client = openai.OpenAI(base_url=service.url + "/v1", api_key="-", max_retries=0)
    models = client.models.list()
    answer = client.chat.completions.create(
        model=models.data[0].id,
        messages=[{"role": "user", "content": "a thing, please"}],
        response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}},
        max_tokens=400,
        seed=4,
    )
    assert answer.choices[0].message.content is not None
    check(answer.choices[0].message.content)
    stream = client.chat.completions.create(
        model=models.data[0].id,
        messages=[{"role": "user", "content": "one of them"}],
        extra_body={"structured_outputs": {"choice": ["left", "right"]}},
        max_tokens=50,
        stream=True,
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) in ("left", "right")


class Thing(BaseModel):
    name: str = Field(max_length=12)
    kind: Literal["round", "square"]


def test_openai_client_when_it_asks_for_a_model_of_pydantic_then_has_one_from_chat_and_responses(
    service: Service,
) -> None:
    with openai.OpenAI(base_url=service.url + "/v1", api_key="-", max_retries=0) as client:
        model = client.models.list().data[0].id
        messages: Any = [{"role": "user", "content": "a thing, please"}]
        chat = client.chat.completions.parse(model=model, messages=messages, response_format=Thing, max_tokens=300)
        assert isinstance(chat.choices[0].message.parsed, Thing)
        response = client.responses.parse(model=model, input=messages, text_format=Thing, max_output_tokens=300)
        assert isinstance(response.output_parsed, Thing)
        with client.responses.stream(model=model, input=messages, text_format=Thing, max_output_tokens=300) as stream:
            assert isinstance(stream.get_final_response().output_parsed, Thing)


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"guided_json": {"not": {"type": "string"}}}, "guided_json", "not"),
        ({"guided_regex": "a(b"}, "guided_regex", "unclosed group"),
        ({"structured_outputs": {"grammar": 'start: "a" foo'}}, "structured_outputs.grammar", "unknown name"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar", "neither Lark nor GBNF"),
        (
            {"guided_grammar": 'root ::= "a" | [(]\n' + "\n" * 100_000 + "b ::= root c"},
            "guided_grammar",
            "'c' not found",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        pytest.param(
            {"guided_json": {"type": "integer", "multipleOf": 99999989}},
            "guided_json",
            "cannot be compiled",
            marks=pytest.mark.full,  # seconds; as in tests/unit/grammar/test_checker.py
        ),
    ],
)
def test_grammar_when_it_cannot_be_compiled_then_it_is_refused_before_a_prefill_at_proxy_and_node(
    service: Service, fields: dict[str, Any], param: str, why: str
) -> None:
    before = metric(service.prefill[0], "requests_total")
    for url in (service.url, service.decode[0].url):
        response = httpx.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 5, **fields}, timeout=120)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert why in error["message"]
    assert metric(service.prefill[0], "requests_total") == before
    check(ask(service, response_format=FORMAT, prompt_seed=62).json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def moving_service() -> Iterator[Service]:
    """Streams of one of two decode nodes may move to the other."""
    flags = ("--migration-limit", "2")
    with Service(
        checkpoint(FAMILY), prefill_flags=NODE_FLAGS, decode_flags=NODE_FLAGS, proxy_flags=flags, num_decode=2
    ) as running:
        yield running


LONG: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 1500, "maxLength": 2000}, "kind": {"enum": ["a", "b"]}},
    "required": ["text", "kind"],
    "additionalProperties": False,
}


def bodies(salt: str) -> Sequence[dict[str, Any]]:
    """Streams that are within a string for most of their time."""
    return [
        {
            "prompt": random_tokens(40 + 17 * index, 8100 + index),
            "max_tokens": 3000,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": LONG}},
            **({"temperature": 0} if index % 2 else {"temperature": 1.0, "seed": index}),
        }
        for index in range(20)
    ]


@pytest.mark.full
def test_streams_when_their_decode_node_is_killed_within_a_string_then_end_as_if_it_were_not(
    moving_service: Service,
) -> None:
    service = moving_service
    expected = run_all(service.url, [Stream(body) for body in bodies("whole")])
    before = metric(service.proxy, "proxy_migrations_total", outcome="resumed")
    streams = [Stream(body) for body in bodies("cut")]
    run_and_strike(service, streams, service.decode[0], signal.SIGKILL)
    assert metric(service.proxy, "proxy_migrations_total", outcome="resumed") > before
    for stream, other in zip(streams, expected, strict=True):
        stream.assert_like(other)
        Draft202012Validator(LONG).validate(json.loads(stream.text))
    start_again(service, service.decode[0])


@pytest.mark.full
def test_answers_when_constrained_under_preemption_then_are_those_of_enough_memory(
    service: Service, tight_service: Service
) -> None:
    def answers(which: Service) -> list[str]:
        streams = [Stream({**body, "max_tokens": 1200, "prompt": body["prompt"][:40]}) for body in bodies("tight")[:8]]
        return [stream.text for stream in run_all(which.url, streams)]

    before = metric(tight_service.decode[0], "preemptions_total")
    assert answers(tight_service) == answers(service)
    assert metric(tight_service.decode[0], "preemptions_total") > before
