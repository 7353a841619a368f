"""Log-probabilities of tokens as the two endpoints answer them: parallel lists for completions, a list of objects for
chats. The caller gives the text and bytes of each token (``piece_of``): no tokenizer is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.request import TokenLogprob

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, the log-probability of a masked token, which JSON cannot carry. The value is vLLM's."""


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """One token as log-probability blocks show it: ``text`` (``bytes:\\x..`` when it is no whole character), its
    bytes."""

    token_id: int
    text: str
    data: bytes
    is_special: bool = False

    @property
    def num_chars(self) -> int:
        """Characters that begin in this token, so that sums over tokens are offsets into the text."""
        return sum(1 for byte in self.data if byte & 0xC0 != 0x80)


PieceOf = Callable[[int], TokenPiece]


def named_by_id(piece_of: PieceOf) -> PieceOf:
    """``piece_of`` with ``token_id:ID`` as the text: tokens that are no whole characters can be told apart."""
    return lambda token_id: replace(piece_of(token_id), text=f"token_id:{token_id}")


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None], piece_of: PieceOf, *, num_top: int
) -> list[dict[str, Any] | None]:
    """``prompt_logprobs`` as vLLM has it: for each token of the prompt (the first has None) token id -> its
    log-probability and rank, for the ``num_top`` most likely ones and the token that is there."""
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": piece_of(token_id).text}
            for token_id, logprob, rank in (
                *((token_id, logprob, place) for place, (token_id, logprob) in enumerate(entry.top[:num_top], start=1)),
                (entry.token_id, entry.logprob, entry.rank),
            )
        }
        for entry in entries
    ]


def completion_logprobs(
    entries: Sequence[TokenLogprob | None],
    piece_of: PieceOf,
    *,
    token_ids: Sequence[int] | None = None,
    text_offset: int = 0,
    skip_special_tokens: bool = True,
    num_top: int | None = None,
) -> dict[str, Any]:
    """``logprobs`` of a completion choice: parallel lists over its tokens.

    Args:
        entries: one per token; ``None`` for a token without one (the first of an echoed prompt).
        piece_of: token id -> its text and bytes.
        token_ids: the tokens, needed only where ``entries`` holds ``None``.
        text_offset: characters of the choice's text before the first of these tokens (chunks go on from the last
        one's).
        skip_special_tokens: special tokens have no characters in the text.
        num_top: alternatives asked for; 0 gives null ``top_logprobs``. ``None``: as many as the entries have.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for index, entry in enumerate(entries):
        if entry is None:
            assert token_ids is not None, "a token without log-probability needs its id"
        piece = piece_of(entry.token_id if entry is not None else token_ids[index])  # type: ignore[index]
        tokens.append(piece.text)
        offsets.append(text_offset)
        if not (piece.is_special and skip_special_tokens):
            text_offset += piece.num_chars
        if entry is None:
            logprobs.append(None)
            tops.append(None)
            continue
        logprobs.append(finite(entry.logprob))
        # The sampled token comes last so that its own entry wins where two tokens share a text.
        top = {piece_of(token_id).text: finite(value) for token_id, value in entry.top[:num_top]}
        top[piece.text] = finite(entry.logprob)
        tops.append(top)
    return {
        "text_offset": offsets,
        "token_logprobs": logprobs,
        "tokens": tokens,
        "top_logprobs": None if num_top == 0 else tops,
    }


def chat_logprobs(entries: Sequence[TokenLogprob], piece_of: PieceOf, *, num_top: int | None = None) -> dict[str, Any]:
    """``logprobs`` of a chat choice: ``content`` has one entry per token, each with ``num_top`` alternatives."""
    content = []
    for entry in entries:
        tops = [_chat_token(piece_of(token_id), value) for token_id, value in entry.top[:num_top]]
        content.append({**_chat_token(piece_of(entry.token_id), entry.logprob), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def _chat_token(piece: TokenPiece, logprob: float) -> dict[str, Any]:
    return {"token": piece.text, "logprob": finite(logprob), "bytes": list(piece.data)}


def finite(logprob: float) -> float:
    """``logprob`` as JSON can carry it."""
    return max(logprob, MIN_LOGPROB)
