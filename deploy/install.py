"""The one rule for what is installed where: this checkout's packages, with the builds of torch and NIXL that this
machine uses. ``deploy/local.sh``, ``tests/run.sh`` and the Dockerfile run it.

    python deploy/install.py                     # what the proxy needs, and this checkout
    python deploy/install.py node,test           # with extras of pyproject.toml
    python deploy/install.py --device cpu --dependencies-only --python venv/bin/python node

torch: the version of pyproject.toml. Without an NVIDIA driver its CPU build, from what pip's configuration offers, with
the index of $TORCH_INDEX_URL when that is set, else with PyTorch's own index of CPU builds; where none has it, the
default build, and a line that says what that costs. With a driver the default build, which brings its CUDA libraries,
or what $TORCH_INDEX_URL has.

NIXL: the one wheel for that torch's CUDA, 12 or 13; beside a CPU build the smaller of the two, which needs no CUDA.
(The package `nixl` is left out: it brings both wheels and chooses between them.)

Python 3.11, standard library only.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NIXL_OF_DEFAULT, NIXL_OF_CUDA_12 = "nixl-cu13", "nixl-cu12"
NO_CPU_BUILD = (
    "note: no CPU build of torch {version} for this Python is on offer ({where}). The default build has CUDA libraries "
    "that nothing uses on this machine: 2.5 GB more to download, 3.8 GB more on disk. TORCH_INDEX_URL=URL names an "
    "index of CPU builds."
)


def requirements(extras: Sequence[str]) -> list[str]:
    """The project's own and those of ``extras``, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = project["optional-dependencies"]
    for extra in extras:
        if extra not in known:
            raise SystemExit(f"error: extra {extra!r} is not one of {', '.join(known)}")
    return [*project["dependencies"], *(each for extra in extras for each in known[extra])]


def has_driver() -> bool:
    """Whether a program here finds NVIDIA's driver, as torch will."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class Pip:
    """Of this interpreter, into the environment of ``python``."""

    def __init__(self, python: str, *, is_compiling: bool) -> None:
        self._python = python
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
        self._install = [*pip, "install", "--quiet", *([] if is_compiling else ["--no-compile"])]

    def install(self, *words: str) -> None:
        if subprocess.run([*self._install, *words], check=False).returncode:
            raise SystemExit(f"error: pip install {' '.join(words)} failed, see above")

    def try_install(self, requirement: str, *words: str) -> bool:
        """False when nothing on offer meets ``requirement``."""
        done = subprocess.run([*self._install, *words, requirement], stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            return True
        if "No matching distribution found" in done.stderr:
            return False
        sys.stderr.write(done.stderr)
        raise SystemExit(f"error: pip install {requirement} failed, see above")

    def version(self, package: str) -> str | None:
        """What is installed there; None: nothing."""
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        done = subprocess.run([self._python, "-c", code], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None


def install_torch(pip: Pip, requirement: str, device: str) -> None:
    """``requirement``: ``torch==VERSION``."""
    version = requirement.partition("==")[2]
    index = os.environ.get("TORCH_INDEX_URL", "")
    from_index = ("--extra-index-url", index) if index else ()
    if (pip.version("torch") or "").partition("+")[0] == version:
        return
    if device == "cuda":
        # Exactly the default build: a CPU build on offer beside it would count as newer.
        pip.install(*from_index, requirement if index else f"torch==={version}")
        return
    tries = [from_index] if index else [(), ("--retries", "1", "--timeout", "15", "--extra-index-url", CPU_INDEX)]
    if not any(pip.try_install(f"{requirement}+cpu", *words) for words in tries):
        where = f"looked in pip's configuration and {index or CPU_INDEX}"
        sys.stderr.write(NO_CPU_BUILD.format(version=version, where=where) + "\n")
        pip.install(*from_index, requirement)


def fit_nixl(wanted: Sequence[str], torch_version: str) -> list[str]:
    """``wanted`` with the NIXL wheel that goes with an installed torch, such as ``2.13.0+cu126``."""
    is_cuda_12 = torch_version.partition("+")[2].startswith("cu12")
    name = NIXL_OF_CUDA_12 if is_cuda_12 else NIXL_OF_DEFAULT
    return [each.replace(NIXL_OF_DEFAULT, name) for each in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="?", default="", help="names with commas between them")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda with a driver")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment to fill")
    parser.add_argument("--dependencies-only", action="store_true", help="leave this checkout itself out")
    given = parser.parse_args()
    device = given.device if given.device != "auto" else "cuda" if has_driver() else "cpu"
    # Half of an installation's time is byte code, most of it of modules that are never imported. Python makes it when
    # they are, and keeps it: not in an image, which is not written to when it runs, nor where that is switched off.
    pip = Pip(given.python, is_compiling=given.dependencies_only or sys.dont_write_bytecode)
    wanted = requirements([extra for extra in given.extras.split(",") if extra])
    for torch in (each for each in wanted if each.startswith("torch==")):
        install_torch(pip, torch, device)
        wanted = fit_nixl(wanted, pip.version("torch") or "")
    pip.install(*wanted)
    if not given.dependencies_only:
        pip.install("--no-deps", "--editable", str(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
