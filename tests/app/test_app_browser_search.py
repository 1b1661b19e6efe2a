"""A search in a real browser: launched, cancelled, resumed, taken and undone."""

import re
from collections.abc import Iterator

import pytest

from tests.app.browser import FAINT, IDLE, Server, browser_marks, wait_for
from tests.app.builders import judged
from tests.app.job_stubs import write_slow_run
from tests.processes import until

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
    judged(run, JUDGE)
    (folder / "slow").touch()
    started = Server(folder)
    started.start()
    yield started
    started.end()


def test_a_search_is_launched_cancelled_and_resumed_and_its_result_is_taken_and_undone(server, page):
    page.goto(server.link("run", codec="uniform"))
    page.get_by_role("button", name="Search for the best bits").wait_for()
    page.get_by_role("button", name="Evaluator").click()
    page.get_by_text("Trust this run's code and run it on this computer").click()
    page.get_by_role("button", name=re.compile("Evaluator: judge(?! not)")).wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Search for the best bits").click()
    page.get_by_text("evaluations left").wait_for()
    log = server.folder / "run" / ".inshrink" / "search.jsonl"
    until(lambda: log.exists() and log.read_text())
    page.get_by_role("button", name="Cancel").first.click()
    page.get_by_text("Cancelled. Finished work is kept").first.wait_for()
    assert log.read_text()
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
