"""Which peers a node reads from, by what they say of their layout: one field changed at a time."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from common.errors import ConfigError, LayoutMismatchError
from common.geometry.geometry import model_geometry
from common.kv_cache.layout import make_layout
from common.kv_cache.layout_document import NodeLayout
from common.kv_cache.shards import shard_geometry
from common.kv_cache.spec import ModelGeometry

BLOCK_SIZE = 16
CONFIG: dict[str, Any] = {
    "model_type": "granitemoehybrid", "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4,
    "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4,
    "mamba_expand": 2, "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"],
}  # fmt: skip


def geometry(**changes: Any) -> ModelGeometry:
    return model_geometry({**CONFIG, **changes}, "bfloat16")


def over_the_wire(layout: NodeLayout) -> dict[str, Any]:
    return dict(json.loads(json.dumps(layout.document)))


def leaves(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path
        return
    for name, each in items:
        yield from leaves(each, (*path, name))


def name_of(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def change(document: Any, path: tuple[str | int, ...], to: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    """(the document with another value there, the value before, the value now)"""
    changed = parent = copy.deepcopy(document)
    for part in path[:-1]:
        parent = parent[part]
    before = parent[path[-1]]
    parent[path[-1]] = to(before)
    return changed, before, parent[path[-1]]


def other(value: Any) -> Any:
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else f"{value}_"


OWN = NodeLayout(geometry(), BLOCK_SIZE)


@pytest.mark.parametrize("path", list(leaves(OWN.document)), ids=name_of)
def test_check_when_one_field_differs_then_refused_with_the_field_and_both_values(path: tuple[str | int, ...]) -> None:
    """A peer of TP 2, which is read by what every field says; of an undivided one the parts say nothing."""
    document = over_the_wire(NodeLayout(geometry(), BLOCK_SIZE, 2))
    assert OWN.check(document)
    if path == ("tensor_parallel_size",):
        return
    for to, shown in ((other, repr), (lambda _: None, repr), (lambda value: [value], lambda _: "a list of 1")):
        changed, before, now = change(document, path, to)
        with pytest.raises(LayoutMismatchError) as caught:
            OWN.check(changed)
        assert caught.value.code == "layout_mismatch"
        assert f"{name_of(path)} is {shown(now)}, this node's is {before!r}" in caught.value.message
    undivided, before, now = change(over_the_wire(OWN), path, other)
    if "parts" in path:
        assert OWN.check(undivided) == OWN.check(None)
    else:
        with pytest.raises(LayoutMismatchError):
            OWN.check(undivided)


NAMED: list[tuple[str, NodeLayout, str]] = [
    ("block size", NodeLayout(geometry(), 32), "block_size is 32, this node's is 16"),
    ("dtype", NodeLayout(model_geometry(CONFIG, "float32"), 16), "attention[0].dtype is 'float32', this node's is 'bf"),
    ("K/V heads", NodeLayout(geometry(num_key_value_heads=2), 16), "attention[0].num_kv_heads is 2, this node's is 4"),
    ("kernel width", NodeLayout(geometry(mamba_d_conv=5), 16), "state[0].shape[1] is 4, this node's is 3"),
    ("layer order", NodeLayout(geometry(layer_types=["attention", "mamba", "mamba"]), 16), "attention[0].layer is 0"),
    (
        "a layer less",
        NodeLayout(geometry(layer_types=["mamba", "attention"], num_hidden_layers=2), 16),
        "is None, this",
    ),
    ("groups", NodeLayout(geometry(mamba_n_groups=2), 16), "state[0].shape[0] is 3584, this node's is 3328"),
]


@pytest.mark.parametrize(("layout", "named"), [each[1:] for each in NAMED], ids=[each[0] for each in NAMED])
def test_check_when_the_peers_model_or_flags_differ_then_says_what(layout: NodeLayout, named: str) -> None:
    with pytest.raises(LayoutMismatchError) as caught:
        OWN.check(over_the_wire(layout))
    assert named in caught.value.message


@pytest.mark.parametrize("field", ["layout_version", "block_size", "attention", "state"])
def test_check_when_a_field_is_missing_or_unknown_then_refused_by_name(field: str) -> None:
    document = over_the_wire(OWN)
    del document[field]
    with pytest.raises(LayoutMismatchError, match=f"layout field {field} is None"):
        OWN.check(document)
    with pytest.raises(LayoutMismatchError, match="layout field scales is 'e8m0', this node's is None"):
        OWN.check({**over_the_wire(OWN), "scales": "e8m0"})


@pytest.mark.parametrize("size", [0, -2, 1025, "2", 2.0, True, None, [2]])
def test_check_when_the_tensor_parallel_size_is_none_then_refused_with_the_bounds(size: Any) -> None:
    with pytest.raises(LayoutMismatchError, match=r"tensor_parallel_size is .*, this node's is 1: .* in \[1, 1024\]"):
        OWN.check({**over_the_wire(OWN), "tensor_parallel_size": size})


def test_check_when_the_two_sizes_cannot_be_mapped_then_refused_with_tensor_and_heads() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size 5: attention of layer 1: 4 heads of 'kv_heads'"):
        NodeLayout(geometry(), BLOCK_SIZE, 5)
    with pytest.raises(LayoutMismatchError, match=r"tensor_parallel_size is 5, this node's is 1: .* 4 heads of 'kv_h"):
        OWN.check({**over_the_wire(OWN), "tensor_parallel_size": 5})


@pytest.mark.parametrize("own", [1, 2, 4])
@pytest.mark.parametrize("theirs", [1, 2, 4, 8])
def test_check_when_sizes_can_be_mapped_then_says_how_large_a_ranks_units_are(own: int, theirs: int) -> None:
    found = NodeLayout(geometry(), BLOCK_SIZE, own).check(over_the_wire(NodeLayout(geometry(), BLOCK_SIZE, theirs)))
    rank = make_layout(shard_geometry(geometry(), theirs), BLOCK_SIZE)
    assert found == {"blocks": rank.group_block_bytes[0], "slots": rank.slot_bytes}
    # B and C of the one group are held by each rank.
    assert (found["slots"] * theirs > OWN.check(None)["slots"]) == (theirs > 1)


def test_check_when_a_peer_says_nothing_then_it_is_one_of_before_and_undivided() -> None:
    assert NodeLayout(geometry(), BLOCK_SIZE, 4).check(None) == OWN.check(over_the_wire(OWN))


def test_check_when_the_peer_answers_nonsense_then_refused_and_the_message_stays_short() -> None:
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    for nonsense in ({}, {**OWN.document, "attention": deep}, {"x" * 9000: "y" * 9000, **OWN.document}):
        with pytest.raises(LayoutMismatchError) as caught:
            OWN.check(nonsense)
        assert len(caught.value.message) < 1000


def test_document_when_a_state_declares_no_parts_then_it_is_read_undivided_only() -> None:
    whole = geometry()
    layers = tuple(
        replace(layer, tensors=tuple(replace(tensor, parts=()) for tensor in layer.tensors))
        for layer in whole.state_layers
    )
    before = over_the_wire(NodeLayout(replace(whole, state_layers=layers), BLOCK_SIZE))
    assert OWN.check(before) == OWN.check(None)
    with pytest.raises(LayoutMismatchError, match="parts"):
        NodeLayout(whole, BLOCK_SIZE, 2).check(before)
