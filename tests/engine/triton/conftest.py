from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.triton.guards import Guards


@pytest.fixture
def guard() -> Iterator[Guards]:
    """Puts tensors between pages that fault; afterwards nothing beside their elements may have changed."""
    guards = Guards()
    yield guards
    guards.check()
