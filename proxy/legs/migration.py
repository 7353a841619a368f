"""What the client has of one stream, so that the stream can go on elsewhere.

Life cycle: 1 ``begin`` per leg, 2 ``feed`` takes the node's bytes apart into events, takes out what they say about the
tokens that they carry (``common.wire.resume``) and gives back what is the client's, 3 the last chunk of the choice is
held until the [DONE] is here: it must not be sent twice, 4 a leg that ends before leaves ``resume``: what the next one
has to go on from. Costs only streams of proxies with ``--migration-limit``.
"""

from __future__ import annotations

import json

from common.wire.resume import STATE_PREFIX, Resume, read_state_line
from proxy.legs.errors import LegFailedError
from proxy.nodes.node import Node

END_OF_EVENT = b"\n\n"
DONE = b"data: [DONE]"
ERROR = b'data: {"error"'
MAX_EVENT_BYTES = 16 * 2**20
"""Of a stream's event whose end has not come: a node that never ends one must not fill the memory."""


class StreamProgress:
    """One request's, over all its legs. ``node``: who had the last one; ``failure``: what its stream says went wrong
    there."""

    def __init__(self) -> None:
        self.node: Node | None = None
        self.failure: LegFailedError | None = None
        self.is_complete = False
        self._token_ids: list[int] = []
        self._created: int | None = None
        self._num_cached_tokens: int | None = None
        self._rest = b""
        self._held: list[bytes] | None = None

    def begin(self, node: Node) -> None:
        """Another leg: what was not passed on of the one before is forgotten."""
        self.node, self.failure = node, None
        self._rest, self._held = b"", None

    @property
    def resume(self) -> Resume | None:
        """Where the next leg goes on; None: no token is known."""
        if not self._token_ids:
            return None
        return Resume(tuple(self._token_ids), self._created, self._num_cached_tokens)

    def feed(self, chunk: bytes) -> bytes:
        """What of the stream so far is the client's now. Nothing more comes after ``failure`` was set."""
        *events, self._rest = (self._rest + chunk).split(END_OF_EVENT)
        if len(self._rest) > MAX_EVENT_BYTES:
            self.failure = LegFailedError(f"an event has more than {MAX_EVENT_BYTES} bytes", reason="garbage")
        passed: list[bytes] = []
        for event in events:
            try:
                self._take(event, passed)
            except ValueError as exc:
                self.failure = LegFailedError(f"the stream holds what no node writes: {exc}", reason="garbage")
            if self.failure is not None:
                break
        return b"".join(passed)

    def _take(self, event: bytes, passed: list[bytes]) -> None:
        """One event without its end. Raises ValueError."""
        if event.startswith(STATE_PREFIX):
            line, _, event = event.partition(b"\n")
            state = read_state_line(line)
            if state.is_end:
                self._held = []
            else:
                self._token_ids += state.token_ids
            if self._num_cached_tokens is None:
                self._created, self._num_cached_tokens = state.created, state.num_cached_tokens
        if event.startswith(ERROR):
            self.failure = _failure(event)
            return
        if self._held is None:
            passed += (event, END_OF_EVENT)
            return
        self._held += (event, END_OF_EVENT)
        if event == DONE:
            self.is_complete = True
            passed += self._held


def _failure(event: bytes) -> LegFailedError:
    """The node's own error, with its words. Raises ValueError."""
    error = json.loads(event.removeprefix(b"data: "))["error"]
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        raise ValueError("an error event without a message")
    failure = LegFailedError(error["message"], reason="status")
    if isinstance(error.get("type"), str) and isinstance(error.get("code"), str):
        failure.type, failure.code = error["type"], error["code"]
    return failure
