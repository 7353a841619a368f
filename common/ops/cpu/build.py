"""From the sources beside this file to a loaded library, compiled once per machine.

1 name the library after what it was made of and for (sources, flags, CPU), 2 take one of that name from the folder of
prebuilt ones where there is one (an image's), or one for the best level that this CPU has, whichever compiler made it:
none is needed to run it, 3 else find a compiler, which is the rest of the name, and take the library from the cache
folder, or compile it there into a scratch file that is moved into place, under a lock so that nodes that start together
compile once, 4 load it. Leaves by: a library, or :class:`BuildError` with the reason.

The code is for the CPU it was compiled on, so packages hold only the sources, and what was compiled on another kind of
CPU has another name: it is never loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.ops.cpu.levels import Level, levels_here

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "src"
COMPILERS = ("c++", "g++", "clang++")
# No contraction: what is fused is written as fused, see vector.h. The other two do not change a number.
_FLAGS = (
    "-std=gnu++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-Wno-psabi",
)
# Tried in turn: not every compiler has OpenMP, or knows -march=native for its target, and not every assembler knows
# the instructions of this CPU that the compiler knows.
MACHINE_FLAGS = (
    ("-march=native", "-fopenmp"),
    ("-march=native",),
    ("-mcpu=native", "-fopenmp"),
    ("-mcpu=native",),
    (),
)
_COMPILE_TIMEOUT_S = 300.0
"""For one source file; all of them together take about a minute of CPU."""
_LOCK_TIMEOUT_S = 600.0
"""How long to wait for another process that compiles; longer than that it is stuck."""
_LOCK_POLL_S = 0.1
"""Seconds between two tries for the lock: short against a compilation."""
_MAY_PASS = (
    "killed",
    "terminated with signal",
    "out of memory",
    "memory exhausted",
    "cannot allocate memory",
    "no space left",
    "quota exceeded",
    "too many open files",
    "temporarily unavailable",
)
"""What a compiler says, in lower case, when it fails for want of something that is not in the sources or the flags."""
_ENTRY = "tandem_attention"
"""A function that every complete library has."""


class BuildError(Exception):
    """There is no library; the text says why."""


class _RefusedError(BuildError):
    """The compiler, or its linker, has an error in these sources with these flags, and would have it again."""


def load_library(
    cache_dir: Path,
    source_dir: Path = SOURCE_DIR,
    machine_flags: Sequence[tuple[str, ...]] = MACHINE_FLAGS,
    *,
    prebuilt_dir: Path | None = None,
) -> ctypes.CDLL:
    """The compiled ops of ``source_dir``: from ``prebuilt_dir``/ops, which needs no compiler, else from
    ``cache_dir``/ops or compiled into that.

    ``machine_flags``: flags for this machine, those that the sources cannot be built with are passed over for the next.
    ``prebuilt_dir``: a folder that was the ``cache_dir`` of an earlier build, or that :func:`prebuild` has filled, such
    as an image's; only read.

    Raises:
        BuildError: no compiler, no success with it, or nowhere to write.
    """
    sources = _sources(source_dir)
    name = _name(sources, machine_flags, _cpu())
    if prebuilt_dir is not None:
        levels = levels_here()
        names = {"this CPU": name, **{level.name: _level_name(sources, level) for level in levels}}
        for level, prebuilt_name in names.items():
            for prebuilt in sorted((prebuilt_dir / "ops").glob(f"{prebuilt_name}-*.so")):
                if (library := _try_load(prebuilt)) is not None:
                    logger.info("prebuilt C++ ops for=%s path=%s", level, prebuilt)
                    return library
        logger.info("no prebuilt C++ ops for this CPU path=%s", prebuilt_dir / "ops" / f"{name}-*.so")
    path = _path_of_compiled(cache_dir, name, sources, machine_flags, lambda found: _try_load(found) is not None)
    if (library := _try_load(path)) is None:
        raise BuildError(f"{path} was compiled and cannot be loaded")
    return library


def prebuild(folder: Path, levels: Sequence[Level], source_dir: Path = SOURCE_DIR) -> None:
    """Compile for each of ``levels`` into ``folder``/ops, whatever CPU this is. Raises BuildError."""
    sources = _sources(source_dir)
    for level in levels:
        _path_of_compiled(folder, _level_name(sources, level), sources, (level.flags,))


def _sources(source_dir: Path) -> list[Path]:
    return sorted([*source_dir.glob("*.cpp"), *source_dir.glob("*.h")])


def _name(sources: Sequence[Path], machine_flags: Sequence[tuple[str, ...]], cpu: str) -> str:
    content = [word for source in sources for word in (source.name.encode(), source.read_bytes())]
    return _digest(*content, repr((_FLAGS, tuple(machine_flags))).encode(), cpu.encode())


def _level_name(sources: Sequence[Path], level: Level) -> str:
    return _name(sources, (level.flags,), f"level {level.name}")


def _path_of_compiled(
    cache_dir: Path,
    name: str,
    sources: Sequence[Path],
    machine_flags: Sequence[tuple[str, ...]],
    is_good: Callable[[Path], bool] = lambda _: True,
) -> Path:
    """The library of that name in ``cache_dir``/ops, compiled where there is none that ``is_good``. Raises
    BuildError."""
    compiler = _find_compiler()
    folder = cache_dir / "ops"
    path = folder / f"{name}-{_digest(compiler.encode(), _run([compiler, '--version']).encode())}.so"
    try:
        if path.exists() and is_good(path):  # before the lock, for which a read-only folder has no place
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not (path.exists() and is_good(path)):
                _compile(compiler, sources, machine_flags, path)
    except OSError as exc:
        raise BuildError(f"cannot use the cache folder {folder}: {exc}") from exc
    return path


def _find_compiler() -> str:
    for name in (os.environ.get("CXX", ""), *COMPILERS):
        if name and (found := shutil.which(name)) is not None:
            return found
    raise BuildError(f"no C++ compiler in PATH (looked for {', '.join(COMPILERS)})")


def _digest(*facts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for fact in facts:
        digest.update(len(fact).to_bytes(8, "little") + fact)
    return digest.hexdigest()


def _cpu() -> str:
    """What -march=native looks at: the CPU's model and features."""
    facts = [platform.machine()]
    with contextlib.suppress(OSError):  # not Linux: the machine alone
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines():
            if line.split(":")[0].strip() in ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part"):
                facts.append(line)
    return "\n".join(facts)


