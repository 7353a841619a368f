"""``/v1/messages`` as a converter: bodies become chats, chats' answers become Messages, of which the ``anthropic``
client's own types are the measure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from common.errors import ContextLengthError, ContextOverflow, InvalidRequestError, QueueFullError, TandemError
from common.models.synthetic import build_tokenizer
from common.openai.errors import error_body, error_response
from common.openai.protocol import parse_chat
from common.text.tokenizer import TextCodec
from proxy.dialects.dialect import convert_messages
from proxy.dialects.messages.answer import MessagesConversion, shape_error
from proxy.dialects.messages.body import read_count_tokens_body
from proxy.dialects.messages.request import to_prompt
from proxy.dialects.messages.schema import MessageAnswer
from tests.support.chat_templates import TEMPLATES
from tests.unit.node.test_answers import codec_of
from tests.unit.proxy.dialects.chats import (
    CHATS,
    DONE,
    Call,
    Chat,
    assert_declared,
    call_that_ends_in_a_chunk,
    cut,
    read_events,
)

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
TOOL = {"name": "weather", "description": "d", "input_schema": {"type": "object"}}


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}], **fields}


def chat_of(**fields: Any) -> dict[str, Any]:
    return convert_messages(body_of(**fields), "r").body


def read(body: Mapping[str, Any]) -> None:
    """As the proxy does."""
    converted = convert_messages(body, "r")
    try:
        parse_chat(converted.body)
    except TandemError as exc:
        raise converted.conversion.renamed(exc) from None


def conversion(*, has_marks: bool = False) -> MessagesConversion:
    return MessagesConversion("7", has_marks=has_marks)


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What the client's own accumulator makes of a stream."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        if event["type"] != "ping":
            read = EVENT.validate_python(event)
            snapshot = accumulate_event(event=read, current_snapshot=snapshot, json_bufs=buffers)
    return {name: value for name, value in snapshot.to_dict().items() if name != "stop_details"}


# --- requests


def test_text_when_converted_then_is_one_message_and_the_fields_have_their_chat_names() -> None:
    fields = {
        "system": "Be brief.",
        "stop_sequences": ["END"],
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 4,
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "stream": True,
        "seed": 3,
    }
    parse_chat(chat_of(**fields))
    assert chat_of(**fields) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "max_completion_tokens": 9,
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 4,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "seed": 3,
    }


def test_blocks_when_converted_then_what_the_model_made_is_one_message_again() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}, {"type": "text", "text": "Now."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "tandem"},
                {"type": "text", "text": "I look"},
                {"type": "text", "text": " it up."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Zürich"}},
                {"type": "tool_use", "id": "c2", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "snow"}]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "no clock", "is_error": True},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    chat = chat_of(messages=messages)
    parse_chat(chat)
    assert chat["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}, {"type": "text", "text": "Now."}]},
        {
            "role": "assistant",
            "content": "I look it up.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Zürich"}'}},
                {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "snow"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: no clock"},
        {"role": "user", "content": "Go on."},
    ]


def test_marks_when_converted_then_the_chat_keeps_states_at_their_places() -> None:
    chat = chat_of(
        system=[{"type": "text", "text": "Rules.", **EPHEMERAL}, {"type": "text", "text": "More."}],
        tools=[{**TOOL, **EPHEMERAL}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}, **EPHEMERAL}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "5", **EPHEMERAL}]},
        ],
    )
    marks = parse_chat(chat).cache_marks
    assert [(mark.message_index, mark.num_chars) for mark in marks] == [(0, len("Rules.\n")), (2, None), (3, None)]
    assert chat["tools"][0]["cache_control"] == {"type": "ephemeral"}


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}


def test_images_when_converted_then_are_the_chats_in_their_places() -> None:
    inline = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": [inline]}
    content = [{"type": "text", "text": "See"}, {**IMAGE, "cache_control": {"type": "ephemeral"}}, result]
    url, data = (
        {"type": "image_url", "image_url": {"url": each}}
        for each in ("https://example.com/a.png", "data:image/png;base64,aaaa")
    )
    chat = chat_of(messages=[{"role": "user", "content": content}])
    assert chat["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "See"}, {**url, "cache_control": {"type": "ephemeral"}}]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "Error: "}, data]},
    ]
    parsed = parse_chat(chat)
    assert [image.url for image in parsed.images] == [url["image_url"]["url"], data["image_url"]["url"]]
    [mark] = parsed.cache_marks
    assert (mark.message_index, mark.num_chars) == (0, None)


def test_assistants_message_at_the_end_when_converted_then_is_gone_on_with() -> None:
    chat = chat_of(messages=[{"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "Ye"}])
    assert chat["continue_final_message"] is True
    assert parse_chat(chat).add_generation_prompt is False


def test_messages_of_one_role_when_they_follow_each_other_then_are_one_turn() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": "5"}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b", **EPHEMERAL}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": "Yes"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [result]},
        {"role": "user", "content": "d"},
        {"role": "system", "content": "e"},
        {"role": "system", "content": "f"},
        {"role": "user", "content": "g"},
        {"role": "assistant", "content": "So"},
        {"role": "assistant", "content": " be it"},
    ]
    chat = chat_of(messages=messages)
    [mark] = parse_chat(chat).cache_marks
    assert (mark.message_index, mark.num_chars) == (0, len("a\nb\n"))
    first, *others = chat["messages"]
    assert (first["role"], [part["text"] for part in first["content"]]) == ("user", ["a", "b", "c"])
    function = {"name": "f", "arguments": "{}"}
    assert others == [
        {"role": "assistant", "content": "Yes", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
        {"role": "user", "content": "d"},
        {"role": "system", "content": "e"},
        {"role": "system", "content": "f"},
        {"role": "user", "content": "g"},
        {"role": "assistant", "content": "So be it"},
    ]
    assert chat["continue_final_message"] is True
    assert to_prompt(read_count_tokens_body({"messages": messages}))["messages"] == chat["messages"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "weather"},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
    ],
)
def test_tools_when_converted_then_are_the_chats(given: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    chat = chat_of(tools=[{**TOOL, "type": "custom", "strict": True}], tool_choice=given)
    function = {"name": "weather", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert {name: chat[name] for name in expected} == expected


ENABLED = {"type": "enabled", "budget_tokens": 2048}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"thinking": ENABLED},
            {"thinking_token_budget": 2048, "chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
        ),
        (
            {"thinking": ENABLED, "chat_template_kwargs": {"thinking": False, "style": "terse"}},
            {
                "thinking_token_budget": 2048,
                "chat_template_kwargs": {"enable_thinking": True, "thinking": False, "style": "terse"},
            },
        ),
        (
            {"thinking": ENABLED, "output_config": {"effort": "low"}},
            {"thinking_token_budget": 2048, "reasoning_effort": "low"},
        ),
        (
            {"thinking": ENABLED, "reasoning_effort": "none"},
            {"thinking_token_budget": 2048, "reasoning_effort": "none"},
        ),
        ({"chat_template_kwargs": {"style": "terse"}}, {"chat_template_kwargs": {"style": "terse"}}),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {"include_reasoning": False}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
    ],
)
def test_thinking_and_format_when_converted_then_are_the_chats(
    fields: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    chat = chat_of(**fields)
    usual = chat_of()
    assert {name: value for name, value in chat.items() if usual.get(name) != value} == expected
    counted = to_prompt(read_count_tokens_body(body_of(**fields)))
    assert counted.get("chat_template_kwargs") == expected.get("chat_template_kwargs")


def test_thinking_when_enabled_then_a_template_reasons_that_does_not_by_itself_and_others_are_as_they_were() -> None:
    def prompt(codec: TextCodec, **fields: Any) -> str:
        return codec.decode(codec.encode_chat(parse_chat(chat_of(**fields))))

    tokenizer = build_tokenizer(300, 1000)
    is_off = "enable_thinking is defined and not enable_thinking"
    assert is_off in TEMPLATES["hermes_thinking"]
    is_not_on = "not (enable_thinking is defined and enable_thinking)"
    tokenizer.chat_template = TEMPLATES["hermes_thinking"].replace(is_off, is_not_on)
    codec = TextCodec(tokenizer, vocab_size=len(tokenizer))
    assert prompt(codec).endswith("<think>\n\n</think>\n\n")
    assert prompt(codec, thinking=ENABLED).endswith("<|assistant|><think>\n")
    for name in ("hermes", "hermes_thinking", "hermes_may_think"):
        assert prompt(codec_of(name), thinking=ENABLED) == prompt(codec_of(name))


PDF = {"type": "document"}
TWICE = [{"role": "user", "content": "a"}] * 2
CALL = [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
RESULT = {"type": "tool_result", "tool_use_id": "c"}
BAD = [
    ({"max_tokens": None}, "max_tokens", "required"),
    ({"max_tokens": 0}, "max_tokens", "between 1 and"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "one of user"),
    ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "messages[0].content[0].type", "image"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type", "document"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]},
        "messages[0].content[0].source.type",
        "one of base64, url",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}]},
        "messages[0].content[0].type",
        "tool_use",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
        "messages[0].content[0].type",
        "redacted_thinking",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [PDF]}]}]},
        "messages[0].content[0].content[0].type",
        "document",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}]},
        "messages[0]",
        "tool_result",
    ),
    (
        {"messages": [*TWICE, {"role": "user", "content": [{**RESULT, "content": [PDF]}]}]},
        "messages[2].content[0].content[0].type",
        "document",
    ),
    (
        {"messages": [*TWICE, *({"role": "assistant", "content": each} for each in ("a", CALL))]},
        "messages[3]",
        "tool_result",
    ),
    ({"chat_template_kwargs": "x", "thinking": ENABLED}, "chat_template_kwargs", "an object"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "required"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}]},
        "messages[0].content[0].cache_control.type",
        "one of ephemeral",
    ),
    ({"system": [IMAGE]}, "system[0].type", "image"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "web_search"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "required"),
    ({"tools": [{**TOOL, "input_examples": [{"a": 1}]}]}, "tools[0].input_examples", "description"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "given with type tool"),
    ({"tool_choice": {"type": "often"}}, "tool_choice.type", "one of auto, any"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "given with type enabled"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type", "one of enabled"),
    ({"stop_sequences": "END"}, "stop_sequences", "a list"),
    ({"stop_sequences": ["a", 5]}, "stop_sequences[1]", "a string"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences", "at most 16"),
    ({"temperature": 3}, "temperature", "between 0 and 2"),
    ({"output_config": {"effort": "most"}}, "output_config.effort", "one of low"),
    ({"container": "c"}, "container", "no code"),
    ({"mcp_servers": [{"url": "u"}]}, "mcp_servers", "tools of your own"),
    ({"context_management": {"edits": [1]}}, "context_management", "edited"),
    ({"speed": "fast"}, "speed", "fast"),
    ({"n": 2}, "n", "one answer"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD, ids=[f"{param}: {words}" for _, param, words in BAD])
def test_bad_field_when_sent_then_is_refused_by_the_name_that_the_client_gave(
    fields: Mapping[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(body_of(**fields))
    assert caught.value.param == param
    assert words in caught.value.message
    assert param in caught.value.message


# --- answers


@pytest.mark.parametrize("name", CHATS)
def test_answer_when_whole_then_is_a_message_as_the_client_has_it(name: str) -> None:
    chat = CHATS[name]
    body = conversion().whole(200, chat.whole())
    assert_declared(MessageAnswer.model_validate_json(body))  # as /openapi.json says
    message = Message.model_validate_json(body)
    assert "".join(block.text for block in message.content if block.type == "text") == chat.content
    assert "".join(block.thinking for block in message.content if block.type == "thinking") == chat.reasoning
    calls = [(block.id, block.name, block.input) for block in message.content if block.type == "tool_use"]
    assert calls == [(call.id, call.name, json.loads(call.arguments or "{}")) for call in chat.calls]
    expected = "tool_use" if chat.calls else "end_turn"
    if chat.finish_reason == "length":
        expected = "max_tokens"
    elif isinstance(chat.stop_reason, str):
        expected = "stop_sequence"
    assert message.stop_reason == expected
    assert message.stop_sequence == (chat.stop_reason if expected == "stop_sequence" else None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (16, 24, 0)
    assert usage.output_tokens == 12


@pytest.mark.parametrize("name", CHATS)
def test_answer_when_streamed_then_adds_up_to_the_whole_one(name: str) -> None:
    chat = CHATS[name]
    events = read_events(conversion().feed(b"".join(chat.events())))
    assert accumulated(events) == json.loads(conversion().whole(200, chat.whole()))
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[0]["message"]["stop_reason"] is None


def test_stream_when_its_events_say_the_usage_then_the_first_one_has_the_prompts() -> None:
    first = json.loads(CHATS["text"].events()[0].removeprefix(b"data: "))
    first["usage"] = {**CHATS["text"].usage, "completion_tokens": 1}
    [start, _] = read_events(conversion().feed(b"data: " + json.dumps(first).encode() + b"\n\n"))
    usage = start["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (16, 24, 1)


def test_stream_when_it_has_all_kinds_of_parts_then_blocks_follow_each_other() -> None:
    events = read_events(conversion().feed(b"".join(CHATS["all"].events())))
    blocks = [event for event in events if event["type"].startswith("content_block_")]
    open_index = None
    kinds = []
    for event in blocks:
        if event["type"] == "content_block_start":
            assert open_index is None
            open_index = event["index"]
            kinds.append(event["content_block"]["type"])
        assert event["index"] == open_index
        if event["type"] == "content_block_stop":
            open_index = None
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    signatures = [e["delta"]["signature"] for e in blocks if e.get("delta", {}).get("type") == "signature_delta"]
    assert signatures == ["tandem"]


@pytest.mark.parametrize(("field", "kind"), [("content", "text"), ("reasoning_content", "thinking")])
def test_chunk_when_it_ends_a_call_and_goes_on_then_the_call_is_whole_and_the_rest_follows(
    field: str, kind: str
) -> None:
    message = accumulated(read_events(conversion().feed(call_that_ends_in_a_chunk(field))))
    call, said, other = message["content"]
    assert [block["type"] for block in (call, said, other)] == ["tool_use", kind, "tool_use"]
    assert (call["input"], said[kind], other["input"]) == ({"city": "Bern"}, "The rest", {"zone": "CET"})
    assert message["stop_reason"] == "tool_use"


def test_stream_when_cut_anywhere_then_events_are_the_same_bytes() -> None:
    data = b"".join(CHATS["all"].events())
    expected = conversion().feed(data)
    for seed in range(1000):
        converting = conversion()
        assert b"".join(converting.feed(piece) for piece in cut(data, seed)) == expected


def test_request_with_marks_when_answered_then_what_was_computed_counts_as_kept() -> None:
    converted = convert_messages(body_of(system=[{"type": "text", "text": "a", **EPHEMERAL}]), "r").conversion
    usage = json.loads(converted.whole(200, CHATS["text"].whole()))["usage"]
    assert (usage["input_tokens"], usage["cache_creation_input_tokens"]) == (0, 16)
    assert usage["cache_read_input_tokens"] == 24


def test_call_that_was_cut_off_when_answered_then_has_no_arguments_and_says_max_tokens() -> None:
    chat = Chat(calls=(Call("c", "f", '{"city": "Zü'),), finish_reason="length")
    message = json.loads(conversion().whole(200, chat.whole()))
    assert (message["content"][0]["input"], message["stop_reason"]) == ({}, "max_tokens")


def test_stream_when_it_fails_then_ends_with_an_error_event() -> None:
    events = CHATS["text"].events()[:4]
    events.append(b"data: " + json.dumps(error_body(TandemError("the node is lost"))).encode() + b"\n\n")
    *_, last = read_events(conversion().feed(b"".join(events) + DONE))
    assert last == {
        "type": "error",
        "error": {"type": "api_error", "message": "the node is lost"},
        "request_id": "7",
    }


@pytest.mark.parametrize(
    ("overflow", "message"),
    [
        (ContextOverflow(800, 900), "prompt is too long: 900 tokens > 800 maximum"),
        (
            ContextOverflow(800, 700, max_tokens=200),
            "input length and `max_tokens` exceed context limit: 700 + 200 > 800, decrease input length or "
            "`max_tokens` and try again",
        ),
    ],
)
def test_request_over_the_context_when_refused_by_proxy_or_node_then_is_told_in_anthropics_words(
    overflow: ContextOverflow, message: str
) -> None:
    error = ContextLengthError("messages", overflow)
    node_body = json.dumps(error_body(error)).encode()
    told = [
        json.loads(conversion().whole(400, node_body)),
        conversion().error(error),
        json.loads(bytes(shape_error(error_response(error), "7").body)),
    ]
    assert told == [
        {"type": "error", "error": {"type": "invalid_request_error", "message": message}, "request_id": "7"}
    ] * len(told)


def test_request_over_the_context_when_another_server_says_so_then_its_words_are_told() -> None:
    body = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    assert json.loads(conversion().whole(400, json.dumps(body).encode()))["error"]["message"] == "too long"


def test_error_when_whole_then_has_the_shape_of_the_api() -> None:
    told = json.loads(conversion().whole(429, json.dumps(error_body(QueueFullError("full"))).encode()))
    assert told == {"type": "error", "error": {"type": "rate_limit_error", "message": "full"}, "request_id": "7"}
