"""Images through proxy, prefill node, NIXL and decode node: transformers' own answers, from a decode node that has
never seen an image."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.wire.headers import CLUSTER_KEY_HEADER, PLACEMENT_HEADER
from common.wire.routes import CHAT_ROUTE, MESSAGES_ROUTE, NODES_ROUTE, RESPONSES_ROUTE, TEST_TRANSFER_FAULT_ROUTE
from tests.e2e.conftest import NODE_FLAGS
from tests.support import foreign, images, open_proxy
from tests.support.client import metric, post, wait_settled
from tests.support.images import data_url, image_part, picture
from tests.support.loop_busy import busy_limit_s, lags, was_busy
from tests.support.reference import tolerance
from tests.support.restart import start_again
from tests.support.service import Node, Service, start_node, start_proxy, wait_ready
from tests.unit.images.test_security import SVG, png_of
from tests.unit.proxy.http.test_image_fetcher import World

FAMILY = "qwen3_5"
TOKENS = 16
A, B, C = picture(21), picture(22, 80, 32), picture(23, 33, 70)
LARGE = picture(25, 160, 100)
"""Which lfm2_vl cuts into tiles."""
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
    family: str = FAMILY

    def ask(self, *messages: Mapping[str, Any], headers: Mapping[str, str] | None = None, **fields: Any) -> ChatAnswer:
        body = {**ASKED, "messages": list(messages), **fields}
        answer = httpx.post(self.service.url + CHAT_ROUTE, json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        return ChatAnswer(answer.json())

    def check(self, answer: ChatAnswer, pictures: Sequence[bytes]) -> None:
        """It is stock's answer to its own prompt with these pictures."""
        expected = images.stock_generate(answer.prompt_token_ids, pictures, TOKENS, family=self.family)
        mismatch = expected.mismatch(answer.token_ids, answer.logprobs, tolerance(self.family))
        assert mismatch is None, mismatch

    def first_placeholder(self, answer: ChatAnswer) -> int:
        return answer.prompt_token_ids.index(images.rules(self.family).placeholder_id)

    def stream(self, *parts: Part, salt: str, strike: bool) -> str:
        """The text of a long answer; with ``strike`` its decode node is killed in the middle."""
        body = {**ASKED, "messages": [user(*parts)], "max_tokens": 1500, "stream": True, "cache_salt": salt}
        del body["logprobs"]
        text = ""
        with httpx.stream("POST", self.service.url + CHAT_ROUTE, json=body, timeout=120) as got:
            assert got.status_code == 200, got.read()
            for number, line in enumerate(filter(None, got.iter_lines())):
                if line == "data: [DONE]":
                    return text
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                if strike and number == 20:
                    busy = [node for node in self.service.decode if metric(node, "requests_running")]
                    os.kill(busy[0].process.pid, signal.SIGKILL)
        raise AssertionError("the stream broke")

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
    assert other.cached_tokens <= site.first_placeholder(other)
    assert other.token_ids != cold.token_ids
    wait_settled(*site.service.prefill, *site.service.decode)


@pytest.mark.full
@pytest.mark.parametrize("family", [family for family in images.FAMILIES if family != FAMILY])
def test_family_when_asked_cold_repeated_in_two_turns_and_moved_then_equals_transformers(family: str) -> None:
    with Service(
        images.image_checkpoint(family),
        prefill_flags=[*NODE_FLAGS, "--max-num-batched-tokens", "10"],  # cuts images where that is allowed
        decode_flags=NODE_FLAGS,
        proxy_flags=("--migration-limit", "2"),
        num_decode=2,
    ) as running:
        site = Site(running, family)
        first = user("What is this?\n", A, "\nAnd this?", LARGE)
        cold = site.ask(first)
        site.check(cold, [A, LARGE])
        encoded = site.num_encoded()
        for _ in range(2):  # by both decode nodes
            repeated = site.ask(first)
            assert (repeated.token_ids, repeated.cached_tokens) == (cold.token_ids, len(cold.prompt_token_ids))
        second = site.ask(first, {"role": "assistant", "content": cold.text}, user("Now these.", C, "and", A))
        site.check(second, [A, LARGE, C, A])
        assert second.cached_tokens >= len(cold.prompt_token_ids)
        assert site.num_encoded() == encoded + 1  # what came before is known by its digest
        other = site.ask(user("What is this?\n", SAME_SIZE, "\nAnd this?", LARGE))
        site.check(other, [SAME_SIZE, LARGE])
        assert other.cached_tokens <= site.first_placeholder(other)
        expected = site.stream("Tell:", A, LARGE, salt="whole", strike=False)
        assert site.stream("Tell:", A, LARGE, salt="cut", strike=True) == expected
        assert metric(running.proxy, "proxy_migrations_total", outcome="resumed") == 1


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


