"""Text of byte tokens, ``<0x00>`` to ``<0xFF>``, in which vocabularies with byte fallback spell what they lack.

The libraries decode a run of them all or nothing: while its last character is not complete they show a replacement
character for every byte, so that whole characters before it, which were given out already, would be taken back. Here a
run is read as any stream of UTF-8 is: what is wrong in it is replaced and the rest stays, whatever follows.

1 The tokenizer decodes. 2 Where its text has replacement characters, each run is written anew in the bytes of its own
text, those of the replacement character where it is wrong. 3 The tokenizer, which finds nothing but UTF-8 now, decodes
again, so that all else is its own: blanks, special tokens, what stands around a run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Protocol

from common.text.detokenizer import REPLACEMENT, Decoder

_NAMES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_PROBE = "\u20ac"


class Vocabulary(Decoder, Protocol):
    """A tokenizer that knows the names of its tokens."""

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> Sequence[str | None]: ...

    def convert_tokens_to_ids(self, tokens: list[str]) -> Sequence[int | None]: ...


class ByteRuns:
    """Finds the runs of byte tokens among ids.

    Args:
        tokenizer: is not asked for its byte tokens before the first broken character.
        special_ids: what ``skip_special_tokens`` leaves out; a run goes on behind it.
    """

    def __init__(self, tokenizer: Vocabulary, special_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids

    @cached_property
    def _token_ids(self) -> tuple[int, ...]:
        """The token of each byte; none where there is no byte fallback."""
        ids = [each for each in self._tokenizer.convert_tokens_to_ids(list(_NAMES)) if each is not None]
        if tuple(self._tokenizer.convert_ids_to_tokens(ids)) != _NAMES:
            return ()
        # A vocabulary may have the names as plain text.
        probe = self._tokenizer.decode([ids[byte] for byte in _PROBE.encode()], skip_special_tokens=False)
        return tuple(ids) if _PROBE in probe else ()

    @cached_property
    def _byte_of(self) -> dict[int, int]:
        return {token_id: byte for byte, token_id in enumerate(self._token_ids)}

    def mended(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> list[int] | None:
        """``token_ids`` with every run in UTF-8; None without a run."""
        byte_of = self._byte_of
        if byte_of.keys().isdisjoint(token_ids):
            return None
        mended: list[int] = []
        run = bytearray()
        for token_id in token_ids:
            if skip_special_tokens and token_id in self._special_ids:
                continue
            byte = byte_of.get(token_id)
            if byte is not None:
                run.append(byte)
            # An id that the tokenizer does not know has no text and ends no run.
            elif not run or self._tokenizer.convert_ids_to_tokens([token_id])[0] is not None:
                mended += self._spelled(run)
                mended.append(token_id)
                run.clear()
        return mended + self._spelled(run)

    def _spelled(self, run: bytearray) -> list[int]:
        return [self._token_ids[byte] for byte in run.decode(errors="replace").encode()]


class RunDecoder:
    """``decoder`` with runs read in this way. Without a replacement character in its text it costs nothing more."""

    def __init__(self, decoder: Decoder, runs: ByteRuns) -> None:
        self._decoder = decoder
        self._runs = runs

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = self._decoder.decode(token_ids, skip_special_tokens=skip_special_tokens)
        if REPLACEMENT not in text:
            return text
        mended = self._runs.mended(token_ids, skip_special_tokens=skip_special_tokens)
        return text if mended is None else self._decoder.decode(mended, skip_special_tokens=skip_special_tokens)
