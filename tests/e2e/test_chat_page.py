"""The chat page in a real browser, before a real service with the built-in model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from common.demo_model import FOLDER
from common.wire.routes import CHAT_ROUTE
from tests.e2e.conftest import NODE_FLAGS
from tests.e2e.test_answers import FIXED, FREE, model_with
from tests.support import images
from tests.support.chromium import Page, chromium
from tests.support.client import metric, post
from tests.support.service import Service

pytestmark = pytest.mark.full

FLAGS = ("--max-num-batched-tokens", "1024", "--max-model-len", "4096", "--kv-cache-memory", "128MiB")
NAMED = ("--served-model-name", FOLDER.name)
ANSWERS = "document.querySelectorAll('.turn.answer')"
LAST = f"[...{ANSWERS}].at(-1)"
IS_DONE = f"!{LAST}.hasAttribute('aria-busy')"
DETAIL = "Object.fromEntries([...ROOT.querySelectorAll('dt')].map((dt) => [dt, dt.nextElementSibling].map(TEXT)))"
DETAIL = DETAIL.replace("TEXT", "(each) => each.textContent")


@pytest.fixture(scope="module")
def demo() -> Iterator[Service]:
    with Service(
        FOLDER,
        prefill_flags=(*FLAGS, *NAMED, "--node-name", "prefill"),
        decode_flags=(*FLAGS, *NAMED, "--node-name", "decode"),
    ) as running:
        yield running


def test_chat_when_a_new_user_asks_twice_then_both_answers_and_their_traces_are_there(
    demo: Service, tmp_path: Path
) -> None:
    program = chromium()
    if program is None:
        pytest.skip("chromium is not installed (Debian package chromium)")
    with Page(tmp_path, program) as page:
        page.resize(1300, 900)
        page.call("Page.navigate", url=demo.url + "/")
        page.wait_for("document.querySelector('nav a')")
        page.evaluate("document.querySelector('nav a').click()")
        page.wait_for("location.pathname === '/chat' && document.getElementById('state').innerText === 'Ready'")
        page.screenshot(tmp_path / "welcome.png")
        page.evaluate("document.getElementById('temperature').value = '0'")
        page.evaluate("document.querySelector('#starters button').click()")
        page.wait_for(f"{ANSWERS}.length === 1 && {IS_DONE}")
        assert "amber falcon" in page.evaluate(f"{LAST}.querySelector('.text').innerText")
        first = facts(page)
        assert first["cached"] == "0 tokens"
        assert first["moved"] not in ("", "0 B")
        for words in ("Ran on prefill → decode", "tokenise ", "prefill ", "transfer ", "first token "):
            assert words in page.evaluate(f"{LAST}.querySelector('.trace').innerText"), words
        # The page invents nothing: what it shows is what the proxy's own status says of this request.
        request_id = page.evaluate(f"{DETAIL.replace('ROOT', LAST)}['request id']")
        [shown] = [
            each
            for each in httpx.get(demo.url + "/status.json", timeout=30).json()["requests"]
            if each["request_id"] == request_id
        ]
        assert first["prompt"] == f"{shown['prompt_tokens']} tokens"
        label = page.evaluate(f"{LAST}.querySelector('.bar').getAttribute('aria-label')")
        assert f"prefill {shown['seconds']['prefill'] * 1000:.1f} ms" in label or shown["seconds"]["prefill"] >= 0.1
        # The second question: the decode node has the conversation so far, nothing of it is computed again.
        page.evaluate(
            "[...document.querySelectorAll('button')].find((each) => each.innerText.startsWith('Ask: ')).click()"
        )
        page.wait_for(f"{ANSWERS}.length === 2 && {IS_DONE}")
        assert "golden otter" in page.evaluate(f"{LAST}.querySelector('.text').innerText")
        second = facts(page)
        num_known = int(first["prompt"].split()[0])
        assert int(second["cached"].split()[0]) >= num_known
        assert int(second["cached"].split()[0]) + int(second["computed"].split()[0]) == int(second["prompt"].split()[0])
        page.evaluate("document.activeElement.blur()")
        for width, height, is_dark in ((1300, 900, False), (1300, 900, True), (360, 740, False), (360, 740, True)):
            page.resize(width, height, dark=is_dark)
            page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            page.screenshot(tmp_path / f"chat-{width}{'-dark' if is_dark else ''}.png")
        page.evaluate("document.getElementById('settings').open = true; scrollTo(0, 0)")
        page.screenshot(tmp_path / "settings-360.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.resize(1300, 900)

        # A long answer is stopped in the middle; what came stays, and is marked.
        page.evaluate("document.getElementById('more').value = '{\"ignore_eos\": true}'")
        page.evaluate("document.getElementById('message').value = 'Go on for long.'")
        page.evaluate("document.getElementById('send').click()")
        page.wait_for(f"{ANSWERS}.length === 3 && {LAST}.querySelector('.text')")
        page.evaluate("document.getElementById('stop').click()")
        page.wait_for(IS_DONE)
        assert "Incomplete: stopped by you" in page.evaluate(f"{LAST}.innerText")

        # An error is shown as the server said it.
        page.evaluate("document.getElementById('temperature').value = '-3'")
        page.evaluate("document.getElementById('message').value = 'Hello'")
        page.evaluate("document.getElementById('send').click()")
        page.wait_for(f"{ANSWERS}.length === 4 && {IS_DONE}")
        said = httpx.post(
            demo.url + "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "Hello"}], "temperature": -3},
            timeout=30,
        ).json()["error"]["message"]
        assert page.evaluate(f"{LAST}.querySelector('.failure p').innerText") == said

        assert [each for each in page.complaints if "400" not in each] == []
        assert {httpx.URL(url).netloc.decode() for url in page.urls} == {demo.url.removeprefix("http://")}
        assert page.hosts_asked(demo.url) == {"127.0.0.1"}


def facts(page: Page) -> dict[str, str]:
    """The figures under the last answer."""
    return dict(page.evaluate(DETAIL.replace("ROOT", f"{LAST}.querySelector('.facts')")))


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A model that reasons and calls, as a grammar has it."""
    folder = model_with("xml_thinking", tmp_path_factory.mktemp("model") / "m")
    with Service(folder, prefill_flags=NODE_FLAGS, decode_flags=NODE_FLAGS) as running:
        yield running


