"""``tandem_sources``: where it may stand, what it may hold."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequestError
from common.openai.protocol import parse_chat, parse_completion
from common.wire.pull_sources import PullSource

ONE = {"url": "http://127.0.0.1:8200/", "epoch": str(2**63 + 1)}
SOURCE = PullSource("http://127.0.0.1:8200", 2**63 + 1)
LEG = {"do_remote_decode": True, "do_remote_prefill": False}


def sources(**body: Any) -> tuple[PullSource, ...]:
    return parse_completion({"prompt": [1, 2], **body}, is_from_peer=True).sources


def test_sources_when_top_level_or_in_transfer_params_then_read_in_order() -> None:
    other = {"url": "http://node-2:8100", "epoch": 7}
    assert sources() == ()
    assert sources(tandem_sources=[]) == ()
    assert sources(tandem_sources=[ONE, other]) == (SOURCE, PullSource("http://node-2:8100", 7))
    assert sources(kv_transfer_params={**LEG, "tandem_sources": [ONE]}) == (SOURCE,)
    assert sources(tandem_sources=[other], kv_transfer_params={**LEG, "tandem_sources": [ONE]})[0].epoch == 7
    chat = {"messages": [{"role": "user", "content": "hi"}], "tandem_sources": [ONE]}
    assert parse_chat(chat, is_from_peer=True).sources == (SOURCE,)
    assert PullSource.to_json(SOURCE) == {"url": "http://127.0.0.1:8200", "epoch": str(2**63 + 1)}
    [leased] = sources(tandem_sources=[{**ONE, "lease_id": "stream-1"}])
    assert (leased.lease_id, SOURCE.lease_id) == ("stream-1", None)
    assert sources(tandem_sources=[leased.to_json()]) == (leased,)


def test_sources_when_from_anybody_but_a_process_of_the_service_then_not_read() -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "tandem_sources": "http://10.0.0.1"}
    assert parse_chat(chat).sources == ()
    assert parse_completion({"prompt": "hi", "kv_transfer_params": {**LEG, "tandem_sources": [ONE]}}).sources == ()


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({}, "tandem_sources"),
        ("http://127.0.0.1:8200", "tandem_sources"),
        ([ONE, ONE, ONE], "tandem_sources"),
        (["http://127.0.0.1:8200"], "tandem_sources[0]"),
        ([ONE, {"epoch": "1"}], "tandem_sources[1].url"),
        ([{**ONE, "url": 7}], "tandem_sources[0].url"),
        ([{**ONE, "url": "file:///etc/passwd"}], "tandem_sources[0].url"),
        ([{**ONE, "url": "http://user@127.0.0.1:8200"}], "tandem_sources[0].url"),
        ([{**ONE, "url": "http://127.0.0.1:8200/v1"}], "tandem_sources[0].url"),
        ([{**ONE, "epoch": "-1"}], "tandem_sources[0].epoch"),
        ([{**ONE, "epoch": str(2**64)}], "tandem_sources[0].epoch"),
        ([{**ONE, "epoch": 1.5}], "tandem_sources[0].epoch"),
    ],
)
def test_sources_when_malformed_then_the_field_is_named(value: Any, param: str) -> None:
    for body, name in (
        ({"tandem_sources": value}, param),
        ({"kv_transfer_params": {**LEG, "tandem_sources": value}}, "kv_transfer_params." + param),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            sources(**body)
        assert caught.value.param == name
