"""Replaying traces whose answers can be computed by hand."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.geometry.geometry import model_geometry
from common.kv_cache.layout import make_layout, transfer_bytes
from common.kv_cache.planner import plan_cache
from common.kv_cache.shards import shard_geometry, unit_slices
from common.models.loading.checkpoint import resolve_dtype
from common.simulate.simulate import add_arguments, read_plan, run, simulate
from common.simulate.tiers import replay_settings
from common.simulate.trace import read_trace
from tests.support.published import MODELS
from tests.support.simulated import HYBRID


def replay(folder: Path, lines: list[dict[str, Any]], *, memory: int = 1 << 24, **options: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(HYBRID))
    (folder / "trace.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return simulate(folder / "trace.jsonl", model_config_path=folder, kv_cache_memory_bytes=memory, **options)


def hashed(num_tokens: int, *hash_ids: int) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": num_tokens, "output_length": 3, "hash_ids": hash_ids}


def test_hash_trace_when_prefixes_repeat_then_hits_are_at_the_boundary_and_exact_ends(tmp_path: Path) -> None:
    lines = [hashed(1100, 0, 1, 2), hashed(1100, 0, 1, 3), hashed(1100, 0, 1, 2), hashed(600, 0, 9)]
    result = replay(tmp_path, lines)
    assert (result["requests"], result["prompt_tokens"]) == (4, 3900)
    assert result["hit_tokens"] == 1024 + 1100  # nothing kept at 512, so the last request finds attention only
    assert result["lost_tokens"] == {"no_state": 512}
    assert result["ideal_hit_rate"] == pytest.approx((1024 + 1100 + 512) / 3900)
    assert result["hit_rate"] == pytest.approx(2124 / 3900)


@pytest.mark.parametrize("block_size", [16, 48, 1024])
def test_ideal_when_an_end_lies_inside_a_block_then_the_real_cache_has_no_more(tmp_path: Path, block_size: int) -> None:
    lines = [hashed(1100, 0, 1, 2), hashed(1100, 0, 1, 3), hashed(1100, 0, 1, 2)]
    tokens = [*range(10**6, 10**6 + 70), 1000, 1001]
    lines += [{"timestamp": 0, "prompt_token_ids": tokens[:70], "output_token_ids": [1000, 1001, 1002]}]
    lines += [{"timestamp": 0, "prompt_token_ids": [*tokens, 7], "output_token_ids": []}]
    result = replay(tmp_path, lines, block_size=block_size)
    assert result["hit_tokens"] == 1024 + 1100 + 72
    assert result["ideal_hit_rate"] == result["hit_rate"]


def test_hash_ids_when_they_are_hashes_then_only_equality_counts(tmp_path: Path) -> None:
    shape = [(0, 1, 2), (0, 1, 3), (0, 1, 2), (3, 1, 2)]
    hashes = [-5, 2**63 + 11, 10**12, 2**40]
    figures = [
        replay(tmp_path, [hashed(1100, *(of[number] for number in numbers)) for numbers in shape])
        for of in (range(4), hashes)
    ]
    for result in figures:
        del result["seconds"]
    assert figures[0] == figures[1]


def test_token_trace_when_turns_follow_each_other_then_each_resumes_after_the_last(tmp_path: Path) -> None:
    first = {"timestamp": 0, "prompt_token_ids": list(range(50)), "output_token_ids": [1000, 1001, 1002]}
    second = {"timestamp": 1, "prompt_token_ids": [*range(50), 1000, 1001, 1002, 7, 8], "output_token_ids": [5]}
    assert replay(tmp_path, [first, second])["hit_tokens"] == 52  # the last sampled token was never computed


def test_trace_when_replayed_twice_then_figures_are_equal(tmp_path: Path) -> None:
    lines = [hashed(1000 + 17 * turn, turn % 3, turn % 5, turn) for turn in range(30)]
    memory = 600_000
    figures = [replay(tmp_path, lines, memory=memory) for _ in range(2)]
    for result in figures:
        del result["seconds"]
    assert figures[0] == figures[1]
    assert figures[0]["checkpoints"]["evicted"] > 0
    assert replay(tmp_path, lines, limit=4)["requests"] == 4


def test_request_when_it_exceeds_the_pool_then_counted_not_run(tmp_path: Path) -> None:
    result = replay(tmp_path, [hashed(1100, 0, 1, 2)], memory=100_000)
    assert result["lost_tokens"] == {"too_long": 1100}
    assert result["hit_tokens"] == 0


def test_mode_none_when_replayed_then_no_state_is_kept(tmp_path: Path) -> None:
    result = replay(tmp_path, [hashed(1100, 0, 1, 2)] * 2, mamba_cache_mode="none")
    assert (result["hit_tokens"], result["checkpoints"]["saved"]) == (0, 0)


def test_trace_when_a_line_is_wrong_then_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 2"):
        replay(tmp_path, [hashed(512, 0), hashed(5000, 1)])
    with pytest.raises(ConfigError, match="--limit 0"):
        replay(tmp_path, [hashed(512, 0)], limit=0)
    with pytest.raises(ConfigError, match="--model-config"):
        simulate(tmp_path / "trace.jsonl", model_config_path=tmp_path / "no", kv_cache_memory_bytes=1)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"x", "Expecting value"),
        (b"\xff\xfe", "decode"),
        (b"[1]", "not a JSON object, got list"),
        (b"{}", "input_length is required"),
        (b'{"input_length": 5, "output_length": 1}', "hash_ids is required"),
        (b'{"input_length": -5, "output_length": 1, "hash_ids": [1]}', "input_length must be an integer between 0 and"),
        (b'{"input_length": 5, "output_length": 1.5, "hash_ids": [1]}', "output_length must be an integer"),
        (b'{"input_length": 5, "output_length": 1e12, "hash_ids": [1]}', "output_length must be an integer"),
        (b'{"input_length": 5, "output_length": 1, "hash_ids": [1.5]}', "hash_ids must be a list of integers"),
        (b'{"prompt_token_ids": null}', "prompt_token_ids must be a list of integers"),
        (b'{"prompt_token_ids": ["a"]}', "prompt_token_ids must be a list of integers"),
        (b'{"prompt_token_ids": [true]}', "prompt_token_ids must be a list of integers"),
        (b'{"prompt_token_ids": [1, -1]}', "prompt_token_ids must be integers between 0 and 4294967295, got -1 to 1"),
        (b'{"prompt_token_ids": [4294967296]}', "prompt_token_ids must be integers between"),
        (b'{"prompt_token_ids": [1], "output_token_ids": null}', "output_token_ids must be a list of integers"),
    ],
)
def test_trace_when_a_line_has_a_bad_field_then_error_names_line_and_field(
    tmp_path: Path, line: bytes, word: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b'{"prompt_token_ids": [1, 2]}\n\n' + line + b"\n")
    with pytest.raises(ConfigError, match=f"line 3: .*{re.escape(word)}"):
        list(read_trace(trace))


def test_trace_when_lines_are_empty_then_they_are_no_requests(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('\n{"prompt_token_ids": [1]}\n\n{"prompt_token_ids": [2]}\n\n')
    assert [request.prompt_token_ids for request in read_trace(trace)] == [[1], [2]]
    assert [request.prompt_token_ids for request in read_trace(trace, limit=1)] == [[1]]


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ([], "not a JSON object"),
        ({"model_type": ["qwen3_5"]}, r"model_type .* is not supported"),
        ({"model_type": "qwen3_5", "text_config": "x"}, "text_config is not an object, got 'x'"),
        ({"model_type": "qwen3_5", "dtype": ["float32"], "text_config": {"num_hidden_layers": "x"}}, "is not usable"),
    ],
)
def test_model_config_when_it_is_of_another_shape_then_error_says_so(tmp_path: Path, config: object, word: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    (tmp_path / "trace.jsonl").write_text("")
    with pytest.raises(ConfigError, match=word):
        simulate(tmp_path / "trace.jsonl", model_config_path=path, kv_cache_memory_bytes=1 << 24)


def test_command_when_json_is_asked_then_one_object_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay(tmp_path, [hashed(600, 0, 1)])
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    argv = ["--trace", str(tmp_path / "trace.jsonl"), "--model-config", str(tmp_path), "--kv-cache-memory", "16MiB"]
    assert run(parser.parse_args([*argv, "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 1
    assert run(parser.parse_args(argv)) == 0
    assert "hit_rate" in capsys.readouterr().out


def test_command_when_a_flag_has_several_values_then_a_table_over_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay(tmp_path, [hashed(1100, 0, 1, 2), hashed(1100, 0, 1, 3)])
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    argv = ["--trace", str(tmp_path / "trace.jsonl"), "--model-config", str(tmp_path), "--kv-cache-memory", "16MiB"]
    argv += ["--mamba-cache-mode", "auto", "none", "--eviction-policy", "value", "lru"]
    assert run(parser.parse_args([*argv, "--json"])) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["mamba_cache_mode"], row["eviction_policy"], row["hit_tokens"]) for row in rows] == [
        ("auto", "value", 1024), ("auto", "lru", 1024), ("none", "value", 0), ("none", "lru", 0),
    ]  # fmt: skip
    assert run(parser.parse_args(argv)) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["mamba_cache_mode", "eviction_policy", "blocks", "slots", "hit_rate", "seconds"]
    assert [line.split()[4] for line in lines] == ["46.55%*", "46.55%*", "0.00%", "0.00%"]


@pytest.mark.parametrize(("mode", "hit"), [("auto", 0), ("all", 1088), ("align", 1088), ("none", 0)])
def test_mode_when_only_the_last_token_differs_then_resume_where_the_mode_keeps_states(
    tmp_path: Path, mode: str, hit: int
) -> None:
    lines = [{"timestamp": 0, "prompt_token_ids": [*range(1090), last], "output_token_ids": [5]} for last in (1, 2)]
    assert replay(tmp_path, lines, mamba_cache_mode=mode)["hit_tokens"] == hit


def test_model_of_the_benchmarks_when_read_then_sizes_are_those_of_its_layers() -> None:
    path = Path(__file__).parents[3] / "benchmarks" / "data" / "qwen3.5-35b-a3b" / "config.json"
    geometry = model_geometry(json.loads(path.read_text()), "bfloat16")
    layout = make_layout(geometry, 16)
    assert (len(geometry.attention_layers), len(geometry.state_layers)) == (10, 30)
    assert layout.group_block_bytes == (16 * 10 * 2 * 2 * 256 * 2,)
    assert layout.slot_bytes == 30 * (8192 * 3 * 2 + 32 * 128 * 128 * 4) == 64_389_120


def test_dtype_when_the_config_names_none_then_float32_as_a_node(tmp_path: Path) -> None:
    nameless = {key: value for key, value in HYBRID.items() if key != "dtype"}
    (tmp_path / "config.json").write_text(json.dumps(nameless))
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 24, "block_size": 16}
    assert resolve_dtype("auto", nameless) == "float32"
    assert read_plan(tmp_path, "auto", **settings) == read_plan(tmp_path, "float32", **settings)
    assert read_plan(tmp_path, "auto", **settings) != read_plan(tmp_path, "bfloat16", **settings)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["granite-4.0-h-tiny", "kimi-linear-48b-a3b", "gemma-3-1b"])
def test_node_of_ranks_when_planned_then_each_has_its_share_and_a_transfer_moves_those_of_all(
    tmp_path: Path, name: str, size: int
) -> None:
    """Latents and K/V heads of which there are fewer than ranks are moved by each rank that reads them."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    (tmp_path / "trace.jsonl").write_text('{"prompt_token_ids": [1]}')
    whole = model_geometry(MODELS[name], "bfloat16")
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 28, "block_size": 16}
    plan = read_plan(tmp_path, "bfloat16", tensor_parallel_size=size, **settings)
    expected = plan_cache(
        shard_geometry(whole, size), max_num_seqs=1, max_model_len=1, root_key=b"simulate", **settings
    )
    assert plan == expected
    assert plan.report != read_plan(tmp_path, "bfloat16", **settings).report
    pieces = [unit_slices(whole, 16, rank, size, 1) for rank in range(size)]
    group_bytes = [
        sum(piece.length for each in pieces for piece in each.blocks[group.group_id]) / 16
        for group in whole.attention_groups
        if not group.window
    ]
    state_bytes = sum(piece.length for each in pieces for piece in each.slot)
    assert transfer_bytes(plan.config.geometry, 16) == (sum(group_bytes), state_bytes)
    memory = settings["kv_cache_memory_bytes"]
    figures = simulate(
        tmp_path / "trace.jsonl", model_config_path=tmp_path, kv_cache_memory_bytes=memory, dtype="bfloat16",
        tensor_parallel_size=size,
    )  # fmt: skip
    report = expected.report
    assert (figures["block_bytes"], figures["slot_bytes"]) == (report.groups[0].block_bytes, report.slot_bytes)
    assert (figures["blocks"], figures["slots"]) == (report.groups[0].num_blocks, report.num_slots)
    assert (figures["kv_bytes_per_token"], figures["state_bytes"]) == (sum(group_bytes), state_bytes)


