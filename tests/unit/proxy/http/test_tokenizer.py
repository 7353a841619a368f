"""Prompts reach the nodes as the ids of their own tokenizer, or as they came."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import ImageRefusedError, NodeUnavailableError
from common.images.rules import ImageLimits
from common.kv_cache.keys import PrefixKeys, chain_root
from common.node.routes.tokenizer_route import take_apart
from common.openai.protocol import ChatRequest, parse_chat, parse_completion
from common.text.tokenizer import TextCodec
from common.text.tokenizer_document import TokenizerDocument
from proxy.http.image_fetcher import ImageFetcher
from proxy.http.tokenizer import PromptTokenizer
from proxy.node_http.client import NodeAnswer
from tests.support.http_server import wait_for
from tests.unit.proxy.conftest import Cluster, StartCluster
from tests.unit.text.vocabulary import train_byte_level

BLOCK_SIZE = 16
CHAT = {
    "messages": [
        {"role": "system", "content": "You know the quick brown fox. " * 4},
        {"role": "user", "content": "Where does the fox jump? " * 3},
        {"role": "assistant", "content": "Over the lazy dog."},
        {"role": "user", "content": "stop"},
    ],
    "temperature": 0,
}


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    tokenizer: Any = train_byte_level()
    return TextCodec(tokenizer, vocab_size=len(tokenizer))


@pytest.fixture(scope="module")
def document(codec: TextCodec) -> TokenizerDocument:
    return TokenizerDocument("f00d", b"root", BLOCK_SIZE, codec.vocab_size, 4096, True, parts=take_apart(codec))


@pytest.fixture
def cluster(start_cluster: StartCluster, document: TokenizerDocument) -> Cluster:
    running = start_cluster(pull=True, documents={"tokenizer": document.to_json()})
    _wait_for_tokenizer(running)
    return running


def _wait_for_tokenizer(cluster: Cluster) -> None:
    def is_there() -> bool:
        cluster.client.post("/v1/completions", json={"prompt": "a"})
        return cluster.metric("tandem_prompts_tokenised_total") > 0

    wait_for(is_there, "the proxy to have the tokenizer")
    for node in (*cluster.prefill, *cluster.decode):
        node.received.clear()


def bodies(cluster: Cluster) -> list[dict[str, Any]]:
    """Of the prefill leg and of the decode leg."""
    wait_for(lambda: cluster.prefill[0].received and cluster.decode[0].received, "both legs")
    return [cluster.prefill[0].bodies[0], cluster.decode[0].bodies[0]]


def test_chat_goes_to_both_nodes_as_ids_with_its_boundaries_and_without_its_messages(
    cluster: Cluster, codec: TextCodec
) -> None:
    request = parse_chat(CHAT)
    token_ids = codec.encode_chat(request)
    boundaries = codec.chat_boundaries(request, token_ids)
    assert boundaries
    fields = {"tools": [], "add_generation_prompt": True, "chat_template_kwargs": {}, "cache_salt": "s", "seed": 3}
    answer = cluster.client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert answer.status_code == 200
    for body in bodies(cluster):
        assert body["tandem_prompt"] == {"token_ids": token_ids, "boundaries": list(boundaries)}
        assert not body.keys() & {"messages", "add_generation_prompt", "chat_template_kwargs"}
        assert (body["cache_salt"], body["seed"]) == ("s", 3)
        assert parse_chat(body, is_from_peer=True).prompt_ids is not None


@pytest.mark.parametrize("text", ["hello world", "hello world " * 400])
def test_text_goes_to_both_nodes_as_ids(cluster: Cluster, codec: TextCodec, text: str) -> None:
    cluster.client.post("/v1/completions", json={"prompt": text})
    assert [body["prompt"] for body in bodies(cluster)] == [codec.encode(text)] * 2


def test_list_of_prompts_goes_to_each_prefill_leg_as_its_ids(cluster: Cluster, codec: TextCodec) -> None:
    ids = [codec.encode("hello"), [1, 2, 3], codec.encode("a dog")]
    cluster.client.post("/v1/completions", json={"prompt": ["hello", [1, 2, 3], "a dog"]})
    assert cluster.decode[0].bodies[0]["prompt"] == ids
    assert sorted(body["prompt"] for body in cluster.prefill[0].bodies) == sorted(ids)


def test_what_needs_its_text_or_cannot_be_tokenised_goes_on_as_it_came(cluster: Cluster) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "hello", "echo": True, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "x" * 200_000}),  # more than the context can hold, whatever the tokens are
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "x"}]}),  # refused by the template
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"tokenize": False}}),
        ("/v1/chat/completions", {**CHAT, "chat_template": "{{ messages }}"}),  # nodes decide whether they trust it
        ("/v1/chat/completions", {**CHAT, "echo": True}),
    ]
    for route, body in cases:
        for node in (*cluster.prefill, *cluster.decode):
            node.received.clear()
        cluster.client.post(route, json=body)
        for leg in bodies(cluster):
            for key in ("prompt", "messages", "chat_template_kwargs"):
                assert leg.get(key) == body.get(key)
            assert "tandem_prompt" not in leg


@pytest.mark.parametrize(
    ("fields", "cut"),
    [
        ({"truncate_prompt_tokens": 3}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(0, 3)),
    ],
)
def test_prompt_when_it_is_cut_then_nodes_get_what_is_left(
    cluster: Cluster, codec: TextCodec, fields: dict[str, Any], cut: slice
) -> None:
    text = "hello world, the quick brown fox"
    for prompt in (text, codec.encode(text)):
        for node in (*cluster.prefill, *cluster.decode):
            node.received.clear()
        cluster.client.post("/v1/completions", json={"prompt": prompt, **fields})
        assert [body["prompt"] for body in bodies(cluster)] == [codec.encode(text)[cut]] * 2
    for node in (*cluster.prefill, *cluster.decode):
        node.received.clear()
    cluster.client.post("/v1/chat/completions", json={**CHAT, **fields})
    whole = codec.encode_chat(parse_chat(CHAT))
    for body in bodies(cluster):
        assert body["tandem_prompt"] == {"token_ids": whole[cut], "boundaries": []}
        assert not body.keys() & fields.keys()


def test_request_id_when_in_the_body_then_is_the_requests_unless_a_header_says_another(cluster: Cluster) -> None:
    for headers, expected in (({}, "mine-1"), ({"X-Request-Id": "header-1"}, "header-1")):
        for node in (*cluster.prefill, *cluster.decode):
            node.received.clear()
        body = {"prompt": "hello", "request_id": "mine-1"}
        answer = cluster.client.post("/v1/completions", json=body, headers=headers)
        assert answer.headers["x-request-id"] == expected
        assert cluster.decode[0].received[0].headers["x-request-id"] == expected


def test_clients_own_tandem_prompt_is_taken_off(cluster: Cluster) -> None:
    body = {**CHAT, "tandem_prompt": {"token_ids": [1, 2, 3]}}
    cluster.client.post("/v1/chat/completions", json=body)
    assert all(leg["tandem_prompt"]["token_ids"] != [1, 2, 3] for leg in bodies(cluster))
    only = {"tandem_prompt": {"token_ids": [1, 2, 3]}}
    answer = cluster.client.post("/v1/chat/completions", json=only)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_node_of_another_make_among_them_then_chats_go_as_messages(cluster: Cluster) -> None:
    cluster.decode[0].pull = False
    wait_for(lambda: _is_plain(cluster), "the proxy to see the other make")


def _is_plain(cluster: Cluster) -> bool:
    cluster.decode[0].received.clear()
    cluster.client.post("/v1/chat/completions", json=CHAT)
    return [body.get("messages") for body in cluster.decode[0].bodies] == [CHAT["messages"]]


# --- without a proxy round it -----------------------------------------------------------------------------------------


class Answers:
    """A node's client that knows one document. ``num_bodies``: how often it was sent whole."""

    def __init__(self, document: TokenizerDocument) -> None:
        self.document = document
        self.num_bodies = 0
        self.num_asked = 0

    async def request(
        self, method: str, route: str, *, headers: dict[str, str], timeout_s: float, max_bytes: int
    ) -> NodeAnswer:
        self.num_asked += 1
        body = json.dumps(self.document.to_json()).encode()
        etag = f'"{hash(body)}"'
        if headers.get("if-none-match") == etag:
            return NodeAnswer(304, {"etag": etag}, b"")
        self.num_bodies += 1
        return NodeAnswer(200, {"etag": etag}, body)


