from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.text.detokenizer import REPLACEMENT, TextStream
from common.text.tokenizer import TextCodec
from tests.unit.text.vocabulary import byte_fallback, train_byte_level

BYTE_LEVEL = train_byte_level()
EOS_ID = BYTE_LEVEL.eos_token_id
FALLBACK = byte_fallback()
FALLBACK_CODEC = TextCodec(FALLBACK, vocab_size=len(FALLBACK) + 8)
HELLO, WORLD, BLANK, MARK = FALLBACK.convert_tokens_to_ids(["\u2581Hello", "\u2581world", "\u2581", "!"])


def encode(text: str) -> list[int]:
    return BYTE_LEVEL.encode(text, add_special_tokens=False)


def run(token_ids: list[int], tokenizer: Any = BYTE_LEVEL, **kwargs: Any) -> tuple[list[str], TextStream]:
    """Feed ids one at a time; returns the texts of each add and of the finish."""
    stream = TextStream(tokenizer, **kwargs)
    texts = []
    for token_id in token_ids:
        delta = stream.add([token_id])
        texts.append(delta.text)
        if delta.stopped is not None:
            break
    texts.append(stream.finish().text)
    return texts, stream


def test_emoji_over_several_tokens_comes_out_whole_with_its_last_token() -> None:
    token_ids = encode("hi 😀!")
    num_emoji_tokens = len(encode("😀"))
    assert num_emoji_tokens == 4
    texts, _ = run(token_ids)
    assert "".join(texts) == "hi 😀!"
    assert not any(REPLACEMENT in text for text in texts)
    where = next(index for index, text in enumerate(texts) if "😀" in text)
    assert texts[where - 3 : where] == ["", "", ""]


@settings(max_examples=150)
@given(text=st.text(max_size=80), seed=st.integers(0, 2**32 - 1))
def test_any_text_in_any_chunks_is_reassembled_without_replacements(text: str, seed: int) -> None:
    token_ids, rng = encode(text), random.Random(seed)
    stream, parts, start = TextStream(BYTE_LEVEL), [], 0
    while start < len(token_ids):
        size = rng.randint(1, 5)
        parts.append(stream.add(token_ids[start : start + size]).text)
        start += size
    if REPLACEMENT not in text:
        assert REPLACEMENT not in "".join(parts)
    parts.append(stream.finish().text)
    assert "".join(parts) == text


@settings(max_examples=150)
@given(token_ids=st.lists(st.integers(1, len(BYTE_LEVEL) - 1), max_size=90))
def test_any_ids_even_invalid_bytes_give_the_text_of_the_whole(token_ids: list[int]) -> None:
    texts, _ = run(token_ids)
    assert "".join(texts) == BYTE_LEVEL.decode(token_ids)


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_endless_invalid_bytes_are_emitted_and_not_held_for_ever(num_bytes: int) -> None:
    token_ids = encode("😀")[:num_bytes] * 200
    stream = TextStream(BYTE_LEVEL)
    emitted = stream.add(token_ids).text
    assert len(emitted) >= 190
    assert emitted + stream.finish().text == BYTE_LEVEL.decode(token_ids)


def test_incomplete_character_at_the_end_shows_only_at_finish() -> None:
    stream = TextStream(BYTE_LEVEL)
    assert stream.add(encode("a😀")[:-1]).text == "a"
    assert stream.finish().text == REPLACEMENT


def test_prompt_that_ends_within_a_character_leaves_nothing_of_it_unless_the_answer_ends_it() -> None:
    euro, brace = encode("€"), encode("{")
    assert len(euro) > 1
    for num_given in range(1, len(euro)):
        given, rest = euro[:num_given], euro[num_given:]
        texts, _ = run(brace * 9, context_token_ids=given)
        assert "".join(texts) == "{" * 9
        texts, _ = run([*rest, *brace], context_token_ids=given)
        assert "".join(texts) == "€{"
        texts, _ = run([*given, *brace], context_token_ids=encode("a"))
        assert "".join(texts).endswith("{")
        assert "".join(texts).startswith(REPLACEMENT)  # the answer's own


def test_byte_fallback_decoder_gives_whole_characters_and_keeps_spaces(sentencepiece: Any) -> None:
    hello, world = sentencepiece.convert_tokens_to_ids(["\u2581Hello", "\u2581world"])
    euro = sentencepiece.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in "€".encode()])
    texts, _ = run([world, *euro, hello] * 12, sentencepiece, context_token_ids=[hello])
    assert "".join(texts) == " world€ Hello" * 12
    assert texts[:5] == [" world", "", "", "€", " Hello"]


