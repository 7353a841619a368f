"""The status page in a real browser while requests run, and its data from real nodes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support.chromium import Page, chromium
from tests.support.client import complete
from tests.support.hangup import wait_until
from tests.support.models import checkpoint
from tests.support.reference import random_tokens
from tests.support.service import Service

KEY = "a-key-for-the-page"
KEYED = {"Authorization": f"Bearer {KEY}"}
SEEN_WITHIN_S = 3.0
NUM_ROWS = "document.querySelectorAll('#requests > li').length"


def test_status_when_requests_ran_then_says_where_and_what_was_cached_and_moved(service: Service) -> None:
    prompt = random_tokens(300, seed=8801)
    answers = [complete(service.url, prompt, 6) for _ in range(2)]
    status = httpx.get(service.url + "/status.json", timeout=30).json()
    second, first = status["requests"][:2]
    for shown, answer in ((first, answers[0]), (second, answers[1])):
        trace = answer.trace
        assert (shown["outcome"], shown["status"], shown["route"]) == ("length", 200, "completions")
        for name in ("placement", "prefill_node", "decode_node", "decode_cached_tokens", "transferred_bytes"):
            assert shown[name] == trace[name], name
        for phase, seconds in shown["seconds"].items():
            assert seconds == pytest.approx(trace["seconds"][phase], abs=1e-5), phase
        assert shown["prompt_tokens"] == 300
        assert sum(shown["seconds"].values()) <= shown["total_seconds"]
    assert first["transferred_bytes"] > 0
    assert second["decode_cached_tokens"] == 300
    assert second["transferred_bytes"] == 0

    def figures_are_here() -> bool:
        nodes = httpx.get(service.url + "/status.json", timeout=30).json()["nodes"]
        return all(node["figures"] is not None for node in nodes)

    wait_until(figures_are_here, "the nodes' figures")
    nodes = httpx.get(service.url + "/status.json", timeout=30).json()["nodes"]
    assert [node["role"] for node in nodes] == ["prefill", "decode"]
    for node in nodes:
        assert (node["state"], node["answers"]) == ("ready", True)
        assert node["figures"]["kv_blocks"]["cached"] > 0
        assert node["figures"]["state_slots"]["cached"] > 0


@pytest.fixture
def keyed_service(tmp_path: Path) -> Iterator[Service]:
    keys = tmp_path / "keys"
    keys.write_text(KEY + "\n")
    flags = {"prefill_flags": NODE_FLAGS, "decode_flags": NODE_FLAGS, "num_decode": 2}
    # The default interval: what the page shows of a dead node must not hang on a test's fast polls.
    proxy_flags = ("--api-key-file", str(keys), "--health-interval-seconds", "1")
    with Service(checkpoint(FAMILY), proxy_flags=proxy_flags, **flags) as running:
        yield running


def stream_until(stop: threading.Event, url: str) -> None:
    turn = 0
    while not stop.is_set():
        turn += 1
        body = {"prompt": random_tokens(100 + 137 * turn % 900, seed=turn % 5), "max_tokens": 30, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, headers=KEYED, timeout=60) as answer:
            for _ in answer.iter_raw():
                pass
        stop.wait(0.3)


@pytest.mark.full
def test_page_when_opened_in_a_browser_while_requests_run_then_is_live_quiet_and_sees_deaths(
    keyed_service: Service, tmp_path: Path
) -> None:
    program = chromium()
    if program is None:
        pytest.skip("chromium is not installed (Debian package chromium)")
    service, stop = keyed_service, threading.Event()
    load = threading.Thread(target=stream_until, args=(stop, service.url), daemon=True)
    load.start()
    try:
        with Page(tmp_path, program) as page:
            page.resize(1280, 1000)
            page.call("Page.navigate", url=service.url + "/")
            # Without a key it asks, a wrong one is refused, the right one is kept for this tab.
            page.wait_for("!document.getElementById('key-form').hidden")
            enter_key(page, "wrong")
            page.wait_for("document.getElementById('key-why').innerText.includes('not one of')")
            assert [each for each in page.complaints if "401" not in each] == []
            page.complaints.clear()
            enter_key(page, KEY)
            page.wait_for(f"{NUM_ROWS} >= 3")
            assert page.evaluate("sessionStorage.getItem('tandem-api-key')") == KEY
            assert KEY not in page.evaluate("document.documentElement.outerHTML")
            text = page.text()
            for node in (*service.prefill, *service.decode):
                assert node.url in text
            assert text.count("ready") == 3
            assert "prompt tokens" in text
            tiles = page.evaluate("document.getElementById('tiles').innerText")
            assert "3 of 3" in tiles
            assert "nodes up" in tiles
            assert "Serving" in text

            # Live: rows come by themselves, and what is open stays open.
            page.evaluate("document.querySelector('#requests summary').click()")
            rows = page.evaluate(NUM_ROWS)
            page.wait_for(f"{NUM_ROWS} >= {rows + 2}")
            assert page.evaluate("document.querySelectorAll('#requests details[open]').length") == 1
            page.screenshot(tmp_path / "desktop.png")
            for width, is_dark in ((360, False), (360, True)):
                page.resize(width, 740, dark=is_dark)
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                page.screenshot(tmp_path / f"phone-{is_dark}.png")

            stop.set()
            load.join(60)
            frozen, killed = service.decode
            frozen.process.popen.send_signal(signal.SIGSTOP)
            try:
                assert page.wait_for("document.body.innerText.includes('no answer')", 10) <= SEEN_WITHIN_S
            finally:
                frozen.process.popen.send_signal(signal.SIGCONT)
            page.wait_for("document.body.innerText.match(/ready/g).length === 3")
            killed.process.kill()
            assert page.wait_for("document.body.innerText.includes('suspect')", 10) <= SEEN_WITHIN_S
            page.wait_for("document.getElementById('tiles').innerText.includes('2 of 3')")
            for width, height, name in ((1280, 1000, "desktop"), (360, 740, "phone")):
                page.resize(width, height)
                page.screenshot(tmp_path / f"{name}-node-dead.png")

            assert page.complaints == []
            assert {httpx.URL(url).netloc.decode() for url in page.urls} == {service.url.removeprefix("http://")}
            assert page.hosts_asked(service.url) == {"127.0.0.1"}
    finally:
        stop.set()
        load.join(60)


def enter_key(page: Page, key: str) -> None:
    page.evaluate(f"document.getElementById('key').value = {key!r}")
    page.evaluate("document.querySelector('#key-form button').click()")