@dataclasses.dataclass
class Site:
    answers: Answers
    node: SimpleNamespace
    tokenizer: PromptTokenizer
    num_tokenised: int = 0

    def inc(self, name: str, amount: int = 1) -> None:
        assert name == "prompts_tokenised_total"
        self.num_tokenised += amount

    async def tokenised(self, prompt: str) -> Sequence[int] | str:
        body = {"prompt": prompt}
        done = await self.tokenizer.tokenise(parse_completion(body), body, [prompt], num_bytes=len(prompt))
        prompt = done.prompts[0]
        token_ids: Sequence[int] | str = prompt.tolist() if isinstance(prompt, array) else prompt
        return token_ids


@pytest.fixture
def site(document: TokenizerDocument) -> Site:
    answers = Answers(document)
    info = SimpleNamespace(pull=True, fingerprint="f00d", epoch="1")
    node = SimpleNamespace(url="http://a", name="a", is_up=True, info=info, client=answers)
    made = Site(answers, node, None)  # type: ignore[arg-type]
    limits = ImageLimits()
    pool: Any = SimpleNamespace(nodes=[node])
    fetcher = ImageFetcher((), limits, 1.0, max_body_bytes=2**24)
    made.tokenizer = PromptTokenizer(pool, made, {}, limits, fetcher)  # type: ignore[arg-type]
    return made


