"""How long the explorer takes: a run of 50 checkpoints on screen, and 400 layers by 200 steps to look into.

A browser opens pages of a server that has just been started, as a reader does after a restart: headers and
measurements are on disk from before where a row says so. Interactive: every chart is drawn, and the server
has nothing left to do. Chromium must be installed; Playwright's own browsers are not needed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import numpy as np
import torch

from benchmarks.footprint import N_SMALL_STEPS, write_small_run
from benchmarks.results import write
from benchmarks.screenshots import CHROMIUM_ARGUMENTS, served

N_BLOCKS, PARTS, N_STEPS = 100, ("attn.qkv", "attn.proj", "mlp.up", "mlp.down"), 200
"""400 tensors; they are small, because what is measured is the page and not the disk."""

SIDE = 16
N_CLICKS = 9
N_STARTS = 3
METRIC = "magnitude"
MILLISECONDS = 120_000

HEATMAP = ".st-key-heatmap .js-plotly-plot"
IDLE = "document.querySelector('[data-testid=stApp]')?.dataset.testScriptState === 'notRunning'"
DRAWN = f"() => document.querySelector('{HEATMAP}')?._fullData?.length === 3 && {IDLE}"
INSIDE = (
    "layer => [...document.querySelectorAll('h3')].some(one => one.innerText === layer)"
    " && document.querySelector('.st-key-drill-histogram .js-plotly-plot .barlayer .point')"
    f" && document.querySelectorAll('[data-testid=stMetricValue]').length === 5 && {IDLE}"
)


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


def write_run(directory: Path) -> None:
    """Write a run of 400 tensors and 200 steps."""
    generator = torch.Generator().manual_seed(0)
    names = [f"blocks.{i}.{part}.weight" for i in range(N_BLOCKS) for part in PARTS]
    state = {name: 0.05 * torch.randn(SIDE, SIDE, generator=generator) for name in names}
    directory.mkdir()
    for step in range(1, N_STEPS + 1):
        for name, weight in state.items():
            state[name] = weight + 1e-3 * torch.randn(SIDE, SIDE, generator=generator)
        torch.save({"model": state, "step": 100 * step}, directory / f"step_{100 * step}.pt")


def keep_measurement(run: Path, state: Path) -> None:
    """Leave what an earlier explorer leaves on disk: the headers, and a finished measurement.

    The values are made up; the page does not know.
    """
    os.environ["XDG_STATE_HOME"] = str(state)
    from inshrink_app import roots
    from inshrink_app.services.opening import opened

    roots.configure([run.parent])
    found = opened(str(run))
    names = [row.name for row in found.subject.tensors]
    rows = {
        "tensor": [[name, "linear", 1, SIDE * SIDE, [SIDE, SIDE]] for name in names],
        "block": [[name.rpartition(".")[0], "linear", 1, SIDE * SIDE, None] for name in names],
        "layer_type": [["linear", "linear", len(names), len(names) * SIDE * SIDE, None]],
    }
    folder = state / "inshrink" / "jobs" / "00000000000000aa"
    folder.mkdir(parents=True)
    record = {"job_id": folder.name, "key": json.dumps([str(found.subject.path), found.token, METRIC])}
    record |= {"request": {"task": "sensitivity", "path": str(found.subject.path), "metric": METRIC}}
    record |= {"state": "finished", "done": 1, "total": 1, "item": "", "problem": None}
    (folder / "job.json").write_text(json.dumps(record | {"started_at": 1e9, "ended_at": 1e9}))
    generator = np.random.default_rng(0)
    with (folder / "result").open("wb") as file:
        header = {"steps": list(found.subject.steps), "rows": rows, "note": ""}
        file.write(json.dumps(header).encode() + b"\n")
        for table in rows.values():
            for _ in ("mean", "p50", "p99"):
                values = 10 ** generator.normal(-2, 0.5, (len(table), N_STEPS))
                file.write(values.astype("<f4").tobytes())


def new_page(browser: Any) -> Any:
    """Return a page of a browser that knows nothing of earlier visits."""
    page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
    page.set_default_timeout(MILLISECONDS)
    return page


def time_to_interactive(browser: Any, server: Server, run: Path, by: str) -> tuple[Any, float, float]:
    """Open the heatmap; return the page, the seconds it took, and the server's processor time of them."""
    page = new_page(browser)
    begun, cpu = time.perf_counter(), server.cpu_seconds()
    page.goto(f"{server.address}/sensitivity?{urlencode({'run': str(run), 'metric': METRIC, 'by': by})}")
    page.wait_for_function(DRAWN)
    return page, time.perf_counter() - begun, server.cpu_seconds() - cpu


