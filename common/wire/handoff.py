"""``kv_transfer_params``: which leg of a handoff a request is, and where a decode leg finds its prompt.

The prefill leg asks for a prompt to be computed and held. The decode leg says where it is: as a finished manifest
(``common.wire.manifest``), carried through any proxy, or as a *rendezvous*: the name under which a prefill leg computes
it at this very moment, to be followed with the long-poll pull (``common.wire.pull``).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequestError
from common.names import HOST, WORD
from common.wire.fields import Fields, invalid
from common.wire.manifest_reader import PREFIX, TRANSFER_PARAMS_KEY, ManifestReader

RENDEZVOUS_KEY = "tandem_rendezvous"


class TransferMode(enum.Enum):
    """Which leg of a handoff a request is: none, the prefill leg, or the decode leg."""

    NONE = "none"
    REMOTE_DECODE = "remote_decode"
    REMOTE_PREFILL = "remote_prefill"


def transfer_mode(params: Mapping[str, Any] | None) -> TransferMode:
    """The leg that ``kv_transfer_params`` asks for.

    Raises:
        InvalidRequestError: a flag is not a boolean, or both are true.
    """
    if params is None:
        return TransferMode.NONE
    fields = Fields(params, prefix=PREFIX)
    decode, prefill = fields.boolean("do_remote_decode"), fields.boolean("do_remote_prefill")
    if decode and prefill:
        raise InvalidRequestError(
            f"{TRANSFER_PARAMS_KEY}: do_remote_decode and do_remote_prefill cannot both be true",
            param=PREFIX + "do_remote_prefill",
        )
    if decode:
        return TransferMode.REMOTE_DECODE
    return TransferMode.REMOTE_PREFILL if prefill else TransferMode.NONE


def read_transfer_params(value: object) -> tuple[TransferMode, tuple[Mapping[str, Any], ...]]:
    """The field as a request has it: an object, or (from our proxy, for a list of prompts) one object per prompt.

    Raises:
        InvalidRequestError: neither, or entries of different legs.
    """
    if value is None:
        return TransferMode.NONE, ()
    given = value if isinstance(value, list | tuple) else [value]
    entries = [entry for entry in given if isinstance(entry, Mapping)]
    if not entries or len(entries) != len(given):
        invalid(TRANSFER_PARAMS_KEY, value, "an object, or a list with one object per prompt")
    modes = {transfer_mode(entry) for entry in entries}
    if len(modes) != 1:
        raise InvalidRequestError(
            f"{TRANSFER_PARAMS_KEY}: all entries must be of the same leg", param=TRANSFER_PARAMS_KEY
        )
    return modes.pop(), tuple(entries)


def prefill_leg_params(rendezvous_id: str | None = None) -> dict[str, Any]:
    """``kv_transfer_params`` of a prefill leg, as vLLM's example proxies write them, and the name of the prompt."""
    params: dict[str, Any] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    return params if rendezvous_id is None else {**params, RENDEZVOUS_KEY: rendezvous_id}


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A prompt that the node at ``host``:``port`` computes, now or in a moment, under ``rendezvous_id``."""

    host: str
    port: int
    rendezvous_id: str

    def to_params(self) -> dict[str, Any]:
        """``kv_transfer_params`` of the decode leg."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_host": self.host,
            "remote_port": self.port,
            RENDEZVOUS_KEY: self.rendezvous_id,
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Rendezvous | None:
        """The rendezvous of a decode leg; None when it carries a manifest. Raises InvalidRequestError naming the
        key."""
        if params.get(RENDEZVOUS_KEY) is None:
            return None
        reader = ManifestReader(params)
        return cls(
            host=reader.string("remote_host", HOST),
            port=reader.integer("remote_port", ge=1, le=65_535),
            rendezvous_id=reader.word(RENDEZVOUS_KEY),
        )


def rendezvous_id_of(params: object) -> str | None:
    """The rendezvous that a prefill leg's ``kv_transfer_params`` name, None without. Raises InvalidRequestError."""
    if not isinstance(params, Mapping) or params.get(RENDEZVOUS_KEY) is None:
        return None
    return Fields(params, prefix=PREFIX).string(RENDEZVOUS_KEY, pattern=WORD)
