"""What a node tells its peers of its pools' layout, field by field, so that whoever cannot read them says why.

A peer's document must equal the node's own but for the tensor-parallel size, and the two sizes must be such that
``slices`` can map one to the other. How heads are dealt out is compared only where one of the two is divided: undivided
pools are the same bytes without it, and nodes of before and after somebody declares ``parts`` go on to read each other.
A peer without a document is a node of before there were any: undivided, and its fingerprint says that it is alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from common.errors import ConfigError, LayoutMismatchError
from common.kv_cache.layout import LAYOUT_VERSION, make_layout
from common.kv_cache.shards import check_tensor_parallel, shard_geometry
from common.kv_cache.spec import ModelGeometry

TENSOR_PARALLEL_SIZE = "tensor_parallel_size"
PARTS = "parts"
MAX_TENSOR_PARALLEL_SIZE = 1024
"""Above any machine: a peer's number is checked before anything is computed from it."""
_SHOWN_CHARS = 200


class NodeLayout:
    """``geometry``: of the undivided model; ``tensor_parallel_size``: among how many ranks this node divides it.

    Raises:
        ConfigError: as ``check_tensor_parallel``.
    """

    def __init__(self, geometry: ModelGeometry, block_size: int, tensor_parallel_size: int = 1) -> None:
        check_tensor_parallel(geometry, tensor_parallel_size)
        self._geometry = geometry
        self._block_size = block_size
        self.tensor_parallel_size = tensor_parallel_size
        self.document: Mapping[str, Any] = {
            "layout_version": LAYOUT_VERSION,
            "block_size": block_size,
            TENSOR_PARALLEL_SIZE: tensor_parallel_size,
            "attention": [
                {
                    "layer": layer.layer_idx,
                    "group": group.label,
                    "dtype": layer.dtype,
                    "num_kv_heads": layer.num_kv_heads,
                    "head_size": layer.head_size,
                    "head_size_v": layer.head_size_v,
                }
                for group in geometry.attention_groups
                for layer in group.layers
            ],
            "state": [
                {
                    "layer": layer.layer_idx,
                    "mixer": layer.mixer,
                    "tensor": tensor.name,
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    PARTS: [asdict(part) for part in tensor.parts],
                }
                for layer in geometry.state_layers
                for tensor in layer.tensors
            ],
        }

    def check(self, document: Mapping[str, Any] | None) -> Mapping[str, int]:
        """Bytes per unit of each pool of a peer with this document, by pool name; None: of one that does not say.

        Raises:
            LayoutMismatchError: naming the field and both values.
        """
        theirs = self.num_ranks(document)
        is_divided = max(theirs, self.tensor_parallel_size) > 1
        for path, own, their in differences(self.document, self.document if document is None else document):
            if path == TENSOR_PARALLEL_SIZE or (not is_divided and f".{PARTS}" in path):
                continue
            raise _mismatch(path, their, own)
        layout = make_layout(shard_geometry(self._geometry, theirs), self._block_size)
        groups = zip(self._geometry.attention_groups, layout.group_block_bytes, strict=True)
        return {**{group.pool_name: num_bytes for group, num_bytes in groups}, "slots": layout.slot_bytes}

    def num_ranks(self, document: Mapping[str, Any] | None) -> int:
        """A peer's tensor-parallel size, which can be mapped to this node's.

        Raises:
            LayoutMismatchError: naming the field and both values.
        """
        theirs = 1 if document is None else document.get(TENSOR_PARALLEL_SIZE)
        why = f"must be an integer in [1, {MAX_TENSOR_PARALLEL_SIZE}]"
        if type(theirs) is int and 1 <= theirs <= MAX_TENSOR_PARALLEL_SIZE:
            try:
                check_tensor_parallel(self._geometry, theirs)
                return theirs
            except ConfigError as exc:
                why = exc.message
        raise _mismatch(TENSOR_PARALLEL_SIZE, theirs, self.tensor_parallel_size, why)


def differences(own: object, their: object, path: str = "") -> Iterator[tuple[str, object, object]]:
    """(path, own value, their value) of each leaf of two JSON values that differs, such as ``attention[3].head_size``;
    None for what one of them lacks. As deep as ``own`` is and no deeper."""
    if isinstance(own, Mapping) and isinstance(their, Mapping):
        for name in (*own, *(name for name in their if name not in own)):
            yield from differences(own.get(name), their.get(name), f"{path}.{name}" if path else name)
    elif isinstance(own, list) and isinstance(their, list):
        for index, (mine, other) in enumerate(zip_longest(own, their)):
            yield from differences(mine, other, f"{path}[{index}]")
    elif own != their or type(own) is not type(their):
        yield path, own, their


def _mismatch(path: str, theirs: object, own: object, why: str = "") -> LayoutMismatchError:
    message = f"layout field {path[:_SHOWN_CHARS]} is {_shown(theirs)}, this node's is {_shown(own)}"
    return LayoutMismatchError(f"{message}: {why}" if why else message)


def _shown(value: object) -> str:
    """Of what has parts, its kind: a peer's may be of any size and depth."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)[:_SHOWN_CHARS]