def click(page: Any, place: tuple[float, float]) -> float:
    """Click into the heatmap; return the seconds until the inside of that tensor is on the page."""
    box = page.locator(f"{HEATMAP} .nsewdrag").first.bounding_box()
    seen = min(box["height"], page.viewport_size["height"] - box["y"] - 10)
    before = page.url
    begun = time.perf_counter()
    page.mouse.click(box["x"] + place[0] * box["width"], box["y"] + place[1] * seen)
    page.wait_for_function(
        "before => location.href !== before && location.search.includes('layer=')", arg=before
    )
    layer = page.evaluate("new URLSearchParams(location.search).get('layer')")
    page.wait_for_function(INSIDE, arg=layer)
    return time.perf_counter() - begun


def first_paint(browser: Any, folder: Path, label: str) -> dict[str, object]:
    """Time the Overview of a run of 50 checkpoints until its facts are on the page."""
    seconds, cpus = [], []
    for _ in range(N_STARTS):
        if "not kept" in label:
            shutil.rmtree(folder / ".state", ignore_errors=True)
        with started(folder) as server:
            page = new_page(browser)
            begun, cpu = time.perf_counter(), server.cpu_seconds()
            page.goto(f"{server.address}/overview?{urlencode({'run': str(folder / 'run')})}")
            page.get_by_test_id("stMetricValue").nth(3).wait_for()
            seconds.append(time.perf_counter() - begun)
            cpus.append(server.cpu_seconds() - cpu)
            page.context.close()
    return _row(f"first paint, {N_SMALL_STEPS} checkpoints, {label}", seconds, cpus)


def _row(label: str, seconds: list[float], cpus: list[float] | None = None) -> dict[str, object]:
    cpu = "" if cpus is None else f"; {statistics.median(cpus):.2f} s of the server's processor time"
    busy = f"; load {os.getloadavg()[0] / (os.cpu_count() or 1):.1f} a core"
    detail = f"{len(seconds)} times, {min(seconds):.2f} to {max(seconds):.2f} s{cpu}{busy}"
    return {"measurement": label, "value": statistics.median(seconds), "unit": "s", "detail": detail}


def huge(browser: Any, folder: Path) -> list[dict[str, object]]:
    """Open the heatmap of 400 layers by 200 steps, and look inside again and again."""
    run = folder / "run"
    write_run(run)
    keep_measurement(run, folder / ".state")
    rows: list[dict[str, object]] = []
    places = random.Random(0)
    first, later, memory = [], [], []
    opened: dict[str, list[tuple[float, float]]] = {"block": [], "tensor": []}
    for by in ("block", "tensor") * N_STARTS:
        with started(folder) as server:
            page, seconds, cpu = time_to_interactive(browser, server, run, by)
            opened[by].append((seconds, cpu))
            if by == "tensor":
                memory.append(server.resident_nbytes())
                for number in range(N_CLICKS + 1):
                    place = (places.uniform(0.05, 0.95), places.uniform(0.05, 0.95))
                    (later if number else first).append(click(page, place))
                memory.append(server.resident_nbytes())
            page.context.close()
    size = f"{N_BLOCKS * len(PARTS)} layers, {N_STEPS} steps"
    for by, found in opened.items():
        rows.append(
            _row(f"page interactive, {size}, by {by}", [one for one, _ in found], [cpu for _, cpu in found])
        )
    rows.append(_row(f"click to drill-down, {size}", later))
    rows.append(_row(f"first click after a start, {size}", first))
    grown = f"{memory[0] / 1e6:.0f} MB before the clicks"
    rows.append(
        {
            "measurement": f"memory of the server after {N_CLICKS + 1} clicks",
            "value": statistics.median(memory[1::2]) / 1e6,
            "unit": "MB",
            "detail": grown,
        }
    )
    return rows


def main(quick: bool = False) -> Path:
    """Write ``results/explorer.csv``."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no Chromium here; install it, for example with: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="explorer-") as scratch, sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGUMENTS)
        small = Path(scratch) / "small"
        (small / "run").mkdir(parents=True)
        write_small_run(small / "run")
        rows.append(first_paint(browser, small, "headers not kept"))
        rows.append(first_paint(browser, small, "headers kept"))
        if not quick:
            (Path(scratch) / "huge").mkdir()
            rows += huge(browser, Path(scratch) / "huge")
        browser.close()
    return write("explorer_quick" if quick else "explorer", rows)


if __name__ == "__main__":
    main()
