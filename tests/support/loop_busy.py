"""How long event loops of services were busy by their own doing, against what that takes on this machine.

The promise (docs/operations.md) is 100 ms on a core on which the longest single call that the bounds of a body allow,
parsing 1,100,000 numbers, takes 50 ms. A slow or crowded machine takes as much longer for both, so both are measured:
what is promised there is twice what that call takes beside the very requests.
"""

from __future__ import annotations

import functools
import math
import time

import httpx
import orjson

from common.wire.json_text import MAX_VALUES
from common.wire.routes import METRICS_ROUTE
from tests.support.service import Node

MAX_BUSY_S = 0.1
CALLS_PER_LIMIT = 2
TIMEOUT_S = 120.0


@functools.cache
def _longest_text() -> bytes:
    return b"[" + b",".join([b"1234567.5"] * (MAX_VALUES - 1)) + b"]"


def busy_limit_s() -> float:
    """What a loop may be busy at a time on this machine, as it is now."""
    text = _longest_text()
    started_s = time.thread_time()
    orjson.loads(text)
    return max(MAX_BUSY_S, CALLS_PER_LIMIT * (time.thread_time() - started_s))


def lags(node: Node) -> dict[float, int]:
    """By seconds: how often the loop was late by at most that, as far as the process's own work is the reason."""
    counts: dict[float, int] = {}
    for line in httpx.get(node.url + METRICS_ROUTE, timeout=TIMEOUT_S).text.splitlines():
        if line.startswith("tandem_event_loop_lag_seconds_bucket") and 'cause="own"' in line:
            counts[float(line.partition('le="')[2].partition('"')[0])] = round(float(line.rpartition(" ")[2]))
    return counts


def was_busy(before: dict[float, int], after: dict[float, int], limit_s: float) -> bool:
    """Whether the loop was busy for longer than ``limit_s``, or the next bound that is counted by, between two
    ``lags``."""
    bound_s = min(each for each in after if each >= limit_s)
    return after[math.inf] - after[bound_s] > before[math.inf] - before[bound_s]
