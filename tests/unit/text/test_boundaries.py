"""Semantic boundaries against real templates' habits: what a later prompt shares must end where a state is kept."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from common.models.synthetic import CHAT_TEMPLATE, build_tokenizer
from common.openai.messages import CacheMark
from common.openai.protocol import parse_chat
from common.text.boundaries import MAX_BOUNDARIES, MAX_CANDIDATES, MIN_GAP
from common.text.tokenizer import TextCodec

FENCED = CHAT_TEMPLATE
# Refuses conversations without a user's question; drops the reasoning of turns before the last question, and opens the
# answer with it.
REASONING = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages -%}"
    "{%- if m['role'] == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if ns.last < 0 -%}{{ raise_exception('no user query') }}{%- endif -%}"
    "{%- if tools -%}{{ '<|tool|>' + (tools | tojson) + '<|end|>' }}{%- endif -%}"
    "{%- for m in messages -%}{{ '<|' + m['role'] + '|>' }}"
    "{%- if m['role'] == 'assistant' and loop.index0 > ns.last -%}{{ 'think:' + (m['reasoning'] or '') }}{%- endif -%}"
    "{{ m['content'] + '<|end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>think:' }}{%- endif -%}"
)
# The system prompt is part of the first question; roles must alternate and begin with a question.
MERGING = (
    "{%- set system = messages[0]['content'] + '@@' if messages[0]['role'] == 'system' else '' -%}"
    "{%- set rest = messages[1:] if system else messages -%}"
    "{%- if not rest -%}{{ raise_exception('empty') }}{%- endif -%}"
    "{%- for m in rest -%}"
    "{%- if (m['role'] == 'user') == (loop.index0 % 2) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}"
    "{{ '<|' + m['role'] + '|>' + (system if loop.first else '') + m['content'] + '<|end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
# As Qwen3.5's: one system message, at the beginning.
SYSTEM_FIRST = (
    "{%- for m in messages -%}"
    "{%- if m['role'] == 'system' and not loop.first -%}{{ raise_exception('must be at the beginning') }}{%- endif -%}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
TEMPLATES = {"fenced": FENCED, "reasoning": REASONING, "merging": MERGING}

SYSTEM = {"role": "system", "content": "You explain the modules of a standard library, one after the other, in detail."}
TURNS = [
    {"role": "user", "content": "What is asyncio for, and when would I rather use threads or processes?"},
    {"role": "assistant", "content": "It runs many tasks in one thread; threads are for calls that block."},
    {"role": "user", "content": "And what are processes for, compared with both of these, in a server?"},
    {"role": "assistant", "content": "For work that keeps the processor busy, or that must be isolated."},
    {"role": "user", "content": "Which of them does the logging module work with, and how is it set up?"},
]


@pytest.fixture(scope="module")
def codecs() -> dict[str, TextCodec]:
    found = {}
    for name, template in TEMPLATES.items():
        tokenizer: Any = build_tokenizer(1024, 1 << 20)
        tokenizer.chat_template = template
        found[name] = TextCodec(tokenizer, vocab_size=1024)
    return found


def boundaries(codec: TextCodec, messages: list[dict[str, Any]], **fields: Any) -> tuple[list[int], tuple[int, ...]]:
    """The prompt's tokens, and the positions found in them."""
    request = parse_chat({"messages": messages, **fields})
    token_ids = codec.encode_chat(request)
    return token_ids, codec.chat_boundaries(request, token_ids)


def num_shared(codec: TextCodec, token_ids: list[int], messages: list[dict[str, Any]], **fields: Any) -> int:
    other = codec.encode_chat(parse_chat({"messages": messages, **fields}))
    return next((i for i, (a, b) in enumerate(zip(token_ids, other, strict=False)) if a != b), len(token_ids))


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_place_where_conversations_part_when_first_sighted_then_has_a_boundary_close_below(
    codecs: dict[str, TextCodec], name: str
) -> None:
    codec = codecs[name]
    messages = [SYSTEM, *TURNS]
    token_ids, found = boundaries(codec, messages)
    for kept in (1, 3, 5):  # the system prompt and 0, 1, 2 turns, then another question
        later = [*messages[:kept], {"role": "user", "content": "9 other words"}]
        shared = num_shared(codec, token_ids, later)
        assert max((p for p in found if p <= shared), default=0) >= shared - 4, (kept, shared, found)
    answered = [*messages, {"role": "assistant", "content": "All of them."}, {"role": "user", "content": "Show me."}]
    shared = num_shared(codec, token_ids, answered)
    assert max(p for p in found if p <= shared) >= shared - 4


