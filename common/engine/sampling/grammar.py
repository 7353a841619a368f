"""The grammar of one sequence: compiled in a thread, then asked for the tokens that may come next.

Life: 1 begun when its request is admitted, a compiler's thread makes the matcher (``grammar_compiler``) while the
prompt is computed or pulled, 2 ready or failed, 3 each step: a mask is filled while the forward runs, the token that
was drawn under it is consumed. A preempted sequence keeps its matcher; one that began on another node has consumed
what came from there before its first mask. Forks copy. Nothing here raises for what a grammar does: ``error`` says it.
"""

from __future__ import annotations

import queue
import threading
import time
from array import array
from collections.abc import Callable, Sequence

from llguidance import LLExecutor, LLMatcher

from common.errors import GrammarError, TandemError

MASK_DEADLINE_S = 10.0
"""Longest wait for the masks of a step. Each is bounded by ``common.grammar.limits`` to some 20 ms."""


class SequenceGrammar:
    """Made by the compiler, owned by the engine thread once it is ready.

    Attributes:
        deadline_s: monotonic seconds until when it must be ready.
        error: why it cannot be used, or cannot go on.
    """

    __slots__ = ("_eos_token_ids", "_is_done", "_matcher", "deadline_s", "error", "hidden_token_ids")

    def __init__(self, eos_token_ids: frozenset[int], deadline_s: float) -> None:
        self._eos_token_ids = eos_token_ids
        self._matcher: LLMatcher | None = None
        self._is_done = False
        self.deadline_s = deadline_s
        self.error: TandemError | None = None
        self.hidden_token_ids: frozenset[int] = frozenset()

    @property
    def is_pending(self) -> bool:
        return not self._is_done

    def finish(self, matcher: LLMatcher | None, error: TandemError | None = None) -> None:
        """The compiler's last word, from its thread."""
        self._matcher, self.error = matcher, error
        self._is_done = True

    def fork(self) -> SequenceGrammar:
        """The same grammar at the same place, for another continuation; it must be ready."""
        assert self._matcher is not None
        copy = SequenceGrammar(self._eos_token_ids, self.deadline_s)
        copy.finish(self._matcher.deep_copy(), self.error)
        return copy

    @property
    def matcher(self) -> LLMatcher:
        assert self._matcher is not None
        return self._matcher

    def consume(self, token_id: int) -> None:
        """The token that was drawn under the last mask. Sets ``error`` when it does not fit."""
        if not self.matcher.consume_token(token_id):
            self.error = _failed(f"refuses token {token_id}: {self.matcher.get_error()}")

    def trim(self, mask: memoryview) -> None:
        """Takes from a mask that was just filled the ends that may not be yet: an end token where the text could not
        end, and ``hidden_token_ids`` (of ``min_tokens``, ``ignore_eos``) as long as anything else may come. Sets
        ``error`` when nothing may.

        mask: bits of the vocabulary as uint32 words, writable.
        """
        if self.matcher.is_error():
            self.error = _failed(f"cannot go on: {self.matcher.get_error()}")
            return
        if not self.matcher.is_accepting():
            _clear(mask, self._eos_token_ids)  # one that is also a piece of text
        if self.hidden_token_ids:
            whole = bytes(mask)
            _clear(mask, self.hidden_token_ids)
            if not _any(mask):
                mask.cast("B")[:] = whole
        if not _any(mask):
            self.error = _failed("allows no token any more")


def _clear(mask: memoryview, token_ids: frozenset[int]) -> None:
    for token_id in token_ids:
        if token_id < 32 * len(mask):
            mask[token_id >> 5] &= ~(1 << (token_id & 31)) & 0xFFFFFFFF


def _any(mask: memoryview) -> bool:
    data = bytes(mask)
    return data.count(0) != len(data)


def _failed(why: str) -> GrammarError:
    return GrammarError(f"the grammar {why}".replace("<non-verbose/>", "").strip())


class GrammarMasks:
    """The masks of one step at a time, filled in a thread: :meth:`begin` when the step is launched, :meth:`wait` when
    its logits are there. Owned by the engine thread.

    ``vocab_size``: columns of the logits. ``num_threads``: that fill rows beside each other.
    """

    def __init__(self, vocab_size: int, *, num_threads: int = 1) -> None:
        self.num_words = (vocab_size + 31) // 32
        self._executor = LLExecutor(num_threads)
        self.on_filled: Callable[[float], None] = lambda seconds: None
        """Told the seconds of each step's masks, from the thread."""
        self._words = array("I")
        self._rows: dict[int, int] = {}
        self._is_filled = threading.Event()
        self._is_filled.set()
        self._jobs: queue.SimpleQueue[Sequence[SequenceGrammar]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, grammars: Sequence[SequenceGrammar]) -> None:
        """Fills a row for each of ``grammars``, which nobody else uses until :meth:`wait` has returned."""
        self.wait()  # those of a step whose forward raised
        self._rows = {id(grammar): row for row, grammar in enumerate(grammars)}
        if not grammars:
            return
        if len(self._words) < len(grammars) * self.num_words:
            self._words = array("I", bytes(len(grammars) * self.num_words * 4))
        if self._thread is None:
            # Not to be waited for at the process's end.
            self._thread = threading.Thread(target=self._run, name="grammar-masks", daemon=True)
            self._thread.start()
        self._is_filled.clear()
        self._jobs.put(grammars)

    def wait(self) -> None:
        """Raises GrammarError when the masks do not come."""
        if not self._is_filled.wait(MASK_DEADLINE_S):
            raise GrammarError(f"the masks of a step were not filled within {MASK_DEADLINE_S:g} s")

    def share(self, grammar: SequenceGrammar, other: SequenceGrammar) -> None:
        """``other`` has the mask of ``grammar`` until the next :meth:`begin`."""
        self._rows[id(other)] = self._rows[id(grammar)]

    def has(self, grammar: SequenceGrammar) -> bool:
        """Whether the last :meth:`begin` was for it too."""
        return id(grammar) in self._rows

    def row(self, grammar: SequenceGrammar) -> memoryview:
        """[num_words] uint32; bit ``i % 32`` of word ``i // 32`` says whether token ``i`` may come. Valid until the
        next :meth:`begin`."""
        start = self._rows[id(grammar)] * self.num_words
        return memoryview(self._words)[start : start + self.num_words]

    def _run(self) -> None:
        while True:
            grammars = self._jobs.get()
            try:
                self._fill(grammars)
            except Exception as exc:  # noqa: BLE001  # of a foreign library, and the thread must go on
                for grammar in grammars:
                    grammar.error = grammar.error or _failed(f"has no mask: {exc}")
            finally:
                self._is_filled.set()

    def _fill(self, grammars: Sequence[SequenceGrammar]) -> None:
        begin_s = time.perf_counter()
        address, _ = self._words.buffer_info()
        rows = [(grammar.matcher, row) for row, grammar in enumerate(grammars)]
        self._executor.unsafe_compute_mask_ptr(rows, address, self.num_words * 4, len(rows))
        for grammar in grammars:
            grammar.trim(self.row(grammar))
        self.on_filled(time.perf_counter() - begin_s)
