"""What a prefill node needs to see images: the checkpoint's image processor and its vision tower.

Encoded images come in; pixels, then one vector for each of their tokens go out. Must not know requests, the cache or
the API. Pillow is imported here alone, and only when an image is processed.
"""
