"""Asyncio on one side, the engine on the other: one thread runs the engine, all others reach it through commands.

1 a coroutine submits a request (a command in the queue), 2 the thread runs commands between steps, then one step, 3 the
step's outputs are handed to the event loop in one call, what is known before its forward already before that, 4 the
coroutine reads them from its own queue. Leaves by: finished, error, or abort when the coroutine goes away (always sent,
whatever ended it). Commands take effect between steps only, so nothing that a running step uses is freed under it.

The engine contains what is wrong with a request; what escapes it ends the thread. Then everybody who waits gets a typed
error, and so does everybody who comes later; ``death`` says why, and whoever owns the node ends it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from common.engine.core import EngineCore
from common.engine.outputs import RequestOutput
from common.errors import DeadlineExceededError, EngineDeadError, NodeUnavailableError, TandemError
from common.request import Request
from common.server.garbage import collect_when_idle

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_IDLE_WAIT_S = 1.0
"""The longest time that the idle thread sleeps before it checks lease deadlines again."""

STOPPED = "the engine of this node has stopped"


class EngineThread:
    """Owns the engine core and its thread. ``start`` it on the event loop that will read the outputs; ``close`` joins
    the thread with a deadline."""

    def __init__(self, core: EngineCore, enter_thread: Callable[[], None] | None = None) -> None:
        """``enter_thread``: called once on the new thread, before it does anything."""
        self._core = core
        self._enter_thread = enter_thread
        core.wake_with(lambda: self.post(lambda: None))
        core.deliver_with(self._hand_over)
        self._loop: asyncio.AbstractEventLoop
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._outputs: dict[str, asyncio.Queue[RequestOutput]] = {}
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._closing = False
        self._is_over = False  # event loop only: nobody is answered any more
        self.death: str | None = None
        """Why the thread ended, or was given up, without ``close``."""
        self.num_turns = 0
        """Grows with each step, and at least every ``MAX_IDLE_WAIT_S``: one that stands still is in a long step."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def give_up(self, reason: str) -> None:
        """The thread hangs: as if it had ended. Event loop only."""
        self.death = self.death or reason
        self._end()

    def close(self, timeout_s: float = 10.0) -> None:
        self._closing = True
        self._commands.put(lambda: None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("engine thread still busy after %.1f s", timeout_s)

    def post(self, command: Callable[[], object]) -> None:
        """Runs ``command`` on the engine thread between two steps. Callable from any thread; does not wait."""
        self._commands.put(command)

    async def call(self, function: Callable[[], T], timeout_s: float = 60.0) -> T:
        """Runs ``function`` between two steps and returns its result; raises what it raised, NodeUnavailableError when
        the engine has stopped, or DeadlineExceededError: it was in a step for ``timeout_s``."""
        self._check_serving()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as exc:  # handed to the caller, whatever it is
                future.set_exception(exc)
                if isinstance(exc, EngineDeadError):
                    raise

        self.post(command)
        self._calls.add(future)
        try:
            # Not wait_for: before Python 3.12 it may swallow a cancellation, and a request whose client has left runs
            # on.
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as exc:
            raise DeadlineExceededError(f"the engine of this node was in a step for more than {timeout_s:g} s") from exc
        finally:
            self._calls.discard(future)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yields outputs of all forks until each has finished. Raises the sequence's error. Aborts on the way out."""
        self._check_serving()
        outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        if request.request_id in self._outputs:
            raise AssertionError(f"request id {request.request_id} is in use")
        self._outputs[request.request_id] = outputs
        unfinished = 1 if request.is_prompt_only else request.num_forks
        try:
            self.post(lambda: self._add(request))
            while unfinished:
                output = await outputs.get()
                if output.error is not None:
                    raise output.error
                if output.finish_reason is not None:
                    unfinished -= 1
                yield output
        finally:
            del self._outputs[request.request_id]
            if unfinished:
                self.post(lambda: self._core.abort(request.request_id))

    def is_in_use(self, request_id: str) -> bool:
        """Whether a caller waits for outputs of a request of this id. Event loop only."""
        return request_id in self._outputs

    def interrupt(self, request_id: str, error: TandemError) -> None:
        """Whoever waits for this request's outputs gets ``error``, and the request is aborted; nothing happens when
        nobody waits. Event loop only."""
        outputs = self._outputs.get(request_id)
        if outputs is not None:
            outputs.put_nowait(RequestOutput(request_id, 0, [], error=error))

    def interrupt_all(self, error: TandemError) -> None:
        """``interrupt`` for everybody. Event loop only."""
        for request_id in list(self._outputs):
            self.interrupt(request_id, error)

    def prepare_grammar(self, grammar: str) -> None:
        """Begins to compile the grammar of a request that will come."""
        self._core.prepare_grammar(grammar)

    def finish(self, request_id: str, index: int) -> None:
        """Ends one continuation early (a stop string matched); what it computed stays cached."""
        self.post(lambda: self._core.finish(request_id, index))

    def _check_serving(self) -> None:
        if self._is_over:
            raise NodeUnavailableError(STOPPED)

    def _run(self) -> None:
        try:
            if self._enter_thread is not None:
                self._enter_thread()
            while not self._closing:
                if not self._outputs:
                    collect_when_idle()
                self._drain(wait_s=0.0 if self._core.has_work() else self._idle_wait_s())
                self.num_turns += 1
                if outputs := self._core.step():
                    self._hand_over(outputs)
            self._drain(wait_s=0.0)
        except BaseException as exc:  # whatever it is: the thread is gone, and somebody has to know
            logger.critical("the engine cannot go on", exc_info=True)
            self.death = (
                exc.message if isinstance(exc, EngineDeadError) else f"the engine stopped: {type(exc).__name__}"
            )
        finally:
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        """Fails everybody who waits, and everybody who will come."""
        self._is_over = True
        error = NodeUnavailableError(STOPPED)
        self.interrupt_all(error)
        for future in self._calls:
            if not future.done():
                future.set_exception(error)

    def _idle_wait_s(self) -> float:
        deadline = self._core.next_deadline_s()
        if deadline is None:
            return MAX_IDLE_WAIT_S
        return min(max(deadline - time.monotonic(), 0.001), MAX_IDLE_WAIT_S)

    def _add(self, request: Request) -> None:
        """A request that cannot be added has no outputs, so whoever waits for them gets the error."""
        try:
            self._core.add_request(request)
        except Exception as exc:
            if not isinstance(exc, TandemError):
                logger.exception("adding a request failed request_id=%s", request.request_id)
                exc = TandemError("the engine failed on this request")
            self._hand_over([RequestOutput(request.request_id, 0, [], error=exc)])

    def _drain(self, wait_s: float) -> None:
        try:
            command = self._commands.get(timeout=wait_s) if wait_s > 0 else self._commands.get_nowait()
            while True:
                self._run_command(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _run_command(self, command: Callable[[], object]) -> None:
        self._core.settle()
        try:
            command()
        except EngineDeadError:
            raise
        except Exception:  # one caller's command must not end the engine for all
            logger.exception("engine command failed")

    def _hand_over(self, outputs: list[RequestOutput]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            waiting: Any = self._outputs.get(output.request_id)
            if waiting is not None:  # else: the caller left while the step ran; its abort is on the way
                waiting.put_nowait(output)
