"""The proxy in front of servers of vLLM's kind: what each leg carries, and what becomes of their blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.http_server import AppServer, wait_for
from tests.support.vllm_pair import ADAPTER, ANSWER, MODEL, VllmPair
from tests.unit.proxy.conftest import StartCluster

COMPLETION: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Tell me",
    "max_tokens": 20,
    "min_tokens": 4,
    "temperature": 0.5,
    "seed": 3,
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": 2,
}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me"}],
    "max_completion_tokens": 20,
    "n": 1,
    "logprobs": True,
    "top_logprobs": 3,
    "tools": [{"type": "function", "function": {"name": "f"}}],
}


@dataclass
class Front:
    """A proxy before one pair; ``url_of`` of its servers by role."""

    client: httpx.Client
    pair: VllmPair
    prefill: AppServer
    decode: AppServer
    metric: Callable[..., float]

    def post(self, body: dict[str, Any], **headers: str) -> httpx.Response:
        route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return self.client.post(route, json=body, headers=headers)


StartFront = Callable[..., Front]


@pytest.fixture
def start_front(start_cluster: StartCluster) -> Iterator[StartFront]:
    with ExitStack() as stack:

        def start(num_decode: int = 1, *, pair: VllmPair | None = None, **config: Any) -> Front:
            pair = pair or VllmPair()
            servers = [AppServer(pair.prefill_app()), *(AppServer(pair.decode_app()) for _ in range(num_decode))]
            for server in servers:
                stack.callback(server.stop)
            urls = [server.url for server in servers]
            cluster = start_cluster(0, 0, more_prefill=urls[:1], more_decode=urls[1:], **config)
            return Front(cluster.client, pair, servers[0], servers[1], cluster.metric)

        yield start


@pytest.mark.parametrize("kind", ["auto", "vllm"])
def test_completion_when_nodes_are_vllm_then_both_legs_are_as_its_own_proxy_writes_them(
    start_front: StartFront, kind: str
) -> None:
    front = start_front(node_kind=kind)
    answer = front.post(COMPLETION, **{"X-Request-Id": "abc-7"})
    assert answer.status_code == 200, answer.text
    assert "".join(text for text in ANSWER if f'"text": "{text}"' in answer.text) == "".join(ANSWER)
    assert answer.text.endswith("data: [DONE]\n\n")
    [prefill], [decode] = front.pair.prefill_legs, front.pair.decode_legs
    assert prefill.request_id == decode.request_id == "abc-7"
    assert prefill.path == decode.path == "/v1/completions"
    kept = {key: value for key, value in COMPLETION.items() if key not in ("min_tokens", "stream_options")}
    params = prefill.body.pop("kv_transfer_params")
    assert prefill.body == {**kept, "stream": False, "max_tokens": 1}
    assert params["do_remote_decode"] is True
    given = decode.body.pop("kv_transfer_params")
    assert decode.body == COMPLETION
    assert given["remote_block_ids"] == [[1, 2], [3]]
    assert given["_p_side_truncated"] is True
    assert (front.pair.held, front.pair.violations) == ({}, [])
    assert front.metric("tandem_proxy_decisions_total", policy="round_robin", placement="remote") == 1


def test_chat_when_nodes_are_vllm_then_its_token_limit_is_1_on_the_prefill_leg_only(start_front: StartFront) -> None:
    front = start_front()
    assert front.post(CHAT).status_code == 200
    [prefill], [decode] = front.pair.prefill_legs, front.pair.decode_legs
    assert prefill.path == decode.path == "/v1/chat/completions"
    assert (prefill.body["max_tokens"], prefill.body["max_completion_tokens"]) == (1, 1)
    del decode.body["kv_transfer_params"]
    assert decode.body == CHAT
    assert front.pair.violations == []


def test_model_names_when_nodes_are_vllm_then_come_from_its_models(start_front: StartFront) -> None:
    front = start_front()
    assert front.post({**COMPLETION, "model": ADAPTER}).status_code == 200
    assert front.post({**COMPLETION, "model": "other"}).status_code == 404
    assert front.client.get("/v1/models").json()["data"][0]["id"] == MODEL


def test_keys_when_the_servers_have_one_then_the_clients_goes_on_and_ours_does_not(
    start_front: StartFront, tmp_path: Path
) -> None:
    cluster_key = tmp_path / "cluster"
    cluster_key.write_text("secret\n")
    front = start_front(pair=VllmPair(api_key="theirs"), cluster_key_file=str(cluster_key))
    assert front.post(COMPLETION).status_code == 400  # their own words: Unauthorized
    assert front.post(COMPLETION, Authorization="Bearer theirs").status_code == 200


def test_keys_when_any_server_can_answer_then_ours_do_not_go_on_either(start_front: StartFront, tmp_path: Path) -> None:
    cluster_key = tmp_path / "cluster"
    cluster_key.write_text("secret\n")
    front = start_front(cluster_key_file=str(cluster_key))
    chat = {"model": MODEL, "messages": CHAT["messages"]}
    assert front.client.get("/v1/models").status_code == 200
    assert front.client.post("/tokenize", json={"prompt": "a"}).json()["count"] == 2
    assert front.client.post("/v1/messages/count_tokens", json=chat).json() == {"input_tokens": 2}
    assert front.pair.violations == []


def test_prefill_leg_when_it_has_nothing_to_hand_over_then_decode_computes(start_front: StartFront) -> None:
    front = start_front(breaker_failures=1)
    front.pair.has_nothing_to_hand_over = True
    assert [front.post(COMPLETION).status_code for _ in range(3)] == [200] * 3
    assert [leg.body for leg in front.pair.decode_legs] == [COMPLETION] * 3
    assert len(front.pair.prefill_legs) == 3


def test_decode_leg_when_it_fails_then_blocks_are_not_read_again(start_front: StartFront) -> None:
    front = start_front(2)
    front.pair.fails_decode = 1
    assert front.post(COMPLETION).status_code == 200
    first, second = front.pair.decode_legs
    assert "kv_transfer_params" in first.body
    assert second.body == COMPLETION
    assert front.pair.violations == []


def test_decode_node_when_gone_then_the_other_one_reads_the_blocks(start_front: StartFront) -> None:
    front = start_front(2, health_interval_seconds=3600)
    front.decode.stop()
    assert [front.post(COMPLETION).status_code for _ in range(2)] == [200] * 2
    assert all("kv_transfer_params" in leg.body for leg in front.pair.decode_legs)
    assert (front.pair.held, front.pair.violations) == ({}, [])


def test_prefill_node_when_gone_then_decode_computes(start_front: StartFront) -> None:
    front = start_front(health_interval_seconds=3600)
    front.prefill.stop()
    assert front.post(COMPLETION).status_code == 200
    assert front.pair.decode_legs[0].body == COMPLETION


def test_client_when_gone_while_streaming_then_the_server_aborts(start_front: StartFront) -> None:
    front = start_front(migration_limit=1)
    front.pair.is_slow = True
    with front.client.stream("POST", "/v1/completions", json=COMPLETION) as answer:
        assert next(answer.iter_lines())
    wait_for(lambda: front.pair.num_aborted == 1, "the abort")


def test_node_when_unhealthy_then_not_ready_with_the_reason(start_front: StartFront) -> None:
    front = start_front()
    front.pair.is_healthy = False
    why = "/health answers 503"

    def reason() -> str:
        return str(front.client.get("/ready").json().get("reason"))

    wait_for(lambda: reason().count(why) == 2, "the proxy to have seen both nodes")
    assert front.client.get("/ready").status_code == 503
    assert front.post(COMPLETION).status_code == 503
    front.pair.is_healthy = True
    wait_for(lambda: front.client.get("/ready").status_code == 200, "the proxy to be ready again")


def test_node_kind_when_tandem_then_a_server_without_ready_is_not_used(start_front: StartFront) -> None:
    front = start_front(node_kind="tandem", wait=False)
    wait_for(lambda: "/ready answers 404" in front.client.get("/ready").text, "the probe of its /ready")


@pytest.mark.parametrize(
    ("fields", "is_known"),
    [
        ({"guided_json": {"type": "object"}, "use_beam_search": True, "n": 2}, False),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}, True),
        ({"messages": CHAT["messages"], "reasoning_effort": "of their own", "temperature": 9}, False),
    ],
)
def test_field_when_only_the_servers_know_it_then_goes_on_to_them(
    start_front: StartFront, fields: dict[str, Any], is_known: bool
) -> None:
    front = start_front()
    prompt = {} if "messages" in fields else {"prompt": "Tell me"}
    answer = front.post({"model": MODEL, "max_tokens": 5, **prompt, **fields})
    if is_known:
        assert answer.status_code == 200
        assert {name: front.pair.decode_legs[0].body[name] for name in fields} == fields
    else:  # the servers' own words
        assert answer.json()["error"]["message"].startswith("unexpected fields")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "n": 5000}, "n"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "a"}, "messages"),
        ({"prompt": ""}, "prompt"),
    ],
)
def test_field_when_the_proxy_needs_it_itself_then_is_checked(
    start_front: StartFront, body: dict[str, Any], param: str
) -> None:
    refused = start_front().post(body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
