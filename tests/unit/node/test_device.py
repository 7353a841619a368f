"""Which device a node takes, what of the environment it refuses, and how much memory its pools get."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.config.node import NodeConfig
from common.errors import ConfigError
from common.models.loading.loader import LoadedModel, load_model
from common.node import device_memory, runtime
from common.node.device import check_environment, choose_device, thread_entry
from common.node.device_memory import CONTEXT_BYTES, measure_step, pool_bytes
from tests.support.models import checkpoint

GIB = 1 << 30
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def num_gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    count = int(request.param)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    return count


@pytest.mark.parametrize(
    ("num_gpus", "wanted", "found"),
    [
        (0, "auto", "cpu"),
        (2, "auto", "cuda:0"),
        (2, "cpu", "cpu"),
        (2, "cuda", "cuda:0"),
        (2, "cuda:1", "cuda:1"),
    ],
    indirect=["num_gpus"],
)
def test_device_when_it_is_there_then_has_its_number(num_gpus: int, wanted: str, found: str) -> None:
    assert str(choose_device(wanted)) == found


@pytest.mark.parametrize(
    ("num_gpus", "wanted", "words"),
    [
        (0, "cuda", "finds no CUDA device here"),
        (0, "cuda:1", "finds no CUDA device here"),
        (1, "cuda:1", "finds 1 CUDA device here, the last one is cuda:0"),
        (8, "cuda:8", "finds 8 CUDA devices here, the last one is cuda:7"),
    ],
    indirect=["num_gpus"],
)
def test_device_when_it_is_not_there_then_flag_value_and_number_are_named(
    num_gpus: int, wanted: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"^--device {wanted}: torch .* {words}$") as caught:
        choose_device(wanted)
    assert caught.value.param == "--device"


REFUSED = {
    "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"},
    "new name": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    "async": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    "transports": {"UCX_TLS": "tcp,self"},
    "excluded": {"UCX_TLS": "^cuda_copy"},
}


@pytest.mark.parametrize("environ", REFUSED.values(), ids=REFUSED)
def test_environment_when_peers_could_not_read_the_pools_then_the_variable_is_named_on_a_gpu_alone(
    environ: Mapping[str, str],
) -> None:
    [variable] = environ
    with pytest.raises(ConfigError, match=f"{variable}=.*--device cuda:1") as caught:
        check_environment(GPU, environ)
    assert caught.value.param == variable
    check_environment(CPU, environ)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False,max_split_size_mb:64"},
        {"UCX_TLS": "all"},
        {"UCX_TLS": "rc,cuda"},
        {"UCX_TLS": "cuda_copy, cuda_ipc,sm"},
        {"UCX_TLS": "^rc"},
    ],
)
def test_environment_when_peers_can_read_the_pools_then_is_taken(environ: Mapping[str, str]) -> None:
    check_environment(GPU, environ)


def test_load_when_the_environment_does_not_go_with_the_device_then_refused_before_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "choose_device", lambda wanted: GPU)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match="PYTORCH_CUDA_ALLOC_CONF"):
        runtime.load_node_model(NodeConfig(model="/no/such/folder"))


def test_thread_when_it_enters_a_gpu_then_that_becomes_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[tuple[str, torch.device]] = []
    for name in ("set_device", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: entered.append((name, device)))
    enter = thread_entry(GPU)
    assert enter is not None
    enter()
    # Without the second call a thread has device 0 and no context.
    assert entered == [("set_device", GPU), ("mem_get_info", GPU)]
    assert thread_entry(CPU) is None


class FakeMemory:
    """``torch.cuda`` of a GPU as far as memory goes. ``others``: what other processes use of it."""

    def __init__(self, *, total: int, weights: int, step: int, others: int = 0) -> None:
        self.total, self.weights, self.step, self.others = total, weights, step, others
        self.is_reset = False

    def synchronize(self, device: torch.device) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.is_reset = True

    def memory_reserved(self, device: torch.device) -> int:
        return self.weights

    def max_memory_reserved(self, device: torch.device) -> int:
        assert self.is_reset
        return self.weights + self.step

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.total - self.weights - CONTEXT_BYTES - self.others, self.total


def fake_memory(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    memory = FakeMemory(**sizes)
    for name in (each for each in dir(memory) if callable(getattr(memory, each)) and not each.startswith("_")):
        monkeypatch.setattr(torch.cuda, name, getattr(memory, name))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model on ``GPU`` whose step takes what ``FakeMemory`` says."""
    monkeypatch.setattr(device_memory, "measure_step", lambda loaded, **_: 4 * GIB)
    return SimpleNamespace(device=GPU, tower=None)


