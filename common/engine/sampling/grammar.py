"""The grammar of one sequence: compiled in a thread, then asked for the tokens that may come next.

Life: 1 begun when its request is admitted, a compiler's thread makes the matcher (``grammar_compiler``) while the
prompt is computed or pulled, 2 ready or failed, 3 each step: a mask is filled while the forward runs, the token that
was drawn under it is consumed. A preempted sequence keeps its matcher; one that began on another node has consumed
what came from there before its first mask. Forks copy. Nothing here raises for what a grammar does: ``error`` says it.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Sequence

from llguidance import LLExecutor, LLMatcher

from common.errors import GrammarError, TandemError

ROWS_ALONE = 8
"""Up to this many rows are filled on the engine's own thread: a row takes 10 to 100 us, waking others takes longer."""


class SequenceGrammar:
    """Made by the compiler, owned by the engine thread once it is ready.

    Attributes:
        deadline_s: monotonic seconds until when it must be ready.
        error: why it cannot be used, or cannot go on.
    """

    __slots__ = ("__weakref__", "_eos_token_ids", "_is_done", "_matcher", "deadline_s", "error", "hidden_token_ids")

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
        copy.hidden_token_ids = self.hidden_token_ids
        return copy

    @property
    def matcher(self) -> LLMatcher:
        assert self._matcher is not None
        return self._matcher

    def consume(self, token_id: int) -> None:
        """The token that was drawn under the last mask. Sets ``error`` when it does not fit."""
        if not self.matcher.consume_token(token_id):
            self.error = _failed(f"refuses token {token_id}: {self.matcher.get_error()}")

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these may come next, one after the other."""
        return self.matcher.validate_tokens(list(token_ids))

    def forced(self) -> list[int]:
        """Tokens of the text that must come next, whatever is drawn; [] where there is a choice. The same text in other
        tokens may be allowed too."""
        return list(self.matcher.compute_ff_tokens())

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
        hidden = _clear(mask, self.hidden_token_ids)
        if not _any(mask):
            for token_id in hidden:
                mask[token_id >> 5] |= 1 << (token_id & 31)
            if not hidden:
                self.error = _failed("allows no token any more")


def _clear(mask: memoryview, token_ids: frozenset[int]) -> list[int]:
    """Those of ``token_ids`` that were in it."""
    found = [
        token_id for token_id in token_ids if token_id < 32 * len(mask) and mask[token_id >> 5] >> (token_id & 31) & 1
    ]
    for token_id in found:
        mask[token_id >> 5] ^= 1 << (token_id & 31)
    return found


def _any(mask: memoryview) -> bool:
    return bytes(mask) != bytes(mask.nbytes)


def _failed(why: str) -> GrammarError:
    return GrammarError(f"the grammar {why}".replace("<non-verbose/>", "").strip())


class GrammarMasks:
    """The masks of one step at a time, filled when the step was launched: beside its forward, where a device computes
    it. Owned by the engine thread.

    ``vocab_size``: columns of the logits. ``num_threads``: that fill rows beside each other.
    """

    def __init__(self, vocab_size: int, *, num_threads: int = 1) -> None:
        self.num_words = (vocab_size + 31) // 32
        self._executor = LLExecutor(num_threads)
        self.on_filled: Callable[[float], None] = lambda seconds: None
        """Told the seconds of each step's masks."""
        self._words = array("I")
        self._rows: dict[int, int] = {}

    def fill(self, grammars: Sequence[SequenceGrammar], drafts: Sequence[list[int]] = ()) -> None:
        """Fills a row for each of ``grammars``, none of them pending. ``drafts``: for each, tokens that may come next,
        each of which it allows behind those before: there is a row for behind each of them too. They are cut where
        behind one nothing may come."""
        counts = [1 + len(each) for each in drafts] or [1] * len(grammars)
        starts = [0, *itertools.accumulate(counts)]
        self._rows = {id(grammar): row for grammar, row in zip(grammars, starts, strict=False)}
        if not grammars:
            return
        if len(self._words) < starts[-1] * self.num_words:
            self._words = array("I", bytes(starts[-1] * self.num_words * 4))
        try:
            if any(drafts):
                self._fill_behind(grammars, drafts)
            else:
                self._fill(grammars)
        except Exception as exc:  # noqa: BLE001  # of a foreign library: these fail, the others go on
            for grammar in grammars:
                grammar.error = grammar.error or _failed(f"has no mask: {exc}")

    def share(self, grammar: SequenceGrammar, other: SequenceGrammar) -> None:
        """``other`` has the mask of ``grammar`` until the next :meth:`fill`."""
        self._rows[id(other)] = self._rows[id(grammar)]

    def has(self, grammar: SequenceGrammar) -> bool:
        """Whether the last :meth:`fill` was for it too."""
        return id(grammar) in self._rows

    def row(self, grammar: SequenceGrammar, num_drafts: int = 0) -> memoryview:
        """[num_words] uint32; bit ``i % 32`` of word ``i // 32`` says whether token ``i`` may come, behind the first
        ``num_drafts`` drafts. Valid until the next :meth:`fill`."""
        start = (self._rows[id(grammar)] + num_drafts) * self.num_words
        return memoryview(self._words)[start : start + self.num_words]

    def _fill_behind(self, grammars: Sequence[SequenceGrammar], drafts: Sequence[list[int]]) -> None:
        begin_s = time.perf_counter()
        address, _ = self._words.buffer_info()
        num_bytes = self.num_words * 4
        for grammar, token_ids in zip(grammars, drafts, strict=True):
            behind = grammar
            for num_drafts in range(len(token_ids) + 1):
                if num_drafts:
                    # A copy, which takes 2 us: a grammar that counts tokens (a budget of thought) cannot go back.
                    behind = grammar.fork() if num_drafts == 1 else behind
                    behind.consume(token_ids[num_drafts - 1])
                if behind.error is None:
                    row = self._rows[id(grammar)] + num_drafts
                    behind.matcher.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)
                    behind.trim(self.row(grammar, num_drafts))
                if behind.error is not None:
                    # What cannot go on behind a draft is no error before somebody has said the draft.
                    if num_drafts:
                        del token_ids[num_drafts - 1 :]
                    break
        self.on_filled(time.perf_counter() - begin_s)

    def _fill(self, grammars: Sequence[SequenceGrammar]) -> None:
        begin_s = time.perf_counter()
        address, _ = self._words.buffer_info()
        num_bytes = self.num_words * 4
        if len(grammars) <= ROWS_ALONE:
            for row, grammar in enumerate(grammars):
                grammar.matcher.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)
        else:
            rows = [(grammar.matcher, row) for row, grammar in enumerate(grammars)]
            self._executor.unsafe_compute_mask_ptr(rows, address, num_bytes, len(rows))
        for grammar in grammars:
            grammar.trim(self.row(grammar))
        self.on_filled(time.perf_counter() - begin_s)
