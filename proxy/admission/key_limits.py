"""What one API key may use: requests at once, requests a minute, tokens a minute, and the best priority.

The file is JSON: ``{"default": LIMITS, "keys": {KEY: LIMITS}}`` with ``LIMITS = {"max_concurrency": N,
"requests_per_minute": N, "tokens_per_minute": N, "best_priority": N}``; a limit that is left out does not exist, but
for ``best_priority``, which is 0 then: no tenant comes before another one, or takes its place in the queue, unless the
operator says so. ``KEY`` is a key of ``--api-key-file`` or ``sha256:HEX`` of one. ``default`` holds for each key that
is not named, for each by itself, and for all clients together when there are no keys (who may ask for any priority, if
it says nothing). Rates are token buckets that hold one minute: a key that was quiet may use a minute's worth at once.
Keys never appear in messages.

A request counts as its answers (``n`` for each prompt), one that has none (it tokenises) as one. Its tokens are charged
twice: at admission the most that it may use, at its end what it did use (``Charge.settle``). What is over by then is a
debt that later requests wait for.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from common.errors import ConfigError, InvalidRequestError, RequestDroppedError
from proxy.admission.request import AdmissionRequest

OPTION = "--api-key-limits-file"
MAX_LIMIT = 10**12
"""Larger limits are taken for mistakes."""
BEST_PRIORITY = 0
"""Of a key of which the file does not say: what requests have that do not ask for any."""
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no such limit. ``best_priority``: the lowest number that is allowed."""

    max_concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    best_priority: int | None = None


class Bucket:
    """A token bucket that holds and refills ``per_minute``. ``None``: endless. Below nothing it is a debt."""

    def __init__(self, per_minute: int | None, now_s: float) -> None:
        self._size = per_minute
        self._left = float(per_minute or 0)
        self._refilled_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until ``amount`` is there; 0: now. Takes nothing."""
        if self._size is None:
            return 0.0
        rate = self._size / 60
        self._left = min(float(self._size), self._left + (now_s - self._refilled_s) * rate)
        self._refilled_s = now_s
        return max(0.0, (amount - self._left) / rate)

    def take(self, amount: float) -> None:
        """``amount``, there or not; negative gives back."""
        if self._size is not None:
            self._left = min(float(self._size), self._left - amount)


@dataclass(slots=True)
class _Use:
    limits: Limits
    requests: Bucket
    tokens: Bucket
    num_open: int = 0


class Charge:
    """What a request was charged: ``settle`` or ``give_back``, once. As ``with``: the request is in flight for as long
    as the block runs."""

    __slots__ = ("_has_begun", "_is_settled", "_num_answers", "_num_tokens", "_use")

    def __init__(self, use: _Use, num_answers: int, num_tokens: int) -> None:
        self._use = use
        self._num_answers = num_answers
        self._num_tokens = num_tokens
        self._is_settled = self._has_begun = False

    def __enter__(self) -> Charge:
        self._use.num_open += self._num_answers
        return self

    def __exit__(self, *error: object) -> None:
        self._use.num_open -= self._num_answers

    def settle(self, num_tokens: int) -> None:
        """The request has ended and used so many tokens."""
        if not self._is_settled:
            self._use.tokens.take(num_tokens - self._num_tokens)
            self._is_settled = True

    def begin(self) -> None:
        """Something is spent on the request, whatever comes of it: it stays one of its minute."""
        self._has_begun = True

    def give_back(self) -> None:
        """The request came to nothing."""
        if not self._is_settled and not self._has_begun:
            self._use.requests.take(-self._num_answers)
        self.settle(0)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """All keys' limits and what they use. A key is known by the hex digest that ``Gate`` leaves."""

    default: Limits = Limits()
    by_key: Mapping[str, Limits] = field(default_factory=dict)
    _uses: dict[str | None, _Use] = field(default_factory=dict)

    def hold(self, request: AdmissionRequest) -> Charge:
        """Charge one request, which counts for as long as the charge's block runs. The caller has authenticated its
        key, so that there are only so many.

        Raises:
            RequestDroppedError: over a limit now.
            InvalidRequestError: over a limit by itself: it can never be served.
        """
        use = self._use(request.key)
        return self._charge(use, request.num_answers, _check_alone(request, use.limits))

    def hold_unanswered(self, key: str | None) -> Charge:
        """As ``hold``, for a request that generates nothing.

        Raises:
            RequestDroppedError: over a limit now.
        """
        return self._charge(self._use(key), 1, 0)

    def _charge(self, use: _Use, num_answers: int, num_tokens: int) -> Charge:
        limits = use.limits
        if limits.max_concurrency is not None and use.num_open + num_answers > limits.max_concurrency:
            raise _dropped(
                f"{use.num_open} answers of this API key are in flight, this request is for {num_answers}, its "
                f"max_concurrency is {limits.max_concurrency}",
                "rejected-concurrency",
                1.0,
            )
        now_s = time.monotonic()
        waits = ((use.requests, num_answers, "requests"), (use.tokens, num_tokens, "tokens"))
        for bucket, amount, name in waits:
            if amount and (wait_s := bucket.wait_s(amount, now_s)):
                limit = limits.requests_per_minute if name == "requests" else limits.tokens_per_minute
                text = (
                    f"this API key has used its {name}_per_minute of {limit}; {amount} will be there in {wait_s:.1f} s"
                )
                raise _dropped(text, "rejected-rate-limit", wait_s)
        for bucket, amount, _ in waits:
            bucket.take(amount)
        return Charge(use, num_answers, num_tokens)

    def _use(self, key: str | None) -> _Use:
        use = self._uses.get(key)
        if use is None:
            limits = self.default if key is None else self.by_key.get(key, self.default)
            now_s = time.monotonic()
            requests, tokens = Bucket(limits.requests_per_minute, now_s), Bucket(limits.tokens_per_minute, now_s)
            use = self._uses[key] = _Use(limits, requests, tokens)
        return use


