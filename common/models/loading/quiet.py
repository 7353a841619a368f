"""Silences transformers for the length of a block: otherwise it writes progress bars to stderr, and a warning for every
kernel package that is not installed, although the engine does not use those kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, errors only; what was set before is set again afterwards."""
    had_progress = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_progress:
            transformers_logging.enable_progress_bar()
