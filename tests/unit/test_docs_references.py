"""What the guides name exists: metrics, flags, files and headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.cli.bench.settings import _parser
from common.cli.flags import UpConfig
from common.config.flag import flags_of
from common.config.node import NodeConfig
from common.config.proxy import ProxyConfig
from common.errors import TandemError
from common.metrics.table import METRICS, PREFIX

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted((ROOT / "docs").glob("*.md"))
NOT_METRICS = {"tandem_sources", "tandem_prompt", "tandem_node", "tandem_rendezvous", "tandem_lease_id"}
# Of `tandem simulate`, of tests/run.sh, and of other programs.
OTHER_FLAGS = {"--trace", "--limit", "--model-config", "--json", "--all", "--cache", "--help", "--version"}
OTHER_PROGRAMS = re.compile(r"^.*(?:kubectl|docker|pip |benchmarks\.|python -m|--profile|--build).*$", re.MULTILINE)


def metric_names() -> set[str]:
    return {PREFIX + spec.name + suffix for spec in METRICS for suffix in ("", "_bucket", "_sum", "_count")}


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_guide_when_it_names_a_metric_or_a_file_then_that_exists(path: Path) -> None:
    text = path.read_text()
    named = set(re.findall(r"\btandem_[a-z0-9_]+", text)) - NOT_METRICS
    assert named - metric_names() == set()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("path", [*GUIDES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_guide_when_it_names_a_path_of_the_repository_then_that_exists(path: Path) -> None:
    named = re.findall(r"`((?:benchmarks|common|deploy|docs|proxy|tests)/[\w./-]+)`", path.read_text())
    assert {name for name in named if "NAME" not in name and not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("name", ["operations.md", "troubleshooting.md", "runbook.md", "failures.md", "cache.md"])
def test_guide_when_it_names_a_flag_then_some_command_has_it(name: str) -> None:
    text = OTHER_PROGRAMS.sub("", (ROOT / "docs" / name).read_text())
    known = {each.option for config in (NodeConfig, ProxyConfig, UpConfig) for each in flags_of(config)}
    known |= {"--no-" + option[2:] for option in known} | OTHER_FLAGS | set(_parser()._option_string_actions)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - known == set()


def test_troubleshooting_when_read_then_has_every_error_that_a_client_can_get() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()

    def below(kind: type[TandemError]) -> set[type[TandemError]]:
        return {kind}.union(*(below(each) for each in kind.__subclasses__()))

    kinds = [each for each in below(TandemError) if each.__module__ == "common.errors"]
    missing = {each.code for each in kinds if f"`{each.code}`" not in text}
    assert missing <= {"bad_config", "aborted"}  # at a start; nobody is there to read it
