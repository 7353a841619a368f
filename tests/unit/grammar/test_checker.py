"""Grammars that end the process they are tried in, and what their senders hear."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from common.errors import ConfigError, DeadlineExceededError, GrammarError, InvalidRequestError
from common.grammar import checker as module
from common.grammar.checker import GrammarChecker
from common.grammar.limits import GrammarLimits
from common.grammar.trial import try_grammar


def schema(value: object) -> str:
    return json.dumps({"grammars": [{"json_schema": value}]})


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


GOOD = schema({"type": "object", "properties": {"a": {"type": "string"}}})
TOO_DEEP = lark("start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(6000)) + '\nr6000: "x"')
TOO_SLOW = schema({"type": "integer", "multipleOf": 99999989})


@pytest.fixture
def checked() -> list[bool]:
    return []


@pytest_asyncio.fixture
async def checker(checked: list[bool]) -> AsyncIterator[GrammarChecker]:
    limits = GrammarLimits(max_compile_seconds=0.5, wait_seconds=240)
    checker = GrammarChecker(limits, lambda seconds, is_good: checked.append(is_good))
    yield checker
    await asyncio.to_thread(checker.close)


@pytest.mark.asyncio
async def test_checker_when_grammars_kill_their_process_then_they_are_refused_and_the_next_is_checked(
    checker: GrammarChecker, checked: list[bool]
) -> None:
    await checker.check(GOOD, param="p")
    with pytest.raises(GrammarError, match="p cannot be compiled: it is nested too deep") as deep:
        await checker.check(TOO_DEEP, param="p")
    assert (deep.value.status, deep.value.param) == (400, "p")
    with pytest.raises(GrammarError, match=r"takes more than 0\.5 s|within 30 s"):
        await checker.check(TOO_SLOW, param="p")
    await checker.check(schema({"type": "string"}), param="p")
    assert checked == [True, False, False, True]
    # Each has its verdict from now on.
    await checker.check(GOOD, param="p")
    with pytest.raises(GrammarError, match="q cannot be compiled: it is nested too deep"):
        await checker.check(TOO_DEEP, param="q")
    assert len(checked) == 4
    assert checker.num_waiting == 0


@pytest.mark.asyncio
async def test_gbnf_when_it_is_turned_into_lark_then_it_has_the_limits_of_a_grammar(
    checker: GrammarChecker, checked: list[bool]
) -> None:
    await checker.check(lark(await checker.lark('root ::= "a" | [b-d]+', "p")), param="p")
    chain = "".join(f"r{index} ::= r{index + 1}\n" for index in range(8000))
    for text, why in (
        ("root ::= (", "p is neither Lark nor GBNF: .*at line 1"),
        ("\n" * 131_000, "No 'root' rule"),
        (f'root ::= r0\n{chain}r8000 ::= "a"', r"takes more than 0\.5 s|within 30 s"),
    ):
        with pytest.raises(GrammarError, match=why) as caught:
            await checker.lark(text, "p")
        assert caught.value.param == "p"
    assert checked == [True, True, False, False, False]


@pytest.mark.asyncio
@pytest.mark.parametrize("length", [0, 100_000], ids=["short", "more than a pipe holds"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_grammar_when_its_process_is_hit_from_outside_then_nothing_is_known_of_it(
    checker: GrammarChecker, number: signal.Signals, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checker.check(GOOD, param="p")
    child = checker._children.get_nowait()
    child._process.send_signal(number)
    # A process with threads runs on for a moment: it could still answer.
    await asyncio.to_thread(os.waitid, os.P_PID, child._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    checker._children.put(child)
    other = schema({"type": "boolean", "description": "x" * length})
    monkeypatch.setattr(module, "HANG_SECONDS", 0.3)
    with pytest.raises(DeadlineExceededError):
        await checker.check(other, param="p")
    monkeypatch.undo()
    await checker.check(other, param="p")
    assert checker.num_waiting == 0


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """As in a busy process: what is opened from now on has a descriptor of 1024 or above."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, 2048)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"the hard limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while opened[-1] < 1024:
            opened.append(os.dup(opened[0]))
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.asyncio
@pytest.mark.usefixtures("many_open_files")
async def test_checker_when_its_process_has_many_open_files_then_grammars_are_checked(
    checker: GrammarChecker, checked: list[bool]
) -> None:
    await checker.check(GOOD, param="p")
    await checker.check(schema({"type": "boolean", "description": "x" * 100_000}), param="p")
    assert checked == [True, True]


@pytest.mark.asyncio
async def test_checker_when_asking_a_child_raises_then_the_child_is_closed(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checker.check(GOOD, param="p")
    child = checker._children.get_nowait()
    checker._children.put(child)
    with monkeypatch.context() as broken:
        broken.setattr(child, "_write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await checker.check(schema({"type": "boolean"}), param="p")
    assert child._process.poll() is not None
    await checker.check(schema({"type": "boolean"}), param="p")


@pytest.mark.asyncio
async def test_checker_when_a_grammar_is_too_long_then_it_is_not_tried(checked: list[bool]) -> None:
    checker = GrammarChecker(GrammarLimits(max_chars=100))
    with pytest.raises(InvalidRequestError, match="of 101 characters, the most is 100"):
        await checker.check("x" * 101, param="p")
    assert not checked
    checker.close()


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (schema({"type": "foo"}), "Invalid type: foo"),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (schema({"$ref": "http://example.com/x"}), "does not fetch"),
        (schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (schema(False), "nsatisfiable"),
        (schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "no text"),
        (schema({"type": "object", "properties": {f"p{i}": {} for i in range(1500)}}), "2000"),
        (lark('start: "a" foo'), "unknown name"),
        (lark("start: /a(b/"), "unclosed group"),
        (lark('start: "a" <[999999]>'), "999999"),
        ("", "Empty"),
        ("{", ""),
        (lark("start: " + " | ".join(f'"v{i}"' for i in range(20_000))), ""),
    ],
)
def test_grammar_when_it_cannot_be_used_then_the_reason_is_told(grammar: str, why: str) -> None:
    reason = try_grammar(grammar)
    assert reason
    assert why in reason
    assert len(reason) <= 500


@pytest.mark.parametrize(
    "grammar",
    [
        GOOD,
        schema(True),
        schema({"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}),
        lark('start: "a" <|im_end|> /b*/ <[7]> <tool_call>'),
        lark('start: ("a" | "b")*'),
    ],
)
def test_grammar_when_it_can_be_used_then_nothing_is_told(grammar: str) -> None:
    assert try_grammar(grammar) == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "a JSON object"),
        ("{", "must be JSON"),
        ('{"wat": 1}', "has no wat"),
        ('{"backend": "xgrammar"}', "auto or guidance"),
        ('{"max_chars": 0}', "max_chars must be a number above 0"),
        ('{"max_compile_seconds": "1"}', "max_compile_seconds"),
    ],
)
def test_limits_when_malformed_then_flag_and_key_are_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        GrammarLimits.from_json(text)
    assert "--structured-outputs-config" in caught.value.message


def test_limits_when_given_then_kept() -> None:
    limits = GrammarLimits.from_json('{"backend": "guidance", "max_compile_seconds": 2, "max_chars": 5000}')
    assert (limits.max_compile_seconds, limits.max_chars) == (2, 5000)
