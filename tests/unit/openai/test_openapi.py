"""``/openapi.json`` is an OpenAPI document of what is served, and generates a client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fastapi.testclient import TestClient
from openapi_spec_validator import OpenAPIV31SpecValidator

from common.config.proxy import ProxyConfig
from common.errors import InvalidRequestError
from common.openai.bodies.models import ChatBody, CompletionBody
from common.openai.openapi import ENDPOINTS, openapi_document
from common.openai.protocol import parse_chat
from common.server.gate import install_middleware
from proxy.app import create_app


@pytest.fixture(scope="module")
def client() -> TestClient:
    """Of a proxy that is not started: the routes need nothing of it."""
    return TestClient(create_app(ProxyConfig(decode=("http://127.0.0.1:1",))))


def served(app: Any) -> set[tuple[str, str]]:
    """Methods and paths."""
    found = set()
    for route in app.routes:
        for method in getattr(route, "methods", None) or ():
            found.add((method.lower(), route.path.replace("{model:path}", "{id}")))
    return found


def test_document_of_the_proxy_when_validated_then_is_openapi_and_has_every_public_route(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    OpenAPIV31SpecValidator(document).validate()
    described = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert described <= served(client.app)
    public = {(method, path) for method, path in served(client.app) if path.startswith("/v1/") and method != "head"}
    assert public == {(method, path) for method, path in described if path.startswith("/v1/")}


def test_document_when_it_is_damaged_then_the_validator_says_so() -> None:
    document = openapi_document("x", "1")
    del document["info"]["title"]
    assert list(OpenAPIV31SpecValidator(document).iter_errors())


@pytest.mark.parametrize(("name", "model"), [("CompletionBody", CompletionBody), ("ChatBody", ChatBody)])
def test_schema_of_a_body_when_compared_with_its_model_then_has_every_field_and_nothing_internal(
    name: str, model: Any
) -> None:
    properties = openapi_document("x", "1")["components"]["schemas"][name]["properties"]
    assert properties.keys() == model.model_fields.keys()
    assert not [field for field in properties if field.startswith("tandem_") or field == "kv_transfer_params"]
    assert openapi_document("x", "1")["components"]["schemas"][name]["required"] in (["prompt"], ["messages"])
    assert all(field["description"] and field["x-origin"] for field in properties.values())
    assert properties["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}


def test_content_when_it_has_parts_of_each_kind_then_the_schema_allows_what_is_taken() -> None:
    document = openapi_document("x", "1")
    schema = {"$ref": "#/components/schemas/ChatMessage", "components": document["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    mark = {"cache_control": {"type": "ephemeral"}}
    parts: list[Any] = [
        "a",
        {"type": "text", "text": "a", **mark},
        {"type": "refusal", "refusal": "No.", **mark},
        {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}, **mark},
        {"type": "image_url", "image_url": "data:,"},
    ]
    for content in (None, "a", parts, *([part] for part in parts)):
        message = {"role": "assistant", "content": content}
        validator.validate(message)
        assert parse_chat({"messages": [message]})
    for part in ({"type": "input_audio"}, {"type": "text"}, {"type": "refusal"}, {"type": "image_url"}, 5):
        message = {"role": "assistant", "content": [part]}
        assert not validator.is_valid(message)
        with pytest.raises(InvalidRequestError):
            parse_chat({"messages": [message]})


def test_docs_when_opened_then_are_a_page_without_scripts_or_foreign_requests(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert all(each.path in page.text for each in ENDPOINTS)
    assert all(f"<code>{name}</code>" in page.text for name in ChatBody.model_fields)
    assert "<script" not in page.text
    assert "http://" not in page.text.replace("http://127", "")
    assert "https://" not in page.text


def test_docs_when_keys_are_needed_then_are_open() -> None:
    app = create_app(ProxyConfig(decode=("http://127.0.0.1:1",)))
    install_middleware(app, api_keys=("k",))
    with_key = TestClient(app)
    assert [with_key.get(path).status_code for path in ("/openapi.json", "/docs", "/v1/models")] == [200, 200, 401]


@pytest.mark.full
def test_client_when_generated_from_the_document_then_is_one_that_can_be_imported(
    client: TestClient, tmp_path: Path
) -> None:
    (tmp_path / "openapi.json").write_text(client.get("/openapi.json").text, encoding="utf-8")
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    made = subprocess.run(
        [sys.executable, "-m", "openapi_python_client", "generate", "--path", "openapi.json", "--meta", "none",
         "--output-path", "made", "--fail-on-warning"],
        cwd=tmp_path, env=tools, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    check = (
        "from made.models import ChatBody; from made.api.default import create_chat; "
        "body = ChatBody.from_dict({'messages': [{'role': 'user', 'content': 'hi'}], 'temperature': 0.5}); "
        "import json; print(json.dumps(body.to_dict()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["temperature"] == 0.5
