"""A headless Chromium that is spoken to over the devtools protocol: opens one page, notes what it asks for and what it
complains about, takes pictures."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from websockets.sync.client import connect

START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 30.0
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Page:
    """One page in one browser. ``urls``: all it asked for; ``complaints``: console errors, warnings, exceptions."""

    def __init__(self, folder: Path, program: str) -> None:
        self.urls: list[str] = []
        self.complaints: list[str] = []
        self._profile = Path(tempfile.mkdtemp(prefix="chromium-", dir=folder))
        self._net_log = folder / "net-log.json"
        self._ids = itertools.count(1)
        self._stack = contextlib.ExitStack()
        self._log = (folder / "chromium.log").open("wb")
        flags = [
            "--headless",
            "--no-sandbox",  # tests may run as root
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
            "--remote-debugging-port=0",
            f"--user-data-dir={self._profile}",
            f"--log-net-log={self._net_log}",
        ]
        self._popen = subprocess.Popen(
            [program, *flags, "about:blank"], stdout=self._log, stderr=self._log, start_new_session=True
        )
        try:
            self._socket = self._stack.enter_context(connect(self._page_address(), max_size=None, compression=None))
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()
        self._end()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One devtools command; events that come meanwhile are noted."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=CALL_TIMEOUT_S))
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return dict(message["result"])
            self._note(message)

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 20.0) -> float:
        """Until ``expression`` is true in the page; the seconds that it took."""
        start_s = time.monotonic()
        # What it names may not be there yet.
        guarded = f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"
        while not self.evaluate(guarded):
            if time.monotonic() - start_s > timeout_s:
                raise AssertionError(f"waited {timeout_s} s for {expression} on: {self.text()[:2000]}")
            time.sleep(0.05)
        return time.monotonic() - start_s

    def text(self) -> str:
        return str(self.evaluate("document.body.innerText"))

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        is_phone = width < 700
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if is_phone else 1,
            mobile=is_phone,
        )
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def hosts_asked(self, origin: str) -> set[str]:
        """Hosts of all requests that pages of ``origin`` caused, by the browser's network log, in which its own calls
        home are too. Ends the browser: the log is complete then."""
        self.call("Browser.close")
        self._popen.wait(CALL_TIMEOUT_S)
        events = [event.get("params", {}) for event in json.loads(self._net_log.read_text())["events"]]
        return {httpx.URL(each["url"]).host for each in events if each.get("initiator") == origin and "url" in each}

    def _page_address(self) -> str:
        port_file = self._profile / "DevToolsActivePort"
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not (port_file.exists() and port_file.read_text()):
            assert self._popen.poll() is None, "chromium ended at start"
            assert time.monotonic() < deadline_s, "chromium did not start"
            time.sleep(0.05)
        port = port_file.read_text().splitlines()[0]
        while True:
            pages = httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=CALL_TIMEOUT_S).json()
            for page in pages:
                if page["type"] == "page":
                    return str(page["webSocketDebuggerUrl"])
            assert time.monotonic() < deadline_s, "chromium opened no page"
            time.sleep(0.05)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(params["args"])[:500])

    def _end(self) -> None:
        if self._popen.poll() is None:
            self._popen.terminate()
            try:
                self._popen.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self._popen.pid, 9)
                self._popen.wait(10)
        self._log.close()
