"""Slices between ranks of different tensor-parallel sizes, against slicing numbered tensors by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from common.errors import ConfigError
from common.geometry.families import FAMILIES
from common.geometry.geometry import model_geometry
from common.geometry.parts import with_mtp
from common.kv_cache import shards
from common.kv_cache.layout import TensorPlace, make_layout
from common.kv_cache.shards import check_tensor_parallel, shard_geometry, slices, unit_slices
from common.kv_cache.spec import DTYPE_BYTES, ModelGeometry, ShardPart

SIZES = (1, 2, 4, 8)
BLOCK_SIZE = 4

# Sizes of published checkpoints, with a few layers of each kind.
MODELS: dict[str, dict[str, Any]] = {
    "granite-4.0-h-tiny": {
        "model_type": "granitemoehybrid", "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4,
        "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4,
        "mamba_expand": 2, "num_hidden_layers": 2, "layer_types": ["mamba", "attention"],
    },
    "nemotron-nano-9b-v2": {
        "model_type": "nemotron_h", "hidden_size": 4480, "num_attention_heads": 40, "num_key_value_heads": 8,
        "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 80, "n_groups": 8, "ssm_state_size": 128,
        "conv_kernel": 4, "num_hidden_layers": 3, "hybrid_override_pattern": "M-*",
    },
    "falcon-h1-1.5b": {
        "model_type": "falcon_h1", "hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1,
        "mamba_d_state": 256, "mamba_d_conv": 4, "num_hidden_layers": 1,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_hidden_layers": 4,
    },
    "jamba-mini-1.6": {
        "model_type": "jamba", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "num_hidden_layers": 2,
        "layers_block_type": ["mamba", "attention"],
    },
    "lfm2-1.2b": {
        "model_type": "lfm2", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 2, "full_attn_idxs": [1],
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "num_hidden_layers": 1,
    },
}  # fmt: skip

# Latents, which every rank holds whole, and query and key heads of which several ranks hold the same.
MLA = TensorPlace(0, (BLOCK_SIZE, 1, 24), "bfloat16", (ShardPart("kv_heads", 1, may_repeat=True),), 1)
ODD = (
    MLA,
    TensorPlace(
        0,
        (2 * 2 * 3 + 8 * 3, 3),
        "float32",
        (ShardPart("q", 2, 3, True), ShardPart("k", 2, 3, True), ShardPart("v", 8, 3)),
    ),
)


def geometry_of(name: str) -> ModelGeometry:
    geometry = model_geometry(MODELS[name], "bfloat16")
    return with_mtp(geometry) if FAMILIES[geometry.model_type].has_mtp else geometry


def narrowed(tensor: TensorPlace) -> TensorPlace:
    """With short axes behind the sharded one, which are moved whole anyway."""
    kept, rest = tensor.shape[: tensor.shard_axis + 1], tensor.shape[tensor.shard_axis + 1 :]
    return replace(tensor, shape=(*kept, *(min(size, 3) for size in rest)))


def tensors_of(geometry: ModelGeometry) -> Iterator[TensorPlace]:
    layout = make_layout(geometry, BLOCK_SIZE)
    for pair in layout.attention.values():
        yield from pair
    for named in layout.state.values():
        yield from named.values()


def held_by_hand(part: ShardPart, rank: int, tp: int) -> list[int]:
    """Of all heads dealt out in order; of each head's copies, those of neighbouring ranks."""
    if tp <= part.num_heads:
        return [head for head in range(part.num_heads) if head * tp // part.num_heads == rank]
    num_copies = tp // part.num_heads
    return [head for head in range(part.num_heads) for copy in range(num_copies) if rank == head * num_copies + copy]


def cut_by_hand(full: NDArray[np.int64], tensor: TensorPlace, rank: int, tp: int) -> NDArray[np.int64]:
    rows: list[int] = []
    start = 0
    for part in tensor.parts:
        for head in held_by_hand(part, rank, tp):
            rows += range(start + head * part.head_rows, start + (head + 1) * part.head_rows)
        start += part.num_rows
    return np.take(full, rows, axis=tensor.shard_axis)


def moved(tensor: TensorPlace, rank: int, local_tp: int, remote_tp: int, of: Callable[..., Any] = slices) -> bool:
    """Whether the slices bring exactly the rank's own elements, each once."""
    full = np.arange(math.prod(tensor.shape)).reshape(tensor.shape)
    remote = [cut_by_hand(full, tensor, each, remote_tp).ravel() for each in range(remote_tp)]
    expected = cut_by_hand(full, tensor, rank, local_tp).ravel()
    found, times = np.full(expected.size, -1), np.zeros(expected.size, dtype=int)
    size = DTYPE_BYTES[tensor.dtype]
    for piece in of(tensor, rank, local_tp, remote_tp):
        assert piece.length % size == piece.local_offset % size == piece.remote_offset % size == 0
        there, here, count = piece.remote_offset // size, piece.local_offset // size, piece.length // size
        source = remote[piece.remote_rank][there : there + count]
        if source.size != count or here + count > found.size:
            return False
        found[here : here + count] = source
        times[here : here + count] += 1
    return bool((found == expected).all() and (times == 1).all())


def can_be_cut(tensor: TensorPlace, tp: int) -> bool:
    return all(part.num_heads % tp == 0 or (part.may_repeat and tp % part.num_heads == 0) for part in tensor.parts)


PAIRS = [(local, remote) for local in SIZES for remote in SIZES]


@pytest.mark.parametrize("name", MODELS)
def test_slices_when_sizes_differ_then_each_rank_gets_its_own_bytes_once(name: str) -> None:
    num_seen = 0
    for tensor in {(each.shape, each.parts): narrowed(each) for each in tensors_of(geometry_of(name))}.values():
        for local_tp, remote_tp in PAIRS:
            if not (can_be_cut(tensor, local_tp) and can_be_cut(tensor, remote_tp)):
                with pytest.raises(ConfigError, match="cannot be dealt out evenly"):
                    slices(tensor, 0, local_tp, remote_tp)
                continue
            num_seen += 1
            assert all(moved(tensor, rank, local_tp, remote_tp) for rank in range(local_tp))
    assert num_seen >= len(PAIRS)


@pytest.mark.parametrize("tensor", ODD, ids=["latents", "key heads"])
def test_slices_when_a_part_repeats_then_it_comes_from_one_rank(tensor: TensorPlace) -> None:
    for local_tp, remote_tp in PAIRS:
        if can_be_cut(tensor, local_tp) and can_be_cut(tensor, remote_tp):
            assert all(moved(tensor, rank, local_tp, remote_tp) for rank in range(local_tp))


def conv_of(name: str) -> TensorPlace:
    return next(each for each in tensors_of(geometry_of(name)) if len(each.parts) == 3)


def keys_of(name: str) -> TensorPlace:
    return next(each for each in tensors_of(geometry_of(name)) if each.parts[0].name == "kv_heads")


def test_control_when_a_convolution_is_cut_as_one_piece_then_seen() -> None:
    tensor = conv_of("nemotron-nano-9b-v2")
    blob = replace(tensor, parts=(ShardPart("all", tensor.shape[0]),))
    assert moved(tensor, 1, 2, 1)
    assert not moved(tensor, 1, 2, 1, lambda _, *sizes: slices(blob, *sizes))


def test_control_when_repeated_groups_are_divided_then_seen() -> None:
    """B and C of one group, as if each rank had a share of them."""
    tensor = conv_of("granite-4.0-h-tiny")
    x, *shared = tensor.parts
    scaled = replace(tensor, parts=(x, *(ShardPart(part.name, part.head_rows) for part in shared)))
    assert moved(tensor, 1, 2, 4)
    assert not moved(tensor, 1, 2, 4, lambda _, *sizes: slices(scaled, *sizes))


def test_control_when_copies_are_counted_by_modulo_then_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = keys_of("qwen3-next-80b-a3b")  # two heads
    assert all(moved(tensor, rank, 4, 1) for rank in range(4))

    def by_modulo(part: ShardPart, rank: int, tp: int) -> range:
        first = rank % part.num_heads if tp > part.num_heads else rank * part.num_heads // tp
        return range(first, first + max(1, part.num_heads // tp))

    monkeypatch.setattr(shards, "_held", by_modulo)
    assert not all(moved(tensor, rank, 4, 1) for rank in range(4))


@pytest.mark.parametrize("name", MODELS)
def test_unit_slices_when_sizes_are_equal_then_each_tensor_comes_whole_from_one_rank(name: str) -> None:
    geometry = geometry_of(name)
    for tp in (each for each in SIZES if all(can_be_cut(tensor, each) for tensor in tensors_of(geometry))):
        own = shard_geometry(geometry, tp)
        expected = sum(math.prod(each.shape) * DTYPE_BYTES[each.dtype] for each in tensors_of(own))
        for rank in range(tp):
            units = unit_slices(geometry, BLOCK_SIZE, rank, tp, tp)
            pieces = [piece for group in (*units.blocks, units.slot) for piece in group]
            assert sum(piece.length for piece in pieces) == expected
            assert all(piece.local_offset == piece.remote_offset for piece in pieces)


def test_check_when_heads_cannot_be_dealt_out_then_names_tensor_part_and_sizes() -> None:
    geometry = geometry_of("granite-4.0-h-tiny")
    check_tensor_parallel(geometry, 4)
    with pytest.raises(ConfigError, match="tensor parallel size 5: attention of layer 1: 4 heads of 'kv_heads' cannot"):
        check_tensor_parallel(geometry, 5)


def test_layout_when_parts_are_declared_then_its_identity_is_what_it_was() -> None:
    """Nodes and tiers of before go on to understand each other (``layout_fingerprint``)."""
    geometry = geometry_of("granite-4.0-h-tiny")
    assert "ShardPart" not in repr(geometry)
    assert "num_kv_heads=4" in repr(geometry)
