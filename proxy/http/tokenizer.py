"""Prompts become tokens once, in the proxy, with the nodes' own tokenizer.

1 a node comes up and its tokenizer is fetched, rebuilt in a thread and checked against its own answers to the probes
(``common.text.tokenizer_document``), 2 from then on prompts are tokenised here, those of long bodies off the event
loop, and go to the nodes as ids; their key chains tell placement what is cached where, 3 another fingerprint, or a new
life of the node it came from: fetched again, unless it is the same. Where anything is missing or refuses (no such
route, a tokenizer that cannot be rebuilt, a template that raises), the body goes on as it is: then the nodes tokenise,
and refuse what is to be refused.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from common.errors import InvalidRequestError, NodeUnavailableError
from common.images.rules import ImageLimits
from common.images.span import ImageSpan
from common.openai.prompt_ids import PromptIds
from common.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from common.text.chat_prompt import make_chat_prompt
from common.text.tokenizer import TextCodec
from common.text.tokenizer_document import TokenizerDocument, UnusableTokenizerError, create_codec
from common.wire.json_text import LONG_BYTES
from common.wire.routes import TOKENIZER_ROUTE
from proxy.http.image_fetcher import ImageFetcher
from proxy.metrics.proxy_metrics import ProxyMetrics
from proxy.node_http.errors import NodeClientError, describe
from proxy.nodes.node import Node
from proxy.nodes.pool import NodePool
from proxy.prefix_index.prompt_keys import PromptKeys

logger = logging.getLogger(__name__)

WATCH_S = 0.1
"""Seconds between two checks whether a tokenizer is to be fetched."""
FETCH_TIMEOUT_S = 60.0
"""Seconds for a node's whole answer, which may have tens of megabytes."""
MAX_ANSWER_BYTES = 128 * 2**20
"""Several times the largest ``tokenizer.json`` in use."""
RETRY_S = (1.0, 30.0)
"""Seconds until a failed fetch is tried again: at first, doubled each time, and at most."""
INLINE_BYTES = 1500
"""Bytes of a whole body, of which any field may cost a template time. The texts of shorter ones are tokenised on the
event loop, because handing them to a thread takes as long. Tokens cost little more than reading them did: up to
``LONG_BYTES`` they stay there too."""
WAIT_S = 5.0
"""Seconds for which a request with images waits for a tokenizer. Text goes on without: nodes tokenise it."""

NUM_THREADS = 2
"""Threads that tokenise long prompts and rebuild tokenizers, beside the event loop."""
MAX_KEYED_PROMPTS = 16
"""Prompts of one request beyond which none gets keys: such a list is spread over nodes, whoever has part of it."""


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A request for the nodes: ``body`` and ``prompts`` as in ``proxy.legs.job.Job``, token ids as arrays."""

    body: Mapping[str, Any]
    prompts: list[Any]
    prompt_keys: Sequence[PromptKeys | None] = ()


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the tokenizer came from."""

    url: str
    epoch: str | None
    etag: str | None


