"""Whether a grammar can be used, found out in child processes (``common.grammar.trial``), for a proxy or a node.

1 a grammar that was checked lately has its verdict, 2 else it waits for one of the children, which are started when
they are needed, 3 its verdict is remembered. A child that dies or hangs is replaced, and its grammar is refused for
that. ``close`` ends the children.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import queue
import select
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from common.errors import DeadlineExceededError, GrammarError, InvalidRequestError, QueueFullError
from common.grammar.limits import GrammarLimits
from common.grammar.trial import GBNF, LARK, LENGTH

NUM_CHILDREN = 2
MAX_WAITING = 256
"""Grammars that wait for a child; checking one takes about 2 ms."""
MAX_VERDICTS = 1024
HANG_SECONDS = 30.0
"""Wall-clock seconds after which a child that has not answered is killed. It ends itself after its CPU seconds, which
take longer on a crowded machine."""


class GrammarChecker:
    """Used on one event loop. ``on_checked`` is told the seconds of each check, and whether the grammar is good."""

    def __init__(self, limits: GrammarLimits, on_checked: Callable[[float, bool], None] | None = None) -> None:
        self.limits = limits
        self._on_checked = on_checked
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._children: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(NUM_CHILDREN, thread_name_prefix="grammar-check")
        self._is_closed = False
        self.num_waiting = 0

    async def check(self, grammar: str, *, param: str) -> None:
        """Returns when ``grammar`` can be used; ``param`` is the field that it comes from.

        Raises:
            GrammarError: it cannot, and why.
            QueueFullError, DeadlineExceededError: too many others are being checked.
        """
        if len(grammar) > self.limits.max_chars:
            raise InvalidRequestError(
                f"{param} makes a grammar of {len(grammar)} characters, the most is {self.limits.max_chars}",
                param=param,
            )
        key = hashlib.blake2b(grammar.encode(), digest_size=16).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = await self._ask(grammar, param)
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        else:
            self._verdicts.move_to_end(key)
        if verdict:
            raise GrammarError(f"{param} cannot be compiled: {verdict}", param=param)

    async def lark(self, gbnf: str, param: str) -> str:
        """``gbnf`` as Lark, whose size may be anything. Raises as ``check``."""
        lark = await self._ask(GBNF + gbnf, param)
        if not lark.startswith(LARK):
            raise GrammarError(f"{param} is neither Lark nor GBNF: {lark}", param=param)
        return lark

    async def _ask(self, grammar: str, param: str) -> str:
        if self.num_waiting >= MAX_WAITING:
            raise QueueFullError(f"{self.num_waiting} grammars wait to be checked, the most is {MAX_WAITING}")
        begin_s = time.monotonic()
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self.limits.wait_seconds):
                verdict = await asyncio.get_running_loop().run_in_executor(self._threads, self._try, grammar)
        except TimeoutError as exc:
            raise DeadlineExceededError(
                f"{param} was not checked within {self.limits.wait_seconds:g} s: others are before it", param=param
            ) from exc
        finally:
            self.num_waiting -= 1
        if self._on_checked is not None:
            self._on_checked(time.monotonic() - begin_s, not verdict or verdict.startswith(LARK))
        return verdict

    def _try(self, grammar: str) -> str:
        """Blocks; in a thread."""
        try:
            child = self._children.get_nowait()
        except queue.Empty:
            child = _Child(self.limits.max_compile_seconds)
        try:
            verdict = child.ask(grammar)
        except BaseException:
            child.close()
            raise
        if child.is_alive and not self._is_closed:
            self._children.put(child)
        else:
            child.close()
        return verdict

    def close(self) -> None:
        """Blocks until what is being tried has ended, ``HANG_SECONDS`` at most."""
        self._is_closed = True
        self._threads.shutdown(cancel_futures=True)
        while True:
            try:
                self._children.get_nowait().close()
            except queue.Empty:
                return


class _Child:
    """One process, used by one thread at a time."""

    def __init__(self, cpu_seconds: float) -> None:
        self._cpu_seconds = cpu_seconds
        self._process = subprocess.Popen(
            [sys.executable, "-m", "common.grammar.trial", str(cpu_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self.is_alive = True

    def ask(self, grammar: str) -> str:
        """Why ``grammar`` cannot be used; empty when it can.

        Raises:
            DeadlineExceededError: nobody knows, for reasons that may be the machine's.
        """
        text = grammar.encode()
        deadline_s = time.monotonic() + HANG_SECONDS
        try:
            self._write(LENGTH.pack(len(text)) + text, deadline_s)
            (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline_s))
            return self._read(length, deadline_s).decode()
        except TimeoutError:
            raise DeadlineExceededError(f"the grammar was not compiled within {HANG_SECONDS:g} s") from None
        except OSError:
            self.close()
            if self._process.returncode == -signal.SIGKILL:
                raise DeadlineExceededError("what compiles grammars was killed; ask again") from None
            return self._why_dead()

    def _write(self, data: bytes, deadline_s: float) -> None:
        assert self._process.stdin is not None
        descriptor, rest = self._process.stdin.fileno(), memoryview(data)
        while rest:
            # A child that reads nothing lets a pipe's worth be written, no more.
            _wait(descriptor, select.POLLOUT, deadline_s)
            rest = rest[os.write(descriptor, rest) :]

    def _read(self, num_bytes: int, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor, data = self._process.stdout.fileno(), b""
        while len(data) < num_bytes:
            _wait(descriptor, select.POLLIN, deadline_s)
            part = os.read(descriptor, num_bytes - len(data))
            if not part:
                raise BrokenPipeError
            data += part
        return data

    def _why_dead(self) -> str:
        code = self._process.returncode
        if code == -signal.SIGPROF:
            return f"compiling it takes more than {self._cpu_seconds:g} s"
        if code == -signal.SIGSEGV:
            return "it is nested too deep"
        return f"compiling it needs too much memory or fails (status {code})"

    def close(self) -> None:
        self.is_alive = False
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _wait(descriptor: int, event: int, deadline_s: float) -> None:
    """Until ``event``, or an error or the end of what ``descriptor`` is of, which reading or writing then finds."""
    poll = select.poll()  # not select(), which takes no descriptor of 1024 or above
    poll.register(descriptor, event)
    left_s = deadline_s - time.monotonic()
    if left_s <= 0 or not poll.poll(left_s * 1000):
        raise TimeoutError
