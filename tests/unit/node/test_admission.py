from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import QueueFullError
from common.node.serving.admission import Admission


@pytest.mark.parametrize(
    ("num_waiting", "num_answers", "is_admitted"),
    [(0, 1, True), (0, 2048, True), (8, 1, True), (9, 1, False), (1, 8, True), (1, 9, False), (8, 2, False)],
)
def test_request_when_others_wait_then_it_counts_as_its_answers(
    num_waiting: int, num_answers: int, is_admitted: bool
) -> None:
    core: Any = SimpleNamespace(num_waiting=num_waiting)
    drain: Any = SimpleNamespace(check_admission=lambda: None)
    admission = Admission("node", 8, core, drain)
    if is_admitted:
        admission.check(num_answers)
        return
    with pytest.raises(QueueFullError, match=f"this one is for {num_answers} answers, --max-queue is 8"):
        admission.check(num_answers)
