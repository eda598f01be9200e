"""Headless Chromium, driven through a pipe by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Json = dict[str, Any]
PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
MISSING = "no Chromium here (Debian: apt-get install chromium)"
_ANSWER_S = 60


class Browser:
    """One tab of the browser. `events`: events of the protocol, the oldest first."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._left = to, back, b""
        self._number, self._session = 0, ""
        self.events: list[Json] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Json:
        """Send a command of the protocol; return its result."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = json.dumps({"id": self._number, "method": method, "params": params} | session)
        os.write(self._to, message.encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return dict(found["result"])
            self.events.append(found)

    def js(self, expression: str) -> Any:
        """Return the value of an expression in the page. A promise is awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression in the page is true."""
        end = time.monotonic() + _ANSWER_S
        while not self.js(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)

    def open(self, url: str) -> None:
        """Open a page. Return when its summary is drawn."""
        self.call("Page.navigate", url=url)
        self.until("document.getElementById('nodes')?.ariaBusy === 'false'")

    def press(self, key: str) -> None:
        """Press and release a key, such as `Tab`."""
        code = {"Tab": 9, "Enter": 13, "ArrowDown": 40, "ArrowUp": 38, "End": 35, "Home": 36}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def size(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the size of the window and the preferred colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path) -> None:
        """Write the content of the window to a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _next(self) -> Json:
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._back], [], [], _ANSWER_S)
            assert ready, "Chromium does not answer"
            read = os.read(self._back, 1 << 20)
            assert read, "Chromium has ended"
            self._left += read
        line, _, self._left = self._left.partition(b"\0")
        return dict(json.loads(line))


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Run Chromium with a profile of its own until the end of the block."""
    assert PROGRAM is not None, MISSING
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    command = [
        "/bin/bash", "-c", f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}', PROGRAM, "--headless", "--no-sandbox",
        "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
        "--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    running = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        pass_fds=(theirs_in, theirs_out), start_new_session=True,
    )  # fmt: skip
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        browser = Browser(ours_out, ours_in)
        yield browser
        browser._session = ""
        browser.call("Browser.close")
    finally:
        os.close(ours_out)
        os.close(ours_in)
        try:
            running.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, 9)
            running.wait()
