"""Who was sent which text: a stand-in for prompt keys, for prompts that the proxy could not tokenise.

A prompt's bytes are cut into pieces of a fixed size and hashed as a chain, so equal starts have equal keys. What a node
was sent it is taken to have for a while, in whole pieces. Wrong guesses cost time, never an answer.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

from common.wire.json_text import dump_json
from proxy.prefix_index.coverage import Coverage

PIECE_BYTES = 512
"""Bytes of text, or of token ids at 4 each, in one piece."""
BYTES_PER_TOKEN = 4
"""Of English text in common vocabularies."""
MAX_PIECES = 256
"""Pieces of one prompt that are remembered: 128 KiB, beyond which another piece changes no decision."""
MAX_KEYS = 50_000
"""Pieces that are remembered, over all prompts; the oldest are forgotten first."""
LIFETIME_S = 600.0
"""Seconds for which a node is taken to have what it was sent."""
_TEMPLATE_FIELDS = ("tools", "messages")


class TextKeys:
    """One prompt's estimated length in tokens, and the keys of its pieces."""

    __slots__ = ("keys", "num_tokens", "piece_tokens")

    def __init__(self, content: bytes, num_tokens: int, salt: object) -> None:
        self.num_tokens = max(1, num_tokens)
        num_pieces = min(len(content) // PIECE_BYTES, MAX_PIECES)
        self.piece_tokens = self.num_tokens * PIECE_BYTES / max(1, len(content))
        chain = blake2b(repr(salt).encode(), digest_size=16)
        self.keys: list[bytes] = []
        for start in range(0, num_pieces * PIECE_BYTES, PIECE_BYTES):
            chain.update(content[start : start + PIECE_BYTES])
            self.keys.append(chain.digest())

    @classmethod
    def of(cls, body: Mapping[str, Any], prompt: Any) -> TextKeys:
        """``prompt``: text, token ids, or None for the body's messages."""
        salt = body.get("cache_salt")
        if isinstance(prompt, list | array):
            try:
                content = (prompt if isinstance(prompt, array) else array("I", prompt)).tobytes()
            except OverflowError:  # no vocabulary has such ids: a node will say so
                content = b""
            return cls(content, len(prompt), salt)
        if isinstance(prompt, str):
            content = prompt.encode(errors="replace")
        else:
            # The closing brackets are left out: a longer conversation must begin like the shorter one.
            values = map(body.get, _TEMPLATE_FIELDS)
            content = b"".join(dump_json(value).removesuffix(b"]") for value in values if value)
        return cls(content, len(content) // BYTES_PER_TOKEN, salt)


class TextHistory:
    """Key of a prompt's start -> nodes that were sent it, and when. Bounded: the oldest goes first."""

    def __init__(
        self,
        max_keys: int = MAX_KEYS,
        lifetime_s: float = LIFETIME_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_keys = max_keys
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._sent: OrderedDict[bytes, dict[str, float]] = OrderedDict()

    def lookup(self, keys: TextKeys) -> dict[str, Coverage]:
        oldest_s = self._clock() - self._lifetime_s
        coverage: dict[str, Coverage] = {}
        for index, key in enumerate(keys.keys, start=1):
            nodes = self._sent.get(key)
            if nodes is None:
                break
            num_tokens = int(index * keys.piece_tokens)
            for url, sent_s in nodes.items():
                if sent_s >= oldest_s:
                    coverage[url] = Coverage(num_tokens, num_tokens)
        return coverage

    def observe(self, url: str, keys: TextKeys) -> None:
        now = self._clock()
        for key in keys.keys:
            self._sent.setdefault(key, {})[url] = now
            self._sent.move_to_end(key)
        while len(self._sent) > self._max_keys:
            self._sent.popitem(last=False)

    def drop(self, url: str) -> None:
        """Forget a node."""
        for nodes in self._sent.values():
            nodes.pop(url, None)
