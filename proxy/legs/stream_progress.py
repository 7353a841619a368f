"""What the client has of one stream: where it ends, how, and where another node would go on.

Life cycle: 1 ``feed`` takes the node's bytes apart into whole events and gives back what is the client's
(``num_tokens``: of how many tokens; what a node says of that is taken out), 2 the end: the [DONE] (``is_complete``;
nothing that follows is the client's), an error event (``failure``), or neither: the stream broke.

A stream that may go on elsewhere (``--migration-limit``; ``ResumableProgress``) has more: ``begin`` per leg; what the
events say about the tokens that they carry (``common.wire.resume``) is taken out of them; the last chunk of the choice
is held until the [DONE] is here, because it must not be sent twice; and a leg that ends before leaves ``resume``: what
the next one has to go on from.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from common.errors import TandemError
from common.metrics.outcomes import Outcome, outcome_of_answer
from common.openai.errors import read_error
from common.wire.resume import COUNT_PREFIX, STATE_PREFIX, Resume, read_count_line, read_state_line
from proxy.legs.errors import LegFailedError
from proxy.nodes.node import Node

END_OF_EVENT = b"\n\n"
DONE = b"data: [DONE]"
ERROR = b'data: {"error"'
# In no text of an event: a quotation mark inside of one is escaped.
_LENGTH = b'"finish_reason":"length"'
_TOKEN = b'"finish_reason"'
"""In each choice of each event, null or not; not in those that hold the usage, the trace or an error."""
MAX_EVENT_BYTES = 16 * 2**20
"""Of a stream's event whose end has not come: a node that never ends one must not fill the memory."""


class StreamProgress:
    """Of a stream that cannot go on elsewhere: whole events pass as they are, an error event is the last. ``failure``:
    what the stream says went wrong at the node. ``num_tokens``: of what was passed last, of all choices."""

    may_go_on = False

    def __init__(self) -> None:
        self.failure: LegFailedError | None = None
        self.is_complete = False
        self.num_tokens = 0
        self._rest = b""
        self._has_length = False

    @property
    def is_leaving(self) -> bool:
        return False

    async def ask_to_hand_over(self) -> bool:
        return False

    @property
    def outcome(self) -> Outcome:
        """Of a stream that is complete."""
        return outcome_of_answer(["length"] if self._has_length else ())

    def feed(self, chunk: bytes) -> bytes:
        """What of the stream so far is the client's now. Nothing more comes once it ``is_complete`` or has a
        ``failure``."""
        events = self._whole_events(chunk)
        self.num_tokens = 0
        passed = self._pass(events) if events else b""
        self._has_length = self._has_length or _LENGTH in passed
        return passed

    def _whole_events(self, chunk: bytes) -> bytes:
        data = self._rest + chunk if self._rest else chunk
        end = len(data) if data.endswith(END_OF_EVENT) else data.rfind(END_OF_EVENT) + len(END_OF_EVENT)
        if end < len(END_OF_EVENT):  # none has ended
            end = 0
        self._rest = data[end:]
        if len(self._rest) > MAX_EVENT_BYTES:
            self.failure = LegFailedError(f"an event has more than {MAX_EVENT_BYTES} bytes", reason="garbage")
        return data[:end]

    def _pass(self, events: bytes) -> bytes:
        done_at, error_at = _find_event(events, DONE + END_OF_EVENT), _find_event(events, ERROR)
        if error_at >= 0 and not 0 <= done_at < error_at:
            end = events.index(END_OF_EVENT, error_at) + len(END_OF_EVENT)
            self.failure = _failure(events[error_at:end], is_told=True)
            return self._counted(events[:end])
        if done_at < 0:
            return self._counted(events)
        self.is_complete = True
        return self._counted(events[: done_at + len(DONE) + len(END_OF_EVENT)])

    def _counted(self, events: bytes) -> bytes:
        """As the client gets them."""
        if _find_event(events, COUNT_PREFIX) < 0:
            self.num_tokens = events.count(_TOKEN)
            return events
        passed: list[bytes] = []
        for event in events.split(END_OF_EVENT)[:-1]:
            num_tokens = event.count(_TOKEN)
            if event.startswith(COUNT_PREFIX):
                line, _, event = event.partition(b"\n")
                try:
                    num_tokens = read_count_line(line)
                except ValueError as exc:
                    self.failure, self.is_complete = _garbage(exc), False
                    break
            self.num_tokens += num_tokens
            passed += (event, END_OF_EVENT)
        return b"".join(passed)


