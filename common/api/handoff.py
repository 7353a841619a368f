"""``kv_transfer_params``: what a prefill node promises a decode node, carried through any proxy.

The unprefixed keys are those of vLLM's NIXL connector, so that proxies written for it work unchanged; ours are flat
keys that such a proxy copies unseen. Numbers that may exceed 2^53 (epoch, generations) travel as decimal strings,
because JSON readers between us may hold numbers as doubles.

Life cycle of a ``Manifest``: 1 a prefill node builds it from a lease and answers ``to_params()``, 2 a proxy copies it
into the decode leg, 3 the decode node reads it with ``from_params()``, which checks every size before anything is
allocated, 4 the node compares epoch and fingerprint with the peer it knows and pulls. A manifest is a claim by the
sender: nothing in it is trusted before the generations were read back.
"""

from __future__ import annotations

import base64
import binascii
import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.api.fields import Fields, check_int_list, invalid, is_int, shown
from common.errors import InvalidRequestError

FIELD = "kv_transfer_params"
_PREFIX = FIELD + "."

MAX_U64 = 2**64 - 1
MAX_ID = 2**31 - 1
MAX_PROMPT_TOKENS = 2**24
MAX_BLOCK_SIZE = 2**16
MAX_GROUPS = 8
MAX_OUTPUT_ROW_BYTES = 2**20
MAX_LEASE_SECONDS = 86_400.0
MAX_SECONDS = 1e9
ROW_DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