def _check_alone(request: AdmissionRequest, limits: Limits) -> int:
    """The tokens to charge. Raises InvalidRequestError for what the key may never ask for."""
    best = limits.best_priority
    if best is None and request.key is not None:
        best = BEST_PRIORITY
    if best is not None and request.priority < best:
        raise InvalidRequestError(
            f"priority must be at least {best} for this API key (its best_priority), got {request.priority}",
            param="priority",
            code="priority_not_allowed",
        )
    for name in ("max_concurrency", "requests_per_minute"):
        limit = getattr(limits, name)
        if limit is not None and request.num_answers > limit:
            raise InvalidRequestError(
                f"the request is for {request.num_answers} answers (n for each prompt), the {name} of this API key is "
                f"{limit}",
                param="n",
                code="over_request_limit",
            )
    limit = limits.tokens_per_minute
    if limit is None or request.num_tokens <= limit:
        return request.num_tokens
    if request.is_open_ended and request.num_prompt_tokens <= limit:
        return limit  # what it uses beyond is a debt
    raise InvalidRequestError(
        f"the request may use {request.num_tokens} tokens (its prompt, and {request.max_tokens_field} for each "
        f"choice), the tokens_per_minute of this API key are {limit}",
        param=request.max_tokens_field,
        code="over_token_limit",
    )


def read_key_limits(path: str, api_keys: Collection[str]) -> KeyLimits:
    """The limits of a file. Raises ConfigError naming the file and the entry, never the key."""
    try:
        with open(path, encoding="utf-8") as file:
            body = json.load(file)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else f"not JSON: {exc}"
        raise _bad(path, str(reason)) from exc
    if not isinstance(body, dict) or not isinstance(body.get("keys", {}), dict):
        raise _bad(path, 'must be {"default": LIMITS, "keys": {KEY: LIMITS}}')
    if unknown := set(body) - {"default", "keys"}:
        raise _bad(path, f"knows default and keys, not {sorted(unknown)}")
    known = {digest_of(key) for key in api_keys}
    by_key = {}
    for number, (key, limits) in enumerate(body.get("keys", {}).items(), start=1):
        where = f"entry {number} of keys"
        match = _DIGEST.fullmatch(key)
        digest = match[1].lower() if match else digest_of(key)
        if digest not in known:
            raise _bad(path, f"{where} is not a key of --api-key-file")
        by_key[digest] = _read_limits(path, limits, where)
    return KeyLimits(_read_limits(path, body.get("default", {}), "default"), by_key)


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _read_limits(path: str, body: Any, where: str) -> Limits:
    if not isinstance(body, dict):
        raise _bad(path, f"{where} must be an object, got {type(body).__name__}")
    names = [each.name for each in fields(Limits)]
    for name, value in body.items():
        if name not in names:
            raise _bad(path, f"{where} has {name}; the limits are {', '.join(names)}")
        least = -MAX_LIMIT if name == "best_priority" else 1
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_LIMIT:
            raise _bad(path, f"{where}: {name} must be a whole number from {least} to {MAX_LIMIT}, got {value!r}")
    return Limits(**body)


def _bad(path: str, text: str) -> ConfigError:
    return ConfigError(f"{OPTION} {path}: {text}", param=OPTION)


def _dropped(text: str, reason: str, wait_s: float) -> RequestDroppedError:
    return RequestDroppedError(
        text, dropped=reason, code="rate_limit_exceeded", retry_after_s=max(1, math.ceil(wait_s))
    )
