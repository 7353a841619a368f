"""Clusters in simulated time, against what can be computed by hand."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.geometry.geometry import model_geometry
from common.kv_cache.layout import make_layout
from common.kv_cache.shards import shard_geometry
from common.simulate.simulate import read_plan
from proxy.nodes.contention import Contention
from proxy.nodes.load import Measured
from proxy.nodes.node import NodeRole
from proxy.placement.estimate import HANDOFF_S, OVERLAP, Targets
from proxy.simulation import run
from proxy.simulation.cluster import Cluster
from proxy.simulation.run import choose, figures, parse_cluster
from proxy.simulation.speeds import read_speeds
from tests.support.simulated import HYBRID, SPEEDS

LOAD = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "prefill": {"seconds_per_step": 0.01, "seconds_per_token": 0.001},
    "decode": {"seconds_per_step": 0.02, "seconds_per_row": 0.001},
    "pull": {"seconds_per_pull": 0.003, "seconds_per_byte": 0},
    "seconds_per_row_beside_prompts": 0.002,
}


def make_cluster(
    folder: Path, num_prefill: int, num_decode: int, *, memory: int = 1 << 24, beside_s: float = 0.0, **config: Any
) -> Cluster:
    (folder / "config.json").write_text(json.dumps(HYBRID))
    plan = read_plan(
        folder,
        "auto",
        max_num_seqs=SPEEDS.max_num_seqs,
        kv_cache_memory_bytes=memory,
        block_size=16,
        enable_events=True,
    )
    speeds = dict.fromkeys(NodeRole, replace(SPEEDS, beside_s=beside_s))
    return Cluster(num_prefill, num_decode, cache=plan.config, speeds=speeds, **config)


def words(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(count)]


def check_conserved(cluster: Cluster) -> None:
    for node in cluster.nodes.values():
        assert node.manager.check() == []
        stats = node.manager.stats()
        assert (stats.num_sequences, stats.leases_active) == (0, 0)
        assert not node.scheduler.has_work()
        assert node.node.load.num_charges == 0


def test_request_when_it_is_alone_then_takes_what_its_steps_and_its_way_take(tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path, 1, 1, elastic=False)
    cluster.at(1.0, lambda: cluster.submit(words(1, 600), words(2, 11)))
    cluster.run()
    [served] = cluster.served
    # Two chunks, the rest of the way (its blocks' time is hidden), and a row without a forward; ten steps follow.
    prompt_s = 2 * 0.01 + 600 * 0.001
    assert served.way == "remote"
    assert served.ttft_s == pytest.approx(prompt_s + HANDOFF_S + 0.003)
    assert served.itl_s == pytest.approx(0.021)
    node = cluster.nodes["http://decode-0"]
    assert node.busy_s == {"prompt": 0.0, "decode": pytest.approx(10 * 0.021)}
    assert cluster.nodes["http://prefill-0"].busy_s["prompt"] == pytest.approx(prompt_s)
    check_conserved(cluster)


@pytest.mark.parametrize("at_s", [1.0, 1.007, 1.014])
def test_request_when_others_generate_then_its_first_token_waits_for_one_step_at_most(
    tmp_path: Path, at_s: float
) -> None:
    cluster = make_cluster(tmp_path, 1, 1, elastic=False)
    cluster.at(0.0, lambda: cluster.submit(words(3, 16), words(4, 200)))
    cluster.at(at_s, lambda: cluster.submit(words(1, 200), words(2, 11)))
    cluster.run()
    [served] = [each for each in cluster.served if each.num_prompt_tokens == 200]
    alone_s = 0.01 + 200 * 0.001 + HANDOFF_S + 0.003
    assert alone_s < served.ttft_s < alone_s + 0.021
    check_conserved(cluster)


def test_pull_when_the_nodes_have_ranks_then_the_bytes_of_all_are_moved(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    sizes: dict[str, Any] = {"max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 24, "block_size": 16}
    cache = read_plan(tmp_path, "auto", tensor_parallel_size=2, enable_events=True, **sizes).config
    byte_s = 1e-5
    speeds = dict.fromkeys(NodeRole, replace(SPEEDS, pull=Measured(0.0, byte_s)))
    cluster = Cluster(1, 1, cache=cache, speeds=speeds, elastic=False)
    cluster.submit(words(1, 600), words(2, 11))
    cluster.run()
    [served] = cluster.served
    layout = make_layout(shard_geometry(model_geometry(HYBRID, "float32"), 2), 16)
    [block_bytes], state_bytes = layout.group_block_bytes, layout.slot_bytes
    report = cluster.nodes["http://decode-0"].report()
    assert (report.kv_bytes_per_token, report.state_bytes) == (2 * block_bytes / 16, 2 * state_bytes)
    prompt_s, num_blocks = 2 * 0.01 + 600 * 0.001, 38
    blocks_s = byte_s * num_blocks * 2 * block_bytes - OVERLAP * prompt_s
    assert blocks_s > 0
    assert served.ttft_s == pytest.approx(prompt_s + HANDOFF_S + byte_s * 2 * state_bytes + blocks_s)
    check_conserved(cluster)


def test_streams_when_nodes_share_a_machine_then_steps_are_longer_while_both_generate_and_placement_learns_it(
    tmp_path: Path,
) -> None:
    cluster = make_cluster(tmp_path, 0, 2, beside_s=0.005)
    for node in cluster.nodes.values():
        assert node.node.contention.beside_s == 0.005  # as of a proxy that runs for long
        node.node.contention = Contention()
    for seed in range(40):  # of each two, one goes on alone for as long again
        for number, num_tokens in enumerate((100, 200) if seed // 2 % 2 else (200, 100)):
            prompt, answer = words(100 * seed + number, 16), words(100 * seed + 50 + number, num_tokens)
            cluster.at(8.0 * seed, lambda prompt=prompt, answer=answer: cluster.submit(prompt, answer))
    cluster.run()
    for served in cluster.served:
        num_steps = served.num_answer_tokens - 1
        expected_s = num_steps * 0.021 + min(num_steps, 100) * 0.005
        assert served.last_s - served.first_s == pytest.approx(expected_s, abs=0.02)
    for node in cluster.nodes.values():
        assert node.node.contention.beside_s == pytest.approx(0.005, rel=0.2)
    check_conserved(cluster)


def test_steps_when_a_node_becomes_slower_then_from_the_next_on_and_it_reports_what_it_did(tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path, 0, 1)
    [node] = cluster.nodes.values()
    said = node.report().decode
    cluster.at(0.0, lambda: cluster.submit(words(1, 90), words(2, 101)))
    slower = replace(SPEEDS, decode=Measured(0.041, 0.001))
    cluster.at(0.1 + 0.5 * 0.021 + 20 * 0.021, lambda: node.change_speeds(slower))
    cluster.run()
    [served] = cluster.served
    assert served.last_s - served.first_s == pytest.approx(21 * 0.021 + 79 * 0.042)
    assert node.report().decode == said


def test_turn_when_it_continues_an_answer_then_only_what_is_new_is_computed(tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path, 1, 1)
    prompt, answer = words(1, 600), words(2, 40)
    second = [*prompt, *answer, *words(3, 60)]
    cluster.at(0.0, lambda: cluster.submit(prompt, answer, on_end=lambda: cluster.submit(second, words(4, 5))))
    cluster.run()
    assert len(cluster.served) == 2
    # The last sampled token of an answer was never run.
    assert sum(node.num_computed for node in cluster.nodes.values()) == 600 + 61
    assert cluster.served[1].way == "local"
    check_conserved(cluster)


def test_steps_when_they_are_run_together_then_end_as_one_by_one(tmp_path: Path) -> None:
    """A second request every few milliseconds cuts all runs of steps; without one they go to the first stream's end."""

    def times(*others: float) -> tuple[float, float]:
        cluster = make_cluster(tmp_path, 0, 1)
        cluster.at(0.0, lambda: cluster.submit(words(1, 16), words(2, 50)))
        for at_s in others:
            cluster.at(at_s, lambda: cluster.nodes["http://decode-0"].wake())
        cluster.run()
        [served] = cluster.served
        check_conserved(cluster)
        return served.first_s, served.last_s

    alone = times()
    assert times(*(0.001 * each for each in range(1200))) == pytest.approx(alone)


