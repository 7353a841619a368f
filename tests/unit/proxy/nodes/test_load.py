"""What a node reports, read and mixed with what others report."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from proxy.nodes.load import LoadReport, Measured
from proxy.nodes.node import NodeRole
from proxy.nodes.rates import Rates, RateTable
from proxy.placement.text_history import TextHistory, TextKeys
from tests.unit.proxy.placement.world import make_pool, report

GOOD: dict[str, Any] = {
    "running": 3,
    "waiting": 1,
    "uncomputed_prompt_tokens": 700,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "prefill": {"seconds_per_step": 0.01, "seconds_per_token": 0.001, "observations": 30, "age_seconds": 30},
    "decode": {"seconds_per_step": 0.02, "seconds_per_row": 0.001},
    "decode_totals": {"steps": 100, "rows": 250, "seconds": 2.25},
    "seconds_per_row_beside_prompts": 0.0015,
    "pull": {"seconds_per_pull": 0.002, "seconds_per_byte": 1e-8},
    "kv_bytes_per_token": 512,
    "state_bytes": 20_000,
}


def test_report_when_whole_then_read() -> None:
    report = LoadReport.from_json(GOOD)
    assert report is not None
    assert (report.num_running, report.num_waiting, report.num_uncomputed_tokens) == (3, 1, 700)
    assert (report.max_num_seqs, report.chunk, report.row_s) == (16, 512, 0.0015)
    assert report.decode_totals == (100, 250, 2.25)
    assert report.decode is not None
    assert (report.decode.fixed_s, report.decode.unit_s) == (0.02, 0.001)
    assert report.prefill is not None
    assert (report.prefill.fixed_s, report.prefill.unit_s) == (0.01, 0.001)
    assert report.prefill.trust == pytest.approx(0.75 * 0.5)  # 30 of 30 + 10, half of that after 30 s
    assert report.pull is not None
    assert report.pull.trust == pytest.approx(0.5)


@pytest.mark.parametrize("body", [None, 7, "fast", ["a"]])
def test_report_when_the_node_gives_none_then_none(body: object) -> None:
    assert LoadReport.from_json(body) is None


@pytest.mark.parametrize("bad", [-1, "9", None, True, float("nan"), float("inf"), {}, [1]])
@pytest.mark.parametrize("name", sorted(GOOD))
def test_report_when_a_number_makes_no_sense_then_as_if_it_were_not_said(name: str, bad: object) -> None:
    without = LoadReport.from_json({key: value for key, value in GOOD.items() if key != name})
    assert LoadReport.from_json({**GOOD, name: bad}) == without


@pytest.mark.parametrize("bad", [-1, "9", None, True, float("nan")])
@pytest.mark.parametrize("name", ["steps", "rows", "seconds"])
def test_report_when_a_total_makes_no_sense_then_none_is_said(name: str, bad: object) -> None:
    report = LoadReport.from_json({**GOOD, "decode_totals": {**GOOD["decode_totals"], name: bad}})
    assert report is not None
    assert report.decode_totals is None


def test_rates_when_nobody_measured_then_the_defaults() -> None:
    nodes = make_pool(1, 1).nodes
    for node in nodes:
        node.load.update(None, 0.0)
    rates = RateTable().rates(nodes, 0.0)[nodes[0].url]
    assert rates.tiers == Rates().tiers == {}
    assert dataclasses.astuple(rates)[:-1] == pytest.approx(dataclasses.astuple(Rates())[:-1])


def test_rates_when_one_node_measured_then_others_are_taken_to_be_like_it() -> None:
    pool = make_pool(2, 1)
    for node in pool.nodes:
        node.load.update(None, 0.0)
    pool.usable(NodeRole.PREFILL)[0].load.update(LoadReport.from_json(GOOD), 0.0)
    rates = RateTable().rates(pool.nodes, 0.0)
    other, decode = pool.usable(NodeRole.PREFILL)[1], pool.usable(NodeRole.DECODE)[0]
    assert rates[other.url].token_s == pytest.approx(0.001, rel=0.2)
    assert rates[decode.url].token_s == pytest.approx(0.001, rel=0.2)


@pytest.mark.parametrize("line", [(0.0076, 0.0071), (0.0144, 0.0003), (0.0147, 0.0)], ids=str)
def test_rates_when_a_prefill_node_has_generated_then_what_a_row_adds_is_as_on_decode_nodes(
    line: tuple[float, float],
) -> None:
    pool = make_pool(1, 1)
    prefill, decode = pool.usable(NodeRole.PREFILL)[0], pool.usable(NodeRole.DECODE)[0]
    prefill.load.update(report(decode=Measured(*line), row_s=0.04), 0.0)
    decode.load.update(report(decode=Measured(0.02, 0.001), row_s=0.0005), 0.0)
    rates = RateTable().rates(pool.nodes, 0.0)
    assert (rates[decode.url].decode_step_s, rates[decode.url].decode_row_s) == (0.02, 0.001)
    assert rates[prefill.url].decode_s(1) == pytest.approx(0.0147)
    assert rates[prefill.url].decode_row_s == pytest.approx(0.001, rel=0.3)
    assert rates[decode.url].row_s == 0.0005
    assert rates[prefill.url].row_s == pytest.approx(0.0005, abs=0.0011)  # and a trace of the mean of all nodes


def test_rates_when_a_prefill_node_is_faster_than_a_row_of_decode_nodes_then_no_step_is_below_nothing() -> None:
    pool = make_pool(1, 1)
    pool.usable(NodeRole.PREFILL)[0].load.update(report(decode=Measured(0.0005, 0.0)), 0.0)
    pool.usable(NodeRole.DECODE)[0].load.update(report(decode=Measured(0.02, 0.01)), 0.0)
    rates = RateTable().rates(pool.nodes, 0.0)[pool.usable(NodeRole.PREFILL)[0].url]
    assert (rates.decode_step_s, rates.decode_row_s) == (0.0, 0.0005)


def test_rates_when_asked_again_soon_then_not_made_again_but_a_new_node_is_known() -> None:
    pool = make_pool(1, 1)
    table = RateTable()
    before = table.rates(pool.nodes, 10.0)
    assert table.rates(pool.nodes, 10.2) is before
    more = make_pool(2, 1)
    assert set(table.rates(more.nodes, 10.3)) == {node.url for node in more.nodes}


# --- prompts without tokens


def test_text_when_a_conversation_goes_on_then_its_beginning_is_known() -> None:
    history = TextHistory()
    messages = [{"role": "user", "content": "word " * 400}]
    history.observe("http://d", TextKeys.of({"messages": messages}, None))
    longer = [*messages, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more " * 100}]
    coverage = history.lookup(TextKeys.of({"messages": longer}, None))
    assert 350 < coverage["http://d"].state_tokens < 520
    assert history.lookup(TextKeys.of({"messages": longer, "cache_salt": "mine"}, None)) == {}
    history.drop("http://d")
    assert history.lookup(TextKeys.of({"messages": longer}, None)) == {}


def test_text_when_many_prompts_were_seen_then_memory_is_bounded() -> None:
    history = TextHistory(max_keys=100)
    for number in range(200):
        history.observe("http://d", TextKeys.of({}, f"{number:05}" * 1000))
    assert len(history._sent) == 100
    assert history.lookup(TextKeys.of({}, "00000" * 1000)) == {}


def test_text_when_a_message_has_a_number_beyond_64_bits_then_it_has_keys_all_the_same() -> None:
    long = {"role": "user", "content": "word " * 350}
    known, large = (TextKeys.of({"messages": [long, {"n": n}]}, None) for n in (1, 10**30))
    assert len(known.keys) == 3
    assert large.keys == known.keys


@pytest.mark.parametrize("prompt", [[10**30], [-5], "", "\ud800", None])
def test_text_when_the_prompt_is_strange_then_it_only_has_a_length(prompt: object) -> None:
    assert TextKeys.of({"messages": None}, prompt).num_tokens == 1
