"""Grammars for one vocabulary, compiled in threads of their own.

Each was tried in another process before it came here (``common.grammar``), so that what it takes is bounded. Those that
were used lately are kept: a sequence gets a copy. One text is compiled once at a time: who wants the same waits for it,
without holding a thread. The vocabulary itself is made with the first grammar.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer

from common.engine.sampling.grammar import SequenceGrammar
from common.errors import GrammarError, TandemError
from common.grammar.limits import parser_limits

logger = logging.getLogger(__name__)

NUM_THREADS = 2
MAX_KEPT = 64
"""Compiled grammars that are kept, about 100 kB each."""


@dataclass(frozen=True, slots=True)
class _Job:
    """``grammar``: of the sequence that waits; None: it will come."""

    text: str
    grammar: SequenceGrammar | None = None
    token_ids: Sequence[int] = ()


class GrammarCompiler:
    """Callable from any thread.

    Args:
        make_tokenizer: llguidance's view of the model's vocabulary; its rows are the logits' columns.
        eos_token_ids: the model's.
        wait_seconds: how long a sequence waits for its grammar.
    """

    def __init__(
        self, make_tokenizer: Callable[[], LLTokenizer], eos_token_ids: frozenset[int], *, wait_seconds: float
    ) -> None:
        self._make_tokenizer = make_tokenizer
        self._eos_token_ids = eos_token_ids
        self._wait_seconds = wait_seconds
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._compiling: dict[str, list[_Job]] = {}  # text -> jobs that came meanwhile
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.num_waiting = 0
        self.on_ready: Callable[[], None] = lambda: None
        """Called from a thread whenever a sequence's grammar is ready or has failed."""
        self.on_compiled: Callable[[float], None] = lambda seconds: None

    def prepare(self, text: str) -> None:
        """Compiles ``text`` for a sequence that will come."""
        self._put(_Job(text))

    def begin(self, text: str, token_ids: Sequence[int] = ()) -> SequenceGrammar:
        """The grammar of a sequence, which becomes ready later, behind ``token_ids``: what of its output is there."""
        grammar = SequenceGrammar(self._eos_token_ids, time.monotonic() + self._wait_seconds)
        self._put(_Job(text, grammar, token_ids))
        return grammar

    def _put(self, job: _Job) -> None:
        with self._lock:
            self.num_waiting += 1
            if len(self._threads) < NUM_THREADS:
                # Not to be waited for at the process's end.
                thread = threading.Thread(target=self._run, name="grammar-compiler", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            with self._lock:
                meanwhile = self._compiling.get(job.text)
                if meanwhile is not None:
                    meanwhile.append(job)
                    continue
                if job.text not in self._kept:
                    self._compiling[job.text] = []
            self._do(job)
            with self._lock:
                self.num_waiting -= 1
                meanwhile = self._compiling.pop(job.text, [])
            for each in meanwhile:
                self._jobs.put(each)
            del job, meanwhile  # a thread that waits holds no grammar

    def _do(self, job: _Job) -> None:
        grammar = job.grammar
        try:
            matcher = self._matcher(job.text)
            if grammar is None:
                return
            for place, token_id in enumerate(job.token_ids):
                if not matcher.consume_token(token_id):
                    raise GrammarError(
                        f"the answer so far is not of its grammar: token {token_id} at place {place} of "
                        f"{len(job.token_ids)} is refused"
                    )
            grammar.finish(matcher)
        except Exception as exc:  # of a foreign library: it is this grammar's
            if grammar is None:  # the sequence hears of it when it comes
                logger.info("a grammar could not be compiled in advance", exc_info=True)
                return
            if not isinstance(exc, TandemError):
                logger.exception("a grammar could not be compiled")
                exc = GrammarError(f"the grammar could not be compiled: {exc}")
            grammar.finish(None, exc)
        self.on_ready()

    def _matcher(self, text: str) -> LLMatcher:
        """At its beginning. Raises GrammarError."""
        with self._lock:
            kept = self._kept.get(text)
            if kept is not None:
                self._kept.move_to_end(text)
                return kept.deep_copy()
        begin_s = time.perf_counter()
        matcher = LLMatcher(self._vocabulary(), text, log_level=0, limits=parser_limits())
        self.on_compiled(time.perf_counter() - begin_s)
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {matcher.get_error()}".replace("<non-verbose/>", ""))
        copy = matcher.deep_copy()
        with self._lock:
            self._kept[text] = copy
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _vocabulary(self) -> LLTokenizer:
        with self._making:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
            return self._tokenizer
