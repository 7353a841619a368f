"""What a node refuses before it loads anything."""

from __future__ import annotations

import pytest
import torch

from common.config import NodeConfig
from common.errors import ConfigError
from common.node.runtime import load_node_model


def test_device_when_there_is_no_cuda_then_the_flag_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cuda") as caught:
        load_node_model(NodeConfig(model="/no/such/folder", device="cuda"))
    assert caught.value.param == "--device"
