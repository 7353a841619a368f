"""Every field of the two generation routes: one that acts changes the request, one that does not is refused by name.

What a field does to an answer is tested where it happens (``tests/unit/node/test_fields.py``, ``tests/engine``); here
no field is forgotten on the way.
"""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequestError
from common.openai.bodies.base import MAX_FIELDS
from common.openai.bodies.models import ChatBody, CompletionBody
from common.openai.bodies.unsupported import HARMLESS, INTERNAL_FIELDS, UNSUPPORTED
from common.openai.protocol import parse_chat, parse_completion

FUNCTION = {"type": "function", "function": {"name": "f"}}
OTHERS: dict[str, dict[str, Any]] = {
    "guided_whitespace_pattern": {"guided_json": {}},
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "logprob_token_ids": {"logprobs": True},
    "tool_choice": {"tools": [FUNCTION]},
    "parallel_tool_calls": {"tools": [FUNCTION]},
    "truncation_side": {"truncate_prompt_tokens": 3},
}
"""Fields without which another one is refused."""
# Field -> a value that asks for something, and one that is no value of it.
FIELDS: dict[str, tuple[Any, Any]] = {
    "model": ("m", 1),
    "prompt": ("other", 1),
    "messages": ([{"role": "user", "content": "other"}], 1),
    "cache_salt": ("s", 1),
    "priority": (3, "3"),
    "add_special_tokens": (True, 1),
    "truncate_prompt_tokens": (3, 1.5),
    "truncation_side": ("right", "up"),
    "tools": ([FUNCTION], 1),
    "tool_choice": ("none", "any"),
    "reasoning_effort": ("low", "some"),
    "add_generation_prompt": (False, 1),
    "continue_final_message": (True, "yes"),
    "chat_template_kwargs": ({"a": 1}, []),
    "chat_template": ("x", 1),
    "documents": ([{"text": "a"}], {}),
    "max_tokens": (3, "3"),
    "max_completion_tokens": (3, True),
    "min_tokens": (3, -1),
    "temperature": (0.5, "0.5"),
    "top_p": (0.5, 0),
    "top_k": (5, 5.5),
    "min_p": (0.5, 2),
    "seed": (5, 5.5),
    "presence_penalty": (1, 3),
    "frequency_penalty": (1, -3),
    "repetition_penalty": (1.5, 0),
    "logit_bias": ({"5": 1}, []),
    "allowed_token_ids": ([5], 5),
    "bad_words": (["a"], "a"),
    "stop": ("a", 5),
    "stop_token_ids": ([5], [True]),
    "include_stop_str_in_output": (True, 1),
    "ignore_eos": (True, "true"),
    "n": (2, 0),
    "best_of": (None, "2"),
    "stream": (True, 1),
    "stream_options": ({"include_usage": True}, True),
    "skip_special_tokens": (False, 0),
    "return_token_ids": (True, 1),
    "return_tokens_as_token_ids": (True, 1),
    "logprob_token_ids": ([5], 5),
    "prompt_logprobs": (1, True),
    "request_id": ("r", "a b"),
    "echo": (True, 1),
    "include_reasoning": (False, 0),
    "thinking_token_budget": (5, -2),
    "parallel_tool_calls": (False, 0),
    "top_logprobs": (2, 21),
    "response_format": ({"type": "json_object"}, 1),
    "structured_outputs": ({"json": {}}, 1),
    "guided_json": ({}, 1),
    "guided_json_object": (True, 1),
    "guided_regex": ("a+", 1),
    "guided_choice": (["a"], []),
    "guided_grammar": ('root ::= "a"', 1),
    "guided_whitespace_pattern": (" ?", 1),
}
ROUTES = {"completion": (parse_completion, CompletionBody), "chat": (parse_chat, ChatBody)}
PROMPTS: dict[str, dict[str, Any]] = {
    "completion": {"prompt": "hi"},
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
}
CASES = [(route, name) for route, (_, model) in ROUTES.items() for name in model.model_fields if name != "logprobs"]