def test_images_when_no_decode_node_is_left_then_their_prefill_node_answers_as_transformers_does(
    site: Site, tmp_path: Path
) -> None:
    service = site.service
    [node], [decode] = service.prefill, service.decode
    key = tmp_path / "cluster"
    key.write_text("secret")
    flags = ("--policy", "cost", "--cluster-key-file", str(key))
    proxy = start_proxy(service.prefill, service.decode, tmp_path, *flags)
    try:
        wait_ready(proxy, 30)
        order = {"url": decode.url}
        headers = {CLUSTER_KEY_HEADER: "secret"}
        httpx.post(f"{proxy.url}{NODES_ROUTE}/drain", json=order, headers=headers, timeout=30).raise_for_status()
        num_answered = metric(decode, "requests_total")
        body = {**ASKED, "messages": [user("Alone:", A, "and:", B)], "cache_salt": "alone"}
        answer = ChatAnswer(post(proxy.url, CHAT_ROUTE, body))
        site.check(answer, [A, B])
        assert metric(decode, "requests_total") == num_answered
    finally:
        proxy.process.stop()
    wait_settled(node, decode)


@contextlib.contextmanager
def web_server() -> Iterator[int]:
    """On the address that ``open_proxy`` takes for a public one; its port."""
    world, started = World(), threading.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, IndexError):
                await world.answer(reader, writer)
        finally:
            writer.close()

    async def serve(stop: list[Callable[[], object]]) -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        stop.append(lambda: loop.call_soon_threadsafe(stopped.set))
        server = await asyncio.start_server(answer, open_proxy.SERVER, 0)
        world.port = server.sockets[0].getsockname()[1]
        started.set()
        await stopped.wait()
        server.close()

    stop: list[Callable[[], object]] = []
    # What it still answers, slowly or without an end, is cancelled with the loop.
    thread = threading.Thread(target=lambda: asyncio.run(serve(stop)), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield world.port
    finally:
        stop[0]()
        thread.join(10)
        assert not thread.is_alive()


def asking_for(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [text_part("See:"), *parts]}], "max_tokens": 2}


LOOPBACK = ("[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:7f00:1]", "[::127.0.0.1]")
LOOPBACK += ("[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[fe80::1]", "[fd00:ec2::254]", "127.0.0.1")
POLYGLOTS = (b"<html><script>1</script>" + png_of(8, 8), b"GIF89a/*\x00\x00*/=1;alert(1)//")


def refused_rows(port: int) -> list[tuple[str, str, str, str]]:
    """What is asked, why it is refused, words of the error, and who refuses it."""
    web = f"http://images.test:{port}"
    rows = [(f"http://{host}:{port}/x.png", "fetch", "not", "proxy") for host in LOOPBACK]
    rows += [
        ("http://169.254.169.254/latest/meta-data/", "fetch", "not a public address", "proxy"),
        (f"{web}/redirect?http://169.254.169.254/", "fetch", "not a public address", "proxy"),
        (f"{web}/redirect?http://[::1]:{port}/", "fetch", "", "proxy"),
        (f"{web}/loop", "fetch", "redirects more than 3 times", "proxy"),
        (f"http://turns.test:{port}/redirect?http://turns.test:{port}/", "fetch", "is not public", "proxy"),
        (f"{web}/endless", "limit", "--max-image-bytes", "proxy"),
        (f"{web}/slow", "fetch", "--image-fetch-seconds 0.5", "proxy"),
        ("file:///etc/passwd", "url", "must be a data URL", "proxy"),
        (data_url(png_of(100_000, 100_000)), "limit", "--max-image-pixels", "proxy"),
        (data_url(picture(30, 200, 200, "JPEG")[:-900], "jpeg"), "content", "cannot be decoded", "prefill"),
        (data_url(SVG, "svg+xml"), "format", "must be a PNG", "proxy"),
        (data_url(POLYGLOTS[0]), "format", "must be a PNG", "proxy"),
        (data_url(POLYGLOTS[1], "gif"), "content", "at least 1 x 1 pixels", "proxy"),
    ]
    return rows


