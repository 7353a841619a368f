"""The handoff as other projects' proxies drive it: two legs over plain HTTP, one opaque object in between."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support import foreign
from tests.support.client import Answer, complete, completion_body, metric, payload_bytes, wait_settled
from tests.support.http_server import wait_for
from tests.support.reference import Reference, random_tokens
from tests.support.service import Service

# What clients send and foreign proxies leave in the prefill leg.
LEFT_IN: dict[str, Any] = {"min_tokens": 5, "n": 1, "stream_options": None, "logprobs": 0}
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(autouse=True)
def nothing_leaks(service: Service) -> Iterator[None]:
    yield
    wait_settled(*service.prefill, *service.decode)


def legs(service: Service, body: dict[str, Any], route: str = "/v1/completions") -> dict[str, Any]:
    params = foreign.prefill(service.prefill[0].url, body, route)
    response = foreign.decode(service.decode[0].url, body, params, route)
    assert response.status_code == 200, response.text
    return dict(response.json())


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_prefill_leg_when_answered_then_has_one_empty_choice_and_the_field_names_of_vllm(service: Service) -> None:
    prompt = random_tokens(70, seed=331)
    body = completion_body(prompt, 20, **LEFT_IN) | {"n": 3, "min_tokens": 9, "stream_options": {"include_usage": True}}
    answer = foreign.send_prefill_leg(service.prefill[0].url, body)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (70, 0)
    params = answer["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert (params["remote_num_tokens"], params["tp_size"]) == (70, 1)
    assert [len(group) for group in params["remote_block_ids"]] == [5]
    assert params["prompt_token_ids"] == prompt
    assert f"http://{params['remote_host']}:{params['remote_port']}" == service.prefill[0].url
    assert params["remote_request_id"]
    assert params["remote_engine_id"].startswith("prefill-")
    foreign.release(service.prefill[0].url, params)


def test_legs_of_a_foreign_proxy_when_driven_then_output_is_that_of_our_proxy_and_of_transformers(
    service: Service, reference: Reference
) -> None:
    prompt = random_tokens(150, seed=332)
    body = completion_body(prompt, 24, **LEFT_IN, cache_salt="foreign")
    answer = Answer(legs(service, body))
    ours = complete(service.url, prompt, 24, **LEFT_IN, cache_salt="ours")
    assert answer.token_ids() == ours.token_ids()
    assert answer.body["choices"][0]["text"] == ours.body["choices"][0]["text"]
    assert reference.greedy(prompt, 24).mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance) is None
    assert answer.trace["placement"] == "remote"
    assert answer.trace["transferred_bytes"] == payload_bytes(service.decode[0], 10, 1)
    assert answer.trace["prefill_cached_tokens"] == answer.trace["decode_cached_tokens"] == 0
    assert answer.body["usage"] == ours.body["usage"]


def test_legs_with_keys_of_the_proxys_own_when_driven_then_are_served_the_same(service: Service) -> None:
    prompt = random_tokens(50, seed=333)
    body = completion_body(prompt, 8)
    params = foreign.prefill(service.prefill[0].url, body)
    untouched = copy.deepcopy(params)
    extended = {**params, "proxy_request_uid": "a-1", "dp_rank": 0, "nested": {"a": [1, None]}, "tandem_x": "later"}
    response = foreign.decode(service.decode[0].url, body, extended)
    assert response.status_code == 200, response.text
    assert params == untouched
    assert Answer(response.json()).token_ids() == complete(service.url, prompt, 8, cache_salt="x").token_ids()


def test_chat_over_the_two_legs_when_streamed_then_text_is_that_of_our_proxy(service: Service) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is an event loop?"}]
    body = {"messages": messages, "max_tokens": 20, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "max_completion_tokens": 20, "min_tokens": 5}
    route = "/v1/chat/completions"
    params = foreign.prefill(service.prefill[0].url, {**body, "cache_salt": "foreign"}, route)
    foreign_chunks = events(foreign.decode(service.decode[0].url, {**body, "cache_salt": "foreign"}, params, route))
    our_chunks = events(httpx.post(service.url + route, json=body, timeout=60))

    def text(chunks: list[dict[str, Any]]) -> str:
        return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])

    assert text(foreign_chunks) == text(our_chunks) != ""
    assert foreign_chunks[-1]["usage"] == our_chunks[-1]["usage"]
    assert foreign_chunks[-1]["usage"]["completion_tokens"] == 20


def test_n_over_the_two_legs_when_seeded_then_choices_are_those_of_our_proxy(service: Service) -> None:
    prompt = random_tokens(45, seed=334)
    body = completion_body(prompt, 12, n=3, temperature=1.0, seed=11)
    foreign_choices = legs(service, body)["choices"]
    our_choices = complete(service.url, prompt, 12, n=3, temperature=1.0, seed=11, cache_salt="ours").choices
    assert [c["token_ids"] for c in foreign_choices] == [c["token_ids"] for c in our_choices]
    assert len({tuple(c["token_ids"]) for c in foreign_choices}) == 3


def test_list_of_prompts_when_handed_over_then_takes_one_entry_per_prompt(service: Service) -> None:
    prompts = [random_tokens(30, seed=335), random_tokens(17, seed=336)]
    prefill, decode = service.prefill[0].url, service.decode[0].url
    params = [foreign.prefill(prefill, completion_body(prompt, 6)) for prompt in prompts]
    answer = foreign.decode(decode, completion_body(prompts, 6), params)
    assert answer.status_code == 200, answer.text
    alone = [complete(service.url, prompt, 6, cache_salt="alone").token_ids() for prompt in prompts]
    assert [Answer(answer.json()).token_ids(index) for index in range(2)] == alone
    one = foreign.decode(decode, completion_body(prompts, 6), params[:1])
    assert (one.status_code, one.json()["error"]["param"]) == (400, "kv_transfer_params")
    whole = {**completion_body(prompts, 6), "kv_transfer_params": dict(foreign.PREFILL_PARAMS)}
    refused = httpx.post(prefill + "/v1/completions", json=whole)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


def test_leg_when_sent_to_a_node_of_the_other_role_then_is_400(service: Service) -> None:
    body = completion_body(random_tokens(20, seed=337), 4)
    params = foreign.prefill(service.prefill[0].url, body)
    to_prefill = foreign.decode(service.prefill[0].url, body, params)
    to_decode = httpx.post(
        service.decode[0].url + "/v1/completions", json={**body, "kv_transfer_params": dict(foreign.PREFILL_PARAMS)}
    )
    for response, key in ((to_prefill, "do_remote_prefill"), (to_decode, "do_remote_decode")):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == f"kv_transfer_params.{key}"
    foreign.release(service.prefill[0].url, params)


def test_kv_transfer_params_when_sent_to_our_proxy_then_are_not_believed(service: Service) -> None:
    prompt = random_tokens(40, seed=338)
    expected = complete(service.url, prompt, 8).token_ids()
    other = completion_body(random_tokens(40, seed=339), 8)
    params = foreign.prefill(service.prefill[0].url, other)
    answer = complete(service.url, prompt, 8, kv_transfer_params=params)
    assert answer.token_ids() == expected
    foreign.release(service.prefill[0].url, params)


def replace(key: str, value: Any) -> Edit:
    return lambda params: params.__setitem__(key, value)


def drop(key: str) -> Edit:
    return lambda params: params.pop(key)


REQUIRED_KEYS = [
    "remote_engine_id",
    "remote_request_id",
    "remote_block_ids",
    "remote_host",
    "remote_port",
    "remote_num_tokens",
    "prompt_token_ids",
    "tandem_block_size",
    "tandem_epoch",
    "tandem_fingerprint",
    "tandem_generations",
    "tandem_lease_id",
    "tandem_lease_seconds",
    "tandem_prefix_key",
    "tandem_slot_id",
    "tandem_slot_generation",
    "tandem_output_row",
    "tandem_proof",
]
MALFORMED: list[tuple[str, str, Edit]] = [
    *((f"{key} missing", key, drop(key)) for key in REQUIRED_KEYS),
    *((f"{key} is an object", key, replace(key, {"a": 1})) for key in REQUIRED_KEYS),
    ("one block id less", "remote_block_ids", lambda p: p["remote_block_ids"][0].pop()),
    ("one block id more", "remote_block_ids", lambda p: p["remote_block_ids"][0].append(9)),
    ("another group", "remote_block_ids", lambda p: p["remote_block_ids"].append([1, 2, 3])),
    ("negative block id", "remote_block_ids", lambda p: p["remote_block_ids"][0].__setitem__(0, -1)),
    ("one generation less", "tandem_generations", lambda p: p["tandem_generations"][0].pop()),
    ("generation beyond u64", "tandem_generations", lambda p: p["tandem_generations"][0].__setitem__(0, str(2**64))),
    ("more tokens than ids", "prompt_token_ids", replace("remote_num_tokens", 41)),
    ("token id beyond vocabulary", "prompt_token_ids", lambda p: p["prompt_token_ids"].__setitem__(0, 512)),
    ("zero tokens", "remote_num_tokens", replace("remote_num_tokens", 0)),
    ("huge number of tokens", "remote_num_tokens", replace("remote_num_tokens", 2**40)),
    ("no state", "tandem_slot_id", replace("tandem_slot_id", 0)),
    ("epoch as a word", "tandem_epoch", replace("tandem_epoch", "soon")),
    ("fingerprint of another model", "tandem_fingerprint", replace("tandem_fingerprint", "ab" * 16)),
    ("another block size", "tandem_block_size", replace("tandem_block_size", 14)),
    ("row of odd length", "tandem_output_row", replace("tandem_output_row", "AAAA")),
    ("row of another width", "tandem_output_row", replace("tandem_output_row", "AAAAAAAAAAAAAAAA")),
    ("row not base64", "tandem_output_row", replace("tandem_output_row", "!!!")),
    ("row of unknown dtype", "tandem_output_row_dtype", replace("tandem_output_row_dtype", "int8")),
    ("foreign host", "remote_host", replace("remote_host", "10.1.2.3")),
    ("host of a cloud's metadata", "remote_host", replace("remote_host", "169.254.169.254")),
    ("host by name", "remote_host", replace("remote_host", "example.com")),
    ("host with a path", "remote_host", replace("remote_host", "127.0.0.1/a?b=")),
    ("host with credentials", "remote_host", replace("remote_host", "127.0.0.1@10.1.2.3")),
    ("port zero", "remote_port", replace("remote_port", 0)),
    ("both directions", "do_remote_prefill", replace("do_remote_decode", True)),
    ("not final", "final", replace("final", False)),
    ("tokens other than those of the key", "tandem_prefix_key", lambda p: p["prompt_token_ids"].__setitem__(3, 7)),
]


@pytest.fixture(scope="module")
def manifest(service: Service) -> dict[str, Any]:
    """A good manifest of 40 tokens; its lease is over, what it names is still cached."""
    params = foreign.prefill(service.prefill[0].url, completion_body(random_tokens(40, seed=340), 4))
    foreign.release(service.prefill[0].url, params)
    return params


def _one_of_each_key() -> list[Any]:
    """All of ``MALFORMED``; those whose key an earlier one has only in the whole matrix."""
    seen: set[str] = set()
    cases = []
    for name, key, edit in MALFORMED:
        cases.append(pytest.param(key, edit, id=name, marks=pytest.mark.full if key in seen else ()))
        seen.add(key)
    return cases


@pytest.mark.parametrize(("key", "edit"), _one_of_each_key())
def test_malformed_manifest_when_sent_then_is_400_and_names_the_key(
    service: Service, manifest: dict[str, Any], key: str, edit: Edit
) -> None:
    params = copy.deepcopy(manifest)
    edit(params)
    computed = metric(service.decode[0], "prompt_tokens_total")
    for stream in (False, True):
        body = completion_body(random_tokens(40, seed=340), 4, stream=stream)
        response = foreign.decode(service.decode[0].url, body, params)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == f"kv_transfer_params.{key}", error
        assert key in error["message"]
    assert metric(service.decode[0], "prompt_tokens_total") == computed


@pytest.mark.parametrize("value", ["a", 5, [], [5], [{"do_remote_prefill": True}, {"do_remote_decode": True}]])
def test_kv_transfer_params_of_wrong_type_when_sent_then_is_400(service: Service, value: Any) -> None:
    response = foreign.decode(service.decode[0].url, completion_body([6, 7], 1), value)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "kv_transfer_params"


def test_manifest_when_sent_with_another_cache_salt_then_is_400(service: Service) -> None:
    body = completion_body(random_tokens(40, seed=341), 4, cache_salt="tenant-a")
    params = foreign.prefill(service.prefill[0].url, body)
    response = foreign.decode(service.decode[0].url, {**body, "cache_salt": "tenant-b"}, params)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "kv_transfer_params.tandem_prefix_key")
    foreign.release(service.prefill[0].url, params)


@pytest.mark.parametrize(
    ("key", "edit"),
    [
        ("remote_block_ids", lambda p: p["remote_block_ids"][0].__setitem__(1, 2**30)),
        ("remote_block_ids", lambda p: p["remote_block_ids"][0].__setitem__(1, 0)),
        ("remote_block_ids", lambda p: p["remote_block_ids"][0].reverse()),
        ("tandem_slot_id", replace("tandem_slot_id", 2**30)),
        ("tandem_epoch", replace("tandem_epoch", "7")),
        ("tandem_slot_generation", replace("tandem_slot_generation", "12345678901")),
        ("remote_engine_id", replace("remote_engine_id", "prefill-elsewhere")),
        ("remote_port", replace("remote_port", 1)),
        ("tandem_lease_id", replace("tandem_lease_id", "unknown-lease")),
    ],
    ids=lambda value: value if isinstance(value, str) else "edited",
)
def test_manifest_that_only_its_holder_can_refute_when_sent_then_output_is_right_all_the_same(
    service: Service, reference: Reference, key: str, edit: Edit
) -> None:
    """Wrong ids, generations, epochs and addresses are found when the memory is read, or when the holder is asked
    whether it made this: the prompt is computed anew."""
    prompt = random_tokens(40, seed=342)
    body = completion_body(prompt, 8, cache_salt=f"refuted-{key}-{metric(service.decode[0], 'prompt_tokens_total')}")
    params = foreign.prefill(service.prefill[0].url, body)
    edited = copy.deepcopy(params)
    edit(edited)
    assert edited[key] != params[key]
    response = foreign.decode(service.decode[0].url, body, edited)
    assert response.status_code == 200, response.text
    answer = Answer(response.json())
    assert reference.greedy(prompt, 8).mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance) is None
    foreign.release(service.prefill[0].url, params)


def test_output_row_when_a_caller_has_changed_it_then_is_neither_used_nor_kept(
    service: Service, reference: Reference
) -> None:
    """Nothing in the memory that is read proves the row; the first token of every later repeat would come from it."""
    prompts = [random_tokens(80, seed=seed) for seed in (351, 352)]
    expected = [reference.greedy(prompt, 8) for prompt in prompts]
    assert expected[0].token_ids[0] != expected[1].token_ids[0]
    bodies = [completion_body(prompt, 8) for prompt in prompts]
    good = [foreign.prefill(service.prefill[0].url, body) for body in bodies]
    forged = {**good[0], "tandem_output_row": good[1]["tandem_output_row"]}
    before = metric(service.decode[0], "transfer_failures_total", reason="unproven")
    for params in (forged, None):
        answer = Answer(foreign.decode(service.decode[0].url, bodies[0], params).json())
        mismatch = expected[0].mismatch(answer.token_ids(), answer.logprobs(), reference.tolerance)
        assert mismatch is None, mismatch
    assert answer.trace["decode_cached_tokens"] == len(prompts[0])  # an exact repeat, from the row that was kept
    assert metric(service.decode[0], "transfer_failures_total", reason="unproven") == before + 1
    for params in good:
        foreign.release(service.prefill[0].url, params)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"echo": True}, 200),  # its log-probabilities are those of a prompt that is computed here
        ({"prompt_logprobs": 1}, 200),
        ({"allowed_token_ids": [1_000_000]}, 400),
        ({"guided_regex": "a(b"}, 400),
        ({"cache_salt": "another"}, 400),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_handoff_when_it_is_not_used_then_its_lease_is_released(
    service: Service, fields: dict[str, Any], status: int
) -> None:
    body = completion_body(random_tokens(40, seed=343), 4)
    params = foreign.prefill(service.prefill[0].url, body)
    assert foreign.renew(service.prefill[0].url, params)
    response = foreign.decode(service.decode[0].url, {**body, **fields}, params)
    assert response.status_code == status, response.text
    # Renewed each time: it does not end by itself.
    wait_for(lambda: not foreign.renew(service.prefill[0].url, params), "the lease's release")
