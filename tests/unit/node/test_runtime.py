"""What a node refuses before it loads anything."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from common.config.node import NodeConfig
from common.errors import ConfigError
from common.node.runtime import load_node_model
from tests.support.service import ROOT, child_environment


def test_device_when_there_is_no_cuda_then_the_flag_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cuda") as caught:
        load_node_model(NodeConfig(model="/no/such/folder", device="cuda"))
    assert caught.value.param == "--device"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_nixl_backend_when_nixl_does_not_have_it_then_one_line_names_the_flag_before_the_model(role: str) -> None:
    flags = ("--model", "/no/such/folder", "--port", "0", "--nixl-backends", "UCX", "PIGEON")
    node = subprocess.run(
        [sys.executable, "-m", f"{role}_node", *flags],
        cwd=ROOT,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert node.returncode == 1
    line = f"tandem {role}: error: --nixl-backends UCX PIGEON: NIXL has no ['PIGEON'], only ["
    assert node.stderr.startswith(line)
    assert node.stderr.count("\n") == 1
