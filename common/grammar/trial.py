"""The child process in which a grammar is compiled for the first time: ``python -m common.grammar.trial CPU_SECONDS``.

Reads grammars from stdin, each 4 bytes of length and UTF-8, and answers each on stdout in the same form: empty when it
is good, else why it is not. What begins with ``GBNF`` is answered with its Lark. A grammar that takes too much ends the
process: by SIGPROF after CPU_SECONDS, by a stack that is smaller than any in which it would be used later, or by the
limit on memory. Ends with its stdin.
"""

from __future__ import annotations

import re
import resource
import signal
import struct
import sys
import threading
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import BinaryIO

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from common.grammar.limits import parser_limits

STACK_BYTES = 1 << 20
"""Threads elsewhere have 2 MiB or more."""
MEMORY_BYTES = 2 << 30
WALK_TOKENS = 16
"""Tokens of an answer that are tried: what a grammar's first part costs shows there."""
MAX_TOKEN_ID = 1 << 19
"""Ids that a grammar may name (``<[123]>``); the largest vocabularies have half of it."""
NOTHING = "no text satisfies it"
ONE_OF = "oneOf is supported only where no value can fit two of its branches; use anyOf, which allows that"
_SPECIAL = re.compile(r"<[^<>\s\[\]\"/]{1,100}>")
_NUMBERS = re.compile(r"<\[[\d,\s-]{1,1000}\]>")
_ONE_OF = re.compile(r"oneOf constraints are not supported\b.*")
"""llguidance's words, which go on about an option that no client has."""
LENGTH = struct.Struct(">I")
GBNF = "GBNF:"
LARK = "%llguidance"
"""How the Lark of a text in GBNF begins; no reason does."""


class _Bytes:
    """A tokenizer of single bytes, and of the special tokens that a grammar names."""

    def __init__(self, special: Sequence[bytes]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"</s>", *special]
        self.eos_token_id = 256
        self.bos_token_id: int | None = None
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@lru_cache(maxsize=2)
def _tokenizer(names: tuple[bytes, ...], num_tokens: int) -> LLTokenizer:
    special = [*names, *(b"<|%d|>" % index for index in range(257 + len(names), num_tokens))]
    return LLTokenizer(TokenizerWrapper(_Bytes(special)))


def try_grammar(grammar: str) -> str:
    """Compiles ``grammar`` and begins an answer; why it cannot be used, empty when it can."""
    limits = parser_limits()
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=limits)
    if is_error:
        return _shortened(messages[0])
    names = sorted({name.encode() for name in _SPECIAL.findall(grammar)} - {b"</s>"})
    numbers = [int(number) for each in _NUMBERS.findall(grammar) for number in re.findall(r"\d{1,9}", each)]
    largest = max(numbers, default=0)
    if largest >= MAX_TOKEN_ID:
        return f"it names token id {largest}, the largest may be {MAX_TOKEN_ID - 1}"
    tokenizer = _tokenizer(tuple(names), 1 << largest.bit_length() if largest else 0)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    mask = array("I", bytes((tokenizer.vocab_size + 31) // 32 * 4))
    address, num_bytes = mask.buffer_info()[0], len(mask) * 4
    for place in range(WALK_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        matcher.unsafe_compute_mask_ptr(address, num_bytes)
        allowed = int.from_bytes(mask.tobytes(), "little")
        if not allowed:
            return _error_of(matcher) or (NOTHING if place == 0 else "")
        # The lowest one at even places, the highest one at odd places: other ways through the grammar than one alone.
        token = allowed.bit_length() - 1 if place % 2 else (allowed & -allowed).bit_length() - 1
        if token == tokenizer.eos_token:
            break
        matcher.deep_copy().consume_token(token)
        matcher.consume_token(token)
    if matcher.is_error():
        return _error_of(matcher)
    return NOTHING if matcher.is_stopped() and not matcher.is_accepting() else ""


def _error_of(matcher: LLMatcher) -> str:
    error = _shortened(matcher.get_error()) if matcher.is_error() else ""
    return NOTHING if error == "NoExtensionBias" else error


def _shortened(message: str) -> str:
    return _ONE_OF.sub(ONE_OF, message.replace("<non-verbose/>", "").partition("<backtrace>")[0].strip())[:500]


def _serve(stdin: BinaryIO, stdout: BinaryIO, cpu_seconds: float) -> None:
    while head := stdin.read(LENGTH.size):
        grammar = stdin.read(LENGTH.unpack(head)[0]).decode()
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            verdict = gbnf_to_lark(grammar[len(GBNF) :]) if grammar.startswith(GBNF) else try_grammar(grammar)
        except Exception as exc:  # noqa: BLE001  # of a foreign library; its misuse is this grammar's too
            verdict = f"{type(exc).__name__}: {exc}"[:500]
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer = verdict.encode()
        stdout.write(LENGTH.pack(len(answer)) + answer)
        stdout.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to hear
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[1])))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
