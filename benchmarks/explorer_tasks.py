"""Five things that a new user comes for, done in headless Chromium: clicks, and seconds until they are done.

Each task begins with a server that has just been started and the Overview of the bundled run, as
`inshrink ui RUN` opens it, nothing measured and nothing kept; the last one finds an archive beside the run. A
click is a press of the mouse or of Enter; what a widget stands at already is not counted. The seconds are
those of the machine, engine's work included, and not those of a reader. Beside them in
``results/explorer_tasks.csv`` stands what the same machine takes in the same minutes to open a page of
Streamlit with one small chart.

``python -m benchmarks.explorer_tasks FOLDER`` does each task once on every run of a folder, as
`benchmarks.explorer_runs` writes them, and writes ``results/explorer_unseen.csv``. There the reader also
trusts the evaluator that lies beside the checkpoints, where the task takes one; where it does not run, a step
is proved tensor by tensor.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import inshrink_core
from benchmarks.explorer import ANY_PAGE, IDLE, any_page
from benchmarks.results import RESULTS, renew, write
from benchmarks.screenshots import CHROMIUM_ARGUMENTS, chromium, served
from benchmarks.tab import launched

REPETITIONS = 3
_LONGEST_MS = 180_000
_REACTION_MS = 300
_ROW, _TICK = 35, 18
"""Pixels of a table: height of a row, and from the left to the middle of its box."""


class Hand:
    """A reader's hand on a page, that counts.

    Parameters
    ----------
    page
        Playwright's.
    """

    def __init__(self, page: Any) -> None:
        self.page = page
        self.clicks = 0

    def press(self, name: str, role: str = "button") -> None:
        """Click on what has a name."""
        self.page.get_by_role(role, name=name, exact=True).filter(visible=True).first.click()
        self.clicks += 1

    def pick(self, label: str) -> None:
        """Choose the first of a list: one click opens it, one chooses."""
        self.page.get_by_role("combobox", name=label).filter(visible=True).first.click()
        self.page.get_by_role("option").first.click()
        self.page.keyboard.press("Escape")
        self.clicks += 2

    def tick(self, row: int) -> None:
        """Pick a row of the first table on screen, which is drawn on a canvas."""
        table = self.page.locator("[data-testid=stDataFrame]").filter(visible=True).first
        table.scroll_into_view_if_needed()
        box = table.bounding_box()
        self.page.mouse.click(box["x"] + _TICK, box["y"] + _ROW * (row + 1.5))
        self.clicks += 1

    def see(self, text: str | re.Pattern[str]) -> str:
        """Wait until the page says something, and return what."""
        found = self.page.get_by_text(text).filter(visible=True).first
        found.wait_for()
        return str(found.inner_text())

    def consent(self) -> None:
        """Trust the run's own code, where the page asks for that."""
        self.see(re.compile("Device"))
        asked = self.page.get_by_text("Trust this run's code").filter(visible=True)
        if asked.count():
            asked.first.click()
            self.clicks += 1
            self.page.wait_for_timeout(_REACTION_MS)
            while not self.page.evaluate(IDLE):
                self.page.wait_for_timeout(_REACTION_MS)


def most_sensitive_layer(hand: Hand) -> None:
    """Read who carries the Fisher sensitivity, that the page measures by itself of a small run."""
    hand.press("Sensitivity", "link")
    hand.see(re.compile("of the (sensitivity|movement)"))


def shrink_under_a_bound(hand: Hand) -> None:
    """Write, verify and compare an archive that training resumes from, at the default restore cost."""
    hand.consent()
    hand.press("Shrink it")
    if hand.see(re.compile("^(Open the archive|Try again)$")) == "Try again":  # The evaluator does not run.
        hand.see("The evaluator does not run")
        hand.press("Shrink it")
        hand.see("Open the archive")


def one_block_finer(hand: Hand) -> None:
    """Give a block more bits, and read what all steps then take."""
    hand.press("Allocate", "link")
    hand.see("Best bits for this size")
    hand.tick(1)
    before = hand.page.get_by_test_id("stMetricValue").first.inner_text()
    hand.press("More bits")
    hand.page.wait_for_function(
        "before => document.querySelector('[data-testid=stMetricValue]').innerText !== before", arg=before
    )


def export_for_transfer(hand: Hand) -> None:
    """Write the last step's weights without a layer, an eighth of float32."""
    hand.press("Export", "link")
    hand.press("One step", "radio")
    hand.pick("Leave out")
    hand.press("Export")
    hand.see("Exported")


