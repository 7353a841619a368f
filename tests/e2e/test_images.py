"""Images through proxy, prefill node, NIXL and decode node: transformers' own answers, from a decode node that has
never seen an image."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from common.wire.headers import PLACEMENT_HEADER
from common.wire.routes import CHAT_ROUTE, MESSAGES_ROUTE, RESPONSES_ROUTE, TEST_TRANSFER_FAULT_ROUTE
from tests.e2e.conftest import NODE_FLAGS
from tests.support import foreign, images
from tests.support.client import metric, post, wait_settled
from tests.support.images import data_url, image_part, picture
from tests.support.reference import tolerance
from tests.support.service import Service, wait_ready
from tests.unit.images.test_security import png_of

FAMILY = "qwen3_5"
TOKENS = 16
A, B, C = picture(21), picture(22, 80, 32), picture(23, 33, 70)
SAME_SIZE = picture(24)
ASKED: Mapping[str, Any] = {
    "max_tokens": TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": True,
    "return_token_ids": True,
}
Part = str | bytes


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def user(*parts: Part) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [text_part(each) if isinstance(each, str) else image_part(each) for each in parts],
    }


@dataclass(frozen=True)
class ChatAnswer:
    body: Mapping[str, Any]

    @property
    def token_ids(self) -> list[int]:
        return list(self.body["choices"][0]["token_ids"])

    @property
    def logprobs(self) -> list[float]:
        return [each["logprob"] for each in self.body["choices"][0]["logprobs"]["content"]]

    @property
    def text(self) -> str:
        return str(self.body["choices"][0]["message"]["content"])

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(self.body["prompt_token_ids"])

    @property
    def cached_tokens(self) -> int:
        return int(self.body["usage"]["prompt_tokens_details"]["cached_tokens"])


@dataclass(frozen=True)
class Site:
    service: Service

    def ask(self, *messages: Mapping[str, Any], headers: Mapping[str, str] | None = None, **fields: Any) -> ChatAnswer:
        body = {**ASKED, "messages": list(messages), **fields}
        answer = httpx.post(self.service.url + CHAT_ROUTE, json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        return ChatAnswer(answer.json())

    def check(self, answer: ChatAnswer, pictures: Sequence[bytes]) -> None:
        """It is stock's answer to its own prompt with these pictures."""
        expected = images.stock_generate(answer.prompt_token_ids, pictures, TOKENS, family=FAMILY)
        mismatch = expected.mismatch(answer.token_ids, answer.logprobs, tolerance(FAMILY))
        assert mismatch is None, mismatch

    def num_encoded(self) -> float:
        return sum(metric(node, "images_encoded_total", source="computed") for node in self.service.prefill)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    flags = [*NODE_FLAGS, "--max-num-batched-tokens", "40"]  # cuts images
    with Service(images.image_checkpoint(FAMILY), prefill_flags=flags, decode_flags=NODE_FLAGS) as running:
        yield Site(running)


def test_chat_when_it_has_images_then_answers_equal_transformers_cold_repeated_and_in_a_second_turn(site: Site) -> None:
    first = user("What is this?", A, "And this?", B)
    cold = site.ask(first)
    site.check(cold, [A, B])
    repeated = site.ask(first)
    assert (repeated.token_ids, repeated.cached_tokens) == (cold.token_ids, len(cold.prompt_token_ids))
    encoded = site.num_encoded()
    assert encoded == 2
    turn = [first, {"role": "assistant", "content": cold.text}, user("Now this.", C)]
    second = site.ask(*turn)
    site.check(second, [A, B, C])
    assert second.cached_tokens >= len(cold.prompt_token_ids)
    assert site.num_encoded() == encoded + 1
    # Without a proxy, by a node that has all it needs itself.
    alone = ChatAnswer(post(site.service.prefill[0].url, CHAT_ROUTE, {**ASKED, "messages": [first]}))
    assert alone.token_ids == cold.token_ids
    # The other image of the same size shares nothing from its start on, and is another image.
    other = site.ask(user("What is this?", SAME_SIZE, "And this?", B))
    site.check(other, [SAME_SIZE, B])
    assert other.cached_tokens <= other.prompt_token_ids.index(images.PAD_ID)
    assert other.token_ids != cold.token_ids
    wait_settled(*site.service.prefill, *site.service.decode)


