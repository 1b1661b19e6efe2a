"""How long the explorer takes: the first map of 50 checkpoints, and the map of 400 layers by 200 steps.

Chromium, driven by Playwright, opens pages of a server that has just been started. Each time runs from the
address to the page; a page is ready when its charts are drawn and the server has nothing left to do. A page
of Streamlit with one small chart, opened in the same way in the same minutes, shows what any page takes here;
Playwright's inspector adds about a second to every page with a chart. Chromium must be installed.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import torch

from benchmarks.results import write
from benchmarks.screenshots import CHROMIUM_ARGUMENTS, EXPLORER, chromium, served
from benchmarks.verbs import write_run

PARTS = ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")
N_BLOCKS, N_STEPS, N_SMALL_STEPS = 100, 200, 50
SIDE = 16
"""Tensors are small, because what is measured is the page and not the disk."""

SHAPE = f"{SIDE}×{SIDE}"
"""How the row of a tensor ends; the row of a module ends with how many tensors it holds."""

N_CLICKS = 9
N_STARTS = 3
METRIC = "magnitude"
SIZE = "400 layers, 200 steps"
MARGIN = 10
"""Pixels at the lower edge of the window that are not clicked."""

ONE_CHART_PAGE = "any Streamlit page, one small chart"
ONE_CHART = (
    "import streamlit as st\nimport plotly.graph_objects as go\nst.metric('Checkpoints', '50')\n"
    "st.plotly_chart(go.Figure(go.Heatmap(z=[[0, 1], [2, 3]])), key='chart')\n"
)
PLAIN = (
    "import streamlit as st; from inshrink_app.launch import server_config; "
    "st.App('page.py').run(config=server_config('127.0.0.1', {port}))"
)
"""Serves a script with the explorer's own settings of the server."""

IDLE = "document.querySelector('[data-testid=stApp]')?.dataset.testScriptState === 'notRunning'"
HEATMAP = "document.querySelector('.st-key-heatmap .js-plotly-plot')"
CELLS = "document.querySelector('.st-key-heatmap .js-plotly-plot .nsewdrag')"
DRAWN = f"{HEATMAP}?.dataset.cells && {CELLS} && {HEATMAP}.querySelector('.heatmaplayer image') && {IDLE}"
INSIDE = (
    "layer => document.querySelector('.st-key-panel')?.innerText.includes(layer)"
    f" && document.querySelector('.st-key-panel .js-plotly-plot') && {IDLE}"
)


def blocks(n: int) -> dict[str, torch.Tensor]:
    """Return the weights of so many blocks."""
    generator = torch.Generator().manual_seed(0)
    names = [f"blocks.{i}.{part}.weight" for i in range(n) for part in PARTS]
    return {name: 0.05 * torch.randn(SIDE, SIDE, generator=generator) for name in names}


def measure_run(folder: Path) -> None:
    """Store what an earlier explorer leaves on disk: the headers of the run, and a finished measurement."""
    os.environ["XDG_STATE_HOME"] = str(folder / ".state")
    from inshrink_app.server import roots
    from inshrink_app.services import load_subject, sensitivity_work, start_job

    roots.configure([folder])
    work = sensitivity_work(load_subject(str(folder / "run")), METRIC)
    job = start_job(work, again=False)
    while job.is_running:
        time.sleep(0.2)
        job = start_job(work, again=False)
    if job.state != "finished":
        raise RuntimeError(f"the measurement ended as {job.state}")


def open_page(page: Any, url: str, ready: str) -> float:
    """Open a page, and return the seconds until it is ready."""
    begun = time.perf_counter()
    page.goto(url, wait_until="commit")
    page.wait_for_function(ready)
    return time.perf_counter() - begun


