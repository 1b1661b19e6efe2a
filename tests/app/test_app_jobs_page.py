"""The Jobs page in every state."""

from __future__ import annotations

from pathlib import Path

import pytest
from inshrink_app.jobs.files import JobFolder
from inshrink_app.model.problem import Problem

from tests.app.builders import button, explorer, texts
from tests.app.job_stubs import StubJobs, archived, archived_template, jobs

__all__ = ["archived", "archived_template", "jobs"]


def labels(app: object) -> list[str]:
    return [found.label for found in app.button]  # type: ignore[attr-defined]


def test_without_jobs_the_page_says_what_will_stand_there(root: Path, jobs: StubJobs) -> None:
    app = explorer("jobs")
    assert not app.exception
    assert "No jobs yet" in texts(app)
    assert button(app, "Choose a run")


@pytest.mark.parametrize(
    ("state", "offered"),
    [
        ("queued", "Cancel"),
        ("running", "Cancel"),
        ("finished", "Show the result"),
        ("failed", "Try again"),
        ("cancelled", "Resume"),
        ("interrupted", "Resume"),
    ],
)
def test_every_state_is_named_and_offers_what_can_be_done(
    root: Path, jobs: StubJobs, state: str, offered: str
) -> None:
    job = jobs.put(["verify", str(root / "run.inshrink")], state=state)
    if state == "failed":
        job.problem = Problem("a frame is damaged", "frame 3", "restore a backup")
    app = explorer("jobs")
    assert not app.exception
    assert state.capitalize() in texts(app)
    assert offered in labels(app)
    assert ("Cancel" in labels(app)) == (state in ("queued", "running"))
    assert sum(b.proto.type == "primary" for b in app.button) <= 1
    if state == "failed":
        assert "A frame is damaged" in texts(app)


def test_cancel_and_resume_do_so(root: Path, jobs: StubJobs) -> None:
    job = jobs.put(["verify", str(root / "run.inshrink")], state="running")
    app = explorer("jobs")
    button(app, "Cancel").click().run()
    assert job.state == "cancelled"
    button(app, "Resume").click().run()
    assert not app.exception
    assert job.state == "running"


def test_progress_says_how_long_it_took_and_may_take(root: Path, jobs: StubJobs) -> None:
    jobs.put(["verify", str(root / "run.inshrink")], state="running")
    app = explorer("jobs")
    assert not app.exception
    (bar,) = app.get("progress")
    assert "30 %" in bar.proto.text
    assert "left" in bar.proto.text
    assert bar.proto.value == 30


def test_the_result_is_shown_on_its_page(root: Path, jobs: StubJobs) -> None:
    (root / "empty").mkdir()
    jobs.put(["sensitivity", str(root / "empty"), "--metric", "fisher"], shown=str(root / "empty"))
    app = explorer("jobs")
    assert "Measure Fisher of empty" in texts(app)
    button(app, "Show the result").click().run()
    assert app.title[0].value == "Sensitivity"


def test_jobs_about_files_outside_of_the_roots_are_not_shown(root: Path, jobs: StubJobs) -> None:
    jobs.put(["verify", "/etc/secret.inshrink"])
    jobs.put(["compare", str(root / "a"), "--against", "/etc/secret.inshrink"], state="interrupted")
    run, code = str(root / "run"), "/etc/secret.py:evaluate"
    jobs.put(["compare", str(root / "a"), "--against", run, "--evaluator", code], state="interrupted")
    jobs.put(["export", str(root / "a"), "--pack", str(root / "b")], scratch=("/etc/secret",))
    app = explorer("jobs")
    assert "secret" not in texts(app)
    assert "No jobs yet" in texts(app)
    app = explorer("jobs", job="0" * 16)
    assert "secret" not in texts(app)


def test_names_are_shown_as_text(root: Path, jobs: StubJobs) -> None:
    job = jobs.put(["verify", str(root / "**b** [x](javascript:1).inshrink")], state="running")
    job.item = "<script>alert(1)</script>"
    app = explorer("jobs")
    assert not app.exception
    assert "\\*\\*b\\*\\*" in texts(app)
    assert "\\<script\\>" in app.get("progress")[0].proto.text


def test_the_job_of_the_link_has_its_details_open_until_another_is_chosen(
    root: Path, jobs: StubJobs, tmp_path: Path
) -> None:
    wanted = jobs.put(["verify", str(root / "old.inshrink")], state="finished")
    other = jobs.put(["verify", str(root / "new.inshrink")], state="finished")
    wanted.folder = JobFolder(tmp_path / "log")
    wanted.folder.make()
    wanted.folder.log("checked everything")
    app = explorer("jobs", job=wanted.job_id)
    assert not app.exception
    opened = next(found for found in app.expander if found.label == "Log")
    assert opened.proto.expanded
    assert "checked everything" in opened.code[0].value
    key = f"jobs.table.{hash((other.job_id, wanted.job_id))}"
    assert app.session_state[key]["selection"]["rows"] == [1]
    app.query_params["job"] = other.job_id
    app.run()
    assert not app.exception
    assert "checked everything" not in texts(app)
    assert app.session_state[key]["selection"]["rows"] == [0]


def test_the_result_of_an_earlier_job_of_a_page_is_shown_there(archived: Path, jobs: StubJobs) -> None:
    archive = str(archived.with_name("run.inshrink"))
    early, _ = (
        jobs.put(["compare", archive, "--against", str(archived), "--steps", step], shown=str(archived))
        for step in ("10,20", "30,40")
    )
    app = explorer("jobs", job=early.job_id)
    button(app, "Show the result").click().run()
    assert not app.exception
    assert app.session_state["compare.steps"] == [10, 20]


def test_ended_jobs_can_be_cleared_and_running_ones_stay(root: Path, jobs: StubJobs) -> None:
    jobs.put(["verify", str(root / "a.inshrink")], state="finished")
    jobs.put(["verify", str(root / "b.inshrink")], state="running")
    app = explorer("jobs")
    button(app, "Clear ended jobs").click().run()
    assert not app.exception
    assert [job.state for job in jobs.kept] == ["running"]


def test_all_jobs_stand_in_the_table_and_one_in_detail(root: Path, jobs: StubJobs) -> None:
    for position in range(50):
        jobs.put(["verify", str(root / f"{position}.inshrink")], state="finished")
    app = explorer("jobs")
    assert not app.exception
    assert len(app.dataframe[0].value) == 50
    assert labels(app).count("Show the result") == 1
    assert "Verify 49\\.inshrink" in texts(app)


def test_the_filter_narrows_the_list_and_says_when_nothing_is_left(root: Path, jobs: StubJobs) -> None:
    jobs.put(["verify", str(root / "a.inshrink")], state="finished")
    app = explorer("jobs")
    app.segmented_control(key="jobs.filter").set_value("running").run()
    assert not app.exception
    assert "No job is in this state" in texts(app)
