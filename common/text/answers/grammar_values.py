"""Rules for the arguments of calls: JSON as a schema says, and parameters that are written one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from common.errors import InvalidRequestError
from common.openai.json_schema import is_regex
from common.text.answers.formats import CallLayout
from common.text.answers.values import Known, resolved, types_of

_MARKER = re.compile(r"<[^<>\s]+>")
_SLASHES = re.compile(r"\\(?s:.)|[/\n]")
_ESCAPED = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}
_BOUNDED = ("minLength", "maxLength")
MAX_RULES_CHARS = 1_000_000
"""Of all rules of parameters: the largest ``max_chars`` that a grammar's limits may have. Each value that is JSON has
all definitions of its schema in its rule."""
_JSON_TYPES = ("integer", "number", "object", "array")


def lark_text(text: str, token_id: Callable[[str], int | None]) -> str:
    """``text`` as literals of a rule; its special tokens by id."""
    parts: list[str] = []
    plain = ""
    place = 0
    for match in _MARKER.finditer(text):
        number = token_id(match.group())
        if number is None:
            continue
        plain = text[place : match.start()]
        parts += [json.dumps(plain, ensure_ascii=False)] if plain else []
        parts.append(f"<[{number}]>")
        place = match.end()
    plain = text[place:]
    return " ".join([*parts, *([json.dumps(plain, ensure_ascii=False)] if plain else [])])


def schema_rule(schema: Mapping[str, Any], layout: CallLayout, *, strict: bool) -> str:
    """JSON of ``schema`` with the layout's separators. ``strict``: a keyword that cannot be held to is refused."""
    options: dict[str, Any] = {
        "item_separator": layout.item_separator,
        "key_separator": layout.key_separator,
        "whitespace_flexible": False,
        # As templates and clients write strings: \u0009 would come back as \t, and the next prompt have other tokens.
        "json_allowed_escapes": 'nrbtf\\"',
    }
    if not strict:
        options["lenient"] = True
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