def _compile(compiler: str, sources: Sequence[Path], machine_flags: Sequence[tuple[str, ...]], path: Path) -> None:
    """With the first of ``machine_flags`` that are not refused. What fails for want of memory or disk is no
    reason for the next ones: it would leave a slow library under the name of the best. Raises BuildError."""
    begin_s = time.monotonic()
    logger.info("compiling the C++ ops compiler=%s to=%s (once per machine, some seconds)", compiler, path)
    units = [source for source in sources if source.suffix == ".cpp"]
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as scratch:
        target = Path(scratch) / path.name
        refused = []
        for flags in machine_flags:
            try:
                _build([compiler, *_FLAGS, *flags], units, target)
            except _RefusedError as exc:
                logger.info("no C++ ops with flags=%r reason=%s", " ".join(flags), exc)
                refused.append(exc)
                continue
            target.replace(path)
            logger.info("compiled the C++ ops flags=%r seconds=%.1f", " ".join(flags), time.monotonic() - begin_s)
            return
    raise refused[0]


def _build(command: list[str], units: Sequence[Path], target: Path) -> None:
    """Compile ``units``, as many at a time as there are cores, and link them."""
    objects = [target.with_name(f"{unit.stem}.o") for unit in units]
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    try:
        tasks = [
            pool.submit(_run_twice, [*command, "-c", str(unit), "-o", str(obj)])
            for unit, obj in zip(units, objects, strict=True)
        ]
        for task in tasks:
            task.result()
    finally:
        pool.shutdown(cancel_futures=True)
    _run_twice([*command, "-shared", *map(str, objects), "-o", str(target)])


def _run_twice(command: list[str]) -> None:
    """``_run``, and again where it fails, which once can be chance."""
    try:
        _run(command)
    except BuildError as exc:
        if exc.__cause__ is not None:  # it did not run, or for too long
            raise
        _run(command)


def _run(command: list[str]) -> str:
    """Standard output of ``command``."""
    environment = {**os.environ, "LC_ALL": "C"}  # the language of _MAY_PASS
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMPILE_TIMEOUT_S,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise BuildError(f"{command[0]} did not run: {exc}") from exc
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        was_signal = done.returncode < 0 or done.returncode > 128  # its own, or that of what a shell ran
        is_refusal = lines and not was_signal and not any(words in done.stderr.lower() for words in _MAY_PASS)
        error = _RefusedError if is_refusal else BuildError
        raise error(f"{command[0]} failed with status {done.returncode}: {lines[0] if lines else 'no message'}")
    return done.stdout


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file at ``path``; BuildError when another process does not give it up in time."""
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with its process, however that ends
                break
            except BlockingIOError as exc:
                if time.monotonic() > deadline_s:
                    raise BuildError(f"another process has held {path} for {_LOCK_TIMEOUT_S:.0f} s") from exc
            time.sleep(_LOCK_POLL_S)
        yield


def _try_load(path: Path) -> ctypes.CDLL | None:
    """None when the file is not what it should be: cut short, or another machine's."""
    try:
        library = ctypes.CDLL(str(path))
        getattr(library, _ENTRY)
    except (OSError, AttributeError) as exc:
        logger.warning("cannot load the C++ ops path=%s reason=%s", path, exc)
        return None
    return library
