"""Compiling the C++ ops: once, whoever comes; and what happens when it cannot be done."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from common.models.loading.fingerprint import user_cache_dir
from common.ops.cpu import build, levels
from common.ops.cpu.build import BuildError, load_library
from common.ops.cpu.levels import Level
from common.ops.select import create_ops
from tests.support.models import checkpoint
from tests.support.ops import make_ops

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A library of one function, to be compiled quickly."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" int tandem_attention() { return 7; }\n')
    return folder


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with one line for each library that the compiler makes that is found from now on."""
    real = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if real is None:
        pytest.skip("no C++ compiler")
    log = tmp_path / "compilations"
    log.touch()
    wrapper = tmp_path / "counting-c++"
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in *-shared*.o\\ *) echo made >> "{log}";; esac\nexec "{real}" "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    return log


def count(log: Path) -> int:
    return len(log.read_text().splitlines())


def test_load_library_when_called_again_then_does_not_compile_again(
    tmp_path: Path, sources: Path, compilations: Path
) -> None:
    assert load_library(tmp_path / "cache", sources).tandem_attention() == 7
    first = count(compilations)
    assert first
    assert load_library(tmp_path / "cache", sources).tandem_attention() == 7
    assert count(compilations) == first


def test_load_library_when_it_was_prebuilt_then_is_read_from_there_and_nothing_is_compiled_or_written(
    tmp_path: Path, sources: Path, compilations: Path
) -> None:
    image = tmp_path / "image"
    load_library(image, sources)
    first = count(compilations)
    before = sorted(image.rglob("*"))
    assert load_library(tmp_path / "cache", sources, prebuilt_dir=image).tandem_attention() == 7
    assert count(compilations) == first
    assert not (tmp_path / "cache").exists()
    assert sorted(image.rglob("*")) == before


