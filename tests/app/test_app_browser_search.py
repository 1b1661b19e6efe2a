"""A search in a real browser: launched, cancelled, resumed, a point clicked, edited and carried on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.app.browser import FAINT, IDLE, MILLISECONDS, Server, browser_marks, wait_for
from tests.app.job_stubs import write_slow_run

pytestmark = browser_marks

JUDGE = """
import pathlib, time

def evaluate(state):
    time.sleep(0.25 if (pathlib.Path(__file__).parent.parent / "slow").exists() else 0)
    return {"loss": float(sum(value.square().sum() for value in state.values()))}
"""

POINT = """() => {
    document.querySelector(".js-plotly-plot").scrollIntoView({block: "center"});
    const box = document.querySelector(".js-plotly-plot .scatterlayer .points path").getBoundingClientRect();
    return {x: box.x + box.width / 2, y: box.y + box.height / 2};
}"""


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    """Serve the explorer over a small run whose evaluator takes its time."""
    folder = tmp_path / "root"
    folder.mkdir()
    run = write_slow_run(folder / "run")
    (run / "judge.py").write_text(JUDGE)
    (folder / "slow").touch()
    (run / "inshrink.toml").write_text('[evaluator]\nfile = "judge.py"\nmetric = "loss"\n')
    started = Server(folder)
    started.start()
    yield started
    started.end()


def n_logged(server: Server) -> int:
    """Return how many trials are in the run's log."""
    log = server.folder / "run" / ".inshrink" / "search.jsonl"
    return len(log.read_text().splitlines()) - 1 if log.exists() else 0


def test_a_search_is_launched_cancelled_and_resumed_and_its_best_goes_on_to_the_export(server, page):
    page.goto(server.link("allocate", codec="uniform"))
    page.get_by_role("button", name="Evaluator").click()
    page.get_by_text("Trust this run's code and run it on this computer").click()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Search", exact=True).click()
    page.get_by_text("evaluations left").wait_for()
    page.locator(".js-plotly-plot .scatterlayer .trace").first.wait_for(state="attached")
    for _ in range(MILLISECONDS // 100):  # The picture has traces before the first trial has ended.
        if n_logged(server):
            break
        page.wait_for_timeout(100)
    page.get_by_role("button", name="Cancel").first.click()
    page.get_by_text("This was cancelled").wait_for()
    before = n_logged(server)
    assert before >= 1
    assert "job=" in page.url

    # The same link in a second tab tells the same, and goes on from there.
    (server.folder / "slow").unlink()
    page.goto(page.url)
    page.get_by_role("button", name="Resume").click()
    page.get_by_text("Best of the search:").wait_for()
    told = (server.folder.parent / "state" / "inshrink" / "jobs").glob("*/result")
    found = next(one for path in told for one in json.loads(path.read_text()) if "trials" in one)
    assert n_logged(server) == before + found["evaluations"]
    assert len(found["trials"]) == n_logged(server)

    # A click on a point loads it; an estimate says that it is one.
    page.locator(".js-plotly-plot .scatterlayer .points path").first.wait_for(state="attached")
    page.get_by_text("Click a point to load it").first.wait_for()
    wait_for(page, f"() => {IDLE}")  # The chart is drawn anew once the search has ended.
    page.wait_for_timeout(500)  # It fades in.
    place = page.evaluate(POINT)
    page.mouse.click(place["x"], place["y"])
    page.get_by_text("Undo goes back").first.wait_for()
    page.get_by_text("measured", exact=True).first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    wait_for(page, f"() => {IDLE}")
    assert page.evaluate(FAINT) == []

    page.get_by_role("button", name="Apply to compress").click()
    page.get_by_text("Configuration from the page Allocate").wait_for()
    page.get_by_text('codec = "uniform"').wait_for()
    assert page.hosts == {server.address.removeprefix("http://")}
    assert [complaint for complaint in page.complaints if "404" not in complaint] == []


def bits(page: Any) -> str:
    """Return the bits per weight that the page says, once it has told everything."""
    wait_for(page, f"() => {IDLE}")
    return str(page.get_by_test_id("stMetric").filter(has_text="Bits per weight").first.inner_text())


def coarser(page: Any) -> str:
    """Move all layers by a notch, and return what they take then."""
    before = bits(page)
    page.get_by_role("slider").first.press("ArrowRight")
    page.get_by_text("changed by hand").first.wait_for()
    wait_for(page, f"() => {IDLE}")
    while bits(page) == before:
        page.wait_for_timeout(200)
    return bits(page)


def test_a_draft_outlives_a_reload_and_goes_from_one_tab_to_the_other(server, page):
    (server.folder / "slow").unlink()
    page.goto(server.link("allocate"))
    page.get_by_role("button", name="Estimate without measuring").click()
    page.get_by_role("button", name="Best bits for this size").wait_for()
    first = coarser(page)
    page.reload()
    page.get_by_text("or in this one before a reload").wait_for()
    assert bits(page) == first

    other = page.context.browser.new_context().new_page()
    other.goto(page.url)
    other.get_by_text("made in another tab").wait_for()
    assert bits(other) == first
    second = coarser(other)
    assert second != first
    page.get_by_text("Settings and overrides").click()
    page.get_by_text("Another tab has changed the bits of this run since").wait_for()
    assert bits(page) == first, "a draft is taken over where the reader says so"
    page.get_by_role("button", name="Take over its draft").click()
    page.get_by_text("Another tab has changed").wait_for(state="detached")
    assert bits(page) == second
    page.get_by_role("button", name="Undo").click()
    until = time.monotonic() + 30
    while bits(page) == second and time.monotonic() < until:
        page.wait_for_timeout(200)
    assert bits(page) == first
    assert page.get_by_text("Another tab has changed").count() == 0
    other.close()
