"""Images in prompts: the engine's greedy answers against transformers' own ``generate``, which sees the whole prompt
and all of its images at once."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config.node import NodeConfig
from common.engine.core import EngineCore
from common.engine.outputs import RequestOutput
from common.errors import ImageRefusedError, TransferError
from common.geometry.families import FAMILIES as MODEL_FAMILIES
from common.images.rules import ImageRules
from common.images.span import ImageSpan
from common.models.vision.image_input import inputs_of
from common.models.vision.processor import Inputs
from common.node.runtime import NodeModel, create_core, load_node_model
from common.request import Request, SamplingParams
from tests.engine.cores import SMALL_POOL, run
from tests.support import images
from tests.support.drafts import speculate
from tests.support.images import encoded, picture, prompt_with, stock_generate
from tests.support.reference import tolerance
from tests.support.tier_node import TierNode

TOKENS = 12
A, B, C = picture(1), picture(2, 80, 32), picture(3, 33, 70)
SAME_SIZE = picture(4)
TEXT = list(range(30, 61))
POOL = {**SMALL_POOL, "kv_cache_memory": 8 << 20, "max_model_len": 512}


def engine(family: str = "qwen3_5", *, with_images: bool = True, **flags: Any) -> tuple[EngineCore, NodeModel]:
    config = NodeConfig(model=str(images.image_checkpoint(family)), dtype="float32", device="cpu", **{**POOL, **flags})
    model = load_node_model(config, with_images=with_images)
    return create_core(config, model), model


class Pictured:
    """An engine, and requests with pictures for it."""

    def __init__(self, family: str = "qwen3_5", **flags: Any) -> None:
        self.family = family
        self.core, self.model = engine(family, **flags)
        self._count = 0

    @property
    def num_encoded(self) -> int:
        encoder = self.model.runner.images
        assert encoder is not None
        return encoder.stats.num_encoded

    def request(self, *parts: Sequence[int] | bytes, boundaries: Sequence[int] = (), **sampling: Any) -> Request:
        token_ids, spans = prompt_with(*parts, family=self.family)
        processor = self.model.loaded.image_processor
        pictures = [part for part in parts if isinstance(part, bytes)]
        inputs = [] if processor is None else [x for each in pictures for x in inputs_of(processor, encoded(each))]
        self._count += 1
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": TOKENS, "logprobs": 0, **sampling})
        return Request(
            f"r{self._count}",
            token_ids,
            params,
            semantic_boundaries=tuple(boundaries),
            images=spans,
            image_inputs=inputs,
        )

    def outputs(self, request: Request) -> list[RequestOutput]:
        self.core.add_request(request)
        return [output for outputs in run(self.core) for output in outputs]

    def cached(self, *parts: Sequence[int] | bytes, boundaries: Sequence[int] = ()) -> int:
        """Asks, compares the answer with stock's, and says how many tokens of the prompt were found."""
        request = self.request(*parts, boundaries=boundaries)
        outputs = self.outputs(request)
        assert [output.error for output in outputs if output.error] == []
        mismatch = self.mismatch(outputs, *parts)
        assert mismatch is None, mismatch
        return outputs[0].num_cached_tokens

    def mismatch(self, outputs: Sequence[RequestOutput], *parts: Sequence[int] | bytes) -> object:
        pictures = [part for part in parts if isinstance(part, bytes)]
        token_ids, _ = prompt_with(*parts, family=self.family)
        expected = stock_generate(token_ids, pictures, TOKENS, family=self.family)
        found = [token for output in outputs for token in output.logprobs or ()]
        return expected.mismatch(
            [token.token_id for token in found], [token.logprob for token in found], tolerance(self.family)
        )


@pytest.fixture(scope="module")
def pictured() -> Pictured:
    return Pictured()


OTHERS = [
    pytest.param(family, marks=() if family == "gemma3" else pytest.mark.full)
    for family in images.FAMILIES
    if family != "qwen3_5"
]
"""Families besides that of ``pictured``; of images that see both ways one is in the short tier."""
LARGE = picture(5, 160, 100)
"""Which lfm2_vl cuts into tiles."""