def test_pools_when_no_flag_gives_their_size_then_get_what_the_share_leaves(
    measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_memory(monkeypatch, total=80 * GIB, weights=20 * GIB, step=0)
    assert pool_bytes(NodeConfig(model="m"), measured, 1024) == int(80 * GIB * 0.9) - 25 * GIB
    assert pool_bytes(NodeConfig(model="m", gpu_memory_utilization=0.5), measured, 1024) == 15 * GIB
    measured.tower = object()
    config = NodeConfig(model="m", gpu_memory_utilization=0.5, mm_encoder_cache_memory=GIB)
    assert pool_bytes(config, measured, 1024) == 14 * GIB


def test_pools_when_two_processes_share_a_gpu_then_each_gets_its_part_of_it(
    measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = NodeConfig(model="m", gpu_memory_utilization=0.45)
    sizes = []
    for others in (0, 36 * GIB):
        fake_memory(monkeypatch, total=80 * GIB, weights=20 * GIB, step=0, others=others)
        sizes.append(pool_bytes(config, measured, 1024))
    assert sizes == [11 * GIB, 11 * GIB]


@pytest.mark.parametrize(
    ("share", "others", "words"),
    [
        (0.3, 0, r" 0\.3 of cuda:1's 80\.00 GiB is 24\.00 GiB: 20\.00 GiB for weights, 4\.00 GiB for a step of 2048 .* "
         r"1\.00 GiB are missing$"),
        (0.9, 30 * GIB, r"47\.00 GiB for the pools; but only 29\.00 GiB are free"),
    ],
)  # fmt: skip
def test_pools_when_too_little_is_left_then_the_flag_and_all_numbers_are_named(
    measured: Any, monkeypatch: pytest.MonkeyPatch, share: float, others: int, words: str
) -> None:
    fake_memory(monkeypatch, total=80 * GIB, weights=20 * GIB, step=0, others=others)
    with pytest.raises(ConfigError, match=f"^--gpu-memory-utilization.*{words}") as caught:
        pool_bytes(NodeConfig(model="m", gpu_memory_utilization=share), measured, 1024)
    assert caught.value.param == "--gpu-memory-utilization"


def test_plan_when_the_share_leaves_too_little_for_one_sequence_then_both_flags_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: Any = tiny()
    monkeypatch.setattr(runtime, "choose_device", lambda wanted: CPU)
    monkeypatch.setattr(runtime, "load_model", lambda *_, **__: on_gpu(loaded))
    monkeypatch.setattr(runtime, "pool_bytes", lambda *_: 4096)
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization 0\.9 leaves 4096 bytes.* smallest value"):
        runtime.load_node_model(NodeConfig(model="m", max_model_len=512))


def tiny() -> LoadedModel:
    return load_model(str(checkpoint("granitemoehybrid")), dtype="float32")


def on_gpu(loaded: LoadedModel) -> Any:
    fields = {name: getattr(loaded, name) for name in LoadedModel.__slots__}
    return SimpleNamespace(**{**fields, "device": GPU})


def test_plan_when_kv_cache_memory_is_given_then_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = on_gpu(tiny())
    monkeypatch.setattr(runtime, "pool_bytes", lambda *_: pytest.fail("measured"))
    config = NodeConfig(model="m", kv_cache_memory=64 << 20, gpu_memory_utilization=0.5)
    assert runtime._plan(config, loaded, 512, has_two_states=False).report.memory_bytes == 64 << 20


def test_plan_when_on_a_cpu_then_the_pools_have_2_gib_by_default() -> None:
    plan = runtime._plan(NodeConfig(model="m"), tiny(), 512, has_two_states=False)
    assert plan.report.memory_bytes == 2 * GIB


@pytest.mark.parametrize("family", ["granitemoehybrid", "llama", "mamba2"])
def test_step_when_measured_then_it_runs_and_the_difference_is_what_it_took(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_memory(monkeypatch, total=80 * GIB, weights=20 * GIB, step=3 * GIB)
    loaded = load_model(str(checkpoint(family)), dtype="float32")
    ran: list[int] = []
    base = loaded.model.base_model
    hook = base.register_forward_pre_hook(
        lambda module, args, given: ran.append(given.get("input_ids", torch.empty(0)).numel()), with_kwargs=True
    )
    measured = measure_step(loaded, num_tokens=40, num_seqs=4, max_model_len=17, block_size=16)
    hook.remove()
    assert (measured, ran[0]) == (3 * GIB, 40)
