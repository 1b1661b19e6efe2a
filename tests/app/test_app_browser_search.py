"""A search in a real browser: launched, cancelled, resumed, a point clicked, edited and carried on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.job_stubs import write_slow_run
from tests.app.test_app_browser import CHROMIUM, page
from tests.app.test_app_browser_work import Server

__all__ = ["page"]

JUDGE = """
import time

def evaluate(state):
    time.sleep(0.25)
    return {"loss": float(sum(value.square().sum() for value in state.values()))}
"""

POINT = """() => {
    document.querySelector(".js-plotly-plot").scrollIntoView({block: "center"});
    const box = document.querySelector(".js-plotly-plot .scatterlayer .points path").getBoundingClientRect();
    return {x: box.x + box.width / 2, y: box.y + box.height / 2};
}"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium here; install it, for example with: apt-get install chromium"
    ),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Serve the explorer over a small run whose evaluator takes its time."""
    folder = tmp_path / "root"
    folder.mkdir()
    run = write_slow_run(folder / "run")
    (run / "judge.py").write_text(JUDGE)
    (run / "inshrink.toml").write_text('[evaluator]\nfile = "judge.py"\nmetric = "loss"\n')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = Server(folder, port)
    yield started
    started.process.terminate()
    started.process.wait(30)
    assert "Traceback" not in started.log.read_text()


def n_logged(server: Server) -> int:
    """Return how many trials are in the run's log."""
    log = server.folder / "run" / ".inshrink" / "search.jsonl"
    return len(log.read_text().splitlines()) - 1 if log.exists() else 0


def test_a_search_is_launched_cancelled_and_resumed_and_its_best_goes_on_to_the_export(
    server: Server, page: Any
) -> None:
    page.goto(server.link("search", codec="uniform", strategy="grid"))
    page.get_by_text("Trust this run's code and run it on this computer").click()
    page.get_by_role("button", name="Search", exact=True).click()
    page.get_by_text("evaluations left").wait_for()
    page.locator(".js-plotly-plot .scatterlayer .trace").first.wait_for(state="attached")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("This was cancelled").wait_for()
    before = n_logged(server)
    assert before >= 1
    assert "job=" in page.url

    # The same link in a second tab tells the same, and goes on from there.
    page.goto(page.url)
    page.get_by_role("button", name="Resume").click()
    page.get_by_text("What was found").wait_for()
    page.get_by_text("Best:").wait_for()
    folder = next((server.folder.parent / "state" / "inshrink" / "jobs").iterdir())
    found = json.loads((folder / "result").read_text())
    assert n_logged(server) == before + found["evaluations"]
    assert len(found["trials"]) == n_logged(server)

    # A click on a point loads it; an estimate says that it is one.
    page.locator(".js-plotly-plot .scatterlayer .points path").first.wait_for(state="attached")
    page.wait_for_timeout(2000)  # the chart is drawn anew once the search has ended
    place = page.evaluate(POINT)
    page.mouse.click(place["x"], place["y"])
    page.get_by_role("button", name="Estimate").click()
    page.get_by_text("Estimated, as it stands").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")

    page.get_by_role("button", name="Apply to compress").click()
    page.get_by_text("Configuration from the Search page").wait_for()
    page.get_by_text('codec = "uniform"').wait_for()
    assert page.hosts == {server.address.removeprefix("http://")}
    assert [complaint for complaint in page.complaints if "404" not in complaint] == []
