"""Reading what the other APIs' bodies have in common: names that are refused, and names that go on to the chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import PlainValidator

from common.errors import InvalidRequestError
from common.openai.bodies.base import Body, read_body
from common.openai.messages import MAX_MESSAGES
from common.wire.fields import invalid, shown

UNSUPPORTED = "unsupported_parameter"
"""``code`` of a refusal of what the API defines and this service does not build."""


def texts(name: str) -> PlainValidator:
    """Of a field that is a list of texts. Of a long list pydantic itself would make an error of each that is none."""

    def check(value: object) -> list[str] | None:
        if value is None:
            return None
        if not isinstance(value, list):
            invalid(name, value, "a list of strings")
        for index, item in enumerate(value):
            if not isinstance(item, str) or not item:
                invalid(f"{name}[{index}]", item, "a string that is not empty")
        return value

    return PlainValidator(check, json_schema_input_type=list[str] | None)


_Body = TypeVar("_Body", bound=Body)


def passed(body: Body) -> dict[str, Any]:
    """What the other API does not define: the chat's own fields, with which it does what it does with them in a chat.

    Raises InvalidRequestError for several answers, which the other APIs have no place for.
    """
    extra = dict(body.model_extra or {})
    if extra.pop("n", None) not in (None, 1):
        refuse("n", (body.model_extra or {})["n"], "one answer is given")
    return extra


def given(**fields: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def as_given(body: Body) -> dict[str, Any]:
    """What the client gave of ``body``, under its own names. Not copied: a call that copies holds the interpreter
    for as long as the body is."""
    fields = type(body).model_fields
    names = {name: fields[name].alias or name if name in fields else name for name in body.model_fields_set}
    return {alias: getattr(body, name) for name, alias in names.items()}


def refuse(name: str, value: object, reason: str) -> NoReturn:
    raise InvalidRequestError(f"{name} {shown(value)} is not supported: {reason}", param=name, code=UNSUPPORTED)


def refuse_given(body: Mapping[str, Any], reasons: Mapping[str, str], *, prefix: str = "") -> None:
    """Raises InvalidRequestError for the first field of ``reasons`` that says anything."""
    for name, reason in reasons.items():
        if body.get(name) not in (None, False, [], {}, ""):
            refuse(prefix + name, body[name], reason)


def objects(name: str, value: object, *, at_most: int = MAX_MESSAGES) -> Sequence[Mapping[str, Any]]:
    """A list of objects. One Python call each: reading a long list never holds the interpreter for long."""
    if not isinstance(value, list):
        invalid(name, value, "a list")
    if len(value) > at_most:
        raise InvalidRequestError(f"{name} must hold at most {at_most} entries, got {len(value)}", param=name)
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            invalid(f"{name}[{index}]", item, "an object")
    return value


def read_kind(
    name: str, value: Mapping[str, Any], kinds: Mapping[str, type[_Body]], default: str | None = None, *, why: str
) -> _Body:
    """``value`` as the model of its ``type``. Raises InvalidRequestError naming what is wrong with it; ``why`` a type
    that is none of ``kinds`` is refused."""
    kind = value.get("type", default)
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidRequestError(
            f"{name}.type {shown(kind)} is not supported: {why}", param=f"{name}.type", code=UNSUPPORTED
        )
    return read_body(kinds[kind], value, prefix=f"{name}.")
