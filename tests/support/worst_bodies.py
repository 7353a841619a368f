"""Bodies that cost a server the most for their bytes: each of full size, or of the size at which it costs the most.

``CORPUS``: name -> shape. A shape is made when it is sent: together they have a gigabyte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import orjson

from common.openai.constraint import MAX_GRAMMAR_CHARS
from common.wire.json_text import MAX_ITEMS, MAX_VALUES
from common.wire.routes import (
    CHAT_ROUTE,
    COMPLETIONS_ROUTE,
    DETOKENIZE_ROUTE,
    MESSAGES_ROUTE,
    RESPONSES_ROUTE,
    TOKENIZE_ROUTE,
)

FULL = 16 * 2**20
"""Bytes: ``--max-body-bytes`` where nobody says otherwise."""
ROOM = 400
"""Bytes for what a body has beside its worst part."""
VOCAB_SIZE = 512
"""Tokens of the model that is asked."""


@dataclass(frozen=True, slots=True)
class Shape:
    """``make`` gives the body; ``statuses``: what the answer may be; ``only_nodes``: fields that a proxy takes out. The
    dialects' routes are the proxy's alone."""

    make: Callable[[], bytes]
    statuses: frozenset[int] = frozenset({400})
    route: str = COMPLETIONS_ROUTE
    only_nodes: bool = False


def _fill(unit: bytes, separator: bytes = b",", *, most: int | None = None, num_bytes: int = FULL - ROOM) -> bytes:
    """As many ``unit`` as fit."""
    count = num_bytes // (len(unit) + len(separator))
    return separator.join([unit] * (count if most is None else min(count, most)))


def _completion(field: bytes, value: bytes) -> bytes:
    return b'{"prompt":"a","max_tokens":1,"' + field + b'":' + value + b"}"


def _chat(field: bytes, value: bytes, messages: bytes = b'[{"role":"user","content":"a"}]') -> bytes:
    return b'{"max_tokens":1,"messages":' + messages + b',"' + field + b'":' + value + b"}"


def _message(field: bytes, value: bytes, role: bytes = b"user") -> bytes:
    return b'{"max_tokens":1,"messages":[{"role":"' + role + b'","content":"a","' + field + b'":' + value + b"}]}"


def _text(unit: bytes) -> bytes:
    return b'"' + _fill(unit, b"") + b'"'


def _object(count: int, value: bytes = b"0") -> bytes:
    return b"{" + b",".join(b'"k%d":%b' % (index, value) for index in range(count)) + b"}"


def _many(field: str, value: object, **more: object) -> bytes:
    return orjson.dumps({field: value, "max_tokens": 1, **more})


def _of_prompts(**fields: object) -> bytes:
    return orjson.dumps({"max_tokens": 1, **fields})


def _cyclic(word: str) -> bytes:
    """Tools, whose schema refers to itself ``word`` by ``word``."""
    schema = {word: [{"$ref": "#/$defs/a"}] * 40}
    parameters = {"type": "object", "properties": {"p": {"$ref": "#/$defs/a"}}, "$defs": {"a": schema}}
    return orjson.dumps([{"type": "function", "function": {"name": "f", "parameters": parameters}}])


def _held(properties: object, definitions: object = None) -> bytes:
    parameters = {"type": "object", "properties": properties, "$defs": definitions or {}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return _many("tools", [tool], tool_choice="required", messages=[{"role": "user", "content": "a"}])


def _chain(count: int) -> str:
    return "".join(f"r{index} ::= r{index + 1}\n" for index in range(count))


SCHEMA = {
    "type": "object",
    "properties": {f"p{i}": {"type": "integer", "description": "a" * 280} for i in range(400)},
}
"""Of 130,000 characters as JSON, of which a grammar of 400 numbers is made."""
OK, ANY = frozenset({200}), frozenset({200, 400})
BUSY = frozenset({200, 400, 413, 429})
"""413: a decode leg names all prompts, and where they are, and has a node's ``--max-body-bytes`` too."""
_EMPTY = b'{"role":"user","content":""}'
_TOOL_CALL = '{"id":"1","type":"function","function":{"name":"f","arguments":"[]"}}'
_UNKNOWN = b"x"  # a field that nobody reads
_NESTED = b"[" * 60 + b"]" * 60

