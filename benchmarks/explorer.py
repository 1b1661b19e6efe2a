"""How long the explorer takes: a run of 50 checkpoints on screen, 400 layers by 200 steps to look into, and
the heatmaps of 3,000 tensors and of 1,000 checkpoints.

A browser opens pages of a server that has just been started, as a reader does after a restart: headers and
measurements are on disk from before where a row says so. Interactive: every chart is drawn, and the server
has nothing left to do. Every row is the whole time, from the address to the page. Beside them stand two pages
that are not ours, opened in the same way in the same minutes: what any page of Streamlit takes here, with one
figure and with one small chart. Chromium must be installed.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

import torch

from benchmarks.footprint import N_SMALL_STEPS, write_small_run
from benchmarks.results import write
from benchmarks.screenshots import CHROMIUM_ARGUMENTS, chromium, served
from benchmarks.tab import HEIGHT, Browser, Tab, launched

PARTS = ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")
SIDE = 16
"""Tensors are small, because what is measured is the page and not the disk."""

SHAPE = f"{SIDE}×{SIDE}"
"""How the row of a tensor ends; that of a module ends with how many it holds."""

RUNS = {"huge": (100, 200), "wide": (750, 20), "long": (10, 1000)}
"""Blocks and steps of each run."""

N_CLICKS = 9
N_STARTS = 3
METRIC = "magnitude"
LEVELS = {"2": "block", "tensor": "tensor"}
"""What a row is, by its word in a link."""

SIZE = "400 layers, 200 steps"

PLAIN = (
    "import streamlit as st; from inshrink_app.launch import server_config; "
    "st.App('page.py').run(config=server_config('127.0.0.1', {port}))"
)
"""Serves a script with the explorer's own settings of the server."""

IDLE = "document.querySelector('[data-testid=stApp]')?.dataset.testScriptState === 'notRunning'"
HEATMAP = "document.querySelector('.st-key-heatmap .js-plotly-plot')"
HEATMAP_PANEL = "document.querySelector('.st-key-heatmap .js-plotly-plot .nsewdrag')"
DRAWN = (
    f"{HEATMAP}?.dataset.cells && {HEATMAP_PANEL} && {HEATMAP}.querySelector('.heatmaplayer image') && {IDLE}"
)
FACTS = "document.querySelectorAll('[data-testid=stMetricValue]').length >= 4"
INSIDE = (
    "layer => [...document.querySelectorAll('h2, h3')].some(one => one.innerText === layer)"
    " && document.querySelector('.st-key-drill-histogram .js-plotly-plot .barlayer .point')"
    f" && document.querySelectorAll('[data-testid=stMetricValue]').length >= 4 && {IDLE}"
)

ONE_FIGURE = "import streamlit as st\nst.metric('Checkpoints', '50')\n"
ONE_CHART = (
    f"{ONE_FIGURE}import plotly.graph_objects as go\n"
    "st.plotly_chart(go.Figure(go.Heatmap(z=[[0, 1], [2, 3]])), key='chart')\n"
)
ANY_PAGE = (
    ("one figure", ONE_FIGURE, f"document.querySelector('[data-testid=stMetricValue]') && {IDLE}"),
    ("one small chart", ONE_CHART, f"document.querySelector('.heatmaplayer image') && {IDLE}"),
)
ONE_CHART_PAGE = f"any Streamlit page, {ANY_PAGE[-1][0]}"


class Server(NamedTuple):
    """A server that has just been started: its address and its process."""

    address: str
    pid: int

    def resident_nbytes(self) -> int:
        """Return the memory it holds now."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmRSS")))

    def cpu_seconds(self) -> float:
        """Return the processor time it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def started(folder: Path) -> Iterator[Server]:
    """Start the explorer over a folder."""
    with served(folder) as (address, pid):
        yield Server(address, pid)


def write_run(directory: Path, n_blocks: int, n_steps: int) -> None:
    """Write a run of so many blocks and steps."""
    generator = torch.Generator().manual_seed(0)
    names = [f"blocks.{i}.{part}.weight" for i in range(n_blocks) for part in PARTS]
    state = {name: 0.05 * torch.randn(SIDE, SIDE, generator=generator) for name in names}
    directory.mkdir()
    for step in range(1, n_steps + 1):
        for name, weight in state.items():
            state[name] = weight + 1e-3 * torch.randn(SIDE, SIDE, generator=generator)
        torch.save({"model": state, "step": 100 * step}, directory / f"step_{100 * step}.pt")


