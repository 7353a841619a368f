"""Which bytes of another node's ranks make up one rank's own, for tensor-parallel sizes that differ. Pure arithmetic
over what the layout declares; no torch.

Every rank holds the same tensors as a whole node, cut along one axis (``TensorPlace.parts``): of each part a run of
consecutive heads. ``num_heads`` divided by ``tp`` heads are a rank's, from ``rank * num_heads // tp`` on; where there
are fewer heads than ranks and the part may repeat, the ranks with the same ``rank * num_heads // tp`` hold the same
head.

Each byte of a rank has exactly one source: what several ranks hold is read from one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from common.errors import ConfigError
from common.kv_cache.layout import Layout, TensorPlace, make_layout
from common.kv_cache.spec import DTYPE_BYTES, KVCacheGroup, ModelGeometry, ShardPart


@dataclass(frozen=True, slots=True)
class Slice:
    """``length`` bytes at ``remote_offset`` of rank ``remote_rank`` go to ``local_offset``."""

    remote_rank: int
    remote_offset: int
    length: int
    local_offset: int


@dataclass(frozen=True, slots=True)
class UnitSlices:
    """Slices of one block of each attention group, and of one slot; offsets from the unit's start."""

    blocks: tuple[tuple[Slice, ...], ...]
    slot: tuple[Slice, ...]


def check_tensor_parallel(geometry: ModelGeometry, tp: int) -> None:
    """Raises ConfigError, naming tensor, part and both numbers, unless ``tp`` ranks can divide every tensor."""
    for layer in geometry.attention_layers:
        check_parts(f"attention of layer {layer.layer_idx}", (layer.kv_heads,), tp)
    for state in geometry.state_layers:
        for tensor in state.tensors:
            check_parts(f"{tensor.name} state of layer {state.layer_idx} ({state.mixer})", tensor.parts, tp)


def shard_geometry(geometry: ModelGeometry, tp: int) -> ModelGeometry:
    """What each of ``tp`` ranks keeps; all ranks keep as much.

    Raises:
        ConfigError: as ``check_tensor_parallel``.
    """
    check_tensor_parallel(geometry, tp)
    if tp == 1:
        return geometry
    return replace(
        geometry,
        attention_layers=tuple(
            replace(layer, num_kv_heads=_num_held(layer.kv_heads, tp)) for layer in geometry.attention_layers
        ),
        state_layers=tuple(
            replace(
                layer,
                tensors=tuple(
                    replace(
                        tensor,
                        shape=(sum(_num_held(part, tp) * part.head_rows for part in tensor.parts), *tensor.shape[1:]),
                        parts=tuple(replace(part, num_heads=_num_held(part, tp)) for part in tensor.parts),
                    )
                    for tensor in layer.tensors
                ),
            )
            for layer in geometry.state_layers
        ),
        num_ranks=tp,
    )


def slices(tensor: TensorPlace, local_rank: int, local_tp: int, remote_tp: int) -> list[Slice]:
    """Where the bytes of rank ``local_rank`` of ``local_tp`` are among ``remote_tp`` ranks, by ascending
    ``local_offset``; offsets are from the tensor's start on either side. ``tensor``: the undivided one.

    Raises:
        ConfigError: as ``check_tensor_parallel``.
    """
    assert 0 <= local_rank < local_tp
    for tp in (local_tp, remote_tp):
        check_parts(f"a tensor {list(tensor.shape)}", tensor.parts, tp)
    parts = tensor.parts or (ShardPart("all", 1, tensor.shape[0]),)
    row_bytes = math.prod(tensor.shape[1:]) * DTYPE_BYTES[tensor.dtype]
    if row_bytes == 0:
        return []
    runs: list[Slice] = []  # in rows
    local_rows = remote_rows = 0
    for part in parts:
        local, rows = held(part, local_rank, local_tp), part.head_rows
        for rank, heads in _sources(part, local_rank, local_tp, remote_tp):
            remote = held(part, rank, remote_tp)
            there, here = (
                remote_rows + (heads.start - remote.start) * rows,
                local_rows + (heads.start - local.start) * rows,
            )
            runs.append(Slice(rank, there, len(heads) * rows, here))
        local_rows += len(local) * rows
        remote_rows += _num_held(part, remote_tp) * rows
    return merged(
        Slice(run.remote_rank, run.remote_offset * row_bytes, run.length * row_bytes, run.local_offset * row_bytes)
        for run in runs
    )


