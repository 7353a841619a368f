"""Fields that nobody knows are counted without making series of clients' words."""

from __future__ import annotations

import logging

import pytest

from common.metrics.metrics import Metrics
from common.metrics.table import Role
from common.metrics.unknown_fields import MAX_NAMES, UnknownFields


def test_names_when_there_are_many_then_one_series_counts_them_and_few_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = Metrics(Role.PROXY)
    fields = UnknownFields(metrics)
    with caplog.at_level(logging.INFO):
        for number in range(3 * MAX_NAMES):
            fields.note("chat", (f"field_{number % (2 * MAX_NAMES)}", "x" * 10_000))
    lines = [each for each in metrics.render()[0].decode().splitlines() if each.startswith("tandem_unknown_fields_")]
    assert lines == [f'tandem_unknown_fields_total{{role="proxy",route="chat"}} {6.0 * MAX_NAMES}']
    assert len(caplog.records) == MAX_NAMES
    assert max(len(record.getMessage()) for record in caplog.records) < 200