@pytest.mark.parametrize("family", OTHERS)
def test_family_when_asked_cold_repeated_extended_and_of_another_image_then_equals_transformers(family: str) -> None:
    pictured = Pictured(family)
    first = ([10, 11, 12], A, [20, 21], LARGE, TEXT)
    token_ids, spans = prompt_with(*first, family=family)
    assert pictured.cached(*first, boundaries=[spans[-1].end + 1]) == 0
    num_encoded = pictured.num_encoded
    assert num_encoded == len(spans)
    assert pictured.cached(*first) == len(token_ids)
    assert pictured.cached(*first, [40, 41], C, TEXT) == len(token_ids)
    assert pictured.num_encoded == num_encoded + 1
    # Another image of the same size, another order, one twice.
    assert pictured.cached([10, 11, 12], SAME_SIZE, [20, 21], LARGE, TEXT) <= spans[0].start
    assert pictured.cached([10, 11, 12], LARGE, [20, 21], A, TEXT) <= spans[0].start
    assert pictured.cached([13], A, A, [20, 21], A, TEXT) == 0
    # Parting in the text behind the images: to the kept state, or the last whole block.
    found = pictured.cached([10, 11, 12], A, [20, 21], LARGE, [99])
    block_size = pictured.model.cache_config.block_size
    assert found >= (spans[-1].end + 1) // block_size * block_size


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("budget", [7, pytest.param(16, marks=pytest.mark.full)])
def test_family_when_its_budget_would_cut_images_then_equals_transformers(family: str, budget: int) -> None:
    pictured = Pictured(family, max_num_batched_tokens=budget, mm_encoder_cache_memory=0)
    parts = ([10, 11, 12], A, [20, 21], B, LARGE, C, TEXT)
    assert pictured.cached(*parts) == 0
    assert pictured.num_encoded == len(prompt_with(*parts, family=family)[1])
    if family == "gemma3":  # without a compiler too
        assert Pictured(family, max_num_batched_tokens=budget, ops_backend="torch").cached(*parts) == 0