@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("shape", [(2, 2), (0, 3)])
def test_traffic_when_it_is_heavy_and_pools_are_small_then_all_is_served_and_conserved(
    shape: tuple[int, int], elastic: bool, tmp_path: Path
) -> None:
    cluster = make_cluster(tmp_path, *shape, memory=1 << 21, elastic=elastic)
    draw = random.Random(7)

    def turn(prompt: Sequence[int], left: int) -> None:
        answer = words(draw.randrange(10**6), draw.randrange(1, 40))

        def go_on() -> None:
            if left:
                longer = [*prompt, *answer, *words(draw.randrange(10**6), 50)]
                cluster.at(cluster.now + draw.uniform(0.0, 0.5), lambda: turn(longer, left - 1))

        cluster.submit(prompt, answer, on_end=go_on)

    for number in range(30):
        prompt = words(number % 20, draw.randrange(20, 400))  # some begin alike
        cluster.at(draw.uniform(0.0, 4.0), lambda prompt=prompt: turn(prompt, 2))  # type: ignore[misc]
    cluster.run()
    assert len(cluster.served) == 90
    assert all(each.came_s < each.first_s <= each.last_s for each in cluster.served)
    check_conserved(cluster)
    found = figures(cluster)
    assert found["attainment"] == 1.0
    assert all(0.0 <= sum(busy.values()) <= 1.0 for busy in found["utilisation"].values())


