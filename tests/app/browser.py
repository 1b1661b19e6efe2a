"""A real browser and a server in a process of its own, for tests of what only they can show."""

import contextlib
import http.client
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.processes import free_port, until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
MILLISECONDS = 120_000
"""How long a page may take on a machine that is busy with other tests."""

IDLE = "document.querySelector('[data-testid=stApp]')?.dataset.testScriptState === 'notRunning'"
"""Whether the server has told everything it has to tell."""

FAINT = """() => {
    const SKIPPED = "svg, script, style, noscript, :disabled, [data-testid=stSlider]";
    const parse = text => {
        const parts = (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
        return text.startsWith("color(srgb") ? parts.map((part, i) => i < 3 ? 255 * part : part) : parts;
    };
    const over = (top, below) => {
        const alpha = top[3] === undefined ? 1 : top[3];
        return [0, 1, 2].map(i => alpha * top[i] + (1 - alpha) * below[i]);
    };
    const light = colour => {
        const [r, g, b] = colour.map(c => c / 255).map(
            c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    };
    const found = new Set();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const element = node.parentElement;
        if (!node.data.trim() || element.closest(SKIPPED)) continue;
        if (!element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
        const chain = [];
        for (let e = element; e; e = e.parentElement) chain.unshift(getComputedStyle(e));
        const layers = chain.map(style => parse(style.backgroundColor));
        const below = layers.reduce((colour, layer) => over(layer, colour), [255, 255, 255]);
        const style = chain.at(-1);
        const [a, b] = [light(over(parse(style.color), below)), light(below)];
        const ratio = Math.max(a, b) / Math.min(a, b);
        const least = parseFloat(style.fontSize) >= 24 ? 3 : 4.5;
        if (ratio < least) found.add(`${node.data} ${ratio.toFixed(2)}`);
    }
    return [...found];
}"""
"""Texts that are fainter against what lies below them than WCAG AA allows; disabled ones may be. The value
of a slider is not below its thumb, as the page's tree says, but above it."""

browser_marks = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium here; install it, for example with: apt-get install chromium"
    ),
]


def wait_for(page: Any, condition: str, arg: Any = None) -> None:
    """Wait until an expression or a function is true in a page.

    Playwright's own waiting evaluates text within the page, which a page's policy may forbid.
    """
    deadline = time.monotonic() + MILLISECONDS / 1000
    while not page.evaluate(condition, arg):
        assert time.monotonic() < deadline, f"this did not become true: {condition}"
        page.wait_for_timeout(50)


def ask(address: str, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Ask the server without a browser, by whatever name; return status, headers and body."""
    place = address.removeprefix("http://")
    named = {"Host": place} | {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection(place, timeout=120)
    with contextlib.closing(connection):
        connection.putrequest(method, path, skip_host=True)
        for name, value in named.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, found, answer.read()


def new_page(browser: Any, width: int = 1280, height: int = 900, **more: Any) -> Any:
    """Return a page of a browser that knows nothing of others; it notes hosts and console messages."""
    page = browser.new_context(viewport={"width": width, "height": height}, **more).new_page()
    page.set_default_timeout(MILLISECONDS)
    page.hosts, page.complaints = set(), []
    page.on("request", lambda request: page.hosts.add(request.url.split("/")[2]))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on(
        "console", lambda message: page.complaints.append(message.text) if message.type == "error" else None
    )
    return page


_LEFT_EARLY = (
    'WebSocketDisconnected: Cannot call "send" once a close message has been sent.',
    'WebSocketDisconnected: WebSocket is not connected. Need to call "accept" first.',
)
"""Streamlit's own traces, where a browser leaves while the server speaks or closes the connection."""


class Server:
    """The explorer in a process of its own, over one folder; its state lies beside the folder."""

    def __init__(self, folder: Path) -> None:
        self.port, self.folder = free_port(), folder
        self.address = f"http://127.0.0.1:{self.port}"
        self.log = folder.parent / "server.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *command: str, **more: str) -> None:
        """Start it in the folder, by a command of its own where one is given, and wait until it is up."""
        program = f"from inshrink_app.launch import run; run(port={self.port})"
        command = command or (sys.executable, "-c", program)
        environment = os.environ | {"XDG_STATE_HOME": str(self.folder.parent / "state")} | more
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=output, stderr=output
            )
        until(self._is_healthy)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def end(self) -> None:
        """Stop as a reader does, and look whether anything went wrong."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(MILLISECONDS / 1000)
        told = self.log.read_text()
        assert told.count("Traceback") == sum(map(told.count, _LEFT_EARLY)), told

    def link(self, name: str, **query: str) -> str:
        return f"{self.address}/{name}?{urlencode({'run': str(self.folder / 'run'), **query})}"

    def resident_nbytes(self) -> int:
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1000 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))

    def _is_healthy(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, "the explorer ended before it was up"
        try:
            return ask(self.address, "/_stcore/health")[0] == 200
        except OSError:
            return False
