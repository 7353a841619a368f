"""NIXL's bindings module, loaded on demand and kept quiet.

``import nixl`` puts a log handler on stdout, and UCX logs there too; stdout belongs to the program. Both are moved off
it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from collections.abc import Sequence
from typing import Any

from common.errors import TransferError
from common.transfer.codes import TransferCode

META_PACKAGE = "nixl"
"""Chooses between its wheels by torch's CUDA; asked first."""
NET_DEVICES_VARIABLE = "UCX_NET_DEVICES"


def wheels(torch_version: str) -> tuple[str, str]:
    """The packages of NIXL's wheels, installed alone, the one for the CUDA of this torch first. Without a suffix torch
    is PyPI's build, which is for CUDA 13; beside a build without CUDA either does."""
    is_cuda_12 = torch_version.partition("+")[2].startswith("cu12")
    return ("nixl_cu12", "nixl_cu13") if is_cuda_12 else ("nixl_cu13", "nixl_cu12")


def _installed_torch() -> str:
    """Its version, without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def stay_on_loopback() -> None:
    """Before this process's first agent: UCX listens on loopback alone, unless ``UCX_NET_DEVICES`` says otherwise. By
    itself it listens on every network device, wherever HTTP is bound, and what listens there asks for no key. Shared
    memory and the GPUs of one machine are no network devices."""
    os.environ.setdefault(NET_DEVICES_VARIABLE, "lo")


def load_bindings(packages: Sequence[str] | None = None) -> Any:
    """The bindings module of the first of ``packages`` that can be imported, with its logging off stdout. By default
    the meta package and the wheels.

    Imported on demand: a process that moves no bytes (or moves them in-process) needs no NIXL. UCX reads its
    environment while it is being loaded; defaults are set only where the user has set nothing. Logs go to stderr, and
    errors only, because ending an agent with reads in flight logs a warning per descriptor.
    Which transports there are is UCX's choice: with ``UCX_TLS`` unset all, those of GPUs (cuda_copy, cuda_ipc) too. But
    for one thing: where UCX sees no NVLink it leaves reads to TCP (ucx #7566), and we only read.

    Raises:
        TransferError: ``backend_unavailable``, with every reason.
    """
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
    reasons: list[str] = []
    raise_exceptions = logging.raiseExceptions
    for package in (META_PACKAGE, *wheels(_installed_torch())) if packages is None else packages:
        try:
            importlib.import_module(package)
            bindings = importlib.import_module(f"{package}._bindings")
        except ImportError as exc:
            reasons.append(f"{package}: {exc}")
            continue
        finally:
            logging.raiseExceptions = raise_exceptions
        nixl_logger = logging.getLogger("nixl")
        for handler in list(nixl_logger.handlers):
            nixl_logger.removeHandler(handler)
        nixl_logger.propagate = True
        if "NIXL_LOG_LEVEL" not in os.environ:
            nixl_logger.setLevel(logging.WARNING)
        return bindings
    raise TransferError(f"NIXL cannot be imported ({'; '.join(reasons)})", code=TransferCode.BACKEND_UNAVAILABLE)
