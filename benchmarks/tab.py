"""A tab of Chromium to take times in, with nobody looking over its shoulder.

Playwright and the usual drivers enable the inspector's `Runtime` domain, so that they hear of errors and the
console. With it, Chromium parses Streamlit's chart library again and again to know the place of every call:
a second of processor time on any page with a chart, which no reader waits for. Here the few commands that a
measurement needs go to the browser directly (Chrome DevTools Protocol 1.3), and that domain stays off.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

WIDTH, HEIGHT = 1440, 900
SECONDS = 120.0
_SECONDS_BETWEEN_LOOKS = 0.02
_SETTLING_SECONDS = 1.5
"""A new window draws its own tab strip first; that is no part of a page."""

_QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync")


class Browser:
    """A running Chromium, spoken to through one connection."""

    def __init__(self, connection: ClientConnection, pid: int) -> None:
        self._connection, self._pid, self._n_sent = connection, pid, 0

    def send(self, method: str, session: str | None = None, **parameters: object) -> Any:
        """Send a command, and return its answer; events are passed over."""
        self._n_sent += 1
        message: dict[str, object] = {"id": self._n_sent, "method": method, "params": parameters}
        self._connection.send(json.dumps(message | ({"sessionId": session} if session else {})))
        while True:
            answer = json.loads(self._connection.recv(SECONDS))
            if answer.get("id") == self._n_sent:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def cpu_seconds(self) -> float:
        """Return the processor time of all its processes."""
        parents, ticks = {}, {}
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    fields = (path / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                parents[int(path.name)] = int(fields[1])
                ticks[int(path.name)] = int(fields[11]) + int(fields[12])
        own = {self._pid}
        for _ in range(8):
            own |= {pid for pid, parent in parents.items() if parent in own}
        return sum(ticks.get(pid, 0) for pid in own) / os.sysconf("SC_CLK_TCK")

    @contextmanager
    def tab(self) -> Iterator[Tab]:
        """Open a window that knows nothing of earlier visits: no cache, no cookies."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        size = {"width": WIDTH, "height": HEIGHT}
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context, **size)
        session = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        self.send("Emulation.setDeviceMetricsOverride", session, deviceScaleFactor=1, mobile=False, **size)
        time.sleep(_SETTLING_SECONDS)
        yield Tab(self, session)
        self.send("Target.disposeBrowserContext", browserContextId=context)


class Tab:
    """One page of a browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self._session = browser, session

    def goto(self, url: str) -> None:
        """Begin to load a page."""
        self.browser.send("Page.navigate", self._session, url=url)

    def value(self, expression: str) -> Any:
        """Return what a JavaScript expression is, as JSON values."""
        answer = self.browser.send(
            "Runtime.evaluate", self._session, expression=expression, returnByValue=True
        )
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + SECONDS
        while not self.value(f"Boolean({expression})"):
            if time.monotonic() > until:
                raise TimeoutError(expression)
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def click(self, x: float, y: float) -> None:
        """Click at a place, in pixels from the window's corner."""
        place = {"x": x, "y": y}
        self.browser.send("Input.dispatchMouseEvent", self._session, type="mouseMoved", **place)
        for event in ("mousePressed", "mouseReleased"):
            self.browser.send(
                "Input.dispatchMouseEvent", self._session, type=event, button="left", clickCount=1, **place
            )


@contextmanager
def launched(chromium: str, arguments: list[str]) -> Iterator[Browser]:
    """Run Chromium without a window."""
    with tempfile.TemporaryDirectory(prefix="profile-", ignore_cleanup_errors=True) as profile:
        command = [chromium, "--headless", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            [*command, *arguments, *_QUIET, "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=(Path(profile) / "said.txt").open("w"),
        )
        try:
            with connect(_address(Path(profile) / "said.txt", process), max_size=None) as connection:
                yield Browser(connection, process.pid)
        finally:
            process.terminate()
            process.wait(30)


def _address(said: Path, process: subprocess.Popen[bytes]) -> str:
    """Return where the browser listens, which it writes among its messages."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and process.poll() is None:
        if found := re.search(r"ws://\S+", said.read_text(errors="replace")):
            return found.group(0)
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    raise RuntimeError(f"Chromium did not start: {said.read_text(errors='replace')[-500:]}")
