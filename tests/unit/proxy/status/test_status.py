"""The data behind the status page: recent requests and the nodes' figures."""

from __future__ import annotations

import json
import threading
from collections import deque
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.metrics.proxy_metrics import RequestRecord
from proxy.metrics.recent_requests import KEPT, RecentRequest, RecentRequests, RequestAbout
from proxy.status import figures
from proxy.status.figures import NodeFigures, read_exposition
from proxy.status.routes import DATA_PATH
from tests.support.http_server import wait_for
from tests.unit.proxy.conftest import Cluster, StartCluster
from tests.unit.proxy.fake_node import Fault

REPORT = {
    "placement": "remote",
    "prefill_node": "prefill-0",
    "prompt_tokens": 40,
    "prefill_cached_tokens": 16,
    "decode_cached_tokens": 8,
    "transferred_bytes": 4096,
    "transferred_blocks": 2,
    "transferred_states": 1,
    "seconds": {
        "proxy_queue": 0.001,
        "tokenize": 0.002,
        "prefill": 0.2,
        "transfer": 0.003,
        "first_token": 0.004,
        "unheard_of": 1,
    },
}
PROMPT = "a prompt of nobody's business"
EXPOSITION = """\
# HELP tandem_requests_running Requests being worked on.
# TYPE tandem_requests_running gauge
tandem_requests_running{role="decode"} 2.0
tandem_kv_blocks{role="decode",state="used"} 3.0
tandem_kv_blocks{role="decode",state="free"} 5.0
tandem_prefix_cache_query_tokens_total{role="decode"} 200.0
tandem_prefix_cache_hit_tokens_total{role="decode",group="attention"} 50.0
tandem_request_ttft_seconds_bucket{role="decode",le="0.1"} 7.0
python_gc_objects_collected_total{generation="0"} 1.0
tandem_leases{role="decode",state="active"} not-a-number
"""


def status(cluster: Cluster) -> dict[str, Any]:
    answer = cluster.client.get(DATA_PATH)
    assert answer.status_code == 200
    return dict(answer.json())


def requests(cluster: Cluster) -> list[dict[str, Any]]:
    return list(status(cluster)["requests"])


def complete(cluster: Cluster, **fields: Any) -> httpx.Response:
    return cluster.client.post("/v1/completions", json={"prompt": PROMPT, **fields})


# --- routes


