"""Does the patched model give its own numbers? A short check on the loaded weights, before anything is served.

40 tokens: the stock forward over all of them at once, against the engine's way of computing them: cut in odd places,
two sequences packed together, a state saved in mid-chunk and resumed in another slot, single decode rows. A model
whose numbers differ is refused: a changed transformers function or an unknown option of the config shows here, not in
answers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.errors import ConfigError
from common.kv_cache.spec import ModelGeometry
from common.models.adapter.arguments import step_arguments, stock_cache
from common.models.adapter.forward_context import ForwardContext, set_forward_context
from common.models.adapter.pool_views import PoolViews
from common.models.backends.backend import ModelBackend
from common.models.loading.check_shapes import check_shapes
from common.ops.interface import Ops

logger = logging.getLogger(__name__)

NUM_PROBE_TOKENS = 40
"""Tokens of each of the two sequences: five blocks, several times what a convolution looks back, and few enough for
every start."""
_BLOCK_SIZE = 8
_BLOCKS_PER_TABLE = NUM_PROBE_TOKENS // _BLOCK_SIZE
_HALF_PRECISION_TOLERANCE = 0.15
"""Largest mean difference in standard deviations in bfloat16 or float16. Measured on tests/support/models.py in
bfloat16: 0.01 to 0.03 as it should be, 0.2 to 0.4 with the states lost on resume alone, 0.4 to 0.8 with the states lost
at every cut. (The largest difference says nothing there: one flipped choice of an expert moves a row by 2.)"""


class ProbePools:
    """Pools of a few blocks and slots, without an arena."""

    def __init__(self, geometry: ModelGeometry, num_blocks: int, num_slots: int, device: torch.device) -> None:
        self._attention = {}
        self._state = {}
        for layer in geometry.attention_layers:
            shape = (num_blocks, layer.num_kv_heads, _BLOCK_SIZE)
            dtype = getattr(torch, layer.dtype)
            self._attention[layer.layer_idx] = (
                torch.zeros(*shape, layer.head_size, dtype=dtype, device=device).transpose(1, 2),
                torch.zeros(*shape, layer.head_size_v, dtype=dtype, device=device).transpose(1, 2),
            )
        for state in geometry.state_layers:
            self._state[state.layer_idx] = {
                t.name: torch.zeros(num_slots, *t.shape, dtype=getattr(torch, t.dtype), device=device)
                for t in state.tensors
            }

    def attention_layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        return self._attention[layer_idx]

    def state_layer(self, layer_idx: int) -> dict[str, Tensor]:
        return self._state[layer_idx]


class _Table(NamedTuple):
    block_ids: range
    write_from: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows [start, end) of one of the probe's two sequences, as a segment."""

    sequence: int
    start: int
    end: int
    table: int
    src_slot: int
    dst_slot: int
    save_offsets: tuple[int, ...] = ()
    save_slots: tuple[int, ...] = ()
    whole: tuple[tuple[int, int], ...] = ()
    write_from: int = 0
    num_groups: int = 1

    @property
    def request_id(self) -> str:
        return f"probe {self.sequence}"

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def tables(self) -> tuple[_Table, ...]:
        """Every attention group has a pool of its own, so the same blocks serve all."""
        first = 1 + self.table * _BLOCKS_PER_TABLE
        return (_Table(range(first, first + _BLOCKS_PER_TABLE), self.write_from),) * self.num_groups


# The steps of the probe, each with the segments packed into it: chunks cut in odd places, then from saved states.
_SCHEDULE = (
    (_Piece(0, 0, 13, 0, 0, 1, (7,), (3,)), _Piece(1, 0, 5, 1, 0, 2)),
    (_Piece(1, 5, 30, 1, 2, 2), _Piece(0, 13, 14, 0, 1, 1)),
    (_Piece(0, 14, 33, 0, 1, 1, (11,), (4,)), _Piece(1, 30, 31, 1, 2, 2)),
    (_Piece(0, 33, 34, 0, 1, 1), _Piece(1, 31, 32, 1, 2, 2)),
    # from the state saved at 14 + 11: another slot, the same blocks, which are not written again below 34
    (_Piece(0, 25, 40, 0, 4, 5, write_from=34), _Piece(1, 32, 40, 1, 2, 2)),
    # from the state saved at 7
    (_Piece(0, 7, 40, 0, 3, 6, write_from=40),),
)


