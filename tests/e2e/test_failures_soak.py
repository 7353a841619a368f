"""Two prefill and two decode nodes on late devices, under mixed load, while one node after the other is killed or
frozen, and clients leave, send what no client means, and stand still half-way."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support.chaos import (
    HOSTILE_BODIES,
    Tally,
    ask_all,
    clients,
    make_questions,
    num_open_files,
    resident_mib,
    send_hostile,
    strike,
)
from tests.support.client import metric, wait_settled
from tests.support.hangup import wait_until
from tests.support.models import checkpoint
from tests.support.reference import Reference
from tests.support.service import LATE_DEVICE_VARIABLE, Service

NUM_CLIENTS = 6
NUM_TOKENS = 16
FREEZE_S = 4.0
OPEN_FILES_SLACK = 24
"""Idle connections that come and go with pools of clients."""
MEMORY_SLACK_MIB = 64.0


def soak(reference: Reference, duration_s: float, interval_s: float, seed: int, node_flags: Sequence[str] = ()) -> None:
    """A node is struck every ``interval_s``, from one start to the next."""
    started_s = time.monotonic()
    pool = ThreadPoolExecutor(1)  # stock transformers answers while the nodes start
    coming = pool.submit(make_questions, reference, 32, NUM_TOKENS, seed=600)
    pool.shutdown(wait=False)
    draw = random.Random(seed)
    tally = Tally()
    # A killed decode node's leases end by themselves: soon, so that the end of the test need not wait for them.
    flags = (*NODE_FLAGS, "--kv-lease-seconds", "3", *node_flags)
    with Service(checkpoint(FAMILY), prefill_flags=flags, decode_flags=flags, num_prefill=2, num_decode=2) as service:
        nodes = (*service.prefill, *service.decode)
        questions = coming.result()
        # Every connection and every page that stays is there before memory is measured: a body of megabytes leaves some
        # to each thread that has read one.
        with ThreadPoolExecutor(NUM_CLIENTS) as several:
            list(several.map(lambda body: send_hostile(service.url, body, tally), HOSTILE_BODIES * 4))
        ask_all(service.url, questions, reference, tally, at_once=NUM_CLIENTS)
        wait_settled(*nodes)
        before = (num_open_files(service.proxy), resident_mib(service.proxy))
        samples: list[float] = []
        strikes = 0
        end_s = time.monotonic() + duration_s
        with clients(service.url, questions, reference, tally, count=NUM_CLIENTS, seed=seed):
            next_s = time.monotonic() + interval_s / 2
            while next_s < end_s:
                time.sleep(max(0.0, next_s - time.monotonic()))
                strike(service, draw.choice(nodes), freeze_s=FREEZE_S if draw.random() < 0.3 else 0.0)
                strikes += 1
                samples.append(resident_mib(service.proxy))
                next_s += interval_s
            time.sleep(max(0.0, end_s - time.monotonic()))
        wait_until(lambda: metric(service.proxy, "node_up") == 4, "the proxy to see every node")
        wait_settled(*nodes)
        # All were started at different times; from here on each of them only answers.
        marks = {node.url: (num_open_files(node), resident_mib(node)) for node in nodes}
        for _ in range(3):
            ask_all(service.url, questions, reference, tally, at_once=NUM_CLIENTS)
        wait_settled(*nodes)
        after = (num_open_files(service.proxy), resident_mib(service.proxy))
        report = {
            "seconds": duration_s,
            "seconds_in_all": round(time.monotonic() - started_s, 1),
            "strikes": strikes,
            "outcomes": dict(tally.counts),
            "proxy_open_files": (before[0], after[0]),
            "proxy_resident_mib": (round(before[1]), *(round(each) for each in samples), round(after[1])),
            "node_open_files": [(marks[node.url][0], num_open_files(node)) for node in nodes],
            "node_resident_mib": [(round(marks[node.url][1]), round(resident_mib(node))) for node in nodes],
        }
        print(json.dumps(report))
        assert not tally.wrong, tally.wrong[:5]
        assert not tally.hung, tally.hung[:5]
        assert strikes >= 3
        assert tally.counts["right"] > 2 * duration_s, tally.counts
        assert tally.counts["left"] > duration_s / 10, tally.counts
        assert tally.counts["hostile"] + tally.counts["hostile cut"] > duration_s / 10, tally.counts
        assert after[0] <= before[0] + OPEN_FILES_SLACK, report
        assert after[1] <= before[1] + MEMORY_SLACK_MIB, report
        for node in nodes:
            assert num_open_files(node) <= marks[node.url][0] + OPEN_FILES_SLACK, report
            assert resident_mib(node) <= marks[node.url][1] + MEMORY_SLACK_MIB, report


@pytest.fixture(autouse=True)
def late_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LATE_DEVICE_VARIABLE, "1")


@pytest.mark.full
def test_service_when_nodes_are_killed_three_times_then_no_answer_is_wrong_and_nothing_leaks(
    reference: Reference,
) -> None:
    soak(reference, 10.0, 3.3, seed=1)


@pytest.mark.full
@pytest.mark.parametrize(("duration_s", "interval_s"), [(10.0, 3.3), (600.0, 20.0)])
def test_service_with_a_tier_when_nodes_are_killed_then_no_answer_is_wrong_and_its_folder_is_sound(
    reference: Reference, tmp_path: Path, duration_s: float, interval_s: float
) -> None:
    """All nodes in one folder, with pools that hold a part of what is asked."""
    folder, size = tmp_path / "tier", 3 << 20
    tier = ("--kv-cache-memory", "3600KiB", "--kv-tier", f"disk:{folder}?size={size}")
    soak(reference, duration_s, interval_s, seed=3, node_flags=tier)
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*.kv"))
    assert size // 8 < num_bytes <= size


@pytest.mark.full
def test_service_when_nodes_are_killed_for_ten_minutes_then_no_answer_is_wrong_and_nothing_leaks(
    reference: Reference,
) -> None:
    soak(reference, 600.0, 20.0, seed=2)
