"""What images in a prompt do to its chunks: where one has to end, and which tokens see each other in both directions;
and that this node can compute them at all."""

from __future__ import annotations

from common.errors import TransferError
from common.images.span import ImageSpan, end_of_images, overlapping
from common.request import Request


class ImageChunks:
    """``is_whole``: no step may end inside an image."""

    def __init__(self, *, is_whole: bool) -> None:
        self.is_whole = is_whole

    @staticmethod
    def check(request: Request, num_computed: int) -> None:
        """Raises TransferError when the rest of a prompt has an image and this node has no vision tower: it came
        without what one needs, because another node was to compute it."""
        num_tokens = end_of_images(request.images)
        if num_computed >= num_tokens or request.image_inputs:
            return
        raise TransferError(
            f"only a prefill node computes images; {num_computed} of {num_tokens} tokens up to the last one are here"
        )

    def end(self, request: Request, start: int, end: int) -> int:
        """Where a chunk of [``start``, ``end``) ends: before an image that is not processed yet, and at the edge of one
        that may not be cut; ``start``: nothing can be computed now."""
        images = request.images
        if not images or start == end or start >= end_of_images(images):
            return end
        if self.is_whole:
            cut = [image for image in images if image.start < end < image.end]
            if cut:
                # Whatever the budget: in two steps it would be another image.
                end = cut[0].start if cut[0].start > start else cut[0].end
        needed = [
            (image, given)
            for image, given in zip(images, request.image_inputs, strict=False)
            if image.start < end and image.end > start
        ]
        missing = [image.start for image, given in needed if not given.is_ready()]
        return max(start, min([end, *missing]))

    def whole(self, images: tuple[ImageSpan, ...], start: int, end: int) -> tuple[tuple[int, int], ...]:
        """[start, end) of those that have tokens in a chunk, and see each other in both directions."""
        if not self.is_whole:
            return ()
        return tuple((image.start, image.end) for image in overlapping(images, start, end))
