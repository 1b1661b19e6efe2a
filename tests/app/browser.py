"""A real browser and a server in a process of its own, for tests of what only they can show."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

__all__ = ["ARGUMENTS", "CHROMIUM", "IDLE", "MILLISECONDS", "Server", "browser_marks", "new_page"]

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

browser_marks = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium here; install it, for example with: apt-get install chromium"
    ),
]


def new_page(browser: Any, width: int = 1280, height: int = 900, **more: Any) -> Any:
    """Return a page of a browser that knows nothing of others; it notes hosts and console messages."""
    page = browser.new_context(viewport={"width": width, "height": height}, **more).new_page()
    page.set_default_timeout(MILLISECONDS)
    page.hosts, page.complaints = set(), []
    page.on("request", lambda request: page.hosts.add(request.url.split("/")[2]))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on(
        "console",
        lambda message: page.complaints.append(message.text) if message.type == "error" else None,
    )
    return page


class Server:
    """The explorer in a process of its own, over one folder; its state lies beside the folder."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self.address = f"http://127.0.0.1:{self.port}"
        self.log = folder.parent / "server.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-c", f"from inshrink_app.launch import run; run(port={self.port})"]
        environment = os.environ | {"XDG_STATE_HOME": str(self.folder.parent / "state")}
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=output, stderr=output
            )
        self._wait_until_healthy()

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def end(self) -> None:
        """Stop as a reader does, and look whether anything went wrong."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(30)
        assert "Traceback" not in self.log.read_text()

    def link(self, name: str, **query: str) -> str:
        return f"{self.address}/{name}?{urlencode({'run': str(self.folder / 'run'), **query})}"

    def resident_nbytes(self) -> int:
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1000 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))

    def _wait_until_healthy(self) -> None:
        assert self.process is not None
        for _ in range(600):
            assert self.process.poll() is None, "the explorer ended before it was up"
            try:
                with urllib.request.urlopen(f"{self.address}/_stcore/health", timeout=5) as answer:
                    answer.read()
            except (urllib.error.URLError, OSError):
                try:
                    self.process.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
            else:
                return
        pytest.fail("the explorer did not come up")
