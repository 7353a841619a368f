"""What holds for every test: those that need a CUDA device are skipped, with the reason, where there is none.

With several workers (``pytest -n``), tests that start services are one group and so run one after the other, on one
worker; of the others each file is a group.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

E2E = Path(__file__).resolve().parent / "e2e"


@pytest.hookimpl(tryfirst=True)  # xdist's own hook reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        group = "e2e" if E2E in item.path.parents else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if marked and (reason := _why_no_cuda()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_cuda() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "needs a CUDA device: torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device: torch sees none"
