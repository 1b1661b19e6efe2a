"""The commands that open the explorer, as they are typed, in a real browser."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.app.browser import FAINT, IDLE, Server, browser_marks, wait_for
from tests.app.builders import SAMPLE, write_run
from tests.hostile import executed, lay_traps
from tests.processes import until

pytestmark = browser_marks
INSHRINK = str(Path(sys.executable).with_name("inshrink"))
RECORD = "#!{python}\nimport sys\nopen({file!r}, 'w').write(sys.argv[1])\n"


def recorder(folder: Path) -> tuple[str, Path]:
    """Return a browser that only takes note of the address it is given, and where."""
    said, program = folder / "opened.txt", folder / "browser"
    program.write_text(RECORD.format(python=sys.executable, file=str(said)))
    program.chmod(0o755)
    return str(program), said


def test_inshrink_ui_run_lands_on_the_run(page, tmp_path):
    server = Server(tmp_path / "work")
    server.folder.mkdir()
    write_run(server.folder / "mine" / "training")
    browser, said = recorder(tmp_path)
    server.start(INSHRINK, "ui", "mine/training", "--port", str(server.port), BROWSER=browser)
    try:
        opened = until(lambda: said.exists() and said.read_text())
        for address in (opened, f"{server.address}/", f"http://localhost:{server.port}"):
            page.goto("about:blank")
            page.goto(address)
            page.get_by_role("button", name="training").first.wait_for()
            page.locator(".st-key-heatmap .js-plotly-plot").first.wait_for()
            assert "/run?run=" in page.url
            assert page.get_by_role("heading", name="Open a run").count() == 0
        wait_for(page, IDLE)
        assert page.evaluate(FAINT) == []
        # Whoever asks for another run gets the page to choose it, and stays there.
        page.get_by_role("link", name="Open").click()
        page.get_by_role("heading", name="Open a run").wait_for()
    finally:
        server.end()


@pytest.mark.timeout(700)
def test_the_explorer_of_the_folder_one_stands_in_executes_and_obeys_nothing_of_it(page, tmp_path):
    run = tmp_path / "served" / "downloaded"
    shutil.copytree(SAMPLE, run, ignore=shutil.ignore_patterns(".inshrink"))
    lay_traps(run, tmp_path / "traces", spare=frozenset({"evaluator"}))
    server = Server(run)
    server.start(INSHRINK, "ui", ".", "--no-browser", "--port", str(server.port), PYTHONSAFEPATH="")
    try:
        page.goto(server.address)
        page.get_by_role("button", name="downloaded").first.wait_for()
        page.get_by_text("carry at least 80 % of the sensitivity").wait_for(timeout=300_000)
        page.get_by_text("Click a point to edit its bits").wait_for(timeout=300_000)  # it begins by itself
        page.get_by_role("link", name="Archives").click()
        page.get_by_text("New archive").filter(visible=True).first.wait_for()
        assert executed(tmp_path / "traces") == []
        assert page.hosts == {server.address.removeprefix("http://")}
    finally:
        server.end()
    assert executed(tmp_path / "traces") == []
