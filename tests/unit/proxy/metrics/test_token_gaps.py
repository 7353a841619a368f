"""Time between tokens at the proxy: of streams with one choice, token by token, with what is no token left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.legs.stream_progress import StreamProgress
from proxy.metrics.token_gaps import TokenGaps
from tests.unit.proxy.conftest import StartCluster
from tests.unit.proxy.fake_node import NUM_CHUNKS, Fault


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


TOKEN = event(choices=[{"index": 0, "text": 'a "finish_reason"', "finish_reason": None}])
USAGE = event(choices=[], usage={}) + b"data: [DONE]\n\n"


def test_gaps_when_pieces_hold_tokens_then_one_for_each_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.0, 6.0])
    monkeypatch.setattr("proxy.metrics.token_gaps.time.monotonic", lambda: next(times))
    noted: list[float] = []
    gaps = TokenGaps(noted.append, num_choices=1)
    for num_tokens in (1, 1, 0, 3, 0):
        gaps.passed(num_tokens)
    assert noted == [2.0, 1.0]


def test_gaps_when_there_are_several_choices_then_none() -> None:
    noted: list[float] = []
    gaps = TokenGaps(noted.append, num_choices=2)
    gaps.passed(1)
    gaps.passed(1)
    assert noted == []


def test_progress_when_pieces_hold_tokens_then_each_is_counted_once() -> None:
    progress, counts = StreamProgress(), []
    for piece in (TOKEN, TOKEN[:9], TOKEN[9:], b": beat\n\n", TOKEN * 3, b": tandem-tokens 40\n" + TOKEN, USAGE):
        progress.feed(piece)
        counts.append(progress.num_tokens)
    assert counts == [1, 0, 1, 0, 3, 40, 0]


@pytest.mark.parametrize(("fields", "count"), [({}, 2), ({"n": 2}, 0), ({"prompt": ["a", "b"]}, 0)])
def test_stream_when_passed_on_then_the_gaps_between_its_tokens_are_counted(
    start_cluster: StartCluster, fields: dict[str, Any], count: int
) -> None:
    cluster = start_cluster()
    cluster.decode[0].has_choices = True
    cluster.decode[0].chunk_pause_s = 0.1
    body = {"prompt": "a", "stream": True, **fields}
    assert cluster.client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
    assert cluster.metric("tandem_request_itl_seconds_count", role="proxy") == count
    assert cluster.metric("tandem_request_itl_seconds_bucket", le="+Inf") == count
    assert cluster.metric("tandem_request_itl_seconds_sum", role="proxy") >= 0.05 * count  # half of what was slept


def test_stream_when_it_goes_on_at_another_node_then_the_pause_is_one_of_its_gaps(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 2, resume=True, migration_limit=1)
    for node in cluster.decode:
        node.has_choices = True
    cluster.decode[0].fault = Fault.BREAK_LATE  # 50 ms after its first token
    body = {"prompt": "a", "stream": True}
    assert cluster.client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
    # The other node's tokens, two in each chunk, come at once: if they do in one piece, each has a part of the pause.
    assert cluster.metric("tandem_request_itl_seconds_sum", role="proxy") >= 0.05 / (2 * (NUM_CHUNKS - 1))
