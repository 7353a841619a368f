"""Replays with tiers below the cache: what they bring back, write and refuse."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.simulate.simulate import add_arguments, run
from common.simulate.tiers import replay_settings
from tests.unit.simulate.test_simulate import hashed, replay

MEMORY = 600_000
"""Of the tiny model: about two of these prompts."""
PROMPTS = [hashed(1100, number, number + 50, number + 100) for number in range(8)]


def tiered(folder: Path, lines: list[dict[str, Any]], *kinds: str, size: int = 1 << 26, **options: Any) -> Any:
    settings = {name: options.pop(name) for name in ("min_return", "write_rate") if name in options}
    tiers = [replay_settings(kind, size, settings.get("min_return", 0.1), settings.get("write_rate")) for kind in kinds]
    return replay(folder, lines, memory=MEMORY, tiers=tiers, **options)


@pytest.mark.parametrize("policy", ["value", "lru"])
@pytest.mark.parametrize("kind", ["disk", "host", "shared"])
def test_prefix_when_evicted_then_the_tier_has_it(tmp_path: Path, kind: str, policy: str) -> None:
    lines = [*PROMPTS, *PROMPTS]
    without = replay(tmp_path, lines, memory=MEMORY, eviction_policy=policy)
    assert without["hit_tokens"] < 3 * 1100
    assert "tiers" not in without
    result = tiered(tmp_path, lines, kind, eviction_policy=policy)
    tier = result["tiers"][0]
    assert result["hit_tokens"] >= 7 * 1100
    assert tier["hit_tokens"] > 4 * 1100
    assert 0 < tier["used_bytes"] <= tier["written_bytes"]
    assert tier["read_bytes"] > 0


def test_tier_when_too_small_for_a_prefix_then_it_takes_none(tmp_path: Path) -> None:
    result = tiered(tmp_path, [*PROMPTS, *PROMPTS], "disk", size=10_000)
    tier = result["tiers"][0]
    assert (tier["prefixes"], tier["used_bytes"], tier["written_bytes"], tier["hit_tokens"]) == (0, 0, 0, 0)
    assert tier["skipped"]["full"] > 0


def test_nodes_when_all_stop_then_disks_survive_and_host_memory_does_not(tmp_path: Path) -> None:
    lines = [*PROMPTS, *PROMPTS]
    after = {
        kind: tiered(tmp_path, lines, kind, stop_at=8)["hit_rate_after_stop"] for kind in ("disk", "host", "shared")
    }
    assert after["host"] == 0
    assert after["disk"] > 0.6  # what had not been evicted was not written
    assert after["shared"] == 1
    assert replay(tmp_path, lines, memory=MEMORY, stop_at=8)["hit_rate_after_stop"] == 0


def test_nodes_when_one_has_computed_it_then_another_finds_it_in_the_shared_tier_only(tmp_path: Path) -> None:
    lines = [PROMPTS[0], PROMPTS[0]]
    assert tiered(tmp_path, lines, "shared", num_nodes=2)["hit_tokens"] == 1100
    assert tiered(tmp_path, lines, "disk", num_nodes=2)["hit_tokens"] == 0


def test_two_tiers_when_the_first_is_full_then_the_second_gets_what_it_drops(tmp_path: Path) -> None:
    lines = [*PROMPTS, *PROMPTS]
    tiers = [replay_settings("host", 300_000, 0.0, None), replay_settings("disk", 1 << 26, 0.0, None)]
    result = replay(tmp_path, lines, memory=MEMORY, tiers=tiers)
    host, disk = result["tiers"]
    assert host["used_bytes"] <= 300_000
    assert disk["hit_tokens"] > 0
    assert min(disk["written_bytes"], host["written_bytes"]) > 0


def test_write_rate_when_it_is_low_then_it_holds_and_refusals_are_counted(tmp_path: Path) -> None:
    lines = [{**line, "timestamp": 1000 * second} for second, line in enumerate([*PROMPTS, *PROMPTS])]
    tier = tiered(tmp_path, lines, "disk", write_rate=20_000)["tiers"][0]
    assert 0 < tier["written_bytes"] <= 20_000 * 15 + 400_000
    assert tier["skipped"]["rate"] > 0


def test_min_return_when_certainty_is_asked_then_nothing_is_written(tmp_path: Path) -> None:
    tier = tiered(tmp_path, [*PROMPTS, *PROMPTS], "disk", min_return=1.0)["tiers"][0]
    assert tier["written_bytes"] == 0
    assert tier["skipped"]["value"] > 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--kv-tier", "tape:/x?size=1GiB"], "--kv-tier 'tape:/x"),
        (["--kv-tier", "disk:/x"], "--kv-tier 'disk:/x'"),
        (["--kv-tier", "disk:x?size=1GiB"], "--kv-tier 'disk:x"),
        (["--kv-tier", "host:much"], "size is not a size"),
        (["--kv-tier", "host:0"], "below its minimum of 1"),
        (["--kv-tier-min-return", "1.5"], "--kv-tier-min-return 1.5"),
        (["--kv-tier-min-return", "x"], "--kv-tier-min-return 'x'"),
        (["--kv-tier-write-rate", "0"], "--kv-tier-write-rate 0"),
        (["--nodes", "0"], "--nodes 0"),
        (["--stop-at", "0"], "--stop-at 0"),
    ],
)
def test_flag_when_wrong_then_error_names_it(tmp_path: Path, words: list[str], text: str) -> None:
    replay(tmp_path, PROMPTS[:1])
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    argv = ["--trace", str(tmp_path / "trace.jsonl"), "--model-config", str(tmp_path), *words]
    with pytest.raises(ConfigError) as caught:
        run(parser.parse_args(argv))
    assert text in caught.value.message


@pytest.mark.parametrize("timestamp", [-1, "0", None, True, float("inf")])
def test_timestamp_when_it_is_no_time_then_error_names_it(tmp_path: Path, timestamp: object) -> None:
    with pytest.raises(ConfigError, match="timestamp must be a number"):
        replay(tmp_path, [{**PROMPTS[0], "timestamp": timestamp}])
