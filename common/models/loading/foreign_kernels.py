"""Packages of kernels that transformers takes by itself when they are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from common.errors import ConfigError

FOREIGN = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
"""Module -> distribution. transformers puts their functions into its models at import: those that the engine replaces
by name, and the stock forward that a loaded model is compared with, which then needs CUDA or has other rounding."""


def refuse_foreign_kernels(modules: Sequence[str] = tuple(FOREIGN)) -> None:
    """Raises ConfigError when one of them is installed, by name."""
    found = [name for name in modules if importlib.util.find_spec(name) is not None]
    if found:
        packages = " ".join(FOREIGN[name] for name in found)
        raise ConfigError(
            f"{', '.join(found)} is installed in this environment: transformers would run its kernels in place of "
            f"functions that Tandem replaces. Tandem has its own; pip uninstall {packages}"
        )