def click(page: Any, x_share: float, y_share: float) -> float:
    """Click on the row of a tensor, and return the seconds until the inside of that tensor is shown."""
    x, y, width, height = page.evaluate(
        f"(one => [one.x, one.y, one.width, one.height])({CELLS}.getBoundingClientRect())"
    )
    rows: list[str] = page.evaluate(f"[...{HEATMAP}._fullData[1].y]")
    # Each row is about a pixel high, and a browser reports whole pixels.
    visible = range(math.ceil(y), min(math.floor(y + height), page.viewport_size["height"] - MARGIN))
    tensors = [pixel for pixel in visible if rows[int((pixel - y) / height * len(rows))].endswith(SHAPE)]
    layer, nth = "", int(y_share * len(tensors))
    while not layer.endswith(".weight"):  # At the edge of two rows a click may fall on the next one.
        before = json.dumps(page.url)
        begun = time.perf_counter()
        page.mouse.click(x + x_share * width, tensors[nth])
        page.wait_for_function(f"location.href !== {before} && location.search.includes('layer=')")
        layer = page.evaluate("new URLSearchParams(location.search).get('layer')")
        nth = (nth + 1) % len(tensors)
    page.wait_for_function(INSIDE, arg=layer)
    return time.perf_counter() - begun


def measure(browser: Any, scratch: Path, quick: bool) -> dict[str, list[float]]:
    """Take every time, in turns, so that other work of the machine falls on all of them."""
    small, large, plain = (scratch / name for name in ("small", "large", "plain"))
    for folder in (small, large, plain):
        folder.mkdir()
    n_blocks, n_steps = (4, 5) if quick else (N_BLOCKS, N_STEPS)
    write_run(small / "run", blocks(10), moments=False, n_steps=N_SMALL_STEPS)
    write_run(large / "run", blocks(n_blocks), moments=False, n_steps=n_steps)
    measure_run(large)
    (plain / "page.py").write_text(ONE_CHART)
    found, places = defaultdict[str, list[float]](list), random.Random(0)

    def first(label: str, folder: Path, program: str, path: str, ready: str, clicks: int = 0) -> None:
        with served(folder, program) as address, browser.new_context(bypass_csp=True) as context:
            page = context.new_page()
            page.set_default_timeout(120_000)
            found[label].append(open_page(page, f"{address}/{path}", ready))
            for number in range(clicks):
                seconds = click(page, places.uniform(0.05, 0.95), places.uniform(0.05, 0.95))
                what = "click to drill-down" if number else "first click after a start"
                found[f"{what}, {SIZE}"].append(seconds)

    opened = f"run?{urlencode({'run': small / 'run'})}"
    heatmap = f"run?{urlencode({'run': large / 'run', 'metric': METRIC, 'by': 'tensor'})}"
    for number in range(1 + (1 if quick else N_STARTS)):
        first(ONE_CHART_PAGE, plain, PLAIN, "", f"document.querySelector('.heatmaplayer image') && {IDLE}")
        shutil.rmtree(small / ".state", ignore_errors=True)
        label = f"first paint, {N_SMALL_STEPS} checkpoints, headers not kept"
        first(label, small, EXPLORER, opened, DRAWN)
        first(f"page interactive, {SIZE}, by tensor", large, EXPLORER, heatmap, DRAWN, N_CLICKS + 1)
        if not number:  # The first round compiles what the interpreter has not seen.
            found.clear()
    return found


def main(quick: bool = False) -> Path:
    """Write ``results/explorer.csv``."""
    from playwright.sync_api import sync_playwright

    # An installed package is compiled once; without this, every start would compile the explorer again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with (
        tempfile.TemporaryDirectory(prefix="explorer-", ignore_cleanup_errors=True) as scratch,
        sync_playwright() as engine,
    ):
        browser = engine.chromium.launch(executable_path=chromium(), args=CHROMIUM_ARGUMENTS)
        found = measure(browser, Path(scratch), quick)
        browser.close()
    load = f"load {os.getloadavg()[0] / (os.cpu_count() or 1):.1f} a core"
    one_chart = statistics.median(found[ONE_CHART_PAGE])
    rows = [
        {
            "measurement": label,
            "value": statistics.median(seconds),
            "unit": "s",
            "to_one_chart": statistics.median(seconds) / one_chart,
            "detail": f"{len(seconds)} times, {min(seconds):.2f} to {max(seconds):.2f} s; {load}",
        }
        for label, seconds in found.items()
    ]
    return write("explorer_quick" if quick else "explorer", rows)


if __name__ == "__main__":
    main()
