"""The explorer in a real browser: the sample is opened and its heatmap drawn, quietly and offline."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium here; install it, for example with: apt-get install chromium"
    ),
]


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Serve the explorer from an unrelated folder, and return its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", f"from inshrink_app.launch import run; run(port={port})"]
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
    log = tmp_path / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=output)
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}", server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(30)
    assert "Traceback" not in log.read_text()


def wait_until_healthy(address: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers."""
    for _ in range(300):
        assert server.poll() is None, "the explorer ended before it was up"
        try:
            with urllib.request.urlopen(f"{address}/_stcore/health", timeout=5) as answer:
                answer.read()
        except (urllib.error.URLError, OSError):
            try:
                server.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
        else:
            return
    pytest.fail("the explorer did not come up")


@pytest.fixture
def page() -> Iterator[Any]:
    """Return a browser page that records hosts and console messages."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="install it with: pip install 'inshrink[dev]'"
    )
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        opened = browser.new_page(viewport={"width": 1280, "height": 900})
        opened.set_default_timeout(MILLISECONDS)
        opened.hosts, opened.complaints = set(), []
        opened.on("request", lambda request: opened.hosts.add(request.url.split("/")[2]))
        opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.on(
            "console",
            lambda message: opened.complaints.append(message.text) if message.type == "error" else None,
        )
        yield opened
        browser.close()


def test_the_sample_is_opened_and_its_heatmap_is_drawn_without_a_word_to_others(
    address: str, page: Any
) -> None:
    page.goto(address)
    page.get_by_role("button", name="Open digits-cnn").click()
    page.get_by_role("heading", name="digits-cnn").wait_for()
    page.get_by_text("Size by role").wait_for()
    page.get_by_role("link", name="Sensitivity").click()
    page.locator(".js-plotly-plot .heatmaplayer image").first.wait_for(state="attached")
    page.get_by_text("Fisher", exact=True).click()
    page.get_by_text("Adam's second moment, bias-corrected").wait_for()
    page.locator(".js-plotly-plot .heatmaplayer image").first.wait_for(state="attached")
    assert "metric=fisher" in page.url
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.complaints == []
    assert page.hosts == {address.removeprefix("http://")}

    # The address alone shows the same. Streamlit probes beside a deep link for its server: two 404s.
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    page.get_by_text("Adam's second moment, bias-corrected").wait_for()
    page.locator(".js-plotly-plot .heatmaplayer image").first.wait_for(state="attached")
    assert [complaint for complaint in page.complaints if "404" not in complaint] == []
    assert len(page.complaints) <= 2


def test_a_page_that_rebinds_its_name_to_this_computer_gets_no_session(address: str) -> None:
    host, _, port = address.removeprefix("http://").partition(":")
    answers = {}
    for name in (host, "evil.example"):
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(
                f"GET /_stcore/stream HTTP/1.1\r\nHost: {name}\r\nOrigin: http://{name}\r\n"
                "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
            )
            answers[name] = connection.recv(64).split(b" ")[1]
    assert answers == {host: b"101", "evil.example": b"403"}
