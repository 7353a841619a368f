"""Runs one step plan through the model.

1 copy the blocks that the plan asks for. 2 make the step's attention metadata. 3 one packed forward of the base model,
which reads and writes blocks and slots in place; one of few rows is recorded and replayed; rows of an image are the
vision tower's, put where the image is in its prompt. 4 hand back the wanted rows. ``launch`` may return before the
device has done any of it: blocks, slots and rows are the device's until ``Forward.wait`` has returned. Owns nothing but
views of the storage. Between two steps ``draft`` asks the model's own head, if it has one, for the tokens after the
next ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.engine.plan import Rows, Segment, StepPlan
from common.images.span import overlapping, rope_axes, rope_position
from common.kv_cache.pools.storage import KVStorage
from common.kv_cache.spec import KVCacheConfig
from common.models.adapter.arguments import step_arguments
from common.models.adapter.engine_cache import EngineCache
from common.models.adapter.forward_context import ForwardContext, set_forward_context
from common.models.adapter.pool_views import PoolViews
from common.models.backends.backend import Event
from common.models.backends.upload import upload
from common.models.loading.loader import LoadedModel
from common.models.vision.encoder import ImageEncoder


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward that was launched.

    Attributes:
        tokens: [num_segments] drawn behind the forward, on the device; None: nobody has asked for it.
        token_ids: the same on the host, once it was waited for.
        rows: one entry per segment in order: [0 | 1 | num_tokens, hidden] rows of the last hidden state, after the
            final norm.
        event: None on a CPU, where the forward has ended by the time it is launched.
    """

    rows: list[Tensor]
    event: Event | None = None
    tokens: Tensor | None = None
    token_ids: Tensor | None = None

    def wait(self) -> list[Tensor]:
        """The rows, once all that the forward reads and writes is done with."""
        if self.event is not None:
            self.event.synchronize()
        return self.rows


