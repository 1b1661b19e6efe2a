"""A search in a real browser: launched, cancelled, resumed, taken and undone; and bits in two tabs."""

from __future__ import annotations

import re
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


def trust(page: Any) -> None:
    """Trust the evaluator in the header."""
    page.get_by_role("button", name="Evaluator").click()
    page.get_by_text("Trust this run's code and run it on this computer").click()
    page.get_by_role("button", name=re.compile("Evaluator: judge(?! not)")).wait_for()
    page.keyboard.press("Escape")


def bits(page: Any) -> str:
    """Return the bits per weight that the strip shows, once the page has told everything."""
    wait_for(page, f"() => {IDLE}")
    strip = page.locator(".st-key-strip p").filter(has_text="Bits")
    return str(strip.first.inner_text()).partition("(")[0]


def until_other(page: Any, before: str) -> str:
    """Wait until the strip shows other bits, and return them."""
    until = time.monotonic() + MILLISECONDS / 1000
    while (now := bits(page)) == before and time.monotonic() < until:
        page.wait_for_timeout(200)
    return now


def test_a_search_is_launched_cancelled_and_resumed_and_its_result_is_taken_and_undone(server, page):
    page.goto(server.link("allocate", codec="uniform"))
    page.get_by_role("button", name="Search the best bits").wait_for()
    trust(page)
    page.get_by_role("button", name="Search the best bits").click()
    page.get_by_text("evaluations left").wait_for()
    for _ in range(MILLISECONDS // 100):
        if n_logged(server) > 0:
            break
        page.wait_for_timeout(100)
    page.get_by_role("button", name="Cancel").first.click()
    page.get_by_text("Cancelled. Finished work stays").first.wait_for()
    before = n_logged(server)
    assert before >= 1
    assert "job=" in page.url

    # The same link in a second tab tells the same, and goes on from there.
    (server.folder / "slow").unlink()
    page.goto(page.url)
    page.get_by_role("button", name="Resume").click()
    page.get_by_text("Search result:").wait_for()
    page.get_by_role("button", name="Take it").click()
    page.get_by_text("Bits: the search").wait_for()
    page.get_by_role("button", name="Undo").click()
    page.get_by_role("button", name="Take it").wait_for()
    wait_for(page, f"() => {IDLE}")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate(FAINT) == []
    assert page.hosts == {server.address.removeprefix("http://")}
    assert [complaint for complaint in page.complaints if "404" not in complaint] == []


def test_bits_are_the_same_after_a_reload_and_in_every_tab_and_undo_takes_them_back(server, page):
    (server.folder / "slow").unlink()
    page.goto(server.link("run"))
    page.get_by_role("button", name="Estimate the size").click()
    page.get_by_role("button", name="Best bits for this size").wait_for()
    slider = page.get_by_role("slider").last
    slider.press("ArrowRight")
    page.get_by_text("Bits: by hand").wait_for()
    first = bits(page)
    page.reload()
    page.get_by_text("Bits: by hand").wait_for()
    assert bits(page) == first
    other = page.context.browser.new_context().new_page()
    other.goto(page.url)
    other.get_by_text("Bits: by hand").wait_for()
    assert bits(other) == first
    other.close()
    page.get_by_role("button", name="Undo").click()
    assert until_other(page, first) != first
