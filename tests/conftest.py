"""What holds for every test: those that need a CUDA device are skipped, with the reason, where there is none.

With several workers (``pytest -n``), tests that start services are two groups, each of which runs one after the other
on one worker; of the others each file is a group, or each test where one takes a minute.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from httpx._transports import default as httpx_transports

# The same examples every time, and however long they take: a check fails for what was changed, not by chance or on a
# busy machine. Tests marked `full` ask for fresh ones.
hypothesis.settings.register_profile(
    "tandem",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tandem")

# A client of httpx reads the certificates of all the world's authorities when it is made, for a thirtieth of a second,
# and every `httpx.get` makes one; tests call their own processes, thousands of times. They are read once.
httpx_transports.create_ssl_context = functools.cache(httpx_transports.create_ssl_context)

ONE_BY_ONE = ("tests/engine/triton/test_compile.py", "tests/engine/triton/test_models.py")
"""Files of few long tests, which a worker alone would still be at when all the others have ended."""
E2E_HALF = "tests/e2e/test_faults"
"""Files of services before it take about as long as those from it on."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class TwoWorkersForServices(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if not file.startswith("tests/e2e/"):
                return nodeid if file in ONE_BY_ONE else file
            return "e2e, first" if file < E2E_HALF else "e2e, second"

    # In the order of their names: xdist's own, groups of few tests last, would end with the longest ones.
    config.option.loadscopereorder = False
    return TwoWorkersForServices(config, log)


KINDS = ("e2e", "unit", "transfer", "engine")
"""Folders in the order in which their tests are given out: those of services, which wait most, beside which those of
units wait too; at last those that compute all the time, so that no core is idle at the end."""


FULL_TIMEOUT_S = 1200
"""Of a test marked `full` that names none: in place of 300 s, for thousands of requests beside three other workers."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    items.sort(key=lambda item: KINDS.index(item.path.relative_to(tests).parts[0]))
    for item in items:
        if item.get_closest_marker("full") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(FULL_TIMEOUT_S))
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if marked and (reason := _why_no_cuda()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """A million objects of libraries and tests come to stay: nothing looks for garbage among them, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _why_no_cuda() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "needs a CUDA device: torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device: torch sees none"
