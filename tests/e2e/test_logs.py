"""What clients send is not for logs: no prompt, no answer, no key, in no process, whatever becomes of the request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support.client import together
from tests.support.hangup import OpenRequest
from tests.support.models import checkpoint
from tests.support.service import Service

MARKER = "xyzzymarker"
KEY, WRONG_KEY, CLUSTER_KEY = f"sk-{MARKER}-key", f"sk-{MARKER}-wrong", f"ck-{MARKER}-cluster"
REQUEST_ID = "this-is-logged"
IDS = [317] * 5 + list(range(300, 318))  # as text in a log: "317, 317, 317"
TOOL = {"type": "function", "function": {"name": "look", "description": MARKER, "parameters": {"type": "object"}}}
GOOD: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": MARKER * 3, "max_tokens": 4}),
    ("/v1/completions", {"prompt": [MARKER, f"a {MARKER}"], "max_tokens": 4, "user": MARKER, "stop": [MARKER]}),
    ("/v1/completions", {"prompt": MARKER, "max_tokens": 4, "stream": True, "cache_salt": MARKER}),
    ("/v1/completions", {"prompt": IDS, "max_tokens": 4, "echo": True, "logprobs": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": MARKER}], "max_tokens": 4}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": MARKER, "name": MARKER}], "tools": [TOOL], "max_tokens": 4},
    ),
    ("/tokenize", {"prompt": MARKER}),
    ("/detokenize", {"tokens": IDS}),
]
BAD: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": MARKER, "temperature": MARKER}),
    ("/v1/completions", {"prompt": {MARKER: MARKER}}),
    ("/v1/completions", {"prompt": MARKER, "model": MARKER}),
    ("/v1/completions", {"prompt": MARKER, MARKER: 1, "n": -1}),
    ("/v1/completions", {"prompt": MARKER * 20_000, "max_tokens": 4}),
    ("/v1/completions", {"prompt": MARKER, "max_tokens": 4, "response_format": {"type": MARKER}}),
    ("/v1/completions", {"prompt": [*IDS, 10**9], "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": [{"role": MARKER, "content": MARKER}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": MARKER, "text": MARKER}]}]}),
    ("/v1/chat/completions", {"messages": MARKER}),
    ("/tokenize", {"prompt": [MARKER]}),
    ("/detokenize", {"tokens": [MARKER]}),
]
HEADERS = {"authorization": f"Bearer {KEY}", "x-session-id": MARKER, "cookie": MARKER, "x-tandem-trace": "1"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Keys are set, and everything that would be logged is."""
    folder: Path = tmp_path_factory.mktemp("keys")
    (folder / "api").write_text(KEY + "\n")
    (folder / "cluster").write_text(CLUSTER_KEY + "\n")
    flags = ("--api-key-file", str(folder / "api"), "--cluster-key-file", str(folder / "cluster"))
    flags = (*flags, "--log-level", "debug")
    node_flags = (*NODE_FLAGS, *flags)
    with Service(checkpoint(FAMILY), prefill_flags=node_flags, decode_flags=node_flags, proxy_flags=flags) as running:
        yield running


def send(base: str, route: str, body: Any, **headers: str) -> int:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    all_headers = {**HEADERS, "content-type": "application/json", **headers}
    return httpx.post(base + route, content=content, headers=all_headers, timeout=60).status_code


def test_logs_when_requests_of_every_kind_were_answered_or_refused_then_hold_nothing_of_them(service: Service) -> None:
    urls = [node.url for node in service.nodes]
    statuses = together([partial(send, service.url, *each) for each in GOOD])
    assert statuses == [200] * len(GOOD)
    refused = together([partial(send, service.url, *each) for each in BAD])
    assert all(400 <= status < 500 for status in refused), refused
    for url in urls:
        assert send(url, *BAD[0]) == 400
        assert send(url, "/v1/completions", GOOD[0][1], authorization=f"Bearer {WRONG_KEY}") == 401
        assert send(url, f"/v1/{MARKER}?{MARKER}={MARKER}", {}) in (404, 405)
        assert send(url, "/v1/completions", b'{"prompt": "%s' % MARKER.encode()) == 400
        assert send(url, "/internal/v1/leases/renew", {"lease_ids": MARKER}, **{"x-tandem-cluster-key": MARKER}) >= 400
        httpx.get(f"{url}/v1/models?{MARKER}", headers=HEADERS)
    body = {"prompt": MARKER, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with OpenRequest(service.url, "/v1/completions", body, headers=HEADERS) as stream:
        stream.read_events(2)  # and leaves
    service.decode[0].process.kill()
    assert send(service.url, *GOOD[0], **{"x-request-id": REQUEST_ID}) >= 500
    assert REQUEST_ID in service.proxy.process.log.read_text()  # where it would be found
    for node in service.nodes:
        text = node.process.log.read_text(errors="replace")
        assert len(text) > 500, "nothing is logged at all"
        found = [line for line in text.splitlines() if MARKER in line or "317, 317" in line]
        assert not found, f"{node.role}: {found[:5]}"