CORPUS: dict[str, Shape] = {
    # JSON that is refused before or while it is parsed
    "lists of nothing": Shape(lambda: _completion(_UNKNOWN, b"[" + _fill(b"[]") + b"]")),
    "objects of nothing": Shape(lambda: _completion(_UNKNOWN, b"[" + _fill(b"{}") + b"]")),
    "texts of nothing": Shape(lambda: _completion(_UNKNOWN, b"[" + _fill(b'""') + b"]")),
    "one digit each": Shape(lambda: _completion(_UNKNOWN, b"[" + _fill(b"1") + b"]")),
    "short fractions": Shape(lambda: _completion(_UNKNOWN, b"[" + _fill(b"1.5") + b"]")),
    "nulls": Shape(lambda: _completion(_UNKNOWN, b"[" + _fill(b"null") + b"]")),
    "numbers of 4300 digits": Shape(lambda: _completion(_UNKNOWN, b"[" + _fill(b"9" * 4300) + b"]")),
    "one number of all digits": Shape(lambda: _completion(_UNKNOWN, _fill(b"9", b""))),
    "number beyond floats": Shape(lambda: _completion(_UNKNOWN, b'["' + _fill(b"a", b"") + b'",1e999]')),
    "deep lists": Shape(lambda: _completion(_UNKNOWN, _fill(b"[", b""))),
    "deep objects": Shape(lambda: _completion(_UNKNOWN, _fill(b'{"a":', b""))),
    "deep within the count": Shape(lambda: _completion(_UNKNOWN, b"[" * 180_000 + b"]" * 180_000)),
    "no end": Shape(
        lambda: _completion(
            _UNKNOWN, b"[" + _fill(b"[]", most=MAX_ITEMS - 10) + b"," + _text(b"a")[: FULL - 3 * MAX_ITEMS - ROOM]
        )
    ),
    "wrong at its end": Shape(lambda: _completion(_UNKNOWN, b"[" + _fill(b"1", most=MAX_VALUES - 10) + b",}")),
    "no UTF-8 at its end": Shape(lambda: _completion(_UNKNOWN, b'"' + _fill(b"a", b"") + b'\xff"')),
    "half a surrogate at its end": Shape(lambda: _completion(_UNKNOWN, b'"' + _fill(b"a", b"") + b'\\ud800"')),
    "quotes": Shape(lambda: _fill(b'"', b"")),
    "no JSON": Shape(lambda: _fill(b"a", b"")),
    # as much as is taken, in a field that nobody reads: it goes on to the nodes
    "lists within the count": Shape(lambda: _completion(_UNKNOWN, b"[" + _fill(b"[]", most=MAX_ITEMS - 9) + b"]"), OK),
    "nested within the count": Shape(
        lambda: _completion(_UNKNOWN, b"[" + _fill(_NESTED, most=MAX_ITEMS // 60 - 9) + b"]"), OK
    ),
    "texts within the count": Shape(lambda: _completion(_UNKNOWN, b"[" + _fill(b'"a"', most=MAX_ITEMS - 9) + b"]"), OK),
    "keys within the count": Shape(lambda: _completion(_UNKNOWN, _object(MAX_ITEMS - 9)), OK),
    "objects within the count": Shape(
        lambda: _completion(_UNKNOWN, b"[" + _fill(b'{"a":{}}', most=MAX_ITEMS // 3 - 9) + b"]"), OK
    ),
    "numbers within the count": Shape(
        lambda: _completion(_UNKNOWN, b"[" + _fill(b"1234567.5", most=MAX_VALUES - 9) + b"]"), OK
    ),
    "numbers behind a long one": Shape(
        lambda: _completion(
            _UNKNOWN, b'["9223372036854775807",9223372036854775807,' + _fill(b"1234567.5", most=MAX_VALUES - 12) + b"]"
        ),
        OK,
    ),
    "one text": Shape(lambda: _completion(_UNKNOWN, _text(b"a")), OK),
    "escapes": Shape(lambda: _completion(_UNKNOWN, _text(b"\\n")), OK),
    "escaped quotes": Shape(lambda: _completion(_UNKNOWN, _text(b'\\"')), OK),
    "backslashes": Shape(lambda: _completion(_UNKNOWN, _text(b"\\\\")), OK),
    "code points": Shape(lambda: _completion(_UNKNOWN, _text(b"\\u0416")), OK),
    "surrogate pairs": Shape(lambda: _completion(_UNKNOWN, _text(b"\\ud83d\\ude00")), OK),
    "emoji": Shape(lambda: _completion(_UNKNOWN, _text("😀".encode())), OK),
    "brackets in a text": Shape(lambda: _completion(_UNKNOWN, _text(b"[{,")), OK),
    "nulls in a text": Shape(lambda: _completion(_UNKNOWN, _text(b"null")), OK),
    "digits in a text": Shape(lambda: _completion(_UNKNOWN, _text(b"9")), OK),
    # prompts
    "one long prompt": Shape(lambda: b'{"prompt":' + _text(b"hello ") + b"}"),
    "prompt of words that are no words": Shape(lambda: b'{"prompt":' + _text(b"z9") + b"}"),
    "long prompt that may fit": Shape(lambda: _many("prompt", "z9" * 65_000)),
    "prompt of a million ids": Shape(lambda: b'{"prompt":[' + _fill(b"123", most=MAX_VALUES - 9) + b"]}"),
    "a hundred thousand prompts": Shape(lambda: _of_prompts(prompt=["a"] * 100_000)),
    "prompts times n": Shape(lambda: _of_prompts(prompt=["a"] * 2048, n=128)),
    "all answers of few prompts": Shape(lambda: _of_prompts(prompt=["a"] * 16, n=128), BUSY),
    "all prompts": Shape(lambda: _of_prompts(prompt=["a"] * 2048), BUSY),
    "all prompts, long": Shape(lambda: _of_prompts(prompt=["ab " * 2000] * 2048), BUSY),
    "all prompts as ids": Shape(lambda: _of_prompts(prompt=[[7] * 240] * 2048), BUSY),
    "all prompts with words that are not allowed": Shape(
        lambda: _of_prompts(prompt=["a"] * 2048, bad_words=[f"{i} " * 100 for i in range(128)]), BUSY
    ),
    "all prompts with the tokens that are allowed": Shape(
        lambda: _of_prompts(prompt=["a"] * 2048, allowed_token_ids=list(range(VOCAB_SIZE))), BUSY
    ),
    "all prompts with a long schema": Shape(lambda: _of_prompts(prompt=["a"] * 2048, guided_json=SCHEMA), BUSY),
    "all prompts that tell what they used": Shape(
        lambda: _of_prompts(
            prompt=["a"] * 2048,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        ),
        BUSY,
    ),
    "echo with log-probabilities": Shape(lambda: _of_prompts(prompt=[7] * 4000, echo=True, logprobs=20), OK),
    "many echoes": Shape(lambda: _of_prompts(prompt=[7] * 4000, echo=True, n=128), BUSY),
    # chats
    "20,000 messages of nothing": Shape(
        lambda: _many("messages", [{"role": "user", "content": ""}] * 20_000), route=CHAT_ROUTE
    ),
    "all messages of nothing": Shape(
        lambda: _many("messages", [{"role": "user", "content": ""}] * 10_000), ANY, CHAT_ROUTE
    ),
    "messages beyond count": Shape(lambda: b'{"messages":[' + _fill(_EMPTY) + b"]}", route=CHAT_ROUTE),
    "messages of turns": Shape(
        lambda: _many("messages", [{"role": role, "content": "a"} for role in ("user", "assistant")] * 5000),
        ANY,
        CHAT_ROUTE,
    ),
    "one long message": Shape(
        lambda: b'{"messages":[{"role":"user","content":' + _text(b"hello ") + b"}]}", route=CHAT_ROUTE
    ),
    "reasoning": Shape(lambda: _message(b"reasoning_content", _text(b"hmm "), b"assistant"), ANY, CHAT_ROUTE),
    "message of unknown keys": Shape(lambda: _message(_UNKNOWN, _object(180_000)), OK, CHAT_ROUTE),
    "content of parts": Shape(
        lambda: b'{"messages":[{"role":"user","content":[' + _fill(b'{"type":"text","text":""}', most=39_000) + b"]}]}",
        ANY,
        CHAT_ROUTE,
    ),
    "marks in all messages": Shape(
        lambda: _many("messages", [{"role": "user", "content": "a", "cache_control": {"type": "ephemeral"}}] * 10_000),
        ANY,
        CHAT_ROUTE,
    ),
    "template arguments of one text": Shape(
        lambda: _chat(b"chat_template_kwargs", b'{"a":' + _text(b"a") + b"}"), OK, CHAT_ROUTE
    ),
    "template arguments by the number": Shape(
        lambda: _chat(b"chat_template_kwargs", _object(180_000)), ANY, CHAT_ROUTE
    ),
    "tool calls": Shape(
        lambda: b'{"messages":[{"role":"assistant","tool_calls":[' + _fill(_TOOL_CALL.encode(), most=20_000) + b"]}]}",
        ANY,
        CHAT_ROUTE,
    ),
    "arguments of lists": Shape(
        lambda: _many(
            "messages",
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "[" + "[]," * 5_000_000 + "[]]"}}],
                }
            ],
        ),
        route=CHAT_ROUTE,
    ),
    "arguments that fit one by one": Shape(
        lambda: _many(
            "messages",
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "[" + "[]," * 9000 + "[]]"}}] * 500,
                }
            ],
        ),
        route=CHAT_ROUTE,
    ),
    "a tool of one text": Shape(
        lambda: _chat(b"tools", b'[{"function":{"name":"f","description":' + _text(b"a ") + b"}}]"), ANY, CHAT_ROUTE
    ),
    "a tool with a schema of megabytes": Shape(
        lambda: _chat(
            b"tools", b'[{"function":{"name":"f","parameters":' + _object(90_000, b'"' + b"a" * 100 + b'"') + b"}}]"
        ),
        ANY,
        CHAT_ROUTE,
    ),
    "all tools": Shape(
        lambda: _chat(
            b"tools",
            b"[" + _fill(b'{"function":{"name":"f","description":"' + b"a" * 16_000 + b'"}}', most=1024) + b"]",
        ),
        ANY,
        CHAT_ROUTE,
    ),
    "tools beyond count": Shape(lambda: _chat(b"tools", b"[" + _fill(b"{}", most=180_000) + b"]"), route=CHAT_ROUTE),
    **{
        f"a tool whose schema is {word} of itself": Shape(
            partial(_chat, b"tools", _cyclic(word)), frozenset({200}), CHAT_ROUTE
        )
        for word in ("anyOf", "oneOf", "allOf")
    },
    "calls held to patterns": Shape(
        lambda: _held({f"p{i}": {"pattern": "\\p{L}" * 80} for i in range(20_000)}), ANY, CHAT_ROUTE
    ),
    "calls held to definitions": Shape(
        lambda: _held({f"p{i}": {"type": "integer"} for i in range(20_000)}, {f"d{i}": True for i in range(20_000)}),
        ANY,
        CHAT_ROUTE,
    ),
    "calls held to short schemas": Shape(
        lambda: _held({f"p{i}": {"pattern": "a"} for i in range(500)}, {f"d{i}": True for i in range(500)}),
        ANY,
        CHAT_ROUTE,
    ),
    # fields with bounds
    "stop strings": Shape(lambda: _completion(b"stop", b"[" + _fill(b'"a"', most=180_000) + b"]")),
    "stop string": Shape(lambda: _completion(b"stop", _text(b"a"))),
    "stop token ids": Shape(lambda: _completion(b"stop_token_ids", b"[" + _fill(b"7", most=MAX_VALUES - 9) + b"]")),
    "biases": Shape(lambda: _completion(b"logit_bias", _object(180_000))),
    "biases of long names": Shape(lambda: _completion(b"logit_bias", b'{"' + _fill(b"9", b"") + b'":1}')),
    "temperature of one text": Shape(lambda: _completion(b"temperature", _text(b"a"))),
    "temperature of lists": Shape(lambda: _completion(b"temperature", b"[" + _fill(_NESTED, most=4000) + b"]")),
    "fields that nobody knows": Shape(lambda: b'{"prompt":"a","max_tokens":1,' + _object(180_000)[1:]),
    "fields within their number": Shape(lambda: b'{"prompt":"a","max_tokens":1,' + _object(900)[1:], OK),
    "allowed tokens": Shape(lambda: _completion(b"allowed_token_ids", b"[" + _fill(b"7", most=MAX_VALUES - 9) + b"]")),
    "request id of one text": Shape(lambda: _completion(b"request_id", _text(b"a"))),
    "response format": Shape(lambda: _completion(b"response_format", _object(180_000))),
    "guided by megabytes": Shape(lambda: _completion(b"guided_json", _object(180_000))),
    "grammar of line breaks": Shape(lambda: _many("guided_grammar", "\n" * MAX_GRAMMAR_CHARS, prompt="a")),
    "grammar of a chain of rules": Shape(
        lambda: _many("guided_grammar", "root ::= r0\n" + _chain(8000) + 'r8000 ::= "a"', prompt="a"), ANY
    ),
    "role of one text": Shape(lambda: b'{"messages":[{"content":"a","role":' + _text(b"a") + b"}]}", route=CHAT_ROUTE),
    "model of one text": Shape(lambda: _completion(b"model", _text(b"a")), frozenset({400, 404})),
    "salt of one text": Shape(lambda: _completion(b"cache_salt", _text(b"a"))),
    # what only proxies may send, to a node that trusts everybody
    "transfers": Shape(
        lambda: _completion(b"kv_transfer_params", b"[" + _fill(b"{}", most=180_000) + b"]"), ANY, only_nodes=True
    ),
    "manifest of a million blocks": Shape(
        lambda: _completion(
            b"kv_transfer_params",
            b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_num_tokens":16,"tandem_block_size":16,'
            b'"remote_host":"127.0.0.1","remote_port":9,"remote_block_ids":[['
            + _fill(b"7", most=MAX_VALUES - 99)
            + b"]]}",
        ),
        only_nodes=True,
    ),
    "sources": Shape(lambda: _completion(b"tandem_sources", b"[" + _fill(b"{}", most=180_000) + b"]"), only_nodes=True),
    "chat of a million ids": Shape(
        lambda: b'{"tandem_prompt":{"token_ids":[' + _fill(b"123", most=MAX_VALUES - 99) + b"]}}",
        route=CHAT_ROUTE,
        only_nodes=True,
    ),
    "answer that goes on": Shape(
        lambda: _completion(b"tandem_resume", b'{"output_token_ids":[' + _fill(b"123", most=MAX_VALUES - 99) + b"]}"),
        only_nodes=True,
    ),
    # the dialects
    "responses of 20,000 items": Shape(
        lambda: b'{"input":[' + _fill(b'{"role":"user","content":"a"}', most=20_000) + b"]}", route=RESPONSES_ROUTE
    ),
    "responses of calls": Shape(
        lambda: (
            b'{"max_output_tokens":1,"input":['
            + _fill(b'{"type":"function_call","call_id":"a","name":"b","arguments":"{}"}', most=10_000)
            + b"]}"
        ),
        ANY,
        RESPONSES_ROUTE,
    ),
    "message of texts": Shape(
        lambda: (
            b'{"max_tokens":1,"messages":[{"role":"user","content":"a"},{"role":"assistant","content":['
            + _fill(b'{"type":"text","text":"' + b"a" * 1500 + b'"}', most=10_000)
            + b"]}]}"
        ),
        route=MESSAGES_ROUTE,
    ),
    "messages of blocks": Shape(
        lambda: (
            b'{"max_tokens":1,"messages":['
            + _fill(b'{"role":"user","content":[' + _fill(b'{"type":"text","text":"a"}', most=5) + b"]}", most=6_000)
            + b"]}"
        ),
        ANY,
        MESSAGES_ROUTE,
    ),
    # the other routes
    "tokenize a text": Shape(lambda: b'{"prompt":' + _text(b"hello ") + b"}", route=TOKENIZE_ROUTE),
    "tokenize a text that may fit": Shape(lambda: _many("prompt", "z9" * 65_000), ANY, TOKENIZE_ROUTE),
    "tokenize with pieces": Shape(lambda: _many("prompt", "z9" * 6_000, return_token_strs=True), ANY, TOKENIZE_ROUTE),
    "tokenize a chat": Shape(
        lambda: b'{"messages":[{"role":"user","content":' + _text(b"hello ") + b"}]}", route=TOKENIZE_ROUTE
    ),
    "detokenize a million": Shape(
        lambda: b'{"tokens":[' + _fill(b"123", most=MAX_VALUES - 9) + b"]}", ANY, DETOKENIZE_ROUTE
    ),
}
