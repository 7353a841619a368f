"""A chat with images as token ids: where the images are, and what of it is worth a state."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import pytest

from common.errors import ImageRefusedError, InvalidRequestError
from common.images.layout import Grid
from common.images.rules import ImageLimits, ImageRules
from common.openai.protocol import ChatRequest, parse_chat
from common.text.chat_prompt import ChatPrompt, make_chat_prompt
from common.text.tokenizer import TextCodec
from tests.unit.images.test_security import encoded

PAD, END = "\u2588", "\u2592"
RULES = ImageRules(ord(PAD), ord(END), 8, 2, 16, 65536, "00")
LIMITS = ImageLimits(max_images=3)
A, B = encoded(64, 48, "PNG"), encoded(32, 16, "PNG")


class CharTokenizer:
    """A token for each character."""

    all_special_ids = ()
    chat_template = ""

    def __len__(self) -> int:
        return 0x3000

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(map(ord, text))

    def decode(self, token_ids: Any, **options: Any) -> str:
        return "".join(map(chr, token_ids))

    def convert_ids_to_tokens(self, token_ids: Sequence[int], **options: Any) -> list[str]:
        return list(map(chr, token_ids))

    def apply_chat_template(self, conversation: Sequence[Any], **options: Any) -> str:
        text = ""
        for message in conversation:
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            texts = [f"[{PAD}{END}" if part["type"] == "image" else part["text"] for part in parts]
            text += f"<{message['role']}>{''.join(texts)}\n"
        return text + "<a>" * bool(options.get("add_generation_prompt"))


def codec(rules: ImageRules | str = RULES) -> TextCodec:
    tokenizer: Any = CharTokenizer()
    return TextCodec(tokenizer, vocab_size=0x3000, max_model_len=4000, image_rules=rules)


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def chat(*parts: Any, before: Sequence[Any] = (), **fields: Any) -> ChatRequest:
    return parse_chat({"messages": [*before, {"role": "user", "content": list(parts)}], **fields})


def prompt(request: ChatRequest, rules: ImageRules | str = RULES) -> ChatPrompt:
    return make_chat_prompt(codec(rules), request, LIMITS, keeps_boundaries=True, max_model_len=4000)


def test_images_when_a_chat_has_them_then_their_placeholders_are_as_many_as_their_tokens() -> None:
    made = prompt(chat(text("one"), part(A), text("two"), part(B), text("three")))
    first, second = made.ids.images
    whole = "".join(map(chr, made.ids.token_ids))
    assert whole == f"<user>one[{PAD * 12}{END}two[{PAD * 2}{END}three\n<a>"
    assert (first.start, first.rows, first.columns) == (whole.index(PAD), 3, 4)
    assert (second.start, second.rows, second.columns) == (whole.index("two") + 4, 1, 2)
    assert (first.digest, second.digest) == (RULES.digest(A, Grid(3, 4)), RULES.digest(B, Grid(1, 2)))
    assert [each.data for each in made.encoded] == [A, B]


def test_boundaries_when_a_chat_has_images_then_are_behind_their_closing_tokens_and_after_marks() -> None:
    system = {"role": "system", "content": [{**text("A long system prompt."), "cache_control": {"type": "ephemeral"}}]}
    made = prompt(chat(text("one"), part(A), text("two"), part(B), text("three, and more than that"), before=[system]))
    first, second = made.ids.images
    whole = "".join(map(chr, made.ids.token_ids))
    assert made.ids.boundaries[:3] == (whole.index("<user>"), second.end + 1, first.end + 1)
    # The end of the last message is one too, at its place in the whole prompt.
    assert whole.index("<a>") in made.ids.boundaries
    assert not any(each.start < position < each.end for each in (first, second) for position in made.ids.boundaries)


def test_boundaries_when_there_are_many_images_then_the_last_ones_are_kept() -> None:
    made = make_chat_prompt(codec(), chat(*[part(A)] * 5), ImageLimits(), keeps_boundaries=True, max_model_len=4000)
    assert made.ids.boundaries[:3] == tuple(each.end + 1 for each in reversed(made.ids.images[2:]))


def test_images_when_a_text_spells_their_placeholder_then_refused() -> None:
    for parts in ((text(PAD), part(A)), (part(A), text(f"a {PAD} b"), part(B))):
        with pytest.raises(InvalidRequestError, match="one placeholder of an image for each"):
            prompt(chat(*parts))
    # Without images it is a token like any other.
    assert prompt(chat(text(PAD))).ids.images == ()


@pytest.mark.parametrize(
    ("parts", "fields", "words"),
    [
        ([part(B)] * 4, {}, "--limit-mm-per-prompt 3 images, got 4"),
        ([part(B)], {"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ([part(b"<svg/>")], {}, "must be a PNG"),
    ],
)
def test_images_when_there_are_too_many_or_they_are_none_then_refused(
    parts: list[Any], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        prompt(chat(*parts, **fields))


def test_images_when_the_model_takes_none_then_refused_with_the_reason_before_they_are_looked_at() -> None:
    with pytest.raises(ImageRefusedError, match=r"content\[0\].image_url.url: this model takes no images: a reason"):
        prompt(chat(part(b"nothing")), "a reason")
    assert prompt(chat(text("words")), "a reason").ids.images == ()
