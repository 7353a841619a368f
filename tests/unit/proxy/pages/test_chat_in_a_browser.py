"""The chat page in a real browser, before a real proxy whose node says what the test wants: hostile text, reasoning,
tool calls, errors, streams that break."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chromium import Page, chromium
from tests.support.http_server import wait_for
from tests.unit.proxy.conftest import Cluster, StartCluster
from tests.unit.proxy.fake_node import Fault

pytestmark = pytest.mark.full

ANSWER = "document.querySelector('.turn.answer:last-of-type')"
IS_DONE = f"{ANSWER} && !{ANSWER}.hasAttribute('aria-busy')"
CONTROLS = ("button", "textbox", "combobox", "spinbutton", "link", "DisclosureTriangle")
FORBIDDEN = "img, script, svg, iframe, style, a, form:not(.results)"
HOSTILE = (
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg/onload=window.hit=1>",
    "</div></li></ol></main><iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "<style>* { display: none }</style><form action=javascript:window.hit=1><button>Send</button></form>",
    "[click](javascript:window.hit=1) <a href='javascript:window.hit=1'>here</a>",
    "```<img src=x onerror=window.hit=1>\n<script>window.hit = 1</script>\n```",
    "`<img src=x onerror=window.hit=1>` **<img src=x onerror=window.hit=1>**",
    "- <img src=x onerror=window.hit=1>\n1. <svg onload=window.hit=1>",
    "\u202e gnihtyna \u0000 \ud83d &lt;script&gt; ${window.hit = 1} {{constructor.constructor('window.hit=1')()}}",
)
SECONDS = {
    "proxy_queue": 0.001,
    "tokenize": 0.006,
    "prefill_queue": 0.002,
    "prefill": 0.03,
    "transfer": 0.004,
    "decode_queue": None,
    "first_token": 0.005,
    "total": 0.1,
}
TRACE = {
    "placement": "remote",
    "prefill_node": "prefill-<b>0</b>",
    "decode_node": "decode-0",
    "prefill_cached_tokens": 32,
    "decode_cached_tokens": 16,
    "transferred_bytes": 4096,
    "transferred_blocks": 2,
    "transferred_states": 1,
    "seconds": SECONDS,
}
USAGE = {"prompt_tokens": 61, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 48}}


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def delta(finish_reason: str | None = None, **fields: Any) -> str:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish_reason}])


def stream(*deltas: str, finish_reason: str = "stop") -> list[str]:
    last = event(choices=[], usage=USAGE, tandem=TRACE)
    return [delta(role="assistant", content=""), *deltas, delta(finish_reason, content=""), last, "data: [DONE]\n\n"]


@pytest.fixture
def cluster(start_cluster: StartCluster) -> Cluster:
    return start_cluster()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Page]:
    program = chromium()
    if program is None:
        pytest.skip("chromium is not installed (Debian package chromium)")
    with Page(tmp_path, program) as browser:
        browser.resize(1300, 900)
        yield browser


def open_chat(browser: Page, cluster: Cluster) -> None:
    browser.call("Page.navigate", url=str(cluster.client.base_url.join("/chat")))
    browser.wait_for("document.getElementById('state').innerText !== 'Loading …'")


@pytest.fixture
def page(cluster: Cluster, browser: Page) -> Iterator[Page]:
    open_chat(browser, cluster)
    browser.wait_for("document.getElementById('state').innerText === 'Ready'")
    yield browser
    assert browser.evaluate("window.hit") is None


def say(page: Page, text: str, *, wait: bool = True) -> None:
    """Types into the field and presses Enter, as a person does."""
    page.evaluate("document.getElementById('message').focus()")
    page.call("Input.insertText", text=text)
    press(page, "Enter", 13)
    if wait:
        page.wait_for(IS_DONE)


def press(page: Page, key: str, code: int) -> None:
    text = {"text": "\r"} if key == "Enter" else {}
    page.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
    page.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)


def text_of(page: Page, selector: str) -> str:
    return str(page.evaluate(f"document.querySelector({selector!r}).innerText"))


def click(page: Page, label: str) -> None:
    found = f"[...document.querySelectorAll('button')].filter((each) => each.innerText === {label!r}).at(-1)"
    page.evaluate(f"{found}.click()")


def sent(cluster: Cluster) -> dict[str, Any]:
    """The body of the last request that came to the decode node."""
    return dict(cluster.decode[0].bodies[-1])


def unnamed(page: Page) -> list[str]:
    """Roles of the controls for which a screen reader has no name."""
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    controls = [node for node in nodes if not node["ignored"] and node["role"]["value"] in CONTROLS]
    assert len(controls) > 10
    return [node["role"]["value"] for node in controls if not node["name"]["value"].strip()]


def test_answer_when_its_text_is_hostile_then_it_stays_text(cluster: Cluster, page: Page) -> None:
    page.evaluate("document.getElementById('system').value = '<img src=x onerror=window.hit=1>'")
    for text in HOSTILE:
        call = {"index": 0, "id": text, "function": {"name": text, "arguments": text}}
        cluster.decode[0].script = stream(
            *(delta(reasoning_content=letter) for letter in text), delta(content=text), delta(tool_calls=[call])
        )
        typed = text if text.isprintable() or "\n" in text else "hello"
        say(page, typed)
        assert page.evaluate(f"{ANSWER}.querySelectorAll('{FORBIDDEN}').length") == 0
        assert sent(cluster)["messages"][-1] == {"role": "user", "content": typed}
    assert page.evaluate("document.querySelectorAll('script').length") == 1
    assert "onerror='window.hit = 1'" in page.text()
    assert page.evaluate("window.hit") is None
    # Nor does a shape that no server should send stop the page.
    depth = "[" * 100_000 + "]" * 100_000
    call = {"index": 0, "function": {"name": "f", "arguments": depth}}
    odd = [event(tandem="x", usage={}), event(tandem={"seconds": 1}, usage=3), event(choices=[{"index": 0}])]
    odd += [delta(tool_calls=[{"index": index}]) for index in (1_000_000_000, -1, "x")]
    cluster.decode[0].script = [*odd, *stream(delta(tool_calls=[call]), delta(content="Well."))]
    say(page, "hello")
    assert "Well." in page.evaluate(f"{ANSWER}.innerText")
    # An error of a server is no better.
    cluster.decode[0].fault, cluster.decode[0].code = Fault.STATUS, HOSTILE[1]
    cluster.decode[0].status = 400
    say(page, "hello")
    assert HOSTILE[1] in text_of(page, ".failure")
    assert page.evaluate("document.images.length") == 0
    assert [each for each in page.complaints if "400" not in each] == []
    # The control: the same page would have run it, had it been parsed as HTML with leave to.
    assert (
        page.evaluate("(() => { try { document.body.innerHTML = '<b>'; return '' } catch (e) { return e.name } })()")
        == "TypeError"
    )
    page.complaints.clear()


def test_answer_when_traced_then_shows_what_the_trace_and_the_usage_say(
    cluster: Cluster, page: Page, tmp_path: Path
) -> None:
    cluster.decode[0].script = stream(
        *(delta(content=text) for text in ("Some **bo", "ld** text.\n\n- one\n- two\n\n```py\nx = 1", "\n```")),
    )
    cluster.decode[0].chunk_pause_s = 0.02
    say(page, "first")
    trace = text_of(page, ".trace")
    for shown in ("prefill-<b>0</b> → decode-0", "61 tokens", "48 tokens", "13 tokens", "4.0 KiB"):
        assert shown in trace, trace
    for phase in (
        "proxy queue 1.0 ms",
        "tokenise 6.0 ms",
        "prefill queue 2.0 ms",
        "prefill 30.0 ms",
        "transfer 4.0 ms",
        "first token 5.0 ms",
    ):
        assert phase in trace, trace
    assert "decode queue" not in trace
    label = page.evaluate(f"{ANSWER}.querySelector('.bar').getAttribute('aria-label')")
    assert "prefill 30.0 ms" in label
    html = f"{ANSWER}.querySelector('.text').innerHTML"
    assert page.evaluate(html) == (
        "<p>Some <strong>bold</strong> text.</p><ul><li>one</li><li>two</li></ul>"
        '<pre class="code" tabindex="0" data-language="py"><code>x = 1</code></pre>'
    )
    assert "Answer: Some" in text_of(page, "#news")
    # The whole conversation goes with the next question, and only what was filled in.
    page.evaluate("document.getElementById('temperature').value = '0.5'")
    page.evaluate("document.getElementById('stop-strings').value = 'END\\nSTOP'")
    page.evaluate("document.getElementById('more').value = '{\"cache_salt\": \"x\"}'")
    page.evaluate("document.getElementById('system').value = 'Be brief.'")
    say(page, "second")
    body = sent(cluster)
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert (body["temperature"], body["stop"], body["cache_salt"], body["model"]) == (0.5, ["END", "STOP"], "x", "fake")
    assert not {"top_p", "max_tokens", "seed", "tools"} & body.keys()
    # Edit the first question: what came after it goes.
    page.evaluate("document.querySelector('.turn.user button').click()")
    page.evaluate("document.querySelector('.turn.user textarea').value = 'other'")
    page.evaluate("document.querySelector('.turn.user .row button').click()")
    page.wait_for(f"document.querySelectorAll('.turn').length === 2 && {IS_DONE}")
    assert [message["content"] for message in sent(cluster)["messages"]] == ["Be brief.", "other"]
    num_received = len(cluster.decode[0].bodies)
    click(page, "Regenerate")
    wait_for(lambda: len(cluster.decode[0].bodies) == num_received + 1, "the second answer")
    page.wait_for(IS_DONE)
    assert [message["content"] for message in sent(cluster)["messages"]] == ["Be brief.", "other"]
    # The request as others would send it.
    click(page, "Request")
    assert "curl -N" in text_of(page, "#export-text")
    assert "-d '{" in text_of(page, "#export-text")
    page.evaluate("document.getElementById('export-kind').value = 'json'")
    page.evaluate("document.getElementById('export-kind').dispatchEvent(new Event('change'))")
    assert json.loads(text_of(page, "#export-text"))["messages"][1] == {"role": "user", "content": "other"}
    page.evaluate("document.getElementById('export-close').click()")
    click(page, "New chat")
    assert page.evaluate("document.querySelectorAll('.turn').length") == 0
    assert page.complaints == []


def test_answer_when_it_reasons_and_calls_tools_then_both_are_folded_and_a_result_goes_back(
    cluster: Cluster, page: Page, tmp_path: Path
) -> None:
    calls = [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"town": '}},
        {"index": 0, "function": {"arguments": '"Ulm"}'}},
        {"index": 1, "id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": "{}"}},
    ]
    cluster.decode[0].script = stream(
        delta(reasoning_content="They want "),
        delta(reasoning_content="the weather."),
        delta(content="Let me look."),
        *(delta(tool_calls=[call]) for call in calls),
        finish_reason="tool_calls",
    )
    page.evaluate("document.getElementById('tools-example').click()")
    say(page, "weather?")
    assert sent(cluster)["tools"][0]["function"]["name"] == "get_weather"
    assert page.evaluate(f"[...{ANSWER}.querySelectorAll('details')].map((each) => each.open)") == [False] * 4
    summaries = page.evaluate(f"[...{ANSWER}.querySelectorAll('summary')].map((each) => each.innerText)")
    assert summaries[0].startswith("Reasoning")
    assert summaries[1:3] == ["Tool call: get_weather", "Tool call: get_time"]
    page.evaluate(f"{ANSWER}.querySelectorAll('summary').forEach((each) => each.click())")
    assert "They want the weather." in text_of(page, ".reasoning")
    assert '"town": "Ulm"' in text_of(page, ".call pre")
    page.screenshot(tmp_path / "tools.png")
    assert unnamed(page) == []
    page.evaluate("document.getElementById('result-0').value = '21 degrees'")
    page.evaluate("document.getElementById('result-1').value = 'noon'")
    click(page, "Send results")
    page.wait_for(f"document.querySelectorAll('.turn').length === 5 && {IS_DONE}")
    asked, called, *results = sent(cluster)["messages"]
    assert asked == {"role": "user", "content": "weather?"}
    assert (called["content"], called["reasoning_content"]) == ("Let me look.", "They want the weather.")
    assert called["tool_calls"][0] == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"town": "Ulm"}'},
    }
    assert results == [
        {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
        {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
    ]
    # What cannot be sent is said at its field, and nothing is sent.
    page.evaluate("document.getElementById('tools').value = '{not json'")
    num_received = len(cluster.decode[0].bodies)
    say(page, "again", wait=False)
    assert "Tools" in text_of(page, "#field-error")
    assert page.evaluate("document.activeElement.id") == "tools"
    assert page.evaluate("document.getElementById('message').value") == "again"
    assert len(cluster.decode[0].bodies) == num_received
    assert page.complaints == []


def test_stream_when_it_breaks_fails_or_is_stopped_then_is_marked_incomplete(
    cluster: Cluster, page: Page, tmp_path: Path
) -> None:
    node = cluster.decode[0]
    beginning = stream(delta(content="Half an answ"))[:2]
    cases = {
        "it ended with an error": [*beginning, event(error={"message": "out of luck", "code": "luck", "type": "t"})],
        "cut at max_tokens": stream(delta(content="a"), finish_reason="length"),
    }
    for shown, node.script in cases.items():
        say(page, "go")
        assert shown in text_of(page, ".turn.answer:last-of-type"), shown
    assert "out of luck" in page.text()
    # A stream without its end is an error event of the proxy; whatever it is, no answer counts as whole.
    node.script = beginning
    say(page, "go")
    assert "Incomplete" in text_of(page, ".turn.answer:last-of-type")
    # Stopped with Escape: what came stays, and the node is told.
    node.script, node.fault = beginning, Fault.STALL
    say(page, "go", wait=False)
    page.wait_for(f"{ANSWER}.innerText.includes('Half an answ')")
    assert page.evaluate("document.getElementById('stop').hidden") is False
    press(page, "Escape", 27)
    page.wait_for(IS_DONE)
    assert "Incomplete: stopped by you" in text_of(page, ".turn.answer:last-of-type")
    wait_for(lambda: node.num_aborted > 0, "the node to see that the client left")
    # A refusal is shown as the server said it, and can be tried again.
    node.fault, node.status = Fault.STATUS, 422
    say(page, "go")
    assert "decode-0 says no" in text_of(page, ".turn.answer:last-of-type .failure")
    assert "422" in text_of(page, ".turn.answer:last-of-type .failure")
    node.fault, node.script = Fault.NONE, stream(delta(content="Well."))
    click(page, "Try again")
    page.wait_for(f"{IS_DONE} && {ANSWER}.innerText.includes('Well.')")
    page.screenshot(tmp_path / "broken.png")
    assert [each for each in page.complaints if "422" not in each] == []


def test_key_when_the_proxy_has_any_then_is_asked_for_kept_in_the_tab_and_shown_nowhere(
    start_cluster: StartCluster, browser: Page, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-secret\n")
    cluster, page = start_cluster(api_key_file=str(keys)), browser
    cluster.decode[0].script = stream(delta(content="Well."))
    open_chat(page, cluster)
    for key, shown in (("wrong", "not one of"), ("a-secret", "")):
        page.wait_for("!document.getElementById('key-form').hidden")
        assert page.evaluate("document.activeElement.id") == "key"
        page.call("Input.insertText", text=key)
        press(page, "Enter", 13)
        page.wait_for(f"document.getElementById('key-why').innerText.includes({shown!r})")
    page.wait_for("document.getElementById('state').innerText === 'Ready'")
    say(page, "hello")
    assert cluster.decode[0].received[-1].headers["authorization"] == "Bearer a-secret"
    assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    click(page, "Request")
    assert "$TANDEM_API_KEY" in text_of(page, "#export-text")
    assert "a-secret" not in page.evaluate("document.documentElement.outerHTML")
    page.evaluate("document.getElementById('export-close').click()")
    click(page, "Forget it")
    page.wait_for("!document.getElementById('key-form').hidden")
    assert page.evaluate("sessionStorage.length") == 0
    assert [each for each in page.complaints if "401" not in each] == []


def test_parser_and_markdown_when_text_is_cut_anywhere_or_worst_case_then_hold(page: Page) -> None:
    """In the page, where their modules are."""
    events = ': hello\r\ndata: {"a": 1}\r\n\r\ndata: one\ndata: two\n\nevent: x\rdata:three\r\rdata: [DONE]\n\n'
    script = f"""(async () => {{
      const {{ EventParser }} = await import("/pages/stream.js");
      const text = {json.dumps(events)};
      const results = new Set();
      for (let size = 1; size <= text.length; size += 1) {{
        const parser = new EventParser();
        const found = [];
        for (let at = 0; at < text.length; at += size) found.push(...parser.push(text.slice(at, at + size)));
        results.add(JSON.stringify(found));
      }}
      return [...results];
    }})()"""
    assert page.evaluate(script) == [json.dumps(['{"a": 1}', "one\ntwo", "three", "[DONE]"], separators=(",", ":"))]
    script = """(async () => {
      const { Answer } = await import("/pages/stream.js");
      const rates = [[5, 1100], [1, 1100], [5, 100.5]].map(([completion_tokens, lastAt]) =>
        Object.assign(new Answer(), { usage: { completion_tokens }, firstAt: 100, lastAt }).rate);
      return [...rates, new Answer().rate];
    })()"""
    assert page.evaluate(script) == [4, None, None, None]
    # Folds and what is selected stay while text grows.
    script = """(async () => {
      const { el, patch } = await import("/pages/parts.js");
      const made = (text) => [el("details", "a", el("summary", "", "S"), el("p", "", text)), el("p", "", "x")];
      const box = el("div", "");
      patch(box, made("one"));
      const [fold, paragraph] = [box.firstChild, box.querySelector("details p").firstChild];
      fold.open = true;
      patch(box, made("one two").slice(0, 1));
      return [box.firstChild === fold, fold.open, fold.lastChild.firstChild === paragraph, paragraph.data,
        box.childNodes.length];
    })()"""
    assert page.evaluate(script) == [True, True, True, "one two", 1]
    script = """(async () => {
      const { markdown } = await import("/pages/markdown.js");
      const show = (text) => { const box = document.createElement("div"); box.append(...markdown(text)); return box; };
      const worst = ["`", "**", "`a", "**a", "- ", "  - ", "``` ", "~~~\\n", "#", "# a\\n", "\\n", "1. a\\n",
        "- a\\n\\n", " ", "* * ", "_", "\\t- a\\n", "`` ` "].map((piece) => piece.repeat(60000 / piece.length));
      const deep = Array.from({ length: 3000 }, (_, depth) => " ".repeat(2 * (depth % 400)) + "- a").join("\\n");
      const ticks = Array.from({ length: 300 }, (_, length) => "`".repeat(length + 1)).join(" ");
      for (const text of [...worst, deep, ticks]) show(text);
      const texts = (text) => show(text).textContent;
      return [show("a **b** `c **d**` ``e ` f`` **g").innerHTML,
        show("1. a\\n   - b\\n   - c\\n2. d\\n\\nrest").innerHTML,
        show("## T\\ntext\\n---\\n- a\\n  more").innerHTML, texts("**a"), show("```\\n<b>\\n``` \\nx").innerHTML];
    })()"""
    assert page.evaluate(script) == [
        "<p>a <strong>b</strong> <code>c **d**</code> <code>e ` f</code> **g</p>",
        '<ol start="1"><li>a<ul><li>b</li><li>c</li></ul></li><li>d</li></ol><p>rest</p>',
        '<p class="heading">T</p><p>text</p><hr><ul><li>a\nmore</li></ul>',
        "**a",
        '<pre class="code" tabindex="0"><code>&lt;b&gt;</code></pre><p>x</p>',
    ]
    assert page.complaints == []
