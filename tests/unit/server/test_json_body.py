from __future__ import annotations

import json

import pytest

from common.server.json_body import MAX_JSON_DEPTH, parse_json_object


@pytest.mark.parametrize(
    "value",
    [
        *("0", "-0", "-0.0", "1E5", "1e999", "-1e400", "5e-324", "0.1000000000000000055", "9007199254740993.0"),
        *("9223372036854775807", "-9223372036854775809", "18446744073709551616", "1" * 400, "1e-5000", "true", "null"),
        *(
            '"\\u0000\\/\\ud83d\\ude00"',
            '"9223372036854775808"',
            '{"b":1,"b":18446744073709551616}',
            '{"b":1,"b":2}',
            "[ ]",
        ),
    ],
)
def test_body_when_it_is_json_then_read_as_pythons_json_does(value: str) -> None:
    raw = f'{{"a":{value}}}\n'
    got = parse_json_object(raw.encode())
    assert repr(got) == repr(json.loads(raw))


def test_deepest_allowed_body_and_many_flat_lists_are_read() -> None:
    depth = MAX_JSON_DEPTH - 1
    assert parse_json_object(b'{"a":' + b"[" * depth + b"]" * depth + b"}")
    assert len(parse_json_object(b'{"a":[' + b"[1]," * 500 + b'[1]],"s":"\\ud83d\\ude00"}')["a"]) == 501
