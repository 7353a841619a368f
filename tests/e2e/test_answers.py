"""Tool calls and reasoning through proxy, prefill node, NIXL and decode node, from a model that says what a grammar
lets it say: calls fit their schemas, the next turn finds them in the cache, streams that move go on exactly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import jsonschema
import pytest
from tokenizers import AddedToken

from common.models.synthetic import SPECIAL_TOKENS, build_tokenizer
from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support.chat_templates import SPECIAL_MARKERS, TEMPLATES
from tests.support.client import metric, post, wait_settled
from tests.support.models import MAX_POSITION, VOCAB_SIZE, checkpoint
from tests.support.restart import start_again
from tests.support.service import Service

pytestmark = pytest.mark.full
ROUTE = "/v1/chat/completions"
NUM_STREAMS = 6
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
FLAGGED_ALONE = ("kimi",)
"""Templates whose markers are special tokens by their flag in ``tokenizer.json``, named in no configuration."""


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


FIXED = tool("fixed", {"city": {"const": "Bern"}, "days": {"const": 3}, "hourly": {"const": True}})
FREE = tool(
    "free", {"text": {"type": "string", "maxLength": 12}, "number": {"type": "integer", "minimum": 0, "maximum": 99}}
)
LONG = tool("long", {"text": {"type": "string", "minLength": 400, "maxLength": 420}})
TOOLS = [FIXED, FREE, LONG]


def model_with(template: str, folder: Path) -> Path:
    """The test model with another chat template, whose markers are special tokens where they usually are."""
    shutil.copytree(checkpoint(FAMILY), folder)
    markers = SPECIAL_MARKERS.get(template, ())
    tokenizer = build_tokenizer(VOCAB_SIZE - len(markers), MAX_POSITION)
    if template in FLAGGED_ALONE:
        tokenizer.add_tokens([AddedToken(marker, special=True) for marker in markers])
    else:
        tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL_TOKENS[2:], *markers]})
    tokenizer.chat_template = TEMPLATES[template]
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Site:
    template: str
    service: Service


@pytest.fixture(scope="module", params=["hermes", "xml_thinking", "python", "kimi"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = model_with(request.param, tmp_path_factory.mktemp("model") / "m")
    with Service(
        folder,
        prefill_flags=NODE_FLAGS,
        decode_flags=NODE_FLAGS,
        proxy_flags=("--migration-limit", "2"),
        num_decode=2,
    ) as running:
        yield Site(request.param, running)


def body(salt: str, **fields: Any) -> dict[str, Any]:
    user = {"role": "user", "content": "What is it like there? " * 8}
    return {"messages": [user], "tools": TOOLS, "max_tokens": 2500, "cache_salt": salt, **fields}


def named(name: str) -> dict[str, Any]:
    return {"tool_choice": {"type": "function", "function": {"name": name}}}


def check_calls(calls: list[dict[str, Any]]) -> None:
    assert calls
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])


def test_call_when_it_is_named_then_the_next_turn_has_it_in_the_cache(site: Site) -> None:
    url = site.service.url
    first = body("turns", **named("fixed"), **NO_THOUGHT, temperature=0)
    answer = post(url, ROUTE, first)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    check_calls(choice["message"]["tool_calls"])
    [call] = choice["message"]["tool_calls"]
    wait_settled(*site.service.prefill, *site.service.decode)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    messages = [*first["messages"], choice["message"], result]
    after = post(url, ROUTE, {**first, "messages": messages, "max_tokens": 1, "tool_choice": "none"})
    cached = after["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"] - 2
    # Another call, which the model never made, is not there.
    function = {**call["function"], "arguments": json.dumps({"city": "Basel", "days": 3, "hourly": True})}
    other = {**choice["message"], "tool_calls": [{**call, "function": function}]}
    changed = post(
        url, ROUTE, {**first, "messages": [messages[0], other, result], "max_tokens": 1, "tool_choice": "none"}
    )
    assert changed["usage"]["prompt_tokens_details"]["cached_tokens"] < cached


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_when_they_are_required_then_all_fit_whole_and_streamed(site: Site, parallel: bool) -> None:
    for seed in range(3):
        asked = body(
            "required",
            tool_choice="required",
            parallel_tool_calls=parallel,
            seed=seed,
            tools=[FIXED, FREE],
            **NO_THOUGHT,
        )
        [choice] = post(site.service.url, ROUTE, asked)["choices"]
        if choice["finish_reason"] == "length":
            continue  # so many calls that they were cut
        assert choice["finish_reason"] == "tool_calls"
        check_calls(choice["message"]["tool_calls"])
        assert parallel or len(choice["message"]["tool_calls"]) == 1
        stream = Stream(asked | {"stream": True}).run(site.service.url)
        functions = [call["function"] for call in choice["message"]["tool_calls"]]
        assert [call[1:] for call in stream.calls] == [(each["name"], each["arguments"]) for each in functions]


def lines(response: httpx.Response) -> Iterator[str]:
    """Of a stream of events. httpx's own end at U+2028 too, which may stand in an event."""
    rest = ""
    for text in response.iter_text():
        *whole, rest = (rest + text).split("\n")
        yield from whole


