"""Take the screenshots of the explorer that the documentation shows (`make screenshots`).

Serves the explorer from a temporary folder with the sample run and an archive of it, and drives a
Chromium that is installed already (Playwright's own browsers are not needed).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import inshrink_core

IMAGES = Path(__file__).parents[1] / "docs" / "images"
LARGEST_BYTES = 200_000
"""A page that shows these images should load at once."""

CHROMIUM_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
SIZE = {"width": 1440, "height": 900}
"""Size of the window in pixels."""


class Shot(NamedTuple):
    """One picture, of the file that has the page's name.

    Parameters
    ----------
    page
        The page of the explorer.
    query
        What the link says beside the run.
    button
        A button to press first.
    awaits
        Texts that appear then.
    chart
        What the page's first chart is drawn with.
    """

    page: str
    query: dict[str, str]
    button: str
    awaits: tuple[str, ...]
    chart: str


SHOTS = (
    Shot(
        "run",
        {"metric": "fisher", "layer": "conv2.weight", "step": "900"},
        "Measure Fisher",
        ("estimated", "carry at least 80 %", "bits per weight"),
        ".heatmaplayer image",
    ),
    Shot("archives", {"panel": "compare"}, "Compare", (), ".scatterlayer .trace"),
)

EXPLORER = "from inshrink_app.launch import run; run(port={port})"


@contextmanager
def served(folder: Path, program: str = EXPLORER) -> Iterator[str]:
    """Serve the explorer with one root, and yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", program.format(port=port)]
    environment = os.environ | {"XDG_STATE_HOME": str(folder / ".state")}
    server = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


def chromium() -> str:
    """Return Chromium's path; where there is none, say so and end."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    return found or sys.exit("no Chromium here; install it, for example with: apt-get install chromium")


def take(browser: Any, address: str, run: Path, shot: Shot, target: Path) -> None:
    """Open a page by its link, wait until its charts are drawn, and save what a reader sees."""
    context = browser.new_context(viewport=SIZE, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(f"{address}/{shot.page}?{urlencode({'run': str(run), **shot.query})}")
    page.get_by_role("button", name=shot.button, exact=True).click()
    for text in shot.awaits:
        page.get_by_text(text).filter(visible=True).first.wait_for()
    page.mouse.move(0, 0)  # A button that was pressed shows its tip as long as the pointer is on it.
    page.locator(f".js-plotly-plot {shot.chart}").first.wait_for(state="attached")
    page.locator("[data-testid=stExpander]").last.wait_for(state="attached")
    page.locator("[data-testid=stProgress]").filter(visible=True).wait_for(state="hidden")
    # A click scrolls to its button, which may lie below.
    page.evaluate("document.querySelector('[data-testid=stMain]').scrollTo(0, 0)")
    # Charts fade in; nothing in the page tells when that is over.
    page.wait_for_timeout(2500)
    page.screenshot(path=target)
    context.close()


def main() -> None:
    """Take every picture."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="runs-") as temporary:
        folder = Path(temporary)
        run = folder / "digits-cnn"
        shutil.copytree(
            inshrink_core.sample("digits-cnn"), run, ignore=shutil.ignore_patterns(".inshrink", "__pycache__")
        )
        inshrink_core.compress(run, folder / "digits-cnn.inshrink")
        with served(folder) as address, sync_playwright() as engine:
            browser = engine.chromium.launch(executable_path=chromium(), args=CHROMIUM_ARGUMENTS)
            for shot in SHOTS:
                target = IMAGES / f"{shot.page}.png"
                take(browser, address, run, shot, target)
                size = target.stat().st_size
                sys.stdout.write(f"{target} {size / 1000:.0f} kB\n")
                if size > LARGEST_BYTES:
                    sys.exit(f"{target} is larger than {LARGEST_BYTES} bytes")
            browser.close()


if __name__ == "__main__":
    main()
