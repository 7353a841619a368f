"""How much a grammar may take: ``--structured-outputs-config``, and the limits that llguidance keeps itself."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import orjson
from llguidance import LLParserLimits

from common.errors import ConfigError

MAX_LEXER_STATES = 20_000
"""Of one sequence, about 4 kB each: jsonschemabench's schemas have up to 3,000 in an answer."""
STEP_LEXER_FUEL = 200_000
"""For one mask: about 15 ms. What needs more is an error of its request."""
STEP_MAX_ITEMS = 50_000
"""Parser items of one mask: about 3 ms."""
MAX_ITEMS_IN_ROW = 2000
INITIAL_LEXER_FUEL = 1_000_000
MAX_GRAMMAR_SIZE = 100_000
"""Symbols of all rules."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """
    Attributes:
        backend: there is one; ``auto`` means it too.
        max_chars: of one grammar's text.
        max_compile_seconds: CPU seconds of compiling one.
        wait_seconds: how long a request waits for its grammar to be checked or compiled, in line with others.
    """

    backend: str = "auto"
    max_chars: int = 262_144
    max_compile_seconds: float = 1.0
    wait_seconds: float = 30.0

    @classmethod
    def from_json(cls, text: str) -> GrammarLimits:
        """Raises ConfigError naming the flag, the key and the bound."""
        try:
            given = orjson.loads(text)
        except orjson.JSONDecodeError as exc:
            raise _config_error(f"must be JSON, got {text!r}: {exc}") from exc
        if not isinstance(given, dict):
            raise _config_error(f"must be a JSON object, got {text!r}")
        known = [each.name for each in fields(cls)]
        for key, value in given.items():
            if key not in known:
                raise _config_error(f"has no {key}, only {', '.join(known)}")
            _check(key, value)
        return cls(**given)


def _check(key: str, value: Any) -> None:
    if key == "backend":
        is_good, expected = value in ("auto", "guidance"), "auto or guidance"
    else:
        kind: Any = int if key == "max_chars" else int | float
        is_good = isinstance(value, kind) and not isinstance(value, bool) and 0 < value <= 1_000_000
        expected = "a number above 0 and at most 1000000"
    if not is_good:
        raise _config_error(f"{key} must be {expected}, got {value!r}")


def _config_error(problem: str) -> ConfigError:
    return ConfigError(f"--structured-outputs-config {problem}", param="--structured-outputs-config")


def parser_limits() -> LLParserLimits:
    """The same wherever a grammar is tried or used."""
    return LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )
