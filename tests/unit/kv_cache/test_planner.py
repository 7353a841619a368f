"""The arithmetic of pool sizes."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from common.kv_cache.layout import make_layout
from common.kv_cache.planner import CachePlan, plan_cache
from tests.unit.kv_cache.world import make_geometry

BLOCK = 4 * 4 * 4 * 2  # tokens x head_size x float32 x (K, V)
SLOT = 64 + 64  # conv 48 and recurrent 32 bytes, each padded to 64


def plan(
    memory: int, *, state: bool = True, attention: bool = True, caching: bool = True, mode: str = "auto"
) -> CachePlan:
    return plan_cache(
        make_geometry(state=state, attention=attention),
        kv_cache_memory_bytes=memory,
        max_num_seqs=3,
        max_model_len=10,
        block_size=4,
        root_key=b"",
        enable_prefix_caching=caching,
        mamba_cache_mode=mode,
    )


def test_layout_when_made_then_parts_are_contiguous_and_aligned() -> None:
    layout = make_layout(make_geometry(), 4)
    assert (layout.block_bytes, layout.slot_bytes) == (BLOCK, SLOT)
    key, value = layout.attention[1]
    assert (key.offset_bytes, value.offset_bytes, key.shape) == (0, 64, (4, 1, 4))
    assert [layout.state[0][name].offset_bytes for name in ("conv", "recurrent")] == [0, 64]


@pytest.mark.parametrize(("state", "attention"), [(True, True), (True, False), (False, True)])
def test_plan_when_memory_is_the_smallest_then_works_and_one_byte_less_is_refused(state: bool, attention: bool) -> None:
    blocks, slots = (4 if attention else 0), (4 if state else 0)
    smallest = (blocks + 1) * BLOCK * attention + (slots + 1) * SLOT * state
    config = plan(smallest, state=state, attention=attention).config
    assert (config.num_blocks, config.num_slots) == (blocks + 1, slots + 1)
    with pytest.raises(ConfigError, match=rf"--kv-cache-memory .*smallest value that works is {smallest}") as caught:
        plan(smallest - 1, state=state, attention=attention)
    assert caught.value.param == "--kv-cache-memory"


def test_plan_when_memory_is_ample_then_both_pools_share_it_and_fit() -> None:
    report = plan(1 << 20).report
    assert report.used_bytes <= 1 << 20
    assert (1 << 20) - report.used_bytes < BLOCK
    assert report.num_slots == (1 << 18) // SLOT - 1
    assert report.num_resumable_prefixes == report.num_slots - 4
    assert report.num_tokens == report.num_blocks * 4
    assert report.num_full_sequences == 3
    assert f"{report.num_blocks} + null" in str(report)
    assert "resumable prefixes" in str(report)


def test_plan_when_states_are_not_cached_then_slots_are_for_running_and_handing_over_only() -> None:
    for options in ({"caching": False}, {"mode": "none"}):
        assert plan(1 << 20, **options).report.num_slots == 4 + 3  # type: ignore[arg-type]


def test_plan_when_dense_then_no_slots() -> None:
    result = plan(1 << 20, state=False)
    assert result.config.num_slots == 1
    assert "slots" not in str(result.report)


@pytest.mark.parametrize("mode", ["align", "all", "sometimes"])
def test_plan_when_mode_is_not_available_then_refused_with_the_flag(mode: str) -> None:
    with pytest.raises(ConfigError, match="--mamba-cache-mode"):
        plan(1 << 20, mode=mode)