@pytest.mark.parametrize("name", TEMPLATES)
def test_boundaries_when_found_are_few_ordered_by_use_and_inside_the_prompt(
    codecs: dict[str, TextCodec], name: str
) -> None:
    token_ids, found = boundaries(codecs[name], [SYSTEM, *TURNS])
    assert 3 <= len(found) <= MAX_BOUNDARIES
    assert len(set(found)) == len(found)
    assert all(MIN_GAP <= position < len(token_ids) for position in found)
    assert found[0] == min(found)  # the system prompt comes first, then the last message
    assert found[1] == max(found)


def test_boundaries_when_they_are_fenced_are_the_tokenised_prefixes(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["fenced"]
    messages = [SYSTEM, *TURNS[:3]]
    token_ids, found = boundaries(codec, messages)
    prefixes = [
        codec.encode_chat(parse_chat({"messages": messages[:count], "add_generation_prompt": False}))
        for count in (1, 2, 3, 4)
    ]
    assert all(token_ids[: len(prefix)] == prefix for prefix in prefixes)
    assert sorted(found) == [len(prefix) for prefix in prefixes]


def test_tools_when_there_is_no_system_prompt_then_their_end_is_a_boundary(codecs: dict[str, TextCodec]) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "description": "finds a module by its name"}}
    codec = codecs["reasoning"]
    token_ids, found = boundaries(codec, TURNS[:1], tools=[tool])
    shared = num_shared(codec, token_ids, [{"role": "user", "content": "other"}], tools=[tool])
    assert found[0] == shared
    marked = {**tool, "cache_control": {"type": "ephemeral"}}
    assert boundaries(codec, TURNS[:1], tools=[marked]) == (token_ids, found)


def test_cache_control_when_inside_a_message_then_the_parts_before_it_end_at_the_first_boundary(
    codecs: dict[str, TextCodec],
) -> None:
    codec = codecs["fenced"]
    mark = {"cache_control": {"type": "ephemeral"}}
    document = {"type": "text", "text": "A long document about sockets and how they are closed, in several pages."}
    question = {"type": "text", "text": "Which call ends one?"}
    plain = [SYSTEM, {"role": "user", "content": [document, question]}]
    marked = [SYSTEM, {"role": "user", "content": [{**document, **mark}, question]}]
    token_ids, found = boundaries(codec, marked)
    assert token_ids == boundaries(codec, plain)[0]
    other = [SYSTEM, {"role": "user", "content": [document, {"type": "text", "text": "Name a port."}]}]
    assert found[0] == num_shared(codec, token_ids, other)
    assert found[0] not in boundaries(codec, plain)[1]


@pytest.mark.parametrize("place", ["message", "part"])
def test_cache_control_when_at_a_messages_end_then_that_end_comes_first(
    codecs: dict[str, TextCodec], place: str
) -> None:
    codec = codecs["fenced"]
    mark = {"cache_control": {"type": "ephemeral"}}
    short = {"role": "user", "content": "Hm."}
    if place == "message":
        marked = {**short, **mark}
    else:
        marked = {"role": "user", "content": [{"type": "text", "text": "Hm.", **mark}]}
    end = len(codec.encode_chat(parse_chat({"messages": [short], "add_generation_prompt": False})))
    assert end < MIN_GAP
    assert boundaries(codec, [marked, *TURNS[1:]])[1][0] == end
    assert end not in boundaries(codec, [short, *TURNS[1:]])[1]