def test_long_output_has_the_same_text_as_one_decode() -> None:
    text = "the quick brown fox 😀 jumps é over. " * 40
    texts, stream = run(encode(text))
    assert "".join(texts) == text
    assert stream.num_tokens == len(encode(text))


def test_stop_string_over_several_tokens_is_cut_before_it_and_never_shown() -> None:
    token_ids = encode("hello world.") + encode("@@END@@") + encode("the lazy dog")
    assert len(encode("@@END@@")) > 3
    texts, stream = run(token_ids, stop=["@@END@@"])
    assert "".join(texts) == "hello world."
    assert stream.stopped == "@@END@@"
    assert stream.num_tokens == len(encode("hello world.")) + len(encode("@@END@@"))


def test_stop_string_inside_one_add_consumes_up_to_its_token_only() -> None:
    head, tail = encode("hello"), encode("!! and more")
    delta = TextStream(BYTE_LEVEL, ["!"]).add(head + tail)
    assert delta.text == "hello"
    assert delta.stopped == "!"
    assert delta.num_tokens_consumed == len(head) + 1


def test_stop_string_that_begins_inside_a_token_cuts_within_it() -> None:
    (the,) = encode(" the")
    texts, stream = run([*encode("over"), the, *encode(" dog")], stop=["he"])
    assert "".join(texts) == "over t"
    assert stream.stopped == "he"


def test_possible_beginning_of_a_stop_string_is_held_until_it_is_decided() -> None:
    stream = TextStream(BYTE_LEVEL, ["###STOP"])
    assert stream.add(encode("a##")).text == "a"
    assert stream.add(encode("#")).text == ""
    assert stream.add(encode("x")).text == "###x"
    assert stream.add(encode("##")).text == ""
    last = stream.finish()
    assert (last.text, last.stopped) == ("##", None)


@settings(max_examples=200)
@given(
    text=st.text(alphabet="ab!é😀", max_size=30),
    stops=st.lists(st.text(alphabet="ab!é😀", min_size=1, max_size=4), max_size=3),
    size=st.integers(1, 7),
)
def test_stop_result_does_not_depend_on_how_tokens_arrive(text: str, stops: list[str], size: int) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    token_ids, stream, out = encode(text), TextStream(BYTE_LEVEL, stops), ""
    for start in range(0, len(token_ids), size):
        delta = stream.add(token_ids[start : start + size])
        out += delta.text
        assert expected.startswith(out)
        if delta.stopped is not None:
            break
    assert out + stream.finish().text == expected
    assert (stream.stopped is not None) == bool(ends)


def test_stop_string_before_min_tokens_is_text() -> None:
    token_ids = encode("!a!b!c")
    texts, stream = run(token_ids, stop=["!"], min_tokens=4)
    assert "".join(texts) == "!a!b"
    assert stream.num_tokens == 5


def test_special_token_is_skipped_or_shown_as_asked() -> None:
    token_ids = [*encode("hi"), EOS_ID]
    assert "".join(run(token_ids)[0]) == "hi"
    assert "".join(run(token_ids, skip_special_tokens=False)[0]) == "hi<|end|>"


def test_hidden_last_token_is_counted_and_has_no_text() -> None:
    stream = TextStream(BYTE_LEVEL, skip_special_tokens=False)
    delta = stream.add([*encode("hi"), EOS_ID], hide_last=True)
    assert (delta.text, delta.num_tokens_consumed) == ("hi", len(encode("hi")) + 1)
    assert stream.num_tokens == len(encode("hi")) + 1
    assert stream.finish().text == ""


def test_add_after_the_end_is_a_bug() -> None:
    stream = TextStream(BYTE_LEVEL)
    stream.finish()
    with pytest.raises(AssertionError):
        stream.add([1])


# --- runs of byte tokens ----------------------------------------------------------------------------------------------


def spelled(data: str | bytes) -> list[int]:
    """As byte tokens."""
    each = data.encode() if isinstance(data, str) else data
    ids: list[int] = FALLBACK.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in each])
    return ids


def fallback_texts(token_ids: list[int], **kwargs: Any) -> list[str]:
    return run(token_ids, FALLBACK_CODEC.decoder, **kwargs)[0]


@pytest.mark.parametrize("text", ["€€", "😀😁" * 20, "ü€😀ab"], ids=["two", "many", "mixed"])
def test_characters_when_a_run_of_bytes_has_several_then_each_comes_out_with_its_last_byte(text: str) -> None:
    expected: list[str] = []
    for char in text:
        expected += [*[""] * (len(char.encode()) - 1), char]
    assert fallback_texts(spelled(text)) == [*expected, ""]
    assert FALLBACK_CODEC.decode(spelled(text)) == text