def test_chat_when_the_model_calls_tools_then_calls_and_reasoning_are_folded_and_results_go_back(
    caller: Service, tmp_path: Path
) -> None:
    program = chromium()
    if program is None:
        pytest.skip("chromium is not installed (Debian package chromium)")
    with Page(tmp_path, program) as page:

        def put(**values: str) -> None:
            for name, value in values.items():
                page.evaluate(f"document.getElementById({json.dumps(name)}).value = {json.dumps(value)}")

        page.resize(1300, 900)
        page.call("Page.navigate", url=caller.url + "/chat")
        page.wait_for("document.getElementById('state').innerText === 'Ready'")
        put(tools=json.dumps([FIXED, FREE]), tool_choice="required", temperature="1", seed="4", max_tokens="600")
        put(more=json.dumps({"thinking_token_budget": 40, "parallel_tool_calls": False}))
        put(message="What is it like in Bern?")
        page.evaluate("document.getElementById('send').click()")
        page.wait_for(f"{ANSWERS}.length === 1 && {IS_DONE}")
        call, reasoning = f"{LAST}.querySelector('details.call')", f"{LAST}.querySelector('details.reasoning')"
        assert page.evaluate(f"{LAST}.querySelectorAll('details.call').length") == 1
        assert not page.evaluate(f"{call}.open || {reasoning}.open")
        named = page.evaluate(f"{call}.querySelector('summary').textContent")
        assert named in ("Tool call: fixed", "Tool call: free")
        page.evaluate(f"{call}.open = true; {reasoning}.open = true")
        given = json.loads(page.evaluate(f"{call}.querySelector('pre').innerText"))
        schema = (FIXED if named.endswith("fixed") else FREE)["function"]["parameters"]
        assert set(given) == set(schema["properties"])
        assert page.evaluate(f"{reasoning}.querySelector('summary').textContent").startswith("Reasoning, ")
        assert page.evaluate(f"{reasoning}.querySelector('.text').innerText").strip()
        assert not page.evaluate(f"{LAST}.querySelector('.failure, .badge.warn') !== null")
        before = facts(page)
        put(**{"result-0": '{"sky": "clear", "degrees": 21}'})
        for width, height in ((1300, 900), (360, 740)):
            page.resize(width, height)
            page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            page.screenshot(tmp_path / f"call-{width}.png")
        # The result goes back behind the call.
        put(tool_choice="none", more="{}", max_tokens="20")
        page.evaluate("document.querySelector('form.results button').click()")
        page.wait_for(f"{ANSWERS}.length === 2 && {IS_DONE}")
        assert "Result of" in page.evaluate("document.querySelector('.turn.tool').innerText")
        assert "clear" in page.evaluate("document.querySelector('.turn.tool pre').innerText")
        assert int(facts(page)["cached"].split()[0]) >= int(before["prompt"].split()[0])
        for width, height in ((1300, 900), (360, 740)):
            page.resize(width, height)
            page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            page.screenshot(tmp_path / f"result-{width}.png")
        assert page.complaints == []
        assert page.hosts_asked(caller.url) == {"127.0.0.1"}


