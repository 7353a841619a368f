"""What the guides name exists: metrics, flags, files and headings."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.cli.bench.settings import _parser
from common.cli.flags import UpConfig
from common.config.flag import flags_of
from common.config.node import NodeConfig
from common.config.proxy import ProxyConfig
from common.errors import TandemError
from common.metrics.table import METRICS, PREFIX
from common.wire.routes import DRAIN_ROUTE, INTERNAL_PREFIX
from proxy.app import create_app

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted((ROOT / "docs").glob("*.md"))
PRODUCT = [path for part in ("common", "proxy", "prefill_node", "decode_node") for path in (ROOT / part).rglob("*.py")]
NOT_METRICS = {
    *(
        "tandem_sources",
        "tandem_prompt",
        "tandem_images",
        "tandem_resume",
        "tandem_node",
        "tandem_rendezvous",
        "tandem_lease_id",
        "tandem_proof",
    )
}
# Of `tandem simulate`, of tests/run.sh, and of other programs.
OTHER_FLAGS = {
    "--scale",
    "--trace",
    "--limit",
    "--model-config",
    "--json",
    "--all",
    "--cache",
    "--help",
    "--version",
}
OTHER_PROGRAMS = re.compile(r"^.*(?:kubectl|docker|pip |benchmarks\.|python -m|--profile|--build).*$", re.MULTILINE)


def metric_names() -> set[str]:
    return {PREFIX + spec.name + suffix for spec in METRICS for suffix in ("", "_bucket", "_sum", "_count")}


def headings(path: Path) -> list[str]:
    """As a link names them."""
    found = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in found]


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
        assert not anchor or anchor in headings(file), target


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_guide_when_it_has_headings_then_a_link_can_tell_them_apart(path: Path) -> None:
    found = headings(path)
    assert sorted(set(found)) == sorted(found)


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


def test_guide_when_it_starts_nodes_of_several_ranks_then_not_on_a_gpu_that_refuses_them() -> None:
    text = (ROOT / "docs" / "tensor-parallel.md").read_text()
    commands = re.findall(r"^    tandem (?:prefill|decode|up) .+$", text, re.MULTILINE)
    assert len(commands) == 3
    assert [each for each in commands if "--device cpu" not in each] == []


def test_guides_and_errors_when_they_say_how_to_install_then_it_is_by_the_one_rule() -> None:
    """pip by itself takes gigabytes of CUDA libraries on a machine without a GPU; and there is no package to name."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path in (*GUIDES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PRODUCT):
        text = path.read_text()
        assert not re.search(r"pip install|tandem-serve\[", text), path
        named = {extra for words in re.findall(r"deploy/install\.py ([a-z,]+)", text) for extra in words.split(",")}
        assert named <= set(extras), path


def test_troubleshooting_when_read_then_has_every_error_that_a_client_can_get() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()

    def below(kind: type[TandemError]) -> set[type[TandemError]]:
        return {kind}.union(*(below(each) for each in kind.__subclasses__()))

    kinds = [each for each in below(TandemError) if each.__module__ == "common.errors"]
    missing = {each.code for each in kinds if f"`{each.code}`" not in text}
    assert missing <= {"bad_config", "aborted", "handed_over"}  # at a start; nobody reads it; the proxy alone does


def names_in(path: Path) -> Iterator[str]:
    """What a module's code defines, imports, uses, or has as a text."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                yield name
            case ast.alias(name=name):
                yield name.rpartition(".")[2]


def dangling(quoted: set[str], known: set[str]) -> set[str]:
    """Of what code quotes as ``so``: classes that no code knows, and modules of ours or names in them that are gone."""
    gone = set()
    for name in quoted:
        first, last = name.partition(".")[0], name.rpartition(".")[2]
        if re.fullmatch(r"(?:[A-Z][a-z0-9]+){2,}", first) and first not in known:
            gone.add(name)
        if first in ("common", "proxy"):
            path = ROOT / name.replace(".", "/")
            if not (path.is_dir() or path.with_suffix(".py").exists()):
                module = path.parent.with_suffix(".py")
                if not module.exists() or last not in names_in(module):
                    gone.add(name)
    return gone


def test_comments_and_docstrings_when_they_name_a_class_or_a_module_then_that_exists() -> None:
    known = {name for path in PRODUCT for name in names_in(path)}
    quoted = {name for path in PRODUCT for name in re.findall(r"``([A-Za-z_][\w.]*)(?:\(\))?``", path.read_text())}
    assert len(quoted) > 500
    assert dangling(quoted, known) == set()
    gone = {"LogContextMiddleware", "common.no.such_module", "common.wire.manifest.NoSuchName"}
    assert dangling({*gone, "Gate", "GateMiddleware", "common.wire.manifest.Manifest"}, known) == gone


def test_routes_for_operators_when_read_in_the_guide_then_each_is_there_with_its_method() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    app = create_app(ProxyConfig(decode=("http://127.0.0.1:1",)))
    paths = {
        (method, path)
        for route in app.routes
        if (path := getattr(route, "path", "")).startswith(INTERNAL_PREFIX)
        for method in getattr(route, "methods", ())
    }
    assert ("DELETE", DRAIN_ROUTE) in paths
    assert {f"{method} {path}" for method, path in paths if f"`{method} {path}`" not in text} == set()
