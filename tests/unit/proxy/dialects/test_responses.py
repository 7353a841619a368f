"""``/v1/responses`` as a converter: bodies become chats, chats' answers become Responses, of which the ``openai``
client's own types are the measure."""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import openai
import orjson
import pytest
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from common.errors import ContextLengthError, ContextOverflow, InvalidRequestError, QueueFullError, TandemError
from common.openai.errors import error_body
from common.openai.protocol import parse_chat
from common.openai.responses import SSE_AT_WORK
from proxy.dialects.conversion import _read_whole
from proxy.dialects.dialect import convert_responses
from proxy.dialects.responses.answer import ECHO_BYTES, Echo, ResponsesConversion
from proxy.dialects.responses.body import read_responses_body
from proxy.dialects.responses.schema import ResponseAnswer
from proxy.dialects.text_logprobs import TextLogprobs
from tests.unit.node.test_answers import answers, codec_of
from tests.unit.proxy.dialects.chats import (
    CHATS,
    DONE,
    Chat,
    assert_declared,
    call_that_ends_in_a_chunk,
    cut,
    read_events,
)

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOGPROBS = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    chat = convert_responses(body, "r").body
    parse_chat(chat)
    return chat


def read(body: Mapping[str, Any]) -> None:
    """As the proxy does."""
    converted = convert_responses(body, "r")
    try:
        parse_chat(converted.body)
    except TandemError as exc:
        raise converted.conversion.renamed(exc) from None


def conversion(**body: Any) -> ResponsesConversion:
    return ResponsesConversion(Echo.of(read_responses_body({"input": "a", **body})), "7", clock=lambda: 1_700_000_009)


def streamed(chat: Chat, **body: Any) -> list[dict[str, Any]]:
    return read_events(conversion(**body).feed(b"".join(chat.events())))


# --- requests


