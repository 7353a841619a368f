"""Which builds of torch and NIXL an installation gets: deploy/install.py with a real pip, an empty environment and
wheels of a few bytes."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
VERSION = "2.13.0"


def wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """This project with few requirements: its rule, and an environment without anything."""
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "install.py").write_text((ROOT / "deploy" / "install.py").read_text())
    (tmp_path / "pyproject.toml").write_text(
        f'[project]\nname = "t"\ndependencies = ["light"]\n'
        f'[project.optional-dependencies]\nnode = ["nixl-cu13==1.5.*", "torch=={VERSION}"]\n'
    )
    venv.create(tmp_path / "venv", with_pip=False)
    for name in ("nixl_cu12", "nixl_cu13"):
        wheel(tmp_path / "offered", name, "1.5.1")
    wheel(tmp_path / "offered", "light", "1")
    wheel(tmp_path / "offered", "torch", VERSION)
    return tmp_path


def install(checkout: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Offline: pip sees the folder ``offered`` alone."""
    python = str(checkout / "venv" / "bin" / "python")
    command = [sys.executable, "deploy/install.py", "--dependencies-only", "--python", python, *words]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "TORCH_"))}
    offered = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(checkout / "offered")}
    return subprocess.run(
        command, cwd=checkout, env=kept | offered | environment, capture_output=True, text=True, timeout=120
    )


def installed(checkout: Path) -> set[str]:
    [packages] = (checkout / "venv").glob("lib/python*/site-packages")
    return {path.name.removesuffix(".dist-info") for path in packages.glob("*.dist-info")}


@pytest.mark.full
def test_install_when_a_cpu_build_is_on_offer_then_it_is_taken_with_one_nixl_wheel(checkout: Path) -> None:
    wheel(checkout / "offered", "torch", f"{VERSION}+cpu")
    done = install(checkout, "--device", "cpu", "node")
    assert done.returncode == 0, done.stderr
    assert installed(checkout) == {"light-1", f"torch-{VERSION}+cpu", "nixl_cu13-1.5.1"}
    assert "note:" not in done.stderr


@pytest.mark.full
def test_install_when_no_cpu_build_is_on_offer_then_takes_the_default_and_says_what_it_costs(checkout: Path) -> None:
    done = install(checkout, "--device", "cpu", "node", TORCH_INDEX_URL="file:///nowhere")
    assert done.returncode == 0, done.stderr
    assert installed(checkout) == {"light-1", f"torch-{VERSION}", "nixl_cu13-1.5.1"}
    [note] = [line for line in done.stderr.splitlines() if line.startswith("note: no CPU build")]
    assert "file:///nowhere" in note
    assert "GB" in note


@pytest.mark.full
def test_install_when_there_is_a_driver_then_a_cpu_build_on_offer_is_not_taken(checkout: Path) -> None:
    wheel(checkout / "offered", "torch", f"{VERSION}+cpu")
    done = install(checkout, "--device", "cuda", "node")
    assert done.returncode == 0, done.stderr
    assert installed(checkout) == {"light-1", f"torch-{VERSION}", "nixl_cu13-1.5.1"}


@pytest.mark.full
def test_install_when_the_index_has_cuda_12_then_nixl_is_for_cuda_12(checkout: Path) -> None:
    wheel(checkout / "offered", "torch", f"{VERSION}+cu126")
    done = install(checkout, "--device", "cuda", "node", TORCH_INDEX_URL="file:///nowhere")
    assert done.returncode == 0, done.stderr
    assert installed(checkout) == {"light-1", f"torch-{VERSION}+cu126", "nixl_cu12-1.5.1"}


@pytest.mark.full
def test_install_when_only_the_proxy_is_wanted_then_no_torch_comes(checkout: Path) -> None:
    done = install(checkout)
    assert done.returncode == 0, done.stderr
    assert installed(checkout) == {"light-1"}


@pytest.mark.full
def test_install_when_something_else_is_missing_then_fails_with_the_name(checkout: Path) -> None:
    (checkout / "offered" / "light-1-py3-none-any.whl").unlink()
    done = install(checkout, "--device", "cpu", "node")
    assert done.returncode == 1
    assert "light" in done.stderr
    done = install(checkout, "nodes")
    assert done.returncode == 1
    assert "extra 'nodes' is not one of node" in done.stderr


def test_rule_when_read_with_this_project_then_each_build_it_names_is_a_requirement() -> None:
    rule = runpy.run_path(str(ROOT / "deploy" / "install.py"))
    wanted = rule["requirements"](["node"])
    assert [each for each in wanted if each.startswith("torch==")]
    assert [each for each in wanted if each.startswith(rule["NIXL_OF_DEFAULT"])]
    assert rule["fit_nixl"](wanted, "2.13.0+cu126") != rule["fit_nixl"](wanted, "2.13.0") == wanted
