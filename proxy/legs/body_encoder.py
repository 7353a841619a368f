"""JSON of what is sent to nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

_JSON = json.JSONEncoder(separators=(",", ":"))
SHORT_CHARS = 64


def encode(value: object) -> bytes:
    """``value``, whose keys are texts, as compact JSON."""
    try:
        encoded = orjson.dumps(value)
    except orjson.JSONEncodeError:  # a whole number beyond 64 bits
        return _JSON.encode(value).encode()
    # It may stand for a number that is too large for a float, which is for the node to refuse.
    return _JSON.encode(value).encode() if b"null" in encoded else encoded


class BodyEncoder:
    """The bodies of one request's legs: a value that several of them have, the prompt above all, is encoded once."""

    def __init__(self) -> None:
        # By identity, which is a value's own for as long as it is held here.
        self._known: dict[int, tuple[object, bytes]] = {}

    def encode(self, leg: Mapping[str, Any]) -> bytes:
        """``leg`` as a JSON object. Its values must not change afterwards."""
        pieces: list[bytes] = []
        rest: dict[str, Any] = {}
        for name, value in leg.items():
            if isinstance(value, list | dict) or (isinstance(value, str) and len(value) > SHORT_CHARS):
                pieces.append(encode(name) + b":" + self._encode_once(value))
            else:
                rest[name] = value
        if rest or not pieces:
            pieces.append(encode(rest)[1:-1])
        return b"{" + b",".join(pieces) + b"}"

    def _encode_once(self, value: object) -> bytes:
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = (value, encode(value))
        return known[1]
