"""What each leg of a request carries, and what comes back to the client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.openai.bodies.unsupported import INTERNAL_FIELDS
from common.wire.handoff import prefill_leg_params
from tests.unit.proxy.conftest import Cluster, StartCluster
from tests.unit.proxy.fake_node import NUM_CHUNKS

DONE = "data: [DONE]"


def test_completion_when_prompt_is_single_then_both_legs_carry_the_handoff(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    body = {"prompt": "abc", "max_tokens": 7, "min_tokens": 3, "n": 2, "temperature": 0.5, "seed": 1, "user": "me"}
    answer = cluster.client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["node"] == "decode-0"
    assert cluster.prefill[0].bodies == [
        {
            "prompt": "abc",
            "temperature": 0.5,
            "seed": 1,
            "user": "me",
            "stream": False,
            "max_tokens": 1,
            "kv_transfer_params": prefill_leg_params(),
        }
    ]
    params = {"do_remote_prefill": True, "remote_host": "prefill-0", "tandem_lease_id": "prefill-0-lease-0"}
    assert cluster.decode[0].bodies == [{**body, "kv_transfer_params": params}]
    assert cluster.prefill[0].released == []
    assert cluster.metric("tandem_proxy_decisions_total", policy="round_robin", placement="remote") == 1
    assert cluster.metric("tandem_requests_total", route="completions", outcome="stop") == 1


def test_completion_when_prompts_are_a_list_then_one_prefill_each_and_one_decode(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    prompts = [[1, 2, 3], [4, 5], [6]]
    assert cluster.client.post("/v1/completions", json={"prompt": prompts}).status_code == 200
    assert sorted(body["prompt"] for body in cluster.prefill[0].bodies) == sorted(prompts)
    (decode_body,) = cluster.decode[0].bodies
    assert decode_body["prompt"] == prompts
    leases = [params["tandem_lease_id"] for params in decode_body["kv_transfer_params"]]
    by_prompt = {tuple(body["prompt"]): f"prefill-0-lease-{i}" for i, body in enumerate(cluster.prefill[0].bodies)}
    assert leases == [by_prompt[tuple(prompt)] for prompt in prompts]


def test_completion_when_list_has_one_prompt_then_params_are_one_object(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    cluster.client.post("/v1/completions", json={"prompt": ["abc"]})
    assert cluster.prefill[0].bodies[0]["prompt"] == "abc"
    assert isinstance(cluster.decode[0].bodies[0]["kv_transfer_params"], dict)


def test_completion_when_prompt_is_token_ids_then_it_is_one_prompt(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    cluster.client.post("/v1/completions", json={"prompt": [1, 2, 3]})
    assert [body["prompt"] for body in cluster.prefill[0].bodies] == [[1, 2, 3]]


@pytest.mark.parametrize("pull", [False, True])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "num_kept"), [({"max_tokens": 20}, 108), ({"max_completion_tokens": 28}, 100), ({}, 127)]
)
def test_prompt_when_it_is_cut_to_what_the_context_holds_then_both_legs_say_how_much_that_is(
    start_cluster: StartCluster, fields: dict[str, int], num_kept: int, route: str, *, pull: bool
) -> None:
    """Only the decode leg knows how long the answer may be; the nodes' context has 128 tokens."""
    cluster = start_cluster(pull=pull)
    prompt = {"prompt": "abc"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "abc"}]}
    body = {**prompt, **fields, "truncate_prompt_tokens": -1}
    assert cluster.client.post(route, json=body).status_code == 200
    legs = [*cluster.prefill[0].bodies, *cluster.decode[0].bodies]
    assert [leg["truncate_prompt_tokens"] for leg in legs] == [num_kept] * 2


def test_completion_when_echo_with_logprobs_then_no_prefill_leg(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
    assert cluster.client.post("/v1/completions", json=body).status_code == 200
    assert cluster.prefill[0].bodies == []
    assert cluster.decode[0].bodies == [body]
    assert cluster.metric("tandem_proxy_decisions_total", policy="round_robin", placement="local") == 1


def test_completion_when_client_sends_transfer_params_then_they_are_dropped(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    forged = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 80}
    cluster.client.post("/v1/completions", json={"prompt": "abc", "kv_transfer_params": forged})
    assert cluster.decode[0].bodies[0]["kv_transfer_params"]["remote_host"] == "prefill-0"


@pytest.mark.parametrize(
    ("route", "body", "num_legs"),
    [
        ("/v1/completions", {"prompt": "abc"}, 2),
        ("/v1/completions", {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}, 1),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}, 2),
    ],
    ids=["completion", "completion of one leg", "chat"],
)
def test_internal_fields_when_a_client_sends_them_then_no_node_gets_its_values(
    start_cluster: StartCluster, route: str, body: dict[str, Any], num_legs: int
) -> None:
    cluster = start_cluster()
    forged = {name: {"forged": name} for name in INTERNAL_FIELDS}
    assert cluster.client.post(route, json={**body, **forged}).status_code == 200
    legs = [*cluster.prefill[0].bodies, *cluster.decode[0].bodies]
    assert len(legs) == num_legs
    assert [name for leg in legs for name, value in forged.items() if leg.get(name) == value] == []


