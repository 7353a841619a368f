"""A prefill node that lays its pools out otherwise: refused before any read, by name, and nothing stays held."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from common.errors import RequestAbortedError, TransferError
from common.kv_cache.layout_document import NodeLayout
from common.kv_cache.spec import ModelGeometry
from tests.support.pair import Pair
from tests.support.reference import random_tokens

PROMPT_LENGTH = 45  # two full blocks and a tail


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[str, Pair]]:
    made = {policy: Pair("granitemoehybrid", kv_load_failure_policy=policy) for policy in ("recompute", "fail")}
    yield made
    for pair in made.values():
        pair.close()


def of_attention(geometry: ModelGeometry, **changes: Any) -> ModelGeometry:
    first, *others = geometry.attention_layers
    return replace(geometry, attention_layers=(replace(first, **changes), *others))


def of_state(geometry: ModelGeometry, tensor_changes: dict[str, Any], **changes: Any) -> ModelGeometry:
    first, *others = geometry.state_layers
    tensor, *rest = first.tensors
    tensors = (replace(tensor, parts=(), **tensor_changes), *rest)
    return replace(geometry, state_layers=(replace(first, tensors=tensors, **changes), *others))


def changed(field: str, geometry: ModelGeometry) -> NodeLayout:
    """The decode node's layout if it differed in this field alone."""
    attention, conv = geometry.attention_layers[0], geometry.state_layers[0].tensors[0]
    channels, width = conv.shape
    if field == "block_size":
        return NodeLayout(geometry, 32)
    made = {
        "attention[0].layer": of_attention(geometry, layer_idx=attention.layer_idx + 40),
        "attention[0].dtype": of_attention(geometry, dtype="bfloat16"),
        "attention[0].num_kv_heads": of_attention(geometry, num_kv_heads=attention.num_kv_heads * 2),
        "attention[0].head_size": of_attention(geometry, head_size=attention.head_size * 2),
        "attention[0].head_size_v": of_attention(geometry, head_size_v=attention.head_size_v * 2),
        "state[0].mixer": of_state(geometry, {}, mixer="mamba1"),
        "state[0].dtype": of_state(geometry, {"dtype": "bfloat16"}),
        "state[0].shape[0]": of_state(geometry, {"shape": (channels + 16, width)}),
        "state[0].shape[1]": of_state(geometry, {"shape": (channels, width + 1)}),
    }
    return NodeLayout(made[field], 16)


FIELDS = (
    "block_size",
    *(f"attention[0].{name}" for name in ("layer", "dtype", "num_kv_heads", "head_size", "head_size_v")),
    *(f"state[0].{name}" for name in ("mixer", "dtype", "shape[0]", "shape[1]")),
)


def num_refused(pair: Pair) -> int:
    found = re.search(
        rb'transfer_failures_total\{[^}]*reason="layout_mismatch"[^}]*\} ([0-9]+)', pair.metrics.render()[0]
    )
    return int(found[1]) if found else 0


@pytest.mark.parametrize("at_once", [False, True], ids=["manifest", "rendezvous"])
@pytest.mark.parametrize("field", FIELDS)
def test_handoff_when_one_field_of_the_layout_differs_then_refused_by_name_before_a_read_and_nothing_is_held(
    pairs: dict[str, Pair],
    field: str,
    at_once: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt, name = random_tokens(PROMPT_LENGTH, seed=7), re.sub(r"\W", "-", f"{field}-{at_once}")
    for policy, pair in pairs.items():
        backend, num_before, post_read = pair.decode.backend, num_refused(pair), Mock()
        monkeypatch.setattr(backend, "layout", changed(field, pair.decode.model.cache_config.geometry))
        monkeypatch.setattr(backend, "post_read", post_read)
        caplog.clear()
        if policy == "fail":
            with pytest.raises(TransferError, match="the prompt could not be had from its prefill node") as caught:
                pair.lose(name, prompt, at_once=at_once)
            assert f"layout field {field} is " in caught.value.message
        else:
            result = pair.lose(name, prompt, at_once=at_once)
            assert (result.is_lost, result.prefix) == (True, None)
        if at_once:  # the leg that comes now computes for nobody
            with pytest.raises(RequestAbortedError):
                pair.hand_out_late(name, prompt)
        assert re.search(rf"layout field {re.escape(field)} is .*, this node's is ", caplog.text)
        assert num_refused(pair) == num_before + 1
        assert not post_read.called
        assert pair.prefill.held() == pair.decode.held() == (0, 0, 0)


def test_control_when_the_layouts_are_alike_then_the_prefix_is_pulled(pairs: dict[str, Pair]) -> None:
    for pair in pairs.values():
        num_before = num_refused(pair)
        assert pair.ask({"alike": random_tokens(PROMPT_LENGTH, seed=8)}, 2)["alike"].pull.num_blocks > 0
        assert num_refused(pair) == num_before
