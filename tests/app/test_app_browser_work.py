"""Long work in a real browser: the download of a large file, and a comparison across restarts."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from inshrink_app.jobs.job import RESULT, Job

import inshrink_core
from tests.app.browser import Server, ask, browser_marks
from tests.app.builders import judged
from tests.app.job_stubs import work_of

pytestmark = browser_marks

LARGE_NBYTES = 500_000_000
"""Larger than what a page may hold in memory, and than what Streamlit serves by itself."""

MAX_MEMORY_NBYTES = 50_000_000
"""What handing over the large file may cost the server beside what it takes anyway."""

HOSTILE = "x'><img src=x onerror=alert(1)>[a](javascript:alert(1)).inshrink"

JUDGE = """
import pathlib, time

def evaluate(state):
    time.sleep(1.5 if (pathlib.Path(__file__).parent.parent / "slow").exists() else 0)
    return {"loss": float(len(state))}
"""


@pytest.fixture
def server(tmp_path, archived_template) -> Iterator[Server]:
    """Return the explorer over a small archived run, not started yet."""
    folder = tmp_path / "root"
    shutil.copytree(archived_template, folder)
    made = Server(folder)
    yield made
    made.end()


def leave_export(server: Server, target: Path) -> str:
    """Leave a finished export of an earlier explorer, as its files tell it; return the job's id."""
    folder = server.folder.parent / "state" / "inshrink" / "jobs" / "00000000deadbeef"
    run = str(server.folder / "run")
    work = work_of(["compress", run, "-o", str(target)], shown=run)
    job = Job(work, "finished", started_at=1e9, ended_at=1e9, job_id=folder.name, folder=folder)
    job.make_folder()
    job.store()
    (folder / RESULT).write_text(json.dumps([{"relative_error": 0.0}]))
    return folder.name


def settled_nbytes(server: Server) -> int:
    """Return the server's memory once what it loads ahead of time is loaded."""
    now, until = server.resident_nbytes(), time.monotonic() + 60
    while time.monotonic() < until:
        before = now
        time.sleep(3)
        now = server.resident_nbytes()
        if abs(now - before) < 1_000_000:
            break
    return now


def told(page: Any, text: str) -> None:
    """Wait for the badge of a job's state; the table has the same words, for readers of the screen alone."""
    page.locator(".stMarkdownBadge").filter(has_text=text).first.wait_for()


def test_a_large_file_is_downloaded_with_flat_memory_and_not_to_those_who_call_by_a_foreign_name(
    server, page
):
    target = server.folder / HOSTILE.replace("/", "")
    with target.open("wb") as file:
        file.write(b"head")
        file.truncate(LARGE_NBYTES)  # Sparse: it costs no disk.
    job = leave_export(server, target)
    server.start()

    page.goto(server.link("archives", panel="write", job=job))
    link = page.get_by_role("link", name="Download")
    link.wait_for()
    assert "(500\xa0MB)" in link.inner_text()
    assert page.locator("img[src='x']").count() == 0
    before = settled_nbytes(server)
    address = link.get_attribute("href")
    with page.expect_download() as told:
        page.evaluate("url => { location.href = url }", address)
    saved = Path(told.value.path())
    assert server.resident_nbytes() - before < MAX_MEMORY_NBYTES
    assert saved.stat().st_size == LARGE_NBYTES
    with saved.open("rb") as file:
        assert file.read(4) == b"head"

    path = urlsplit(address).path
    status, headers, _ = ask(server.address, path, Host="evil.example")
    assert (status, headers.get("content-disposition")) == (403, None)
    assert ask(server.address, path + "x")[0] == 404
    status, headers, body = ask(server.address, path, Range=f"bytes={LARGE_NBYTES - 10}-")
    assert (status, body) == (206, bytes(10))
    assert headers["content-disposition"].startswith("attachment")
    assert page.hosts == {server.address.removeprefix("http://")}


def open_jobs(page: Any, server: Server) -> None:
    """Go to the first page, and open the drawer of the jobs."""
    page.goto(server.link(""))
    page.get_by_role("button", name=re.compile(r"\bJobs\b|\d+ jobs?\b")).first.click()


def test_a_job_survives_reload_is_interrupted_by_a_restart_and_goes_on(server, page):
    judged(server.folder / "run", JUDGE)
    (server.folder / "slow").touch()
    server.start()
    page.goto(server.link("archives", panel="compare"))
    page.get_by_role("button", name="Evaluator").click()
    page.get_by_text("Trust this run's code and run it on this computer").click()
    page.get_by_role("button", name="not trusted yet").wait_for(state="hidden")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.get_by_role("button", name="Cancel").wait_for()
    open_jobs(page, server)
    told(page, "Running")
    page.get_by_text("step 10").first.wait_for()
    server.kill()
    server.start()
    open_jobs(page, server)
    told(page, "Interrupted")
    page.get_by_role("button", name="Resume").click()
    told(page, "Running")
    page.get_by_role("button", name="Cancel").click()
    told(page, "Cancelled")
    (server.folder / "slow").unlink()
    page.get_by_role("button", name="Resume").click()
    told(page, "Finished")
    open_jobs(page, server)
    page.get_by_role("button", name="Show", exact=True).click()
    page.get_by_text("Every step").filter(visible=True).first.wait_for()
    theirs = inshrink_core.compare(server.folder / "run.inshrink", server.folder / "run", trust_run=True)
    folder = next((server.folder.parent / "state" / "inshrink" / "jobs").iterdir())
    # Each step was evaluated once, by whichever of the three attempts came so far.
    mine = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    found = {row["step"]: row["restored"] for row in mine}
    assert found == {row.step: row.restored for row in theirs.steps}
