"""What holds for every test: those that need a CUDA device are skipped, with the reason, where there is none."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if marked and (reason := _why_no_cuda()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_cuda() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "needs a CUDA device: torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device: torch sees none"
