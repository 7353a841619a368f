from __future__ import annotations

import json
import math
from typing import Any

import pytest

from common.openai.logprobs import MIN_LOGPROB, chat_logprobs, completion_logprobs
from common.request import TokenLogprob
from common.text.tokenizer import TextCodec


@pytest.fixture
def codec(tokenizer: Any) -> TextCodec:
    return TextCodec(tokenizer, vocab_size=len(tokenizer))


def entries(codec: TextCodec, text: str) -> list[TokenLogprob]:
    return [TokenLogprob(token_id, -0.5, 1, ((token_id, -0.5), (3, -1.5))) for token_id in codec.encode(text)]


def test_completion_text_offsets_point_into_the_text_also_with_split_characters(codec: TextCodec) -> None:
    text = "hello 😀 the é!"
    block = completion_logprobs(entries(codec, text), codec.piece)
    for token, offset in zip(block["tokens"], block["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert text[offset:].startswith(token)
    assert len(block["tokens"]) == len(block["token_logprobs"]) == len(block["top_logprobs"])


def test_completion_logprobs_of_an_echoed_prompt_begin_with_null(codec: TextCodec, tokenizer: Any) -> None:
    ids = [tokenizer.eos_token_id, *codec.encode("the fox")]
    rest = [TokenLogprob(token_id, -2.0, 4, ()) for token_id in ids[1:]]
    block = completion_logprobs([None, *rest], codec.piece, token_ids=ids, text_offset=10)
    assert block["token_logprobs"][0] is None
    assert block["top_logprobs"][0] is None
    assert block["text_offset"][:2] == [10, 10]
    shown = completion_logprobs([None, *rest], codec.piece, token_ids=ids, skip_special_tokens=False)
    assert shown["text_offset"][1] == len(tokenizer.eos_token)


def test_logprob_of_minus_infinity_stays_json(codec: TextCodec) -> None:
    masked = [TokenLogprob(5, -math.inf, 9, ((6, -math.inf),))]
    block = completion_logprobs(masked, codec.piece)
    assert block["token_logprobs"] == [MIN_LOGPROB]
    json.dumps(chat_logprobs(masked, codec.piece), allow_nan=False)


def test_num_top_limits_the_alternatives(codec: TextCodec) -> None:
    items = entries(codec, "x")
    assert completion_logprobs(items, codec.piece, num_top=0)["top_logprobs"] is None
    assert chat_logprobs(items, codec.piece, num_top=0)["content"][0]["top_logprobs"] == []
    assert len(chat_logprobs(items, codec.piece, num_top=2)["content"][0]["top_logprobs"]) == 2
