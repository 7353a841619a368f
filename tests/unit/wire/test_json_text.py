from __future__ import annotations

import json

import pytest

from common.errors import InvalidRequestError
from common.wire.json_text import LEG_EXTRA, LONG_BYTES, MAX_ITEMS, MAX_VALUES, JsonBounds, parse_json

LONG = b'"' + b"x" * LONG_BYTES + b'"'


def of_long(value: bytes) -> object:
    """``value``, read from a long text."""
    read = parse_json(b"[" + value + b"," + LONG + b"]", JsonBounds())
    assert isinstance(read, list)
    return read[0]


@pytest.mark.parametrize(
    "value",
    [
        *("0", "-0.0", "1E5", "9223372036854775807", "18446744073709551615", "-9223372036854775808", "true", "null"),
        *('"a\\"b\\\\"', '"\\ud83d\\ude00"', '{"b":1,"b":2}', "[ ]", '"12345678901234567890"', '"\\\\\\"[{,"'),
        *(
            '{"12345678901234567890":"9e99"}',
            "0.1234567890123456789012345",
            "12345678901234567890123.5",
            "1e-12345678901234567890",
        ),
    ],
)
def test_long_text_when_it_is_json_then_read_as_pythons_json_does(value: str) -> None:
    assert repr(of_long(value.encode())) == repr(json.loads(value))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"18446744073709551616", "beyond 64 bits"),
        (b"-9223372036854775809", "beyond 64 bits"),
        (b"9" * 5000, "beyond 64 bits"),
        (b"1e999", "infinity"),
        (b"NaN", "not JSON"),
        (b'"\\ud800"', "surrogate"),
        (b'"\xff"', "UTF-8"),
        (b"[" * 64 + b"]" * 64, "64 levels"),
        (b"[" * 2000 + b"]" * 2000, "64 levels"),
        (b"1 2", "line 1 column"),
    ],
)
def test_long_text_when_it_is_wrong_then_refused_with_the_reason(value: bytes, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as refused:
        of_long(value)
    assert refused.value.code == "invalid_json"


@pytest.mark.parametrize(
    "item",
    [
        *(b"{}", b'[""]', b'"\\""'),
        *(pytest.param(item, marks=pytest.mark.full) for item in (b"[]", b'""', b'{"k":0}', b"[[]]", b'"\\\\"')),
    ],
)
def test_bounds_when_all_items_are_taken_then_one_more_is_refused(item: bytes) -> None:
    per_item = item.count(b"[") + item.count(b"{") + (b'"' in item)
    num_items = (MAX_ITEMS - 1) // per_item
    assert len(parse_json(b"[" + b",".join([item] * num_items) + b"]", JsonBounds())) == num_items  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=f"the body must hold at most {MAX_ITEMS} objects") as refused:
        parse_json(b"[" + b",".join([item] * (num_items + 1)) + b"]", JsonBounds())
    assert refused.value.code == "too_many_values"


def test_bounds_when_all_values_are_taken_then_one_more_is_refused() -> None:
    assert len(parse_json(b"[" + b",".join([b"7"] * MAX_VALUES) + b"]", JsonBounds())) == MAX_VALUES  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=f"{MAX_VALUES} values"):
        parse_json(b"[" + b",".join([b"7"] * (MAX_VALUES + 1)) + b"]", JsonBounds())


@pytest.mark.parametrize("mark", ["[", "{", ",", '\\"', "\\\\", '\\\\\\"{'])
def test_bounds_when_a_text_is_full_of_marks_then_only_the_text_counts(mark: str) -> None:
    raw = b'["' + mark.encode() * (MAX_VALUES + 1) + b'"]'
    assert parse_json(raw, JsonBounds()) == [json.loads(f'"{mark}"') * (MAX_VALUES + 1)]


def test_bounds_when_several_texts_share_them_then_what_one_took_the_next_lacks() -> None:
    bounds = JsonBounds()
    most = b"[" + b",".join([b"[]"] * (MAX_ITEMS - 10)) + b"]"
    parse_json(most, bounds)
    assert parse_json(b'{"a":[]}', bounds, "arguments") == {"a": []}
    with pytest.raises(InvalidRequestError, match="arguments must hold"):
        parse_json(b"[[],[],[],[],[],[]]", bounds, "arguments")


def test_bounds_when_a_proxy_has_added_to_a_body_then_its_nodes_take_what_it_took() -> None:
    most = b"[" + b",".join([b"[]"] * (MAX_ITEMS - 1)) + b"]"
    assert parse_json(most, JsonBounds())
    leg = most[:-1] + b',{"do_remote_decode":true}]'
    assert parse_json(leg, JsonBounds(LEG_EXTRA))
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_ITEMS} objects"):
        parse_json(leg, JsonBounds())
