"""Which outcome an error or an answer is: here where it was raised, and there where it was read back."""

from __future__ import annotations

import asyncio

import pytest

from common import errors
from common.errors import RequestDroppedError, TandemError
from common.metrics.outcomes import Outcome, outcome_of, outcome_of_answer
from common.openai.errors import error_body, read_error


def rejected_leg(status: int, code: str) -> TandemError:
    return errors.PrefillLegRejectedError("no", status=status, type="t", code=code, param=None)


OUTCOMES: dict[Outcome, list[BaseException]] = {
    Outcome.ABORT: [asyncio.CancelledError(), GeneratorExit(), errors.RequestAbortedError("left")],
    Outcome.STALL: [errors.ClientStalledError("stands still")],
    Outcome.REJECTED: [
        errors.InvalidRequestError("n must be at least 1", param="n"),
        errors.InvalidRequestError("too many tokens", code="over_token_limit"),
        errors.AuthenticationError("no key"),
        errors.ModelNotFoundError("no model"),
        errors.BodyTooLargeError("large"),
        errors.BodyTimeoutError("slow"),
        errors.BodyEncodingError("gzip"),
        rejected_leg(413, "body_too_large"),
        RequestDroppedError("busy", dropped="rejected-concurrency", code="rate_limit_exceeded"),
        RequestDroppedError("busy", dropped="rejected-rate-limit", code="rate_limit_exceeded"),
    ],
    Outcome.DEADLINE: [
        errors.RequestDeadlineError("too late"),
        RequestDroppedError("too late", dropped="rejected-deadline", code="deadline_unreachable"),
        RequestDroppedError("too late", dropped="evicted-deadline", code="deadline_unreachable"),
    ],
    Outcome.CAPACITY: [
        errors.QueueFullError("full"),
        errors.DrainingError("drains"),
        rejected_leg(429, "queue_full"),
        RequestDroppedError("full", dropped="rejected-queue-full"),
        RequestDroppedError("waited", dropped="evicted-timeout"),
        RequestDroppedError("others first", dropped="evicted-priority"),
    ],
    Outcome.ERROR: [
        RuntimeError("a bug"),
        TandemError("the engine failed on this request"),
        errors.TransferError("lost"),
        errors.NodeUnavailableError("no node is ready"),
        errors.NodeUnavailableError("cut off", code="shutting_down"),
        errors.DeadlineExceededError("a node is silent"),
    ],
}
CASES = [(outcome, error) for outcome, errors_of_it in OUTCOMES.items() for error in errors_of_it]


@pytest.mark.parametrize(("outcome", "error"), CASES, ids=lambda value: repr(value))
def test_outcome_when_a_request_ends_with_an_error_then_is_by_whose_fault(
    outcome: Outcome, error: BaseException
) -> None:
    assert outcome_of(error) is outcome


@pytest.mark.parametrize(
    ("outcome", "error"), [case for case in CASES if isinstance(case[1], TandemError) and not case[1].dropped], ids=repr
)
def test_outcome_when_an_error_was_read_back_from_an_answer_then_is_the_same(
    outcome: Outcome, error: TandemError
) -> None:
    again = read_error(error_body(error), error.status)
    assert outcome_of(again) is outcome
    assert (again.message, again.type, again.code, again.param) == (error.message, error.type, error.code, error.param)


def test_event_without_a_status_when_read_back_then_its_type_says_whose_fault_it_was() -> None:
    kinds = ["invalid_request_error", "rate_limit_error", "not_found_error", "server_error", "timeout_error", "other"]
    found = [outcome_of(read_error({"error": {"message": "m", "type": kind, "code": 17}})) for kind in kinds]
    assert found == ["rejected", "capacity", "rejected", "error", "error", "error"]


@pytest.mark.parametrize("body", [None, [], "error", {}, {"error": "no"}, {"error": {}}, {"error": {"message": 5}}])
def test_body_when_it_is_no_error_then_reading_it_back_says_so(body: object) -> None:
    with pytest.raises(ValueError, match="not an error"):
        read_error(body, 500)


@pytest.mark.parametrize(
    ("reasons", "outcome"),
    [
        (["stop"], "stop"),
        (["stop", "length"], "length"),
        (["length", "error"], "error"),
        (["tool_calls"], "stop"),
        ([], "stop"),
    ],
)
def test_answer_when_complete_then_its_choices_say_how_it_ended(reasons: list[str], outcome: str) -> None:
    assert outcome_of_answer(reasons) == outcome
