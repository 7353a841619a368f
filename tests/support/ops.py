"""The op backends that tests run on; the C++ one is compiled on first use."""

from __future__ import annotations

import functools

import pytest
import torch

from common.errors import ConfigError
from common.models.loading.fingerprint import user_cache_dir
from common.ops.interface import Ops
from common.ops.select import create_ops

OPS_BACKENDS = ("torch", "cpp")


@functools.cache
def _create(backend: str) -> Ops | str:
    try:
        return create_ops(backend, dtype=torch.float32, device=torch.device("cpu"), cache_dir=user_cache_dir())
    except ConfigError as exc:
        return str(exc)


def make_ops(backend: str) -> Ops:
    """The backend, or a skip with the reason why it cannot run here."""
    ops = _create(backend)
    if isinstance(ops, str):
        pytest.skip(ops)
    return ops
