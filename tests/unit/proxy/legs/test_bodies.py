"""The legs' JSON: equal to encoding each by itself, with what they share encoded once."""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from common.images.source import ImageSource
from common.images.span import ImageSpan
from common.openai.prompt_ids import PromptIds, read_prompt_ids, read_prompt_images
from proxy.legs import bodies as leg_bodies
from proxy.legs.bodies import BodyEncoder, decode_body, prefill_body

PROMPT = list(range(300))
LEGS: tuple[dict[str, Any], ...] = (
    {"model": "m", "prompt": PROMPT, "stream": True, "stop": ["a", 'b"'], "cache_salt": "ü" * 80},
    {"model": "m", "prompt": PROMPT, "stream": False, "max_tokens": 1, "kv_transfer_params": {"id": None, "n": [1]}},
    {"prompt": PROMPT},
    {"temperature": 0.5, 'a"b': [], "": {}},
    {"temperature": 1},
    {"prompt": [2**64, -(2**70)], "logit_bias": {"1": None}, "metadata": {"a": [float("inf"), 2**80]}, "seed": 2**64},
    {"prompt": ["\ud800" * 80, "\u2028", "\x7f"], "metadata": [1e16, 5e-324, 0.1, -0.0, True]},
    {},
)


def test_bodies_when_encoded_then_are_json_of_the_same_values() -> None:
    encoder = BodyEncoder()
    for leg in LEGS:
        assert json.loads(encoder.encode(leg)) == leg


def test_token_ids_when_they_are_packed_then_are_lists_in_json() -> None:
    ids = array("I", [1, 2**31 - 1])
    for value in (ids, [ids, "text", ids], {"token_ids": ids, "big": 2**64}):
        plain = json.loads(json.dumps(value, default=lambda each: each.tolist()))
        assert json.loads(BodyEncoder().encode({"prompt": value, "n": 1})) == {"prompt": plain, "n": 1}


def test_prompt_when_several_legs_have_it_then_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[object] = []

    def encode(value: object) -> bytes:
        encoded.append(value)
        return json.dumps(value).encode()

    monkeypatch.setattr(leg_bodies, "encode", encode)
    encoder = BodyEncoder()
    bodies = [encoder.encode({"prompt": PROMPT, "stream": stream}) for stream in (True, False, True)]
    assert sum(value is PROMPT for value in encoded) == 1
    assert [json.loads(body)["stream"] for body in bodies] == [True, False, True]


def test_images_when_legs_are_made_then_those_of_prefill_nodes_alone_have_them() -> None:
    source = ImageSource("messages[0].content[0].image_url.url", "data:image/png;base64,aaaa")
    prompt = PromptIds([1, 7, 7, 2], (), (ImageSpan(1, 1, 2, bytes(32)),))
    body = prompt.put_into({"messages": [{"role": "user", "content": []}], "n": 2}, [source])
    node: Any = SimpleNamespace(is_vllm=False)
    prefill = json.loads(prefill_body(node, body, None, encoder=BodyEncoder(), rendezvous_id="r"))
    decode = json.loads(decode_body(body, {"do_remote_prefill": True}, encoder=BodyEncoder()))
    given = {**body, "kv_transfer_params": {}}
    guest = json.loads(decode_body(given, None, encoder=BodyEncoder(), computes_images=True))
    assert read_prompt_images(prefill) == read_prompt_images(guest) == (source,)
    assert "kv_transfer_params" not in guest
    assert "aaaa" not in json.dumps(decode)
    for leg in (prefill, decode, guest):
        found = read_prompt_ids(leg)
        assert found is not None
        assert found.images == prompt.images


def test_values_when_they_come_and_go_then_none_is_taken_for_another() -> None:
    encoder = BodyEncoder()
    for number in range(200):
        assert json.loads(encoder.encode({"prompt": [number], "sources": [{"n": number}]})) == {
            "prompt": [number],
            "sources": [{"n": number}],
        }
