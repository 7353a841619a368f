"""Reads a request trace: JSON lines, in either of two forms.

``{"timestamp", "input_length", "output_length", "hash_ids"}`` has one id per 512 tokens; equal ids are equal content,
whatever the numbers are (hashes, too). ``{"timestamp", "prompt_token_ids", "output_token_ids"}`` has the tokens. A
hash-id trace has no finer positions: its last full 512-token boundary stands for the end of the last message and is
given to the save policy; outputs are unique.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError

TOKENS_PER_HASH_ID = 512
"""As the traces of this form have it."""
MAX_TOKEN_ID = (1 << 32) - 1
"""Keys hash token ids as 32-bit numbers."""
MAX_LENGTH = 1 << 24
"""Tokens of one prompt or output: beyond any context, so a larger number is a mistake and not a long replay."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """``boundary``: a semantic position before the prompt's end, worth a state; 0 when the trace tells none.
    ``time_s``: when it came, from the trace's start on; 0 when the trace does not tell."""

    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    boundary: int = 0
    time_s: float = 0.0


def read_trace(trace_path: Path, limit: int | None = None) -> Iterator[TraceRequest]:
    """The first ``limit`` requests; empty lines are none. Raises ConfigError naming the line that cannot be used, and
    where there is no request at all."""
    reader = _LineReader()
    num_requests = 0
    try:
        with trace_path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if limit is not None and num_requests >= limit:
                    return
                if not line.strip():
                    continue
                try:
                    request = reader.read(line)
                except (ValueError, RecursionError) as exc:
                    raise ConfigError(f"--trace {trace_path} line {number}: {exc}", param="--trace") from exc
                num_requests += 1
                yield request
    except OSError as exc:
        raise ConfigError(f"--trace {trace_path}: {exc.strerror}", param="--trace") from exc
    if not num_requests:
        raise ConfigError(f"--trace {trace_path} holds no requests", param="--trace")


class _LineReader:
    """Made-up token ids for hash ids, which count up from 0, and for outputs, which count down from the largest."""

    def __init__(self) -> None:
        self._number_of: dict[int, int] = {}
        self._next_unique = MAX_TOKEN_ID

    def read(self, raw: bytes) -> TraceRequest:
        """Raises ValueError saying what is wrong with the line."""
        line = json.loads(raw)
        if not isinstance(line, dict):
            raise ValueError(f"not a JSON object, got {type(line).__name__}")
        if "prompt_token_ids" in line:
            prompt = _integers(line, "prompt_token_ids", 0, MAX_TOKEN_ID)
            output = _integers(line, "output_token_ids", 0, MAX_TOKEN_ID) if "output_token_ids" in line else ()
            return TraceRequest(prompt, output, time_s=_time_s(line))
        return self._from_hashes(line)

    def _from_hashes(self, line: dict[str, Any]) -> TraceRequest:
        num_tokens, num_output = _length(line, "input_length"), _length(line, "output_length")
        hash_ids = _integers(line, "hash_ids")
        if len(hash_ids) * TOKENS_PER_HASH_ID < num_tokens:
            raise ValueError(f"{len(hash_ids)} hash_ids are too few for input_length {num_tokens}")
        prompt: list[int] = []
        for hash_id in hash_ids:
            start = self._number_of.setdefault(hash_id, len(self._number_of)) * TOKENS_PER_HASH_ID
            prompt.extend(range(start, start + TOKENS_PER_HASH_ID))
        after = self._next_unique - num_output
        if after < len(self._number_of) * TOKENS_PER_HASH_ID:
            raise ValueError(f"more than {MAX_TOKEN_ID} distinct tokens up to here")
        output, self._next_unique = range(self._next_unique, after, -1), after
        boundary = num_tokens // TOKENS_PER_HASH_ID * TOKENS_PER_HASH_ID
        return TraceRequest(prompt[:num_tokens], output, boundary, _time_s(line))


def _time_s(line: dict[str, Any]) -> float:
    value = line.get("timestamp", 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"timestamp must be a number of milliseconds from 0 on, got {value!r}")
    return value / 1000


def _length(line: dict[str, Any], name: str) -> int:
    value = _required(line, name)
    if type(value) is not int or not 0 <= value <= MAX_LENGTH:
        raise ValueError(f"{name} must be an integer between 0 and {MAX_LENGTH}, got {value!r}")
    return value


def _integers(line: dict[str, Any], name: str, least: int | None = None, most: int | None = None) -> list[int]:
    value = _required(line, name)
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        raise ValueError(f"{name} must be a list of integers")
    if value and least is not None and most is not None and not least <= min(value) <= max(value) <= most:
        raise ValueError(f"{name} must be integers between {least} and {most}, got {min(value)} to {max(value)}")
    return value


def _required(line: dict[str, Any], name: str) -> object:
    if name not in line:
        raise ValueError(f"{name} is required")
    return line[name]