def test_late_requests_when_they_are_shed_then_the_others_are_in_time(tmp_path: Path) -> None:
    targets = Targets(ttft_s=1.0)

    def run(*, shed_late: bool) -> dict[str, Any]:
        cluster = make_cluster(tmp_path, 1, 1, elastic=False, shed_late=shed_late)
        for number in range(20):
            prompt = words(number, 500)
            cluster.at(0.2 * number, lambda prompt=prompt: cluster.submit(prompt, [1, 2], targets=targets))  # type: ignore[misc]
        cluster.run()
        check_conserved(cluster)
        return figures(cluster)

    shed, late = run(shed_late=True), run(shed_late=False)
    assert shed["ways"]["shed"] > 3
    assert shed["requests"] == late["requests"] == 20
    assert shed["goodput"] > 1.5 * late["goodput"]


def test_request_that_would_be_late_alone_then_is_served_all_the_same(tmp_path: Path) -> None:
    cluster = make_cluster(tmp_path, 1, 1)
    for number in range(3):
        prompt = words(number, 2000)
        cluster.at(0.0, lambda prompt=prompt: cluster.submit(prompt, [1, 2], targets=Targets(ttft_s=0.5)))  # type: ignore[misc]
    cluster.run()
    assert [each.is_refused for each in cluster.served] == [False] * 3


@pytest.mark.parametrize(("memory", "longest"), [(400_000, 1216), (1 << 24, 2048)])
def test_request_when_it_is_longer_than_an_empty_node_or_the_model_holds_then_too_long_and_the_others_are_served(
    memory: int, longest: int, tmp_path: Path
) -> None:
    cluster = make_cluster(tmp_path, 1, 1, memory=memory)
    # The third is all cached, and its end stays while it is admitted.
    for number, num_tokens in enumerate((longest, longest + 1, longest, 40)):
        prompt = words(1, num_tokens - 3)
        cluster.at(10.0 * number, lambda prompt=prompt: cluster.submit(prompt, [1, 2, 3]))  # type: ignore[misc]

    def check_over() -> None:
        assert len(cluster.served) == 4

    cluster.at(100.0, check_over)
    cluster.run()
    assert [each.way == "too_long" for each in cluster.served] == [False, True, False, False]
    check_conserved(cluster)
    found = figures(cluster)
    assert (found["ways"]["too_long"], found["attainment"]) == (1, 0.75)