def probe_tokens(vocab_size: int, seed: int) -> Tensor:
    """[2, NUM_PROBE_TOKENS] token ids."""
    return torch.randint(vocab_size, (2, NUM_PROBE_TOKENS), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def stock_logits(model: Any, tokens: Tensor, geometry: ModelGeometry, device: torch.device) -> Tensor:
    """[2, NUM_PROBE_TOKENS, vocab] float32 by the stock forward, one sequence at a time; with the model's own
    attention.

    Raises:
        ConfigError: what the stock forward left in stock's own cache is not of the geometry's shapes.
    """
    outputs = [model(input_ids=row[None].to(device), use_cache=True) for row in tokens]
    check_shapes(geometry, stock_cache(outputs[0]))
    return torch.stack([output.logits[0].float() for output in outputs])


@torch.inference_mode()
def check_numbers(
    model: Any,
    cache: Any,
    ops: Ops,
    geometry: ModelGeometry,
    tokens: Tensor,
    expected: Tensor,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tolerance: float,
) -> None:
    """Run the schedule on the prepared ``model`` and compare with ``expected``, from :func:`stock_logits`.

    Raises:
        ConfigError: shapes that differ from the geometry, or numbers that differ from stock.
    """
    views = PoolViews.of(ProbePools(geometry, 1 + 2 * _BLOCKS_PER_TABLE, 7, device), geometry)
    differences = []
    for pieces in _SCHEDULE:
        context = _context(pieces, views, ops, device)
        ids = torch.cat([tokens[p.sequence, p.start : p.end] for p in pieces])[None].to(device)
        with _shape_errors(geometry), set_forward_context(context):
            output = model(input_ids=ids, **step_arguments(model, cache, context.metadata.positions))
        want = torch.cat([expected[p.sequence, p.start : p.end] for p in pieces])
        differences.append((output.logits[0].float() - want).abs() / expected.std().clamp_min(1e-12))
    difference = torch.cat(differences)
    largest, mean = float(difference.max()), float(difference.mean())
    if dtype == torch.float32:
        failed, allowed = not largest <= tolerance, f"{tolerance:g} at most"  # "not <=": NaN fails too
    else:
        failed, allowed = not mean <= _HALF_PRECISION_TOLERANCE, f"{_HALF_PRECISION_TOLERANCE:g} in the mean"
    if failed:
        raise ConfigError(
            f"model_type {geometry.model_type!r} failed the numeric probe: over {NUM_PROBE_TOKENS} tokens the engine's "
            f"logits differ from transformers' own by up to {largest:.3g} standard deviations, {mean:.3g} in the mean "
            f"(allowed: {allowed})",
            param="--model",
        )


_REPLAY_START, _REPLAY_STEPS = 30, 7
"""Positions of the prompt, then decode steps: they begin two places before the end of a block, so that replayed steps
cross into the next one."""


@torch.inference_mode()
def check_replay(model: Any, cache: Any, backend: ModelBackend, geometry: ModelGeometry, tokens: Tensor) -> bool:
    """Whether decode steps that are recorded give what those through the model's code give, over prompts that were
    computed in the same way; False too where the backend records none. A family whose steps cannot be recorded passes:
    none of its steps is."""
    begin = (_Piece(0, 0, _REPLAY_START, 0, 0, 1), _Piece(1, 0, _REPLAY_START - 1, 1, 0, 2))
    own, others = (
        PoolViews.of(ProbePools(geometry, 1 + 2 * _BLOCKS_PER_TABLE, 3, backend.device), geometry) for _ in range(2)
    )
    runner = backend.create_step_runner(own)
    if runner is None:
        return False
    rows: list[list[Tensor]] = []
    for views, steps in ((others, None), (own, runner)):
        found: list[Tensor] = []

        def forward(token_ids: Tensor, positions: Tensor) -> Tensor:
            logits: Tensor = model(input_ids=token_ids[None], **step_arguments(model, cache, positions)).logits[0]
            return logits

        for shift in range(_REPLAY_STEPS):
            pieces = [
                _Piece(s, p + shift, p + shift + 1, s, s + 1, s + 1) for s, p in ((0, begin[0].end), (1, begin[1].end))
            ]
            for each in (begin, pieces) if shift == 0 else (pieces,):
                context = _context(each, views, backend.ops, backend.device)
                ids = torch.cat([tokens[p.sequence, p.start : p.end] for p in each])
                if steps is not None and each is pieces:
                    found.append(steps.forward(forward, context, ids.tolist(), [p.start for p in each]))
                    continue
                with set_forward_context(context):
                    logits = forward(ids.to(backend.device), context.metadata.positions)
                if each is pieces:
                    found.append(logits)
        rows.append(found)
    is_same = all(backend.is_same(recorded, expected) for expected, recorded in zip(*rows, strict=True))
    if not is_same:
        logger.warning(
            "decode steps of model_type %r are not recorded: other numbers than the forward's", geometry.model_type
        )
    return is_same


def _context(pieces: Sequence[_Piece], views: PoolViews, ops: Ops, device: torch.device) -> ForwardContext:
    segments = [replace(piece, num_groups=len(views.windows)) for piece in pieces]
    return ForwardContext.of(segments, views, ops, block_size=_BLOCK_SIZE, device=device)


@contextmanager
def _shape_errors(geometry: ModelGeometry) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, KeyError, IndexError) as exc:
        raise ConfigError(
            f"model_type {geometry.model_type!r} does not run with the planned shapes: {type(exc).__name__}: {exc}",
            param="--model",
        ) from exc