class ModelRunner:
    """One model on one storage. Not thread-safe: one thread runs the steps. Without ``images`` no step has rows of an
    image."""

    def __init__(
        self, model: LoadedModel, storage: KVStorage, config: KVCacheConfig, images: ImageEncoder | None = None
    ) -> None:
        self._model = model
        self.images = images
        self._base = model.model.base_model
        self._storage = storage
        self._config = config
        self._views = PoolViews.of(storage, model.geometry)
        self._cache = EngineCache()
        self._has_axes = model.sees_images is not None and model.sees_images.has_axes
        self._backend = model.backend
        self._steps = model.backend.create_step_runner(self._views) if model.is_replayed else None

    def record_ahead(self, max_rows: int) -> None:
        """Before the first step: what makes decode steps of up to ``max_rows`` rows fast, if it cannot wait."""
        if self._steps is not None:
            device = self._model.device
            context = ForwardContext.of(
                [], self._views, self._model.ops, block_size=self._config.block_size, device=device
            )
            with torch.inference_mode():
                self._steps.record_ahead(self._run, self._model.head.forward, context, max_rows)

    def forward(self, plan: StepPlan) -> list[Tensor]:
        """Launches and waits; the rows of :class:`Forward`."""
        return self.launch(plan).wait()

    def launch(self, plan: StepPlan) -> Forward:
        """Begins a forward. What the plan names must stay as it is until it was waited for."""
        with torch.inference_mode():
            rows = self._forward(plan)
            if plan.draw is None:
                return Forward(rows, self._backend.record_event())
            tokens = plan.draw(self.logits(torch.cat(rows)))
            # Behind the draw, and before the next step: who waits for the event has them.
            token_ids = tokens.to("cpu", non_blocking=True)
            return Forward(rows, self._backend.record_event(), tokens, token_ids)

    def draft(self, segments: Sequence[Segment], rows: Sequence[Tensor], limits: Sequence[int]) -> list[list[int]]:
        """Tokens that may follow each segment's one token, ``limits`` (1 or more) of them. ``rows``: the hidden rows,
        [hidden] each, that those tokens were sampled from. Writes K/V of the head's layer alone, from the segments'
        positions on, which the sequences' next forwards write again."""
        with torch.inference_mode():
            return self._draft(list(segments), torch.stack([row.to(self._model.device) for row in rows]), limits)

    def _draft(self, segments: list[Segment], hidden: Tensor, limits: Sequence[int]) -> list[list[int]]:
        head = self._model.mtp
        assert head is not None, "the model was loaded without its head"
        drafts: list[list[int]] = [[] for _ in segments]
        places = list(range(len(segments)))
        while True:
            context = ForwardContext.of(
                segments, self._views, self._model.ops, block_size=self._config.block_size, device=self._model.device
            )
            token_ids = [segment.token_ids[0] for segment in segments]
            if self._steps is not None:
                hidden = self._steps.draft(head.draft, context, hidden, token_ids, _positions(segments))
            else:
                inputs = torch.tensor([token_ids, _positions(segments)]).to(self._model.device)
                with set_forward_context(context):
                    hidden = head.draft(hidden, *inputs)
            following = self.logits(hidden).argmax(-1).tolist()
            for place, token in zip(places, following, strict=True):
                drafts[place].append(token)
            left = [index for index, place in enumerate(places) if len(drafts[place]) < limits[place]]
            if not left:
                return drafts
            segments = [
                replace(segments[index], token_ids=[following[index]], start=segments[index].start + 1)
                for index in left
            ]
            if len(left) < len(places):
                hidden, places = hidden[left], [places[index] for index in left]

    def synchronize(self) -> None:
        """Returns when the device runs nothing of this process; raises when it cannot go on."""
        self._backend.synchronize()

    def _forward(self, plan: StepPlan) -> list[Tensor]:
        for group_id, pairs in plan.block_copies.items():
            self._storage.copy_blocks(pairs, group_id)
        segments = plan.segments
        if not segments:
            return []
        device = self._model.device
        context = ForwardContext.of(
            segments, self._views, self._model.ops, block_size=self._config.block_size, device=device
        )
        token_ids: list[int] | Tensor
        if plan.ids_from is None:
            token_ids = list(itertools.chain.from_iterable(s.token_ids for s in segments))
        else:
            token_ids = plan.ids_from.tokens
            if len(plan.ids_from.rows) < len(token_ids):
                token_ids = token_ids[upload(torch.tensor(plan.ids_from.rows), device)]
        pictured = [s for s in segments if s.images and overlapping(s.images, s.start, s.start + s.num_tokens)]
        has_spans = len(token_ids) > len(segments)
        has_prompts = has_spans and not plan.only_decodes
        steps = None if pictured else self._steps
        if steps is not None and not (has_prompts and len(token_ids) > steps.max_rows_with_prompts):
            hidden = steps.forward(self._run, context, token_ids, _positions(segments), has_spans=has_spans)
        else:
            ids, at = self._backend.inputs(context, token_ids)
            embeddings = (self._embeddings(ids, segments),) if pictured else ()
            if self._has_axes and any(s.images for s in segments):
                at = torch.cat([at[None], _rope_axes(segments).to(device)])
            with set_forward_context(context):
                hidden = self._run(ids, at, *embeddings)
        ends = itertools.accumulate(segment.num_tokens for segment in segments)
        rows = []
        for segment, end in zip(segments, ends, strict=True):
            wanted = {Rows.NONE: 0, Rows.LAST: 1, Rows.ALL: segment.num_tokens}[segment.rows]
            rows.append(hidden[end - wanted : end])
        return rows

    def logits(self, rows: Tensor | Sequence[Tensor], *, has_drafts: bool = False) -> Tensor:
        """[R, hidden] rows of a forward, or single ones [hidden], also from host memory -> [R, vocab] float32.
        ``has_drafts``: some of the rows are behind drafts, and there may be another number of them each time."""
        with torch.inference_mode():
            if not isinstance(rows, Tensor):
                rows = torch.stack([row.to(self._model.device) for row in rows])
            if self._steps is None:
                return self._model.head.logits(rows)
            return self._steps.head(self._model.head.forward, rows, has_drafts=has_drafts).float()

    def _embeddings(self, token_ids: Tensor, segments: Sequence[Segment]) -> Tensor:
        """[num_tokens, hidden]: the tokens' own, and in the place of an image's those of the vision tower."""
        embeddings: Tensor = self._base.get_input_embeddings()(token_ids)
        begin = 0
        for segment in segments:
            start, end = segment.start, segment.start + segment.num_tokens
            if overlapping(segment.images, start, end):
                assert self.images is not None, "a step has rows of an image, and there is no vision tower"
                for first, rows in self.images.rows(segment.images, segment.image_inputs, start, end):
                    place = begin + first - start
                    embeddings[place : place + rows.shape[0]] = rows.to(embeddings.dtype)
            begin += segment.num_tokens
        return embeddings

    def _run(self, token_ids: Tensor, positions: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """[num_tokens] each, positions also [4, num_tokens] -> [num_tokens, hidden]. ``embeddings``: [num_tokens,
        hidden], instead of the tokens' own."""
        given = {"input_ids": token_ids[None]} if embeddings is None else {"inputs_embeds": embeddings[None]}
        output = self._base(**given, **step_arguments(self._base, self._cache, positions))
        # A family with a float32 residual hands out float32 rows; its head rounds them to its own dtype anyway.
        hidden: Tensor = output.last_hidden_state[0].to(self._model.dtype)
        if self._model.mtp is not None:
            self._model.mtp.keep(hidden, token_ids, positions, embeddings)
        return hidden


def _positions(segments: Sequence[Segment]) -> list[int]:
    """[num_tokens] on every axis, of tokens of text."""
    return [
        rope_position(segment.images, position) if segment.images else position
        for segment in segments
        for position in range(segment.start, segment.start + segment.num_tokens)
    ]


def _rope_axes(segments: Sequence[Segment]) -> Tensor:
    """[3, num_tokens] positions in time, height and width."""
    axes = [rope_axes(segment.images, segment.start, segment.start + segment.num_tokens) for segment in segments]
    return torch.tensor([list(itertools.chain.from_iterable(each[axis] for each in axes)) for axis in range(3)])
