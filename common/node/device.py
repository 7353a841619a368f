"""The device of a node: which one, and what of the environment it cannot work with.

A process has one device. Threads begin on CUDA's first one and without a context, so that each thread that launches
work or calls the transfer layer enters the node's own first (``thread_entry``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

import torch

from common.errors import ConfigError

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of torch's allocator, of which the pools have their memory."""
UNREADABLE = {
    "expandable_segments:true": "the pools would be mapped in pieces that no other process can map; reads of them fail "
    "or take 0.3 GB/s (NIXL's issue 1754, vLLM's issue 41237)",
    "backend:cudamallocasync": "the pools would be in memory that CUDA lends to no other process",
}
"""Settings with which peers cannot read the pools at speed, or at all, and why; in lower case."""
TRANSPORTS_VARIABLE = "UCX_TLS"


def choose_device(wanted: str) -> torch.device:
    """The device that ``--device`` names, with its number if it is a CUDA one.

    Raises:
        ConfigError: it is not there.
    """
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not num_devices):
        return torch.device("cpu")
    index = int(wanted.partition(":")[2] or 0)
    if index >= num_devices:
        found = (
            f"finds {num_devices} CUDA device{'s' if num_devices > 1 else ''} here, the last one is "
            f"cuda:{num_devices - 1}"
            if num_devices
            else "finds no CUDA device here"
        )
        raise ConfigError(f"--device {wanted}: torch {torch.__version__} {found}", param="--device")
    return torch.device("cuda", index)


def check_environment(device: torch.device, environ: Mapping[str, str]) -> None:
    """That peers will be able to read pools on ``device``. Raises ConfigError, naming the variable."""
    if device.type != "cuda":
        return
    for variable in ALLOCATOR_VARIABLES:
        settings = re.sub(r"\s", "", environ.get(variable, "")).lower().split(",")
        for setting in settings:
            if setting in UNREADABLE:
                raise ConfigError(
                    f"{variable}={environ[variable]} does not go with --device {device}: {UNREADABLE[setting]}. Unset "
                    "it, or set it otherwise for this process",
                    param=variable,
                )
    transports = environ.get(TRANSPORTS_VARIABLE, "all").strip()
    named = {name.strip() for name in transports.removeprefix("^").split(",")}
    is_excluded = transports.startswith("^")
    if is_excluded == bool(named & {"all", "cuda", "cuda_copy"}):
        raise ConfigError(
            f"{TRANSPORTS_VARIABLE}={transports} does not go with --device {device}: without cuda_copy UCX does not "
            "know the memory of a GPU, without cuda_ipc pools on one host are read over the network. Leave it unset, "
            "or add cuda to it",
            param=TRANSPORTS_VARIABLE,
        )


def thread_entry(device: torch.device) -> Callable[[], None] | None:
    """What a thread calls once before it works with ``device``; None: nothing."""
    return partial(_enter, device) if device.type == "cuda" else None


def _enter(device: torch.device) -> None:
    torch.cuda.set_device(device)
    # Where the thread's device is that one already, as device 0 is on a new thread, torch has called nothing. This does
    # call CUDA, which makes the context the thread's.
    torch.cuda.mem_get_info(device)