def unit_slices(geometry: ModelGeometry, block_size: int, local_rank: int, local_tp: int, remote_tp: int) -> UnitSlices:
    """``slices`` of all tensors of a unit. ``geometry``: of the undivided model.

    Raises:
        ConfigError: as ``check_tensor_parallel``.
    """
    whole, local, remote = (make_layout(shard_geometry(geometry, tp), block_size) for tp in (1, local_tp, remote_tp))

    def of(places: Callable[[Layout], Iterable[TensorPlace]]) -> tuple[Slice, ...]:
        return tuple(
            merged(
                replace(
                    piece,
                    remote_offset=there.offset_bytes + piece.remote_offset,
                    local_offset=here.offset_bytes + piece.local_offset,
                )
                for tensor, here, there in zip(places(whole), places(local), places(remote), strict=True)
                for piece in slices(tensor, local_rank, local_tp, remote_tp)
            )
        )

    def blocks_of(group: KVCacheGroup) -> tuple[Slice, ...]:
        return of(lambda layout: chain(*(layout.attention[layer.layer_idx] for layer in group.layers)))

    return UnitSlices(
        blocks=tuple(map(blocks_of, geometry.attention_groups)),
        slot=of(lambda layout: chain(*(named.values() for named in layout.state.values()))),
    )


def merged(pieces: Iterable[Slice]) -> list[Slice]:
    """By ascending ``local_offset``; those that go on from each other on both sides are one."""
    runs: list[Slice] = []
    for piece in sorted(pieces, key=lambda piece: piece.local_offset):
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.remote_rank == piece.remote_rank
            and last.remote_offset + last.length == piece.remote_offset
            and last.local_offset + last.length == piece.local_offset
        ):
            runs[-1] = replace(last, length=last.length + piece.length)
        else:
            runs.append(piece)
    return runs


def check_parts(where: str, parts: Sequence[ShardPart], tp: int) -> None:
    """Raises ConfigError, naming ``where``, the part and both numbers, unless ``tp`` ranks can divide every part."""
    if tp > 1 and not parts:
        raise _refusal(f"{where} declares no parts", tp)
    for part in parts:
        if part.num_heads % tp and not (part.may_repeat and tp % part.num_heads == 0):
            bound = "nor is one a multiple of the other" if part.may_repeat else "and no two ranks may hold the same"
            raise _refusal(f"{where}: {part.num_heads} heads of {part.name!r} cannot be dealt out evenly, {bound}", tp)


def _refusal(why: str, tp: int) -> ConfigError:
    return ConfigError(f"--tensor-parallel-size {tp}: {why}", param="--tensor-parallel-size")


def _num_held(part: ShardPart, tp: int) -> int:
    return max(1, part.num_heads // tp)


def held(part: ShardPart, rank: int, tp: int) -> range:
    """The heads of rank ``rank`` of ``tp``."""
    first = rank * part.num_heads // tp
    return range(first, first + _num_held(part, tp))


def _sources(part: ShardPart, local_rank: int, local_tp: int, remote_tp: int) -> Iterator[tuple[int, range]]:
    """(remote rank, heads to take from it): each of the local rank's heads once.

    Of ranks that hold the same head, the local ranks that want it are spread over them in order: ranks of equal numbers
    meet where both sides have as many.
    """
    local = held(part, local_rank, local_tp)
    if remote_tp <= part.num_heads:
        each = part.num_heads // remote_tp
        for rank in range(local.start // each, (local.stop - 1) // each + 1):
            yield rank, range(max(local.start, rank * each), min(local.stop, (rank + 1) * each))
        return
    num_holders = remote_tp // part.num_heads
    num_wanting = max(1, local_tp // part.num_heads)
    for head in local:
        yield head * num_holders + local_rank % num_wanting * num_holders // num_wanting, range(head, head + 1)