def test_load_library_when_it_was_prebuilt_then_needs_no_compiler(
    tmp_path: Path, sources: Path, compilations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_library(tmp_path / "image", sources)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX")
    library = load_library(tmp_path / "cache", sources, prebuilt_dir=tmp_path / "image")
    assert library.tandem_attention() == 7
    assert Path(library._name).parent == tmp_path / "image" / "ops"
    assert not (tmp_path / "cache").exists()
    with pytest.raises(BuildError, match=r"no C\+\+ compiler in PATH"):
        load_library(tmp_path / "image", sources)


def test_load_library_when_another_compiler_prebuilt_it_then_is_used(
    tmp_path: Path, sources: Path, compilations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_library(tmp_path / "image", sources)
    first, other = count(compilations), compilations.with_name("another-c++")
    shutil.copy(os.environ["CXX"], other)
    monkeypatch.setenv("CXX", str(other))
    library = load_library(tmp_path / "cache", sources, prebuilt_dir=tmp_path / "image")
    assert count(compilations) == first
    assert Path(library._name).parent == tmp_path / "image" / "ops"
    load_library(tmp_path / "image", sources)  # as a cache it has one of each
    assert count(compilations) == first + 1


def test_load_library_when_it_was_prebuilt_on_another_cpu_then_is_compiled_for_this_one(
    tmp_path: Path, sources: Path, compilations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(build, "_cpu", lambda: "x86_64\nmodel\t: another one")
        load_library(tmp_path / "image", sources)
    first = count(compilations)
    library = load_library(tmp_path / "cache", sources, prebuilt_dir=tmp_path / "image")
    assert count(compilations) == first + 1
    assert Path(library._name).parent == tmp_path / "cache" / "ops"


def test_load_library_when_levels_were_prebuilt_then_takes_the_best_that_this_cpu_runs(
    tmp_path: Path, sources: Path, compilations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "one.cpp").write_text(
        'extern "C" int tandem_attention() { return sizeof(float) * (0\n'
        "#ifdef WIDE\n+ 1\n#endif\n#ifdef WIDER\n+ 2\n#endif\n); }\n"
    )
    wide = Level("wide", ("-DWIDE",), frozenset({"a"}))
    wider = Level("wider", ("-DWIDE", "-DWIDER"), frozenset({"a", "b"}))
    monkeypatch.setattr(levels, "levels_of_machine", lambda: (wider, wide))
    build.prebuild(tmp_path / "image", (wider, wide), sources)
    made = count(compilations)
    assert made == 2
    for features, value in (({"a", "b", "c"}, 12), ({"a"}, 4)):
        monkeypatch.setattr(levels, "_features", lambda found=frozenset(features): found)
        library = load_library(tmp_path / "cache", sources, prebuilt_dir=tmp_path / "image")
        assert library.tandem_attention() == value
        assert count(compilations) == made
    monkeypatch.setattr(levels, "_features", frozenset)
    assert load_library(tmp_path / "cache", sources, prebuilt_dir=tmp_path / "image").tandem_attention() == 0
    assert count(compilations) == made + 1
    assert not levels.levels_here()


@pytest.mark.full
def test_prebuild_when_it_has_run_for_every_level_then_this_cpu_has_one_and_needs_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.run([sys.executable, "-m", "common.ops.cpu.prebuild", str(tmp_path)], cwd=ROOT)
    assert done.returncode == 0
    assert len(list((tmp_path / "ops").glob("*.so"))) == len(levels.levels_of_machine())
    monkeypatch.setenv("PATH", "")
    load_library(tmp_path / "cache", prebuilt_dir=tmp_path)


def test_load_library_when_many_come_at_once_then_one_compiles(
    tmp_path: Path, sources: Path, compilations: Path
) -> None:
    with ThreadPoolExecutor(4) as pool:
        libraries = list(pool.map(lambda _: load_library(tmp_path / "cache", sources), range(4)))
    assert [library.tandem_attention() for library in libraries] == [7] * 4
    assert count(compilations) == 1
    assert len(list((tmp_path / "cache" / "ops").glob("*.so"))) == 1


def test_load_library_when_who_compiles_hangs_then_is_refused_after_a_while(
    tmp_path: Path, sources: Path, compilations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Path(load_library(tmp_path, sources)._name)
    library.unlink()
    monkeypatch.setattr(build, "_LOCK_TIMEOUT_S", 0.3)
    with library.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BuildError, match=r"another process has held .*\.lock"):
            load_library(tmp_path, sources)
    assert count(compilations) == 1
    load_library(tmp_path, sources)
    assert count(compilations) == 2


def test_load_library_when_a_source_changes_then_compiles_beside_the_old_one(
    tmp_path: Path, sources: Path, compilations: Path
) -> None:
    load_library(tmp_path / "cache", sources)
    (sources / "one.cpp").write_text('extern "C" int tandem_attention() { return 8; }\n')
    assert load_library(tmp_path / "cache", sources).tandem_attention() == 8
    assert len(list((tmp_path / "cache" / "ops").glob("*.so"))) == 2


def test_load_library_when_the_cached_file_is_cut_short_then_compiles_again(
    tmp_path: Path, sources: Path, compilations: Path
) -> None:
    folder = tmp_path / "cache" / "ops"
    subprocess.run(
        [sys.executable, "-c", f"from pathlib import Path\nfrom common.ops.cpu.build import load_library\n"
         f"load_library(Path({str(tmp_path / 'cache')!r}), Path({str(sources)!r}))"],
        cwd=ROOT, check=True,
    )  # fmt: skip
    (cached,) = folder.glob("*.so")
    cached.write_bytes(cached.read_bytes()[:100])
    assert load_library(tmp_path / "cache", sources).tandem_attention() == 7
    assert count(compilations) == 2


def test_load_library_when_it_does_not_compile_then_gives_the_compilers_reason(
    tmp_path: Path, sources: Path, compilations: Path
) -> None:
    (sources / "one.cpp").write_text("int f() { return undeclared_name; }\n")
    with pytest.raises(BuildError, match="undeclared_name"):
        load_library(tmp_path / "cache", sources)
    assert list((tmp_path / "cache" / "ops").glob("*.so")) == []


def test_load_library_when_the_compiler_does_not_know_some_flags_then_takes_the_next(
    tmp_path: Path, sources: Path, compilations: Path
) -> None:
    (sources / "one.cpp").write_text('extern "C" int tandem_attention() { return FLAG; }\n')
    flags = (("-DFLAG=1", "-fno-such-flag-known"), ("-DFLAG=2",), ("-DFLAG=3",))
    assert load_library(tmp_path / "cache", sources, flags).tandem_attention() == 2
    assert count(compilations) == 1
    with pytest.raises(BuildError, match="no-such-flag-known"):
        load_library(tmp_path / "cache", sources, flags[:1])


def test_load_library_when_the_sources_cannot_be_built_with_some_flags_then_takes_the_next(
    tmp_path: Path, sources: Path, compilations: Path
) -> None:
    (sources / "one.cpp").write_text('extern "C" int tandem_attention() { return FLAG; }\n')
    (sources / "two.cpp").write_text("#if FLAG == 1\n#error no such instruction\n#endif\n")
    flags = (("-DFLAG=1",), ("-DFLAG=2", "-lno-such-library"), ("-DFLAG=3",), ("-DFLAG=4",))
    assert load_library(tmp_path / "cache", sources, flags).tandem_attention() == 3
    with pytest.raises(BuildError, match="no such instruction"):
        load_library(tmp_path / "cache", sources, flags[:2])


@pytest.mark.parametrize(
    "failure",
    [
        "echo 'c++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
        'echo "one.s: Fatal error: can\'t write one.o: No space left on device" >&2; exit 1',
        "kill -9 $$",
        "echo 'error: half of a message' >&2; exit 137",
        "exit 1",
    ],
    ids=["killed", "disk", "signal", "status of a signal", "silence"],
)
def test_load_library_when_the_compiler_fails_for_what_may_pass_then_other_flags_are_not_tried(
    tmp_path: Path, sources: Path, compilations: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    wrapper = tmp_path / "failing-c++"
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in *-DFLAG=1*) {failure};; esac\nexec "{os.environ["CXX"]}" "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    with pytest.raises(BuildError, match="failed with status"):
        load_library(tmp_path / "cache", sources, (("-DFLAG=1",), ("-DFLAG=2",)))
    assert list((tmp_path / "cache" / "ops").glob("*.so")) == []


@pytest.mark.parametrize("killed", ["-c", "-shared"], ids=["source", "link"])
def test_load_library_when_the_compiler_is_killed_once_then_no_worse_library_is_kept(
    tmp_path: Path, sources: Path, compilations: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    (sources / "one.cpp").write_text('extern "C" int tandem_attention() { return FLAG; }\n')
    wrapper, once = tmp_path / "killed-c++", tmp_path / "once"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *{killed}\\ *) [ -e "{once}" ] || '
        f'{{ touch "{once}"; echo "error: Killed" >&2; exit 1; }};; esac\nexec "{os.environ["CXX"]}" "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    with contextlib.suppress(BuildError):
        load_library(tmp_path / "cache", sources, (("-DFLAG=1",), ("-DFLAG=2",)))
    assert once.exists()
    assert load_library(tmp_path / "cache", sources, (("-DFLAG=1",), ("-DFLAG=2",))).tandem_attention() == 1


def test_load_library_when_the_cache_is_ready_and_cannot_be_written_then_is_read(
    tmp_path: Path, sources: Path, compilations: Path
) -> None:
    lock = Path(load_library(tmp_path, sources)._name).with_suffix(".lock")
    lock.unlink()
    lock.mkdir()  # not even root, whom modes do not hold, opens this for writing
    assert load_library(tmp_path, sources).tandem_attention() == 7
    assert count(compilations) == 1


def test_load_library_when_the_cache_cannot_be_written_then_says_where(
    tmp_path: Path, sources: Path, compilations: Path
) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(BuildError, match="cannot use the cache folder"):
        load_library(tmp_path / "cache", sources)


@pytest.mark.usefixtures("no_compiler")
def test_create_ops_when_there_is_no_compiler_then_warns_once_and_takes_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ops = create_ops("auto", dtype=torch.float32, device=CPU, cache_dir=tmp_path)
    assert ops.name == "torch"
    assert len(caplog.records) == 1
    assert "no C++ compiler in PATH" in caplog.text


@pytest.mark.usefixtures("no_compiler")
def test_create_ops_when_cpp_is_demanded_without_a_compiler_then_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--ops-backend cpp cannot run here: no C\+\+ compiler"):
        create_ops("cpp", dtype=torch.float32, device=CPU, cache_dir=tmp_path)


@pytest.mark.usefixtures("no_compiler")
def test_create_ops_when_triton_finds_no_c_compiler_then_warns_once_and_takes_torch_or_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would fail at a node's first kernel. The GPU is not asked for its age: there is none here."""
    pytest.importorskip("triton")
    cuda = torch.device("cuda")
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING):
        assert create_ops("auto", dtype=torch.float32, device=cuda, cache_dir=tmp_path).name == "torch"
    assert len(caplog.records) == 1
    assert "no gcc or clang in PATH" in caplog.text
    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises(ConfigError, match=r"--ops-backend triton cannot run here: .* no /no/such/compiler in PATH"):
        create_ops("triton", dtype=torch.float32, device=cuda, cache_dir=tmp_path)


def test_create_ops_when_the_dtype_is_float16_then_takes_torch_or_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert create_ops("auto", dtype=torch.float16, device=CPU, cache_dir=tmp_path).name == "torch"
    assert not caplog.records
    with pytest.raises(ConfigError, match="float32 and bfloat16 on cpu, not float16 on cpu"):
        create_ops("cpp", dtype=torch.float16, device=CPU, cache_dir=tmp_path)


def test_create_ops_when_a_compiler_is_there_then_takes_cpp() -> None:
    assert make_ops("cpp").name == "cpp"


@pytest.mark.full
def test_process_when_its_ops_were_prebuilt_and_its_cache_is_an_empty_volume_then_compiles_nothing(
    tmp_path: Path,
) -> None:
    """As a pod of the image starts: what was baked in is found, although the cache folder is new."""
    assert make_ops("cpp").name == "cpp"  # they are in the user's cache now
    script = (
        "import logging\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "from common.config.node import NodeConfig\n"
        "from common.node.runtime import load_node_model\n"
        f"config = NodeConfig(model={str(checkpoint('granitemoehybrid'))!r}, device='cpu', kv_cache_memory=8 << 20,\n"
        f"                    max_model_len=256, max_num_seqs=2, prebuilt_ops={str(user_cache_dir())!r})\n"
        "print(load_node_model(config).loaded.ops.name)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}  # nor has it a compiler
    environment |= {"PATH": "", "XDG_CACHE_HOME": str(tmp_path / "volume"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cpp"]
    assert "model loaded" in done.stderr
    assert "compiling the C++ ops" not in done.stderr
    assert not (tmp_path / "volume" / "tandem" / "ops").exists()


@pytest.mark.full
def test_process_when_path_has_no_compiler_then_runs_the_model_with_one_warning(tmp_path: Path) -> None:
    script = (
        "import logging\n"
        "logging.basicConfig(level=logging.WARNING, format='%(levelname)s %(message)s')\n"
        "from common.config.node import NodeConfig\n"
        "from common.node.runtime import create_core, load_node_model\n"
        "from common.request import Request, SamplingParams\n"
        f"config = NodeConfig(model={str(checkpoint('granitemoehybrid'))!r}, device='cpu', kv_cache_memory=8 << 20,\n"
        "                    max_model_len=256, max_num_seqs=2)\n"
        "model = load_node_model(config)\n"
        "core = create_core(config, model)\n"
        "core.add_request(Request('r', list(range(10, 60)), SamplingParams(temperature=0.0, max_tokens=4)))\n"
        "tokens = []\n"
        "while core.has_work():\n"
        "    tokens += [t for output in core.step() for t in output.token_ids]\n"
        "print(model.loaded.ops.name, len(tokens))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    environment |= {"PATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["torch", "4"]
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING the C++ ops")]
    assert len(warnings) == 1
