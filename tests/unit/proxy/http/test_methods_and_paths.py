"""Requests in forms that clients and tools use beside the usual one."""

from __future__ import annotations

from pathlib import Path

from proxy.pages.routes import PAGE_PATHS
from tests.unit.proxy.conftest import StartCluster


def test_head_when_the_route_has_get_then_is_answered_without_a_body(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-a\n")
    cluster = start_cluster(api_key_file=str(keys))
    http, key = cluster.client, {"X-Api-Key": "key-a"}
    for path in ("/health", "/ready", "/version", "/metrics", "/openapi.json", "/docs", *PAGE_PATHS):
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path
        assert int(answer.headers["Content-Length"]) > 0
        assert answer.headers["X-Request-Id"]
    for path in ("/v1/models", "/status.json"):
        assert http.head(path).status_code == 401
        assert http.head(path, headers=key).status_code == 200
    assert http.head("/v1/models/other", headers=key).status_code == 404
    assert http.head("/v1/chat/completions", headers=key).status_code == 405


def test_path_when_it_ends_in_a_slash_then_is_the_one_without(start_cluster: StartCluster, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-a\n")
    cluster = start_cluster(api_key_file=str(keys))
    http, key = cluster.client, {"Authorization": "Bearer key-a", "X-Request-Id": "same"}
    names = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")
    for path in (f"/v1/{name}" for name in names):
        assert http.post(path + "/", json={}).status_code == 401, path
        answer = http.post(path + "/", json={}, headers=key)
        assert answer.status_code == 400, path
        assert answer.json() == http.post(path, json={}, headers=key).json()
    assert http.post("/v1/completions/", json={"prompt": "a"}, headers=key).status_code == 200
    assert cluster.decode[0].received[-1].path == "/v1/completions"
    assert http.post("/tokenize/", json={"prompt": "a"}, headers=key).status_code == 200
    for path in ("/v1/models", "/v1/models/fake", "/status.json"):
        assert http.get(path + "/", headers=key).status_code == http.get(path, headers=key).status_code, path
    assert http.get("/v1/models/", headers=key).json() == http.get("/v1/models", headers=key).json()
    assert http.get("/chat/").text == http.get("/chat").text
