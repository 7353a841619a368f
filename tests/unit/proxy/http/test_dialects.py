"""Responses and Messages through a real proxy: what a scripted node says, read by the ``openai`` and ``anthropic``
clients and by an agent framework, all unmodified."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from pydantic_ai import Agent
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from common.errors import ContextLengthError, ContextOverflow, InvalidRequestError
from common.wire.routes import CHAT_ROUTE, MESSAGES_ROUTE, RESPONSES_ROUTE
from tests.support.http_server import AppServer, wait_for
from tests.unit.proxy.conftest import Cluster, StartCluster
from tests.unit.proxy.dialects.chats import CHATS, Call, Chat
from tests.unit.proxy.dialects.scripted_node import ScriptedNode

HELLO: Any = [{"role": "user", "content": "Hello"}]
MODEL = "fake"


@pytest.fixture
def node() -> Iterator[ScriptedNode]:
    scripted = ScriptedNode("scripted")
    server = AppServer(scripted.app())
    scripted.port = server.port
    yield scripted
    server.stop()


@pytest.fixture
def cluster(node: ScriptedNode, start_cluster: StartCluster) -> Cluster:
    return start_cluster(0, 0, more_decode=[f"http://127.0.0.1:{node.port}"], connect_timeout_seconds=20)


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.client.base_url}/v1", api_key="-", max_retries=0, timeout=20) as made:
        yield made


@pytest.fixture
def claude(cluster: Cluster) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=str(cluster.client.base_url), api_key="-", max_retries=0, timeout=20) as made:
        yield made


# --- openai


def test_response_stream_when_the_model_reasons_and_calls_then_the_helper_has_all_of_it(
    client: openai.OpenAI, node: ScriptedNode
) -> None:
    chat = CHATS["all"]
    node.chats = [chat, chat]
    with client.responses.stream(model=MODEL, input="Weather?") as stream:
        final = stream.get_final_response()
    assert final.output_text == chat.content
    assert [(item.call_id, item.arguments) for item in final.output if item.type == "function_call"] == [
        (call.id, call.arguments) for call in chat.calls
    ]
    whole = client.responses.create(model=MODEL, input="Weather?")
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in final.output] == [item.type for item in whole.output] == kinds
    assert node.received[-1].path == CHAT_ROUTE


def test_response_stream_when_its_node_fails_then_ends_with_failed(
    client: openai.OpenAI, node: ScriptedNode, cluster: Cluster
) -> None:
    node.chats, node.fails_after = [CHATS["text"]], 4
    *_, last = client.responses.create(model=MODEL, input="a", stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "out of luck"
    wait_for(lambda: _count(cluster, "responses", "error") == 1, "the request to be counted")


# --- anthropic


def test_message_stream_when_the_model_reasons_and_calls_then_the_helper_has_all_of_it(
    claude: anthropic.Anthropic, node: ScriptedNode, cluster: Cluster
) -> None:
    chat = CHATS["all"]
    node.chats = [chat, chat]
    fields: Any = {"model": MODEL, "max_tokens": 20, "messages": HELLO}
    with claude.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    whole = claude.messages.create(**fields)
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert final.usage.to_dict() == whole.usage.to_dict()
    assert final.stop_reason == "tool_use"
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    wait_for(lambda: _count(cluster, "messages", "stop") == 2, "both requests to be counted")


def test_message_stream_when_its_node_fails_then_the_client_raises_its_words(
    claude: anthropic.Anthropic, node: ScriptedNode
) -> None:
    node.chats, node.fails_after = [CHATS["text"]], 4
    with pytest.raises(anthropic.APIStatusError, match="out of luck"):
        list(claude.messages.create(model=MODEL, max_tokens=20, messages=HELLO, stream=True))


def test_batches_when_asked_for_then_the_client_knows_what_failed(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no route for POST /v1/messages/batches") as caught:
        claude.messages.batches.create(requests=[])
    assert caught.value.request_id


def test_nodes_refusal_when_passed_on_then_names_the_fields_of_the_api(
    claude: anthropic.Anthropic, client: openai.OpenAI, node: ScriptedNode
) -> None:
    node.error = InvalidRequestError("max_completion_tokens must be less", param="max_completion_tokens")
    with pytest.raises(anthropic.BadRequestError, match="max_tokens must be less"):
        claude.messages.create(model=MODEL, max_tokens=20, messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="max_output_tokens must be less") as caught:
        client.responses.create(model=MODEL, input="a")
    assert caught.value.param == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_nodes_refusal_of_what_the_context_does_not_hold_when_passed_on_then_each_client_finds_its_words(
    claude: anthropic.Anthropic, client: openai.OpenAI, node: ScriptedNode, stream: bool
) -> None:
    node.error = ContextLengthError("messages", ContextOverflow(800, 700, 200), answer_field="max_completion_tokens")
    words = r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)"  # as Claude Code looks for
    with pytest.raises(anthropic.BadRequestError, match=words):
        claude.messages.create(model=MODEL, max_tokens=200, messages=HELLO, stream=stream)
    for ask in (
        lambda: client.responses.create(model=MODEL, input="a", stream=stream),
        lambda: client.chat.completions.create(model=MODEL, messages=HELLO, stream=stream),
    ):
        with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 800 tokens") as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [
        (b'{"error": "Unauthorized"}', "application/json", "Unauthorized"),
        (b'{"detail": "Not authenticated"}', "application/json", "Not authenticated"),
        (b'{"detail": [{"loc": ["body"]}]}', "application/json", "the node answers 401"),
        (b"[1]", "application/json", "the node answers 401"),
        (b"<html>401 Authorization Required</html>", "text/html", "the node answers 401"),
    ],
)
@pytest.mark.parametrize("route", [RESPONSES_ROUTE, MESSAGES_ROUTE])
def test_nodes_refusal_when_it_has_a_shape_of_its_own_then_has_its_status_in_that_of_the_api(
    cluster: Cluster, node: ScriptedNode, route: str, body: bytes, content_type: str, message: str
) -> None:
    node.refusal = (401, body, content_type)
    asked = {"input": "a"} if route == RESPONSES_ROUTE else {"messages": HELLO, "max_tokens": 5}
    answer = cluster.client.post(route, json=asked)
    assert (answer.status_code, answer.headers["content-type"]) == (401, "application/json")
    error = answer.json()["error"]
    assert (error["type"], error["message"]) == ("authentication_error", message)


BROKEN = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
FORMAT = {"type": "json_schema", "schema": BROKEN}


@pytest.mark.parametrize(
    ("route", "fields", "name"),
    [
        (RESPONSES_ROUTE, {"text": {"format": {**FORMAT, "name": "n"}}}, "text.format.schema"),
        (RESPONSES_ROUTE, {"text": {"format": {"type": "json_object", "schema": BROKEN}}}, "text.format.schema"),
        (RESPONSES_ROUTE, {"guided_grammar": "root ::= ("}, "guided_grammar"),
        (
            RESPONSES_ROUTE,
            {"tools": [{"type": "function", "name": "f", "parameters": BROKEN, "strict": True}]},
            "tools",
        ),
        (MESSAGES_ROUTE, {"output_config": {"format": FORMAT}}, "output_config.format.schema"),
        (MESSAGES_ROUTE, {"output_format": FORMAT}, "output_format.schema"),
        (MESSAGES_ROUTE, {"tools": [{"name": "f", "input_schema": BROKEN, "strict": True}]}, "tools"),
    ],
)
def test_grammar_when_it_cannot_be_compiled_then_is_refused_by_the_name_of_the_field_that_was_sent(
    cluster: Cluster, node: ScriptedNode, route: str, fields: dict[str, Any], name: str
) -> None:
    body = {"input": "a"} if route == RESPONSES_ROUTE else {"messages": HELLO, "max_tokens": 5}
    answer = cluster.client.post(route, json=body | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["message"].startswith(f"{name} "), error
    assert error.get("param", name) == name
    assert not node.received


@pytest.mark.parametrize(
    ("route", "param", "message", "told"),
    [
        (
            RESPONSES_ROUTE,
            "tools[1].function.parameters",
            "tools[1].function.parameters makes a grammar of 9 characters",
            "tools[1].parameters makes",
        ),
        (MESSAGES_ROUTE, "tools[1].function.parameters", "tools[1].function.parameters is", "tools[1].input_schema is"),
        (RESPONSES_ROUTE, "min_tokens", "min_tokens is above max_completion_tokens 5", "above max_output_tokens 5"),
        (MESSAGES_ROUTE, "min_tokens", "min_tokens is above max_completion_tokens 5", "above max_tokens 5"),
    ],
)
def test_nodes_refusal_when_it_names_a_deeper_or_another_field_then_that_is_named_as_it_was_sent(
    cluster: Cluster, node: ScriptedNode, route: str, param: str, message: str, told: str
) -> None:
    node.error = InvalidRequestError(message, param=param)
    answer = cluster.client.post(route, json={"input": "a", "messages": HELLO, "max_tokens": 5})
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


def test_api_key_when_sent_as_either_client_does_then_lets_in_and_goes_to_the_nodes_as_one(
    node: ScriptedNode, start_cluster: StartCluster, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-a\n")
    cluster = start_cluster(
        0, 0, more_decode=[f"http://127.0.0.1:{node.port}"], api_key_file=keys, connect_timeout_seconds=20
    )
    url = str(cluster.client.base_url)
    node.chats = [CHATS["text"]] * 2
    with anthropic.Anthropic(base_url=url, api_key="key-a", max_retries=0) as claude:
        claude.messages.create(model=MODEL, max_tokens=20, messages=HELLO)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="key-a", max_retries=0) as client:
        client.responses.create(model=MODEL, input="a")
    assert [received.headers["authorization"] for received in node.received] == ["Bearer key-a"] * 2
    other = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
    with other, pytest.raises(anthropic.AuthenticationError) as caught:
        other.messages.create(model=MODEL, max_tokens=20, messages=HELLO)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["type"] == "authentication_error"
    assert caught.value.request_id == caught.value.body["request_id"]


@pytest.mark.parametrize(
    ("method", "path", "key", "status", "kind"),
    [
        ("GET", "", "key-a", 405, "invalid_request_error"),
        ("DELETE", "/count_tokens", "key-a", 405, "invalid_request_error"),
        ("POST", "/batches", "key-a", 404, "not_found_error"),
        ("GET", "/batches/msgbatch_1/results", "key-a", 404, "not_found_error"),
        ("POST", "/batches", "wrong", 401, "authentication_error"),
        ("POST", "/count_tokens", "wrong", 401, "authentication_error"),
    ],
)
def test_messages_path_when_it_is_not_served_then_the_error_has_the_shape_of_the_api(
    start_cluster: StartCluster, tmp_path: Path, method: str, path: str, key: str, status: int, kind: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-a\n")
    http = start_cluster(api_key_file=str(keys)).client
    given = {"X-Api-Key": key, "X-Request-Id": "mine"}
    answer = http.request(method, MESSAGES_ROUTE + path, headers=given)
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert set(body) == {"type", "error", "request_id"}
    assert set(body["error"]) == {"type", "message"}
    assert answer.headers["request-id"] == answer.headers["X-Request-Id"] == body["request_id"] == "mine"
    assert (answer.headers.get("Allow") == "POST") == (status == 405)
    other = http.request(method, "/v1/messagesother", headers=given)
    assert "request-id" not in other.headers


@pytest.mark.parametrize("route", [RESPONSES_ROUTE, MESSAGES_ROUTE])
def test_clients_transfer_fields_when_sent_in_a_dialect_then_go_nowhere(
    cluster: Cluster, node: ScriptedNode, route: str
) -> None:
    node.chats = [CHATS["text"]]
    body = {"input": "a", "max_tokens": 5, "messages": HELLO, "kv_transfer_params": {"do_remote_prefill": True}}
    body |= {"tandem_sources": [{"url": "http://127.0.0.1:1"}], "unheard_of": 1}
    assert cluster.client.post(route, json=body).status_code == 200
    assert not {"kv_transfer_params", "tandem_sources"} & node.bodies[-1].keys()


# --- an agent


@contextlib.asynccontextmanager
async def _model(api: str, url: str) -> AsyncIterator[Model]:
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0) as claude,
    ):
        if api == "messages":
            yield AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=claude))
        else:
            kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
            yield kind(MODEL, provider=OpenAIProvider(openai_client=client))


async def _read(_: object, events: AsyncIterable[object]) -> None:
    """With it an agent streams."""
    async for _event in events:
        pass


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.asyncio
async def test_agent_when_it_calls_three_tools_in_two_turns_then_their_results_reach_the_model(
    cluster: Cluster, node: ScriptedNode, api: str, is_stream: bool
) -> None:
    turns = [
        Chat(
            reasoning="two first",
            calls=(Call("call_1", "height", '{"city": "Bern"}'), Call("call_2", "height", '{"city": "Chur"}')),
            finish_reason="tool_calls",
        ),
        Chat(content="Now.", calls=(Call("call_3", "subtract", '{"a": 593, "b": 540}'),), finish_reason="tool_calls"),
        Chat(content="53 metres."),
    ]
    node.chats = list(turns)
    agent = Agent(instructions="Use tools.")

    @agent.tool_plain
    def height(city: str) -> int:
        """Metres above the sea."""
        return {"Bern": 540, "Chur": 593}[city]

    @agent.tool_plain
    def subtract(a: int, b: int) -> int:
        """``a`` less ``b``."""
        return a - b

    question = "How much higher is Chur?"
    async with _model(api, str(cluster.client.base_url)) as model:
        result = await agent.run(question, model=model, event_stream_handler=_read if is_stream else None)
    said, usage = result.output, result.usage
    assert [bool(body.get("stream")) for body in node.bodies] == [is_stream] * 3
    assert said == "53 metres."
    assert (usage.requests, usage.tool_calls) == (3, 3)
    assert (usage.input_tokens, usage.cache_read_tokens) == (120, 72)
    messages = node.bodies[-1]["messages"]
    assert [(each["tool_call_id"], each["content"]) for each in messages if each["role"] == "tool"] == [
        ("call_1", "540"),
        ("call_2", "593"),
        ("call_3", "53"),
    ]
    made = [each for each in messages if each["role"] == "assistant"]
    assert [[call["id"] for call in each["tool_calls"]] for each in made] == [["call_1", "call_2"], ["call_3"]]
    assert [json.loads(call["function"]["arguments"]) for each in made for call in each["tool_calls"]] == [
        json.loads(call.arguments) for turn in turns for call in turn.calls
    ]
    assert made[1]["content"] == "Now."
    if api != "chat":
        assert made[0]["reasoning_content"] == "two first"
    assert [tool["function"]["name"] for tool in node.bodies[0]["tools"]] == ["height", "subtract"]


def _count(cluster: Cluster, route: str, outcome: str) -> float:
    return cluster.metric("tandem_requests_total", route=route, outcome=outcome)
