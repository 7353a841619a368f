"""What a node says at its start about settings with which caching cannot work; silence when it can."""

from __future__ import annotations

from typing import Any

import pytest

from common.config.node import NodeConfig
from common.kv_cache.planner import plan_cache
from common.node.cache_warnings import cache_warnings
from tests.unit.kv_cache.world import make_geometry


def warnings(*, state: bool = True, memory: int = 1 << 20, max_model_len: int = 1024, **flags: Any) -> list[str]:
    config = NodeConfig(model="m", kv_cache_memory=memory, max_num_seqs=4, max_model_len=max_model_len, **flags)
    plan = plan_cache(
        make_geometry(state=state),
        kv_cache_memory_bytes=memory,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        block_size=config.block_size,
        root_key=b"",
        enable_prefix_caching=config.enable_prefix_caching,
        mamba_cache_mode=config.mamba_cache_mode,
        retention_interval=config.prefix_cache_retention_interval,
        slot_share=config.state_memory_share,
    )
    return cache_warnings(config, plan.config, plan.report)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"mamba_cache_mode": "align"},
        {"mamba_cache_mode": "all"},
        {"mamba_cache_mode": "all", "prefix_cache_retention_interval": 64},
        {"enable_prefix_caching": False},
        {"state": False},
    ],
)
def test_settings_when_they_work_then_nothing_is_said(flags: dict[str, Any]) -> None:
    assert warnings(**flags) == []


@pytest.mark.parametrize(
    ("flags", "beginning"),
    [
        ({"mamba_cache_mode": "none"}, "--mamba-cache-mode none keeps no recurrent states"),
        ({"block_size": 128, "max_model_len": 128}, "--block-size 128 is not below the context of 128 tokens"),
        (
            {"prefix_cache_retention_interval": 1024},
            "--prefix-cache-retention-interval 1024 is not below the context of 1024 tokens",
        ),
        (
            {"enable_prefix_caching": False, "mamba_cache_mode": "all"},
            "--mamba-cache-mode all does nothing with --no-enable-prefix-caching",
        ),
        (
            {"enable_prefix_caching": False, "prefix_cache_retention_interval": 64},
            "--prefix-cache-retention-interval 64 does nothing with --no-enable-prefix-caching",
        ),
        ({"state": False, "mamba_cache_mode": "align"}, "--mamba-cache-mode align does nothing: the model has no"),
        ({"state": False, "state_memory_share": 0.5}, "--state-memory-share 0.5 does nothing: the model has no"),
    ],
)
def test_setting_when_it_defeats_caching_or_does_nothing_then_one_sentence_names_it(
    flags: dict[str, Any], beginning: str
) -> None:
    (sentence,) = warnings(**flags)
    assert sentence.startswith(beginning)


def test_retention_interval_when_no_states_are_kept_then_both_are_said() -> None:
    said = warnings(mamba_cache_mode="none", prefix_cache_retention_interval=64)
    assert [sentence.split()[0] for sentence in said] == ["--mamba-cache-mode", "--prefix-cache-retention-interval"]


def test_slots_when_running_sequences_need_them_all_then_the_numbers_are_said() -> None:
    (sentence,) = warnings(memory=34_100, max_model_len=1000)
    assert sentence.startswith("0 of 5 state slots are left while --max-num-seqs 4 sequences run")


def test_mode_all_when_one_prompt_has_more_boundaries_than_there_are_slots_then_the_numbers_are_said() -> None:
    (sentence,) = warnings(mamba_cache_mode="all", memory=37_120)
    assert sentence.startswith("--mamba-cache-mode all keeps up to 64 states of one prompt of 1024 tokens, ")
    assert warnings(mamba_cache_mode="all", memory=37_120, prefix_cache_retention_interval=128) == []
