"""Names of prefixes: one hash chain for every group, so one key means "the prefix that ends at token t" everywhere.

H(boundary) = blake2b(H(previous boundary), token ids of the block); H(t) inside a block = the same function over the
tokens since the last boundary. The root binds model, dtype, layout and the request's extra keys. Keys cross nodes and
tenants, so the hash is cryptographic and token ids are hashed as little-endian uint32.

A chain is hashed lazily, one block at a time, and never twice.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 32


def chain_key(parent: bytes, token_ids: array[int]) -> bytes:
    """Key of the prefix ``parent`` continued by ``token_ids`` (at most one block of them)."""
    if sys.byteorder == "big":
        token_ids = token_ids[:]
        token_ids.byteswap()
    digest = blake2b(parent, digest_size=KEY_BYTES)
    digest.update(token_ids)
    return digest.digest()


def chain_root(root_key: bytes, cache_salt: str | None = None) -> bytes:
    """Start of a chain: the model's ``root_key`` and the request's extra keys, each tagged and length-prefixed."""
    digest = blake2b(digest_size=KEY_BYTES)
    extras = [(b"root", root_key)]
    if cache_salt is not None:
        extras.append((b"cache_salt", cache_salt.encode()))
    for tag, value in extras:
        for part in (tag, value):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()


class PrefixKeys:
    """The tokens of one sequence and the keys of its prefixes."""

    __slots__ = ("_chain", "_tokens", "block_size")

    def __init__(self, root: bytes, block_size: int, token_ids: Sequence[int] = ()) -> None:
        self.block_size = block_size
        self._tokens = array("I", token_ids)
        self._chain = [root]

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._tokens.extend(token_ids)

    def fork(self) -> PrefixKeys:
        """An independent chain with the same tokens; what was hashed is not hashed again."""
        child = PrefixKeys(self._chain[0], self.block_size)
        child._tokens = self._tokens[:]
        child._chain = self._chain[:]
        return child

    def boundary_key(self, num_blocks: int) -> bytes:
        """Key of the first ``num_blocks`` full blocks; 0 is the root."""
        chain, size = self._chain, self.block_size
        if num_blocks * size > len(self._tokens):
            raise IndexError(f"block boundary {num_blocks * size} is beyond {len(self._tokens)} known tokens")
        while len(chain) <= num_blocks:
            start = (len(chain) - 1) * size
            chain.append(chain_key(chain[-1], self._tokens[start : start + size]))
        return chain[num_blocks]

    def key_at(self, position: int) -> bytes:
        """Key of the prefix of ``position`` tokens, on a boundary or not."""
        if position > len(self._tokens):
            raise IndexError(f"position {position} is beyond {len(self._tokens)} known tokens")
        num_blocks, num_tail = divmod(position, self.block_size)
        boundary = self.boundary_key(num_blocks)
        return chain_key(boundary, self._tokens[position - num_tail : position]) if num_tail else boundary

    def tail_tokens(self, position: int) -> tuple[int, ...]:
        """Tokens between the last block boundary at or below ``position`` and ``position``."""
        return tuple(self._tokens[position - position % self.block_size : position])

    def token_ids(self, start: int, end: int) -> list[int]:
        return self._tokens[start:end].tolist()