def prove_a_restored_step(hand: Hand) -> None:
    """Restore steps of the archive beside the run, evaluate them, and read what they cost."""
    hand.press("Restore & compare", "link")
    hand.see("What to compare")  # The page before it asks for consent too.
    hand.consent()
    if hand.page.get_by_role("button", name="Compare", exact=True).count():
        hand.press("Compare")
        if hand.see(re.compile("^(Largest drop|Try again)$")) == "Largest drop":
            return
    hand.press("Measure errors")
    hand.see("Bit-exact")


TASKS: dict[str, Callable[[Hand], None]] = {
    "find the most sensitive layer": most_sensitive_layer,
    "shrink the run under a bound": shrink_under_a_bound,
    "give one block more bits and see the price": one_block_finer,
    "export for transfer": export_for_transfer,
    "prove a restored step": prove_a_restored_step,
}


def done(browser: Any, task: Callable[[Hand], None], source: Path) -> tuple[int, float]:
    """Do a task on a run from a fresh start; return clicks, and seconds from the address to the answer."""
    with tempfile.TemporaryDirectory(prefix="runs-", ignore_cleanup_errors=True) as temporary:
        run = Path(temporary) / source.name
        ignored = shutil.ignore_patterns(".inshrink", "__pycache__")
        shutil.copytree(source, run, ignore=ignored)
        if task is prove_a_restored_step:
            inshrink_core.compress(run, run.with_suffix(".inshrink"))
        with served(run.parent) as (address, _):
            page = browser.new_page(viewport={"width": 1440, "height": 1000})
            page.set_default_timeout(_LONGEST_MS)
            hand, begun = Hand(page), time.perf_counter()
            page.goto(f"{address}/overview?{urlencode({'run': str(run)})}")
            task(hand)
            seconds = time.perf_counter() - begun
            page.close()
    return hand.clicks, seconds


def main(quick: bool = False) -> Path:
    """Write ``results/explorer_tasks.csv``; quick: each task once."""
    from playwright.sync_api import sync_playwright

    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    clicks: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in TASKS}
    plain: list[float] = []
    _, script, ready = ANY_PAGE[1]
    with (
        tempfile.TemporaryDirectory(prefix="page-", ignore_cleanup_errors=True) as folder,
        launched(chromium(), CHROMIUM_ARGUMENTS) as other,
        sync_playwright() as engine,
    ):
        browser = engine.chromium.launch(executable_path=chromium(), args=CHROMIUM_ARGUMENTS)
        for _ in range(1 if quick else REPETITIONS):
            plain.append(any_page(other, Path(folder), script, ready).seconds)
            for name, task in TASKS.items():
                clicks[name], took = done(browser, task, inshrink_core.sample("digits-cnn"))
                seconds[name].append(took)
                sys.stderr.write(f"{name}: {clicks[name]} clicks, {took:.1f} s\n")
        browser.close()
    rows = [
        {
            "task": name,
            "clicks": clicks[name],
            "seconds": statistics.median(times),
            "seconds_any_page": statistics.median(plain),
            "repetitions": len(times),
        }
        for name, times in seconds.items()
    ]
    return write("explorer_tasks_quick" if quick else "explorer_tasks", rows)


def unseen(folder: Path) -> Path:
    """Do every task on every run of a folder, and renew their rows of ``results/explorer_unseen.csv``."""
    from playwright.sync_api import sync_playwright

    path = RESULTS / "explorer_unseen.csv"
    with sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=chromium(), args=CHROMIUM_ARGUMENTS)
        for run in sorted(path for path in folder.iterdir() if path.is_dir()):
            for name, task in TASKS.items():
                load = os.getloadavg()[
                    0
                ]  # Times are those of a quiet machine only where this is about nothing.
                clicks, took = done(browser, task, run)
                row = {"run": run.name, "task": name, "clicks": clicks, "seconds": took, "load": load}
                path = renew("explorer_unseen", [row], ["run", "task"])
                sys.stderr.write(f"{run.name}, {name}: {clicks} clicks, {took:.1f} s\n")
        browser.close()
    return path


if __name__ == "__main__":
    if folders := [word for word in sys.argv[1:] if not word.startswith("-")]:
        unseen(Path(folders[0]))
    else:
        main(quick="--quick" in sys.argv)
