"""Which prompts were here, for models without a group that keeps every position: where others part from them.

Attention's cached blocks say how far a prompt is known, so a state is kept where prompts part (the junction). Recurrent
layers alone leave nothing to compare with, so the block boundaries of admitted prompts are remembered, as keys.
"""

from __future__ import annotations

from common.kv_cache.keys import PrefixKeys

MAX_KEYS = 65_536
"""Block boundaries that are remembered, about 100 bytes each."""


class AdmittedPrefixes:
    """Where a boundary is known, all boundaries before it are: what is forgotten first is the prompt that was admitted
    longest ago, its deepest boundary first."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._keys: dict[bytes, None] = {}  # admitted longest ago first

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: PrefixKeys, num_tokens: int) -> None:
        """A prompt of ``num_tokens``; of one that is too long the beginning counts."""
        known, num_blocks = self._keys, min(num_tokens // keys.block_size, self._max_keys)
        chain = keys.boundary_keys(num_blocks)
        for index in range(num_blocks, 0, -1):
            known.pop(chain[index], None)
            known[chain[index]] = None
        while len(known) > self._max_keys:
            del known[next(iter(known))]

    def depth(self, keys: PrefixKeys, num_tokens: int) -> int:
        """Deepest known block boundary within ``num_tokens``, in tokens."""
        known, low, high = self._keys, 0, num_tokens // keys.block_size
        chain = keys.boundary_keys(high)
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle] in known:
                low = middle
            else:
                high = middle - 1
        return low * keys.block_size
