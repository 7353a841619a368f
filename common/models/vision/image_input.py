"""One image of a prompt on its way to the vision tower: processed in a worker, or, at the latest, when it is needed."""

from __future__ import annotations

from torch import Tensor

from common.images.source import EncodedImage
from common.models.vision.processor import ImageProcessor


class ImageInput:
    """
    Attributes:
        embeddings: what the tower made of it, [rows * columns, hidden], while its prompt is computed; set and cleared
            on the engine's thread.
    """

    def __init__(self, processor: ImageProcessor, image: EncodedImage) -> None:
        self._processor = processor
        self._image = image
        self._pixels: Tensor | None = None
        self.embeddings: Tensor | None = None

    def prepare(self) -> None:
        """Blocks, as ``ImageProcessor.pixels``, and raises what that raises."""
        if self._pixels is None:
            self._pixels = self._processor.pixels(self._image)

    def take_pixels(self) -> Tensor:
        """As the processor gives them. A prompt whose cached beginning was evicted meanwhile needs images that nobody
        has prepared."""
        self.prepare()
        pixels, self._pixels = self._pixels, None
        assert pixels is not None
        return pixels
