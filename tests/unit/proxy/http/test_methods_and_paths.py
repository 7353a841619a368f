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
