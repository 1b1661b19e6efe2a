"""The drawer of the jobs in every state."""

from __future__ import annotations

import pytest
from inshrink_app.model.problem import Problem

from tests.app.builders import button, drawer, texts


def labels(app: object) -> list[str]:
    return [found.label for found in app.button]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("state", "offered"),
    [
        ("queued", "Cancel"),
        ("running", "Cancel"),
        ("finished", "Show"),
        ("failed", "Try again"),
        ("cancelled", "Resume"),
        ("interrupted", "Resume"),
    ],
)
def test_every_state_is_named_and_offers_what_can_be_done(root, jobs, state, offered):
    job = jobs.put(["verify", str(root / "run.inshrink")], state=state)
    if state == "failed":
        job.problem = Problem("a frame is damaged", "frame 3", "restore a backup")
    app = drawer()
    assert state.capitalize() in texts(app)
    assert offered in labels(app)
    assert ("Cancel" in labels(app)) == (state in ("queued", "running"))
    assert ("A frame is damaged" in texts(app)) == (state == "failed")


def test_the_result_is_shown_where_it_belongs(archived, jobs):
    jobs.put(["sensitivity", str(archived), "--metric", "fisher"], shown=str(archived))
    app = drawer()
    assert "Measure Fisher of run" in texts(app)
    button(app, "Show").click().run()
    assert app.session_state["inshrink.run"] == str(archived)


def test_jobs_about_files_outside_of_the_roots_are_not_shown(root, jobs):
    jobs.put(["verify", "/etc/secret.inshrink"])
    jobs.put(["compare", str(root / "a"), "--against", "/etc/secret.inshrink"], state="interrupted")
    run, code = str(root / "run"), "/etc/secret.py:evaluate"
    jobs.put(["compare", str(root / "a"), "--against", run, "--evaluator", code], state="interrupted")
    jobs.put(["export", str(root / "a"), "--pack", str(root / "b")], scratch=("/etc/secret",))
    app = drawer()
    assert "secret" not in texts(app)
    assert "appear here" in texts(app)


def test_names_are_shown_as_text_and_a_job_is_cancelled_and_resumed(root, jobs):
    job = jobs.put(["verify", str(root / "**b** [x](javascript:1).inshrink")], state="running")
    job.item = "<script>alert(1)</script>"
    app = drawer()
    assert "\\*\\*b\\*\\*" in texts(app)
    assert "\\<script\\>" in app.get("progress")[0].proto.text
    button(app, "Cancel").click().run()
    assert job.state == "cancelled"
    button(app, "Resume").click().run()
    assert job.state == "running"


def test_ended_jobs_can_be_cleared_and_running_ones_stay(root, jobs):
    jobs.put(["verify", str(root / "a.inshrink")], state="finished")
    jobs.put(["verify", str(root / "b.inshrink")], state="running")
    app = drawer()
    button(app, "Clear ended jobs").click().run()
    assert [job.state for job in jobs.kept] == ["running"]