@pytest.mark.parametrize("damage", ["seen", "cut"])
def test_control_when_tokens_of_an_image_do_not_all_see_each_other_then_it_is_seen(
    damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if damage == "seen":
        monkeypatch.setattr("common.engine.scheduling.image_chunks.ImageChunks.whole", lambda *_: ())
    pictured = Pictured("gemma3", max_num_batched_tokens=64 if damage == "seen" else 10)
    if damage == "cut":
        monkeypatch.setattr(pictured.core._scheduler._images, "is_whole", False)
    parts = ([10, 11, 12], A, [20, 21], B, TEXT)
    assert pictured.mismatch(pictured.outputs(pictured.request(*parts)), *parts) is not None


def test_answer_when_a_prompt_has_images_then_equals_transformers_cold_repeated_and_extended(
    pictured: Pictured,
) -> None:
    first = ([10, 11, 12], A, [20, 21], B, TEXT)
    assert pictured.cached(*first) == 0
    num_encoded = pictured.num_encoded
    num_tokens = len(prompt_with(*first)[0])
    assert pictured.cached(*first) == num_tokens
    assert pictured.cached(*first, [40, 41], C, TEXT) == num_tokens
    assert pictured.num_encoded == num_encoded + 1


def test_answer_when_an_image_is_another_of_its_size_then_nothing_from_its_start_on_is_found(
    pictured: Pictured,
) -> None:
    token_ids, spans = prompt_with([70, 71], A, TEXT)
    assert pictured.cached([70, 71], A, TEXT, boundaries=[spans[0].start - 1, spans[0].end + 1]) == 0
    assert prompt_with([70, 71], SAME_SIZE, TEXT)[0] == token_ids
    assert pictured.cached([70, 71], SAME_SIZE, TEXT) <= spans[0].start
    assert pictured.cached([70, 71], A, [99]) == spans[0].end + 1


@pytest.mark.full
def test_answer_when_images_change_places_or_come_twice_then_equals_transformers(pictured: Pictured) -> None:
    assert pictured.cached([80], A, [81], SAME_SIZE, TEXT) == 0
    num_encoded = pictured.num_encoded
    assert pictured.cached([80], SAME_SIZE, [81], A, TEXT) <= 2
    assert pictured.cached([82], SAME_SIZE, SAME_SIZE, [83], SAME_SIZE, TEXT) == 0
    assert pictured.num_encoded == num_encoded  # by digest, wherever it is


@pytest.mark.parametrize(
    "budget", [7, pytest.param(1, marks=pytest.mark.full), pytest.param(16, marks=pytest.mark.full)]
)
def test_answer_when_chunks_cut_images_then_equals_transformers_and_each_is_encoded_once(budget: int) -> None:
    # Without room in the cache: the prompt itself keeps them.
    pictured = Pictured(max_num_batched_tokens=budget, mm_encoder_cache_memory=0)
    assert pictured.cached([10, 11, 12], A, [20, 21], B, C, TEXT) == 0
    assert pictured.num_encoded == 3


def test_fifth_image_when_four_were_computed_then_resumes_at_the_end_of_the_fourth(pictured: Pictured) -> None:
    pictures = [picture(seed, 64, 64) for seed in range(10, 15)]
    before = [part for each in pictures[:4] for part in ([90, 91], each)]
    _, spans = prompt_with(*before)
    end = spans[3].end + 1
    assert pictured.cached(*before, TEXT, boundaries=[end]) == 0
    num_encoded = pictured.num_encoded
    assert pictured.cached(*before, [90, 91], pictures[4], TEXT) == end
    assert pictured.num_encoded == num_encoded + 1


@pytest.mark.full
def test_image_when_its_prefix_and_its_vectors_are_gone_then_it_is_encoded_again() -> None:
    pictured = Pictured(enable_prefix_caching=False, mm_encoder_cache_memory=0)
    for expected in (1, 2):
        assert pictured.cached([10], A, TEXT) == 0
        assert pictured.num_encoded == expected


@pytest.mark.full
def test_batch_when_images_and_texts_run_together_then_each_answer_is_its_own(pictured: Pictured) -> None:
    prompts = [([60], A, TEXT[:9]), ([61, 62],), ([63], B, [64], C, TEXT[:5]), (TEXT,), ([65], SAME_SIZE)]
    requests = [pictured.request(*parts) for parts in prompts]
    for request in requests:
        pictured.core.add_request(request)
    outputs = [output for step in run(pictured.core) for output in step]
    for request, parts in zip(requests, prompts, strict=True):
        own = [output for output in outputs if output.request_id == request.request_id]
        mismatch = pictured.mismatch(own, *parts)
        assert mismatch is None, mismatch


def test_node_without_a_tower_when_the_images_are_not_in_its_cache_then_refused_by_name() -> None:
    pictured = Pictured(with_images=False)
    assert pictured.model.loaded.tower is None
    assert vision_parameters(pictured) == []
    [output] = pictured.outputs(pictured.request([10], A, TEXT))
    assert isinstance(output.error, TransferError)
    assert "only a prefill node computes images" in str(output.error)
    assert pictured.cached(TEXT) == 0  # it goes on


def test_image_when_nobody_prepared_it_then_its_prompt_waits_for_a_worker_and_others_go_on(pictured: Pictured) -> None:
    processor = pictured.model.loaded.image_processor
    assert processor is not None
    waiting: list[Callable[[], None]] = []
    parts = ([60, 61], A, TEXT)
    request, other = pictured.request(*parts), pictured.request([62, 63, 64])
    request.image_inputs = inputs_of(processor, encoded(A), waiting.append)
    broken = pictured.request([65], B, TEXT)
    cut = dataclasses.replace(encoded(B), data=B[:-40])
    broken.image_inputs = inputs_of(processor, cut, waiting.append)
    for each in (request, broken):
        pictured.core.add_request(each)
    outputs = pictured.outputs(other)
    assert {output.request_id for output in outputs} == {other.request_id}
    assert len(waiting) == 2
    for prepare in waiting:
        prepare()
    outputs = [*pictured.core.step(), *(output for outputs in run(pictured.core) for output in outputs)]
    [error] = [output.error for output in outputs if output.error]
    assert isinstance(error, ImageRefusedError)
    assert "cannot be decoded" in str(error)
    mismatch = pictured.mismatch([each for each in outputs if each.request_id == request.request_id], *parts)
    assert mismatch is None, mismatch


def vision_parameters(pictured: Pictured) -> list[str]:
    names = [name for name, _ in pictured.model.loaded.model.named_parameters()]
    assert len(names) > 10
    return [name for name in names if "visual" in name or "vision" in name or "multi_modal" in name]


@pytest.mark.full
@pytest.mark.parametrize("family", images.FAMILIES)
def test_parameters_when_a_node_computes_no_images_then_none_is_of_the_tower_and_text_is_answered(family: str) -> None:
    pictured = Pictured(family, with_images=False)
    assert vision_parameters(pictured) == []
    assert pictured.cached(TEXT) == 0


def controls() -> Iterator[Any]:
    """Each damage to each family that it can do something to; "nothing" shows that the others are what is seen."""
    for family in images.FAMILIES:
        sees_images = MODEL_FAMILIES[family].sees_images
        assert sees_images is not None
        for damage in ("nothing", "first image", "rope", "keys", "tails"):
            if damage != "rope" or sees_images.has_axes:
                is_short = (family, damage) in {
                    ("qwen3_5", "rope"),
                    ("gemma3", "first image"),
                }
                marks = () if is_short else pytest.mark.full
                yield pytest.param(family, damage, marks=marks, id=f"{family}-{damage.replace(' ', '-')}")


@pytest.mark.parametrize(("family", "damage"), list(controls()))
def test_control_when_something_is_damaged_then_the_answer_is_seen_to_be_wrong(
    family: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A block of 128 holds all of the prompt: what lies behind its last boundary are the images too.
    pictured = Pictured(family, block_size=128 if damage == "tails" else 16)
    if damage == "rope":
        monkeypatch.setattr(ImageSpan, "num_positions", property(lambda span: span.length))
    elif damage == "keys":
        monkeypatch.setattr("common.kv_cache.keys.digests_and_offsets", lambda *_: b"")
    elif damage == "tails":
        monkeypatch.setattr("common.kv_cache.keys.row_id", lambda image, position: 1)
    other: tuple[Any, ...] = ([10, 11, 12], SAME_SIZE, [20, 21], B, TEXT)
    parts = ([10, 11, 12], A, [20, 21], B, TEXT)
    pictured.outputs(pictured.request(*other))
    if damage == "first image":  # the second is known
        tower = pictured.model.loaded.tower
        assert tower is not None
        encode = tower.encode

        def black(inputs: Inputs, num_tokens: int) -> torch.Tensor:
            return encode({**inputs, "pixel_values": inputs["pixel_values"] * 0}, num_tokens)

        monkeypatch.setattr(tower, "encode", black)
    mismatch = pictured.mismatch(pictured.outputs(pictured.request(*parts)), *parts)
    assert (mismatch is None) == (damage == "nothing"), mismatch


@pytest.mark.full
def test_image_when_it_would_take_more_tokens_than_are_allowed_then_it_is_made_smaller() -> None:
    pictured = Pictured(max_image_tokens=6)
    rules = pictured.model.loaded.image_rules
    assert isinstance(rules, ImageRules)
    image = encoded(picture(7, 200, 150))
    rows, columns = rules.grid(image.header, "image")
    assert (rows, columns) == (2, 2)
    assert pictured.model.loaded.image_processor is not None
    [piece] = pictured.model.loaded.image_processor.pieces(image)
    assert piece["pixel_values"].shape[0] == rows * columns * 4


def test_images_when_their_prompt_comes_back_from_a_tier_then_none_is_encoded_and_another_is_not_found(
    tmp_path: Path, pictured: Pictured
) -> None:
    # Kept to its end, in a block that begins with rows of the image.
    prompt = pictured.request([10, 11, 12, 13, 14], A, [20])
    other = pictured.request([10, 11, 12, 13, 14], SAME_SIZE, [20])
    assert prompt.images[0].end % pictured.model.cache_config.block_size

    def fields(request: Request) -> dict[str, Any]:
        return {"images": request.images, "image_inputs": request.image_inputs}

    def node() -> TierNode:
        folder = f"disk:{tmp_path / 'tier'}?size=1GiB"
        return TierNode(
            folder, model=str(images.image_checkpoint("qwen3_5")), with_images=True, kv_cache_memory=8 << 20
        )

    async def main() -> None:
        async with node() as first:
            answer, _ = await first.generate(prompt.prompt_token_ids, **fields(prompt))
            await first.flush()
        async with node() as second:
            await second.flush()
            assert await second.generate(prompt.prompt_token_ids, **fields(prompt)) == (
                answer,
                len(prompt.prompt_token_ids),
            )
            encoder = second.model.runner.images
            assert encoder is not None
            assert encoder.stats.num_encoded == 0
            differing, num_cached = await second.generate(other.prompt_token_ids, **fields(other))
            assert (encoder.stats.num_encoded, num_cached) == (1, 0)
            assert differing != answer
            await second.check()

    asyncio.run(main())


@pytest.mark.parametrize("share", [0.6, pytest.param(1.0, marks=pytest.mark.full)])
def test_answer_when_what_follows_an_image_is_drafted_then_equals_transformers(
    pictured: Pictured, share: float
) -> None:
    parts = ([50, 51], A, TEXT)
    token_ids, _ = prompt_with(*parts)
    plain = [token for output in pictured.outputs(pictured.request(*parts)) for token in output.token_ids]
    drafting = Pictured()
    speculation = speculate(drafting.core, drafting.model, [[*token_ids, *plain]], share, always=True, num_tokens=3)
    assert drafting.cached(*parts) == 0
    assert speculation.num_accepted_tokens
    assert (speculation.num_accepted_tokens == speculation.num_draft_tokens) == (share == 1.0)
