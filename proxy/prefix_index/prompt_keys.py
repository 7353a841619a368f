"""One prompt's names in the nodes' caches: the key chain of ``common.kv_cache.keys``, computed from the proxy's own
tokens with the root that a node gave it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.images.span import ImageSpan, digests_and_offsets
from common.kv_cache.keys import PrefixKeys, chain_key, prompt_root
from common.wire.cache_events import truncate_key


@dataclass(frozen=True, slots=True)
class KeySource:
    """What a prompt's keys are computed from, in a third of their memory: 4 bytes a token."""

    root: bytes
    block_size: int
    token_ids: array[int] = field(repr=False)
    images: tuple[ImageSpan, ...] = ()

    def followed_by(self, token_ids: Sequence[int]) -> PromptKeys:
        """The keys of the prompt with ``token_ids`` behind it; milliseconds for a long one."""
        return PromptKeys.of_chain(self.root, self.block_size, self.token_ids + array("I", token_ids), self.images)


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """
    Attributes:
        num_tokens: of the prompt.
        block_size: tokens between two boundaries.
        boundary_keys: key of the first n full blocks at index n; the root, which binds model and salt, at 0.
        token_ids, images: the prompt's own, for places inside a block.
        truncated_keys: ``boundary_keys`` as they are in the nodes' events.
    """

    num_tokens: int
    block_size: int
    boundary_keys: tuple[bytes, ...]
    token_ids: array[int] = field(repr=False)
    images: tuple[ImageSpan, ...] = ()
    truncated_keys: tuple[bytes, ...] = field(init=False, repr=False)
    _boundary_set: frozenset[bytes] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_boundary_set", frozenset())
        object.__setattr__(self, "truncated_keys", tuple(map(truncate_key, self.boundary_keys)))

    @classmethod
    def of_prompt(
        cls,
        root_key: bytes,
        block_size: int,
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        images: tuple[ImageSpan, ...] = (),
    ) -> PromptKeys:
        """The keys that a node with this ``root_key`` gives to the prompt."""
        ids = token_ids if isinstance(token_ids, array) else array("I", token_ids)
        return cls.of_chain(prompt_root(root_key, cache_salt), block_size, ids, images)

    @classmethod
    def of_chain(
        cls, root: bytes, block_size: int, token_ids: array[int], images: tuple[ImageSpan, ...] = ()
    ) -> PromptKeys:
        """The keys of the chain that begins with ``root``."""
        chain = PrefixKeys(root, block_size, token_ids, images).boundary_keys(len(token_ids) // block_size)
        return cls(len(token_ids), block_size, tuple(chain), token_ids, images)

    @property
    def source(self) -> KeySource:
        return KeySource(self.boundary_keys[0], self.block_size, self.token_ids, self.images)

    @property
    def num_blocks(self) -> int:
        return len(self.boundary_keys) - 1

    def boundary_set(self) -> frozenset[bytes]:
        """``truncated_keys``, in no order; made when it is first needed, for it has as much memory as they."""
        if not self._boundary_set:
            object.__setattr__(self, "_boundary_set", frozenset(self.truncated_keys))
        return self._boundary_set

    def key_at(self, position: int) -> bytes:
        """Key of the first ``position`` tokens, on a boundary or not. ``position`` is at most ``num_tokens``."""
        num_blocks, num_tail = divmod(position, self.block_size)
        boundary = self.boundary_keys[num_blocks]
        if not num_tail:
            return boundary
        start = position - num_tail
        return chain_key(boundary, self.token_ids[start:position], digests_and_offsets(self.images, start, position))
