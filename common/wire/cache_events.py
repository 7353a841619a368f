"""What became findable in a node's cache and what no longer is, as it travels: ``GET /internal/v1/cache/events``.

The reader says after which event it wants to go on (``since``, ``epoch``); the node waits a moment for news (a long
poll) and answers what came after, or everything it has when it cannot go on there. Keys travel truncated to
TRUNCATED_KEY_BYTES: who reads them only guesses where a prefix is, and the node that is asked for it compares whole
keys. Two prefixes in 2**64 that share a truncated key cost a wrong guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequestError
from common.wire.fields import Fields
from common.wire.routes import CACHE_EVENTS_ROUTE

TRUNCATED_KEY_BYTES = 8
WAIT_S = 1.0
"""Longest silence of a node that has no news."""

MAX_KEYS = 4096
"""Keys after which an answer ends; the rest comes with the next one. A snapshot comes whole."""

STORED, REMOVED = "+", "-"
CHECKPOINT = "state"
"""The group of checkpoints in memory."""
TIER_PREFIX = "tier_"
"""Before a tier's kind: the group of checkpoints that are there with everything that resuming reads. All others are
attention groups."""


def truncate_key(key: bytes) -> bytes:
    """A cache key as it travels."""
    return key[:TRUNCATED_KEY_BYTES]


def is_of_checkpoints(group: str) -> bool:
    return group == CHECKPOINT or group.startswith(TIER_PREFIX)


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Blocks of one group, or one checkpoint, stored or removed. All keys are truncated.

    Attributes:
        is_stored: else removed.
        group: label of an attention group, CHECKPOINT, or TIER_PREFIX with a kind.
        keys: the prefixes concerned; one for a checkpoint.
        boundary, position, has_row: of a stored checkpoint: key of the block boundary it hangs on, its exact token
            position, and whether a prompt that ends there needs nothing computed.
    """

    is_stored: bool
    group: str
    keys: tuple[bytes, ...]
    boundary: bytes = b""
    position: int = 0
    has_row: bool = False

    def to_json(self) -> list[Any]:
        row: list[Any] = [STORED if self.is_stored else REMOVED, self.group, b"".join(self.keys).hex()]
        if self.is_stored and is_of_checkpoints(self.group):
            row += [self.boundary.hex(), self.position, int(self.has_row)]
        return row

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> CacheChange:
        kind, group, text = row[:3]
        if kind not in (STORED, REMOVED) or not isinstance(group, str):
            raise ValueError(f"{kind!r} of {group!r} is no change")
        data = bytes.fromhex(text)
        if not data or len(data) % TRUNCATED_KEY_BYTES:
            raise ValueError(f"{len(data)} bytes are no keys of {TRUNCATED_KEY_BYTES}")
        keys = tuple(data[start : start + TRUNCATED_KEY_BYTES] for start in range(0, len(data), TRUNCATED_KEY_BYTES))
        if kind == STORED and is_of_checkpoints(group):
            boundary, position, has_row = row[3:6]
            return cls(True, group, keys[:1], bytes.fromhex(boundary), int(position), bool(has_row))
        return cls(kind == STORED, group, keys)


@dataclass(frozen=True, slots=True)
class CacheNews:
    """One answer of the route.

    Attributes:
        epoch: the node's life; its numbers begin anew with each.
        last: number of the last event that is in here.
        is_snapshot: these changes are everything there is: forget what was known.
        block_size: tokens of a block.
        groups: labels of the model's attention groups.
        has_state: the model goes on from checkpoints only.
    """

    epoch: str
    last: int
    is_snapshot: bool
    block_size: int
    groups: tuple[str, ...]
    has_state: bool
    changes: tuple[CacheChange, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "last": self.last,
            "snapshot": self.is_snapshot,
            "block_size": self.block_size,
            "groups": self.groups,
            "has_state": self.has_state,
            "changes": [change.to_json() for change in self.changes],
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> CacheNews:
        """Raises ValueError for a body that is no such answer."""
        try:
            return cls._read(body)
        except (InvalidRequestError, TypeError, AttributeError) as exc:
            raise ValueError(f"{CACHE_EVENTS_ROUTE} answers what cannot be read: {exc}") from exc

    @classmethod
    def _read(cls, body: Mapping[str, Any]) -> CacheNews:
        fields = Fields(body)
        epoch, last = fields.string("epoch"), fields.integer("last", ge=0)
        block_size = fields.integer("block_size", ge=1)
        if epoch is None or last is None or block_size is None:
            raise ValueError("epoch, last and block_size are required")
        return cls(
            epoch=epoch,
            last=last,
            is_snapshot=fields.boolean("snapshot"),
            block_size=block_size,
            groups=tuple(str(label) for label in fields.sequence("groups") or ()),
            has_state=fields.boolean("has_state"),
            changes=tuple(map(CacheChange.from_json, body.get("changes") or ())),
        )
