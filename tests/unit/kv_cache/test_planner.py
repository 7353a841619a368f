"""The arithmetic of pool sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.errors import ConfigError
from common.geometry.geometry import model_geometry
from common.kv_cache.layout import make_layout
from common.kv_cache.planner import SLOT_SHARE, CachePlan, CapacityReport, plan_cache
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
    assert (layout.group_block_bytes, layout.slot_bytes) == ((BLOCK,), SLOT)
    key, value = layout.attention[1]
    assert (key.offset_bytes, value.offset_bytes, key.shape) == (0, 64, (1, 4, 4))
    assert [layout.state[0][name].offset_bytes for name in ("conv", "recurrent")] == [0, 64]


@pytest.mark.parametrize(("state", "attention"), [(True, True), (True, False), (False, True)])
def test_plan_when_memory_is_the_smallest_then_works_and_one_byte_less_is_refused(state: bool, attention: bool) -> None:
    blocks, slots = (4 if attention else 0), (4 if state else 0)
    smallest = (blocks + 1) * BLOCK * attention + (slots + 1) * SLOT * state
    config = plan(smallest, state=state, attention=attention).config
    assert (config.num_blocks, config.num_slots) == ((blocks + 1,) * attention, slots + 1)
    with pytest.raises(ConfigError, match=rf"--kv-cache-memory .*smallest value that works is {smallest}") as caught:
        plan(smallest - 1, state=state, attention=attention)
    # States do not grow with the context.
    assert caught.value.message.endswith(f"{smallest}, and less with a --max-model-len below 10") is attention
    assert caught.value.param == "--kv-cache-memory"


def test_plan_when_drafts_are_run_then_each_sequence_has_a_second_slot_to_go_back_to() -> None:
    def report(memory: int, has_two_states: bool) -> CapacityReport:
        return plan_cache(
            make_geometry(), kv_cache_memory_bytes=memory, max_num_seqs=3, max_model_len=10, block_size=4, root_key=b"",
            has_two_states=has_two_states,
        ).report  # fmt: skip

    assert [report(1 << 20, each).num_running_slots for each in (False, True)] == [4, 7]
    smallest = 5 * BLOCK + 8 * SLOT
    assert report(smallest, True).num_slots == 7
    with pytest.raises(ConfigError, match=f"3 sequences need 7 slots .* works is {smallest}"):
        report(smallest - 1, True)


def test_plan_when_memory_is_ample_then_both_pools_share_it_and_fit() -> None:
    report = plan(1 << 20).report
    assert report.used_bytes <= 1 << 20
    assert (1 << 20) - report.used_bytes < BLOCK
    assert report.num_slots == int(((1 << 20) - BLOCK - SLOT) * SLOT_SHARE) // SLOT
    assert report.num_resumable_prefixes == report.num_slots - 4
    assert report.num_tokens == report.groups[0].num_blocks * 4
    assert report.num_full_sequences == 3
    assert f"{report.groups[0].num_blocks} + null" in str(report)
    assert "resumable prefixes" in str(report)


def test_plan_when_states_are_not_cached_then_slots_are_for_running_and_handing_over_only() -> None:
    for options in ({"caching": False}, {"mode": "none"}):
        assert plan(1 << 20, **options).report.num_slots == 4 + 3  # type: ignore[arg-type]


def test_plan_when_dense_then_no_slots() -> None:
    result = plan(1 << 20, state=False)
    assert result.config.num_slots == 1
    assert "slots" not in str(result.report)


def test_plan_when_mode_is_not_available_then_refused_with_the_flag() -> None:
    with pytest.raises(ConfigError, match="--mamba-cache-mode"):
        plan(1 << 20, mode="sometimes")


QWEN3_5_35B = {
    "model_type": "qwen3_5_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "full_attention_interval": 4,  # 10 full-attention layers, 30 of gated delta rule
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
NEMOTRON_H_8B = {
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    # 24 Mamba-2 layers, 4 of attention, 24 MLPs
    "hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 2 + "M-M-M-M-M*-" + "M-M-M-M-M-",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
}


def test_capacity_when_model_is_like_qwen3_5_35b_then_equals_hand_arithmetic() -> None:
    report = plan_cache(
        model_geometry(QWEN3_5_35B, "bfloat16"),
        kv_cache_memory_bytes=40 << 30,
        max_num_seqs=64,
        max_model_len=32_768,
        block_size=16,
        root_key=b"",
        slot_share=0.25,
    ).report
    # a token: 10 layers x 2 heads x (256 + 256) x 2 B = 20,480 B; a block: 16 of them
    assert report.groups[0].block_bytes == 327_680
    # a layer's state: 8,192 x 3 x 2 B of conv + 32 x 128 x 128 x 4 B = 2,146,304 B; a slot: 30 of them
    assert report.slot_bytes == 64_389_120
    # 42,949,672,960 - 64,716,800 of nulls = 42,884,956,160; a quarter of it: 166.5 slots; the rest: 98,255.5 blocks
    assert (report.num_slots, report.groups[0].num_blocks) == (166, 98_255)
    assert report.num_tokens == 1_572_080
    assert (report.num_running_slots, report.num_resumable_prefixes) == (65, 101)
    assert report.num_full_sequences == 47  # 98,255 // 2,048 blocks: states do not grow with tokens
    assert report.used_bytes == 64_716_800 + 166 * 64_389_120 + 98_255 * 327_680
    assert "98255 + null x 320.00 KiB (16 tokens each) = 29.99 GiB: 1572080 tokens of K/V" in str(report)
    assert "166 + null x 61.41 MiB = 10.01 GiB: 65 for running sequences, 101 resumable prefixes" in str(report)


@pytest.mark.parametrize(("mode", "num_slots", "num_blocks"), [("auto", 41, 49_170), ("none", 33, 52_287)])
def test_capacity_when_model_is_like_nemotron_h_8b_then_equals_hand_arithmetic(
    mode: str, num_slots: int, num_blocks: int
) -> None:
    geometry = model_geometry(NEMOTRON_H_8B, "bfloat16")
    assert (len(geometry.state_layers), len(geometry.attention_layers)) == (24, 4)
    report = plan_cache(
        geometry,
        kv_cache_memory_bytes=16 << 30,
        max_num_seqs=16,
        max_model_len=8192,
        block_size=16,
        root_key=b"",
        slot_share=0.25,
        mamba_cache_mode=mode,
    ).report
    # a token: 4 layers x 8 heads x (128 + 128) x 2 B = 16,384 B
    assert report.groups[0].block_bytes == 262_144
    # (128 x 64 + 2 x 8 x 128) x 3 x 2 B of conv + 128 x 64 x 128 x 4 B = 4,255,744 B a layer, 24 layers
    assert report.slot_bytes == 102_137_856
    # 17,179,869,184 - 102,400,000 of nulls; none: 17 to run in, 16 to hand over, no share for a cache
    assert (report.num_slots, report.groups[0].num_blocks) == (num_slots, num_blocks)
    assert report.num_tokens == 16 * num_blocks
    assert report.num_full_sequences == 16


def test_plan_when_a_share_is_given_then_states_get_that_part() -> None:
    shares = {
        share: plan_cache(
            make_geometry(),
            kv_cache_memory_bytes=1 << 20,
            max_num_seqs=3,
            max_model_len=10,
            block_size=4,
            root_key=b"",
            slot_share=share,
        ).report
        for share in (0.1, 0.5)
    }
    assert [report.num_slots for report in shares.values()] == [
        int(((1 << 20) - BLOCK - SLOT) * x) // SLOT for x in shares
    ]
    assert all((1 << 20) - report.used_bytes < BLOCK for report in shares.values())


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"retention_interval": 6}, "--prefix-cache-retention-interval 6 .* multiple of --block-size 4"),
        ({"retention_interval": -4}, "--prefix-cache-retention-interval -4"),
        ({"retention_interval": 0}, "--prefix-cache-retention-interval 0"),
        ({"slot_share": 0.0}, "--state-memory-share 0.0"),
        ({"slot_share": 1.0}, "--state-memory-share 1.0"),
        ({"eviction_policy": "clairvoyant"}, "--eviction-policy 'clairvoyant'"),
    ],
)
def test_plan_when_a_value_is_bad_then_refused_with_the_flag(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag) as caught:
        plan_cache(
            make_geometry(),
            kv_cache_memory_bytes=1 << 20,
            max_num_seqs=3,
            max_model_len=10,
            block_size=4,
            root_key=b"",
            **options,
        )
    assert caught.value.param in flag


@pytest.mark.parametrize(("interval", "is_sparse"), [(None, False), (16, True), (8, False)])
def test_plan_when_a_model_has_windows_then_they_get_what_resumable_positions_read(
    interval: int | None, is_sparse: bool
) -> None:
    plan = plan_cache(
        make_geometry(windows=(9,), state=False),
        kv_cache_memory_bytes=1 << 20,
        max_num_seqs=3,
        max_model_len=10,
        block_size=4,
        root_key=b"",
        retention_interval=interval,
    )
    full, window = plan.report.groups[0].num_blocks, plan.report.groups[1].num_blocks
    assert plan.config.pool_sizes == {"blocks": full + 1, "blocks_1": window + 1, "slots": 1}
    # a window of 9 reads 2 blocks: half of every 16 tokens, plus one sequence of 4 blocks and 3 running windows of 3
    assert window == (full // 2 + 4 + 3 * 3 if is_sparse else full)
    assert plan.report.used_bytes <= 1 << 20
    assert (1 << 20) - plan.report.used_bytes < 2 * 2 * BLOCK
    assert f"window_9 blocks: {window} + null" in str(plan.report)


def test_report_when_the_node_has_ranks_then_says_which_bytes_are_of_each() -> None:
    def of(num_ranks: int, memory: int = 1 << 16) -> CapacityReport:
        sizes = {"kv_cache_memory_bytes": memory, "max_num_seqs": 3, "max_model_len": 10, "block_size": 4}
        return plan_cache(replace(make_geometry(), num_ranks=num_ranks), root_key=b"", **sizes).report

    one, two = str(of(1)).splitlines(), str(of(2)).splitlines()
    assert [line.count(" per rank") for line in one] == [0, 0, 0, 0]
    assert [line.count(" per rank") for line in two] == [1, 1, 1, 0]  # how many sequences run is no rank's own
    assert [line.replace(" per rank", "") for line in two] == one
    with pytest.raises(ConfigError, match="--kv-cache-memory 100 per rank is too small"):
        of(2, 100)