def test_system_messages_when_the_template_takes_one_then_boundaries_are_those_of_what_it_took() -> None:
    tokenizer: Any = build_tokenizer(1024, 1 << 20)
    tokenizer.chat_template = SYSTEM_FIRST
    codec = TextCodec(tokenizer, vocab_size=1024)
    mark = {"cache_control": {"type": "ephemeral"}}
    rules = {"type": "text", "text": "Answer in one sentence, and name the function that one has to call first."}
    more = {"type": "text", "text": "Never tell of modules that were removed, and say since when each has been there."}
    first = {"type": "text", "text": SYSTEM["content"]}
    reminder = {"content": "Remember that the server has to run on machines with very little memory.", **mark}
    given = [
        {**SYSTEM, **mark},
        {"role": "system", "content": [rules, {**more, **mark}, first]},
        *TURNS[:2],
        {"role": "system", **reminder},
        *TURNS[2:],
    ]
    taken = [
        {"role": "system", "content": [{**first, **mark}, rules, {**more, **mark}, first]},
        *TURNS[:2],
        {"role": "user", **reminder},
        *TURNS[2:],
    ]
    token_ids, found = boundaries(codec, given)
    assert (token_ids, found) == boundaries(codec, taken)
    reminded = codec.encode_chat(parse_chat({"messages": given[:5], "add_generation_prompt": False}))
    assert found[0] == len(reminded)
    assert found[0] > found[1] > found[2]
    assert found[2] == num_shared(codec, token_ids, [SYSTEM, {"role": "system", "content": "Be brief."}, TURNS[0]])


def test_short_messages_when_close_together_then_do_not_each_take_a_state(codecs: dict[str, TextCodec]) -> None:
    messages = [{"role": role, "content": "ok"} for role in ("user", "assistant") * 6 + ("user",)]
    _, found = boundaries(codecs["fenced"], messages)
    ascending = [0, *sorted(found)]
    assert all(b - a >= MIN_GAP for a, b in itertools.pairwise(ascending))


def test_last_message_when_continued_or_whole_then_its_end_is_no_boundary(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["fenced"]
    for fields in ({"continue_final_message": True}, {"add_generation_prompt": False}):
        token_ids, found = boundaries(codec, [SYSTEM, *TURNS[:2]], **fields)
        assert len(found) == 2
        assert max(found) < len(token_ids) - MIN_GAP


def test_template_when_it_refuses_every_part_then_there_are_no_boundaries_and_no_error(tokenizer: Any) -> None:
    codec = TextCodec(tokenizer, vocab_size=len(tokenizer))
    tokenizer = codec.tokenizer
    template = "{% if messages | length != 3 %}{{ raise_exception('three') }}{% endif %}{{ messages[0]['content'] }}"
    request = parse_chat({"messages": TURNS[:3], "chat_template_kwargs": {}})
    before, tokenizer.chat_template = tokenizer.chat_template, template  # type: ignore[attr-defined]
    try:
        assert codec.chat_boundaries(request, codec.encode_chat(request)) == ()
    finally:
        tokenizer.chat_template = before  # type: ignore[attr-defined]


class _Counting:
    """A tokenizer that notes what it is asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_renderings = 0
        self.num_chars = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        self.num_renderings += 1
        return self._tokenizer.apply_chat_template(*args, **kwargs)

    def encode(self, text: str, **kwargs: Any) -> Any:
        self.num_chars += len(text)
        return self._tokenizer.encode(text, **kwargs)


@pytest.mark.parametrize("name", TEMPLATES)
def test_cost_when_the_chat_is_long_is_bounded_by_the_prompt_and_not_by_its_turns(
    codecs: dict[str, TextCodec], name: str
) -> None:
    counting = _Counting(codecs[name].tokenizer)
    codec = TextCodec(counting, vocab_size=1024)  # type: ignore[arg-type]
    request = parse_chat({"messages": [SYSTEM, *(TURNS[:2] * 150), TURNS[0]]})
    token_ids = codec.encode_chat(request)
    counting.num_renderings = counting.num_chars = 0
    found = codec.chat_boundaries(request, token_ids)
    assert len(found) == MAX_BOUNDARIES
    assert counting.num_renderings <= 2 * MAX_CANDIDATES + 1
    text = counting.apply_chat_template([dict(m) for m in request.messages], tokenize=False)
    assert counting.num_chars <= len(text) / 10


def test_cache_control_when_parsed_then_places_are_kept_and_the_messages_are_as_without() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
    parts = [{"type": "text", "text": "abc", **mark}, "de", {"type": "text", "text": "f", **mark}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "ok", **mark},
        {"role": "user", "content": [{"type": "text", "text": "g", "cache_control": None}], "cache_control": "yes"},
    ]
    request = parse_chat({"messages": messages})
    assert request.cache_marks == (CacheMark(0, 4), CacheMark(0), CacheMark(1))
    assert request.messages[0]["content"] == "abc\nde\nf"
    assert all("cache_control" not in message for message in request.messages)
