"""The pull's question and its answers: what is accepted, and what names the field at fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from common.errors import InvalidRequestError
from common.wire.handoff import Rendezvous, prefill_leg_params, rendezvous_id_of, transfer_mode
from common.wire.manifest import Manifest, ManifestShape, PartialManifest
from common.wire.pull import (
    ContentQuery,
    RendezvousQuery,
    miss_answer,
    nothing_new_answer,
    parse_query,
    read_answer,
    with_id,
)

PART = PartialManifest("engine", 2**64 - 1, "00ff", 4, 8, ((3, 9),), ((2**64 - 1, 2**53 + 1),), 30.0)
FINAL = Manifest(
    "engine", "r", "127.0.0.1", 8100, 9, 4, ((3, 9, 5),), ((1, 2, 3),), 7, "00ff", "r", 30.0, bytes(32), slot_id=2,
    digests=(("0123456789abcdef", None, "f" * 32),), slot_digest="0" * 32,
)  # fmt: skip
CONTENT = ContentQuery("content-1", (1, 2, 3), "salt", "00ff", bytes(range(32)), 2)
SHAPE = ManifestShape(num_block_groups=1, has_state=True, vocab_size=10)


def test_queries_survive_their_bodies() -> None:
    query = RendezvousQuery("abc", 32, 2.5, have=16)
    assert parse_query(query.to_body(), vocab_size=10) == query
    assert parse_query(CONTENT.to_body(), vocab_size=10) == CONTENT
    assert parse_query(orjson.loads(CONTENT.to_json()), vocab_size=10) == CONTENT
    assert parse_query(orjson.loads(with_id(CONTENT.to_json(), "b")), vocab_size=10) == replace(CONTENT, id="b")
    assert parse_query({"id": "abc"}, vocab_size=10) == RendezvousQuery("abc", 0, 10.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("id", value) for value in (None, "", "a b", "x" * 257, 7, ["a"])),
        *(("after", value) for value in (-1, 2**24 + 1, "1", 1.5, True)),
        *(("have", value) for value in (-1, 2**24 + 1, "1", 1.5, True)),
        *(("wait_seconds", value) for value in (-0.1, 10.1, "1", True)),
    ],
)
def test_rendezvous_query_when_a_field_is_wrong_then_names_it(field: str, value: Any) -> None:
    body = {**RendezvousQuery("abc", 0, 1.0).to_body(), field: value}
    with pytest.raises(InvalidRequestError) as caught:
        parse_query(body, vocab_size=10)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("prompt_token_ids", value) for value in ([], [10], [-1], ["1"], "abc", {"a": 1})),
        *(("fingerprint", value) for value in (None, "xyz", "f", 7)),
        *(("prefix_key", value) for value in (None, "0", "zz", 7)),
        *(("have", value) for value in (-1, "1", 2**24 + 1)),
        *(("cache_salt", value) for value in (7, "x" * 5000)),
    ],
)
def test_content_query_when_a_field_is_wrong_then_names_it(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_query({**CONTENT.to_body(), field: value}, vocab_size=10)
    assert caught.value.param == field


def test_answers_survive_json_shapes() -> None:
    assert read_answer(PART.to_params(), after=4, shape=ManifestShape(num_block_groups=1)) == PART
    rest = PART.beyond(1)
    assert (rest.num_tokens, rest.block_ids, rest.generations) == (8, ((9,),), ((2**53 + 1,),))
    assert read_answer(rest.to_params(), after=4, shape=ManifestShape(num_block_groups=1)) == rest
    assert read_answer(FINAL.to_params(), after=8, shape=SHAPE) == FINAL
    assert "prompt_token_ids" not in FINAL.to_params()
    assert read_answer(nothing_new_answer(32), after=32) is None
    begun = replace(PART, num_tokens=0, block_ids=((),), generations=((),))
    assert read_answer(begun.to_params(), after=0, shape=ManifestShape(num_block_groups=1)) == begun
    assert read_answer(nothing_new_answer(0), after=0) is None
    assert read_answer(miss_answer()) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("remote_num_tokens", 7),
        ("remote_num_tokens", -4),
        ("remote_num_tokens", 12),
        ("remote_block_ids", [[3]]),
        ("remote_block_ids", [[3, 9], [1, 2]]),
        ("tandem_generations", [["1", "x"]]),
        ("tandem_generations", None),
        ("tandem_epoch", "soon"),
        ("tandem_fingerprint", "xyz"),
        ("tandem_lease_seconds", 0),
        ("tandem_block_size", 0),
        ("remote_engine_id", ""),
        ("tandem_first_block", -1),
        ("tandem_first_block", 3),
        ("tandem_first_block", "1"),
    ],
)
def test_part_when_a_key_is_wrong_then_names_it(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_answer({**PART.to_params(), field: value}, after=4, shape=ManifestShape(num_block_groups=1))
    name = "remote_block_ids" if value == 12 else field  # two blocks are not those of 12 tokens
    assert caught.value.param == f"kv_transfer_params.{name}"


def test_parts_when_put_together_then_the_later_word_counts() -> None:
    later = PartialManifest("engine", 2**64 - 1, "00ff", 4, 16, ((8, 5, 7),), ((80, 50, 70),), 30.0, first_block=1)
    whole = later.joined_to(PART)
    assert (whole.first_block, whole.num_tokens) == (0, 16)
    assert (whole.block_ids, whole.generations) == (((3, 8, 5, 7),), ((2**64 - 1, 80, 50, 70),))
    assert whole.beyond(1) == later
    assert PART.joined_to(whole) == PART.joined_to(None) == PART


def test_part_when_the_key_of_its_first_block_is_absent_then_it_names_all() -> None:
    """As a holder of an earlier version answers, whatever it was told of ``have``."""
    params = PART.to_params()
    del params["tandem_first_block"]
    assert read_answer(params, after=4) == PART


@pytest.mark.parametrize(
    ("earlier", "key"),
    [
        (None, "tandem_first_block"),
        (replace(PART, num_tokens=4, block_ids=((3,),), generations=((1,),)), "tandem_first_block"),
        (replace(PART, epoch=1), "tandem_epoch"),
    ],
)
def test_part_when_it_does_not_go_on_from_the_earlier_one_then_names_the_key(
    earlier: PartialManifest | None, key: str
) -> None:
    later = PartialManifest("engine", 2**64 - 1, "00ff", 4, 12, ((5,),), ((50,),), 30.0, first_block=2)
    with pytest.raises(InvalidRequestError) as caught:
        later.joined_to(earlier)
    assert caught.value.param == f"kv_transfer_params.{key}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tandem_digests", [["0123456789abcdef", None]]),
        ("tandem_digests", [["0123456789abcdef", None, "short"]]),
        ("tandem_digests", [["0123456789abcdef", None, 7]]),
        ("tandem_digests", "0123"),
        ("tandem_slot_digest", "xyz"),
    ],
)
def test_digests_when_wrong_then_names_the_key(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_answer({**FINAL.to_params(), field: value}, shape=SHAPE)
    assert caught.value.param == f"kv_transfer_params.{field}"


def test_rendezvous_survives_the_legs_of_both_kinds() -> None:
    meeting = Rendezvous("10.0.0.1", 8100, "abc")
    assert Rendezvous.from_params(meeting.to_params()) == meeting
    assert transfer_mode(meeting.to_params()).value == "remote_prefill"
    assert Rendezvous.from_params(FINAL.to_params()) is None
    assert rendezvous_id_of(prefill_leg_params("abc")) == "abc"
    assert rendezvous_id_of(prefill_leg_params()) is None
    assert transfer_mode(prefill_leg_params("abc")).value == "remote_decode"


@pytest.mark.parametrize(
    ("key", "value"),
    [("remote_host", None), ("remote_host", "a/b"), ("remote_port", 0), ("tandem_rendezvous", "a b")],
)
def test_rendezvous_when_a_key_is_wrong_then_names_it(key: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Rendezvous.from_params({**Rendezvous("h", 1, "abc").to_params(), key: value})
    assert caught.value.param == f"kv_transfer_params.{key}"
