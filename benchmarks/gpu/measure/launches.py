"""What a step gives the device to do, as the profiler sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.settings import Row

NUM_STEPS = 2
NUM_NAMED = 20


def count_launches(step: Callable[[], object], device: torch.device) -> Row:
    """``launches``: calls of the host per step that start kernels, ``graph_launches``: that replay a graph;
    ``kernels``: that ran; ``gpu_ms``: their time; ``top_kernels``: the longest: name, times a step, us a step."""
    if device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_STEPS):
            step()
        torch.cuda.synchronize(device)  # kernels that still run would be missed
    calls: Counter[str] = Counter()
    times: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            kernels[event.name] += 1
            times[event.name] += event.self_device_time_total
        elif event.name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync")):
            calls[event.name] += 1
    launches = sum(count for name, count in calls.items() if "LaunchKernel" in name)
    return {
        "launches": launches / NUM_STEPS,
        "graph_launches": calls["cudaGraphLaunch"] / NUM_STEPS,
        "copies": calls["cudaMemcpyAsync"] / NUM_STEPS,
        "kernels": kernels.total() / NUM_STEPS,
        "gpu_ms": times.total() / NUM_STEPS / 1e3,
        "top_kernels": [
            [name[:120], kernels[name] / NUM_STEPS, round(time_us / NUM_STEPS, 1)]
            for name, time_us in times.most_common(NUM_NAMED)
        ],
    }
