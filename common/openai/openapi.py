"""``/openapi.json`` and ``/docs``: what an app serves, from the models that its bodies are checked with.

OpenAPI 3.1, whose schemas are JSON Schema as pydantic writes it. ``/docs`` is one plain page of the same: no script, no
foreign request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from common.openai import answers
from common.openai.bodies.base import ORIGIN_KEY, REQUIRED_KEY
from common.openai.bodies.models import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from common.wire import routes

OPENAPI_VERSION = "3.1.0"
_REF = "#/components/schemas/"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A public route. ``body`` None: a GET. ``answer`` None: text, not JSON. ``is_open``: it needs no key.
    ``streams``: with ``stream`` true the answer is server-sent events."""

    path: str
    name: str
    summary: str
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    streams: bool = False
    is_open: bool = False


ENDPOINTS = (
    Endpoint(
        routes.COMPLETIONS_ROUTE,
        "createCompletion",
        "Continue texts.",
        CompletionBody,
        answers.Completion,
        streams=True,
    ),
    Endpoint(routes.CHAT_ROUTE, "createChat", "Answer a conversation.", ChatBody, answers.ChatCompletion, streams=True),
    Endpoint(routes.MODELS_ROUTE, "listModels", "The served model.", answer=answers.ModelList),
    Endpoint(routes.MODELS_ROUTE + "/{id}", "getModel", "The served model, by its name.", answer=answers.Model),
    Endpoint(routes.TOKENIZE_ROUTE, "tokenize", "Tokens of a text or a conversation.", TokenizeBody, answers.Tokens),
    Endpoint(routes.DETOKENIZE_ROUTE, "detokenize", "The text of tokens.", DetokenizeBody, answers.Text),
    Endpoint(routes.HEALTH_ROUTE, "health", "Whether the process lives.", answer=answers.Status, is_open=True),
    Endpoint(routes.READY_ROUTE, "ready", "Whether it takes requests.", answer=answers.Status, is_open=True),
    Endpoint(routes.VERSION_ROUTE, "version", "Installed versions.", answer=answers.Versions, is_open=True),
    Endpoint(routes.METRICS_ROUTE, "metrics", "Metrics for Prometheus.", is_open=True),
)
"""Of nodes and of the proxy."""


def openapi_document(title: str, version: str, endpoints: Sequence[Endpoint] = ENDPOINTS) -> dict[str, Any]:
    """The OpenAPI document of an app."""
    models: list[tuple[type[BaseModel], Any]] = [(answers.Error, "validation")]
    models += [(model, "validation") for each in endpoints for model in (each.body, each.answer) if model is not None]
    found, schemas = models_json_schema(list(dict.fromkeys(models)), ref_template=_REF + "{model}")
    for name, schema in schemas["$defs"].items():
        # Of two classes of one name pydantic says the modules; who generates code takes titles for names.
        parts = name.split("__")
        schema["title"] = parts[-3].title() + parts[-1] if len(parts) > 2 else name
        _tidy(schema)
    refs = {model: ref for (model, _), ref in found.items()}
    paths: dict[str, Any] = {}
    for each in endpoints:
        paths[each.path] = {"get" if each.body is None else "post": _operation(each, refs)}
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _tidy(schema: dict[str, Any]) -> None:
    """Takes out defaults that generators stumble over: null, objects and lists, and words for a number."""
    required = []
    for name, each in schema.get("properties", {}).items():
        default = each.get("default", ...)
        types = {kind.get("type") for kind in each.get("anyOf", [each])}
        if default is None or isinstance(default, dict | list) or (isinstance(default, str) and "string" not in types):
            del each["default"]
        if each.pop(REQUIRED_KEY, False):
            required.append(name)
    if required:
        schema["required"] = required


def _operation(each: Endpoint, refs: Mapping[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if each.answer is not None:
        content = {"application/json": {"schema": refs[each.answer]}}
    if each.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": refs[answers.Error]}}
    operation: dict[str, Any] = {
        "operationId": each.name,
        "summary": each.summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {"description": "An error.", "content": error},
        },
        "security": [] if each.is_open else [{}, {"key": []}],
    }
    if "{id}" in each.path:
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if each.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": refs[each.body]}}}
    return operation


# --- tables of fields -------------------------------------------------------------------------------------------------


def field_rows(model: type[BaseModel]) -> list[tuple[str, str, str, str]]:
    """Name, type with bounds, whose field it is, and what it does, for each field of a body."""
    schema = model.model_json_schema()
    return [
        (name, _type(each, schema.get("$defs", {})), str(each.get(ORIGIN_KEY, "")), _meaning(each))
        for name, each in schema["properties"].items()
    ]


def _meaning(schema: Mapping[str, Any]) -> str:
    default = schema.get("default")
    shown = "" if default in (None, [], {}) else f" Default: `{str(default).lower()}`."
    return str(schema.get("description", "")) + shown


def _type(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        kinds = [_type(each, definitions) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        inner = definitions[schema["$ref"].rpartition("/")[2]]
        return "object: " + ", ".join(f"`{name}`" for name in inner["properties"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{each}`" for each in schema.get("enum", [schema.get("const")]))
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return "list of " + _type(schema["items"], definitions).replace("object: ", "objects: ")
    bounds = [
        f"{sign} {schema[key]:g}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"))
        if key in schema and abs(schema[key]) < 2**31 - 1
    ]
    if "maxLength" in schema:
        bounds.append(f"{schema.get('minLength', 0)} to {schema['maxLength']} characters")
    return kind + (" " + ", ".join(bounds) if bounds else "")


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { border: 1px solid #8886; padding: .25rem .6rem; text-align: left; vertical-align: top }
:root { color-scheme: light dark }
"""


def docs_page(title: str, endpoints: Sequence[Endpoint] = ENDPOINTS) -> str:
    """``/docs``: an HTML page."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{escape(title)}: API</title><style>{_STYLE}</style>",
        f"<h1>{escape(title)}: API</h1><p>As <a href='{routes.OPENAPI_ROUTE}'>OpenAPI</a>.</p><ul>",
    ]
    for each in endpoints:
        route = f"<code>{_method(each)} {each.path}</code>"
        parts.append(f"<li><a href='#{each.name}'>{route}</a>: {escape(each.summary)}")
    parts.append("</ul>")
    for each in endpoints:
        if each.body is None:
            continue
        parts.append(f"<h2 id={each.name}><code>POST {each.path}</code></h2><p>{escape(each.summary)}</p>")
        parts.append("<table><tr><th>field<th>type<th>of<th>meaning")
        for name, *cells in field_rows(each.body):
            parts.append("<tr>" + "".join(f"<td>{_html(cell)}" for cell in (f"`{name}`", *cells)))
        parts.append("</table>")
    return "".join(parts)


def _method(each: Endpoint) -> str:
    return "GET" if each.body is None else "POST"


def _html(text: str) -> str:
    """Text with code in backticks."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))
