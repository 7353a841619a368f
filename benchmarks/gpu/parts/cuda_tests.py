"""Part ``tests``: the tests that are marked ``cuda``, counted, the first failures by name."""

from __future__ import annotations

import importlib.util
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.children import run_child
from benchmarks.gpu.settings import Row, Settings

ROOT = Path(__file__).resolve().parents[3]
PLUGINS = ("pytest_timeout", "pytest_asyncio")
NUM_NAMED = 20


def run(settings: Settings) -> Iterator[Row]:
    """Only files that have the mark are collected: others may need what is not installed here."""
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.cuda" in path.read_text("utf-8")]
    report = Path(settings.out).resolve() / "tests.xml"
    report.unlink(missing_ok=True)
    options = ["-m", "cuda", "-q", "-p", "no:cacheprovider", "--timeout", "60", f"--junitxml={report}"]
    if any(importlib.util.find_spec(plugin) is None for plugin in PLUGINS):
        # Without them pytest refuses what pyproject.toml says.
        options = ["-c", "/dev/null", f"--rootdir={ROOT}", *options[:5], options[-1]]
    if importlib.util.find_spec("xdist") is not None and not settings.smoke:
        options += ["--numprocesses", "4"]  # most of the time is compiling kernels
    command = [sys.executable, "-m", "pytest", *options, *(str(path) for path in marked)]
    ended = run_child(command, settings.limit_s - 2)
    row: dict[str, object] = {"kind": "tests", "files": len(marked), "result": ended.status}
    if report.exists():
        row |= _counts(report)
    else:
        row["tail"] = ended.output.splitlines()[-20:]
    yield row


def _counts(report: Path) -> dict[str, object]:
    suite = ET.parse(report).getroot().find("testsuite")  # pytest wrote it
    assert suite is not None
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    failed = [
        f"{case.get('classname')}::{case.get('name')}: {(found.get('message') or '')[:300]}"
        for case in suite.iter("testcase")
        for found in (*case.findall("failure"), *case.findall("error"))
    ]
    return {**counts, "passed": passed, "failed": failed[:NUM_NAMED], "first": failed[0] if failed else None}
