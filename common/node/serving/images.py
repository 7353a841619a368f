"""The images of one prompt, from their bytes to what the engine takes: processed in a few workers, off the event loop.

Only images beyond what the cache has of the prompt are processed. Those before it need neither the processor nor the
tower; should their blocks be evicted before the engine comes to them, they are processed then, and the prompt waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common.errors import DeadlineExceededError, ImageRefusedError, InvalidRequestError
from common.images.rules import ImageLimits, ImageRules
from common.images.source import EncodedImage, ImageSource
from common.images.span import ImageSpan
from common.kv_cache.keys import PrefixKeys
from common.models.loading.loader import LoadedModel
from common.models.vision.image_input import TIMEOUT_S, ImageInput, inputs_of
from common.node.engine_thread import EngineThread

NUM_WORKERS = 2
"""Threads that process images: each holds one decoded image, 108 MB of the largest that is allowed by default."""


class PromptImages:
    """What this node does with images; without a vision tower it takes none in. ``num_cached``: how much of a prompt
    needs no computing now; called on the engine's thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        limits: ImageLimits,
        engine: EngineThread,
        num_cached: Callable[[PrefixKeys], int],
    ) -> None:
        self.limits = limits
        self._rules = loaded.image_rules
        self._processor = loaded.image_processor
        self._engine = engine
        self._num_cached = num_cached
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="image")

    def read(self, sources: Sequence[ImageSource], images: Sequence[ImageSpan]) -> tuple[EncodedImage, ...]:
        """The images of a prompt that another process has tokenised; () where this node has no use for them. Blocks; 1
        ms for each 500 kB.

        Raises:
            InvalidRequestError: they are not the ones that the prompt has places for.
        """
        if self._processor is None or not images:
            if isinstance(self._rules, str) and sources:
                raise ImageRefusedError(f"this node takes no images: {self._rules}", reason="model")
            return ()
        assert isinstance(self._rules, ImageRules)
        encoded = tuple(source.read(self.limits) for source in sources)
        left = iter(images)
        for each in encoded:
            for number, piece in enumerate(self._rules.pieces(each.header, each.name)):
                image = next(left, None)
                if image is None or (
                    self._rules.span_shape(piece) != (image.rows, image.columns)
                    or self._rules.digest(each.data, piece, number) != image.digest
                ):
                    raise InvalidRequestError(
                        f"{each.name}: the image is not the one that the prompt has a place for: whoever tokenised it "
                        "has other rules than this node",
                        param=each.name,
                    )
        if (num_left := len(list(left))) > 0:
            raise InvalidRequestError(
                f"the prompt has places for {len(images)} pieces of images, {num_left} more than there are"
            )
        return encoded

    async def inputs(self, encoded: Sequence[EncodedImage], keys: PrefixKeys) -> Sequence[ImageInput]:
        """For the engine. ``keys``: the prompt's.

        Raises:
            InvalidRequestError: an image cannot be decoded.
            DeadlineExceededError: it takes too long.
        """
        if self._processor is None or not encoded:
            return ()
        inputs = [each for image in encoded for each in inputs_of(self._processor, image, self._submit)]
        num_cached = 0
        with contextlib.suppress(DeadlineExceededError):
            num_cached = await self._engine.call(lambda: self._num_cached(keys))
        wanted = [each for each, image in zip(inputs, keys.images, strict=True) if image.end > num_cached]
        loop = asyncio.get_running_loop()
        working: list[asyncio.Future[Any]] = [loop.run_in_executor(self._workers, each.prepare) for each in wanted]
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await asyncio.gather(*working)
        except TimeoutError as exc:
            raise DeadlineExceededError(f"the images could not be processed within {TIMEOUT_S:g} s") from exc
        finally:
            for each in working:
                each.cancel()  # those that have not begun
        return inputs

    def _submit(self, prepare: Callable[[], None]) -> None:
        """From the engine's thread: which goes on when the image is there."""
        self._workers.submit(prepare).add_done_callback(lambda _: self._engine.post(lambda: None))

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
