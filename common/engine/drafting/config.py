"""``--speculative-config``: who drafts, and how much; the names are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from common.engine.drafting.drafter import Drafter
from common.engine.drafting.prompt_lookup import PromptLookup
from common.engine.drafting.suffix import SuffixLookup
from common.errors import ConfigError

FLAG = "--speculative-config"
MTP = "mtp"
METHODS = ("ngram", "suffix", MTP)
_REFUSED = ("eagle", "eagle3", "medusa", "mlp_speculator", "draft_model")
_DEFAULT_TOKENS = {"ngram": 7, "suffix": 7, MTP: 3}
_BOUNDS = {"num_speculative_tokens": (1, 15), "prompt_lookup_min": (1, 32), "prompt_lookup_max": (1, 32)}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """
    Attributes:
        method: one of ``METHODS``.
        num_speculative_tokens: drafted tokens of a sequence in a step, at most; by default 7, and 3 of a model's head,
            which guesses the later ones from its own guesses.
        prompt_lookup_min, prompt_lookup_max: tokens that must agree, and that are compared (``ngram``).
    """

    method: str
    num_speculative_tokens: int = 0
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5

    @classmethod
    def from_json(cls, text: str) -> SpeculativeConfig | None:
        """None for an empty text: nothing is drafted. Raises ConfigError naming the flag, the key and the bound."""
        if not text:
            return None
        try:
            given = json.loads(text)
        except ValueError as exc:
            raise _error(f"must be JSON, got {text!r}: {exc}") from exc
        if not isinstance(given, dict):
            raise _error(f"must be a JSON object, got {text!r}")
        known = [each.name for each in fields(cls)]
        for key, value in given.items():
            if key not in known:
                raise _error(f"has no {key}, only {', '.join(known)}")
            _check(key, value)
        if "method" not in given:
            raise _error(f"needs a method: {' or '.join(METHODS)}")
        config = cls(**{"num_speculative_tokens": _DEFAULT_TOKENS[given["method"]], **given})
        if config.prompt_lookup_min > config.prompt_lookup_max:
            raise _error(
                f"prompt_lookup_min {config.prompt_lookup_min} is above prompt_lookup_max {config.prompt_lookup_max}"
            )
        return config

    def create_drafter(self) -> Callable[[], Drafter] | None:
        """Makes a sequence's drafter. None: the model's own head drafts, for all sequences at once."""
        if self.method == MTP:
            return None
        if self.method == "suffix":
            return lambda: SuffixLookup(self.prompt_lookup_min)
        return lambda: PromptLookup(self.prompt_lookup_min, self.prompt_lookup_max)


def _check(key: str, value: Any) -> None:
    if key == "method":
        if value in _REFUSED:
            raise _error(f"method {value} is not built; available: {', '.join(METHODS)}")
        if value not in METHODS:
            raise _error(f"method must be {' or '.join(METHODS)}, got {value!r}")
        return
    low, high = _BOUNDS[key]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _error(f"{key} must be a whole number from {low} to {high}, got {value!r}")


def _error(problem: str) -> ConfigError:
    return ConfigError(f"{FLAG} {problem}", param=FLAG)
