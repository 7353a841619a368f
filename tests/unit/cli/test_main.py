"""The ``tandem`` command as a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.service import ROOT, child_environment

# What an installation without the `node` extra lacks: importing any of these raises ImportError.
NODE_PACKAGES = ("torch", "transformers", "nixl", "nixl_cu13", "nixl_cu12", "safetensors", "numpy")


def run(*argv: str, without_node_packages: bool = False) -> subprocess.CompletedProcess[str]:
    blocked = NODE_PACKAGES if without_node_packages else ()
    program = (
        f"import sys, runpy\nsys.modules.update(dict.fromkeys({blocked!r}))\n"
        f"module, *rest = {list(argv)!r}\nsys.argv = [module, *rest]\n"
        "runpy.run_module(module, run_name='__main__', alter_sys=True)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=60
    )


def test_help_lists_every_command() -> None:
    done = run("common.cli", "--help")
    assert done.returncode == 0
    for name in ("up", "prefill", "decode", "proxy", "simulate", "bench"):
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("argv", [(), ("fly",)])
def test_command_when_missing_or_unknown_then_usage_and_status_2(argv: tuple[str, ...]) -> None:
    done = run("common.cli", *argv)
    assert done.returncode == 2
    assert "usage: tandem" in done.stderr


@pytest.mark.parametrize(
    "argv",
    [
        ("proxy", "--help"),
        pytest.param(("common.cli", "simulate", "--help"), marks=pytest.mark.full),
        pytest.param(("common.cli", "up", "-h"), marks=pytest.mark.full),
    ],
)
def test_command_when_torch_is_not_installed_then_it_still_starts(argv: tuple[str, ...]) -> None:
    done = run(*argv, without_node_packages=True)
    assert done.returncode == 0, done.stderr
    assert "--" in done.stdout


def test_node_when_torch_is_not_installed_then_the_error_says_how_to_install_it() -> None:
    done = run("common.cli", "prefill", "--model", "x", without_node_packages=True)
    assert done.returncode == 1
    assert done.stderr == (
        "tandem prefill: error: torch, transformers not installed (in a checkout: .venv/bin/python deploy/install.py "
        "node; node images: --build-arg NODE_EXTRAS=node,images)\n"
    )


def test_proxy_when_a_value_is_bad_then_one_line_and_status_1() -> None:
    done = run("proxy", "--decode", "http://127.0.0.1:1", "--port", "-1")
    assert done.returncode == 1
    assert done.stderr == "tandem proxy: error: --port -1 is below its minimum of 0\n"


@pytest.mark.full  # its words are those of test_config.py
def test_proxy_when_key_file_is_missing_then_one_line_and_status_1(tmp_path: Path) -> None:
    missing = tmp_path / "keys"
    done = run("proxy", "--decode", "http://127.0.0.1:1", "--port", "0", "--api-key-file", str(missing))
    assert done.returncode == 1
    assert f"--api-key-file {missing}: No such file" in done.stderr


@pytest.mark.parametrize("command", ["simulate", pytest.param("bench", marks=pytest.mark.full)])
def test_command_when_a_flag_is_unknown_then_its_last_line_and_only_one_says_so(command: str) -> None:
    done = run("common.cli", command, "--trace", "t", "--model-config", "m", "--no-such-flag")
    assert done.returncode == 2
    assert done.stderr.startswith(f"tandem {command}: error: unrecognized arguments: ")
    assert done.stderr.endswith(f"--no-such-flag; `tandem {command} --help` lists flags\n")


def test_bench_when_a_count_is_bad_then_error_names_it() -> None:
    done = run("common.cli", "bench", "--requests", "0")
    assert done.returncode == 1
    assert "--requests 0 is below its minimum of 1" in done.stderr
