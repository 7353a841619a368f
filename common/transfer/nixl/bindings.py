"""NIXL's bindings module, loaded on demand and kept quiet.

``import nixl`` puts a log handler on stdout, and UCX logs there too; stdout belongs to the program. Both are moved off
it.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from typing import Any

from common.errors import TransferError
from common.transfer.codes import TransferCode

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""Tried in this order: the meta package, which chooses between its wheels, then a wheel that was installed alone."""


def load_bindings(packages: Sequence[str] = PACKAGES) -> Any:
    """The bindings module of the first of ``packages`` that can be imported, with its logging off stdout.

    Imported on demand: a process that moves no bytes (or moves them in-process) needs no NIXL. UCX reads its
    environment while it is being loaded; defaults are set for its logging only, and only where the user has set
    nothing: to stderr, and errors only, because ending an agent with reads in flight logs a warning per descriptor.

    Raises:
        TransferError: ``backend_unavailable``, with every reason.
    """
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    reasons: list[str] = []
    raise_exceptions = logging.raiseExceptions
    for package in packages:
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
