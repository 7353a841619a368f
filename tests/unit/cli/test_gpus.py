"""The GPUs that ``tandem up`` finds, and how its nodes get them."""

from __future__ import annotations

import ctypes
import importlib.metadata
from typing import Any

import pytest

from common.cli.flags import parse_up
from common.cli.gpus import DRIVER, count_gpus
from common.cli.up import child_specs
from common.config.node import NodeConfig, parse_node_config
from common.errors import ConfigError


class Driver:
    def __init__(self, count: int, *, error: int = 0) -> None:
        self._count, self._error = count, error

    def cuInit(self, flags: int) -> int:  # noqa: N802 - CUDA's name
        return self._error

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802 - CUDA's name
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = self._count
        return 0


def absent(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("torch_version", "driver", "found"),
    [
        ("2.13.0", Driver(4), 4),
        ("2.13.0+cu126", Driver(4), 4),
        ("2.13.0+cpu", Driver(4), 0),
        ("2.13.0", Driver(4, error=100), 0),
        ("2.13.0", None, 0),
    ],
)
def test_gpus_when_counted_then_are_those_that_torch_would_find(
    torch_version: str, driver: Driver | None, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"torch": torch_version}[name])
    asked: list[str] = []

    def load(name: str) -> Any:
        asked.append(name)
        return absent(name) if driver is None else driver

    assert count_gpus(load) == found
    assert asked in ([], [DRIVER])


def nodes_of(num_gpus: int, *flags: str) -> list[NodeConfig]:
    """As the processes that ``tandem up`` starts read their own argv."""
    specs = child_specs(parse_up(flags, {}), "model", num_gpus)[:-1]
    return [parse_node_config(spec.argv[3:], {}, role="any", default_port=1) for spec in specs]


THREE = ("--prefill-nodes", "1", "--decode-nodes", "2")


@pytest.mark.parametrize("flags", [(), ("--device", "auto"), ("--device", "cuda")])
def test_up_when_there_are_gpus_then_each_node_gets_its_own_round_robin(flags: tuple[str, ...]) -> None:
    assert [node.device for node in nodes_of(8, *THREE, *flags)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [node.device for node in nodes_of(2, *THREE, *flags)] == ["cuda:0", "cuda:1", "cuda:0"]


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_up_when_the_flag_names_a_device_then_all_nodes_have_it(device: str) -> None:
    assert [node.device for node in nodes_of(2, *THREE, "--device", device)] == [device] * 3


def test_up_when_there_are_no_gpus_then_the_nodes_decide() -> None:
    for word in ("auto", "cpu", "cuda"):
        assert [node.device for node in nodes_of(0, *THREE, "--device", word)] == [word] * 3


def test_up_when_nodes_share_a_gpu_then_they_share_the_part_that_one_would_take() -> None:
    assert [node.gpu_memory_utilization for node in nodes_of(2, *THREE)] == [0.45, 0.9, 0.45]
    assert [node.gpu_memory_utilization for node in nodes_of(2, *THREE, "--device", "cuda:0")] == [0.9 / 3] * 3
    assert [node.gpu_memory_utilization for node in nodes_of(1, *THREE, "--gpu-memory-utilization", "0.2")] == [0.2] * 3
    assert [node.gpu_memory_utilization for node in nodes_of(0, *THREE)] == [0.9] * 3


@pytest.mark.parametrize("word", ["tpu", "cuda:", "cuda:-1", "cuda:one", "cuda:0:1", "CUDA"])
def test_device_when_it_is_no_device_then_refused_by_name(word: str) -> None:
    with pytest.raises(ConfigError, match=r"--device .* is not one of auto, cpu, cuda, cuda:N"):
        nodes_of(0, "--device", word)
