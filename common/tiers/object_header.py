"""What an object in a tier says of itself: the first ``HEADER_BYTES`` of its file, under a keyed digest.

An object is an *extent* (consecutive blocks of one attention group), a *tail* (the partly filled blocks at a
checkpoint, one per group) or a *state* (a slot, then the output row if there is one). The header's digest covers the
header, in which the digest of the payload stands: a header can be trusted before the payload is read.
"""

from __future__ import annotations

import enum
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

MAGIC = b"TANDEMKV"
VERSION = 1
HEADER_BYTES = 4096
DIGEST_BYTES = 32
KEY_BYTES = 32
_FIXED = struct.Struct("<8sHBB32s32s32s32sIIIIIIIQ16s")
_NUM_BYTES_AT_END = DIGEST_BYTES
_ID_BYTES, _ROW_BYTES = 4, 32
_ROW = 2**32 - 1
"""Instead of a token's id: the number of an image's row follows (``PrefixKeys.content``)."""
MAX_TAIL_TOKENS = (HEADER_BYTES - _FIXED.size - _NUM_BYTES_AT_END) // _ID_BYTES
"""Tokens of text that a header has room for: blocks of up to that many tokens and one can be kept. Rows of images take
nine times as much: ``has_room``."""


class ObjectKind(enum.IntEnum):
    EXTENT = 1
    TAIL = 2
    STATE = 3


class BadHeaderError(Exception):
    """``reason``: short, version, digest (not by who has this secret, or damaged) or fields."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """
    Attributes:
        fingerprint: 32 bytes that bind model, dtype, layout and block size.
        group_id: attention group of an extent; 0 else.
        key: of the prefix that ends with the object's last token.
        parent_key: of the prefix before an extent's first block; of the last block boundary for tails and states.
        position: tokens of the prefix that ``key`` names.
        start, num_blocks: of an extent: index of its first block in a block table, and how many.
        history: of a state: what the eviction policy knew (``PrefixKeys.history``).
        origin: of a state: why it was kept, at most 16 ASCII characters.
        tail_tokens: of a state: from the last block boundary on (``PrefixKeys.content``).
        row_bytes: of a state: length of the output row at the payload's end.
        payload_bytes: length of everything behind the header.
    """

    kind: ObjectKind
    fingerprint: bytes
    group_id: int
    key: bytes
    parent_key: bytes
    position: int
    payload_bytes: int
    start: int = 0
    num_blocks: int = 0
    history: tuple[int, int] = (0, 0)
    origin: str = ""
    tail_tokens: tuple[int, ...] = ()
    row_bytes: int = 0

    def encode(self, secret: bytes, payload_digest: bytes) -> bytes:
        fixed = _FIXED.pack(
            MAGIC,
            VERSION,
            self.kind,
            self.group_id,
            self.fingerprint,
            self.key,
            self.parent_key,
            payload_digest,
            self.position,
            self.start,
            self.num_blocks,
            *self.history,
            self.row_bytes,
            len(self.tail_tokens),
            self.payload_bytes,
            self.origin.encode("ascii"),
        )
        body = (fixed + _pack(self.tail_tokens)).ljust(HEADER_BYTES - DIGEST_BYTES, b"\0")
        assert len(body) == HEADER_BYTES - DIGEST_BYTES, "a tail is longer than a header"
        return body + hmac.digest(secret, body, "sha256")


def decode_header(raw: bytes, secret: bytes) -> tuple[ObjectHeader, bytes]:
    """The header and the payload's digest. Raises BadHeaderError."""
    if len(raw) < HEADER_BYTES:
        raise BadHeaderError("short")
    body, digest = raw[: HEADER_BYTES - DIGEST_BYTES], raw[HEADER_BYTES - DIGEST_BYTES : HEADER_BYTES]
    if not hmac.compare_digest(hmac.digest(secret, body, "sha256"), digest):
        raise BadHeaderError("digest")
    fields = _FIXED.unpack_from(body)
    (magic, version, kind, group_id, fingerprint, key, parent_key, payload_digest) = fields[:8]
    (position, start, num_blocks, known, depth, row_bytes, num_tail, payload_bytes, origin) = fields[8:]
    if (magic, version) != (MAGIC, VERSION):
        raise BadHeaderError("version")
    if kind not in tuple(ObjectKind) or num_tail > MAX_TAIL_TOKENS:
        raise BadHeaderError("fields")
    header = ObjectHeader(
        kind=ObjectKind(kind),
        fingerprint=fingerprint,
        group_id=group_id,
        key=key,
        parent_key=parent_key,
        position=position,
        payload_bytes=payload_bytes,
        start=start,
        num_blocks=num_blocks,
        history=(known, depth),
        origin=origin.rstrip(b"\0").decode("ascii"),
        tail_tokens=_unpack(body[_FIXED.size :], num_tail),
        row_bytes=row_bytes,
    )
    return header, payload_digest


def file_bytes(header: ObjectHeader) -> int:
    return HEADER_BYTES + header.payload_bytes


def has_room(tail_tokens: Sequence[int]) -> bool:
    """Whether a state's header can say that tail."""
    return len(_pack(tail_tokens)) <= MAX_TAIL_TOKENS * _ID_BYTES


def _pack(tokens: Sequence[int]) -> bytes:
    return b"".join(
        token.to_bytes(_ID_BYTES, "little")
        if token < _ROW
        else _ROW.to_bytes(_ID_BYTES, "little") + token.to_bytes(_ROW_BYTES, "little")
        for token in tokens
    )


def _unpack(raw: bytes, num_tokens: int) -> tuple[int, ...]:
    tokens, at = [], 0
    for _ in range(num_tokens):
        token = int.from_bytes(raw[at : at + _ID_BYTES], "little")
        at += _ID_BYTES
        if token == _ROW:
            token = int.from_bytes(raw[at : at + _ROW_BYTES], "little")
            at += _ROW_BYTES
        tokens.append(token)
    if at > len(raw):
        raise BadHeaderError("fields")
    return tuple(tokens)


def object_name(secret: bytes, header: ObjectHeader) -> str:
    """64 hex digits that nobody without the secret can link to a prefix: a folder tells nobody what exists. A state has
    one name with its row and another one without, so that neither takes the other's place."""
    fields = b"%d %d %d %d " % (header.kind, header.group_id, header.start, header.num_blocks)
    end = b" without row" if header.kind is ObjectKind.STATE and not header.row_bytes else b""
    return hmac.new(secret, b"name " + fields + header.fingerprint + header.key + end, sha256).hexdigest()


def former_name(secret: bytes, header: ObjectHeader) -> str:
    """What a state without its row was named before it had a name of its own."""
    return object_name(secret, replace(header, row_bytes=1))
