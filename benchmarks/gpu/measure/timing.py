"""How long the device takes for a few calls, and the two rates that nothing can exceed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """``seconds``: median of one call; ``is_captured``: calls came from one CUDA graph, so that launching took no
    part in it."""

    seconds: float
    num_rounds: int
    is_captured: bool


@dataclass(frozen=True, slots=True)
class Ceilings:
    """``bytes_per_s``: read and written, of a large copy on the device. ``flops``: of a large bfloat16 product."""

    bytes_per_s: float
    flops: float

    def floor_s(self, num_bytes: float, flops: float = 0.0) -> float:
        """The least that work can take: moving its bytes or its products, whichever takes longer."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops)


def find_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    calls: Sequence[Call], device: torch.device, *, budget_s: float = 0.2, max_rounds: int = 50, captured: bool = True
) -> Timing:
    """One round is all ``calls``, one after the other: the same work on other memory each, so that no call finds its
    data in the L2 cache. Two rounds to warm up, then 3 to ``max_rounds`` until ``budget_s`` is spent. On a GPU by
    events round a round; ``captured``: try to replay the round as one CUDA graph."""
    if device.type != "cuda":
        return Timing(*_rounds(lambda: _on_host(calls), len(calls), budget_s, max_rounds), is_captured=False)
    for _ in range(2):
        for call in calls:
            call()
    torch.cuda.synchronize(device)
    graph = _capture(calls) if captured else None
    replay = _in_order(calls) if graph is None else graph.replay
    replay()
    torch.cuda.synchronize(device)
    seconds, num_rounds = _rounds(lambda: _on_device(replay), len(calls), budget_s, max_rounds)
    return Timing(seconds, num_rounds, graph is not None)


def _rounds(run: Callable[[], float], num_calls: int, budget_s: float, max_rounds: int) -> tuple[float, int]:
    samples: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(samples) < max_rounds and (len(samples) < 3 or time.perf_counter() < end_s):
        samples.append(run() / num_calls)
    return statistics.median(samples), len(samples)


def _in_order(calls: Sequence[Call]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def _on_host(calls: Sequence[Call]) -> float:
    begin_s = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - begin_s


def _on_device(replay: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph | None:
    """None: something in the calls cannot be captured (it asks the device for values)."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def measure_ceilings(device: torch.device) -> Ceilings:
    """A copy of 1 GiB, read and written once each, and a product of two 8192 x 8192 matrices in bfloat16 (0.1 s on an
    H200; small ones on a CPU)."""
    is_cuda = device.type == "cuda"
    size, num_bytes = (8192, 1 << 30) if is_cuda else (256, 1 << 22)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = measure([lambda: target.copy_(source)], device, budget_s=0.1, captured=False)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    product = measure([lambda: torch.matmul(a, b, out=out)], device, budget_s=0.2, captured=False)
    return Ceilings(2 * num_bytes / copy.seconds, 2 * size**3 / product.seconds)