def test_run_of_bytes_when_it_stands_between_words_then_they_keep_their_blanks() -> None:
    token_ids = [WORLD, *spelled("😀😁"), HELLO, WORLD, *spelled("€"), BLANK, *spelled("€€"), MARK] * 8
    texts = fallback_texts(token_ids, context_token_ids=[HELLO])
    assert "".join(texts) == " world😀😁 Hello world€ €€!" * 8


def test_run_of_bytes_when_it_is_wrong_then_whole_characters_stay_and_the_rest_is_replaced() -> None:
    cut, wrong = spelled("😀😁")[:-1], [*spelled("€"), *spelled(b"\xff\xc3"), *spelled("€")]
    assert "".join(fallback_texts(cut)) == FALLBACK_CODEC.decode(cut) == f"😀{REPLACEMENT}"
    assert "".join(fallback_texts([*cut, WORLD])) == FALLBACK_CODEC.decode([*cut, WORLD]) == f"😀{REPLACEMENT} world"
    assert "".join(fallback_texts([*wrong, WORLD])) == f"€{REPLACEMENT}{REPLACEMENT}€ world"


def test_prompt_when_it_ends_within_a_run_of_bytes_then_the_answer_goes_on_with_it() -> None:
    token_ids = spelled("😀😁€😀")
    for num_given in range(len(token_ids)):
        before = FALLBACK_CODEC.decode(token_ids[:num_given]).removesuffix(REPLACEMENT)
        texts = fallback_texts(token_ids[num_given:], context_token_ids=token_ids[:num_given])
        assert before + "".join(texts) == "😀😁€😀"


CHUNKS = st.one_of(st.text(max_size=6).map(spelled), st.sampled_from([[HELLO], [WORLD], [BLANK], [MARK]]))
DAMAGED_CHUNKS = st.one_of(
    CHUNKS,
    st.binary(max_size=5).map(spelled),
    st.sampled_from(["😀", "€", "ü"]).map(lambda char: spelled(char)[:-1]),
)
HIDDEN = (FALLBACK.eos_token_id, len(FALLBACK) + 3)
"""A special token, and an id that the tokenizer does not know: neither has a text."""


@settings(max_examples=200)
@given(chunks=st.lists(CHUNKS, max_size=25), seed=st.integers(0, 2**32 - 1))
def test_texts_when_words_and_bytes_alternate_then_streams_have_no_replacement(
    chunks: list[list[int]], seed: int
) -> None:
    token_ids = [token_id for chunk in chunks for token_id in chunk]
    whole = FALLBACK.decode(token_ids)
    assert "".join(fallback_texts(token_ids)) == whole
    assert _in_pieces(token_ids, seed) == whole
    assert FALLBACK_CODEC.decode(token_ids) == whole


@settings(max_examples=300)
@given(chunks=st.lists(DAMAGED_CHUNKS, max_size=25), seed=st.integers(0, 2**32 - 1))
def test_bytes_when_some_are_wrong_or_tokens_have_no_text_then_streams_say_what_the_whole_says(
    chunks: list[list[int]], seed: int
) -> None:
    rng = random.Random(seed)
    token_ids: list[int] = []
    for token_id in (token_id for chunk in chunks for token_id in chunk):
        token_ids += [rng.choice(HIDDEN), token_id] if rng.random() < 0.1 else [token_id]
    whole = FALLBACK_CODEC.decode(token_ids, skip_special_tokens=True)
    assert "".join(fallback_texts(token_ids)) == whole
    assert _in_pieces(token_ids, seed) == whole


def _in_pieces(token_ids: list[int], seed: int) -> str:
    stream, rng, text, start = TextStream(FALLBACK_CODEC.decoder), random.Random(seed), "", 0
    while start < len(token_ids):
        size = rng.randint(1, 9)
        text += stream.add(token_ids[start : start + size]).text
        start += size
    return text + stream.finish().text


def test_names_of_bytes_when_they_are_text_in_a_vocabulary_then_are_no_bytes() -> None:
    tokenizer = train_byte_level()
    tokenizer.add_tokens([f"<0x{byte:02X}>" for byte in range(256)])
    codec = TextCodec(tokenizer, vocab_size=len(tokenizer))
    cut = tokenizer.encode("😀", add_special_tokens=False)[:-1]
    token_ids = [*tokenizer.convert_tokens_to_ids(["<0xE2>", "<0x41>"]), *cut]
    assert codec.decode(token_ids) == f"<0xE2><0x41>{REPLACEMENT}"
    assert "".join(run(token_ids, codec.decoder)[0]) == f"<0xE2><0x41>{REPLACEMENT}"