def keep_measurements(folder: Path) -> None:
    """Leave what an earlier explorer leaves on disk: the headers of each run, and a finished measurement."""
    os.environ["XDG_STATE_HOME"] = str(folder / ".state")
    from inshrink_app.server import roots
    from inshrink_app.services.measuring import start_sensitivity

    roots.configure([folder])
    for name in RUNS:
        job = start_sensitivity(str(folder / name), METRIC)
        while job.is_running:
            time.sleep(0.2)
            job = start_sensitivity(str(folder / name), METRIC)
        if job.state != "finished":
            raise RuntimeError(f"the measurement ended as {job.state}")


class Times(NamedTuple):
    """How long something took: on the clock, and of the processor in server and browser."""

    seconds: float
    server: float
    browser: float


def opened(tab: Tab, server: Server, url: str, ready: str) -> Times:
    """Open a page, and wait until it is ready."""
    server_cpu, browser_cpu, begun = server.cpu_seconds(), tab.browser.cpu_seconds(), time.perf_counter()
    tab.goto(url)
    tab.wait(ready)
    seconds = time.perf_counter() - begun
    return Times(seconds, server.cpu_seconds() - server_cpu, tab.browser.cpu_seconds() - browser_cpu)


def click(tab: Tab, place: tuple[float, float]) -> float:
    """Click into the heatmap, on the row of a tensor: those between are modules, which only list theirs.

    Returns the seconds until the inside of that tensor is on the page.
    """
    x, y, width, height = tab.value(
        f"(one => [one.x, one.y, one.width, one.height])({HEATMAP_PANEL}.getBoundingClientRect())"
    )
    rows: list[str] = tab.value(f"[...{HEATMAP}._fullData[1].y]")
    # Of so many rows each is about a pixel high, and a browser tells of whole pixels.
    in_sight = range(math.ceil(y), min(math.floor(y + height), HEIGHT - 10))
    tensors = [pixel for pixel in in_sight if rows[int((pixel - y) / height * len(rows))].endswith(SHAPE)]
    layer, nth = "", int(place[1] * len(tensors))
    while not layer.endswith(".weight"):  # At the edge of two rows a click may fall on the next one.
        before = json.dumps(tab.value("location.href"))
        begun = time.perf_counter()
        tab.click(x + place[0] * width, tensors[nth])
        tab.wait(f"location.href !== {before} && location.search.includes('layer=')")
        layer = tab.value("new URLSearchParams(location.search).get('layer')")
        nth = (nth + 1) % len(tensors)
    tab.wait(f"({INSIDE})({json.dumps(layer)})")
    return time.perf_counter() - begun


def any_page(browser: Browser, folder: Path, script: str, ready: str) -> Times:
    """Open a page that is not ours: what Streamlit and Chromium take by themselves."""
    (folder / "page.py").write_text(script)
    with served(folder, PLAIN) as (address, pid), browser.tab() as tab:
        return opened(tab, Server(address, pid), address, ready)


def first_paint(browser: Browser, folder: Path, *, kept: bool) -> Times:
    """Open the Overview of a run of 50 checkpoints, until its facts are on the page."""
    if not kept:
        shutil.rmtree(folder / ".state", ignore_errors=True)
    with started(folder) as server, browser.tab() as tab:
        link = urlencode({"run": str(folder / "run")})
        return opened(tab, server, f"{server.address}/overview?{link}", FACTS)


def heatmap(browser: Browser, folder: Path, by: str, found: Found, places: random.Random) -> None:
    """Open the heatmap of 400 layers or their 100 blocks; look inside again and again; open it once more."""
    with started(folder) as server, browser.tab() as tab:
        link = urlencode({"run": str(folder / "huge"), "metric": METRIC, "by": by})
        url = f"{server.address}/sensitivity?{link}"
        found.add(f"page interactive, {SIZE}, by {LEVELS[by]}", opened(tab, server, url, DRAWN))
        if by != "tensor":
            return
        found.memory.append((server.resident_nbytes(), 0))
        for number in range(N_CLICKS + 1):
            seconds = click(tab, (places.uniform(0.05, 0.95), places.uniform(0.05, 0.95)))
            label = "click to drill-down" if number else "first click after a start"
            found.add(f"{label}, {SIZE}", Times(seconds, 0.0, 0.0))
        found.memory[-1] = (found.memory[-1][0], server.resident_nbytes())
        tab.goto("about:blank")
        found.add(
            f"page interactive at a second visit, {SIZE}, by {LEVELS[by]}", opened(tab, server, url, DRAWN)
        )


