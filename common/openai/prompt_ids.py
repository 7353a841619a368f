"""``tandem_prompt``: the tokens of a chat, from a proxy that has rendered and tokenised it already; and
``tandem_images``: its images, for the leg that computes them.

It takes the place of ``messages`` and of every other field that only a template reads. Nodes take it from their proxy
alone (which has the cluster key, where one is set); from anybody else it is an unknown field, which is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequestError
from common.images.source import ImageSource
from common.images.span import ImageSpan
from common.wire.fields import MAX_TOKEN_ID, Fields, invalid
from common.wire.image_spans import read_spans, spans_to_json

PROMPT_IDS_KEY = "tandem_prompt"
IMAGES_KEY = "tandem_images"
"""Beside it in the body of a leg to a prefill node, never to a decode node: as many images as the prompt has places
for."""
MAX_BOUNDARIES = 6
"""Positions of a prompt, besides its end, at which states are worth keeping."""

# Fields of a chat body that only the template reads; tools are also needed where the answer is made.
_TEMPLATE_FIELDS = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "documents",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
)


@dataclass(frozen=True, slots=True)
class PromptIds:
    """Token ids, the positions in them at which later prompts are likely to part from this one, the most reusable first
    (``common.text.boundaries`` finds them), and the images among them."""

    token_ids: Sequence[int]
    boundaries: tuple[int, ...] = ()
    images: tuple[ImageSpan, ...] = ()

    def put_into(self, body: Mapping[str, Any], sources: Sequence[ImageSource] = ()) -> dict[str, Any]:
        """A chat body that says the same to a node without being rendered. ``sources``: the images."""
        rest = {key: value for key, value in body.items() if key not in _TEMPLATE_FIELDS}
        prompt: dict[str, Any] = {"token_ids": self.token_ids, "boundaries": list(self.boundaries)}
        if self.images:
            prompt["images"] = spans_to_json(self.images)
        return {**rest, PROMPT_IDS_KEY: prompt, **({IMAGES_KEY: images_to_json(sources)} if sources else {})}


def read_prompt_ids(body: Mapping[str, Any]) -> PromptIds | None:
    """The field of a chat body, None without. Raises InvalidRequestError naming what is wrong with it."""
    value = body.get(PROMPT_IDS_KEY)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        invalid(PROMPT_IDS_KEY, value, "an object with token_ids")
    fields = Fields(value, prefix=PROMPT_IDS_KEY + ".")
    token_ids = fields.int_list("token_ids", le=MAX_TOKEN_ID)
    if not token_ids:
        raise InvalidRequestError(f"{PROMPT_IDS_KEY}.token_ids is required", param=f"{PROMPT_IDS_KEY}.token_ids")
    boundaries = fields.int_list("boundaries", ge=1, le=len(token_ids)) or ()
    if len(boundaries) > MAX_BOUNDARIES:
        invalid(f"{PROMPT_IDS_KEY}.boundaries", boundaries, f"at most {MAX_BOUNDARIES} positions")
    return PromptIds(token_ids, boundaries, read_spans(fields, "images", len(token_ids)))


def images_to_json(sources: Sequence[ImageSource]) -> list[dict[str, str]]:
    return [{"name": source.name, "url": source.url} for source in sources]


def read_prompt_images(body: Mapping[str, Any]) -> tuple[ImageSource, ...]:
    """The images of a chat body that has tokens; () without. Raises InvalidRequestError naming what is wrong."""
    value = Fields(body).sequence(IMAGES_KEY) or ()
    sources = []
    for index, item in enumerate(value):
        where = f"{IMAGES_KEY}[{index}]"
        if not isinstance(item, Mapping):
            invalid(where, item, "an object with name and url")
        fields = Fields(item, prefix=where + ".")
        name, url = fields.string("name"), fields.string("url")
        if name is None or url is None:
            invalid(where, dict(item), "an object with name and url")
        sources.append(ImageSource(name, url))
    return tuple(sources)