def test_chat_when_an_image_is_dropped_then_it_is_asked_about_and_stays_in_the_conversation(tmp_path: Path) -> None:
    program = chromium()
    if program is None:
        pytest.skip("chromium is not installed (Debian package chromium)")
    (tmp_path / "boxes.png").write_bytes(images.picture(1))
    (tmp_path / "words.txt").write_text("no image")
    with Service(images.image_checkpoint(), NODE_FLAGS, NODE_FLAGS) as service, Page(tmp_path, program) as page:
        page.resize(1300, 900)
        page.call("Page.navigate", url=service.url + "/chat")
        page.wait_for("document.getElementById('state').innerText === 'Ready'")
        page.evaluate("document.getElementById('temperature').value = '0'")
        page.evaluate("document.getElementById('max_tokens').value = '8'")
        drop(page, tmp_path / "words.txt")
        page.wait_for("document.getElementById('images-refused').innerText.startsWith('Not taken: words.txt')")
        drop(page, tmp_path / "boxes.png")
        page.wait_for("document.querySelector('#images img')?.naturalWidth === 64")
        assert page.evaluate("document.getElementById('images-refused').innerText") == ""
        page.screenshot(tmp_path / "dropped.png")
        page.evaluate("document.querySelector('#images button').click()")  # and is taken back
        assert page.evaluate("document.images.length") == 0
        drop(page, tmp_path / "boxes.png")
        page.wait_for("document.querySelector('#images img')")
        ask(page, "What is this?")
        page.wait_for(f"{ANSWERS}.length === 1 && {IS_DONE}")
        expected = post(
            service.url,
            CHAT_ROUTE,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            images.image_part(images.picture(1)),
                            {"type": "text", "text": "What is this?"},
                        ],
                    }
                ],
                "temperature": 0,
                "max_tokens": 8,
            },
        )
        assert page.evaluate(f"{LAST}.querySelector('.failure')") is None
        said = expected["choices"][0]["message"]["content"]
        assert page.evaluate(f"{LAST}.querySelector('.text').innerText").split() == said.split()
        assert expected["usage"]["prompt_tokens_details"]["cached_tokens"] == expected["usage"]["prompt_tokens"]
        encoded = sum(metric(node, "images_encoded_total") for node in service.prefill)
        ask(page, "And now?")  # the image goes with the conversation, and is not computed again
        page.wait_for(f"{ANSWERS}.length === 2 && {IS_DONE}")
        assert page.evaluate(f"{LAST}.querySelector('.failure')") is None
        num_cached = int(facts(page)["cached"].replace(",", "").split()[0])
        assert num_cached >= expected["usage"]["prompt_tokens"]
        assert sum(metric(node, "images_encoded_total") for node in service.prefill) == encoded
        for width in (1300, 360):
            page.resize(width, 800)
            page.screenshot(tmp_path / f"images-{width}.png")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.complaints == []


def drop(page: Page, path: Path) -> None:
    """As a person drops a file on the page."""
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        page.call("Input.dispatchDragEvent", type=kind, x=300, y=300, data=data)


def ask(page: Page, text: str) -> None:
    page.evaluate(f"document.getElementById('message').value = {text!r}")
    page.evaluate("document.getElementById('send').click()")
