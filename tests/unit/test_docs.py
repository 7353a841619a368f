"""The tables in ``docs/`` say what the code says."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from common.cli.bench.settings import parse_settings
from common.cli.docs import COMMAND, documents, metrics_document
from common.cli.flags import UpConfig
from common.config.command_line import flag_table
from common.config.flag import flags_of
from common.config.node import NodeConfig
from common.config.proxy import ProxyConfig
from common.metrics.labels import LABEL_VALUES
from common.metrics.metrics import Metrics
from common.metrics.table import METRICS, PREFIX, Role
from common.simulate.simulate import add_arguments

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["flags.md", "metrics.md", "api.md"])
def test_document_when_compared_with_its_generator_is_the_same(name: str) -> None:
    assert read(name) == documents()[name], f"docs/{name} is out of date: run {COMMAND}"


@pytest.mark.parametrize("config_class", [NodeConfig, ProxyConfig, UpConfig])
def test_flags_document_holds_the_flag_table_of(config_class: type) -> None:
    table = flag_table(config_class)
    assert table in read("flags.md")
    assert len(table.splitlines()) == len(flags_of(config_class)) + 2


def test_flags_document_has_no_other_rows_than_those_tables() -> None:
    rows = [line for line in read("flags.md").splitlines() if line.startswith("| `")]
    assert len(rows) == sum(len(flags_of(each)) for each in (NodeConfig, ProxyConfig, UpConfig))


@pytest.mark.parametrize("command", ["simulate", "bench"])
def test_flags_document_says_of_a_command_that_reads_no_variables_that_it_does_not(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TANDEM_REQUESTS", "TANDEM_SEED", "TANDEM_BLOCK_SIZE", "TANDEM_LIMIT"):
        monkeypatch.setenv(name, "7")
    if command == "bench":
        settings = parse_settings([])
        assert (settings.requests, settings.seed) == (32, 0)
    else:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        given = parser.parse_args(["--trace", "t", "--model-config", "m"])
        assert (given.block_size, given.limit) == ([16], None)
    [said] = [each for each in read("flags.md").split("\n\n") if "read no `TANDEM_` variables" in each]
    assert f"`tandem {command}`" in said


def test_metrics_document_lists_exactly_the_table_with_labels_and_help() -> None:
    rows = {}
    for line in read("metrics.md").partition("## Label values")[0].splitlines():
        if line.startswith("| `"):
            name, kind, labels, _, meaning = (cell.strip() for cell in line.strip("|").split("|"))
            rows[name.strip("`")] = (kind, tuple(re.findall(r"`(\w+)`", labels)), meaning)
    assert rows == {PREFIX + spec.name: (spec.kind.value, spec.labels, spec.help) for spec in METRICS}


@pytest.mark.parametrize("role", list(Role))
def test_metrics_document_names_each_metric_that_a_process_exposes(role: Role) -> None:
    text = Metrics(role).render()[0].decode()
    exposed = set(re.findall(r"^# HELP (\w+) ", text, re.MULTILINE))
    documented = {
        line.split("|")[1].strip().strip("`"): line.split("|")[4].strip()
        for line in read("metrics.md").splitlines()
        if line.startswith("| `")
    }
    here = {
        name
        for name, on in documented.items()
        if on == "all" or role.value in on or (on == "nodes" and role is not Role.PROXY)
    }
    assert exposed == here


def test_label_values_when_listed_then_every_label_of_every_metric_is_explained() -> None:
    explained = {(name, each.label) for each in LABEL_VALUES for name in each.metrics}
    introduced = set(
        re.findall(r"`(\w+)` (?:is|the|a)", metrics_document().partition("## Label values")[2].split("|")[0])
    )
    labels = {(spec.name, label) for spec in METRICS if spec.name != "build_info" for label in spec.labels}
    assert {"route", "policy", "node"} <= introduced
    assert {pair for pair in labels if pair[1] not in introduced} == explained
