"""One error tree for every process. Each class has a stable ``code`` and an HTTP status; ``common.openai.errors`` turns
them into OpenAI-shaped bodies in one place, the command line prints ``ConfigError`` and exits non-zero.

Errors carry numbers and names: the field or flag, the value, the bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContextOverflow:
    """The numbers of a request that the model's context does not hold.

    Attributes:
        num_prompt_tokens: at least so many, where the prompt was not tokenised to its end.
        max_tokens: of the answer; None: the prompt is too long by itself.
    """

    max_model_len: int
    num_prompt_tokens: int
    max_tokens: int | None = None


class TandemError(Exception):
    """Base of everything that this project raises on purpose.

    Attributes:
        status: HTTP status this error maps to.
        type: OpenAI error type.
        code: stable machine-readable word.
        param: the request field or flag at fault, when there is one.
        dropped: why admission turned a request away, when it did (header ``X-Tandem-Dropped``): ``rejected-...``:
            nothing was spent on it, ``evicted-...``: it had waited, or work was spent.
        overflow: of a request that the context does not hold, for APIs that have words of their own for it.
    """

    status: int = 500
    type: str = "server_error"
    code: str = "internal_error"
    dropped: str | None = None
    overflow: ContextOverflow | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ConfigError(TandemError):
    """A flag, file or model that cannot work; raised at start, never while serving."""

    code = "bad_config"


class StepMemoryError(TandemError):
    """A step names blocks or slots that its sequence cannot have. Nothing of the step has run."""


class InvalidRequestError(TandemError):
    """The caller's request is wrong; ``param`` names the field."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthError(InvalidRequestError):
    """``subject`` (a field) does not fit into the model's context, or not with the ``answer_field`` that it asks for.
    The text begins as OpenAI's and vLLM's: clients look for that. ``about``: why the number of its tokens is not
    known."""

    code = "context_length_exceeded"
    _TEXT = re.compile(
        r"This model's maximum context length is (\d+) tokens\. However, \S+ has (?:at least )?(\d+) tokens"
        r"(?:[^.]* asks for (\d+) more)?"
    )

    def __init__(
        self, subject: str, overflow: ContextOverflow, *, about: str = "", answer_field: str | None = None
    ) -> None:
        bound = f"This model's maximum context length is {overflow.max_model_len} tokens."
        what = f"{subject} has {'at least ' if about else ''}{overflow.num_prompt_tokens} tokens{about}"
        if overflow.max_tokens is not None:
            together = overflow.num_prompt_tokens + overflow.max_tokens
            what += f", and {answer_field or 'an answer'} asks for {overflow.max_tokens} more: {together} together"
        super().__init__(f"{bound} However, {what}.", param=answer_field or subject)
        self.overflow = overflow

    @classmethod
    def read(cls, message: str) -> ContextOverflow | None:
        """The numbers of such an error's text, which is all that comes of it from another process."""
        found = cls._TEXT.match(message)
        if found is None:
            return None
        most, prompt, answer = found.groups()
        return ContextOverflow(int(most), int(prompt), None if answer is None else int(answer))


class ImageRefusedError(InvalidRequestError):
    """An image of a request is not taken. ``reason``: for metrics: limit, format, content, url, fetch or model."""

    code = "invalid_image"

    def __init__(self, message: str, *, reason: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.reason = reason


class GrammarError(InvalidRequestError):
    """A request's grammar cannot be compiled, needs more than the limits allow, or allows no token any more."""

    code = "invalid_grammar"


class FingerprintMismatchError(InvalidRequestError):
    """A peer that runs another model or layout asked for blocks or states, which it could not use."""

    status = 409
    code = "fingerprint_mismatch"


class AuthenticationError(TandemError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class PermissionDeniedError(TandemError):
    """The process was started without the key that this route needs: no caller may use it."""

    status = 403
    type = "permission_error"
    code = "cluster_key_required"


class ModelNotFoundError(TandemError):
    status = 404
    type = "not_found_error"
    code = "model_not_found"


class NodeNotFoundError(TandemError):
    status = 404
    type = "not_found_error"
    code = "node_not_found"


class BodyTooLargeError(TandemError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class BodyEncodingError(TandemError):
    """The body is compressed, which nobody here undoes."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_encoding"


class HeadTooLargeError(TandemError):
    status = 431
    type = "invalid_request_error"
    code = "head_too_large"


class BodyTimeoutError(TandemError):
    status = 408
    type = "timeout_error"
    code = "body_timeout"


class HeadTimeoutError(TandemError):
    status = 408
    type = "timeout_error"
    code = "head_timeout"


class TooManyConnectionsError(TandemError):
    status = 503
    type = "rate_limit_error"
    code = "too_many_connections"


class QueueFullError(TandemError):
    """Nothing was spent on the request; the client may try again after ``retry_after_s``."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestDroppedError(QueueFullError):
    """Turned away by admission."""

    def __init__(self, message: str, *, dropped: str, code: str | None = None, retry_after_s: int = 1) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.dropped = dropped
        if code is not None:
            self.code = code


class RequestAbortedError(TandemError):
    """The caller went away. Logged, never answered."""

    status = 499
    type = "aborted"
    code = "aborted"


class HandedOverError(RequestAbortedError):
    """Another node goes on with the stream, from what this one has computed of it. Read by the proxy alone."""

    code = "handed_over"


class ClientStalledError(RequestAbortedError):
    """The caller stood still: it did not read its answer, and was disconnected."""

    code = "client_stalled"


class TransferError(TandemError):
    """Blocks or states could not be moved, or did not hold the prompt that the manifest names."""

    status = 502
    code = "transfer_failed"


class LayoutMismatchError(TransferError):
    """A peer lays its blocks or states out so that this node cannot read them; the message names field and values."""

    code = "layout_mismatch"


class PrefillLegFailedError(TransferError):
    """The prefill node says that it will not compute the prompt: nothing of it can be pulled from there."""

    code = "leg_failed"


class PrefillLegAbortedError(PrefillLegFailedError):
    """The caller of the prefill leg went away. As a rule that is the client, so that the decode leg will end too."""

    code = "leg_aborted"


class PrefillLegRejectedError(PrefillLegFailedError):
    """The prefill leg was refused for a reason that concerns the client (4xx): any other node would refuse it too."""

    def __init__(self, message: str, *, status: int, type: str, code: str, param: str | None, retry_after_s: int = 1):
        super().__init__(message, param=param, code=code)
        self.status = status
        self.type = type
        self.retry_after_s = retry_after_s


class NodeUnavailableError(TandemError):
    status = 503
    code = "no_node"


class EngineDeadError(NodeUnavailableError):
    """The engine of this node cannot go on; the process ends, and another one takes its place."""


class DrainingError(NodeUnavailableError):
    """The process finishes what it has and takes nothing new; another process, or its successor, will take it."""

    code = "draining"
    retry_after_s = 1


class EndingError(TandemError):
    """The process was told to end; that cannot be taken back."""

    status = 409
    type = "invalid_request_error"
    code = "ending"


class DeadlineExceededError(TandemError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class RequestDeadlineError(DeadlineExceededError):
    """The deadline that the request brought passed while it was worked on."""

    dropped = "evicted-deadline"


def how_to_install(extra: str) -> str:
    """Of packages that are missing, for an error. ``extra``: theirs in pyproject.toml."""
    node_extras = ",".join(dict.fromkeys(("node", "images", extra)))
    return (
        f"in a checkout: .venv/bin/python deploy/install.py {extra}; node images: --build-arg NODE_EXTRAS={node_extras}"
    )