def test_status_when_a_key_is_set_then_its_data_needs_it(start_cluster: StartCluster, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    client = start_cluster(wait=False, api_key_file=str(keys)).client
    assert client.get(DATA_PATH).status_code == 401
    assert client.get(DATA_PATH, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get(DATA_PATH, headers={"Authorization": "Bearer secret"}).status_code == 200
    assert client.get("/status/other").status_code == 401


# --- recent requests


def test_request_when_its_node_reports_then_is_shown_with_it_and_the_client_does_not_see_the_report(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster()
    cluster.decode[0].report = json.dumps(REPORT)
    for stream in (False, True):
        answer = complete(cluster, stream=stream)
        assert answer.status_code == 200
        assert "x-tandem-report" not in answer.headers
        check_reported(requests(cluster)[0], answer, stream)
    assert PROMPT not in cluster.client.get(DATA_PATH).text


def check_reported(shown: dict[str, Any], answer: httpx.Response, stream: bool) -> None:
    assert shown["request_id"] == answer.headers["x-request-id"]
    assert (shown["outcome"], shown["status"], shown["running"]) == ("stop", 200, False)
    assert (shown["prefill_node"], shown["decode_node"], shown["placement"]) == ("prefill-0", "decode-0", "remote")
    assert shown["seconds"] == {name: value for name, value in REPORT["seconds"].items() if name != "unheard_of"}  # type: ignore[attr-defined]
    for name in ("prompt_tokens", "prefill_cached_tokens", "decode_cached_tokens", "transferred_bytes"):
        assert shown[name] == REPORT[name]
    assert (shown["ttft_seconds"] is not None) is stream
    assert 0 < shown["total_seconds"] < 20


def test_request_when_its_node_reports_nonsense_then_is_shown_without(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    for report in ("{", "[1]", '{"seconds": 3, "prompt_tokens": -1}', '{"seconds": {"prefill": "x"}}'):
        cluster.decode[0].report = report
        assert complete(cluster).status_code == 200
        shown = requests(cluster)[0]
        assert shown["outcome"] == "stop"
        assert shown["seconds"] == {}
        assert "prompt_tokens" not in shown


def test_request_while_it_runs_then_is_shown_with_its_nodes_and_stays_when_the_client_leaves(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster()
    cluster.decode[0].fault = Fault.STALL
    with cluster.client.stream("POST", "/v1/completions", json={"prompt": "hi", "stream": True}) as answer:
        chunks = answer.iter_raw()
        next(chunks)
        [shown] = requests(cluster)
        assert (shown["running"], shown["outcome"], shown["status"]) == (True, None, 200)
        assert (shown["prefill_node"], shown["decode_node"]) == ("prefill-0", "decode-0")
    wait_for(lambda: not requests(cluster)[0]["running"], "the request to end")
    assert requests(cluster)[0]["outcome"] == "abort"


def test_request_when_refused_or_failed_then_says_so(start_cluster: StartCluster) -> None:
    cluster = start_cluster(0, 1, max_concurrency=1, max_queue_size=0)
    cluster.decode[0].fault, cluster.decode[0].status = Fault.STATUS, 400
    assert complete(cluster).status_code == 400
    cluster.decode[0].status = 500
    assert complete(cluster).status_code == 500
    cluster.decode[0].fault = Fault.HANG
    url = str(cluster.client.base_url)
    give_up_after(url, 0.3)
    wait_for(lambda: "abort" in [each["outcome"] for each in requests(cluster)], "the place of who gave up to be free")
    hanging = threading.Thread(target=give_up_after, args=(url, 4.0))
    hanging.start()
    wait_for(lambda: status(cluster)["running"] == 1, "the request to be running")
    assert complete(cluster).status_code == 429
    hanging.join()
    wait_for(lambda: status(cluster)["running"] == 0, "the request to be gone")
    shown = [(each["outcome"], each["status"]) for each in requests(cluster)]
    assert sorted(shown, key=str) == sorted(
        [("rejected", 400), ("error", 500), ("abort", None), ("abort", None), ("capacity", 429)], key=str
    )
    for outcome in ("rejected", "capacity"):
        assert cluster.metric("tandem_requests_total", route="completions", outcome=outcome) == 1


def give_up_after(url: str, seconds: float) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url + "/v1/completions", json={"prompt": "hi"}, timeout=seconds)


def test_ring_when_more_requests_end_than_are_kept_then_the_newest_stay() -> None:
    ring = RecentRequests(kept=3)
    for index in range(5):
        about = RequestAbout(f"id-{index}", "chat", 1, is_stream=False, arrival_s=float(index))
        with ring.follow(RecentRequest(), about, RequestRecord("stop")):
            assert ring.to_json()[0]["running"]
    assert [each["request_id"] for each in ring.to_json()] == ["id-4", "id-3", "id-2"]
    assert KEPT >= 50


# --- nodes


def test_nodes_when_looked_at_then_show_state_model_and_figures(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    cluster.decode[0].metrics = EXPOSITION
    wait_for(lambda: status(cluster)["nodes"][1]["figures"], "the figures")
    prefill, decode = status(cluster)["nodes"]
    assert (prefill["role"], prefill["state"], prefill["model"], prefill["fingerprint"]) == (
        "prefill",
        "ready",
        "fake",
        "f00d",
    )
    assert decode["tensor_parallel_size"] == 1
    assert decode["figures"]["kv_blocks"] == {"used": 3.0, "free": 5.0}
    assert decode["hit_rates"] == {"attention": 0.25}
    assert decode["age_seconds"] < 20


def test_node_when_it_dies_or_freezes_then_is_shown_within_three_seconds(
    start_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start_cluster(1, 2, health_interval_seconds=1.0)
    assert [node["state"] for node in status(cluster)["nodes"]] == ["ready"] * 3
    cluster.decode[1].is_frozen = True
    wait_for(lambda: not status(cluster)["nodes"][2]["answers"], "the frozen node to be seen", 3)
    assert status(cluster)["nodes"][1]["answers"]
    cluster.stop_node(cluster.prefill[0])
    wait_for(lambda: status(cluster)["nodes"][0]["state"] == "suspect", "the dead node to be seen", 3)
    shown = status(cluster)
    assert not shown["ready"]
    assert "prefill" in shown["reasons"][0]
    assert shown["nodes"][0]["reason"]


@pytest.mark.asyncio
async def test_figures_when_asked_in_a_hurry_then_a_node_is_asked_once_a_second() -> None:
    asked: list[str] = []

    async def fetch(path: str, timeout_s: float) -> bytes:
        asked.append(path)
        return EXPOSITION.encode()

    nodes = NodeFigures()
    for _ in range(5):
        await nodes.refresh({"http://a": fetch})
    assert sorted(asked) == ["/health", "/metrics"]
    assert nodes.of("http://a")["figures"]["requests_running"] == 2
    await nodes.refresh({})
    assert nodes.of("http://a")["figures"] is None
    await nodes.close()


def test_exposition_when_read_then_gives_the_wanted_metrics_only() -> None:
    assert read_exposition(EXPOSITION) == {
        "requests_running": 2.0,
        "kv_blocks": {"used": 3.0, "free": 5.0},
        "prefix_cache_query_tokens_total": 200.0,
        "prefix_cache_hit_tokens_total": {"attention": 50.0},
    }


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e999"])
def test_exposition_when_a_value_is_not_finite_then_the_others_are_read(value: str) -> None:
    text = f'tandem_preemptions_total {value}\ntandem_leases{{state="active"}} {value}\n'
    assert read_exposition(text + EXPOSITION) == read_exposition(EXPOSITION)


def test_rates_when_counters_moved_then_are_of_the_last_samples() -> None:
    def sample(num: float) -> dict[str, Any]:
        return {
            "prefix_cache_query_tokens_total": 100 * num,
            "prefix_cache_hit_tokens_total": {"state": 10 * num * num},
            "transfer_bytes_total": {"kv": 1000 * num, "state": 500 * num},
        }

    samples = deque([(100.0, sample(1)), (104.0, sample(2)), (106.0, sample(3))])
    rates = figures._rates(samples)
    assert rates["kv_bytes"] == pytest.approx(2000 / 6, abs=0.01)
    assert rates["state_bytes"] == pytest.approx(1000 / 6, abs=0.01)
    assert figures._hit_rates(sample(3), figures._before(samples, 103.0)) == {"state": 0.5}
    assert figures._hit_rates(sample(3), {}) == {"state": 0.3}
    assert figures._before(samples, 105.0) is None
