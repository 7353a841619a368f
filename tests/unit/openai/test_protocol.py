from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from common.errors import ContextLengthError, ContextOverflow, InvalidRequestError, ModelNotFoundError
from common.openai.messages import CacheMark
from common.openai.protocol import (
    check_model,
    check_token_ids,
    common_sampling_params,
    parse_chat,
    parse_completion,
    to_sampling_params,
)
from common.request import SamplingParams
from common.wire.handoff import TransferMode, prefill_leg_params

USER = [{"role": "user", "content": "hi"}]
FUNCTION = {"type": "function", "function": {"name": "f"}}


def completion(**fields: Any):
    return parse_completion({"prompt": "hello", **fields})


def chat(**fields: Any):
    return parse_chat({"messages": USER, **fields})


def called(**fields: Any) -> list[dict[str, Any]]:
    """A message with a call as it should be, and one with ``fields``."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [{"role": "assistant", "content": None, "tool_calls": [call, {**call, **fields}]}]


def params(request: Any, *, num_prompt_tokens: int = 10, max_model_len: int = 100, vocab_size: int = 1000):
    common = common_sampling_params(request, vocab_size=vocab_size)
    return to_sampling_params(request, common, num_prompt_tokens=num_prompt_tokens, max_model_len=max_model_len)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        ([1, 2], ((1, 2),)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a", [1]], ("a", (1,))),
    ],
)
def test_prompt_in_each_form_gives_one_entry_per_prompt(prompt: Any, expected: Any) -> None:
    assert parse_completion({"prompt": prompt}).prompts == expected


@pytest.mark.parametrize(
    "prompt", [None, "", [], [""], [[]], ["a", ""], [1, "a"], [True], [1.0], [-1], [2**31], 5, {}, [None], [[1, None]]]
)
def test_prompt_when_empty_or_malformed_names_prompt(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_completion({"prompt": prompt})
    assert caught.value.param == "prompt"
    assert "prompt" in caught.value.message


def test_all_fields_null_give_the_defaults() -> None:
    names = [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "seed",
        "stop",
        "stop_token_ids",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "ignore_eos",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "echo",
        "skip_special_tokens",
        "return_token_ids",
        "stream",
        "stream_options",
        "model",
        "cache_salt",
        "priority",
        "tools",
        "tool_choice",
        "response_format",
        "best_of",
        "suffix",
    ]
    nulls = dict.fromkeys(names)
    assert parse_completion({"prompt": "hello", **nulls}) == completion()
    assert parse_chat({"messages": USER, **nulls}) == chat()
    assert params(completion()) == SamplingParams(max_tokens=16)


def test_every_sampling_field_reaches_the_engine() -> None:
    request = completion(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=-3, stop_token_ids=[5, 6, 5], max_tokens=9,
        min_tokens=2, ignore_eos=True, presence_penalty=1, frequency_penalty=-2, repetition_penalty=1.5,
        logit_bias={"3": -100, "4": 2}, logprobs=4, echo=True, allowed_token_ids=[7, 8], logprob_token_ids=[9, 8, 9],
    )  # fmt: skip
    assert params(request) == SamplingParams(
        max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=-3,
        stop_token_ids=frozenset({5, 6}), ignore_eos=True, presence_penalty=1.0, frequency_penalty=-2.0,
        repetition_penalty=1.5, logit_bias={3: -100.0, 4: 2.0}, logprobs=4, prompt_logprobs=4,
        allowed_token_ids=frozenset({7, 8}), logprob_token_ids=(9, 8),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("temperature", -0.1, "between 0 and 2"),
        ("temperature", 2.1, "between 0 and 2"),
        ("temperature", float("nan"), "nan"),
        ("temperature", 10**400, "between 0 and 2"),
        ("temperature", "1", "'1'"),
        ("temperature", True, "True"),
        ("top_p", 0, "greater than 0"),
        ("top_p", 1.01, "at most 1"),
        ("top_k", -2, "-2"),
        ("top_k", 1.0, "1.0"),
        ("min_p", 2, "2"),
        ("n", 0, "between 1 and 128"),
        ("n", 129, "between 1 and 128"),
        ("n", True, "True"),
        ("seed", 2**63, str(2**63)),
        ("seed", 1.5, "1.5"),
        ("stop", "", "''"),
        ("stop", ["a", 3], "3"),
        ("stop", ["x"] * 17, "at most 16"),
        ("stop", 3, "3"),
        ("stop_token_ids", [1, -1], "stop_token_ids[1]"),
        ("stop_token_ids", "1", "'1'"),
        ("max_tokens", -1, "-1"),
        ("max_tokens", 0, "echo"),
        ("max_tokens", "16", "'16'"),
        ("max_completion_tokens", 1.5, "1.5"),
        ("min_tokens", -1, "-1"),
        ("ignore_eos", 1, "1"),
        ("presence_penalty", 2.5, "between -2 and 2"),
        ("frequency_penalty", -2.5, "between -2 and 2"),
        ("repetition_penalty", 0, "between 0.01"),
        ("logprobs", 21, "between 0 and 20"),
        ("logprobs", True, "True"),
        ("logit_bias", {"a": 1}, "'a'"),
        ("logit_bias", {"01": 1}, "'01'"),
        ("logit_bias", {"1": 101}, "101"),
        ("logit_bias", [1], "[1]"),
        ("echo", "yes", "'yes'"),
        ("stream", 1, "1"),
        ("skip_special_tokens", "no", "'no'"),
        ("cache_salt", "", "0 characters"),
        ("cache_salt", 3, "3"),
        ("priority", "high", "'high'"),
        ("model", 3, "3"),
        ("kv_transfer_params", [], "[]"),
    ],
)
def test_bad_value_names_field_value_and_bound(field: str, value: Any, shown: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**{field: value})
    assert caught.value.param == field
    assert field in caught.value.message
    assert shown in caught.value.message


def test_error_message_when_value_is_huge_stays_short() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(temperature="x" * 100_000)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("guided_whatever", "x"),
        ("best_of", 2),
        ("suffix", "x"),
        ("logits_processors", ["p"]),
    ],
)
def test_known_but_unbuilt_field_is_refused_by_name(field: str, value: Any) -> None:
    for parse in (completion, chat):
        with pytest.raises(InvalidRequestError, match=field) as caught:
            parse(**{field: value})
        assert caught.value.param == field
        assert caught.value.code == "unsupported_parameter"


def test_constraint_when_given_then_is_part_of_the_request_and_of_no_prefill_leg() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for parse in (completion, chat):
        request = parse(response_format=schema)
        assert request.constraint is not None
        assert request.constraint.param == "response_format.json_schema.schema"
        assert parse(response_format=schema, kv_transfer_params=prefill_leg_params()).constraint is None
        with pytest.raises(InvalidRequestError, match="structured_outputs"):
            parse(response_format=schema, structured_outputs={"regex": "a"})


def test_known_but_unbuilt_field_with_a_neutral_value_is_accepted() -> None:
    neutral = {"response_format": {"type": "text"}, "tool_choice": "auto", "functions": [], "suffix": "", "best_of": 2}
    assert completion(**neutral, n=2) == completion(n=2)


def test_unknown_field_is_ignored() -> None:
    assert completion(frobnicate=[1, 2], user=3) == completion()


def test_prefill_leg_ignores_every_sampling_and_output_field_however_inconsistent() -> None:
    noise = {
        "max_tokens": 1, "min_tokens": 50, "n": 4, "stream": False, "stream_options": {"include_usage": True},
        "temperature": "hot", "response_format": {"type": "json_object"}, "logprobs": "many", "best_of": 9,
        "guided_json": {}, "stop": [""], "kv_transfer_params": prefill_leg_params(),
    }  # fmt: skip
    request = completion(**noise, cache_salt="s", priority=3)
    assert request.transfer_mode is TransferMode.REMOTE_DECODE
    assert (request.prompts, request.cache_salt, request.priority) == (("hello",), "s", 3)
    assert request.output.n == 1
    assert params(request, num_prompt_tokens=100, max_model_len=100) == SamplingParams(max_tokens=1)
    asked = chat(**noise, tools=[FUNCTION], chat_template_kwargs={"enable_thinking": False})
    assert asked.tools == (FUNCTION,)
    assert asked.chat_template_kwargs == {"enable_thinking": False}


def test_prefill_leg_still_checks_what_it_reads() -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        parse_completion({"prompt": "", "kv_transfer_params": {"do_remote_decode": True}})
    with pytest.raises(InvalidRequestError, match="both"):
        completion(kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": True})
    with pytest.raises(InvalidRequestError, match="do_remote_decode"):
        completion(kv_transfer_params={"do_remote_decode": "yes"})


def test_stream_options_without_stream_is_refused() -> None:
    assert completion(stream=True, stream_options={"include_usage": True}).output.include_usage
    with pytest.raises(InvalidRequestError) as caught:
        completion(stream_options={"include_usage": True})
    assert caught.value.param == "stream_options"


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert params(chat(max_tokens=5, max_completion_tokens=7)).max_tokens == 7


def test_max_tokens_absent_is_16_for_completions_and_the_remaining_context_for_chat() -> None:
    assert params(completion()).max_tokens == 16
    assert params(completion(), num_prompt_tokens=95).max_tokens == 5
    assert params(chat(), num_prompt_tokens=30).max_tokens == 70


@pytest.mark.parametrize(
    ("ask", "num_prompt_tokens", "param", "what", "max_tokens"),
    [
        (completion, 10, "max_tokens", "prompt has 10 tokens, and max_tokens asks for 91 more: 101 together", 91),
        (chat, 101, "messages", "messages has 101 tokens", None),
        (completion, 101, "prompt", "prompt has 101 tokens", None),
        (
            lambda **_: chat(),
            100,
            "messages",
            "messages has 100 tokens, and an answer asks for 1 more: 101 together",
            1,
        ),
    ],
)
def test_request_when_over_the_context_then_is_told_in_openais_words_with_field_value_and_bound(
    ask: Callable[..., Any], num_prompt_tokens: int, param: str, what: str, max_tokens: int | None
) -> None:
    assert params(completion(max_tokens=90)).max_tokens == 90
    with pytest.raises(InvalidRequestError) as caught:
        params(ask(max_tokens=91), num_prompt_tokens=num_prompt_tokens)
    error = caught.value
    assert error.message == f"This model's maximum context length is 100 tokens. However, {what}."
    assert (error.param, error.code) == (param, "context_length_exceeded")
    assert error.overflow == ContextOverflow(100, num_prompt_tokens, max_tokens)
    assert ContextLengthError.read(error.message) == error.overflow


def test_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        params(chat(), num_prompt_tokens=0)


def test_max_tokens_zero_needs_echo_and_may_fill_the_context() -> None:
    request = completion(max_tokens=0, echo=True, logprobs=0)
    result = params(request, num_prompt_tokens=100)
    assert (result.max_tokens, result.prompt_logprobs, result.logprobs) == (0, 0, 0)
    with pytest.raises(InvalidRequestError):
        chat(max_tokens=0)


def test_min_tokens_over_max_tokens_is_refused_given_or_implied() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        completion(max_tokens=3, min_tokens=4)
    with pytest.raises(InvalidRequestError, match="at most max_tokens 16"):
        params(completion(min_tokens=17))


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_when_it_is_wrong_then_the_field_that_was_given_is_named(name: str) -> None:
    for ask in (chat, completion):
        with pytest.raises(InvalidRequestError, match=f"^{name} ") as caught:
            ask(**{name: 0})
        assert caught.value.param == name
        with pytest.raises(InvalidRequestError, match=f"has 10 tokens, and {name} asks for 91 more") as caught:
            params(ask(**{name: 91}))
        assert caught.value.param == name
        with pytest.raises(InvalidRequestError, match=f"at most {name} 3,"):
            ask(**{name: 3, "min_tokens": 4})


def test_token_ids_beyond_the_vocabulary_are_refused() -> None:
    for request in (
        completion(stop_token_ids=[1000]),
        completion(logit_bias={"1000": 1}),
        completion(allowed_token_ids=[1000]),
        completion(logprobs=0, logprob_token_ids=[1000]),
    ):
        with pytest.raises(InvalidRequestError, match="1000"):
            params(request)
        assert params(request, vocab_size=1001)
    with pytest.raises(InvalidRequestError, match="prompt"):
        check_token_ids("prompt", (3, 7), 7)


@pytest.mark.parametrize(
    ("most", "param", "words"),
    [
        (lambda more: completion(prompt=["a"] * (16 + more), n=128), "n", "2048 answers"),
        (lambda more: completion(prompt=["a"] * 2048, n=1 + more), "n", "2048 answers"),
        (lambda more: completion(prompt=["a"] * (2048 + more)), "prompt", "2048"),
        (lambda more: completion(prompt=[[1], [7] * (499_999 + more)]), "prompt", "500000 tokens together, got 500001"),
        (lambda more: completion(logit_bias={str(key): 1 for key in range(1024 + more)}), "logit_bias", "1024"),
        (lambda more: completion(stop_token_ids=list(range(1024 + more))), "stop_token_ids", "1024"),
        (
            lambda more: chat(chat_template_kwargs=dict.fromkeys(map(str, range(256 + more)))),
            "chat_template_kwargs",
            "256",
        ),
        (lambda more: chat(tools=[FUNCTION] * (1024 + more)), "tools", "1024"),
        (lambda more: chat(messages=[{"role": "user", "content": ""}] * (10_000 + more)), "messages", "10000"),
    ],
)
def test_counts_when_at_their_bound_then_taken_and_one_more_is_refused(
    most: Callable[[int], object], param: str, words: str
) -> None:
    assert most(0)
    with pytest.raises(InvalidRequestError, match=words) as refused:
        most(1)
    assert refused.value.param == param


def test_arguments_of_tool_calls_when_they_hold_too_much_together_then_refused() -> None:
    arguments = "[" + ",".join(["[]"] * 90_000) + "]"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert chat(messages=[{"role": "assistant", "tool_calls": [call] * 2}])
    with pytest.raises(InvalidRequestError, match="200000 objects") as refused:
        chat(messages=[{"role": "assistant", "tool_calls": [call] * 3}])
    assert refused.value.param == "messages[0].tool_calls[2].function.arguments"


def test_chat_logprobs_are_a_switch_and_a_count() -> None:
    assert chat().sampling.logprobs is None
    assert chat(logprobs=False, top_logprobs=0).sampling.logprobs is None
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).sampling.logprobs == 20
    for bad in ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": 3}):
        with pytest.raises(InvalidRequestError, match="logprobs"):
            chat(**bad)


def test_tiny_temperature_is_greedy_and_top_k_minus_one_is_off() -> None:
    request = completion(temperature=1e-9, top_k=-1)
    assert request.sampling.temperature == 0.0
    assert request.sampling.top_k == 0


def test_continue_final_message_turns_the_generation_prompt_off() -> None:
    assert chat().add_generation_prompt
    assert not chat(continue_final_message=True).add_generation_prompt
    with pytest.raises(InvalidRequestError, match="continue_final_message"):
        chat(continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].image_url.url",
        ),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].image_url"),
        ([{"role": "user", "content": [{"type": "video_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "content": [{"type": "refusal"}]}], "messages[0].content[0].refusal"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0]"),
        ([{"role": "tool", "content": "x", "tool_call_id": 5}], "messages[0].tool_call_id"),
        (USER + called(type="custom"), "messages[1].tool_calls[1].type"),
        (USER + called(id=7), "messages[1].tool_calls[1].id"),
        (USER + called(function="f"), "messages[1].tool_calls[1]"),
        (USER + called(function={"arguments": "{}"}), "messages[1].tool_calls[1].function.name"),
        (USER + called(function={"name": ""}), "messages[1].tool_calls[1].function.name"),
        (USER + called(function={"name": 5}), "messages[1].tool_calls[1].function.name"),
        (USER + called(function={"name": "f", "arguments": 5}), "messages[1].tool_calls[1].function.arguments"),
        (USER + called(function={"name": "f", "arguments": []}), "messages[1].tool_calls[1].function.arguments"),
    ],
)
def test_bad_message_names_its_place(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat({"messages": messages})
    assert caught.value.param == param


def test_text_parts_are_joined_and_tool_arguments_become_objects() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    request = parse_chat(
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": calls}]}
    )
    assert request.messages[0] == {"role": "user", "content": "a\nb"}
    assert request.messages[1]["content"] == ""
    assert request.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert calls[0]["function"]["arguments"] == '{"x": 1}'


def test_refusal_when_it_comes_back_as_a_part_then_is_text_with_its_marks() -> None:
    refusal = {"type": "refusal", "refusal": "No.", "cache_control": {"type": "ephemeral"}}
    message = {"role": "assistant", "content": [refusal, {"type": "text", "text": "Sorry."}]}
    request = parse_chat({"messages": [message]})
    assert request.messages == ({"role": "assistant", "content": "No.\nSorry."},)
    assert request.cache_marks == (CacheMark(0, len("No.\n")),)


def test_tools_must_be_objects() -> None:
    assert chat(tools=[]).tools is None
    for tools in ("x", [1], {"a": 1}):
        with pytest.raises(InvalidRequestError, match="tools"):
            chat(tools=tools)


def test_calls_of_a_history_when_shaped_as_clients_send_them_then_are_taken() -> None:
    for fields, arguments in (
        ({"function": {"name": "f", "arguments": {"x": 1}}}, {"x": 1}),
        ({"function": {"name": "f", "arguments": ""}}, {}),
        ({"function": {"name": "f", "arguments": "no JSON"}}, {}),
        ({"function": {"name": "f", "arguments": None}}, None),
        ({"function": {"name": "f"}, "id": None, "type": None, "index": 1}, None),
    ):
        result = {"role": "tool", "content": "x"}  # only some templates need the call's id
        request = chat(messages=[*USER, *called(**fields), result, {**result, "tool_call_id": "1"}])
        assert request.messages[1]["tool_calls"][1]["function"] == {"name": "f", "arguments": arguments}


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "web_search"}, "tools[1].type"),
        ({"type": "custom", "custom": {"name": "f"}}, "tools[1].type"),
        ({"type": "function"}, "tools[1].function"),
        ({"type": "function", "name": "f"}, "tools[1].function"),  # as Responses has it
        ({"function": "f"}, "tools[1].function"),
        ({"function": {}}, "tools[1].function.name"),
        ({"function": {"name": ""}}, "tools[1].function.name"),
        ({"function": {"name": 5}}, "tools[1].function.name"),
        ({"function": {"name": "f" * 257}}, "tools[1].function.name"),
        ({"function": {"name": "f", "description": 5}}, "tools[1].function.description"),
        ({"function": {"name": "f", "parameters": '{"type": "object"}'}}, "tools[1].function.parameters"),
        ({"function": {"name": "f", "strict": "false"}}, "tools[1].function.strict"),
    ],
)
def test_tool_when_it_is_no_function_or_its_parts_do_not_fit_then_is_refused_by_its_place(
    tool: dict[str, Any], param: str
) -> None:
    for choice in (None, "none", "auto", "required"):
        with pytest.raises(InvalidRequestError, match=re.escape(param)) as refused:
            chat(tools=[FUNCTION, tool], tool_choice=choice)
        assert refused.value.param == param


def test_tools_when_shaped_as_clients_send_them_then_are_taken_as_they_are() -> None:
    function = {"name": "f", "description": None, "parameters": None, "strict": None, "return": {"type": "string"}}
    tools = [{"type": "function", "function": function}, {"function": {"name": "g", "parameters": {}}}]
    assert chat(tools=tools).tools == tuple(tools)


def test_model_absent_or_empty_is_the_served_one_and_another_is_404() -> None:
    for name in (None, "", "m"):
        check_model(name, ["m"])
    with pytest.raises(ModelNotFoundError, match="'x'") as caught:
        check_model("x", ["m"])
    assert caught.value.status == 404


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from(
    [
        "prompt", "messages", "temperature", "top_k", "seed", "stop", "stop_token_ids", "max_tokens", "min_tokens",
        "logit_bias", "logprobs", "top_logprobs", "stream", "stream_options", "n", "best_of", "tools", "tool_choice",
        "response_format", "suffix", "kv_transfer_params", "chat_template_kwargs", "cache_salt", "guided_json",
    ]
)  # fmt: skip


@settings(max_examples=60)
@given(noise=st.dictionaries(FIELDS, JSON, max_size=4))
def test_any_json_is_parsed_or_refused_with_a_field_name(noise: dict[str, Any]) -> None:
    for parse, body in ((parse_completion, {"prompt": "x", **noise}), (parse_chat, {"messages": USER, **noise})):
        param: str | None = "none"
        try:
            params(parse(body), max_model_len=2**40)
        except InvalidRequestError as exc:
            param = exc.param
        assert param


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"stream": True, "stream_options": 3}, "stream_options", "an object"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
        ({"truncation_side": "up"}, "truncation_side", "one of left, right, got 'up'"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "between -1"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
        ({"bad_words": [""]}, "bad_words", "1 to 512"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids", "between 0 and"),
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids", "at most 128"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
        ({"request_id": ""}, "request_id", "1 to 128"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids", "only with logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "only without stream"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "only with include_usage",
        ),
    ],
)
def test_value_of_a_newer_field_when_bad_then_named_with_its_bound(fields: Any, param: str, words: str) -> None:
    for make in (completion, chat):
        with pytest.raises(InvalidRequestError, match=words) as refused:
            make(**fields)
        assert refused.value.param == param
        assert refused.value.__context__ is None or not isinstance(refused.value.__context__, ValidationError)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required"}, "needs tools"),
        ({"tool_choice": {"type": "function"}}, "none, auto, required, or"),
        ({"tool_choice": "g"}, "none, auto, required, or"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [FUNCTION]},
            "one of tools, got 'g'",
        ),
    ],
)
def test_tool_choice_when_it_cannot_be_then_refused(fields: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as refused:
        chat(**fields)
    assert refused.value.param == "tool_choice"


def test_tool_choice_when_absent_then_auto_with_tools_and_none_without() -> None:
    assert (chat().tool_choice, chat(tools=[FUNCTION]).tool_choice) == ("none", "auto")
    assert chat(tools=[FUNCTION], tool_choice="none").tool_choice == "none"


def test_field_of_the_other_route_when_it_asks_for_something_then_refused_by_name() -> None:
    for name, value in (("tools", [FUNCTION]), ("documents", [{"text": "a"}]), ("include_reasoning", False)):
        with pytest.raises(InvalidRequestError, match=name) as refused:
            completion(**{name: value})
        assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")


def test_prompt_of_the_other_route_when_both_are_given_then_taken_and_told() -> None:
    assert chat(prompt="x").unknown_fields == ("prompt",)
    assert completion(messages=USER).unknown_fields == ("messages",)