@pytest.mark.parametrize(
    ("model", "size", "options", "said"),
    [
        (MODELS["zamba-7b-v1"], 4, {}, r"--tensor-parallel-size 4: conv state of layer 0 \(mamba1\): 2 heads of 'x'"),
        (MODELS["olmo-hybrid (defaults)"], 4, {}, r"--tensor-parallel-size 4: .*: 30 heads of 'kv_heads'"),
        (HYBRID, 0, {}, "--tensor-parallel-size 0 is not between 1 and 64"),
        (HYBRID, 65, {}, "--tensor-parallel-size 65 is not between 1 and 64"),
        (HYBRID, 2, {"tiers": [replay_settings("host", 1 << 20, 0.1, None)]}, "2 does not go with --kv-tier"),
    ],
)
def test_node_of_ranks_when_it_cannot_be_then_refused_by_name(
    tmp_path: Path, model: dict[str, Any], size: int, options: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "trace.jsonl").write_text("")
    memory = 1 << 28
    with pytest.raises(ConfigError, match=said) as refused:
        simulate(
            tmp_path / "trace.jsonl", model_config_path=tmp_path, kv_cache_memory_bytes=memory,
            tensor_parallel_size=size, **options,
        )  # fmt: skip
    assert refused.value.param == "--tensor-parallel-size"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("17", 17), ("2KiB", 2048), ("1.5 MiB", 3 << 19), ("8gib", 8 << 30), ("80GB", 80 * 10**9), ("1.5tb", 15 * 10**11)],
)
def test_memory_when_written_as_for_a_node_then_bytes(text: str, num_bytes: int) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = parser.parse_args(["--trace", "t", "--model-config", "m", "--kv-cache-memory", text])
    assert given.kv_cache_memory == [num_bytes]