def test_clusters_when_named_then_are_read() -> None:
    assert parse_cluster("2+6") == [(2, 6)]
    assert parse_cluster("3") == [(0, 3), (1, 2), (2, 1)]


@pytest.mark.parametrize("word", ["", "a", "2+0", "0", "1+2+3", "-1+2", "200+57", "9999"])
def test_clusters_when_they_are_none_then_refused_by_name(word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_cluster(word)
    assert refused.value.param == "--cluster"


def test_best_cluster_when_several_serve_enough_then_has_the_fewest_nodes_and_serves_most() -> None:
    rows = [
        {"cluster": "4+4", "attainment": 1.0, "ttft_p90_ms": 1.0},
        {"cluster": "1+2", "attainment": 0.91, "ttft_p90_ms": 1.0},
        {"cluster": "2+1", "attainment": 0.95, "ttft_p90_ms": 9.0},
        {"cluster": "1+1", "attainment": 0.89, "ttft_p90_ms": 1.0},
    ]
    assert choose(rows, 0.9) is rows[2]
    assert choose(rows, 1.0) is rows[0]
    assert choose(rows[3:], 0.9) is None


def test_rates_when_given_for_all_or_by_role_then_are_read(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(LOAD))
    assert read_speeds(file) == dict.fromkeys(NodeRole, SPEEDS)
    file.write_text(json.dumps({"roles": {"prefill": LOAD, "decode": {**LOAD, "max_num_seqs": 3}}}))
    assert read_speeds(file)[NodeRole.DECODE].max_num_seqs == 3
    file.write_text(json.dumps({**LOAD, "contention_seconds": 0.005}))
    assert read_speeds(file) == dict.fromkeys(NodeRole, replace(SPEEDS, beside_s=0.005))


def test_rates_when_prefill_nodes_saw_few_rows_then_what_one_more_adds_is_as_on_decode_nodes(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    few = {**LOAD, "decode": {"seconds_per_step": 0.007, "seconds_per_row": 0.018}}
    few |= {"seconds_per_row_beside_prompts": 0.04}
    many = {**LOAD, "seconds_per_row_beside_prompts": 0.0005}
    file.write_text(json.dumps({"roles": {"prefill": few, "decode": many}}))
    speeds = read_speeds(file)
    assert speeds[NodeRole.DECODE] == replace(SPEEDS, row_s=0.0005)
    assert speeds[NodeRole.PREFILL].row_s == 0.0005
    assert speeds[NodeRole.PREFILL].decode.fixed_s == pytest.approx(0.024)
    assert speeds[NodeRole.PREFILL].decode.unit_s == SPEEDS.decode.unit_s == 0.001


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("[]", "must be an object"),
        ("{", "Expecting"),
        ({"roles": []}, "roles must be an object"),
        ({"roles": {"prefill": LOAD}}, "roles.decode must be an object"),
        ({**LOAD, "pull": None}, "pull.seconds_per_pull"),
        ({**LOAD, "decode": {"seconds_per_step": 0.1}}, "decode.seconds_per_row"),
        ({**LOAD, "prefill": {"seconds_per_step": 0, "seconds_per_token": "x"}}, "numbers above 0"),
        ({**LOAD, "contention_seconds": -0.001}, "contention_seconds -0.001 must be a number from 0 on"),
        ({**LOAD, "contention_seconds": True}, "contention_seconds True must be"),
        (
            {"roles": {"prefill": LOAD, "decode": {**LOAD, "contention_seconds": "x"}}},
            "roles.decode.contention_seconds",
        ),
    ],
)
def test_rates_when_something_is_missing_then_refused_by_name(body: Any, named: str, tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    file.write_text(body if isinstance(body, str) else json.dumps(body))
    with pytest.raises(ConfigError, match="--rates") as refused:
        read_speeds(file)
    assert named in refused.value.message


def simulate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.json").write_text(json.dumps(HYBRID))
    (folder / "rates.json").write_text(json.dumps(LOAD))
    lines = [
        {"timestamp": 100 * number, "prompt_token_ids": words(number, 300), "output_token_ids": words(number + 99, 20)}
        for number in range(30)
    ]
    (folder / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = [
        sys.executable,
        "-m",
        "common.cli",
        "simulate",
        "--trace",
        "trace.jsonl",
        "--model-config",
        "config.json",
    ]
    root = str(Path(__file__).resolve().parents[4])
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env={"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_command_when_given_a_number_of_nodes_then_compares_all_ways_and_marks_one(tmp_path: Path) -> None:
    flags = ["--rates", "rates.json", "--kv-cache-memory", "16MiB", "--ttft-target-ms", "2000", "--itl-target-ms", "90"]
    done = simulate(tmp_path, "--cluster", "3", "1+1", *flags, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["cluster"] for row in rows] == ["0+3", "1+2", "2+1", "1+1"]
    assert [row["is_best"] for row in rows].count(True) == 1
    assert all(row["requests"] == 30 for row in rows)
    table = simulate(tmp_path, "--cluster", "3", *flags)
    assert table.stdout.count("*") == 1
    assert len(table.stdout.splitlines()) == 4


GOOD = ("--cluster", "1+1", "--rates", "rates.json")


def test_command_when_requests_do_not_fit_then_the_table_says_how_many(tmp_path: Path) -> None:
    table = simulate(tmp_path, *GOOD, "--kv-cache-memory", "120000")
    assert table.returncode == 0, table.stderr
    assert "\n30 of 30 requests do not fit into a node or the model's context\n" in table.stdout
    assert "0.0%" in table.stdout


@pytest.mark.parametrize("word", ["--rates=r", "--itl-target-ms=9", "--attainment=1", "--arrivals=2", "--no-elastic"])
def test_flags_when_there_is_no_cluster_then_those_that_act_with_one_only_are_refused(word: str) -> None:
    parser = argparse.ArgumentParser()
    parser.set_defaults(cluster=[])
    run.add_arguments(parser)
    run.check_none(parser.parse_args([]))
    with pytest.raises(ConfigError, match="acts with --cluster only") as refused:
        run.check_none(parser.parse_args([word]))
    assert refused.value.param in ("--elastic", word.partition("=")[0])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--cluster", "2+x", "--rates", "rates.json"), "--cluster '2+x' is neither"),
        (("--cluster", "1+1"), "--cluster needs --rates"),
        (("--cluster", "1+1", "--rates", "gone.json"), "--rates gone.json: No such file or directory"),
        (("--ttft-target-ms", "100"), "--ttft-target-ms acts with --cluster only"),
        ((*GOOD, "--ttft-target-ms", "0"), "--ttft-target-ms 0 is below"),
        ((*GOOD, "--kv-tier", "disk:/x?size=1GiB"), "--kv-tier goes with one cache"),
        *(
            pytest.param((*GOOD, *flags), said, marks=pytest.mark.full)
            for flags, said in (
                (("--attainment", "1.5"), "--attainment 1.5 is not"),
                (("--attainment", "most"), "--attainment 'most' is not a number"),
                (("--arrivals", "0"), "--arrivals 0.0 is not"),
                (("--block-size", "16", "32"), "--block-size has several values"),
                (("--nodes", "2"), "--nodes goes with one cache"),
                (("--tensor-parallel-size", "3"), "--tensor-parallel-size 3: attention of layer 1: 4 heads"),
            )
        ),
    ],
)
def test_command_when_a_flag_does_not_fit_then_names_it(flags: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = simulate(tmp_path, *flags)
    assert done.returncode == 1
    assert done.stderr.startswith(f"tandem simulate: error: {said}")
