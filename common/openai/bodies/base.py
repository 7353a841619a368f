"""The base of all bodies, and pydantic's errors in our words.

Strict: numbers are not text, booleans are not numbers, nothing is converted. ``null`` and absent both mean "the
default". A value that does not fit is an ``InvalidRequestError`` that names the field, the value and the bound, which
is read from the field's own declaration. Large values have validators of their own (``values``), which raise the same
error and pass through pydantic as they are.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import InvalidRequestError
from common.wire.fields import bounds_in_words, shown

Origin = Literal["OpenAI", "Anthropic", "vLLM", "SGLang", "Tandem"]
"""Whose API a field is of."""
ORIGIN_KEY = "x-origin"
REQUIRED_KEY = "x-required"

_Body = TypeVar("_Body", bound="Body")
_BOUNDS = ("ge", "le", "gt", "min_length", "max_length", "pattern")
_NAMES: Mapping[object, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


class Body(BaseModel):
    """A JSON object of a request. Names that it does not declare are kept in ``model_extra``."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, arbitrary_types_allowed=True)


def declare(
    origin: Origin,
    description: str,
    *,
    default: Any = None,
    means: object = None,
    is_required: bool = False,
    **bounds: Any,
) -> Any:
    """A field of a body.

    Args:
        default: its value when the body does not give it; of dicts and lists an empty one.
        is_required: in the schema; the code that reads the field says so itself, in its own words.
        means: what is done then, where ``default`` does not say it.
        bounds: ``ge``, ``le``, ``gt``, ``min_length``, ``max_length``, ``pattern``.
    """
    extra: dict[str, Any] = {ORIGIN_KEY: origin}
    if is_required:
        extra[REQUIRED_KEY] = True
    if means is not None:
        extra["default"] = means
    # Pydantic would make a deep copy of what can be changed, for each body.
    given = {"default_factory": type(default)} if isinstance(default, dict | list) else {"default": default}
    return Field(**given, description=description, json_schema_extra=extra, **bounds)


MAX_FIELDS = 1000
"""Of an object with named fields: many times what anybody knows. pydantic reads an object in one piece, and 180,000
fields held up everything else in the process for 100 ms."""


def read_body(model: type[_Body], body: Mapping[str, Any], *, prefix: str = "") -> _Body:
    """``body`` as ``model``; ``prefix``: of its fields' names, where it is part of another one. Raises
    InvalidRequestError naming field, value and bound."""
    if len(body) > MAX_FIELDS:
        name = prefix.removesuffix(".")
        what = f"must have at most {MAX_FIELDS} fields, got {len(body)}"
        raise InvalidRequestError(f"{name or 'the body'} {what}", param=name or None)
    try:
        return model.model_validate(body)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False)[0]
    # Not chained: pydantic's error holds the whole body.
    if first["type"] == "missing":
        name = prefix + _name(first["loc"])
        raise InvalidRequestError(f"{name} is required", param=name)
    raise _in_our_words(model, first["loc"], first["input"], prefix)


def _in_our_words(model: type[Body], place: tuple[int | str, ...], value: Any, prefix: str) -> InvalidRequestError:
    metadata: list[Any] = []
    inner: Any = model
    for part in place:
        if isinstance(inner, type) and issubclass(inner, Body) and part in inner.model_fields:
            field = inner.model_fields[part]
            metadata, inner = field.metadata, _without_none(field.annotation)
        elif get_origin(inner) is list:
            metadata, [inner] = [], get_args(inner)
    name = prefix + _name(place) or "the body"
    bounds = {key: getattr(each, key) for each in metadata for key in _BOUNDS if hasattr(each, key)}
    if isinstance(value, str) and not bounds.get("min_length", 0) <= len(value) <= bounds.get("max_length", len(value)):
        expected = f"a string of {bounds['min_length']} to {bounds['max_length']} characters"
        return InvalidRequestError(f"{name} must be {expected}, got {len(value)} characters", param=name)
    pattern = f" that matches {bounds['pattern']}" if "pattern" in bounds else ""
    expected = _kind(inner) + pattern + bounds_in_words(bounds.get("ge"), bounds.get("le"), bounds.get("gt"))
    return InvalidRequestError(f"{name} must be {expected}, got {shown(value)}", param=name)


def _name(place: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    rest = [each for each in get_args(annotation) if each is not type(None)]
    return rest[0] if len(rest) == 1 else annotation


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) is list:
        return "a list"
    return _NAMES.get(annotation, "an object")
