"""What the vision tower makes of images: once for each image, as long as there is room for it.

An image's vectors are kept with its prompt until its last token is computed, whatever the cache's size, and by digest
until others need the room. So a prompt cut anywhere runs the tower once, and so does an image that comes again, at
another place or in another prompt, where no prefix helps.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from common.images.span import ImageSpan, overlapping
from common.models.vision.image_input import ImageInput
from common.models.vision.tower import VisionTower


@dataclass(slots=True)
class EncoderStats:
    """``num_encoded``: runs of the tower; ``num_found``: images that were in the cache; ``seconds``: of all runs;
    ``num_bytes``: in the cache now."""

    num_encoded: int = 0
    num_found: int = 0
    seconds: float = 0.0
    num_bytes: int = 0


@dataclass(slots=True)
class ImageEncoder:
    """Owned by the engine's thread; ``stats`` are numbers that any thread may read."""

    tower: VisionTower
    max_bytes: int
    stats: EncoderStats = field(default_factory=EncoderStats)
    _found: OrderedDict[bytes, Tensor] = field(default_factory=OrderedDict)

    def rows(
        self, images: Sequence[ImageSpan], inputs: Sequence[ImageInput], start: int, end: int
    ) -> Iterator[tuple[int, Tensor]]:
        """For each image with tokens in [start, end) of a prompt: the first of them, and their vectors. An image whose
        last token is among them is not kept for the prompt any more."""
        for image in overlapping(images, start, end):
            source = inputs[images.index(image)]
            if source.embeddings is None:
                source.embeddings = self._embeddings(image, source)
            embeddings, first = source.embeddings, max(start, image.start)
            if end >= image.end:
                source.embeddings = None
            yield first, embeddings[first - image.start : end - image.start]

    def _embeddings(self, image: ImageSpan, source: ImageInput) -> Tensor:
        found = self._found.get(image.digest)
        if found is not None:
            self._found.move_to_end(image.digest)
            self.stats.num_found += 1
            return found
        started_s = time.monotonic()
        embeddings = self.tower.encode(source.take_inputs(), image.length)
        self.stats.seconds += time.monotonic() - started_s
        self.stats.num_encoded += 1
        self._keep(image.digest, embeddings)
        return embeddings

    def _keep(self, digest: bytes, embeddings: Tensor) -> None:
        num_bytes = embeddings.nbytes
        if num_bytes > self.max_bytes:
            return
        self._found[digest] = embeddings
        self.stats.num_bytes += num_bytes
        while self.stats.num_bytes > self.max_bytes:
            _, oldest = self._found.popitem(last=False)
            self.stats.num_bytes -= oldest.nbytes