def test_images_when_they_are_none_or_lie_where_nobody_may_look_then_refused_counted_and_no_loop_is_held_up(
    site: Site, tmp_path: Path
) -> None:
    service = site.service
    [node] = service.prefill
    names = ["images.test", "turns.test", "169.254.169.254", *LOOPBACK]
    with web_server() as port:
        flags = ["--image-fetch-seconds", "0.5", "--max-image-bytes", "5MiB", "--allowed-media-domains"]
        flags += [each for name in names for each in (name, f"{name}:{port}")]
        proxy = start_proxy(service.prefill, service.decode, tmp_path, *flags, program="tests.support.open_proxy")
        try:
            wait_ready(proxy, 30)
            fetched = httpx.post(proxy.url + CHAT_ROUTE, json=asking_for(f"http://images.test:{port}/"), timeout=60)
            assert fetched.status_code == 200, fetched.text  # what follows is refused for what it is
            before_s, limit_s = [lags(each) for each in (proxy, node)], busy_limit_s()
            for url, reason, words, who in refused_rows(port):
                check_refused(proxy, {"proxy": proxy, "prefill": node}[who], url, reason, words)
            before = metric(proxy, "images_refused_total", reason="limit")
            many = httpx.post(proxy.url + CHAT_ROUTE, json=asking_for(*[data_url(A)] * 1000), timeout=60)
            assert (many.status_code, many.json()["error"]["param"]) == (400, "messages")
            assert "at most --limit-mm-per-prompt 16 images, got 1000" in many.json()["error"]["message"]
            assert metric(proxy, "images_refused_total", reason="limit") == before + 1
            limit_s = max(limit_s, busy_limit_s())
            for each, earlier in zip((proxy, node), before_s, strict=True):
                assert not was_busy(earlier, lags(each), limit_s), each.role
        finally:
            proxy.process.stop()
    # Without the flag nothing is fetched at all.
    check_refused(service.proxy, service.proxy, "http://127.0.0.1/", "url", "--allowed-media-domains")
    spelled = asking_for(data_url(A))
    spelled["messages"][0]["content"][0]["text"] += images.PAD
    answer = httpx.post(service.url + CHAT_ROUTE, json=spelled, timeout=60)
    assert answer.status_code == 400
    assert "one placeholder of an image for each" in answer.json()["error"]["message"]
    wait_settled(node, *service.decode)


def check_refused(proxy: Node, teller: Node, url: str, reason: str, words: str) -> None:
    before = metric(teller, "images_refused_total", reason=reason)
    answer = httpx.post(proxy.url + CHAT_ROUTE, json=asking_for(url), timeout=60)
    assert answer.status_code == 400, (url[:80], answer.text)
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[1].image_url.url", error
    assert words in error["message"], error
    assert metric(teller, "images_refused_total", reason=reason) == before + 1, (url[:80], error)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_5", "gemma3"])  # loaded without its tower, and whole
def test_memory_when_the_tower_is_large_then_only_the_prefill_node_has_it(family: str, tmp_path: Path) -> None:
    vision = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 12, "depth": 12}
    large = images.make_checkpoint(family, tmp_path / "model", vision_fields=vision)
    tower_bytes = (large / "model.safetensors").stat().st_size - (
        images.image_checkpoint(family) / "model.safetensors"
    ).stat().st_size
    assert tower_bytes > 200e6
    resident = {}
    for role in ("prefill", "decode"):
        for path in (images.image_checkpoint(family), large):
            node = start_node(role, path, tmp_path, *NODE_FLAGS)
            try:
                wait_ready(node)
                # Weights that nobody has used yet may be pages of their file that were never read.
                asked = user("See:", A) if role == "prefill" else user("See.")
                post(node.url, CHAT_ROUTE, {"messages": [asked], "max_tokens": 2})
                status = Path(f"/proc/{node.process.pid}/status").read_text()
            finally:
                node.process.stop()
            [line] = [line for line in status.splitlines() if line.startswith("VmRSS")]
            resident[role, path] = int(line.split()[1]) * 1024
    grown = {
        role: resident[role, large] - resident[role, images.image_checkpoint(family)] for role in ("prefill", "decode")
    }
    print(f"{family}: a tower of {tower_bytes} bytes adds {grown} bytes")
    assert grown["prefill"] > 0.9 * tower_bytes
    assert grown["decode"] < 0.1 * tower_bytes


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
    expected = pairs.stream("Tell:", A, B, salt="whole", strike=False)
    assert pairs.stream("Tell:", A, B, salt="cut", strike=True) == expected
    assert metric(pairs.service.proxy, "proxy_migrations_total", outcome="resumed") == 1
    start_again(pairs.service, *(node for node in pairs.service.decode if node.process.popen.poll() is not None))


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
