"""``tandem_resume``: a stream that goes on at another node in the middle of its answer.

Life cycle: 1 the proxy asks a decode leg for ``tandem_stream_state``, 2 the node puts one comment line in front of each
event (``: tandem {...}``: the tokens that the client knows once it has the event), which the proxy takes out again, 3
the node dies, 4 the proxy sends the client's body with ``tandem_resume`` elsewhere: prompt and known tokens are the
prefix to compute, to pull or to find in a cache, as in a next turn, and sampling, penalties, stop strings, text and
counts go on as if the stream had never been cut. Nodes take both fields from their proxy alone (which has the cluster
key, where one is set); what clients send under these names is ignored.

A stream that is *handed over* is cut on purpose: the proxy asks its node for that (``HandOver``) under the name that
its first line has, and reads it to its end, which is the error ``handed_over``. Its last line has all tokens that are
known, and the node keeps what it computed of them under a lease, for whom the proxy sends there
(``common.wire.pull_sources``).

Of other streams a proxy is told how many tokens they have (``: tandem-tokens N``), where it cannot count events.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequestError
from common.names import WORD
from common.wire.fields import MAX_TOKEN_ID, Fields, invalid

RESUME_KEY = "tandem_resume"
STREAM_STATE_KEY = "tandem_stream_state"
STATE_PREFIX = b": tandem "
"""Begins a line of state: a comment to readers of server-sent events."""
COUNT_PREFIX = b": tandem-tokens "
"""Begins a line that says of how many tokens an event is the first sign; without it: one for each of its choices."""


@dataclass(frozen=True, slots=True)
class Resume:
    """What an answer consists of so far.

    Attributes:
        output_token_ids: the tokens that the client knows; at least one.
        created: when the answer began, seconds since 1970.
        num_cached_tokens: what ``usage`` says of the prompt; None: as this node counts it.
    """

    output_token_ids: tuple[int, ...]
    created: int | None = None
    num_cached_tokens: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "output_token_ids": list(self.output_token_ids),
            "created": self.created,
            "num_cached_tokens": self.num_cached_tokens,
        }


@dataclass(frozen=True, slots=True)
class StreamState:
    """One comment line: what an event adds to what is known. ``is_end``: nothing but usage follows. ``stream_id``: in
    the first line, by which name the node knows the stream; None: it does not hand streams over."""

    token_ids: tuple[int, ...]
    created: int | None = None
    num_cached_tokens: int | None = None
    is_end: bool = False
    stream_id: str | None = None


def read_resume(body: Mapping[str, Any], *, num_prompts: int) -> Resume | None:
    """``tandem_resume`` of a body.

    Raises:
        InvalidRequestError: not an object with at least one token id, or more than one prompt.
    """
    value = body.get(RESUME_KEY)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        invalid(RESUME_KEY, value, "an object with output_token_ids")
    fields = Fields(value, prefix=RESUME_KEY + ".")
    token_ids = fields.int_list("output_token_ids", le=MAX_TOKEN_ID)
    if not token_ids:
        invalid(fields.name("output_token_ids"), value.get("output_token_ids"), "a list of at least one token id")
    if num_prompts != 1:
        raise InvalidRequestError(f"{RESUME_KEY} is for one prompt, got {num_prompts}", param=RESUME_KEY)
    return Resume(token_ids, fields.integer("created", ge=0), fields.integer("num_cached_tokens", ge=0))


def check_resumable(body: Mapping[str, Any], *, stream: bool, n: int, has_prompt_logprobs: bool) -> None:
    """Refuse the two fields for answers that cannot go on elsewhere: all but single streams without echoed
    log-probabilities."""
    name = next((name for name in (RESUME_KEY, STREAM_STATE_KEY) if body.get(name)), None)
    if name is not None and (not stream or n != 1 or has_prompt_logprobs):
        raise InvalidRequestError(
            f"{name} needs stream true, n 1 and no echo with logprobs, got stream {stream}, n {n}", param=name
        )


@dataclass(frozen=True, slots=True)
class HandOver:
    """What a proxy asks of a node that generates ``stream_id``: to end it, and to lease what it has of it as
    ``lease_id``."""

    stream_id: str
    lease_id: str

    def to_body(self) -> dict[str, Any]:
        return {"id": self.stream_id, "lease_id": self.lease_id}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> HandOver:
        """Raises InvalidRequestError naming the field."""
        fields = Fields(body)
        return cls(*(fields.required_string(key, pattern=WORD) for key in ("id", "lease_id")))


def state_line(
    token_ids: Sequence[int],
    *,
    created: int | None = None,
    num_cached_tokens: int | None = None,
    is_end: bool = False,
    stream_id: str | None = None,
) -> bytes:
    """The comment line that goes in front of an event's ``data:`` line. ``created`` and ``stream_id`` are told with
    ``num_cached_tokens``."""
    state: dict[str, Any] = {"token_ids": list(token_ids)}
    if num_cached_tokens is not None:
        state |= {"created": created, "num_cached_tokens": num_cached_tokens, "id": stream_id}
    if is_end:
        state["end"] = True
    return STATE_PREFIX + json.dumps(state, separators=(",", ":")).encode() + b"\n"


def read_state_line(line: bytes) -> StreamState:
    """The state in one line without its newline. Raises ValueError for what no node writes."""
    try:
        value = json.loads(line[len(STATE_PREFIX) :])
        if not isinstance(value, dict):
            raise ValueError("not an object")
        fields = Fields(value)
        return StreamState(
            fields.int_list("token_ids", le=MAX_TOKEN_ID) or (),
            fields.integer("created", ge=0),
            fields.integer("num_cached_tokens", ge=0),
            fields.boolean("end"),
            fields.string("id", pattern=WORD),
        )
    except (ValueError, InvalidRequestError) as exc:
        raise ValueError(f"not the state of a stream: {exc}") from exc


def count_line(num_tokens: int) -> bytes:
    """The comment line that goes in front of an event."""
    return COUNT_PREFIX + b"%d\n" % num_tokens


def read_count_line(line: bytes) -> int:
    """Tokens, of one line without its newline. Raises ValueError for what no node writes."""
    if not line[len(COUNT_PREFIX) :].isdigit():
        raise ValueError(f"not a number of tokens: {line[:40]!r}")
    return int(line[len(COUNT_PREFIX) :])
