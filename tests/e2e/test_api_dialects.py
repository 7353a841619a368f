"""The official ``openai`` and ``anthropic`` clients, unmodified, on ``/v1/responses`` and ``/v1/messages``."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from common.wire.routes import CHAT_ROUTE, COUNT_TOKENS_ROUTE, MESSAGES_ROUTE, RESPONSES_ROUTE, TOKENIZE_ROUTE
from tests.support.client import metric, post
from tests.support.service import ROOT, Service

ENDLESS = {"ignore_eos": True}
QUESTION = "What is a socket? Answer in a dialect."
SYSTEM = "You are brief. " * 40
EXAMPLES = re.findall(
    r"    (curl .*?-d '\n.*?)'\n", Path(ROOT, "docs/dialects.md").read_text(encoding="utf-8"), re.DOTALL
)


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=service.url + "/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def claude(service: Service) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=service.url, api_key="unused", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def chat(service: Service, messages: list[dict[str, Any]], num_tokens: int = 12, **fields: Any) -> dict[str, Any]:
    """The same as a chat: text and usage."""
    body = {"messages": messages, "temperature": 0, "max_tokens": num_tokens, **ENDLESS, **fields}
    return post(service.url, CHAT_ROUTE, body)


def test_response_when_created_then_is_the_chats_answer_in_the_clients_types(
    client: openai.OpenAI, model: str, service: Service
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    expected = chat(service, messages)
    answer = client.responses.create(
        model=model,
        instructions="Be brief.",
        input=QUESTION,
        temperature=0,
        max_output_tokens=12,
        metadata={"purpose": "test"},
        extra_body=ENDLESS,
        extra_headers={"X-Tandem-Trace": "1"},
    )
    assert answer.output_text == expected["choices"][0]["message"]["content"]
    assert (answer.status, answer.model, answer.metadata) == ("incomplete", model, {"purpose": "test"})
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (expected["usage"]["prompt_tokens"], 12)
    assert answer.usage.input_tokens_details.cached_tokens == answer.usage.input_tokens  # the chat had computed it
    assert answer.model_extra is not None
    assert answer.model_extra["store"] is False
    assert answer.model_extra["tandem"]["placement"] in ("local", "remote")


def test_response_when_streamed_with_the_helper_then_ends_with_the_same_text(
    client: openai.OpenAI, model: str, service: Service
) -> None:
    expected = chat(service, [{"role": "user", "content": QUESTION}])["choices"][0]["message"]["content"]
    fields: dict[str, Any] = {"temperature": 0, "max_output_tokens": 12, "extra_body": ENDLESS}
    with client.responses.stream(model=model, input=QUESTION, **fields) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected
    assert len(deltas) > 1
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == expected
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 12
    raw = list(client.responses.create(model=model, input=QUESTION, stream=True, **fields))
    assert [event.type for event in raw] == [event.type for event in events]
    assert [event.sequence_number for event in raw] == list(range(len(raw)))


def test_responses_output_when_sent_back_as_input_then_the_next_turn_resumes(client: openai.OpenAI, model: str) -> None:
    conversation: list[Any] = [{"role": "user", "content": "Tell me of a turn taken twice. " * 10}]
    fields: dict[str, Any] = {"temperature": 0, "max_output_tokens": 16, "extra_body": ENDLESS}
    first = client.responses.create(model=model, input=conversation, **fields)
    conversation += [*(item.to_dict() for item in first.output), {"role": "user", "content": "And then?"}]
    second = client.responses.create(model=model, input=conversation, **fields)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens
    # As far as the random model's text gives its tokens back.
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_bad_response_field_when_sent_then_client_raises_bad_request_with_its_name(
    client: openai.OpenAI, model: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=model, input="a", previous_response_id="resp_1", stream=stream)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as caught:  # found by the node, which knows of messages only
        client.responses.create(model=model, input="word " * 9000, stream=stream)
    assert caught.value.param == "input"
    assert "This model's maximum context length is" in caught.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="no-such-model", input="a", stream=stream)
    assert missing.value.code == "model_not_found"


def test_message_when_created_then_is_the_chats_answer_in_the_clients_types(
    claude: anthropic.Anthropic, model: str, service: Service
) -> None:
    expected = chat(service, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}])
    system: list[Any] = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    before = metric(service.proxy, "requests_total", route="messages", outcome="length")
    message = claude.messages.create(
        model=model,
        max_tokens=12,
        system=system,
        messages=[{"role": "user", "content": QUESTION}],
        extra_body={**ENDLESS, "temperature": 0},
    )
    [block] = message.content
    assert block.type == "text"
    assert block.text == expected["choices"][0]["message"]["content"]
    assert (message.stop_reason, message.role, message.model) == ("max_tokens", "assistant", model)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens) == (0, 0)
    assert usage.cache_read_input_tokens == expected["usage"]["prompt_tokens"]
    assert usage.output_tokens == 12
    assert metric(service.proxy, "requests_total", route="messages", outcome="length") == before + 1


def test_marked_system_when_asked_about_again_then_is_read_from_the_cache(
    claude: anthropic.Anthropic, model: str
) -> None:
    system: list[Any] = [
        {"type": "text", "text": "Rules of a house by the sea. " * 30, "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Today: Monday."},
    ]

    def ask(last: str) -> anthropic.types.Usage:
        blocks: list[Any] = [system[0], {"type": "text", "text": last}]
        return claude.messages.create(
            model=model, max_tokens=1, system=blocks, messages=[{"role": "user", "content": "Hi"}]
        ).usage

    first, second = ask("Today: Monday."), ask("Today it is Tuesday.")
    assert (first.input_tokens, first.cache_read_input_tokens) == (0, 0)
    assert first.cache_creation_input_tokens is not None
    assert second.cache_read_input_tokens is not None
    # All of the marked text, a recurrent state included, though what follows is another text.
    assert second.cache_read_input_tokens > 0.8 * first.cache_creation_input_tokens


def test_message_when_streamed_with_the_helper_then_ends_with_the_same_text(
    claude: anthropic.Anthropic, model: str, service: Service
) -> None:
    expected = chat(service, [{"role": "user", "content": QUESTION}])
    text = expected["choices"][0]["message"]["content"]
    with claude.messages.stream(
        model=model,
        max_tokens=12,
        messages=[{"role": "user", "content": QUESTION}],
        extra_body={**ENDLESS, "temperature": 0},
    ) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert "".join(event.text for event in events if event.type == "text") == text
    [start] = [event.message.usage for event in events if event.type == "message_start"]
    assert start.input_tokens + (start.cache_read_input_tokens or 0) == expected["usage"]["prompt_tokens"]
    assert final.content[0].type == "text"
    assert final.content[0].text == text
    assert final.stop_reason == "max_tokens"
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == expected["usage"]["prompt_tokens"]


def test_stop_sequence_when_it_comes_then_is_named(claude: anthropic.Anthropic, model: str, service: Service) -> None:
    text = chat(service, [{"role": "user", "content": QUESTION}], 24)["choices"][0]["message"]["content"]
    stop = text[len(text) // 2 :][:3]
    message = claude.messages.create(
        model=model,
        max_tokens=24,
        stop_sequences=[stop],
        messages=[{"role": "user", "content": QUESTION}],
        extra_body={**ENDLESS, "temperature": 0},
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].type == "text"
    assert message.content[0].text == text[: text.index(stop)]


def test_tokens_when_counted_then_are_the_chats(claude: anthropic.Anthropic, model: str, service: Service) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    counted = claude.messages.count_tokens(model=model, system=SYSTEM, messages=messages)
    body = {"messages": [{"role": "system", "content": SYSTEM}, *messages]}
    assert counted.input_tokens == post(service.url, TOKENIZE_ROUTE, body)["count"]
    longer = claude.messages.count_tokens(model=model, system=SYSTEM + "More.", messages=messages)
    assert longer.input_tokens > counted.input_tokens


def test_bad_message_field_when_sent_then_client_raises_bad_request_with_its_words(
    claude: anthropic.Anthropic, model: str
) -> None:
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
    for call in (
        lambda: claude.messages.create(model=model, max_tokens=9, messages=[{"role": "user", "content": [image]}]),
        lambda: claude.messages.count_tokens(model=model, messages=[{"role": "user", "content": [image]}]),
    ):
        with pytest.raises(anthropic.BadRequestError) as caught:
            call()
        body: Any = caught.value.body
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        assert "messages[0].content[0].image_url.url: this model takes no images" in body["error"]["message"]
        assert body["request_id"] == caught.value.request_id
    for text, max_tokens, words in (
        ("word " * 9000, 9, r"prompt is too long: \d+ tokens > \d+ maximum"),
        ("a", 100_000, r"input length and `max_tokens` exceed context limit: \d+ \+ 100000 > \d+"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=words):
            claude.messages.create(model=model, max_tokens=max_tokens, messages=[{"role": "user", "content": text}])
    for call in (
        lambda: claude.messages.create(model="x", max_tokens=9, messages=[{"role": "user", "content": "a"}]),
        lambda: claude.messages.count_tokens(model="x", messages=[{"role": "user", "content": "a"}]),
    ):
        with pytest.raises(anthropic.NotFoundError):
            call()


def test_body_that_is_no_json_when_sent_then_error_has_the_shape_of_the_api(service: Service) -> None:
    answer = httpx.post(service.url + MESSAGES_ROUTE, content=b"{", timeout=30)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_of_the_docs_when_run_then_is_answered(service: Service, example: str) -> None:
    command = example.replace("http://127.0.0.1:8000", service.url) + "'"
    said = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True).stdout
    answer = json.loads(said)
    assert answer.get("object") == "response" or answer.get("type") == "message" or answer["input_tokens"] > 0, said


def test_examples_of_the_docs_are_found() -> None:
    assert [example.split()[2].removeprefix("http://127.0.0.1:8000") for example in EXAMPLES] == [
        RESPONSES_ROUTE,
        RESPONSES_ROUTE,
        MESSAGES_ROUTE,
        COUNT_TOKENS_ROUTE,
    ]
