"""A decode step of every family on the meta device, fused as for a GPU: nothing that a graph could not capture, and few
kernels a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from common.models.adapter.arguments import step_arguments
from common.models.adapter.engine_cache import EngineCache
from common.models.adapter.forward_context import ForwardContext, set_forward_context
from common.models.adapter.pool_views import PoolViews
from common.models.backends import create
from common.models.loading import loader
from common.models.loading.loader import LoadedModel
from common.models.loading.probe import ProbePools
from common.ops.interface import Ops
from tests.support.counted_ops import CountedOps, KernelCounter
from tests.support.models import CONFIGS, checkpoint, tiered

BATCH = 3
META = torch.device("meta")
LIMITS = {"qwen3_5": 14, "granitemoehybrid": 11}
"""Kernels that a layer may take on average."""


class Table(NamedTuple):
    block_ids: tuple[int, ...] = (1,)
    write_from: int = 0


@dataclass(frozen=True)
class DecodeRow:
    """A segment of one token, with one table for each attention group."""

    tables: tuple[Table, ...]
    request_id: str = "r"
    num_tokens: int = 1
    start: int = 5
    src_slot: int = 1
    dst_slot: int = 1
    save_offsets: tuple[int, ...] = ()
    save_slots: tuple[int, ...] = ()
    whole: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Counts:
    """Kernels of a step: in each decoder layer, and outside of them. ``names``: all of them."""

    layers: tuple[int, ...]
    outside: int
    names: dict[str, int]
    cpu_tensors: dict[str, int]

    @property
    def a_layer(self) -> float:
        return sum(self.layers) / len(self.layers)


def load(family: str, ops: Ops, monkeypatch: pytest.MonkeyPatch, dtype: str = "bfloat16") -> LoadedModel:
    """The tiny model of ``family``, loaded and probed with ``ops``."""
    monkeypatch.setattr(create, "create_ops", lambda *args, **kwargs: ops)
    return loader.load_model(str(checkpoint(family)), dtype=dtype)


def count_kernels(loaded: LoadedModel) -> Counts:
    """Of a decode step of ``loaded``, whose weights are given up for it."""
    base, ops = loaded.model.to(META).base_model, loaded.ops
    views = PoolViews.of(ProbePools(loaded.geometry, 4, 4, META), loaded.geometry)
    rows = [DecodeRow(tables=(Table(),) * len(views.windows))] * BATCH
    context = ForwardContext.of(rows, views, ops, block_size=8, device=META)
    ids, positions = torch.empty(2, BATCH, dtype=torch.long, device=META)
    counter, layers = KernelCounter(), Layers()
    ops.counter = counter  # type: ignore[attr-defined]
    for module in decoder_layers(base):
        module.register_forward_pre_hook(lambda *args: layers.begins.append(counter.total))
        module.register_forward_hook(lambda *args: layers.ends.append(counter.total))
    arguments = step_arguments(base, EngineCache(), positions)
    with torch.no_grad(), set_forward_context(context), counter:
        base(input_ids=ids[None], **arguments)
    each = tuple(end - begin for begin, end in zip(layers.begins, layers.ends, strict=True))
    return Counts(each, counter.total - sum(each), dict(counter.kernels), dict(counter.cpu_tensors))


class Layers:
    def __init__(self) -> None:
        self.begins: list[int] = []
        self.ends: list[int] = []


def decoder_layers(base: Any) -> nn.ModuleList:
    """Of the text model: a vision tower has layers of its own."""
    text = getattr(base, "language_model", base)
    return next(child for child in text.children() if isinstance(child, nn.ModuleList))


@pytest.mark.parametrize("family", tiered(tuple(CONFIGS), ("qwen3_5", "granitemoehybrid")))
def test_decode_step_when_fused_then_a_graph_can_capture_it(
    family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = count_kernels(load(family, CountedOps(), monkeypatch))
    with capsys.disabled():
        print(f"\n{family:22s} {counts.a_layer:5.1f} a layer {list(counts.layers)}, {counts.outside} outside")
    assert not counts.cpu_tensors
    assert counts.a_layer <= LIMITS.get(family, 100)
