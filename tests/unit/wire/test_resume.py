"""The two fields of streams that move: who may send them, what they may say, and the line that goes with each event."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequestError
from common.openai.protocol import parse_chat, parse_completion
from common.wire.resume import RESUME_KEY, STREAM_STATE_KEY, Resume, StreamState, read_state_line, state_line

BODY: dict[str, Any] = {"prompt": "a", "stream": True, STREAM_STATE_KEY: True}
RESUME = {"output_token_ids": [4, 5], "created": 7, "num_cached_tokens": 3}


def test_fields_when_they_come_from_a_peer_then_are_read_and_else_ignored() -> None:
    chat = {**BODY, "prompt": None, "messages": [{"role": "user", "content": "a"}], RESUME_KEY: RESUME}
    for parsed in (
        parse_completion({**BODY, RESUME_KEY: RESUME}, is_from_peer=True),
        parse_chat(chat, is_from_peer=True),
    ):
        assert parsed.resume == Resume((4, 5), 7, 3)
        assert parsed.reports_state
        assert parsed.resume.to_json() == RESUME
    for parsed in (parse_completion({**BODY, RESUME_KEY: "?"}), parse_chat(chat)):
        assert (parsed.resume, parsed.reports_state) == (None, False)


def test_prefill_leg_when_it_is_resumed_then_reads_the_tokens_only() -> None:
    body = {**BODY, "stream": False, "n": 2, RESUME_KEY: RESUME, "kv_transfer_params": {"do_remote_decode": True}}
    parsed = parse_completion(body, is_from_peer=True)
    assert parsed.resume is not None
    assert not parsed.reports_state


@pytest.mark.parametrize("value", [[], "x", {}, {"output_token_ids": []}, {"output_token_ids": [1.5]}])
def test_resume_when_it_is_no_tokens_then_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_completion({**BODY, RESUME_KEY: value}, is_from_peer=True)
    assert str(caught.value.param).startswith(RESUME_KEY)


@pytest.mark.parametrize("fields", [{"stream": False}, {"n": 2}, {"echo": True, "logprobs": 1}])
def test_state_when_the_answer_cannot_be_cut_then_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=STREAM_STATE_KEY):
        parse_completion({**BODY, **fields}, is_from_peer=True)


def test_state_when_a_chat_is_echoed_with_logprobs_then_reported() -> None:
    body = {**BODY, "prompt": None, "messages": [{"role": "user", "content": "a"}], "echo": True, "logprobs": True}
    assert parse_chat(body, is_from_peer=True).reports_state


def test_state_line_when_read_then_says_what_was_written() -> None:
    line = state_line([1, 2], created=7, num_cached_tokens=0, is_end=True, stream_id="a-1")
    assert line.startswith(b": ")  # a comment, should it ever reach a client
    assert line.endswith(b"}\n")
    assert read_state_line(line.rstrip()) == StreamState((1, 2), 7, 0, is_end=True, stream_id="a-1")
    assert read_state_line(state_line([3], stream_id="a-1").rstrip()) == StreamState((3,))
    assert read_state_line(b': tandem {"token_ids":[3],"created":7,"num_cached_tokens":0}').stream_id is None


@pytest.mark.parametrize("line", [b": tandem ", b": tandem []", b": tandem {", b': tandem {"token_ids": ["x"]}'])
def test_state_line_when_it_is_none_then_value_error(line: bytes) -> None:
    with pytest.raises(ValueError, match="not the state of a stream"):
        read_state_line(line)
