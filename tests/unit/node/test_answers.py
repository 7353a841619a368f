"""Tool calls and reasoning from a chat's body to what the client reads, whole, streamed and continued, with an engine
that follows a script."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from tokenizers import AddedToken

from common.engine.outputs import RequestOutput
from common.errors import InvalidRequestError
from common.metrics.metrics import Metrics
from common.metrics.table import Role
from common.models.synthetic import SPECIAL_TOKENS, build_tokenizer
from common.node.serving.answers import plan_answer
from common.node.serving.prompt_jobs import PromptReader
from common.node.serving.request_record import RequestRecord
from common.node.serving.response_builder import ResponseBuilder
from common.node.serving.tracing import RequestTrace
from common.openai.protocol import ChatRequest, parse_chat
from common.request import FinishReason, TokenLogprob
from common.text.answers.detection import Overrides
from common.text.tokenizer import TextCodec
from common.wire.headers import REPORT_HEADER
from tests.support.chat_templates import SPECIAL_MARKERS, TEMPLATES
from tests.unit.text.vocabulary import byte_fallback

Json = dict[str, Any]
USER = {"role": "user", "content": "hello"}
WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
BODY: Json = {"messages": [USER], "tools": [WEATHER]}
ARGUMENTS = {"city": "Bern ü", "days": 3}
END = 1


@functools.cache
def codec_of(template: str, overrides: Overrides | None = None, *, flagged: tuple[str, ...] = ()) -> TextCodec:
    """``flagged``: markers that are special tokens by their flag in ``tokenizer.json`` alone."""
    tokenizer = build_tokenizer(300, 1000)
    tokenizer.chat_template = TEMPLATES[template]
    if flagged:
        tokenizer.add_tokens([AddedToken(marker, special=True) for marker in flagged])
        assert not {*tokenizer.convert_tokens_to_ids(list(flagged))} & {*tokenizer.all_special_ids}
    elif template in SPECIAL_MARKERS:
        tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL_TOKENS[2:], *SPECIAL_MARKERS[template]]})
    options = {} if overrides is None else {"answers": overrides}
    return TextCodec(tokenizer, vocab_size=len(tokenizer), **options)  # type: ignore[arg-type]


def calls_text(codec: TextCodec, *arguments: Json) -> str:
    tools = codec.answer_format.tools
    assert tools is not None
    name = "weather:{}" if "functions." in tools.layout.begin else "weather"
    return tools.layout.write([(name.format(i), each) for i, each in enumerate(arguments)])


async def response_builder(
    codec: TextCodec,
    answer: str,
    body: Json,
    *,
    ends_by: str = "stop",
    at_once: int = 1,
    num_known: int = 0,
    pause_s: float = 0.0,
    trace: RequestTrace | None = None,
    headers: Sequence[tuple[bytes, bytes]] = (),
    **options: Any,
) -> ResponseBuilder:
    """A node's for ``body``, when the model says ``answer``. ``at_once``: tokens of one engine output, each of which
    takes ``pause_s``. ``num_known``: tokens that the client has from another node."""
    token_ids = [*codec.encode(answer, add_special_tokens=False), *([END] if ends_by == "stop" else [])]
    http = HttpRequest({"type": "http", "headers": list(headers), "state": {"request_id": "r", "body_bytes": 0}})
    resume = {"tandem_resume": {"output_token_ids": token_ids[:num_known]}} if num_known else {}
    request = parse_chat({**body, **resume}, is_from_peer=True)
    cache_config: Any = SimpleNamespace(geometry=SimpleNamespace(vocab_size=codec.vocab_size), keeps_boundaries=False)
    reader = PromptReader(codec, None, cache_config=cache_config, max_model_len=4000, metrics=Metrics(Role.DECODE))
    jobs = await reader.jobs(http, request)

    async def outputs(_: object, job: Any) -> AsyncGenerator[tuple[Any, RequestOutput], None]:
        for fork in range(request.output.n):
            for start in range(num_known, len(token_ids), at_once):
                await asyncio.sleep(pause_s)
                some = token_ids[start : start + at_once]
                is_last = start + at_once >= len(token_ids)
                logprobs = [TokenLogprob(token_id, -1.0, 1, ()) for token_id in some]
                yield (
                    job,
                    RequestOutput(
                        request_id=job.request_id,
                        index=fork,
                        token_ids=some,
                        logprobs=logprobs if job.sampling.logprobs is not None else None,
                        finish_reason=FinishReason(ends_by) if is_last else None,
                    ),
                )

    record = RequestRecord(Metrics(Role.DECODE), "chat")
    return ResponseBuilder("m", outputs, lambda *_: None, http, request, jobs, trace, record, **options)


def answers(codec: TextCodec, answer: str, body: Json, **options: Any) -> list[Json]:
    """What a node says: one object, or those of the events."""

    async def run() -> list[Json]:
        builder = await response_builder(codec, answer, body, **options)
        if not body.get("stream"):
            return [json.loads(bytes((await builder.whole()).body))]
        events = [event async for event in builder.events()]
        assert events.pop() == b"data: [DONE]\n\n"
        return [json.loads(event.removeprefix(b"data: ")) for event in events]

    return asyncio.run(run())


def test_whole_answer_when_traced_then_its_report_says_what_the_proxy_counts_of_it() -> None:
    async def run() -> Response:
        builder = await response_builder(codec_of("hermes"), "hello", {"messages": [USER], "n": 2}, trace=trace)
        return await builder.whole()

    trace = RequestTrace.from_headers({}, "node")
    answer = asyncio.run(run())
    report, whole = json.loads(answer.headers[REPORT_HEADER]), json.loads(bytes(answer.body))
    assert report["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] > 0
    assert report["choices"] == [{"finish_reason": "stop"}]
    assert report["decode_node"] == "node"


def message(codec: TextCodec, answer: str, body: Json, **options: Any) -> Json:
    [response] = answers(codec, answer, body, **options)
    [choice] = response["choices"]
    found: Json = choice["message"]
    return {**found, "finish_reason": choice["finish_reason"]}


def streamed(codec: TextCodec, answer: str, body: Json, **options: Any) -> Json:
    """The deltas of a stream put together as clients do."""
    total: Json = {"content": "", "finish_reason": None}
    for event in answers(codec, answer, {**body, "stream": True}, **options):
        for choice in event["choices"]:
            delta = choice["delta"]
            total["content"] += delta.get("content") or ""
            for name in ("reasoning", "reasoning_content"):
                if name in delta:
                    total[name] = total.get(name, "") + delta[name]
            for piece in delta.get("tool_calls", ()):
                calls = total.setdefault("tool_calls", [])
                if "id" in piece:
                    assert piece["index"] == len(calls)
                    calls.append({key: value for key, value in piece.items() if key != "index"})
                    calls[-1]["function"] = dict(piece["function"])
                else:
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
            assert total["finish_reason"] is None
            total["finish_reason"] = choice["finish_reason"]
    return total


@pytest.mark.parametrize("template", sorted(set(TEMPLATES) - {"no_calls"}))
def test_calls_when_they_are_whole_or_streamed_then_they_are_the_same(template: str) -> None:
    check_calls(codec_of(template), thinks=template in ("hermes_thinking", "xml_thinking"))


@pytest.mark.parametrize(
    ("template", "flagged"),
    [
        ("python", SPECIAL_MARKERS["python"]),
        ("kimi", SPECIAL_MARKERS["kimi"]),
        ("hermes_thinking", ("<think>", "</think>")),
    ],
)
def test_calls_when_the_tokenizer_json_alone_flags_their_markers_then_they_are_found(
    template: str, flagged: tuple[str, ...]
) -> None:
    codec = codec_of(template, flagged=flagged)
    assert None not in map(codec.marker_id, flagged)
    check_calls(codec, thinks=template == "hermes_thinking")


def check_calls(codec: TextCodec, *, thinks: bool) -> None:
    answer = ("Well.\n</think>\n\n" if thinks else "") + "I look." + calls_text(codec, ARGUMENTS, {})
    whole = message(codec, answer, BODY)
    assert (whole["content"], whole["finish_reason"]) == ("I look.", "tool_calls")
    assert whole.get("reasoning") == whole.get("reasoning_content") == ("Well." if thinks else None)
    assert [call["function"]["name"] for call in whole["tool_calls"]] == ["weather", "weather"]
    assert [json.loads(call["function"]["arguments"]) for call in whole["tool_calls"]] == [ARGUMENTS, {}]
    assert len({call["id"] for call in whole["tool_calls"]}) == 2
    assert {call["type"] for call in whole["tool_calls"]} == {"function"}
    for at_once in (1, 7):
        total = streamed(codec, answer, BODY, at_once=at_once)
        assert total.pop("content") == "I look."
        assert total == {name: value for name, value in whole.items() if name not in ("content", "role")}


@pytest.mark.parametrize("template", ["hermes_thinking", "xml", "python", "kimi"])
def test_answer_when_it_goes_on_elsewhere_then_the_client_gets_what_it_lacks(template: str) -> None:
    codec = codec_of(template)
    answer = ("Well.\n</think>\n\n" if template == "hermes_thinking" else "") + "So: " + calls_text(codec, ARGUMENTS)
    num_tokens = len(codec.encode(answer, add_special_tokens=False))
    alone = [_texts(event) for event in answers(codec, answer, {**BODY, "stream": True})]
    for num_known in range(1, num_tokens, 9):
        rest = [_texts(event) for event in answers(codec, answer, {**BODY, "stream": True}, num_known=num_known)]
        # What the first node had sent by then and what the second one sends is what one node alone sends.
        together = [*alone[: len(alone) - len(rest)], *rest]
        assert [each for each in together if any(each)] == [each for each in alone if any(each)]


def _texts(event: Json) -> list[Any]:
    delta = event["choices"][0]["delta"]
    return [delta.get("content") or "", delta.get("reasoning", ""), delta.get("tool_calls", [])]


@pytest.mark.parametrize("body", [{"messages": [USER]}, BODY])
def test_characters_when_the_vocabulary_spells_them_in_bytes_then_streams_have_them_whole(body: Json) -> None:
    tokenizer = byte_fallback()
    tokenizer.chat_template = TEMPLATES["hermes"]
    codec = TextCodec(tokenizer, vocab_size=len(tokenizer))
    answer = "a€€ 😀😁!"
    assert message(codec, answer, body)["content"] == answer
    for at_once in (1, 7):
        assert streamed(codec, answer, body, at_once=at_once)["content"] == answer


def test_finish_reason_when_calls_are_cut_or_named_then_it_says_so() -> None:
    codec = codec_of("hermes")
    text = calls_text(codec, ARGUMENTS)
    assert message(codec, text, BODY)["finish_reason"] == "tool_calls"
    assert message(codec, text, BODY)["content"] is None
    assert message(codec, text[:-30], BODY, ends_by="length")["finish_reason"] == "length"
    assert message(codec, text, BODY, ends_by="length")["finish_reason"] == "length"
    cut = message(codec, text[:-30], BODY)
    assert cut["finish_reason"] == "stop"
    assert cut["tool_calls"][0]["function"]["arguments"].startswith('{"city": "Be')
    plain = message(codec, "Hello.", BODY)
    assert plain["finish_reason"] == "stop"
    assert "tool_calls" not in plain
    none = message(codec, text, {**BODY, "tool_choice": "none"})
    assert (none["content"], none["finish_reason"]) == (text, "stop")
    assert message(codec, text, {"messages": [USER]})["content"] == text


def test_stop_string_when_it_is_in_reasoning_or_arguments_then_the_answer_goes_on() -> None:
    codec = codec_of("hermes_thinking")
    answer = "I stop.\n</think>\n\nYes, stop now" + calls_text(codec, ARGUMENTS)
    found = message(codec, answer, {**BODY, "stop": "stop"})
    assert (found["reasoning"], found["content"], found["finish_reason"]) == ("I stop.", "Yes, ", "stop")
    assert "tool_calls" not in found
    included = message(codec, answer, {**BODY, "stop": ["stop"], "include_stop_str_in_output": True})
    assert included["content"] == "Yes, stop"
    calls = message(codec, answer, {**BODY, "stop": ["Bern", "</tool_call>", "city"]})
    assert json.loads(calls["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    assert streamed(codec, answer, {**BODY, "stop": "stop"}, at_once=50)["content"] == "Yes, "


@pytest.mark.parametrize("at_once", [1, 50])
def test_stop_string_when_a_call_is_in_its_middle_then_does_not_match_and_what_was_held_comes_first(
    at_once: int,
) -> None:
    codec = codec_of("hermes")
    answer = "Issue #" + calls_text(codec, ARGUMENTS) + "## more"
    body = {**BODY, "stop": ["###"]}
    whole = message(codec, answer, body)
    assert (whole["content"], len(whole["tool_calls"])) == ("Issue ### more", 1)
    events = answers(codec, answer, {**body, "stream": True}, at_once=at_once)
    deltas = [event["choices"][0]["delta"] for event in events]
    first_call = next(index for index, delta in enumerate(deltas) if delta.get("tool_calls"))
    assert "".join(delta.get("content") or "" for delta in deltas[: first_call + 1]).startswith("Issue #")
    assert streamed(codec, answer, body, at_once=at_once)["content"] == "Issue ### more"
    assert streamed(codec, answer + " ### x", body, at_once=at_once)["content"] == "Issue ### more "


@pytest.mark.parametrize("at_once", [1, 50])
@pytest.mark.parametrize("template", ["hermes", "xml", "python"])
def test_stop_string_when_it_ends_in_white_space_then_ends_the_answer_with_its_token(
    template: str, at_once: int
) -> None:
    codec = codec_of(template)
    body = {**BODY, "stop": ["\n\n"], "return_token_ids": True}
    for rest in ("World", calls_text(codec, ARGUMENTS)):
        token_ids = codec.encode("Hello \n\n" + rest, add_special_tokens=False)
        num_tokens = next(n for n in range(len(token_ids)) if codec.decode(token_ids[:n]) == "Hello \n\n")
        [response] = answers(codec, "Hello \n\n" + rest, body, at_once=at_once)
        [choice] = response["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello ", "stop")
        assert "tool_calls" not in choice["message"]
        assert (response["usage"]["completion_tokens"], choice["token_ids"]) == (num_tokens, token_ids[:num_tokens])


@pytest.mark.parametrize("template", ["hermes", "xml"])
def test_stop_string_when_white_space_is_round_calls_alone_then_does_not_match(template: str) -> None:
    codec = codec_of(template)
    found = message(codec, "\n" + calls_text(codec, ARGUMENTS, {}), {**BODY, "stop": ["\n"]})
    assert (found["content"], len(found["tool_calls"])) == (None, 2)


def test_usage_when_there_is_reasoning_then_its_tokens_are_counted() -> None:
    codec = codec_of("hermes_thinking")
    thought = "Hm, well.\n</think>"
    [response] = answers(codec, thought + "\n\nYes.", {"messages": [USER]})
    num_tokens = len(codec.encode(thought, add_special_tokens=False))
    assert response["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_tokens}
    events = answers(
        codec, thought + "Yes.", {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}}
    )
    assert events[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_tokens}
    off = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}
    [response] = answers(codec, "Yes.", off)
    assert response["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    [response] = answers(codec_of("hermes"), "Yes.", {"messages": [USER]})
    assert "completion_tokens_details" not in response["usage"]


def test_reasoning_when_the_client_does_not_want_it_then_it_is_left_out_and_counted() -> None:
    codec = codec_of("hermes_thinking")
    body = {"messages": [USER], "include_reasoning": False}
    [response] = answers(codec, "Hm.</think>Yes.", body)
    assert response["choices"][0]["message"] == {"role": "assistant", "content": "Yes."}
    assert response["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert "reasoning" not in streamed(codec, "Hm.</think>Yes.", body)


def test_reasoning_when_the_prompt_closed_it_then_the_answer_is_content() -> None:
    codec = codec_of("hermes_thinking")
    for variables in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert message(codec, "Yes.", {"messages": [USER], **variables})["content"] == "Yes."
    assert message(codec, "Yes.", {"messages": [USER]})["reasoning"] == "Yes."
    # The prompt's end alone counts, not what somebody wrote earlier.
    odd = {"role": "user", "content": "<think>"}
    assert message(codec_of("hermes_may_think"), "Yes.", {"messages": [odd]})["content"] == "Yes."


def test_forks_when_each_calls_then_each_call_has_an_id_of_its_own() -> None:
    codec = codec_of("hermes")
    [response] = answers(codec, calls_text(codec, ARGUMENTS, {}), {**BODY, "n": 3})
    ids = [call["id"] for choice in response["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 6
    [again] = answers(codec, calls_text(codec, ARGUMENTS, {}), {**BODY, "n": 3})
    assert ids == [call["id"] for choice in again["choices"] for call in choice["message"]["tool_calls"]]


@pytest.mark.parametrize("stream", [False, True])
def test_call_ids_when_turns_share_a_request_id_then_differ_and_are_kept_elsewhere(stream: bool) -> None:
    codec = codec_of("hermes")
    text = calls_text(codec, ARGUMENTS, {})
    say: Any = streamed if stream else message
    turns = (BODY, {**BODY, "messages": [USER, USER]}, BODY)
    first, second, again = ([call["id"] for call in say(codec, text, turn)["tool_calls"]] for turn in turns)
    assert len({*first, *second}) == 4
    assert again == first
    end_of_first_call = len(codec.encode(text[: text.index("}}") + 2], add_special_tokens=False))
    events = answers(codec, text, {**BODY, "stream": True}, num_known=end_of_first_call)
    pieces = [piece for event in events for piece in event["choices"][0]["delta"].get("tool_calls", ())]
    assert [piece["id"] for piece in pieces if "id" in piece] == first[1:]


def test_logprobs_when_there_are_calls_then_every_token_has_its_own() -> None:
    codec = codec_of("hermes")
    text = calls_text(codec, ARGUMENTS)
    [response] = answers(codec, text, {**BODY, "logprobs": True})
    num_tokens = len(codec.encode(text, add_special_tokens=False)) + 1
    assert len(response["choices"][0]["logprobs"]["content"]) == num_tokens
    events = answers(codec, text, {**BODY, "logprobs": True, "stream": True})
    entries = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {}).get("content", ())]
    assert len(entries) == num_tokens


def test_format_when_nothing_shows_it_then_calls_are_text_and_cannot_be_required() -> None:
    codec = codec_of("no_calls")
    assert message(codec, "<tool_call>x", BODY)["content"] == "<tool_call>x"
    named = codec_of("no_calls", Overrides("hermes"))
    assert message(named, calls_text(named, ARGUMENTS), BODY)["finish_reason"] == "tool_calls"
    with pytest.raises(InvalidRequestError, match="tool_choice") as caught:
        message(codec, "x", {**BODY, "tool_choice": "required"})
    assert caught.value.param == "tool_choice"


def history(arguments: Any, call_id: str = "functions.weather:0") -> Json:
    call = {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": call_id, "content": "sunny"}
    return {**BODY, "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]}


def rendered(codec: TextCodec, request: ChatRequest) -> str:
    return codec.render(request, request.messages, add_generation_prompt=False, continue_final_message=False)


@pytest.mark.parametrize("template", sorted(set(TEMPLATES) - {"no_calls", "hermes_may_think"}))
def test_history_when_it_has_what_the_model_wrote_then_the_prompt_has_its_tokens(template: str) -> None:
    codec = codec_of(template)
    switch = {"chat_template_kwargs": {"enable_thinking": False}}
    text = calls_text(codec, ARGUMENTS)
    found = message(codec, text, {**BODY, **switch})
    [call] = found["tool_calls"]
    given = history(call["function"]["arguments"], call["id"])
    before = codec.encode_chat(parse_chat({**BODY, **switch}))
    after = codec.encode_chat(parse_chat({**given, **switch}))
    answer = codec.encode(text, add_special_tokens=False)
    if template == "hermes_thinking":  # it leaves an empty thought out of the history
        before = codec.encode_chat(parse_chat({**BODY, "add_generation_prompt": False}))
        before = [*before, *codec.encode("<|assistant|>", add_special_tokens=False)]
    assert after[: len(before) + len(answer)] == [*before, *answer]


def test_history_when_arguments_are_written_in_other_ways_then_the_template_gets_what_it_needs() -> None:
    texts = {
        '{"city":  "Bern"}': '{"city":  "Bern"}',  # as the model may have written it
        '{"city":"Bern"}': '{"city": "Bern"}',  # as clients write objects again
        "": "{}",
    }
    for given, written in texts.items():
        for template in ("hermes", "kimi"):
            assert written in rendered(codec_of(template), parse_chat(history(given)))
    for template in ("granite", "xml", "python"):
        by_object = codec_of(template).encode_chat(parse_chat(history({"city": "Bern"})))
        assert codec_of(template).encode_chat(parse_chat(history('{"city":   "Bern"}'))) == by_object


@pytest.mark.parametrize("template", sorted(set(TEMPLATES) - {"no_calls", "hermes_may_think"}))
def test_history_when_the_model_wrote_a_call_wrong_then_it_is_taken_back(template: str) -> None:
    codec = codec_of(template)
    body = {**BODY, "chat_template_kwargs": {"enable_thinking": False}}
    text = calls_text(codec, {"city": "Bern", "days": 3})

    def arguments(answer: str, ends_by: str = "stop") -> str:
        [call] = message(codec, answer, body, ends_by=ends_by)["tool_calls"]
        for at_once in (1, 7):
            assert streamed(codec, answer, body, ends_by=ends_by, at_once=at_once)["tool_calls"] == [call]
        found: str = call["function"]["arguments"]
        assert codec.encode_chat(parse_chat(history(found, call["id"])))
        return found

    assert json.loads(arguments(text.replace("Bern", "Be\n\trn"))) == {"city": "Be\n\trn", "days": 3}
    assert arguments(text.replace("3", "True"))
    assert arguments(text[: text.index("Bern") + 2], "length")


@pytest.mark.parametrize("given", ['{"city":True}', '{"city": ', "no JSON", "[1]", "null", '"text"', "9" * 5000])
def test_history_when_arguments_are_no_object_then_they_are_text_where_the_template_takes_it(given: str) -> None:
    for template in ("hermes", "kimi", "granite", "xml", "python"):
        codec = codec_of(template)
        assert codec.answer_format.tools is not None
        request, empty = parse_chat(history(given)), parse_chat(history({}))
        prompt = rendered(codec, request)
        if codec.answer_format.tools.takes_text:
            assert given in prompt
        else:
            assert prompt == rendered(codec, empty)


def test_history_when_the_template_writes_no_calls_then_they_are_content() -> None:
    codec = codec_of("no_calls", Overrides("hermes"))
    text = codec.decode(codec.encode_chat(parse_chat(history('{"city": "Bern"}'))))
    assert calls_text(codec, {"city": "Bern"}) in text


def test_grammar_when_content_is_constrained_then_it_begins_after_the_reasoning() -> None:
    codec = codec_of("hermes_thinking")
    prompt = codec.encode_chat(parse_chat(BODY))

    def grammar(**fields: Any) -> str:
        plan = plan_answer(parse_chat({"messages": [USER], **fields}), codec, prompt, "r")
        assert plan is not None
        return plan.grammar or ""

    json_object = {"response_format": {"type": "json_object"}}
    assert grammar() == grammar(tools=[WEATHER]) == ""
    assert "think body" in grammar(**json_object)
    assert "weather" not in grammar(**json_object)
    assert "weather" in grammar(**json_object, tools=[WEATHER])
    assert plan_answer(parse_chat({"messages": [USER], **json_object}), codec_of("hermes"), prompt, "r") is None
