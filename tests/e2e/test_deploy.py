"""``tandem up``: a service from one command, what it prints, how it ends, and what it says when it cannot work."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.client import complete
from tests.support.hangup import wait_until
from tests.support.models import checkpoint
from tests.support.reference import random_tokens, reference
from tests.support.service import ROOT, child_environment
from tests.support.supervised import SMALL_FLAGS, Up, alive, free_base_port

FAMILY = "granitemoehybrid"
EXIT_TIMEOUT_S = 120.0
FULL = pytest.mark.full


def printed_curl(up: Up) -> str:
    [command] = [line.strip() for line in up.output.splitlines() if line.strip().startswith("curl ")]
    return command


def stream_text(raw: str) -> str:
    lines = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", raw[-500:]
    chunks = [json.loads(line) for line in lines[:-1]]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


@pytest.mark.parametrize("num_prefill", [0, pytest.param(1, marks=FULL)], ids=["decode alone", "both"])
def test_up_when_started_by_a_script_then_serves_survives_a_node_and_ends_on_sigint_with_no_child_left(
    tmp_path: Path, num_prefill: int
) -> None:
    """One start for the whole life: no model given, SIGINT inherited as ignored, a decode node killed in between, which
    has a prefill node beside it in the whole matrix: a cold start of one takes 10 s of a core."""
    flags = (*SMALL_FLAGS, "--policy", "round_robin", "--prefill-nodes", str(num_prefill))
    with Up(tmp_path, *flags, ignore_sigint=True) as up:
        up.wait_ready()
        base = up.base_port
        for name, port in (
            *((f"prefill-{base + 100}", base + 100) for _ in range(num_prefill)),
            (f"decode-{base + 200}", base + 200),
            ("proxy", base),
        ):
            [line] = re.findall(rf"^{name} +ready at .*$", up.output, re.MULTILINE)
            assert line.endswith(f"http://127.0.0.1:{port}")
        assert "built-in model" in up.output
        assert f"Tandem is ready at {up.url}" in up.output

        assert shutil.which("curl"), "the printed example needs curl"
        answer = subprocess.run(["sh", "-c", printed_curl(up)], capture_output=True, text=True, timeout=60, check=True)
        assert "amber falcon" in stream_text(answer.stdout)
        again = subprocess.run(["sh", "-c", printed_curl(up)], capture_output=True, text=True, timeout=60, check=True)
        assert stream_text(again.stdout) == stream_text(answer.stdout)

        prompt = random_tokens(70, seed=601)
        before = complete(up.url, prompt, 8)
        assert before.trace["placement"] == ("remote" if num_prefill else "local")
        if num_prefill:
            assert before.trace["transferred_states"] == 1
            killed = up.child("decode_node")
            os.kill(killed.pid, signal.SIGKILL)
            wait_until(lambda: "restarting it in 1 s" in up.output, "the death to be seen")
            wait_until(lambda: len(up.children()) == 3 and up.child("decode_node").pid != killed.pid, "a new process")
            assert up.child("decode_node").argv == killed.argv
            wait_until(lambda: httpx.get(up.url + "/ready").status_code == 200, "the service to be ready again", 60)
            after = complete(up.url, prompt, 8)
            assert after.token_ids() == before.token_ids()
            assert after.trace["placement"] == "remote"
            assert after.trace["transferred_states"] == 1

        children = up.children()
        assert len(children) == 2 + num_prefill
        assert up.end(signal.SIGINT) == 0
        assert alive(children) == []
    assert "Traceback" not in up.output, up.output


@pytest.mark.full  # as in tests/unit/cli/test_supervisor.py
def test_up_when_it_gets_sigterm_while_starting_then_exits_0_with_no_child_left(tmp_path: Path) -> None:
    with Up(tmp_path, *SMALL_FLAGS, "--model", str(checkpoint(FAMILY))) as up:
        wait_until(lambda: len(up.children()) == 3, "the children to start")
        children = up.children()
        assert up.end(signal.SIGTERM) == 0
        assert alive(children) == []
    assert "Traceback" not in up.output, up.output
    assert "ready at" not in up.output


@FULL
def test_up_when_serving_and_it_gets_sigterm_then_exits_0_with_no_child_left(tmp_path: Path) -> None:
    expected = reference(FAMILY)
    flags = (*SMALL_FLAGS, "--model", str(checkpoint(FAMILY)), "--prefill-nodes", "2", "--served-model-name", "tiny")
    flags = (*flags, "--policy", "round_robin")
    with Up(tmp_path, *flags) as up:
        up.wait_ready()
        base = up.base_port
        unseen = {f"prefill-{base + 100}", f"prefill-{base + 101}"}
        deadline_s = time.monotonic() + 30
        # Ready with one prefill node: the other may be seen a moment later.
        for seed in itertools.count(602):
            prompt = random_tokens(40, seed=seed)
            answer = complete(up.url, prompt, 8, model="tiny")
            mismatch = expected.greedy(prompt, 8).mismatch(answer.token_ids(), answer.logprobs(), expected.tolerance)
            assert mismatch is None, mismatch
            unseen.discard(answer.trace["prefill_node"])
            if not unseen:
                break
            assert time.monotonic() < deadline_s, unseen
        children = up.children()
        assert len(children) == 4
        assert up.end(signal.SIGTERM) == 0
        assert alive(children) == []


@FULL
def test_up_when_its_proxy_dies_then_everything_ends_with_an_error(tmp_path: Path) -> None:
    with Up(tmp_path, *SMALL_FLAGS, "--model", str(checkpoint(FAMILY))) as up:
        up.wait_ready()
        children = up.children()
        os.kill(up.child("proxy").pid, signal.SIGKILL)
        assert up.popen.wait(60) == 1
        assert alive(children) == []
        assert re.search(r"proxy was killed by SIGKILL", up.output)


# --- starts that cannot work


@pytest.fixture(scope="module")
def scratch_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("models")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def copy_of_checkpoint(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(checkpoint(FAMILY), folder / name))


def failed_start(tmp_path: Path, *flags: str) -> tuple[int, str]:
    """Runs ``tandem up``, with one node only to be quick, until it gives up: its exit status and all it said."""
    with Up(tmp_path, *flags, "--prefill-nodes", "0") as up:
        status = up.popen.wait(EXIT_TIMEOUT_S)
        assert up.children() == []
    assert "Traceback" not in up.output, up.output
    return status, up.output


@FULL
def test_up_when_model_family_is_not_supported_then_says_which_are(tmp_path: Path, scratch_model: Path) -> None:
    folder = copy_of_checkpoint(scratch_model, "other-family")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})
    )
    status, output = failed_start(tmp_path, *SMALL_FLAGS, "--model", str(folder))
    assert status == 1
    for word in ("gpt2", "granitemoehybrid", "jamba", "qwen3_next", "llama"):
        assert word in output


@FULL
@pytest.mark.parametrize("damage", ["cut off", pytest.param("no header", marks=FULL)])
def test_up_when_weights_file_is_corrupt_then_names_it(tmp_path: Path, scratch_model: Path, damage: str) -> None:
    folder = copy_of_checkpoint(scratch_model, f"corrupt-{damage}")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2] if damage == "cut off" else b"\xff" * 4096)
    status, output = failed_start(tmp_path, *SMALL_FLAGS, "--model", str(folder))
    assert status == 1
    assert "model.safetensors" in output
    assert re.search(r"error: .*decode-\d+ exited with status 1 while starting", output)


@FULL
def test_up_when_model_folder_is_missing_then_names_it(tmp_path: Path) -> None:
    missing = str(tmp_path / "no-such-model")
    status, output = failed_start(tmp_path, *SMALL_FLAGS, "--model", missing)
    assert status == 1
    assert missing in output


@FULL
def test_up_when_cache_memory_is_too_little_then_names_flag_and_the_smallest_value(tmp_path: Path) -> None:
    flags = ("--model", str(checkpoint(FAMILY)), "--dtype", "float32", "--max-model-len", "4096")
    status, output = failed_start(tmp_path, *flags, "--kv-cache-memory", "1MiB")
    assert status == 1
    smallest = re.search(r"--kv-cache-memory 1048576 is too small.*smallest value that works is (\d+)", output)
    assert smallest is not None, output
    # 257 blocks of 8 KiB for 4,096 tokens and one to spare, 65 slots of 20,224 bytes, a null entry of each
    assert int(smallest[1]) == 258 * 8192 + 66 * 20224


@FULL
def test_up_when_cache_memory_is_the_smallest_value_that_was_named_then_serves(tmp_path: Path) -> None:
    flags = ("--model", str(checkpoint(FAMILY)), "--dtype", "float32", "--max-model-len", "4096")
    with Up(tmp_path, *flags, "--kv-cache-memory", str(258 * 8192 + 66 * 20224)) as up:
        up.wait_ready()
        assert len(complete(up.url, random_tokens(4000, seed=603), 90).token_ids()) == 90
        assert up.end(signal.SIGTERM) == 0


def run_cli(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "common.cli", *words],
        cwd=ROOT,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("offset", "role"),
    [pytest.param(0, "--port", marks=FULL), pytest.param(100, "prefill", marks=FULL), (200, "decode")],
)
def test_up_when_a_port_is_in_use_then_names_port_and_process(offset: int, role: str) -> None:
    base = free_base_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", base + offset))
        taken.listen()
        result = run_cli("up", "--port", str(base), "--model", str(checkpoint(FAMILY)))
    assert result.returncode == 1
    assert f"127.0.0.1:{base + offset}: Address already in use" in result.stderr
    assert role in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        pytest.param(("--no-such-flag",), 2, ("--no-such-flag",), marks=FULL),
        (("--max-num-seq", "4"), 2, ("--max-num-seq",)),
        (("--max-num-seqs", "0"), 1, ("--max-num-seqs", "0", "minimum of 1")),
        pytest.param(("--max-num-seqs", "many"), 1, ("--max-num-seqs", "many"), marks=FULL),
        pytest.param(("--kv-cache-memory", "2 GB of it"), 1, ("--kv-cache-memory",), marks=FULL),
        (("--policy", "fastest"), 1, ("--policy", "fastest", "round_robin", "least_loaded")),
        pytest.param(
            ("--mamba-cache-mode", "sometimes"),
            1,
            ("--mamba-cache-mode", "sometimes", "auto, align, all, none"),
            marks=FULL,
        ),
        pytest.param(("--port", "70000"), 1, ("--port", "70000"), marks=FULL),
        pytest.param(("--api-key-file", "/no/such/file"), 1, ("--api-key-file", "/no/such/file"), marks=FULL),
        (("--decode-nodes", "0"), 1, ("--decode-nodes",)),
        pytest.param(("--model", ""), 1, ("--model",), marks=FULL),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_up_when_a_flag_is_wrong_then_says_which_and_starts_nothing(
    flags: Sequence[str], status: int, words: Sequence[str]
) -> None:
    base = () if "--port" in flags else ("--port", str(free_base_port()))
    model = () if "--model" in flags else ("--model", "/no/such/model")
    result = run_cli("up", *base, *model, *flags)
    assert result.returncode == status, result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "command",
    ["up", "simulate", *(pytest.param(name, marks=FULL) for name in ("proxy", "bench", "prefill", "decode"))],
)
def test_command_when_asked_for_help_then_prints_its_flags_and_exits_0(command: str) -> None:
    result = run_cli(command, "--help")
    assert result.returncode == 0, result.stderr
    assert "--" in result.stdout
    assert result.stdout.startswith("usage: tandem " + command)


def test_unknown_command_when_given_then_lists_the_known_ones() -> None:
    result = run_cli("serve")
    assert result.returncode == 2
    assert all(word in result.stderr for word in ("'serve'", "up", "prefill", "decode", "proxy", "simulate", "bench"))