@pytest.mark.parametrize(("route", "name"), CASES)
def test_field_when_it_asks_for_something_then_the_request_has_it_or_it_is_refused_by_name(
    route: str, name: str
) -> None:
    good, bad = FIELDS[name]
    parse, _ = ROUTES[route]
    others = dict(OTHERS.get(name, {}))
    if route == "completion" and "logprobs" in others:
        others["logprobs"] = 1
    body = {**PROMPTS[route], **others}
    for refused in (bad,) if name != "best_of" else (bad, 2):
        with pytest.raises(InvalidRequestError, match=name) as caught:
            parse({**body, name: refused})
        assert str(caught.value.param).startswith(name)
    error: InvalidRequestError | None = None
    try:
        parsed = parse({**body, name: good})
    except InvalidRequestError as exc:
        error = exc
    if error is None:
        assert (parsed != parse(body)) == (name != "best_of")
    else:
        assert (error.param, error.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(("parse", "good"), [(parse_completion, 2), (parse_chat, True)])
def test_logprobs_when_asked_for_then_the_request_has_them(parse: Any, good: Any) -> None:
    body = PROMPTS["chat" if parse is parse_chat else "completion"]
    assert parse({**body, "logprobs": good}).sampling.logprobs is not None
    with pytest.raises(InvalidRequestError, match="logprobs"):
        parse({**body, "logprobs": "2"})


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
@pytest.mark.parametrize("route", ROUTES)
def test_field_of_others_when_it_asks_for_something_then_is_refused_by_name(route: str, name: str) -> None:
    parse, model = ROUTES[route]
    if name in model.model_fields:
        return  # acts on this route
    for value in ({"a": 1}, ["a"], "a", 5):
        with pytest.raises(InvalidRequestError, match=name) as refused:
            parse({**PROMPTS[route], name: value})
        assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
    assert parse({**PROMPTS[route], name: None}) == parse(PROMPTS[route])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store", False),
        ("best_of", 1),
        ("length_penalty", 1),
        ("modalities", ["text"]),
        ("verbosity", "medium"),
        ("suffix", ""),
        ("separate_reasoning", True),
        ("return_token_offsets", False),
        ("spaces_between_special_tokens", True),
        ("stream_interval", 1),
        *((name, "x") for name in sorted(HARMLESS)),
    ],
)
def test_field_of_others_when_it_changes_nothing_then_is_accepted(name: str, value: Any) -> None:
    for route, (parse, _) in ROUTES.items():
        parsed = parse({**PROMPTS[route], name: value})
        assert (parsed, parsed.unknown_fields) == (parse(PROMPTS[route]), ())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("return_token_offsets", True),
        ("return_mm_kwargs", True),
        ("spaces_between_special_tokens", False),
        ("stream_interval", 10),
    ],
)
def test_option_of_an_answer_that_is_not_built_when_asked_for_then_is_refused_by_name(name: str, value: Any) -> None:
    for route, (parse, _) in ROUTES.items():
        with pytest.raises(InvalidRequestError, match=name) as refused:
            parse({**PROMPTS[route], name: value})
        assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")


def test_field_that_nobody_knows_when_given_then_is_accepted_and_named() -> None:
    for route, (parse, _) in ROUTES.items():
        body = {**PROMPTS[route], "frobnicate": 1, "user": "u", **dict.fromkeys(INTERNAL_FIELDS)}
        assert parse(body).unknown_fields == ("frobnicate",)


def test_stream_options_when_nobody_knows_a_name_then_it_is_named_with_its_place() -> None:
    options = {"include_usage": True, "include_usages": True, "user": "u", "include_obfuscation": False}
    for route, (parse, _) in ROUTES.items():
        parsed = parse({**PROMPTS[route], "stream": True, "stream_options": options, "frobnicate": 1})
        assert parsed.unknown_fields == ("frobnicate", "stream_options.include_usages", "stream_options.user")
        with pytest.raises(InvalidRequestError, match=r"stream_options\.include_obfuscation True") as refused:
            parse({**PROMPTS[route], "stream": True, "stream_options": {"include_obfuscation": True}})
        assert refused.value.code == "unsupported_parameter"
        assert refused.value.param == "stream_options.include_obfuscation"


@pytest.mark.parametrize(("parse", "route"), [(parse_completion, "completion"), (parse_chat, "chat")])
def test_fields_when_there_are_thousands_then_refused_with_their_number(parse: Any, route: str) -> None:
    body = {**PROMPTS[route], **{f"k{number}": 0 for number in range(MAX_FIELDS)}}
    with pytest.raises(InvalidRequestError, match=rf"the body must have at most {MAX_FIELDS} fields, got {len(body)}"):
        parse(body)
    while len(body) > MAX_FIELDS:
        body.popitem()
    assert parse(body).unknown_fields