def test_chat_when_streamed_then_bytes_pass_through_to_done(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    body = {"messages": [{"role": "user", "content": "hé"}], "stream": True, "stream_options": {"include_usage": True}}
    with cluster.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert len(lines) == NUM_CHUNKS + 1
    assert lines[-1] == DONE
    (prefill_body,) = cluster.prefill[0].bodies
    assert prefill_body["messages"] == body["messages"]
    assert "stream_options" not in prefill_body
    assert cluster.prefill[0].received[0].path == "/v1/chat/completions"
    assert cluster.decode[0].bodies[0]["stream_options"] == {"include_usage": True}


def test_headers_when_traced_then_both_legs_and_the_answer_have_them(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    headers = {"X-Request-Id": "abc-1", "Authorization": "Bearer k", "X-Tandem-Trace": "1"}
    answer = cluster.client.post("/v1/completions", json={"prompt": "abc"}, headers=headers)
    assert answer.headers["x-request-id"] == "abc-1"
    prefill, decode = cluster.prefill[0].received[0].headers, cluster.decode[0].received[0].headers
    for leg in (prefill, decode):
        assert (leg["x-request-id"], leg["authorization"], leg["x-tandem-trace"]) == ("abc-1", "Bearer k", "1")
    assert decode["x-tandem-prefill-node"] == "prefill-0"
    queue_s, elapsed_s, tokenize_s = map(float, decode["x-tandem-proxy-seconds"].split(","))
    assert 0 <= queue_s <= queue_s + tokenize_s <= elapsed_s + 1e-5
    assert tokenize_s >= 0


def test_headers_when_no_request_id_then_one_is_made(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    answer = cluster.client.post("/v1/completions", json={"prompt": "abc"})
    made = answer.headers["x-request-id"]
    assert made
    assert cluster.decode[0].received[0].headers["x-request-id"] == made


def test_nodes_when_several_then_round_robin_takes_turns(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2, 2)
    for _ in range(4):
        cluster.client.post("/v1/completions", json={"prompt": "abc"})
    assert [len(node.bodies) for node in [*cluster.prefill, *cluster.decode]] == [2, 2, 2, 2]


def test_small_routes_are_answered_by_a_node_or_the_proxy(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    assert cluster.client.get("/v1/models").json()["data"] == [{"id": "fake", "max_model_len": 128}]
    got = cluster.client.post("/tokenize", json={"prompt": "abc"}).json()
    assert got == {"node": "decode-0", "got": {"prompt": "abc"}, "count": 3}
    assert cluster.client.get("/health").status_code == 200
    assert set(cluster.client.get("/version").json()) == {"tandem", "torch", "transformers", "nixl"}
    missing = cluster.client.get("/v1/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "not_found"


def test_cluster_key_when_configured_then_nodes_get_it(start_cluster: StartCluster, tmp_path) -> None:  # type: ignore[no-untyped-def]
    key_file = tmp_path / "key"
    key_file.write_text("# the key\nsecret\n")
    cluster = start_cluster(cluster_key_file=str(key_file))
    cluster.client.post("/v1/completions", json={"prompt": "abc"})
    for node in (*cluster.prefill, *cluster.decode):
        assert node.received[0].headers["x-tandem-cluster-key"] == "secret"
    cluster.client.get("/v1/models").raise_for_status()
    assert cluster.decode[0].own_headers["x-tandem-cluster-key"] == "secret"


def test_api_key_when_it_comes_beside_another_authorization_then_the_one_that_is_known_goes_on(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("known\n")

    def passed_on(cluster: Cluster, **headers: str) -> str:
        cluster.client.post("/v1/completions", json={"prompt": "abc"}, headers=headers).raise_for_status()
        return cluster.decode[0].received[-1].headers["authorization"]

    cluster = start_cluster(0, 1, api_key_file=str(key_file))
    for headers in (
        {"X-Api-Key": "known"},
        {"X-Api-Key": "known", "Authorization": "Bearer other"},
        {"X-Api-Key": "known", "Authorization": "Basic b3RoZXI="},
        {"X-Api-Key": "other", "Authorization": "Bearer known"},
    ):
        assert passed_on(cluster, **headers) == "Bearer known"
    keyless = start_cluster(0, 1)
    assert passed_on(keyless, **{"X-Api-Key": "one", "Authorization": "Bearer other"}) == "Bearer other"