async def _until_ids(site: Site, token_ids: Sequence[int]) -> None:
    async with asyncio.timeout(20):
        while await site.tokenised("hello dog") != token_ids:
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_images_when_there_is_no_tokenizer_or_the_model_takes_none_then_nothing_goes_on(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.http.tokenizer.WAIT_S", 0.0)
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    with pytest.raises(NodeUnavailableError, match="no tokenizer"):
        await site.tokenizer.tokenise(parse_chat(body), body, [None], num_bytes=100)
    monkeypatch.setattr("proxy.http.tokenizer.WAIT_S", 20.0)
    site.tokenizer.start()
    try:
        with pytest.raises(ImageRefusedError, match="takes no images"):
            await site.tokenizer.tokenise(parse_chat(body), body, [None], num_bytes=100)
    finally:
        await site.tokenizer.close()


@pytest.mark.asyncio
async def test_keys_are_those_that_the_node_gives_to_the_prompt(site: Site, codec: TextCodec) -> None:
    site.tokenizer.start()
    try:
        await _until_ids(site, codec.encode("hello dog"))
        for body in ({"prompt": "hello dog " * 20}, {"prompt": list(range(50))}):
            for salt in (None, "tenant"):
                full = {**body, "cache_salt": salt}
                done = await site.tokenizer.tokenise(parse_completion(full), full, [body["prompt"]], num_bytes=100)
                token_ids = done.prompts[0]
                extra = (("cache_salt", salt.encode()),) if salt else ()
                theirs = PrefixKeys(chain_root(b"root", extra), BLOCK_SIZE, token_ids)
                (keys,) = done.prompt_keys
                assert keys is not None
                assert keys.num_tokens == len(token_ids)
                assert list(keys.boundary_keys) == theirs.boundary_keys(len(token_ids) // BLOCK_SIZE)
                assert keys.key_at(21) == theirs.key_at(21)
        many = {"prompt": ["a"] * 17}
        done = await site.tokenizer.tokenise(parse_completion(many), many, many["prompt"], num_bytes=100)
        assert (len(done.prompts), done.prompt_keys) == (17, ())
    finally:
        await site.tokenizer.close()


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": ""}] * 500},
        {"messages": [{"role": "assistant", "content": "", "reasoning_content": "x" * 20_000}]},
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": ["b"] * 5000}},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"function": {"name": "f", "a": "b" * 20_000}}]},
        {"prompt": ["a"] * 1000},
        {"prompt": "dog " * 1000},
    ],
)
@pytest.mark.asyncio
async def test_prompt_when_its_body_is_long_in_any_field_then_it_is_tokenised_off_the_event_loop(
    site: Site, codec: TextCodec, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    encode = TextCodec.encode

    def watched(self: TextCodec, text: str, *, add_special_tokens: bool = True) -> list[int]:
        threads.add(threading.current_thread().name)
        return encode(self, text, add_special_tokens=add_special_tokens)

    site.tokenizer.start()
    try:
        await _until_ids(site, codec.encode("hello dog"))
        monkeypatch.setattr(TextCodec, "encode", watched)
        request = parse_chat(body) if "messages" in body else parse_completion(body)
        prompts = [None] if isinstance(request, ChatRequest) else list(request.prompts)
        await site.tokenizer.tokenise(request, body, prompts, num_bytes=len(json.dumps(body)))
        assert threads
        assert all(name.startswith("tokenise") for name in threads), threads
    finally:
        await site.tokenizer.close()


@pytest.mark.asyncio
async def test_tokenizer_when_the_node_lives_anew_then_it_is_asked_and_sent_again_only_if_it_changed(
    site: Site, document: TokenizerDocument
) -> None:
    old, new = codec_ids(document), None
    site.tokenizer.start()
    try:
        await _until_ids(site, old)
        site.node.info.epoch = "2"
        await _until_asked(site, 2)
        assert site.answers.num_bodies == 1
        other: Any = train_byte_level()
        other.add_tokens(["hello dog"])
        site.answers.document = document_with(other, document)
        new = codec_ids(site.answers.document)
        assert new != old
        site.node.info.epoch = "3"
        await _until_ids(site, new)
        assert site.answers.num_bodies == 2
    finally:
        await site.tokenizer.close()


@pytest.mark.asyncio
async def test_tokenizer_when_the_nodes_have_another_model_then_the_old_one_is_not_used_meanwhile(
    site: Site, document: TokenizerDocument
) -> None:
    site.tokenizer.start()
    try:
        await _until_ids(site, codec_ids(document))
        site.node.info.fingerprint = "beef"
        assert await site.tokenised("hello dog") == "hello dog"
        site.answers.document = dataclasses.replace(document, fingerprint="beef")
        await _until_ids(site, codec_ids(document))
    finally:
        await site.tokenizer.close()


def document_with(tokenizer: Any, document: TokenizerDocument) -> TokenizerDocument:
    codec = TextCodec(tokenizer, vocab_size=len(tokenizer))
    return dataclasses.replace(document, parts=take_apart(codec), vocab_size=codec.vocab_size)


def codec_ids(document: TokenizerDocument) -> list[int]:
    assert document.parts is not None
    return list(document.parts.create_tokenizer().encode("hello dog"))


async def _until_asked(site: Site, num_times: int) -> None:
    async with asyncio.timeout(20):
        while site.answers.num_asked < num_times:
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_node_without_a_usable_tokenizer_then_texts_go_as_they_came_and_ids_have_keys(
    site: Site, document: TokenizerDocument
) -> None:
    site.answers.document = dataclasses.replace(document, parts=None, reason="slow")
    ids = {"prompt": [1, 2, 3]}
    site.tokenizer.start()
    try:
        async with asyncio.timeout(20):
            request = parse_completion(ids)
            while not (await site.tokenizer.tokenise(request, ids, [ids["prompt"]], num_bytes=100)).prompt_keys:
                await asyncio.sleep(0.01)
        assert await site.tokenised("hello dog") == "hello dog"
        assert (await site.tokenizer.tokenise(parse_chat(CHAT), CHAT, [None], num_bytes=100)).body == CHAT
        assert site.num_tokenised == 0
    finally:
        await site.tokenizer.close()
