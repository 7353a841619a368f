"""A chat as its model gets it: token ids, the places in them that are worth a state, and the images among them.

1 the template writes one placeholder for each image, 2 the images' headers say how many tokens each takes (nothing is
decoded), 3 each placeholder becomes as many, with what else the model's processor puts there; a large image may be
several pieces, each with a place of its own. A text that spells the placeholder is refused where it would be taken for
an image: then there are more of them than images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ImageRefusedError, InvalidRequestError
from common.images.rules import ImageLimits, ImageRules
from common.images.source import EncodedImage
from common.images.span import ImageSpan
from common.openai.prompt_ids import PromptIds
from common.openai.protocol import ChatRequest
from common.text.tokenizer import TextCodec


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """``encoded``: the images whose pieces ``ids.images`` are the places of, in order."""

    ids: PromptIds
    encoded: tuple[EncodedImage, ...] = ()


def make_chat_prompt(
    codec: TextCodec, request: ChatRequest, limits: ImageLimits, *, keeps_boundaries: bool, max_model_len: int
) -> ChatPrompt:
    """Blocks; milliseconds for a long chat, and for each megabyte of images.

    Raises:
        InvalidRequestError: as ``TextCodec.encode_chat``, or because of an image.
    """
    codec.check_images(request)
    encoded = read_images(request, limits)
    token_ids = codec.encode_chat(request)
    boundaries: tuple[int, ...] = ()
    if not encoded:
        if keeps_boundaries and len(token_ids) <= max_model_len:
            boundaries = codec.chat_boundaries(request, token_ids)
        return ChatPrompt(PromptIds(token_ids, boundaries))
    rules = codec.image_rules
    assert isinstance(rules, ImageRules), "the codec refuses images of other models"
    expanded = expand(token_ids, encoded, rules)
    if keeps_boundaries and len(expanded.token_ids) <= max_model_len:
        ends = [expanded.after(index, rules) for index in range(len(encoded))]
        found = codec.chat_boundaries(request, token_ids, [expanded.shrunk(end) for end in reversed(ends)])
        boundaries = tuple(expanded.grown(position) for position in found)
    return ChatPrompt(PromptIds(expanded.token_ids, boundaries, expanded.images), encoded)


def read_images(request: ChatRequest, limits: ImageLimits) -> tuple[EncodedImage, ...]:
    """Raises InvalidRequestError for too many images, or for one of them."""
    sources = request.images
    if len(sources) > limits.max_images:
        raise ImageRefusedError(
            f"a request must bring at most --limit-mm-per-prompt {limits.max_images} images, got {len(sources)}",
            reason="limit",
            param="messages",
        )
    if sources and request.truncate_prompt_tokens is not None:
        raise InvalidRequestError(
            "truncate_prompt_tokens is not supported for prompts with images", param="truncate_prompt_tokens"
        )
    return tuple(source.read(limits) for source in sources)


@dataclass(frozen=True, slots=True)
class Expanded:
    """A prompt with a token for each part of its images.

    Attributes:
        images: where the images' pieces are.
        places: for each image where it begins and ends, with what the processor puts round it.
    """

    token_ids: list[int]
    images: tuple[ImageSpan, ...]
    places: tuple[tuple[int, int], ...]

    def after(self, index: int, rules: ImageRules) -> int:
        """The position behind an image and the token that closes it."""
        end = self.places[index][1]
        is_closed = end < len(self.token_ids) and self.token_ids[end] == rules.end_id
        return end + is_closed

    def shrunk(self, position: int) -> int:
        """A position that is within no image, where each is one placeholder."""
        return position - sum(end - start - 1 for start, end in self.places if end <= position)

    def grown(self, position: int) -> int:
        """The other way."""
        for start, end in self.places:
            if position <= start:
                break
            position += end - start - 1
        return position


def expand(token_ids: Sequence[int], encoded: Sequence[EncodedImage], rules: ImageRules) -> Expanded:
    """The ids with a placeholder for each token of each image, and where the images are.

    Raises:
        InvalidRequestError: there are not as many placeholders as images.
    """
    num_placeholders = token_ids.count(rules.placeholder_id)
    if num_placeholders != len(encoded):
        raise InvalidRequestError(
            f"messages must have one placeholder of an image for each of their {len(encoded)} images, got "
            f"{num_placeholders}: a text of theirs spells it, or the chat template leaves images out",
            param="messages",
        )
    expanded: list[int] = []
    images: list[ImageSpan] = []
    places: list[tuple[int, int]] = []
    begin = 0
    for image in encoded:
        at = token_ids.index(rules.placeholder_id, begin)
        expanded += token_ids[begin:at]
        start, num_pieces = len(expanded), 0
        for part in rules.layout(image.header, image.name):
            if isinstance(part, int):
                expanded.append(part)
                continue
            rows, columns = rules.span_shape(part)
            digest = rules.digest(image.data, part, num_pieces)
            images.append(ImageSpan(len(expanded), rows, columns, digest))
            expanded += [rules.placeholder_id] * (rows * columns)
            num_pieces += 1
        places.append((start, len(expanded)))
        begin = at + 1
    return Expanded([*expanded, *token_ids[begin:]], tuple(images), tuple(places))