@pytest.mark.full
def test_text_turn_after_images_when_placed_on_the_decode_node_then_it_goes_on_there(site: Site) -> None:
    first = user("Look:", A, "and:", C)
    cold = site.ask(first, cache_salt="local turn")
    turn = [first, {"role": "assistant", "content": cold.text}, user("What was it?")]
    second = site.ask(*turn, cache_salt="local turn", headers={PLACEMENT_HEADER: "local"})
    site.check(second, [A, C])
    assert second.cached_tokens >= len(cold.prompt_token_ids)
    # Images that it has not are not for it to compute.
    body = {"messages": [user("New:", B)], "cache_salt": "local turn", "max_tokens": 2}
    refused = httpx.post(site.service.url + CHAT_ROUTE, json=body, headers={PLACEMENT_HEADER: "local"}, timeout=60)
    assert refused.status_code == 502
    assert "only a prefill node computes images" in refused.json()["error"]["message"]
    assert site.ask(user("New:", B), cache_salt="local turn").token_ids


def test_images_when_they_are_none_then_refused_by_name_and_counted(site: Site) -> None:
    proxy, [node] = site.service.proxy, site.service.prefill
    truncated = picture(30, 200, 200, "JPEG")[:-900]
    for url, reason, words, teller in (
        (data_url(png_of(100_000, 100_000)), "limit", "--max-image-pixels", proxy),
        ("http://169.254.169.254/latest/meta-data/", "url", "--allowed-media-domains", proxy),
        ("file:///etc/passwd", "url", "must be a data URL", proxy),
        (data_url(b"<svg/>", "svg+xml"), "format", "must be a PNG", proxy),
        (data_url(truncated, "jpeg"), "content", "cannot be decoded", node),
    ):
        before = metric(teller, "images_refused_total", reason=reason)
        content = [text_part("See:"), {"type": "image_url", "image_url": {"url": url}}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        answer = httpx.post(site.service.url + CHAT_ROUTE, json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == "messages[0].content[1].image_url.url", error
        assert words in error["message"], error
        assert metric(teller, "images_refused_total", reason=reason) == before + 1
    many = {"messages": [user(*[A] * 17)], "max_tokens": 2}
    answer = httpx.post(site.service.url + CHAT_ROUTE, json=many, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    spelled = {"messages": [user("Two? " + images.PAD, A)], "max_tokens": 2}
    answer = httpx.post(site.service.url + CHAT_ROUTE, json=spelled, timeout=60)
    assert answer.status_code == 400
    assert "one placeholder of an image for each" in answer.json()["error"]["message"]
    wait_settled(node, *site.service.decode)


@pytest.mark.full
def test_handoff_when_another_proxy_carries_it_then_images_in_the_decode_leg_are_not_looked_at(site: Site) -> None:
    body = {**ASKED, "messages": [user("Elsewhere:", A, B)], "cache_salt": "foreign"}
    params = foreign.prefill(site.service.prefill[0].url, body, CHAT_ROUTE)
    content = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/never.png"}}]
    leg = {**body, "messages": [{"role": "user", "content": content}]}
    answer = ChatAnswer(foreign.decode(site.service.decode[0].url, leg, params, CHAT_ROUTE).json())
    site.check(answer, [A, B])
    foreign.release(site.service.prefill[0].url, params)


@pytest.mark.full
def test_answers_when_asked_in_other_apis_then_are_the_chats(site: Site) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(A).decode()}
    blocks = [{"type": "text", "text": "See:"}, {"type": "image", "source": source}]
    parts = [{"type": "input_text", "text": "See:"}, {"type": "input_image", "image_url": data_url(A)}]
    common = {"temperature": 0, "ignore_eos": True, "model": None}
    message = post(
        site.service.url,
        MESSAGES_ROUTE,
        {**common, "max_tokens": TOKENS, "messages": [{"role": "user", "content": blocks}]},
    )
    response = post(
        site.service.url,
        RESPONSES_ROUTE,
        {**common, "max_output_tokens": TOKENS, "input": [{"role": "user", "content": parts}]},
    )
    chat = site.ask(user("See:", A))
    site.check(chat, [A])
    assert message["content"][0]["text"] == response["output"][0]["content"][0]["text"] == chat.text


@pytest.fixture(scope="module")
def pairs() -> Iterator[Site]:
    """Two of each, and streams that may move."""
    with Service(
        images.image_checkpoint(FAMILY),
        prefill_flags=NODE_FLAGS,
        decode_flags=NODE_FLAGS,
        proxy_flags=("--migration-limit", "2", "--policy", "cost"),
        num_prefill=2,
        num_decode=2,
    ) as running:
        yield Site(running)


@pytest.mark.full
def test_stream_when_its_decode_node_dies_then_it_goes_on_with_the_same_images(pairs: Site) -> None:
    body = {**ASKED, "messages": [user("Tell:", A, B)], "max_tokens": 1500, "stream": True}
    del body["logprobs"]

    def run(salt: str, strike: bool) -> str:
        text = ""
        with httpx.stream(
            "POST", pairs.service.url + CHAT_ROUTE, json={**body, "cache_salt": salt}, timeout=120
        ) as got:
            assert got.status_code == 200, got.read()
            for number, line in enumerate(filter(None, got.iter_lines())):
                if line == "data: [DONE]":
                    return text
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                if strike and number == 20:
                    busy = [node for node in pairs.service.decode if metric(node, "requests_running")]
                    os.kill(busy[0].process.pid, signal.SIGKILL)
        raise AssertionError("the stream broke")

    expected = run("whole", strike=False)
    assert run("cut", strike=True) == expected
    assert metric(pairs.service.proxy, "proxy_migrations_total", outcome="resumed") == 1
    for node in pairs.service.decode:
        if node.process.popen.poll() is not None:
            pairs.service.start_again(node)
            wait_ready(node)


@pytest.mark.full
def test_prefix_when_its_pull_fails_then_another_pair_computes_it_or_the_client_hears_why(pairs: Site) -> None:
    for node in pairs.service.decode:
        fault = {"kind": "poll_error", "count": 4}
        httpx.post(node.url + TEST_TRANSFER_FAULT_ROUTE, json=fault, timeout=30).raise_for_status()
    body = {**ASKED, "messages": [user("Lost:", A, B)], "cache_salt": "lost"}
    answer = httpx.post(pairs.service.url + CHAT_ROUTE, json=body, timeout=120)
    if answer.status_code == 200:
        pairs.check(ChatAnswer(answer.json()), [A, B])
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "transfer_failed")
    for node in pairs.service.decode:
        httpx.post(node.url + TEST_TRANSFER_FAULT_ROUTE, json={"kind": "clear"}, timeout=30).raise_for_status()
    again = pairs.ask(user("Lost:", A, B), cache_salt="lost")
    pairs.check(again, [A, B])
    wait_settled(*pairs.service.prefill, *pairs.service.decode)


@pytest.mark.full
def test_prompts_when_they_share_images_then_they_are_placed_where_those_are(pairs: Site) -> None:
    pictures = [picture(seed, 160, 160) for seed in range(40, 44)]
    pairs.ask(user("Four:", *pictures), cache_salt="placed")
    before = [metric(node, "images_encoded_total") for node in pairs.service.prefill]
    fifth = pairs.ask(user("Four:", *pictures, picture(44, 160, 160)), cache_salt="placed")
    pairs.check(fifth, [*pictures, picture(44, 160, 160)])
    after = [metric(node, "images_encoded_total") for node in pairs.service.prefill]
    assert sum(after) - sum(before) == 1
    assert fifth.cached_tokens >= 4 * 100
