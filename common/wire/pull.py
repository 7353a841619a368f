"""What one node asks another about prompts.

``POST /internal/v1/pull``: "what of this prompt can I read from you?". Two forms. *Rendezvous*: follow a prompt that is
being computed under an agreed name; a long poll that answers as soon as it is begun (with a part of no tokens), then
as soon as more than ``after`` tokens are finished, and leaves out the blocks of the first ``have``. *Content*: the
longest prefix of these tokens that happens to be there. Both are answered with a manifest: a final one, under a lease,
or a partial one without.

``POST /internal/v1/manifests/check``: "is this manifest, which a proxy brought me, as you made it?".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from common.images.span import ImageSpan
from common.names import WORD
from common.wire.fields import Fields, invalid
from common.wire.image_spans import read_spans, spans_to_json
from common.wire.manifest import ANY_SHAPE, Manifest, ManifestShape, PartialManifest
from common.wire.manifest_reader import DIGEST, HEX, MAX_PROMPT_TOKENS

MAX_WAIT_SECONDS = 10.0
"""Seconds after which a long poll is answered although there is nothing new."""
MAX_SALT_CHARS = 4096
"""Characters of a ``cache_salt``; clients may send 1024."""


@dataclass(frozen=True, slots=True)
class RendezvousQuery:
    """``after``: tokens that the reader knows of; ``wait_seconds``: how long it waits for more. ``have``: tokens whose
    blocks an answer may leave out, since an earlier one named them; 0 for a reader that starts anew, or is of a version
    that does not put answers together."""

    id: str
    after: int
    wait_seconds: float
    have: int = 0

    def to_body(self) -> dict[str, Any]:
        return {"id": self.id, "after": self.after, "wait_seconds": self.wait_seconds, "have": self.have}


@dataclass(frozen=True, slots=True)
class ContentQuery:
    """``have``: tokens that the reader has itself; ``prefix_key``: its key of them. ``id`` names the lease."""

    id: str
    prompt_token_ids: tuple[int, ...]
    cache_salt: str | None
    fingerprint: str
    prefix_key: bytes
    have: int
    images: tuple[ImageSpan, ...] = ()

    def to_body(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "prompt_token_ids": list(self.prompt_token_ids),
            **({"images": spans_to_json(self.images)} if self.images else {}),
            "cache_salt": self.cache_salt,
            "fingerprint": self.fingerprint,
            "prefix_key": self.prefix_key.hex(),
            "have": self.have,
        }

    def to_json(self) -> bytes:
        """``to_body`` as JSON. Of a long prompt not on an event loop: a million tokens take 100 ms."""
        return orjson.dumps(self.to_body())


def with_id(content: bytes, query_id: str) -> bytes:
    """A content query's JSON under another ``id``: made once, it is for every holder that is asked."""
    return b"".join((b'{"id":', orjson.dumps(query_id), memoryview(content)[content.index(b",") :]))


def parse_query(body: Mapping[str, Any], *, vocab_size: int) -> RendezvousQuery | ContentQuery:
    """The checked body; the content form is the one that brings a prompt.

    Raises:
        InvalidRequestError: a field is missing, malformed or out of bounds; ``param`` names it.
    """
    fields = Fields(body)
    query_id = fields.required_string("id", pattern=WORD)
    if body.get("prompt_token_ids") is None:
        wait_seconds = fields.number("wait_seconds", ge=0, le=MAX_WAIT_SECONDS)
        return RendezvousQuery(
            id=query_id,
            after=fields.integer("after", ge=0, le=MAX_PROMPT_TOKENS) or 0,
            wait_seconds=MAX_WAIT_SECONDS if wait_seconds is None else wait_seconds,
            have=fields.integer("have", ge=0, le=MAX_PROMPT_TOKENS) or 0,
        )
    token_ids = fields.int_list("prompt_token_ids", le=vocab_size - 1) or ()
    if not 0 < len(token_ids) <= MAX_PROMPT_TOKENS:
        invalid("prompt_token_ids", token_ids, f"a list of 1 to {MAX_PROMPT_TOKENS} token ids")
    return ContentQuery(
        id=query_id,
        prompt_token_ids=token_ids,
        images=read_spans(fields, "images", len(token_ids)),
        cache_salt=fields.string("cache_salt", max_chars=MAX_SALT_CHARS),
        fingerprint=fields.required_string("fingerprint", pattern=HEX),
        prefix_key=bytes.fromhex(fields.required_string("prefix_key", pattern=HEX)),
        have=fields.integer("have", ge=0, le=MAX_PROMPT_TOKENS) or 0,
    )


@dataclass(frozen=True, slots=True)
class ManifestCheck:
    """Digest and proof of a manifest (``Manifest.digest``)."""

    digest: str
    proof: str

    def to_body(self) -> dict[str, Any]:
        return {"digest": self.digest, "proof": self.proof}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> ManifestCheck:
        """Raises InvalidRequestError naming the field."""
        fields = Fields(body)
        return cls(*(fields.required_string(key, pattern=DIGEST) for key in ("digest", "proof")))


def check_answer(is_mine: bool) -> dict[str, Any]:
    """The answer to a ``ManifestCheck``."""
    return {"is_mine": is_mine}


def read_check_answer(answer: Mapping[str, Any]) -> bool:
    return answer.get("is_mine") is True


def miss_answer() -> dict[str, Any]:
    """The answer to a content query that found nothing worth reading."""
    return {"final": True, "remote_num_tokens": 0}


def nothing_new_answer(after: int) -> dict[str, Any]:
    """The answer to a rendezvous query whose wait is over."""
    return {"final": False, "remote_num_tokens": after}


def read_answer(
    params: Mapping[str, Any], *, after: int = 0, shape: ManifestShape = ANY_SHAPE
) -> Manifest | PartialManifest | None:
    """What a holder answered to a query; None: nothing (new).

    Raises:
        InvalidRequestError: not a manifest.
    """
    num_tokens = params.get("remote_num_tokens")
    if params.get("final") is False:
        is_new = num_tokens != after or (not after and "remote_block_ids" in params)
        return None if not is_new else PartialManifest.from_params(params, shape)
    if num_tokens == 0:
        return None
    return Manifest.from_params(params, shape, is_carried=False)