class PromptTokenizer:
    """Runs from ``start`` to ``close``."""

    def __init__(
        self,
        pool: NodePool,
        metrics: ProxyMetrics,
        headers: Mapping[str, str],
        image_limits: ImageLimits,
        fetcher: ImageFetcher,
    ) -> None:
        self._image_limits = image_limits
        self._fetcher = fetcher
        self._pool = pool
        self._metrics = metrics
        self._headers = dict(headers)
        self._document: TokenizerDocument | None = None
        self._codec: TextCodec | None = None
        self._source: _Source | None = None
        self._retry_at_s = 0.0
        self._retry_delay_s = RETRY_S[0]
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenise")
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watching = asyncio.create_task(self._watch(), name="tokenizer")

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._fetcher.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- the tokenizer

    async def _watch(self) -> None:
        while True:
            node = self._node_to_fetch_from()
            if node is not None and time.monotonic() >= self._retry_at_s:
                try:
                    await self._fetch(node)
                except Exception:  # or no tokenizer would ever be fetched again
                    logger.exception("a tokenizer could not be fetched node=%s", node.url)
                    self._retry_at_s = time.monotonic() + RETRY_S[1]
            await asyncio.sleep(WATCH_S)

    def _node_to_fetch_from(self) -> Node | None:
        """The node whose tokenizer is wanted now; None when the one at hand is good."""
        nodes = [node for node in self._pool.nodes if node.is_up and node.info.pull and node.info.fingerprint]
        source = self._source
        if not nodes:
            return None
        if self._document is None or source is None or self._document.fingerprint != nodes[0].info.fingerprint:
            return nodes[0]
        # A node that was started again may have another template for the same weights.
        return next((node for node in nodes if node.url == source.url and node.info.epoch != source.epoch), None)

    async def _fetch(self, node: Node) -> None:
        epoch, is_same = node.info.epoch, False
        try:
            etag = self._source.etag if self._source is not None else None
            condition = {"if-none-match": etag} if etag is not None else {}
            answer = await node.client.request(
                "GET",
                TOKENIZER_ROUTE,
                headers={**self._headers, **condition},
                timeout_s=FETCH_TIMEOUT_S,
                max_bytes=MAX_ANSWER_BYTES,
            )
            if answer.status == 304:
                is_same = True
            elif answer.status == 200:
                loop = asyncio.get_running_loop()
                self._document, self._codec = await loop.run_in_executor(self._threads, _load, answer.body)
            else:
                raise ValueError(f"{TOKENIZER_ROUTE} answers {answer.status}")
        except (NodeClientError, UnusableTokenizerError, ValueError) as exc:
            self._retry_at_s = time.monotonic() + self._retry_delay_s
            self._retry_delay_s = min(2 * self._retry_delay_s, RETRY_S[1])
            logger.warning("nodes tokenise: node=%s: %s", node.url, describe(exc))
            return
        self._retry_delay_s = RETRY_S[0]
        self._source = _Source(node.url, epoch, answer.headers.get("etag"))
        if not is_same:
            logger.info("tokenizer node=%s tokenises_here=%s", node.url, self._codec is not None)

    # --- requests

    async def tokenise(
        self, request: GenerationRequest, body: Mapping[str, Any], prompts: Sequence[Any], *, num_bytes: int
    ) -> Tokenised:
        """The request with token ids instead of text, as far as that can be done here. ``prompts``: the body's, one
        for each leg; ``num_bytes``: the body's length.

        Raises:
            InvalidRequestError: because of an image. Other requests go on as they are, for the nodes to refuse them.
            NodeUnavailableError: images have to be found their place in the prompt here, and that cannot be done now.
        """
        request, body = self._cut_alike(request, body)
        has_images = isinstance(request, ChatRequest) and bool(request.images)
        if isinstance(request, ChatRequest) and request.images:
            await self._wait()
            if self._codec is not None:
                self._codec.check_images(request)
            request = await self._fetcher.fetch(request, num_bytes=num_bytes)
        document, codec = self._document, self._codec
        if document is not None and not self._serves(document):
            document = None

        def work() -> Tokenised:
            given = _packed(request, body, prompts)
            try:
                if document is None:
                    _check_text(request)
                    return given
                if isinstance(request, ChatRequest):
                    return self._chat(document, codec, request, body)
                return self._completion(document, codec, request, given)
            except InvalidRequestError:
                if has_images:  # none of them goes anywhere
                    raise
                return given  # the nodes refuse it in their own words
            except NodeUnavailableError:
                raise
            except Exception:
                logger.exception("a prompt could not be tokenised here")
                if has_images:
                    raise
                return given

        has_text = document is not None and (
            isinstance(request, ChatRequest) or any(isinstance(prompt, str) for prompt in request.prompts)
        )
        if not has_images and num_bytes <= (INLINE_BYTES if has_text else LONG_BYTES):
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _cut_alike(
        self, request: GenerationRequest, body: Mapping[str, Any]
    ) -> tuple[GenerationRequest, Mapping[str, Any]]:
        """``truncate_prompt_tokens`` -1 as the number that it is: a prefill leg is not told how long the answer may be,
        and would cut elsewhere than the decode leg."""
        if request.truncate_prompt_tokens != -1:
            return request, body
        shortest = self._pool.shortest_model_len()
        if shortest is None or (request.sampling.max_tokens or 0) >= shortest:
            return request, body  # for a node with a longer context
        num_kept = request.num_kept(shortest)
        return replace(request, truncate_prompt_tokens=num_kept), {**body, "truncate_prompt_tokens": num_kept}

    async def _wait(self) -> None:
        """Until there is a tokenizer, for ``WAIT_S`` at most: a proxy that has just begun to serve may be fetching
        it."""
        deadline_s = time.monotonic() + WAIT_S
        while self._document is None or not self._serves(self._document):
            if time.monotonic() >= deadline_s:
                return
            await asyncio.sleep(WATCH_S)

    def _serves(self, document: TokenizerDocument) -> bool:
        """Whether all nodes that may get the prompt have this document's model, and take ids."""
        return all(
            node.info.pull and node.info.fingerprint == document.fingerprint for node in self._pool.nodes if node.is_up
        )

    def _chat(
        self, document: TokenizerDocument, codec: TextCodec | None, request: ChatRequest, body: Mapping[str, Any]
    ) -> Tokenised:
        # A node needs the messages for an echo, and decides by itself whether it trusts a template.
        if codec is None or request.output.echo or request.chat_template is not None:
            _check_text(request)
            return Tokenised(body, [None])
        prompt = _encode_chat(codec, document, request, self._image_limits)
        self._metrics.inc("prompts_tokenised_total")
        keys = _keys(document, prompt.token_ids, request.cache_salt, prompt.images)
        return Tokenised(prompt.put_into(body, request.images), [None], (keys,))

    def _completion(
        self, document: TokenizerDocument, codec: TextCodec | None, request: CompletionRequest, given: Tokenised
    ) -> Tokenised:
        texts = [prompt for prompt in given.prompts if isinstance(prompt, str)]
        if texts and codec is None:
            return given
        all_ids: list[array[int]] = given.prompts
        if codec is not None and texts:
            ids_of_texts = iter(codec.encode_prompts(request, texts))
            all_ids = [array("I", next(ids_of_texts)) if isinstance(each, str) else each for each in given.prompts]
        is_cut = request.truncate_prompt_tokens is not None
        if is_cut:
            all_ids = [array("I", request.truncated(list(each), document.max_model_len)) for each in all_ids]
        keys: Sequence[PromptKeys | None] = ()
        if len(all_ids) <= MAX_KEYED_PROMPTS:
            keys = tuple(_keys(document, token_ids, request.cache_salt) for token_ids in all_ids)
        if not (texts or is_cut) or request.output.echo:  # an echo gives the text back as it came
            return Tokenised(given.body, given.prompts, keys)
        self._metrics.inc("prompts_tokenised_total", len(texts))
        as_given = all_ids if isinstance(given.body["prompt"], list) else all_ids[0]
        return Tokenised({**given.body, "prompt": as_given}, list(all_ids), keys)