class ParameterRules:
    """One function's arguments as parameters in the order of the schema, each with its own rule. What is referred to
    has one rule, in which it may be referred to again. ``name``: of the rule of all arguments; ``param``: the request's
    field, for errors."""

    def __init__(
        self,
        layout: CallLayout,
        token_id: Callable[[str], int | None],
        rules: list[str],
        *,
        name: str,
        strict: bool,
        param: str,
    ) -> None:
        self._layout = layout
        self._token_id = token_id
        self._rules = rules
        self._name = name
        self._strict = strict
        self._param = param
        self._chars_left = MAX_RULES_CHARS - sum(map(len, rules))
        self._known: Known = {}
        # By identity: rules of what was referred to, of which some are to be made.
        self._targets: dict[int, str] = {}
        self._waiting: list[tuple[str, Any]] = []

    def add(self, schema: Mapping[str, Any]) -> None:
        """Adds the rules of all arguments.

        Raises:
            InvalidRequestError: they are longer than any grammar may be.
        """
        schema = resolved(schema, schema)
        schema = schema if isinstance(schema, Mapping) else {}
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        required = {key for key in required if isinstance(key, str)} if isinstance(required, list) else ()
        each: list[tuple[str, bool]] = []
        for index, (key, value) in enumerate(properties.items()):
            rule = f"{self._name}_{index}"
            self._add_parameter(rule, str(key), value, schema)
            each.append((rule, key in required))
        while self._waiting:
            target, value = self._waiting.pop()
            self._append(f"{target}: " + " | ".join(self._values(target, value, schema)))
        separator = self._layout.item_separator if self._layout.quote else ""
        self._append(f"{self._name}: {self._listed(each, separator)}")

    def _append(self, rule: str) -> None:
        self._chars_left -= len(rule)
        if self._chars_left < 0:
            raise InvalidRequestError(
                f"{self._param} makes a grammar of more than {MAX_RULES_CHARS} characters", param=self._param
            )
        self._rules.append(rule)

    def _listed(self, each: list[tuple[str, bool]], separator: str) -> str:
        """Parameters in order, with a separator between those that are there."""
        if not separator:
            return " ".join(rule if is_required else f"{rule}?" for rule, is_required in each) or '""'
        comma = json.dumps(separator)
        # From the last one back: what may follow a parameter, and what may begin at it.
        following = '""'
        beginning = '""'
        for index in range(len(each) - 1, -1, -1):
            rule, is_required = each[index]
            first, after = f"{self._name}_first_{index}", f"{self._name}_after_{index}"
            skip_first, skip_after = ("", "") if is_required else (f" | {beginning}", f" | {following}")
            self._append(f"{first}: {rule} {following}{skip_first}")
            self._append(f"{after}: {comma} {rule} {following}{skip_after}")
            beginning, following = first, after
        return beginning

    def _add_parameter(self, rule: str, key: str, schema: Any, root: Mapping[str, Any]) -> None:
        layout = self._layout
        head = self._text(layout.parameter_begin + key + layout.parameter_middle)
        kinds = [head + " " + value for value in self._ways(rule, schema, root)]
        self._append(f"{rule}: " + " | ".join(kinds))

    def _ways(self, rule: str, schema: Any, root: Mapping[str, Any]) -> list[str]:
        """``_values`` of what may refer to something, which has a rule of its own."""
        target = resolved(schema, root)
        if target is schema:
            return self._values(rule, schema, root)
        if id(target) not in self._targets:
            self._targets[id(target)] = f"{self._name}_to_{len(self._targets)}"
            self._waiting.append((self._targets[id(target)], target))
        return [self._targets[id(target)]]

    def _values(self, rule: str, schema: Any, root: Mapping[str, Any]) -> list[str]:
        """Ways to write a value, each with what ends it."""
        layout, end = self._layout, self._text(self._layout.parameter_end)
        if not isinstance(schema, Mapping):
            schema = {}
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list) and choices:
            return [f"{self._text(layout.write_value(choice))} {end}" for choice in choices]
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                found = []
                for number, option in enumerate(schema[word]):
                    found += self._ways(f"{rule}_{number}", option, root)
                return found
        types = types_of(schema, root, self._known) or {"string"}
        ways: list[str] = []
        for word, kind in zip(layout.words, ("true", "false", "null"), strict=True):
            if ("null" if kind == "null" else "boolean") in types:
                ways.append(f"{self._text(word)} {end}")
        json_types = [kind for kind in _JSON_TYPES if kind in types]
        if json_types:
            value = {**schema, "type": json_types if len(json_types) > 1 else json_types[0]}
            for defs in ("$defs", "definitions"):
                if defs in root:
                    value[defs] = root[defs]
            self._append(f"{rule}_json: {schema_rule(value, layout, strict=self._strict)}")
            ways.append(f"{rule}_json {end}")
        if "string" in types:
            ways.append(self._string(rule, schema))
        return ways

    def _string(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Text up to what ends it."""
        layout = self._layout
        low, high = (schema.get(word) for word in _BOUNDED)
        is_bounded = isinstance(low, int) or isinstance(high, int)
        times = f"{{{low or 0},{high if isinstance(high, int) else ''}}}" if is_bounded else "*"
        text = f"[^{layout.quote}\\\\\\n]{times}" if layout.quote else f"(?s:.){times}"
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and (self._strict or is_regex(_anchored(pattern))):
            text = _anchored(pattern)
        text = _SLASHES.sub(_escaped, text)
        if layout.quote:
            quote = json.dumps(layout.quote)
            return f"{quote} /{text}/ {quote}"
        self._append(f"{rule}_text[suffix={json.dumps(layout.parameter_end)}]: /{text}/")
        return f"{rule}_text"

    def _text(self, text: str) -> str:
        return lark_text(text, self._token_id)


def _escaped(found: re.Match[str]) -> str:
    """As it may stand between slashes."""
    return _ESCAPED.get(found[0], found[0])


def _anchored(pattern: str) -> str:
    """A pattern that may match anywhere, as one for the whole text."""
    begin = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if pattern.endswith("$") else "(?s:.*)"
    return f"{begin}({pattern.removeprefix('^').removesuffix('$')}){end}"