def large(browser: Browser, folder: Path, name: str, found: Found) -> None:
    """Open the Overview of a larger run, and its heatmap."""
    n_blocks, n_steps = RUNS[name]
    size = f"{n_blocks * len(PARTS):,} tensors, {n_steps:,} steps"
    with started(folder) as server, browser.tab() as tab:
        overview = urlencode({"run": str(folder / name)})
        found.add(f"first paint, {size}", opened(tab, server, f"{server.address}/overview?{overview}", FACTS))
        tab.goto("about:blank")
        heat = urlencode({"run": str(folder / name), "metric": METRIC, "by": "tensor"})
        times = opened(tab, server, f"{server.address}/sensitivity?{heat}", DRAWN)
        found.add(f"page interactive, {size}, by tensor", times)
        found.resident.setdefault(size, []).append(server.resident_nbytes())


class Found:
    """What was measured, by what it is; how busy the machine was is noted with every time."""

    def __init__(self) -> None:
        self.times: dict[str, list[Times]] = {}
        self.load: dict[str, list[float]] = {}
        self.memory: list[tuple[int, int]] = []
        self.resident: dict[str, list[int]] = {}

    def add(self, label: str, times: Times) -> None:
        """Note one time."""
        self.times.setdefault(label, []).append(times)
        self.load.setdefault(label, []).append(os.getloadavg()[0] / (os.cpu_count() or 1))

    def rows(self) -> list[dict[str, object]]:
        """Return a row for each thing measured: the whole time, with nothing taken off."""
        rows: list[dict[str, object]] = [self._row(label) for label in self.times]
        rows += [
            {
                "measurement": f"memory of the server, {size}",
                "value": statistics.median(nbytes) / 1e6,
                "unit": "MB",
            }
            for size, nbytes in self.resident.items()
        ]
        if self.memory:
            rows.append(
                {
                    "measurement": f"memory of the server after {N_CLICKS + 1} clicks",
                    "value": statistics.median(after for _, after in self.memory) / 1e6,
                    "unit": "MB",
                    "detail": f"{self.memory[0][0] / 1e6:.0f} MB before the clicks",
                }
            )
        return rows

    def _row(self, label: str) -> dict[str, object]:
        times = self.times[label]
        seconds = [one.seconds for one in times]
        detail = f"{len(times)} times, {min(seconds):.2f} to {max(seconds):.2f} s"
        if times[0].browser:
            server = statistics.median(one.server for one in times)
            browser = statistics.median(one.browser for one in times)
            detail += f"; processor time {server:.2f} s in the server, {browser:.2f} s in the browser"
        detail += f"; load {statistics.median(self.load[label]):.1f} a core"
        value = statistics.median(seconds)
        ratio = value / statistics.median(one.seconds for one in self.times[ONE_CHART_PAGE])
        return {"measurement": label, "value": value, "unit": "s", "to_one_chart": ratio, "detail": detail}


def measured(browser: Browser, scratch: Path, quick: bool) -> Found:
    """Take every time, in turns, so that what else the machine does falls on all of them."""
    small, runs, plain = (scratch / name for name in ("small", "runs", "plain"))
    for folder in (small, runs, plain):
        folder.mkdir()
    (small / "run").mkdir()
    write_small_run(small / "run")
    if not quick:
        for name, (n_blocks, n_steps) in RUNS.items():
            write_run(runs / name, n_blocks, n_steps)
        keep_measurements(runs)
    first_paint(browser, small, kept=True)  # Not counted: the interpreter compiles what it never saw.
    found, places = Found(), random.Random(0)
    for _ in range(1 if quick else N_STARTS):
        for label, script, ready in ANY_PAGE:
            found.add(f"any Streamlit page, {label}", any_page(browser, plain, script, ready))
        for kept, label in ((False, "headers not kept"), (True, "headers kept")):
            times = first_paint(browser, small, kept=kept)
            found.add(f"first paint, {N_SMALL_STEPS} checkpoints, {label}", times)
        for by in () if quick else LEVELS:
            heatmap(browser, runs, by, found, places)
        for name in () if quick else ("wide", "long"):
            large(browser, runs, name, found)
    return found


def main(quick: bool = False) -> Path:
    """Write ``results/explorer.csv``."""
    # An installed package is compiled once; without this, every start would compile the explorer again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with (
        tempfile.TemporaryDirectory(prefix="explorer-", ignore_cleanup_errors=True) as scratch,
        launched(chromium(), CHROMIUM_ARGUMENTS) as browser,
    ):
        found = measured(browser, Path(scratch), quick)
    return write("explorer_quick" if quick else "explorer", found.rows())


if __name__ == "__main__":
    main()