def test_text_when_converted_then_is_one_message_and_the_fields_have_their_chat_names() -> None:
    body = {
        "model": "m",
        "input": "Hello",
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "temperature": 0,
        "top_p": 0.5,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "metadata": {"a": "b"},
        "store": False,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "seed": 3,
        "stream": True,
    }
    assert chat_of(body) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "max_completion_tokens": 9,
        "temperature": 0,
        "top_p": 0.5,
        "reasoning_effort": "low",
        "response_format": {"type": "text"},
        "verbosity": "medium",
        "logprobs": True,
        "top_logprobs": 2,
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def test_items_when_converted_then_what_the_model_made_is_one_message_again() -> None:
    items = [
        {"role": "developer", "content": "Use tools."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "snow"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "assistant", "content": "Snow."},
        {"role": "assistant", "content": "At noon."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Thanks"},
    ]
    function = {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert chat_of({"input": items})["messages"] == [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": function},
                {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "snow"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
        {"role": "assistant", "content": "Snow."},
        {"role": "assistant", "content": "At noon."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Thanks"},
    ]


def test_image_when_converted_then_is_the_chats_in_its_place() -> None:
    parts = [{"type": "input_image", "image_url": "data:,", "detail": "auto"}, {"type": "input_text", "text": "What?"}]
    output = {"type": "function_call_output", "call_id": "c", "output": parts[:1]}
    chat = chat_of({"input": [{"role": "user", "content": parts}, output]})
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    assert [message["content"] for message in chat["messages"]] == [[image, {"type": "text", "text": "What?"}], [image]]


def test_marked_part_when_converted_then_the_chat_keeps_a_state_there() -> None:
    parts = [
        {"type": "input_text", "text": "A long text.", "prompt_cache_breakpoint": {"mode": "explicit"}},
        {"type": "input_text", "text": "A question."},
    ]
    chat = convert_responses({"input": [{"role": "user", "content": parts}]}, "r").body
    [mark] = parse_chat(chat).cache_marks
    assert (mark.message_index, mark.num_chars) == (0, len("A long text.\n"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tools_when_converted_then_are_the_chats(given: object, expected: object) -> None:
    tool = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    body = {"input": "a", "tools": [tool], "tool_choice": given, "parallel_tool_calls": True}
    chat = convert_responses(body, "r").body
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["tool_choice"] == expected
    assert chat["parallel_tool_calls"] is True


def test_schema_when_converted_then_is_the_chats_response_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}}
    assert convert_responses(body, "r").body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }
    body = {"input": "a", "text": {"format": {"type": "json_object", "schema": schema}}}
    assert convert_responses(body, "r").body["response_format"] == {"type": "json_object", "schema": schema}


def test_sealed_reasoning_when_sent_back_then_is_the_reasoning() -> None:
    answer = json.loads(
        conversion(include=["reasoning.encrypted_content"]).whole(200, CHATS["reasoning and text"].whole())
    )
    item = answer["output"][0]
    sealed = {"type": "reasoning", "id": item["id"], "summary": [], "encrypted_content": item["encrypted_content"]}
    items = [{"role": "user", "content": "a"}, sealed, {"role": "assistant", "content": "Yes."}]
    assert chat_of({"input": items})["messages"][1]["reasoning_content"] == "hm, so"


BAD = [
    ({"store": True}, "store", "never stored"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored"),
    ({"conversation": "conv_1"}, "conversation", "not stored"),
    ({"background": True}, "background", "connection"),
    ({"prompt": {"id": "p"}}, "prompt", "stored prompts"),
    ({"truncation": "auto"}, "truncation", "refused, never shortened"),
    ({"include": ["file_search_call.results"]}, "include", "file_search_call.results"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "padded"),
    ({"reasoning": {"summary": "concise"}}, "reasoning.summary", "concise"),
    ({"reasoning": {"effort": "most"}}, "reasoning.effort", "one of none, minimal, low"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "pro"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "low"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "required"),
    ({"max_output_tokens": 0}, "max_output_tokens", "between 1 and"),
    ({"temperature": 3}, "temperature", "between 0 and 2"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
    ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name", "1 to 256"),
    ({"tools": [{"type": "function", "name": "f", "async": True}]}, "tools[0].async", "next request"),
    ({"tool_choice": {"type": "mcp", "server_label": "s"}}, "tool_choice.type", "mcp"),
    ({"tool_choice": "often"}, "tool_choice", "often"),
    ({"metadata": {"a": 1}}, "metadata.a", "string"),
    ({"n": 2}, "n", "one answer"),
    ({"input": []}, "input", "at least one"),
    ({"input": 5}, "input", "list"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "one of user"),
    ({"input": [{"type": "item_reference", "id": "i"}]}, "input[0].type", "not stored"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type", "computer_call"),
    (
        {"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "u"}]}]},
        "input[0].content[0].type",
        "input_image",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0].image_url",
        "required",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "required"),
    ({"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]}, "input[0].encrypted_content", "not of this"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments", "required"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD, ids=[param for _, param, _ in BAD])
def test_bad_field_when_sent_then_is_refused_by_the_name_that_the_client_gave(
    fields: Mapping[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read({"input": "a", **fields})
    assert caught.value.param == param
    assert words in caught.value.message
    assert param.split(".")[-1] in caught.value.message


def test_nodes_error_about_messages_when_told_then_names_the_input() -> None:
    error = ContextLengthError("messages", ContextOverflow(800, 900))
    told = json.loads(conversion().whole(400, json.dumps(error_body(error)).encode()))["error"]
    words = "This model's maximum context length is 800 tokens. However, input has 900 tokens."
    assert (told["param"], told["code"], told["message"]) == ("input", "context_length_exceeded", words)


# --- answers


@pytest.mark.parametrize("name", CHATS)
def test_answer_when_whole_then_is_a_response_as_the_client_has_it(name: str) -> None:
    chat = CHATS[name]
    body = conversion().whole(200, chat.whole())
    assert_declared(ResponseAnswer.model_validate_json(body))  # as /openapi.json says
    response = Response.model_validate_json(body)
    assert response.output_text == chat.content
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.call_id, call.name, call.arguments) for call in calls] == [
        (call.id, call.name, call.arguments) for call in chat.calls
    ]
    reasoning = [part.text for item in response.output if item.type == "reasoning" for part in item.content or ()]
    assert "".join(reasoning) == chat.reasoning
    is_cut = chat.finish_reason == "length"
    assert response.status == ("incomplete" if is_cut else "completed")
    assert (response.incomplete_details is not None) == is_cut
    assert response.usage is not None
    assert response.usage.to_dict() == {
        "input_tokens": 40,
        "input_tokens_details": {"cached_tokens": 24, "cache_write_tokens": 0},
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 5 if chat.reasoning else 0},
        "total_tokens": 52,
    }


@pytest.mark.parametrize("name", CHATS)
def test_answer_when_streamed_then_ends_with_what_the_whole_one_is(name: str) -> None:
    chat = CHATS[name]
    events = streamed(chat)
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    for event in events:
        state.handle_event(EVENT.validate_python(event))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    whole = json.loads(conversion().whole(200, chat.whole()))
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert events[-1]["response"] == whole
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in whole["output"]]
    for kind in ("output_text", "reasoning_text", "function_call_arguments"):
        for end in (event for event in events if event["type"] == f"response.{kind}.done"):
            deltas = [
                event["delta"]
                for event in events
                if event["type"] == f"response.{kind}.delta" and event["item_id"] == end["item_id"]
            ]
            assert "".join(deltas) == end.get("text", end.get("arguments"))


def test_stream_when_it_has_all_kinds_of_parts_then_events_come_in_the_order_of_the_api() -> None:
    types = [event["type"].removeprefix("response.") for event in streamed(CHATS["all"])]
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "{}.delta", "{}.done", "output_item.done"]
    expected = ["created", "in_progress"]
    for kind, steps in (("reasoning_text", text), ("output_text", text), *[("function_call_arguments", call)] * 2):
        expected += [step.format(kind) for step in steps]
    assert [each for each, before in zip(types, [None, *types], strict=False) if each != before] == [
        *expected,
        "completed",
    ]


@pytest.mark.parametrize(("field", "kind"), [("content", "message"), ("reasoning_content", "reasoning")])
def test_chunk_when_it_ends_a_call_and_goes_on_then_the_call_is_whole_and_the_rest_follows(
    field: str, kind: str
) -> None:
    last = read_events(conversion().feed(call_that_ends_in_a_chunk(field)))[-1]
    assert last["type"] == "response.completed"
    call, said, other = last["response"]["output"]
    assert [item["type"] for item in (call, said, other)] == ["function_call", kind, "function_call"]
    assert (call["arguments"], other["arguments"]) == ('{"city": "Bern"}', '{"zone": "CET"}')
    assert said["content"][0]["text"] == "The rest"


def test_stream_when_cut_anywhere_then_events_are_the_same_bytes() -> None:
    data = b"".join(CHATS["all"].events())
    expected = conversion().feed(data)
    for seed in range(1000):
        converting = conversion()
        assert b"".join(converting.feed(piece) for piece in cut(data, seed)) == expected


def test_comment_when_a_node_sends_one_within_its_stream_then_is_passed_on() -> None:
    first, *rest = CHATS["text"].events()
    plain, commented = conversion(), conversion()
    assert commented.feed(SSE_AT_WORK) == b""
    assert commented.feed(first) == plain.feed(first)
    assert commented.feed(SSE_AT_WORK) == SSE_AT_WORK
    assert commented.feed(b"".join(rest)) == plain.feed(b"".join(rest))
    assert commented.feed(SSE_AT_WORK) == b""


def test_reasoning_when_a_summary_is_asked_for_then_comes_as_the_summary() -> None:
    chat = CHATS["reasoning and text"]
    events = streamed(chat, reasoning={"summary": "auto"})
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    for event in events:
        state.handle_event(EVENT.validate_python(event))
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_summary_text.delta"]
    assert "".join(deltas) == "hm, so"
    assert not any("reasoning_text" in event["type"] for event in events)
    item = events[-1]["response"]["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "hm, so"}]


def test_logprobs_when_included_then_come_with_the_text_and_else_do_not() -> None:
    chat = Chat(content="a", logprobs=LOGPROBS)
    with_them = streamed(chat, include=["message.output_text.logprobs"])
    assert [e["logprobs"] for e in with_them if e["type"] == "response.output_text.delta"] == [LOGPROBS]
    assert with_them[-1]["response"]["output"][0]["content"][0]["logprobs"] == LOGPROBS
    assert streamed(chat)[-1]["response"]["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("Yes, hm.\n</think>\n\nYes 🙂, so: </think> ü.", "Yes 🙂, so: </think> ü."),
        ("</think> Yes, half: 🙂", "Yes, half: 🙂"),
        ("Well.</think>I look.\n" + '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "I look."),
        ("Well.</think>" + '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', None),
        ("Well.</think>It may st op, then STOP and more.", "It may st op, then "),
        ("Only reasoning", None),
    ],
)
def test_logprobs_when_streamed_then_are_the_whole_ones_and_spell_the_text(
    answer: str, text: str | None, at_once: int
) -> None:
    asked = {"input": "a", "include": ["message.output_text.logprobs"], "tools": [{"type": "function", "name": "now"}]}
    codec, chat = codec_of("hermes_thinking"), {**chat_of(asked), "stop": ["STOP"]}
    [body] = answers(codec, answer, chat, at_once=at_once)
    whole = json.loads(conversion(**asked).whole(200, json.dumps(body).encode()))
    chunks = answers(codec, answer, {**chat, **chat_of({**asked, "stream": True})}, at_once=at_once)
    data = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + DONE
    events = read_events(conversion(**asked).feed(data))
    entries = [entry for e in events if e["type"] == "response.output_text.delta" for entry in e["logprobs"]]
    contents = [
        [item["content"][0] for item in output if item["type"] == "message"]
        for output in (whole["output"], events[-1]["response"]["output"])
    ]
    assert contents[0] == contents[1]
    assert [content["text"] for content in contents[0]] == ([] if text is None else [text])
    assert entries == [entry for content in contents[0] for entry in content["logprobs"]]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == (text or "").encode()


def test_logprobs_when_the_text_ends_within_a_token_or_has_bytes_that_are_no_character_then_go_on() -> None:
    def entries(*tokens: bytes) -> list[dict[str, Any]]:
        return [{"token": "", "logprob": -0.5, "bytes": list(token), "top_logprobs": []} for token in tokens]

    tokens = entries(b"<think>", b" a", b"\xf0\x9f", b"b", b"<|x|>", b"c", b"\xff", b"d STOP", b"<|end|>")
    for cuts in ((9,), (4, 9), range(1, 10)):
        logprobs = TextLogprobs()
        found, start, texts = [], 0, ["", "a", "", "\ufffdb", "", "c", "", "\ufffdd", ""]
        for end in cuts:
            found += logprobs.add(tokens[start:end], "".join(texts[start:end]), 1)
            start = end
        assert [*found, *logprobs.end()] == tokens[1:4] + tokens[5:8]


def test_text_logprobs_when_a_server_names_tokens_otherwise_than_their_text_then_passes_all_on() -> None:
    def entry(token: str, data: list[int] | None) -> dict[str, Any]:
        return {"token": token, "logprob": -0.5, "bytes": data}

    chunks = [
        ("I", entry("I", None)),
        (" see", entry("see", None)),
        ("", entry("token_id:5", [999])),
        ("!", entry("!", [33])),
    ]
    logprobs = TextLogprobs()
    found = [logprobs.add([given], text, None) for text, given in chunks]
    assert found == [[given] for _, given in chunks]
    assert logprobs.end() == []


WITH_LOGPROBS = {"include": ["message.output_text.logprobs"]}


def with_others(text: str, num_others: int = 20) -> dict[str, Any]:
    others = [{"token": f'"{number}\\}}]}},{{', "logprob": -2.5, "bytes": [number]} for number in range(num_others)]
    return {"token": text, "logprob": -0.25, "bytes": list(text.encode()), "top_logprobs": others}


def of_tokens(num_tokens: int) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Entries, and the stream's events up to [DONE]."""
    entries = [with_others(f" w{number}") for number in range(num_tokens)]
    chunk = json.loads(Chat(content="a").events()[1].removeprefix(b"data: "))
    events = []
    for entry in entries:
        choice = {"index": 0, "delta": {"content": entry["token"]}, "logprobs": {"content": [entry]}}
        events.append(b"data: " + json.dumps({**chunk, "choices": [choice]}).encode() + b"\n\n")
    return entries, events


def test_stream_when_it_has_many_logprobs_then_long_events_are_pieces_by_themselves_made_as_they_are_taken() -> None:
    entries, events = of_tokens(100)
    converted, expected = conversion(**WITH_LOGPROBS), conversion(**WITH_LOGPROBS)
    for event in events:
        [piece] = converted.pieces(event)
        assert piece == expected.feed(event)
    last = converted.pieces(DONE)
    first = next(last)
    converted.clock = lambda: 1_900_000_000
    pieces = [first, *last]
    told = [read_events(piece) for piece in pieces]
    assert [len(each) for each in told] == [1, 1, 1, 1]
    assert [each[0].get("logprobs") for each in told[:1]] == [entries]
    assert told[3][0]["response"]["output"] == [told[2][0]["item"]]
    assert told[2][0]["item"]["content"] == [told[1][0]["part"]]
    assert told[1][0]["part"]["logprobs"] == entries
    assert told[3][0]["response"]["completed_at"] == 1_900_000_000  # not before the others were taken
    assert [event["sequence_number"] for event in read_events(expected.feed(DONE))] == [
        each[0]["sequence_number"] for each in told
    ]


def test_stream_when_it_has_logprobs_then_keeps_no_more_of_them_than_their_json() -> None:
    entries, events = of_tokens(400)
    converted = conversion(**WITH_LOGPROBS)
    converted.feed(events[0])
    tracemalloc.start()
    try:
        for event in events:
            converted.feed(event)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1.5 * len(json.dumps(entries))  # as objects seven times as much


def test_whole_answer_when_it_has_many_logprobs_then_no_call_reads_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries, _ = of_tokens(200)
    chat = Chat(content="".join(entry["token"] for entry in entries), logprobs=entries)
    body, lengths, loads = orjson.dumps(json.loads(chat.whole())), [], orjson.loads

    def counted(data: bytes) -> Any:
        lengths.append(len(data))
        return loads(data)

    monkeypatch.setattr("proxy.dialects.conversion.orjson.loads", counted)
    whole = json.loads(conversion(**WITH_LOGPROBS).whole(200, body))
    assert whole["output"][0]["content"][0]["logprobs"] == entries
    assert len(lengths) == len(entries)
    assert max(lengths) < len(body) / 20


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: answer,
        lambda answer: answer["choices"][0]["logprobs"]["content"].reverse(),
        lambda answer: answer["choices"][0]["logprobs"]["content"].__delitem__(slice(1, None)),
        lambda answer: [each.update(top_logprobs=[]) for each in answer["choices"][0]["logprobs"]["content"]],
        lambda answer: [each.update(bytes=None) for each in answer["choices"][0]["logprobs"]["content"]],
        lambda answer: [each.update(more={"a": [1]}) for each in answer["choices"][0]["logprobs"]["content"][::2]],
        lambda answer: answer["choices"].append(copy.deepcopy(answer["choices"][0])),
        lambda answer: answer["choices"].insert(0, {**answer["choices"][0], "logprobs": None}),
        lambda answer: answer["choices"][0].update(logprobs={"content": None}),
        lambda answer: answer.update(other=answer["choices"][0].pop("logprobs")),
        lambda answer: answer.update(logprobs=answer["choices"][0]["logprobs"]),
        lambda answer: answer["choices"][0].update(prompt_logprobs=answer["choices"][0]["logprobs"]),
        lambda answer: answer["choices"][0]["message"].update(content='"logprobs":{"content":[{"token":}]},{"token":'),
        lambda answer: answer.pop("choices"),
    ],
)
def test_whole_answer_when_logprobs_are_anywhere_in_it_then_is_read_as_json(change: Callable[[Any], object]) -> None:
    entries, _ = of_tokens(5)
    answer = json.loads(Chat(content="abc", logprobs=entries).whole())
    change(answer)
    for body in (orjson.dumps(answer), json.dumps(answer).encode(), json.dumps(answer, separators=(",", ":")).encode()):
        assert _read_whole(body) == answer
    for cut_at in range(0, len(body) - 1, 97):
        with pytest.raises(orjson.JSONDecodeError):
            _read_whole(body[:cut_at])


def test_logprobs_when_the_answer_says_a_number_beyond_64_bits_too_then_both_are_told() -> None:
    asked = {**WITH_LOGPROBS, "tools": [{"type": "function", "name": "f", "parameters": {"maximum": 2**70}}]}
    chat = Chat(content="a", logprobs=LOGPROBS)
    for answer in (streamed(chat, **asked)[-1]["response"], json.loads(conversion(**asked).whole(200, chat.whole()))):
        assert answer["tools"][0]["parameters"] == {"maximum": 2**70}
        assert answer["output"][0]["content"][0]["logprobs"] == LOGPROBS


def test_text_logprobs_when_nobody_asked_for_them_then_keep_nothing_of_the_text() -> None:
    logprobs = TextLogprobs()
    for _ in range(100):
        assert logprobs.add([], "text", 0) == []
    assert not logprobs._text


@pytest.mark.parametrize(
    ("error", "code"),
    [(TandemError("the node is lost"), "server_error"), (QueueFullError("full"), "rate_limit_exceeded")],
)
def test_stream_when_it_fails_then_ends_with_failed_and_what_came(error: TandemError, code: str) -> None:
    events = CHATS["text"].events()[:4]
    events.append(b"data: " + json.dumps(error_body(error)).encode() + b"\n\n")
    *_, last = read_events(conversion().feed(b"".join(events)))
    EVENT.validate_python(last)
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert (last["response"]["error"]["code"], last["response"]["error"]["message"]) == (code, error.message)
    [item] = last["response"]["output"]
    assert item["status"] == "incomplete"
    assert CHATS["text"].content.startswith(item["content"][0]["text"])


def test_stream_when_its_first_event_is_an_error_then_begins_and_fails() -> None:
    data = b"data: " + json.dumps(error_body(TandemError("no luck"))).encode() + b"\n\n"
    types = [event["type"] for event in read_events(conversion().feed(data))]
    assert types == ["response.created", "response.in_progress", "response.failed"]


@pytest.mark.parametrize("body", [b"[]", b'{"object": "x"}', b'{"choices": [{"message": {"tool_calls": [{}]}}]}'])
def test_answer_that_is_no_chat_when_converted_then_is_an_error_of_ours(body: bytes) -> None:
    with pytest.raises(TandemError, match="no chat completion"):
        conversion().whole(200, body)
    with pytest.raises(TandemError, match="no chat completion"):
        conversion().feed(b"data: " + body + b"\n\n" + DONE)


def test_request_when_answered_then_its_fields_are_said_again_and_store_is_false() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    given = {
        "instructions": "Be brief.",
        "tools": [tool],
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "user": "u",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    }
    answer = json.loads(conversion(**given).whole(200, CHATS["text"].whole()))
    assert {name: answer[name] for name in given} == given
    assert answer["store"] is False
    for number in (18446744073709551616, 10**25):  # beyond 64 bits
        given["tools"] = [tool | {"parameters": {"type": "integer", "maximum": number}}]
        given["text"] = {"format": {"type": "json_schema", "name": "n", "schema": {"minimum": -number}}}
        assert json.loads(conversion(**given).whole(200, CHATS["text"].whole())).items() >= given.items()
        for event in (streamed(CHATS["text"], **given)[0], streamed(CHATS["text"], **given)[-1]):
            assert event["response"].items() >= given.items()
    long = json.loads(conversion(instructions="a" * ECHO_BYTES).whole(200, CHATS["text"].whole()))
    assert long["instructions"] is None
