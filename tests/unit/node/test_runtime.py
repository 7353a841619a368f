"""What a node is called, and what it refuses before it loads anything."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch

from common.config.node import NodeConfig, parse_node_config
from common.errors import ConfigError
from common.names import MAX_NODE_NAME_CHARS
from common.node.runtime import load_node_model, new_engine_id
from common.wire.manifest import PartialManifest
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


def test_name_when_there_is_none_and_the_port_is_any_free_one_then_made_of_the_port_that_was_bound() -> None:
    flags = ("--model", "/no/such/folder", "--port", "0", "--nixl-backends", "PIGEON", "--log-format", "json")
    node = subprocess.run(
        [sys.executable, "-m", "prefill_node", *flags],
        cwd=ROOT,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    line = json.loads(node.stderr.splitlines()[-1])
    assert "PIGEON" in line["message"]
    assert re.fullmatch("prefill-[1-9][0-9]{3,4}", line["node"]), line


def test_engine_id_when_the_nodes_name_is_as_long_as_may_be_then_a_manifest_may_name_it() -> None:
    name = "n" * MAX_NODE_NAME_CHARS
    config = parse_node_config(["--model", "m", "--node-name", name], {}, role="prefill", default_port=8100)
    part = PartialManifest(new_engine_id(config), 7, "00ff", 4, 8, ((3, 9),), ((1, 2),), 30.0)
    assert PartialManifest.from_params(part.to_params()) == part
    with pytest.raises(ConfigError, match="--node-name"):
        parse_node_config(["--model", "m", "--node-name", name + "n"], {}, role="prefill", default_port=8100)
