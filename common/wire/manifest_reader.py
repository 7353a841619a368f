"""Reading a manifest key by key: ``Fields`` whose values are required, plus the shapes that only manifests have.

Every size is checked before anything is built from it, every error names the key.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

from common.errors import InvalidRequestError
from common.names import WORD
from common.wire.fields import Fields, check_int_list, invalid, is_int, shown

TRANSFER_PARAMS_KEY = "kv_transfer_params"
"""Field of a leg's body, and of a prefill leg's answer, that holds a manifest or where to get one."""
PREFIX = f"{TRANSFER_PARAMS_KEY}."
"""Before a key's name in errors."""

# Bounds on what a peer may claim, far above what any node has: they only keep a claim from costing memory or time.
MAX_U64 = 2**64 - 1
MAX_ID = 2**31 - 1
MAX_PROMPT_TOKENS = 2**24
MAX_BLOCK_SIZE = 2**16
MAX_GROUPS = 8
MAX_OUTPUT_ROW_BYTES = 2**20
MAX_LEASE_SECONDS = 86_400.0
MAX_SECONDS = 1e9
ROW_DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

# Bytes and digests in hex.
HEX = re.compile(r"(?:[0-9a-f]{2}){1,64}")
DIGEST = re.compile(r"[0-9a-f]{16,64}")
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,19}")


class ManifestReader:
    """``Fields`` whose values are required, plus the shapes that only a manifest has."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.fields = Fields(params, prefix=PREFIX)

    def _present(self, key: str) -> object:
        value = self.fields.raw(key)
        if value is None:
            raise InvalidRequestError(f"{PREFIX}{key} is required", param=PREFIX + key)
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
        return self.string(key, WORD)

    def u64(self, key: str) -> int:
        return check_u64(PREFIX + key, self._present(key))

    def token_ids(self, num_tokens: int, vocab_size: int | None) -> tuple[int, ...]:
        name = PREFIX + "prompt_token_ids"
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
        name = PREFIX + key
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
                    f"tandem_block_size, rounded up, without tandem_first_block), got {got}",
                    param=name,
                )
            if u64:
                groups.append(tuple(check_u64(name, item) for item in group))
            else:
                groups.append(check_int_list(name, group, le=MAX_ID))
        return tuple(groups)

    def output_row(self) -> tuple[bytes | None, str | None]:
        text, dtype = self.fields.string("tandem_output_row"), self.fields.string("tandem_output_row_dtype")
        if text is None:
            return None, None
        name = PREFIX + "tandem_output_row"
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

    def digests(self, key: str, block_ids: tuple[tuple[int, ...], ...]) -> tuple[tuple[str | None, ...], ...]:
        """Hex digests of the same shape as ``block_ids``, None where a block has none; () when the key is absent."""
        name = PREFIX + key
        value = self.fields.sequence(key)
        if value is None:
            return ()
        shapes = [len(group) if isinstance(group, list | tuple) else -1 for group in value]
        if shapes != [len(group) for group in block_ids]:
            invalid(name, value, "a list with one entry per block of remote_block_ids")
        return tuple(tuple(_check_digest(name, entry) for entry in group) for group in value)  # type: ignore[attr-defined]


def check_u64(name: str, value: object) -> int:
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


def _check_digest(name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or DIGEST.fullmatch(value) is None:
        invalid(name, value, f"a digest that matches {DIGEST.pattern}, or null")
    return value
