"""The images of a prompt on their way to the vision tower: processed in a worker, before the prompt comes to the engine
or, where its cached beginning was evicted meanwhile, while it waits there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch import Tensor

from common.errors import DeadlineExceededError
from common.images.source import EncodedImage
from common.models.vision.processor import ImageProcessor, Inputs

TIMEOUT_S = 60.0
"""Seconds for processing, which other requests' images may be before."""
Submit = Callable[[Callable[[], None]], None]
"""Has a function called by a worker."""


class ImageSource:
    """An encoded image, whose pieces are processed together and taken one by one."""

    def __init__(self, processor: ImageProcessor, image: EncodedImage) -> None:
        self._processor = processor
        self._image = image
        self._lock = threading.Lock()
        self._pieces: dict[int, Inputs] = {}

    def take(self, index: int) -> Inputs:
        """Blocks where the piece is not there. Raises what ``ImageProcessor.pieces`` raises."""
        with self._lock:
            if index not in self._pieces:
                self._pieces = dict(enumerate(self._processor.pieces(self._image)))
            return self._pieces.pop(index)


class ImageInput:
    """One piece of an image.

    Attributes:
        embeddings: what the tower made of it, [num_tokens, hidden], while its prompt is computed; set and cleared on
            the engine's thread.
    """

    def __init__(self, source: ImageSource, index: int = 0, submit: Submit | None = None) -> None:
        """``submit``: for images that are needed unprepared; None: they are processed where they are needed."""
        self._source = source
        self._index = index
        self._submit = submit
        self._inputs: Inputs | None = None
        self._error: Exception | None = None
        self._deadline_s: float | None = None
        self.embeddings: Tensor | None = None

    def prepare(self) -> None:
        """Blocks, as ``ImageProcessor.pieces``, and raises what that raises."""
        if self._inputs is None:
            self._inputs = self._source.take(self._index)

    def is_ready(self) -> bool:
        """Whether a step can have it now; else it is being processed from now on.

        Raises:
            InvalidRequestError: it cannot be decoded.
            DeadlineExceededError: that takes too long.
        """
        if self._error is not None:
            raise self._error
        if self.embeddings is not None or self._inputs is not None or self._submit is None:
            return True
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + TIMEOUT_S
            self._submit(self._prepare)
        elif time.monotonic() > self._deadline_s:
            raise DeadlineExceededError(f"an image could not be processed within {TIMEOUT_S:g} s")
        return False

    def _prepare(self) -> None:
        try:
            self.prepare()
        except Exception as exc:  # noqa: BLE001  # for whoever waits
            self._error = exc
        self._deadline_s = None

    def take_inputs(self) -> Inputs:
        """What the tower takes."""
        self.prepare()
        inputs, self._inputs = self._inputs, None
        assert inputs is not None
        return inputs


def inputs_of(processor: ImageProcessor, image: EncodedImage, submit: Submit | None = None) -> list[ImageInput]:
    """For all pieces of an image, in order."""
    source = ImageSource(processor, image)
    num_pieces = len(processor.rules.pieces(image.header, image.name))
    return [ImageInput(source, index, submit) for index in range(num_pieces)]
