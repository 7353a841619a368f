"""The bodies of a request's legs: what of the client's body each kind of leg gets, and its JSON."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from common.openai.prompt_ids import IMAGES_KEY
from common.wire.handoff import prefill_leg_params
from common.wire.json_text import LONG_BYTES
from common.wire.manifest_reader import TRANSFER_PARAMS_KEY
from common.wire.pull_sources import SOURCES_KEY
from common.wire.resume import STREAM_STATE_KEY
from proxy.nodes.node import Node


def _as_list(value: object) -> object:
    """Token ids (``array``, 4 bytes each) as JSON has them."""
    if isinstance(value, array):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")


_JSON = json.JSONEncoder(separators=(",", ":"), default=_as_list)
SHORT_CHARS = 64
"""Characters up to which a text is encoded anew for each leg; only longer ones are remembered."""
MAX_GROWTH = 8
"""Bytes that one byte of a body may have when it is encoded anew: ``1E5`` becomes ``100000.0``."""
# Fields that only the decode leg needs: a prefill leg answers with one token that nobody reads, and two answers would
# hold the prompt twice. Some servers check them against max_tokens 1 instead of ignoring them.
_DECODE_ONLY_FIELDS = ("stream_options", "min_tokens", "n", "best_of")
_TANDEM_DECODE_ONLY_FIELDS = (*_DECODE_ONLY_FIELDS, "max_completion_tokens", "echo", "logprobs", "top_logprobs")
_VLLM_DECODE_ONLY_FIELDS = (*_DECODE_ONLY_FIELDS, "min_completion_tokens")

_LONG = (list, dict, array)

_PREFILL_ONLY_FIELDS = (TRANSFER_PARAMS_KEY, IMAGES_KEY)
"""What a decode leg does not get of the client's body: a decode node never sees an image."""


def encode(value: object) -> bytes:
    """``value``, whose keys are texts, as compact JSON; arrays are lists there."""
    try:
        encoded = orjson.dumps(value, default=_as_list)
    except orjson.JSONEncodeError:  # a whole number beyond 64 bits
        return _JSON.encode(value).encode()
    # It may stand for a number that is too large for a float, which only short bodies have: the node will refuse it.
    is_short = len(encoded) <= MAX_GROWTH * LONG_BYTES
    return _JSON.encode(value).encode() if is_short and b"null" in encoded else encoded


class BodyEncoder:
    """The bodies of one request's legs: a value that several of them have, the prompt above all, is encoded once. What
    it remembers is as long as the prompt."""

    def __init__(self) -> None:
        # By identity, which is a value's own for as long as it is held here.
        self._known: dict[int, tuple[object, bytes]] = {}

    def encode(self, leg: Mapping[str, Any]) -> bytes:
        """``leg`` as a JSON object. Its values must not change afterwards; ``orjson.Fragment``: JSON already."""
        fields: dict[str, Any] = {}
        for name, value in leg.items():
            if isinstance(value, _LONG) or (isinstance(value, str) and len(value) > SHORT_CHARS):
                value = orjson.Fragment(self._encode_once(value))
            elif isinstance(value, float) and not math.isfinite(value):
                value = orjson.Fragment(encode(value))
            fields[name] = value
        try:
            return orjson.dumps(fields)
        except orjson.JSONEncodeError:  # a whole number beyond 64 bits
            return orjson.dumps({name: _fragment(value) for name, value in fields.items()})

    def _encode_once(self, value: object) -> bytes:
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = (value, encode(value))
        return known[1]


def _fragment(value: object) -> orjson.Fragment:
    return value if isinstance(value, orjson.Fragment) else orjson.Fragment(encode(value))


def prefill_body(
    node: Node,
    body: Mapping[str, Any],
    prompt: Any | None,
    *,
    encoder: BodyEncoder,
    rendezvous_id: str | None = None,
    sources: Sequence[Mapping[str, Any]] = (),
) -> bytes:
    """The prefill leg's body for one prompt (``None``: the body's own, a chat), to be computed as ``rendezvous_id``.
    ``sources``: who may have part of it."""
    if node.is_vllm:
        return encoder.encode(_vllm_prefill_leg(body, prompt))
    leg = {key: value for key, value in body.items() if key not in _TANDEM_DECODE_ONLY_FIELDS}
    params = orjson.Fragment(orjson.dumps(prefill_leg_params(rendezvous_id)))
    leg |= {"stream": False, "max_tokens": 1, TRANSFER_PARAMS_KEY: params}
    if prompt is not None:
        leg["prompt"] = prompt
    if sources:
        leg[SOURCES_KEY] = list(sources)
    return encoder.encode(leg)


def decode_body(
    body: Mapping[str, Any],
    params: object,
    *,
    encoder: BodyEncoder,
    sources: Sequence[Mapping[str, Any]] = (),
    reports_state: bool = False,
    computes_images: bool = False,
) -> bytes:
    """The client's body with the handoff: one object, a list of objects, or None when no prefill leg was made.
    ``sources``: who may have part of the prompt. ``reports_state``: see ``common.wire.resume``. ``computes_images``:
    the leg is for a prefill node, which computes the prompt itself, its images included."""
    dropped = (TRANSFER_PARAMS_KEY,) if computes_images else _PREFILL_ONLY_FIELDS
    leg = {key: value for key, value in body.items() if key not in dropped}
    if params is not None:
        leg[TRANSFER_PARAMS_KEY] = params
    if sources:
        leg[SOURCES_KEY] = list(sources)
    if reports_state:
        leg[STREAM_STATE_KEY] = True
    return encoder.encode(leg)


def _vllm_prefill_leg(body: Mapping[str, Any], prompt: Any | None) -> dict[str, Any]:
    """The prefill leg's body for one prompt (``None``: the body's own, a chat)."""
    leg = {key: value for key, value in body.items() if key not in _VLLM_DECODE_ONLY_FIELDS}
    leg |= {"stream": False, "max_tokens": 1, TRANSFER_PARAMS_KEY: prefill_leg_params()}
    if leg.get("max_completion_tokens") is not None:
        leg["max_completion_tokens"] = 1
    if prompt is not None:
        leg["prompt"] = prompt
    return leg
