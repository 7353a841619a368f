"""The model's vocabulary as llguidance wants it: the bytes of each token, and which ones end an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from common.text.tokenizer import TextCodec


def grammar_tokenizer(codec: TextCodec, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Blocks, for half a second with 150,000 tokens. Rows beyond what the tokenizer knows are never allowed.

    Raises:
        ValueError: the tokenizer cannot be taken apart.
    """
    eos = sorted(eos_token_ids)
    backend = getattr(codec.tokenizer, "backend_tokenizer", None)
    if backend is not None:
        document = json.loads(backend.to_str())
        document["truncation"] = document["padding"] = None
        try:
            return LLTokenizer(json.dumps(document), n_vocab=codec.vocab_size, eos_token=eos, slices=None)
        except ValueError:
            pass  # a kind of tokenizer that it does not read: token by token then
    return LLTokenizer(TokenizerWrapper(_Pieces(codec, eos)), eos_token=eos)


class _Pieces:
    """What ``TokenizerWrapper`` asks of a tokenizer."""

    def __init__(self, codec: TextCodec, eos_token_ids: Sequence[int]) -> None:
        num_known = len(codec.tokenizer)
        special = {token_id for token_id in codec.special_ids if token_id < codec.vocab_size}
        self._codec = codec
        self.tokens = [
            codec.piece(token_id).data if token_id < num_known else b"" for token_id in range(codec.vocab_size)
        ]
        self.special_token_ids = sorted(special | set(range(num_known, codec.vocab_size)))
        for token_id in self.special_token_ids:
            if not self.tokens[token_id]:
                self.tokens[token_id] = b"<|%d|>" % token_id
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id: int | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        # Only how a text would be cut into tokens; it changes no mask.
        return self._codec.encode(text if isinstance(text, str) else text.decode(errors="replace"))
