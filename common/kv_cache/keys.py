"""Names of prefixes: one hash chain for every group, so one key means "the prefix that ends at token t" everywhere.

H(boundary) = blake2b(H(previous boundary), token ids of the block); H(t) inside a block = the same function over the
tokens since the last boundary. The root binds model, dtype, layout and the request's extra keys; each block with rows
of an image binds the image's digest and the block's offset in it. Keys cross nodes and tenants, so the hash is
cryptographic and token ids are hashed as little-endian uint32.

A chain is hashed lazily, one block at a time, and never twice.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from common.images.span import ImageSpan, digests_and_offsets, end_of_images, overlapping, row_id

KEY_BYTES = 32
"""Length of a key in bytes: a cryptographic length, since equal keys share memory across tenants."""


_WITH_IMAGES = b"tandem images"
"""Sets keys with images apart from those of text, whatever its token ids are."""


def chain_key(parent: bytes, token_ids: array[int], images: bytes = b"") -> bytes:
    """Key of the prefix ``parent`` continued by ``token_ids`` (at most one block of them). ``images``: what
    ``digests_and_offsets`` says of them."""
    if sys.byteorder == "big":
        token_ids = token_ids[:]
        token_ids.byteswap()
    if images:
        digest = blake2b(parent, digest_size=KEY_BYTES, person=_WITH_IMAGES)
        digest.update(len(images).to_bytes(8, "little"))
        digest.update(images)
    else:
        digest = blake2b(parent, digest_size=KEY_BYTES)
    digest.update(token_ids)
    return digest.digest()


def chain_root(root_key: bytes, extra_keys: Sequence[tuple[str, bytes]] = ()) -> bytes:
    """Start of a chain: the model's ``root_key`` and the request's extra keys, (tag, value) each, length-prefixed.

    Whatever makes equal tokens mean something else (a tenant's salt, an adapter) is one more tagged value. Order
    counts.
    """
    digest = blake2b(digest_size=KEY_BYTES)
    for tag, value in (("root", root_key), *extra_keys):
        for part in (tag.encode(), value):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()


def prompt_root(root_key: bytes, cache_salt: str | None) -> bytes:
    """Start of the chain of every prompt with this salt, on every node with this ``root_key``."""
    return chain_root(root_key, () if cache_salt is None else (("cache_salt", cache_salt.encode()),))


class PrefixKeys:
    """The tokens of one sequence, the images among them, and the keys of its prefixes.

    Attributes:
        images: in order.
        history: what the eviction policy knew of the prompt at its admission: tokens of its longest known prefix, and
            how often that line of prefixes had been continued.
        is_counted: the eviction policy has counted the prompt when part of it was pulled: its admission is no other.
    """

    __slots__ = ("_chain", "_tokens", "block_size", "history", "images", "is_counted")

    def __init__(
        self, root: bytes, block_size: int, token_ids: Sequence[int] = (), images: Sequence[ImageSpan] = ()
    ) -> None:
        self.block_size = block_size
        self.images = tuple(images)
        self._tokens = array("I", token_ids)
        self._chain = [root]
        self.history = (0, 0)
        self.is_counted = False

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._tokens.extend(token_ids)

    def fork(self) -> PrefixKeys:
        """An independent chain with the same tokens; what was hashed is not hashed again."""
        child = PrefixKeys(self._chain[0], self.block_size, images=self.images)
        child._tokens = self._tokens[:]
        child._chain = self._chain[:]
        child.history = self.history
        return child

    def boundary_key(self, num_blocks: int) -> bytes:
        """Key of the first ``num_blocks`` full blocks; 0 is the root."""
        chain, size = self._chain, self.block_size
        if num_blocks * size > len(self._tokens):
            raise IndexError(f"block boundary {num_blocks * size} is beyond {len(self._tokens)} known tokens")
        if len(chain) <= num_blocks:
            self._hash_to(num_blocks)
        return chain[num_blocks]

    def boundary_keys(self, num_blocks: int) -> list[bytes]:
        """Keys of all boundaries, the root first, at least ``num_blocks + 1`` of them. Live: do not mutate."""
        self.boundary_key(num_blocks)
        return self._chain

    def _hash_to(self, num_blocks: int) -> None:
        chain, size = self._chain, self.block_size
        num_with_images = -(-end_of_images(self.images) // size)
        while len(chain) <= min(num_blocks, num_with_images):
            end = len(chain) * size
            chain.append(self._key(chain[-1], end - size, end))
        if len(chain) <= num_blocks:
            self._hash_text_to(num_blocks)

    def _key(self, parent: bytes, start: int, end: int) -> bytes:
        return chain_key(parent, self._tokens[start:end], digests_and_offsets(self.images, start, end))

    def _hash_text_to(self, num_blocks: int) -> None:
        # One digest of parent + tokens per block, in one buffer: 9 million tokens/s at block 16 on one core.
        chain, size = self._chain, self.block_size
        tokens = self._tokens[(len(chain) - 1) * size : num_blocks * size]
        if sys.byteorder == "big":
            tokens.byteswap()
        data = tokens.tobytes()
        block_bytes = size * tokens.itemsize
        key = chain[-1]
        for start in range(0, len(data), block_bytes):
            key = blake2b(key + data[start : start + block_bytes], digest_size=KEY_BYTES).digest()
            chain.append(key)

    def key_at(self, position: int) -> bytes:
        """Key of the prefix of ``position`` tokens, on a boundary or not."""
        if position > len(self._tokens):
            raise IndexError(f"position {position} is beyond {len(self._tokens)} known tokens")
        num_blocks, num_tail = divmod(position, self.block_size)
        boundary = self.boundary_key(num_blocks)
        return self._key(boundary, position - num_tail, position) if num_tail else boundary

    def tail_tokens(self, position: int) -> tuple[int, ...]:
        """What is between the last block boundary at or below ``position`` and ``position``, as ``content``."""
        return self.content(position - position % self.block_size, position)

    def content(self, start: int, end: int) -> tuple[int, ...]:
        """Something to compare tokens [start, end) by: their ids, and for tokens of an image what only that image has
        there."""
        found = list(self._tokens[start:end])
        for image in overlapping(self.images, start, end):
            for position in range(max(start, image.start), min(end, image.end)):
                found[position - start] = row_id(image, position)
        return tuple(found)

    def token_ids(self, start: int, end: int) -> list[int]:
        return self._tokens[start:end].tolist()