@dataclass
class Stream:
    """What a client of one stream has."""

    body: dict[str, Any]
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    usage: Any = None
    error: Any = None
    is_done: bool = False

    def run(self, url: str) -> Stream:
        with httpx.stream("POST", url + ROUTE, json=self.body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            for line in lines(response):
                if line == "data: [DONE]":
                    self.is_done = True
                elif line:
                    self._take(json.loads(line.removeprefix("data: ")))
        return self

    def _take(self, event: dict[str, Any]) -> None:
        self.error = event.get("error")
        self.usage = event.get("usage", self.usage)
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            self.reasoning += delta.get("reasoning", "")
            self.content += delta.get("content") or ""
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
                    assert piece["index"] == len(self.calls)
                    self.calls.append((piece["id"], piece["function"]["name"], piece["function"]["arguments"]))
                else:
                    call_id, name, arguments = self.calls[piece["index"]]
                    self.calls[piece["index"]] = (call_id, name, arguments + piece["function"]["arguments"])
            self.ends += [choice["finish_reason"]] if choice["finish_reason"] else []

    @property
    def num_chars(self) -> int:
        return len(self.reasoning) + len(self.content) + sum(len(arguments) for _, _, arguments in self.calls)


def results(streams: list[Stream]) -> list[Any]:
    """All but the ids of calls, which are those of a request."""
    return [
        (stream.reasoning, stream.content, [call[1:] for call in stream.calls], stream.ends, stream.usage)
        for stream in streams
    ]


@dataclass
class DialectStream:
    """What a client of a Responses or Messages stream has: its events, those that carry on one text as one of them."""

    route: str
    body: dict[str, Any]
    told: list[tuple[str, str]] = field(default_factory=list)
    error: Any = None

    def run(self, url: str) -> DialectStream:
        with httpx.stream("POST", url + self.route, json=self.body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            for line in lines(response):
                if line.startswith("data: "):
                    self._take(json.loads(line.removeprefix("data: ")))
        return self

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "ping":
            return
        self.error = event.get("error", self.error)
        delta = event.pop("delta", "") if event["type"].endswith("delta") else ""
        if event["type"] == "message_delta":
            event["delta"], delta = delta, ""
        elif isinstance(delta, dict):
            event["kind"] = delta.pop("type")
            [delta] = delta.values()
        about = json.dumps(_without_ids(event), sort_keys=True)
        if delta and self.told and self.told[-1][0] == about:
            delta = self.told.pop()[1] + delta
        self.told.append((about, delta))

    @property
    def num_chars(self) -> int:
        return sum(len(delta) for _, delta in self.told)

    @property
    def is_done(self) -> bool:
        return any('"message_stop"' in about or '"response.completed"' in about for about, _ in self.told)


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        own = ("id", "item_id", "call_id", "created_at", "completed_at", "sequence_number")
        return {key: _without_ids(each) for key, each in value.items() if key not in own}
    return [_without_ids(each) for each in value] if isinstance(value, list) else value


def in_dialect(route: str, salt: str, seed: int, kind: str) -> dict[str, Any]:
    """The request of ``kind`` in the words of the API of ``route``."""
    fields: dict[str, Any] = {"cache_salt": salt, "seed": seed, "temperature": 1.0, "stream": True}
    user = {"role": "user", "content": "What is it like there? " * 8}
    functions = [each["function"] for each in ([LONG] if kind == "arguments" else [FIXED])]
    if route == "/v1/responses":
        tools = [{"type": "function", **each} for each in functions]
        fields |= {"input": [user], "tools": tools, "max_output_tokens": 2500, "tool_choice": "required"}
        fields |= NO_THOUGHT if kind == "arguments" else {"thinking_token_budget": 500}
        return fields | {"parallel_tool_calls": False}
    tools = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
    thinking = {"type": "disabled"} if kind == "arguments" else {"type": "enabled", "budget_tokens": 500}
    fields |= {"messages": [user], "tools": tools, "max_tokens": 2500, "thinking": thinking}
    return fields | {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


Made = TypeVar("Made", Stream, DialectStream)


def run_all(url: str, streams: Sequence[Made]) -> None:
    with ThreadPoolExecutor(len(streams)) as pool:
        list(pool.map(lambda stream: stream.run(url), streams))


KINDS: dict[str, dict[str, Any]] = {
    "arguments": {**named("long"), **NO_THOUGHT},
    "reasoning": {
        "tool_choice": "required",
        "tools": [FIXED],
        "thinking_token_budget": 500,
        "parallel_tool_calls": False,
    },
    "stop": {"tool_choice": "none", "stop": ["e the ", "zz", "er"], **NO_THOUGHT},
}


def streams_of(kind: str, salt: str) -> list[Stream]:
    common = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 1.0, **KINDS[kind]}
    return [Stream(body(f"{kind} {salt} {seed}", seed=seed, **common)) for seed in range(NUM_STREAMS)]


@pytest.mark.parametrize("kind", ["arguments", "reasoning"])
def test_streams_when_their_decode_node_dies_then_end_as_if_it_had_not(site: Site, kind: str) -> None:
    if kind == "reasoning" and site.template != "xml_thinking":
        pytest.skip("the template has no reasoning")
    expected, moved = run_and_strike(site, lambda salt: streams_of(kind, salt))
    assert all(stream.is_done and stream.calls for stream in expected)
    assert results(moved) == results(expected)


def test_streams_when_nodes_draft_then_are_those_of_nodes_that_do_not(site: Site) -> None:
    if site.template != "xml_thinking":
        pytest.skip("one template is enough: drafts are tokens")
    drafts = ("--speculative-config", '{"method": "ngram"}')
    with Service(site.service.model, prefill_flags=NODE_FLAGS, decode_flags=(*NODE_FLAGS, *drafts)) as drafting:
        for kind in KINDS:
            expected, found = streams_of(kind, "drafts"), streams_of(kind, "drafts")
            run_all(site.service.url, expected)
            # One alone first: beside others drafts may not pay, by times that a busy machine makes.
            streams_of(kind, "alone")[0].run(drafting.url)
            run_all(drafting.url, found)
            assert all(stream.is_done for stream in expected)
            assert results(found) == results(expected)
        assert metric(drafting.decode[0], "spec_decode_num_accepted_tokens_total") > 0
        assert any(stream.ends == ["stop"] and stream.num_chars for stream in expected)


@pytest.mark.parametrize("kind", ["arguments", "reasoning"])
@pytest.mark.parametrize("route", ["/v1/responses", "/v1/messages"])
def test_dialect_streams_when_their_decode_node_dies_then_end_as_if_it_had_not(
    site: Site, route: str, kind: str
) -> None:
    if site.template != "xml_thinking":
        pytest.skip("one template is enough: below a dialect is a chat")

    def streams(salt: str) -> list[DialectStream]:
        salt = f"{kind} {route} {salt}"
        return [DialectStream(route, in_dialect(route, f"{salt} {seed}", seed, kind)) for seed in range(NUM_STREAMS)]

    expected, moved = run_and_strike(site, streams)
    assert all(stream.is_done and stream.num_chars > 100 for stream in expected)
    assert [stream.told for stream in moved] == [stream.told for stream in expected]


def run_and_strike(site: Site, make: Callable[[str], list[Made]]) -> tuple[list[Made], list[Made]]:
    """Streams that run undisturbed, and the same whose decode node is killed when all are on their way; it is started
    again behind them. Where they were done too soon, or it had none of them, once more."""
    service = site.service
    expected = make("whole")
    run_all(service.url, expected)
    before = metric(service.proxy, "proxy_migrations_total", outcome="resumed")
    victim, other = service.decode
    for attempt in range(5):
        moved = make(f"cut {attempt}")

        def strike(moved: list[Made] = moved) -> None:
            while min(stream.num_chars for stream in moved) < 5:
                time.sleep(0.002)
            os.kill(victim.process.pid, signal.SIGKILL)

        striker = threading.Thread(target=strike)
        striker.start()
        run_all(service.url, moved)
        striker.join()
        wait_settled(service.prefill[0], other)
        start_again(service, victim)
        assert [stream.error for stream in moved] == [None] * NUM_STREAMS
        if metric(service.proxy, "proxy_migrations_total", outcome="resumed") > before:
            return expected, moved
    raise AssertionError("no stream was moved")