@pytest.mark.parametrize(
    ("option", "word", "said"),
    [
        ("--kv-cache-memory", "8 apples", "'8 apples' is not a size such as 512MiB, 2GiB or 1000000"),
        ("--block-size", "abc", "'abc' is not a whole number"),
        ("--block-size", "0", "0 is below its minimum of 1"),
        ("--state-memory-share", "0", "0.0 is below its minimum of 0.01"),
        ("--tensor-parallel-size", "65", "65 is above its maximum of 64"),
        ("--limit", "0", "0 is below its minimum of 1"),
    ],
)
def test_flag_when_its_value_does_not_fit_then_error_is_that_of_a_node(option: str, word: str, said: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(ConfigError) as refused:
        parser.parse_args(["--trace", "t", "--model-config", "m", option, word])
    assert (refused.value.message, refused.value.param) == (f"{option} {said}", option)


def test_trace_when_it_has_no_request_then_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n")
    with pytest.raises(ConfigError) as refused:
        simulate(trace, model_config_path=tmp_path, kv_cache_memory_bytes=1 << 28)
    assert refused.value.message == f"--trace {trace} holds no requests"


def test_model_config_when_it_is_not_there_then_error_has_its_path_once(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(ConfigError) as refused:
        simulate(tmp_path / "t", model_config_path=missing, kv_cache_memory_bytes=1 << 28)
    assert refused.value.message == f"--model-config {missing}: No such file or directory"


def test_memory_when_it_holds_no_sequence_of_one_token_then_a_shorter_one_is_no_advice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    with pytest.raises(ConfigError, match=r"the smallest value that works is \d+$"):
        read_plan(tmp_path, "auto", kv_cache_memory_bytes=1, block_size=16)


def test_import_when_simulating_then_torch_stays_out() -> None:
    code = "import sys, common.simulate.simulate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