_WORD = re.compile(r"[A-Za-z0-9._:\-]{1,256}")
_HOST = re.compile(r"[A-Za-z0-9._:\-\[\]%]{1,253}")
_HEX = re.compile(r"(?:[0-9a-f]{2}){1,64}")
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,19}")


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
    fields = Fields(params, prefix=_PREFIX)
    decode, prefill = fields.boolean("do_remote_decode"), fields.boolean("do_remote_prefill")
    if decode and prefill:
        raise InvalidRequestError(
            f"{FIELD}: do_remote_decode and do_remote_prefill cannot both be true", param=_PREFIX + "do_remote_prefill"
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
        invalid(FIELD, value, "an object, or a list with one object per prompt")
    modes = {transfer_mode(entry) for entry in entries}
    if len(modes) != 1:
        raise InvalidRequestError(f"{FIELD}: all entries must be of the same leg", param=FIELD)
    return modes.pop(), tuple(entries)


def prefill_leg_params() -> dict[str, Any]:
    """``kv_transfer_params`` of a prefill leg, as vLLM's example proxies write them."""
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """What the prefill leg did, for the trace and ``usage``: ``cached_tokens`` were not computed by anyone."""

    node: str
    cached_tokens: int
    computed_tokens: int
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Manifest:
    """One finished prompt that a peer may read until the lease ends.

    ``block_ids`` and ``generations`` have one tuple per block group, each with ``ceil(num_tokens / block_size)``
    entries; no group for a model without attention. ``slot_id`` 0: no state slot (dense models). ``output_row`` is
    the hidden vector after the final norm of the prompt's last token, raw little-endian bytes of
    ``output_row_dtype``. ``epoch`` and generations are u64.
    """

    engine_id: str
    request_id: str
    host: str
    port: int
    num_tokens: int
    block_size: int
    block_ids: tuple[tuple[int, ...], ...]
    generations: tuple[tuple[int, ...], ...]
    epoch: int
    fingerprint: str
    lease_id: str
    lease_seconds: float
    prefix_key: bytes
    prompt_token_ids: tuple[int, ...]
    slot_id: int = 0
    slot_generation: int = 0
    output_row: bytes | None = None
    output_row_dtype: str | None = None
    prefill: PrefillReport | None = None
    tp_size: int = 1

    def to_params(self) -> dict[str, Any]:
        """The JSON object of the prefill answer and of the decode leg."""
        params: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_block_ids": [list(group) for group in self.block_ids],
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_num_tokens": self.num_tokens,
            "tp_size": self.tp_size,
            "final": True,
            "prompt_token_ids": list(self.prompt_token_ids),
            "tandem_block_size": self.block_size,
            "tandem_epoch": str(self.epoch),
            "tandem_fingerprint": self.fingerprint,
            "tandem_lease_id": self.lease_id,
            "tandem_lease_seconds": self.lease_seconds,
            "tandem_generations": [[str(value) for value in group] for group in self.generations],
            "tandem_slot_id": self.slot_id,
            "tandem_slot_generation": str(self.slot_generation),
            "tandem_prefix_key": self.prefix_key.hex(),
        }
        if self.output_row is not None:
            params["tandem_output_row"] = base64.b64encode(self.output_row).decode("ascii")
            params["tandem_output_row_dtype"] = self.output_row_dtype
        if self.prefill is not None:
            params["tandem_prefill"] = {
                "node": self.prefill.node,
                "cached_tokens": self.prefill.cached_tokens,
                "computed_tokens": self.prefill.computed_tokens,
                "seconds": {"queue": self.prefill.queue_seconds, "prefill": self.prefill.prefill_seconds},
            }
        return params

    @classmethod
    def from_params(
        cls,
        params: Mapping[str, Any],
        *,
        num_block_groups: int | None = None,
        has_state: bool | None = None,
        vocab_size: int | None = None,
    ) -> Manifest:
        """The checked manifest of a decode leg.

        Args:
            num_block_groups: block groups of this node's model; ``None`` accepts any number (a proxy does not know).
            has_state: whether this node's model has recurrent layers; ``None`` accepts both.
            vocab_size: bound of ``prompt_token_ids``.

        Raises:
            InvalidRequestError: a key is missing, malformed, out of bounds, or contradicts another; ``param`` names it.
        """
        reader = _Reader(params)
        if params.get("final", True) is not True:
            invalid(_PREFIX + "final", params.get("final"), "true")
        num_tokens = reader.integer("remote_num_tokens", ge=1, le=MAX_PROMPT_TOKENS)
        block_size = reader.integer("tandem_block_size", ge=1, le=MAX_BLOCK_SIZE)
        num_blocks = -(-num_tokens // block_size)
        token_ids = reader.token_ids(num_tokens, vocab_size)
        block_ids = reader.groups("remote_block_ids", num_block_groups, num_blocks)
        generations = reader.groups("tandem_generations", len(block_ids), num_blocks, u64=True)
        slot_id = reader.fields.integer("tandem_slot_id", ge=0, le=MAX_ID) or 0
        if has_state is not None and has_state != (slot_id > 0):
            wanted = "a slot id above 0: the model has states" if has_state else "0: the model has no states"
            invalid(_PREFIX + "tandem_slot_id", slot_id, wanted)
        row, row_dtype = reader.output_row()
        return cls(
            engine_id=reader.word("remote_engine_id"),
            request_id=reader.word("remote_request_id"),
            host=reader.string("remote_host", _HOST),
            port=reader.integer("remote_port", ge=1, le=65_535),
            num_tokens=num_tokens,
            block_size=block_size,
            block_ids=block_ids,
            generations=generations,
            epoch=reader.u64("tandem_epoch"),
            fingerprint=reader.string("tandem_fingerprint", _HEX),
            lease_id=reader.word("tandem_lease_id"),
            lease_seconds=reader.number("tandem_lease_seconds", le=MAX_LEASE_SECONDS),
            prefix_key=bytes.fromhex(reader.string("tandem_prefix_key", _HEX)),
            prompt_token_ids=token_ids,
            slot_id=slot_id,
            slot_generation=reader.u64("tandem_slot_generation") if slot_id else 0,
            output_row=row,
            output_row_dtype=row_dtype,
            prefill=reader.prefill(num_tokens),
            tp_size=reader.fields.integer("tp_size", ge=1, le=1024) or 1,
        )


class _Reader:
    """``Fields`` whose values are required, plus the shapes that only a manifest has."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.fields = Fields(params, prefix=_PREFIX)

    def _present(self, key: str) -> object:
        value = self.fields.raw(key)
        if value is None:
            raise InvalidRequestError(f"{_PREFIX}{key} is required", param=_PREFIX + key)
        return value

    def integer(self, key: str, *, ge: int, le: int) -> int:
        self._present(key)
        value = self.fields.integer(key, ge=ge, le=le)
        assert value is not None
        return value

    def number(self, key: str, *, le: float) -> float:
        self._present(key)
        value = self.fields.number(key, gt=0, le=le)
        assert value is not None
        return value

    def string(self, key: str, pattern: re.Pattern[str]) -> str:
        self._present(key)
        value = self.fields.string(key, pattern=pattern)
        assert value is not None
        return value

    def word(self, key: str) -> str:
        return self.string(key, _WORD)

    def u64(self, key: str) -> int:
        return _check_u64(_PREFIX + key, self._present(key))

    def token_ids(self, num_tokens: int, vocab_size: int | None) -> tuple[int, ...]:
        name = _PREFIX + "prompt_token_ids"
        limit = MAX_ID if vocab_size is None else vocab_size - 1
        token_ids = check_int_list(name, self._present("prompt_token_ids"), le=limit)
        if len(token_ids) != num_tokens:
            raise InvalidRequestError(
                f"{name} must have remote_num_tokens {num_tokens} entries, got {len(token_ids)}", param=name
            )
        return token_ids

    def groups(
        self, key: str, num_groups: int | None, num_blocks: int, *, u64: bool = False
    ) -> tuple[tuple[int, ...], ...]:
        """One tuple per block group, each of ``num_blocks`` entries."""
        name = _PREFIX + key
        value = self._present(key)
        if not isinstance(value, list | tuple) or len(value) > MAX_GROUPS:
            invalid(name, value, f"a list of at most {MAX_GROUPS} groups")
        if num_groups is not None and len(value) != num_groups:
            raise InvalidRequestError(f"{name} must have {num_groups} groups, got {len(value)}", param=name)
        groups = []
        for index, group in enumerate(value):
            if not isinstance(group, list | tuple) or len(group) != num_blocks:
                got = f"{len(group)} entries" if isinstance(group, list | tuple) else shown(group)
                raise InvalidRequestError(
                    f"{name}[{index}] must be a list of {num_blocks} entries (remote_num_tokens over "
                    f"tandem_block_size, rounded up), got {got}",
                    param=name,
                )
            if u64:
                groups.append(tuple(_check_u64(name, item) for item in group))
            else:
                groups.append(check_int_list(name, group, le=MAX_ID))
        return tuple(groups)

    def output_row(self) -> tuple[bytes | None, str | None]:
        text, dtype = self.fields.string("tandem_output_row"), self.fields.string("tandem_output_row_dtype")
        if text is None:
            return None, None
        name = _PREFIX + "tandem_output_row"
        item_bytes = ROW_DTYPE_BYTES.get(dtype or "")
        if item_bytes is None:
            invalid(name + "_dtype", dtype, f"one of {', '.join(ROW_DTYPE_BYTES)}")
        # 4 characters of base64 carry 3 bytes: bound the text before decoding it.
        if len(text) > MAX_OUTPUT_ROW_BYTES * 4 // 3 + 4:
            raise InvalidRequestError(
                f"{name} must be at most {MAX_OUTPUT_ROW_BYTES} bytes, got {len(text)} characters of base64", param=name
            )
        try:
            row = base64.b64decode(text.encode("ascii"), validate=True)
        except (binascii.Error, UnicodeEncodeError) as exc:
            raise InvalidRequestError(f"{name} must be base64, got {shown(text)}", param=name) from exc
        if not row or len(row) % item_bytes:
            raise InvalidRequestError(
                f"{name} must be a whole number of {dtype} values, got {len(row)} bytes", param=name
            )
        return row, dtype

    def prefill(self, num_tokens: int) -> PrefillReport | None:
        report = self.fields.mapping("tandem_prefill")
        if report is None:
            return None
        prefix = _PREFIX + "tandem_prefill."
        fields = Fields(report, prefix=prefix)
        seconds = Fields(fields.mapping("seconds") or {}, prefix=prefix + "seconds.")
        return PrefillReport(
            node=fields.string("node", max_chars=512) or "",
            cached_tokens=fields.integer("cached_tokens", ge=0, le=num_tokens) or 0,
            computed_tokens=fields.integer("computed_tokens", ge=0, le=num_tokens) or 0,
            queue_seconds=seconds.number("queue", ge=0, le=MAX_SECONDS) or 0.0,
            prefill_seconds=seconds.number("prefill", ge=0, le=MAX_SECONDS) or 0.0,
        )


def _check_u64(name: str, value: object) -> int:
    """A u64 as a JSON integer or as a decimal string."""
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        number = int(value)
    elif is_int(value):
        number = value  # type: ignore[assignment]
    else:
        number = -1
    if not 0 <= number <= MAX_U64:
        invalid(name, value, f"an unsigned 64-bit integer, as a decimal string (0 to {MAX_U64})")
    return number
