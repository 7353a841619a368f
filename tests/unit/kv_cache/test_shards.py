"""Slices between ranks of different tensor-parallel sizes, against slicing numbered tensors by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from common.errors import ConfigError, LayoutMismatchError
from common.geometry.families import FAMILIES
from common.kv_cache import shards
from common.kv_cache.layout import TensorPlace, make_layout
from common.kv_cache.layout_document import TENSOR_PARALLEL_SIZE, NodeLayout
from common.kv_cache.shards import check_tensor_parallel, shard_geometry, slices, unit_slices
from common.kv_cache.spec import DTYPE_BYTES, ModelGeometry, ShardPart
from tests.support.published import CANNOT_DIVIDE, MODELS
from tests.support.shards_by_hand import cut_by_hand, geometry_of, narrow, unit_by_hand, units_of

QUICK = (
    *("granite-4.0-h-tiny", "qwen3-next-80b-a3b", "kimi-linear-48b-a3b", "jamba-mini-1.6", "lfm2-1.2b"),
    *("zamba2-1.2b", "mamba-codestral-7b", "gemma-3-1b", "minimax-text-01"),
)
ONE_OF_A_KIND = [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in MODELS]
"""All of the published models, but in the short tier one for each way in which a state is divided."""

SIZES = (1, 2, 4, 8)
BLOCK_SIZE = 4

# Latents, which every rank holds whole, and query and key heads of which several ranks hold the same.
MLA = TensorPlace(0, (1, BLOCK_SIZE, 24), "bfloat16", (ShardPart("kv_heads", 1, may_repeat=True),))
ODD = (
    MLA,
    TensorPlace(
        0,
        (2 * 2 * 3 + 8 * 3, 3),
        "float32",
        (ShardPart("q", 2, 3, True), ShardPart("k", 2, 3, True), ShardPart("v", 8, 3)),
    ),
)


def narrowed(tensor: TensorPlace) -> TensorPlace:
    """With short axes behind the divided one, which are moved whole anyway."""
    return replace(tensor, shape=(tensor.shape[0], *(min(size, 3) for size in tensor.shape[1:])))


def tensors_of(geometry: ModelGeometry) -> Iterator[TensorPlace]:
    layout = make_layout(geometry, BLOCK_SIZE)
    for pair in layout.attention.values():
        yield from pair
    for named in layout.state.values():
        yield from named.values()


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


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
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
    assert num_seen >= len(pairs_of(name))


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

    monkeypatch.setattr(shards, "held", by_modulo)
    assert not all(moved(tensor, rank, 4, 1) for rank in range(4))


def test_models_when_listed_then_every_reader_of_configs_has_one() -> None:
    assert {FAMILIES[config["model_type"]].read_config for config in MODELS.values()} == {
        family.read_config for family in FAMILIES.values()
    }


class Units(NamedTuple):
    """What became of the units of one rank. ``wrong``: bytes that are not the rank's own, or that were not written
    exactly once; ``gaps``: places between tensors that were written."""

    num_bytes: int
    wrong: int
    gaps: int

    @property
    def are_right(self) -> bool:
        return self.num_bytes > 0 and not self.wrong and not self.gaps


Plan = Callable[[ModelGeometry, int, int, int, int], shards.UnitSlices]


def moved_units(geometry: ModelGeometry, rank: int, local_tp: int, remote_tp: int, plan: Plan = unit_slices) -> Units:
    planned = plan(geometry, BLOCK_SIZE, rank, local_tp, remote_tp)
    found = Units(0, 0, 0)
    for tensors, pieces in zip(units_of(geometry, BLOCK_SIZE), (*planned.blocks, planned.slot), strict=True):
        remote = [unit_by_hand(tensors, each, remote_tp) for each in range(remote_tp)]
        expected = unit_by_hand(tensors, rank, local_tp)
        here, times = np.full(expected.size, -1), np.zeros(expected.size, dtype=int)
        wrong = 0
        for piece in pieces:
            source = remote[piece.remote_rank][piece.remote_offset : piece.remote_offset + piece.length]
            target = slice(piece.local_offset, piece.local_offset + piece.length)
            if source.size != piece.length or target.stop > here.size:
                wrong += piece.length  # outside of a unit
                continue
            here[target] = source
            times[target] += 1
        is_tensor = expected >= 0
        wrong += int(((here != expected) | (times != 1))[is_tensor].sum())
        found = Units(
            found.num_bytes + int(is_tensor.sum()), found.wrong + wrong, found.gaps + int(times[~is_tensor].sum())
        )
    return found


def pairs_of(name: str) -> list[tuple[int, int]]:
    refused = CANNOT_DIVIDE.get(name, {})
    return [pair for pair in PAIRS if not refused.keys() & set(pair)]


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_unit_slices_when_any_size_meets_any_other_then_every_byte_of_every_unit_is_its_own_and_comes_once(
    name: str,
) -> None:
    """Both directions: each pair comes in either order."""
    geometry = narrow(geometry_of(name))
    pairs = pairs_of(name)
    assert len(pairs) in (4, 16)
    for local_tp, remote_tp in pairs:
        for rank in range(local_tp):
            assert moved_units(geometry, rank, local_tp, remote_tp).are_right, (local_tp, remote_tp, rank)


@pytest.mark.parametrize("name", MODELS)
def test_unit_slices_when_pieces_go_on_from_each_other_then_they_are_one(name: str) -> None:
    geometry = geometry_of(name)
    for local_tp, remote_tp in pairs_of(name):
        for rank in range(local_tp):
            planned = unit_slices(geometry, BLOCK_SIZE, rank, local_tp, remote_tp)
            for pieces in (*planned.blocks, planned.slot):
                begins = {(each.remote_rank, each.local_offset, each.remote_offset) for each in pieces}
                ends = {
                    (each.remote_rank, each.local_offset + each.length, each.remote_offset + each.length)
                    for each in pieces
                }
                assert not begins & ends


@pytest.mark.parametrize("name", MODELS)
def test_unit_slices_when_sizes_are_equal_then_each_tensor_comes_whole_from_one_rank(name: str) -> None:
    geometry = geometry_of(name)
    for tp in (each for each in SIZES if (each, each) in pairs_of(name)):
        own = shard_geometry(geometry, tp)
        expected = sum(math.prod(each.shape) * DTYPE_BYTES[each.dtype] for each in tensors_of(own))
        for rank in range(tp):
            units = unit_slices(geometry, BLOCK_SIZE, rank, tp, tp)
            pieces = [piece for group in (*units.blocks, units.slot) for piece in group]
            assert sum(piece.length for piece in pieces) == expected
            assert all(piece.local_offset == piece.remote_offset for piece in pieces)


@pytest.mark.parametrize("name", MODELS)
def test_sizes_when_they_cannot_divide_a_model_then_refused_with_the_tensor_and_its_heads(name: str) -> None:
    geometry = geometry_of(name)
    odd = () if name == "gemma-3-1b" else (7 * 11 * 13,)  # a lone K/V head may be held by any number of ranks
    for tp in (*SIZES, *odd):
        named = CANNOT_DIVIDE.get(name, {}).get(tp, "heads of")
        if tp in SIZES and tp not in CANNOT_DIVIDE.get(name, {}):
            check_tensor_parallel(geometry, tp)
            NodeLayout(geometry, BLOCK_SIZE).check({**NodeLayout(geometry, BLOCK_SIZE, tp).document})
            continue
        for local, remote in ((1, tp), (tp, 1)):
            with pytest.raises(ConfigError) as caught:
                unit_slices(geometry, BLOCK_SIZE, 0, local, remote)
            assert f"--tensor-parallel-size {tp}: " in caught.value.message
            assert named in caught.value.message
            assert "cannot be dealt out evenly" in caught.value.message
        with pytest.raises(LayoutMismatchError, match="tensor_parallel_size") as refused:
            NodeLayout(geometry, BLOCK_SIZE).check(
                {**NodeLayout(geometry, BLOCK_SIZE).document, TENSOR_PARALLEL_SIZE: tp}
            )
        assert named in refused.value.message


def with_conv_parts(
    geometry: ModelGeometry, of: Callable[[tuple[ShardPart, ...]], tuple[ShardPart, ...]]
) -> ModelGeometry:
    """As if somebody had said otherwise how convolutions are divided."""
    return replace(
        geometry,
        state_layers=tuple(
            replace(
                layer,
                tensors=tuple(
                    replace(tensor, parts=of(tensor.parts)) if len(tensor.parts) == 3 else tensor
                    for tensor in layer.tensors
                ),
            )
            for layer in geometry.state_layers
        ),
    )


def as_blob(parts: tuple[ShardPart, ...]) -> tuple[ShardPart, ...]:
    return (ShardPart("all", sum(part.num_rows for part in parts)),)


def scaled(parts: tuple[ShardPart, ...]) -> tuple[ShardPart, ...]:
    """B and C, or q and k, as if each rank had a share of their rows."""
    return tuple(ShardPart(part.name, part.num_rows) if part.may_repeat else part for part in parts)


SHARED = ("granite-4.0-h-tiny", "bamba-9b", "falcon-h1-1.5b", "mamba2-2.7b")
"""One group of B and C."""
OTHERS = ("nemotron-nano-9b-v2", "qwen3-next-80b-a3b", "kimi-linear-48b-a3b", "zamba2-7b", "mamba-codestral-7b")
MUTATIONS = [
    *(("conv as one blob", as_blob, name) for name in (*SHARED, *OTHERS)),
    *(("shared groups divided", scaled, name) for name in SHARED),
]


@pytest.mark.parametrize(("why", "of", "name"), MUTATIONS, ids=[f"{why}: {name}" for why, _, name in MUTATIONS])
def test_control_when_convolutions_are_divided_otherwise_then_seen(
    why: str, of: Callable[[tuple[ShardPart, ...]], tuple[ShardPart, ...]], name: str
) -> None:
    geometry = narrow(geometry_of(name))

    def plan(given: ModelGeometry, *sizes: int) -> shards.UnitSlices:
        return unit_slices(with_conv_parts(given, of), *sizes)

    for local_tp, remote_tp in ((1, 2), (2, 1), (2, 4), (4, 2)):
        wrong = [moved_units(geometry, rank, local_tp, remote_tp, plan).wrong for rank in range(local_tp)]
        assert any(wrong), (local_tp, remote_tp)


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "falcon-h1-1.5b", "zamba2-7b"])  # two heads, or two groups
def test_control_when_copies_in_units_are_counted_by_modulo_then_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = narrow(geometry_of(name))

    def by_modulo(part: ShardPart, rank: int, tp: int) -> range:
        first = rank % part.num_heads if tp > part.num_heads else rank * part.num_heads // tp
        return range(first, first + max(1, part.num_heads // tp))

    monkeypatch.setattr(shards, "held", by_modulo)
    for local_tp, remote_tp in ((4, 1), (4, 2), (8, 1), (8, 4)):
        assert any(moved_units(geometry, rank, local_tp, remote_tp).wrong for rank in range(local_tp))


def test_check_when_heads_cannot_be_dealt_out_then_names_tensor_part_and_sizes() -> None:
    geometry = geometry_of("granite-4.0-h-tiny")
    check_tensor_parallel(geometry, 4)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 5: attention of layer 1: 4 heads of 'kv_heads'"):
        check_tensor_parallel(geometry, 5)


def test_layout_when_parts_are_declared_then_its_identity_is_what_it_was() -> None:
    """Nodes and tiers of before go on to understand each other (``layout_fingerprint``)."""
    geometry = geometry_of("granite-4.0-h-tiny")
    assert "ShardPart" not in repr(geometry)
    assert "num_kv_heads=4" in repr(geometry)