class ResumableProgress(StreamProgress):
    """One request's, over all its legs. ``node``: who had the last one. ``leaves``: asked, with the number of tokens so
    far, whether this leg's node is to be left; ``ask``: asks it to hand over the stream that it calls by this name."""

    may_go_on = True

    def __init__(self) -> None:
        super().__init__()
        self.node: Node | None = None
        self.leaves: Callable[[int], bool] | None = None
        self.ask: Callable[[str], Awaitable[bool]] | None = None
        self._stream_id: str | None = None
        self._token_ids: list[int] = []
        self._created: int | None = None
        self._num_cached_tokens: int | None = None
        self._held: list[bytes] | None = None
        self._num_held = 0

    def begin(self, node: Node) -> None:
        """Another leg: what was not passed on of the one before is forgotten."""
        self.node, self.failure, self.leaves, self.ask = node, None, None, None
        self._stream_id = None
        self._rest, self._held, self._num_held = b"", None, 0

    @property
    def is_leaving(self) -> bool:
        """Whether it is to go on elsewhere now; nothing of its end is held."""
        return self.leaves is not None and self._held is None and self.leaves(len(self._token_ids))

    async def ask_to_hand_over(self) -> bool:
        """Whether the node will: then the stream ends with HandedOverError, or as it would have. Nodes of earlier
        versions do not."""
        if self.ask is None or self._stream_id is None:
            return False
        return await self.ask(self._stream_id)

    @property
    def resume(self) -> Resume | None:
        """Where the next leg goes on; None: no token is known."""
        if not self._token_ids:
            return None
        return Resume(tuple(self._token_ids), self._created, self._num_cached_tokens)

    def _pass(self, events: bytes) -> bytes:
        passed: list[bytes] = []
        for event in events.split(END_OF_EVENT)[:-1]:
            try:
                self._take(event, passed)
            except ValueError as exc:
                self.failure = _garbage(exc)
            if self.is_complete or self.failure is not None:
                break
        return b"".join(passed)

    def _take(self, event: bytes, passed: list[bytes]) -> None:
        """One event without its end. Raises ValueError."""
        num_tokens = event.count(_TOKEN)
        if event.startswith(STATE_PREFIX):
            line, _, event = event.partition(b"\n")
            state = read_state_line(line)
            num_tokens = len(state.token_ids)
            if state.is_end:
                self._held = []
            else:
                self._token_ids += state.token_ids
            self._stream_id = self._stream_id or state.stream_id
            if self._num_cached_tokens is None:
                self._created, self._num_cached_tokens = state.created, state.num_cached_tokens
        if event.startswith(ERROR):
            self.failure = _failure(event)
            self.num_tokens += num_tokens
            return
        self.is_complete = event == DONE
        if self._held is not None:
            self._held += (event, END_OF_EVENT)
            self._num_held += num_tokens
        if self._held is None:
            passed += (event, END_OF_EVENT)
            self.num_tokens += num_tokens
        elif self.is_complete:
            passed += self._held
            self.num_tokens += self._num_held


def _garbage(error: ValueError) -> LegFailedError:
    return LegFailedError(f"the stream holds what no node writes: {error}", reason="garbage")


def _find_event(events: bytes, start: bytes) -> int:
    """Where the first event begins that begins with ``start``; -1: none does."""
    if events.startswith(start):
        return 0
    at = events.find(END_OF_EVENT + start)  # in no text of an event: its line breaks are escaped
    return at if at < 0 else at + len(END_OF_EVENT)


def _failure(event: bytes, *, is_told: bool = False) -> LegFailedError:
    """The node's own error, with its words."""
    try:
        error = read_error(json.loads(event.removeprefix(b"data: ")))
    except ValueError:
        error = TandemError("the node's stream ends with an error")
    failure = LegFailedError(error.message, reason="status", is_told=is_told)
    failure.type, failure.code, failure.param, failure.status = error.type, error.code, error.param, error.status
    return failure
