"""Web pages of other origins: which may call the proxy, and what they may read of its answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.http_server import wait_for
from tests.unit.proxy.conftest import Cluster, StartCluster

PAGE = "https://app.example.org"
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
ALLOW, EXPOSE = "Access-Control-Allow-Origin", "Access-Control-Expose-Headers"
WANTED_HEADERS = "authorization,content-type,x-api-key,x-request-id,x-tandem-trace"


def preflight(cluster: Cluster, path: str, origin: str = PAGE, method: str = "POST") -> dict[str, str] | None:
    """The headers with which a browser may go on; None: it must not."""
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": WANTED_HEADERS,
    }
    answer = cluster.client.options(path, headers=asked)
    return dict(answer.headers) if answer.is_success and ALLOW in answer.headers else None


@pytest.mark.parametrize("origins", [(PAGE, "http://localhost:3000"), ("*",)])
def test_preflight_when_its_origin_is_allowed_then_needs_no_key_on_any_route(
    start_cluster: StartCluster, tmp_path: Path, origins: tuple[str, ...]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-a\n")
    cluster = start_cluster(allowed_origins=origins, api_key_file=str(keys))
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"):
        allowed = preflight(cluster, path)
        assert allowed is not None, path
        assert allowed[ALLOW.lower()] in (PAGE, "*")
        assert allowed["access-control-allow-headers"] == WANTED_HEADERS
        assert "POST" in allowed["access-control-allow-methods"]
    assert preflight(cluster, "/v1/models", method="GET") is not None
    assert (preflight(cluster, "/v1/models", "https://app.example.org.evil.test", "GET") is None) == (origins != ("*",))
    assert preflight(cluster, "/internal/v1/drain", method="DELETE") is None


def test_answer_when_its_page_is_allowed_then_it_may_read_it_whole_streamed_or_refused(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-a\n")
    cluster = start_cluster(allowed_origins=(PAGE,), api_key_file=str(keys), max_body_bytes=2000)
    page, key = {"Origin": PAGE}, {"Authorization": "Bearer key-a"}
    http = cluster.client
    with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}, headers=page | key) as stream:
        assert b"[DONE]" in stream.read()
    answers = {
        200: [
            stream,
            http.post("/v1/chat/completions", json=CHAT, headers=page | key),
            http.get("/v1/models", headers=page | key),
            http.get("/health", headers=page),
        ],
        400: [http.post("/v1/messages", json={}, headers=page | key)],
        401: [
            http.post("/v1/chat/completions", json=CHAT, headers=page),
            http.get("/v1/models", headers=page),
        ],
        404: [http.get("/nowhere", headers=page | key)],
        413: [http.post("/v1/completions", content=b" " * 3000, headers=page | key)],
    }
    for status, ofs in answers.items():
        for answer in ofs:
            assert (answer.status_code, answer.headers[ALLOW]) == (status, PAGE), answer.request.url
            assert {"x-request-id", "request-id", "retry-after", "x-tandem-dropped"} == {
                name.strip().lower() for name in answer.headers[EXPOSE].split(",")
            }
            assert "Origin" in answer.headers["Vary"]
    other = http.post("/v1/chat/completions", json=CHAT, headers={"Origin": "https://evil.test"} | key)
    assert ALLOW not in other.headers
    wait_for(lambda: cluster.metric("tandem_requests_running") == 0, "all requests to end")


def test_pages_when_no_origin_is_allowed_then_are_told_nothing(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    assert preflight(cluster, "/v1/chat/completions") is None
    answer = cluster.client.post("/v1/chat/completions", json=CHAT, headers={"Origin": PAGE})
    assert answer.status_code == 200
    assert not {ALLOW, EXPOSE, "Vary"} & {name.title() for name in answer.headers}
