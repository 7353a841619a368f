"""``GET /internal/v1/tokenizer``: a node's tokenizer in parts, for processes that have neither it nor transformers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from common.kv_cache.spec import KVCacheConfig
from common.server.json_body import encode_json
from common.text.tokenizer import TextCodec
from common.text.tokenizer_document import (
    TokenizerDocument,
    TokenizerParts,
    UnusableTokenizerError,
    probe_chats,
    probe_texts,
)
from common.wire.routes import TOKENIZER_ROUTE

logger = logging.getLogger(__name__)


def add_tokenizer_route(
    app: FastAPI, codec: TextCodec | None, *, cache_config: KVCacheConfig, fingerprint: str, max_model_len: int
) -> None:
    making = asyncio.Lock()
    made: list[bytes] = []

    @app.get(TOKENIZER_ROUTE)
    async def tokenizer(http: HttpRequest) -> Response:
        async with making:  # megabytes: made once, at the first request
            if not made:
                made.append(await asyncio.to_thread(_make, codec, cache_config, fingerprint, max_model_len))
        headers = {"etag": f'"{hashlib.blake2b(made[0], digest_size=16).hexdigest()}"'}
        if http.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(made[0], media_type="application/json", headers=headers)


def _make(codec: TextCodec | None, cache: KVCacheConfig, fingerprint: str, max_model_len: int) -> bytes:
    parts: TokenizerParts | None = None
    reason: str | None = "the model has no tokenizer"
    if codec is not None:
        try:
            parts, reason = take_apart(codec), None
        except UnusableTokenizerError as exc:
            reason = str(exc)
            logger.info("others cannot tokenise for this node: %s", reason)
    document = TokenizerDocument(
        fingerprint=fingerprint,
        root_key=cache.root_key,
        block_size=cache.block_size,
        vocab_size=cache.geometry.vocab_size,
        max_model_len=max_model_len,
        keeps_boundaries=cache.keeps_boundaries,
        parts=parts,
        reason=reason,
        image_rules=codec.image_rules if codec is not None else "the model has no tokenizer",
    )
    return encode_json(document.to_json())


def take_apart(codec: TextCodec) -> TokenizerParts:
    """The parts of a transformers tokenizer, with its answers to the probes.

    Raises:
        UnusableTokenizerError: it is no wrapper round a ``tokenizers`` object, or its templates have no default.
    """
    tokenizer: Any = codec.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        raise UnusableTokenizerError(f"{type(tokenizer).__name__} is not made of a tokenizer.json")
    chat_template = tool_template = None
    if tokenizer.chat_template is not None:
        try:
            chat_template = tokenizer.get_chat_template(None, None)
            tool_template = tokenizer.get_chat_template(None, [{}])
        except ValueError as exc:
            raise UnusableTokenizerError(f"its chat templates have no default: {exc}") from exc
    return TokenizerParts(
        tokenizer_json=backend.to_str(),
        chat_template=chat_template,
        tool_template=tool_template,
        special_tokens=dict(tokenizer.special_tokens_map),
        special_ids=tuple(sorted(codec.special_ids)),
        split_special_tokens=bool(getattr(tokenizer, "split_special_tokens", False)),
        answers=codec.answer_overrides,
        text_ids=probe_texts(codec),
        chat_ids=probe_chats(codec),
    )
