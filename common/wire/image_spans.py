"""Image spans (``common.images.span``) as JSON: in prompts that were tokenised elsewhere, in manifests, in queries."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from common.images.span import DIGEST_BYTES, ImageSpan
from common.wire.fields import Fields, invalid

MAX_IMAGES = 1024
"""Of one prompt that another process describes; what clients may send is bounded by ``--limit-mm-per-prompt``."""
MAX_ROWS = 2**16
"""Rows or columns of one image, in tokens."""
_DIGEST = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


def spans_to_json(images: Sequence[ImageSpan]) -> list[dict[str, Any]]:
    return [
        {"start": each.start, "rows": each.rows, "columns": each.columns, "digest": each.digest.hex()}
        for each in images
    ]


def read_spans(fields: Fields, key: str, num_tokens: int) -> tuple[ImageSpan, ...]:
    """The spans of a prompt of ``num_tokens``; () when the key is absent.

    Raises:
        InvalidRequestError: naming what is malformed, out of order, or not within the prompt.
    """
    name, value = fields.name(key), fields.sequence(key) or ()
    if len(value) > MAX_IMAGES:
        invalid(name, value, f"a list of at most {MAX_IMAGES} images")
    images: list[ImageSpan] = []
    end = 0
    for index, item in enumerate(value):
        where = f"{name}[{index}]"
        if not isinstance(item, Mapping):
            invalid(where, item, "an object")
        entry = Fields(item, prefix=where + ".")
        start = entry.integer("start", ge=end, le=num_tokens)
        rows, columns = entry.integer("rows", ge=1, le=MAX_ROWS), entry.integer("columns", ge=1, le=MAX_ROWS)
        digest = entry.string("digest", pattern=_DIGEST)
        if start is None or rows is None or columns is None or digest is None:
            invalid(where, dict(item), "an object with start, rows, columns and digest")
        images.append(ImageSpan(start, rows, columns, bytes.fromhex(digest)))
        end = images[-1].end
        if end > num_tokens:
            invalid(where, dict(item), f"within the prompt of {num_tokens} tokens")
    return tuple(images)
