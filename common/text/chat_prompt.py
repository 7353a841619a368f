"""A chat as its model gets it: token ids, the places in them that are worth a state, and the images among them.

1 the template writes one placeholder for each image, 2 the images' headers say how many tokens each takes (nothing is
decoded), 3 each placeholder becomes as many. A text that spells the placeholder is refused where it would be taken for
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
    """``encoded``: the images that ``ids.images`` are the places of, in order."""

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
    expanded, images = expand(token_ids, encoded, rules)
    if keeps_boundaries and len(expanded) <= max_model_len:
        ends = [_after(image, expanded, rules) for image in images]
        found = codec.chat_boundaries(request, token_ids, [_shrunk(end, images) for end in reversed(ends)])
        boundaries = tuple(_grown(position, images) for position in found)
    return ChatPrompt(PromptIds(expanded, boundaries, images), encoded)


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


def expand(
    token_ids: Sequence[int], encoded: Sequence[EncodedImage], rules: ImageRules
) -> tuple[list[int], tuple[ImageSpan, ...]]:
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
    begin = 0
    for image in encoded:
        rows, columns = rules.grid(image.header, image.name)
        at = token_ids.index(rules.placeholder_id, begin)
        expanded += token_ids[begin:at]
        images.append(ImageSpan(len(expanded), rows, columns, rules.digest(image.data, rows, columns)))
        expanded += [rules.placeholder_id] * (rows * columns)
        begin = at + 1
    return [*expanded, *token_ids[begin:]], tuple(images)


def _after(image: ImageSpan, token_ids: Sequence[int], rules: ImageRules) -> int:
    """The position behind an image and the token that closes it."""
    is_closed = image.end < len(token_ids) and token_ids[image.end] == rules.end_id
    return image.end + is_closed


def _shrunk(position: int, images: Sequence[ImageSpan]) -> int:
    """A position that is within no image, where each is one placeholder."""
    return position - sum(image.length - 1 for image in images if image.end <= position)


def _grown(position: int, images: Sequence[ImageSpan]) -> int:
    """The other way."""
    for image in images:
        if position <= image.start:
            break
        position += image.length - 1
    return position
