"""What a stream that runs keeps of its prompt: nothing, or 4 bytes a token when it may go on at another node."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import socket
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from common.node.routes.tokenizer_route import take_apart
from common.text.tokenizer import TextCodec
from common.text.tokenizer_document import TokenizerDocument
from tests.support.http_server import wait_for
from tests.unit.proxy.conftest import Cluster, StartCluster
from tests.unit.proxy.raw_node import INFO, RawNode, chunked
from tests.unit.text.vocabulary import train_byte_level

NUM_TOKENS = 100_000
NUM_STREAMS = 2
STATE = b': tandem {"token_ids":[1],"created":7,"num_cached_tokens":3}\n'
KEEPS_FOR_MOVING = 5.5
"""Bytes a token: 4 for the token, and a margin for what one stream has anyway."""
KEEPS = 1.5

PULL = b'{"pull":true,"host":"127.0.0.1","port":1,"epoch":"77",'


class Tokenising(RawNode):
    """A raw node with a tokenizer's document, so that the proxy makes tokens of texts."""

    document = b""

    def _document(self, path: bytes) -> bytes | None:
        return self.document if path == b"/internal/v1/tokenizer" else None


@contextlib.contextmanager
def streaming(cluster: Cluster, route: str, content: bytes) -> Iterator[None]:
    """A client that has the first byte of its answer, which does not end."""
    assert cluster.proxy is not None
    head = f"POST {route} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", cluster.proxy.port), timeout=60) as sock:
        sock.sendall(head + content)
        answer = b""
        while b"data: {" not in answer:
            piece = sock.recv(2**16)
            assert piece, answer
            answer += piece
        yield


def num_bytes_kept(cluster: Cluster, route: str, body: dict[str, Any]) -> float:
    """Per token of the prompt, by one stream."""
    content = json.dumps({"stream": True, "max_tokens": 50, **body}).encode()
    tracemalloc.start()
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(2):  # what is there once, whoever asks
                stack.enter_context(streaming(cluster, route, content))
            before = in_use()
            for _ in range(NUM_STREAMS):
                stack.enter_context(streaming(cluster, route, content))
            after = in_use()
    finally:
        tracemalloc.stop()
    return (after - before) / NUM_STREAMS / NUM_TOKENS


def in_use() -> int:
    """Once what was on its way between threads has arrived."""
    seen = []
    for _ in range(3):
        time.sleep(0.2)
        gc.collect()
        seen.append(tracemalloc.get_traced_memory()[0])
    return min(seen)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    tokenizer: Any = train_byte_level()
    return TextCodec(tokenizer, vocab_size=len(tokenizer))


@pytest.fixture
def raw(codec: TextCodec) -> Iterator[Tokenising]:
    node = Tokenising(INFO.replace(b"{", b'{"resume":true,', 1).replace(b"{", PULL, 1))
    node.content, node.lingers = chunked(STATE + b'data: {"index":0}\n\n', is_whole=False), True
    document = TokenizerDocument("f00d", b"root", 16, codec.vocab_size, 2 * NUM_TOKENS, True, parts=take_apart(codec))
    node.document = json.dumps(document.to_json()).encode()
    yield node
    node.close()


def prompts(codec: TextCodec) -> dict[str, tuple[str, dict[str, Any]]]:
    """Each of about NUM_TOKENS, by how it comes."""
    draw = random.Random(17)
    ids = [draw.randrange(300, codec.vocab_size) for _ in range(NUM_TOKENS)]
    text = "the quick brown fox jumps over a lazy dog. "
    text *= NUM_TOKENS // len(codec.encode_prompt(text))
    return {
        "ids": ("/v1/completions", {"prompt": ids}),
        "text": ("/v1/completions", {"prompt": text}),
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    }


def cases() -> Iterator[Any]:
    for name, limit, most in (("stays", 0, KEEPS), ("may move", 3, KEEPS_FOR_MOVING)):
        for kind in ("ids", "text", "chat"):
            yield pytest.param(limit, most, kind, id=f"{name}-{kind}")


@pytest.mark.full
@pytest.mark.parametrize(("limit", "most", "kind"), list(cases()))
def test_stream_when_it_runs_then_keeps_of_its_prompt_only_what_another_node_would_need(
    start_cluster: StartCluster, raw: Tokenising, codec: TextCodec, kind: str, limit: int, most: float
) -> None:
    cluster = start_cluster(0, 0, more_decode=[raw.url], migration_limit=limit, wait=False)
    wait_for(lambda: cluster.client.get("/ready").status_code == 200, "the proxy to be ready")

    def tokenises() -> bool:
        with streaming(cluster, "/v1/completions", b'{"stream":true,"prompt":"a"}'):
            return cluster.metric("tandem_prompts_tokenised_total") > 0

    wait_for(tokenises, "the proxy to have the tokenizer")
    kept = num_bytes_kept(cluster, *prompts(codec)[kind])
    print(f"{kind}, migration limit {limit}: {kept:.2f} bytes a token")
    assert kept <= most
    wait_for(lambda: cluster.metric("tandem_requests_running") == 0, "the streams to be over")
