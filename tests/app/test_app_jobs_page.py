"""The Jobs page in every state."""

from __future__ import annotations

import pytest
from inshrink_app.model.problem import Problem

from tests.app.builders import button, explorer, texts


def labels(app: object) -> list[str]:
    return [found.label for found in app.button]  # type: ignore[attr-defined]


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
def test_every_state_is_named_and_offers_what_can_be_done(root, jobs, state, offered):
    job = jobs.put(["verify", str(root / "run.inshrink")], state=state)
    if state == "failed":
        job.problem = Problem("a frame is damaged", "frame 3", "restore a backup")
    app = explorer("jobs")
    assert state.capitalize() in texts(app)
    assert offered in labels(app)
    assert ("Cancel" in labels(app)) == (state in ("queued", "running"))
    assert sum(b.proto.type == "primary" for b in app.button) <= 1
    if state == "failed":
        assert "A frame is damaged" in texts(app)


def test_cancel_and_resume_do_so(root, jobs):
    job = jobs.put(["verify", str(root / "run.inshrink")], state="running")
    app = explorer("jobs")
    button(app, "Cancel").click().run()
    assert job.state == "cancelled"
    button(app, "Resume").click().run()
    assert job.state == "running"


def test_the_result_is_shown_on_its_page(root, jobs):
    (root / "empty").mkdir()
    jobs.put(["sensitivity", str(root / "empty"), "--metric", "fisher"], shown=str(root / "empty"))
    app = explorer("jobs")
    assert "Measure Fisher of empty" in texts(app)
    button(app, "Show the result").click().run()
    assert app.title[0].value == "Sensitivity"


def test_jobs_about_files_outside_of_the_roots_are_not_shown(root, jobs):
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


def test_names_are_shown_as_text(root, jobs):
    job = jobs.put(["verify", str(root / "**b** [x](javascript:1).inshrink")], state="running")
    job.item = "<script>alert(1)</script>"
    app = explorer("jobs")
    assert "\\*\\*b\\*\\*" in texts(app)
    assert "\\<script\\>" in app.get("progress")[0].proto.text


def test_the_result_of_an_earlier_job_of_a_page_is_shown_there(archived, jobs):
    archive = str(archived.with_name("run.inshrink"))
    early, _ = (
        jobs.put(["compare", archive, "--against", str(archived), "--steps", step], shown=str(archived))
        for step in ("10,20", "30,40")
    )
    app = explorer("jobs", job=early.job_id)
    button(app, "Show the result").click().run()
    assert app.session_state["compare.steps"] == [10, 20]


def test_ended_jobs_can_be_cleared_and_running_ones_stay(root, jobs):
    jobs.put(["verify", str(root / "a.inshrink")], state="finished")
    jobs.put(["verify", str(root / "b.inshrink")], state="running")
    app = explorer("jobs")
    button(app, "Clear ended jobs").click().run()
    assert [job.state for job in jobs.kept] == ["running"]


def test_the_filter_narrows_the_list_and_says_when_nothing_is_left(root, jobs):
    jobs.put(["verify", str(root / "a.inshrink")], state="finished")
    app = explorer("jobs")
    app.segmented_control(key="jobs.filter").set_value("running").run()
    assert "No job is in this state" in texts(app)
