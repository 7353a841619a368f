from __future__ import annotations

import json
import threading

import httpx
import pytest
from fastapi import FastAPI, Request

from common.server.gate import BODY_THREADS, install_middleware
from common.server.json_body import parse_json_object, read_json_object, run_for_body
from common.wire.json_text import LONG_BYTES, MAX_DEPTH


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
    depth = MAX_DEPTH - 1
    assert parse_json_object(b'{"a":' + b"[" * depth + b"]" * depth + b"}")
    assert len(parse_json_object(b'{"a":[' + b"[1]," * 500 + b'[1]],"s":"\\ud83d\\ude00"}')["a"]) == 501


@pytest.mark.asyncio
async def test_work_for_a_body_when_the_body_is_long_then_it_is_on_the_gates_threads() -> None:
    app = FastAPI()
    install_middleware(app)

    @app.post("/where")
    async def where(request: Request) -> str:
        await read_json_object(request)
        return await run_for_body(request, lambda: threading.current_thread().name)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
        for num_bytes in (LONG_BYTES, LONG_BYTES + 1):
            answer = await client.post("/where", content=b'{"a":"' + b"x" * (num_bytes - 8) + b'"}')
            is_on_loop = answer.json() == threading.current_thread().name
            assert is_on_loop is (num_bytes <= LONG_BYTES), answer.json()
            assert is_on_loop or answer.json() in [f"bodies_{index}" for index in range(BODY_THREADS)]
