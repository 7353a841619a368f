"""The proxy and ``tandem simulate`` run where torch, transformers and NIXL are not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from tests.support.hangup import wait_until
from tests.support.service import ROOT, Process, child_environment, free_port

HEAVY = ("torch", "transformers", "nixl", "nixl_cu13", "nixl_cu12", "numpy", "safetensors")
BLOCKER = f"""
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None

sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture
def blocked(tmp_path: Path) -> Mapping[str, str]:
    """An environment in which this interpreter cannot import the heavy packages, nor can its children."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


def run(python: str | Path, *words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *words],
        cwd=cwd,
        env=child_environment(**environment),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def serves_without_nodes(process: Process, port: int) -> None:
    """A proxy that runs, and says what it lacks."""
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.popen.poll() is None, process.tail()
        try:
            return httpx.get(url + "/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(answers, "the proxy to answer", 60)
    ready = httpx.get(url + "/ready")
    assert ready.status_code == 503
    assert "no decode node is ready" in ready.text
    body = {"prompt": "a", "max_tokens": 1}
    response = httpx.post(url + "/v1/completions", json=body, timeout=30)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_node")
    assert httpx.post(url + "/v1/completions", json={"prompt": ""}).status_code == 400
    assert "tandem_requests_total" in httpx.get(url + "/metrics").text


def proxy_argv(python: str | Path, port: int) -> list[str]:
    nodes = ["--prefill", f"http://127.0.0.1:{free_port()}", "--decode", f"http://127.0.0.1:{free_port()}"]
    return [str(python), "-m", "common.cli", "proxy", "--port", str(port), *nodes]


def test_heavy_packages_when_blocked_then_cannot_be_imported(tmp_path: Path, blocked: Mapping[str, str]) -> None:
    for package in HEAVY:
        result = run(sys.executable, "-c", f"import {package}", cwd=tmp_path, **blocked)
        assert result.returncode == 1
        assert f"No module named '{package}'" in result.stderr


def test_proxy_when_heavy_packages_are_missing_then_starts_and_answers(
    tmp_path: Path, blocked: Mapping[str, str]
) -> None:
    port = free_port()
    process = Process(proxy_argv(sys.executable, port), tmp_path / "proxy.log", **blocked)
    try:
        serves_without_nodes(process, port)
        assert process.stop() == 0
    finally:
        process.stop()


@pytest.mark.parametrize(
    "command", ["simulate", *(pytest.param(name, marks=pytest.mark.full) for name in ("proxy", "up", "bench"))]
)
def test_command_when_heavy_packages_are_missing_then_shows_its_help(
    tmp_path: Path, blocked: Mapping[str, str], command: str
) -> None:
    result = run(sys.executable, "-m", "common.cli", command, "--help", cwd=tmp_path, **blocked)
    assert result.returncode == 0, result.stderr
    assert "usage: tandem " + command in result.stdout


@pytest.fixture(scope="module")
def light_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the distribution and its base dependencies only."""
    folder = tmp_path_factory.mktemp("light")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "common", "decode_node", "prefill_node", "proxy"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)  # a build leaves files beside the sources
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    installed = run(python, "-m", "pip", "install", "--quiet", str(source), cwd=folder)
    assert installed.returncode == 0, installed.stderr
    return python


@pytest.mark.full
def test_console_script_when_installed_with_base_dependencies_only_then_proxy_and_simulate_work(
    light_python: Path, tmp_path: Path
) -> None:
    packages = run(light_python, "-m", "pip", "list", cwd=tmp_path).stdout.lower().split()
    assert "tandem-serve" in packages
    assert not set(HEAVY) & set(packages)
    tandem = light_python.parent / "tandem"
    for command in ("simulate", "proxy", "up", "bench"):
        result = run(tandem, command, "--help", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert "usage: tandem " + command in result.stdout
    for command in ("prefill", "decode"):
        result = run(tandem, command, "--model", "x", cwd=tmp_path)
        assert result.returncode == 1
        assert "torch, transformers not installed (in a checkout: " in result.stderr
    assert run(tandem, "--version", cwd=tmp_path).stdout.startswith("tandem 0.")
    port = free_port()
    words = proxy_argv(light_python, port)[3:]
    process = Process([str(tandem), *words], tmp_path / "proxy.log")
    try:
        serves_without_nodes(process, port)
        assert process.stop() == 0
    finally:
        process.stop()
