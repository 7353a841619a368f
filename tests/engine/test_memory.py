"""Memory: packing keeps one copy of the weights, and the cache's arenas cost nothing before they are used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from common.kv_cache.pools.storage import KVStorage
from common.kv_cache.spec import KVCacheConfig
from common.models.cpu.linears import pack_linears
from common.ops.cpu.backend import CppOps
from tests.engine.harness import BLOCK_SIZE, engine_model
from tests.support.ops import make_ops

MIB = 1 << 20
STATUS = Path("/proc/self/status")
pytestmark = pytest.mark.skipif(not STATUS.exists(), reason="resident memory is read from /proc")


def resident_bytes() -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmRSS"))
    return 1024 * int(line.split()[1])


def test_pack_linears_when_done_then_the_originals_are_gone() -> None:
    ops = make_ops("cpp")
    assert isinstance(ops, CppOps)
    layers = [nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16, device="meta") for _ in range(12)]
    model = nn.Sequential(*layers).to_empty(device="cpu").requires_grad_(False)
    for layer in model:
        layer.weight.zero_()  # touches every page
    num_bytes = sum(p.nbytes for p in model.parameters())
    assert num_bytes == 96 * MIB
    before = resident_bytes()
    pack_linears(model, ops.linears)
    assert resident_bytes() - before < num_bytes // 4


def test_storage_when_large_then_only_touched_memory_is_resident() -> None:
    geometry = engine_model("granitemoehybrid").geometry
    small = KVStorage(KVCacheConfig(geometry, BLOCK_SIZE, (2,), 2, b"root"), torch.device("cpu"))
    num_blocks = 2048 * MIB // small.block_arenas[0].shape[1]
    num_slots = 1024 * MIB // small.slot_arena.shape[1]
    before = resident_bytes()
    storage = KVStorage(KVCacheConfig(geometry, BLOCK_SIZE, (num_blocks,), num_slots, b"root"), torch.device("cpu"))
    assert resident_bytes() - before < 16 * MIB
    storage.block_arenas[0][num_blocks // 2].fill_(1)
    storage.slot_arena[num_slots // 2].fill_(1)
    assert resident_bytes() - before < 32 * MIB
    assert int(storage.block_arenas[0][0].max()) == 0
