"""What nodes keep of images, where there is little room for it: an image that others drove out is encoded again, and
one that begins with another's bytes is another."""

from __future__ import annotations

import io
import random
import string
from collections.abc import Iterator

import pytest
from PIL import Image, ImageOps

from tests.e2e.test_images import Site, user
from tests.support import images
from tests.support.client import metric, wait_settled
from tests.support.images import picture
from tests.support.service import Service

pytestmark = pytest.mark.full  # as in tests/engine/test_images.py

ENCODER_BYTES = 4096
"""Room for the vectors of one image of 64 x 48 pixels."""
FLAGS = (
    *("--dtype", "float32"),
    *("--max-model-len", "512"),
    *("--max-num-seqs", "4"),
    *("--max-num-batched-tokens", "40"),
    *("--kv-cache-memory", "768KiB"),  # 1,300 to 2,300 tokens
    *("--eviction-policy", "lru"),  # what is driven out must not depend on what came before
)
NUM_OTHERS = 12
A = picture(61)


@pytest.fixture(
    scope="module",
    params=sorted(images.FAMILIES),
)
def small(request: pytest.FixtureRequest) -> Iterator[Site]:
    prefill_flags = [*FLAGS, "--mm-encoder-cache-memory", str(ENCODER_BYTES)]
    with Service(images.image_checkpoint(request.param), prefill_flags=prefill_flags, decode_flags=FLAGS) as running:
        yield Site(running, request.param)


def drive_out(site: Site) -> None:
    """Fills both nodes' pools and the encoder's cache with other prompts and images."""
    for seed in range(NUM_OTHERS):
        filling = "".join(random.Random(seed).choices(string.ascii_letters, k=200))
        site.ask(user(filling, picture(70 + seed)), max_tokens=2)


def test_image_when_it_was_driven_out_between_two_turns_then_encoded_again_and_answered_as_transformers(
    small: Site,
) -> None:
    first = user("What is this?\n", A)
    cold = small.ask(first)
    small.check(cold, [A])
    conversation = [first, {"role": "assistant", "content": cold.text}, user("And where?")]
    encoded = small.num_encoded()
    second = small.ask(*conversation)
    small.check(second, [A])
    assert second.cached_tokens >= len(cold.prompt_token_ids)
    assert small.num_encoded() == encoded
    drive_out(small)
    conversation += [{"role": "assistant", "content": second.text}, user("And when?")]
    encoded = small.num_encoded()
    third = small.ask(*conversation)
    small.check(third, [A])
    assert third.cached_tokens <= small.first_placeholder(third)
    assert small.num_encoded() == encoded + 1
    assert 0 < metric(small.service.prefill[0], "mm_encoder_cache_bytes") <= ENCODER_BYTES
    again = small.ask(*conversation)
    assert (again.token_ids, again.cached_tokens) == (third.token_ids, len(third.prompt_token_ids))
    assert small.num_encoded() == encoded + 1
    wait_settled(*small.service.prefill, *small.service.decode)


def alike() -> tuple[bytes, bytes]:
    """Two images of one size whose files differ in their last part only: the lowest rows, uncompressed."""
    found = []
    with Image.open(io.BytesIO(picture(62, 160, 160))) as image:
        lowest = (0, 148, 160, 160)
        changed = image.copy()
        changed.paste(ImageOps.invert(image.crop(lowest)), lowest)
        for each in (image, changed):
            file = io.BytesIO()
            each.save(file, "PNG", compress_level=0)
            found.append(file.getvalue())
    return found[0], found[1]


def test_image_when_its_bytes_begin_as_anothers_then_nothing_of_that_is_found_and_the_answer_is_its_own(
    small: Site,
) -> None:
    one, other = alike()
    assert len(one) == len(other) < 78_000
    assert next(index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]) > 70_000
    first = small.ask(user("Look:\n", one, "\nWell?"))
    small.check(first, [one])
    repeated = small.ask(user("Look:\n", one, "\nWell?"))
    assert (repeated.token_ids, repeated.cached_tokens) == (first.token_ids, len(first.prompt_token_ids))
    encoded = small.num_encoded()
    differing = small.ask(user("Look:\n", other, "\nWell?"))
    small.check(differing, [other])
    assert differing.prompt_token_ids == first.prompt_token_ids  # which do not tell them apart
    assert differing.cached_tokens <= small.first_placeholder(differing)
    assert small.num_encoded() > encoded
    assert differing.token_ids != first.token_ids
    wait_settled(*small.service.prefill, *small.service.decode)