def _packed(request: GenerationRequest, body: Mapping[str, Any], prompts: Sequence[Any]) -> Tokenised:
    """As given, but ids in 4 bytes each instead of 36: a job keeps them for as long as it may be needed again."""
    if isinstance(request, ChatRequest):
        return Tokenised(body, list(prompts))
    packed = [array("I", prompt) if isinstance(prompt, list) else prompt for prompt in prompts]
    is_list = isinstance(body["prompt"], list) and not isinstance(body["prompt"][0], int)
    return Tokenised({**body, "prompt": packed if is_list else packed[0]}, packed)


def _check_text(request: GenerationRequest) -> None:
    """A request that is not tokenised here. Raises when it has images: the leg that decodes must not have them, and
    without tokens it would have no prompt."""
    if not isinstance(request, ChatRequest) or not request.images:
        return
    if request.output.echo or request.chat_template is not None:
        name = "echo" if request.output.echo else "chat_template"
        raise InvalidRequestError(f"{name} is not supported for prompts with images", param=name)
    raise NodeUnavailableError("images are not taken now: the proxy has no tokenizer that is like the nodes' own")


def _encode_chat(codec: TextCodec, document: TokenizerDocument, request: ChatRequest, limits: ImageLimits) -> PromptIds:
    """Blocks; milliseconds for a long chat. Raises InvalidRequestError."""
    prompt = make_chat_prompt(
        codec,
        request,
        limits,
        keeps_boundaries=document.keeps_boundaries,
        max_model_len=document.max_model_len,
    )
    return replace(prompt.ids, token_ids=array("I", prompt.ids.token_ids))


def _keys(
    document: TokenizerDocument,
    token_ids: Sequence[int],
    cache_salt: str | None,
    images: tuple[ImageSpan, ...] = (),
) -> PromptKeys | None:
    if len(token_ids) > document.max_model_len:
        return None  # will be refused
    return PromptKeys.of_prompt(document.root_key, document.block_size, token_ids, cache_salt, images)


def _load(body: bytes) -> tuple[TokenizerDocument, TextCodec | None]:
    """Blocks. Raises UnusableTokenizerError for an answer that is none; a tokenizer that is none gives no codec."""
    value: Any = json.loads(body)
    if not isinstance(value, Mapping):
        raise UnusableTokenizerError(f"{TOKENIZER_ROUTE} answers {type(value).__name__}")
    document = TokenizerDocument.from_json(value)
    try:
        return replace(document, parts=None), create_codec(document)
    except UnusableTokenizerError as exc:
        logger.warning("nodes tokenise: %s", exc)
        return replace(document, parts=None), None
