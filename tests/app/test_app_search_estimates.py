"""Estimates on the scatter before anything is measured, and a drop bound together with a divergence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from inshrink_app import services
from inshrink_app.jobs.printed import python_text, shell_text

from inshrink_core.verbs.search import Search
from tests.app.builders import SAMPLE, button, charts, explorer, open_panel, texts
from tests.app.job_stubs import STEPS, StubJobs, archived, archived_template, jobs, option, work
from tests.app.search_builders import document, put

__all__ = ["archived", "archived_template", "jobs"]


def guess(i: int) -> dict[str, Any]:
    """Return what ``inshrink estimate --each`` tells of a level, as far as the page asks."""
    figures = {"ratio_weights": 10.0 + i, "drop": 0.001 * i, "divergence": None, "n_steps": 4}
    return {"set": {"codec": "lattice", "settings": {"coarseness": 2.0**i}}, **figures}


def test_estimates_are_drawn_without_an_evaluator_before_anything_is_measured(
    archived: Path, jobs: StubJobs
) -> None:
    jobs.rows["estimate"] = [guess(0), guess(1)]
    app = explorer("allocate", run=str(archived), table="measured")
    assert not app.exception
    (request,) = jobs.started
    assert len(request.documents) == 1, "one process for all"
    assert jobs.last[:2] == ["estimate", str(archived)]
    assert jobs.last.count("--each") == 6
    assert option(jobs.last, "--codec") == "lattice"
    assert not {"--evaluator", "--trust-run"} & set(jobs.last)
    assert charts(app) == 1
    listed = next(one.value for one in app.dataframe if "figures" in one.value.columns)
    assert list(listed["figures"]) == ["estimated", "estimated"]
    assert set(listed["is"]) == {"not measured"}


def test_estimates_go_from_fine_to_coarse_and_are_there_one_by_one(
    archived: Path, jobs: StubJobs, tmp_path: Path
) -> None:
    shown = services.load_subject(str(archived))
    services.start_job(services.estimating_work(shown, STEPS, "uniform", is_calibrated=False))
    job = work(tmp_path / "jobs", *jobs.started[0].requests(None))
    points = services.estimates(job)
    assert len(points) == 7
    assert points[0].config == {"codec": "uniform", "settings": {"bits": 8}}
    assert all(one.is_estimated and one.whole for one in points)
    assert [one.ratio for one in points] == sorted(one.ratio for one in points)
    job.rows.pop()
    assert services.estimates(job) == points[:6]


def test_estimates_are_made_anew_once_trials_tell_what_an_error_costs(archived: Path, jobs: StubJobs) -> None:
    app = explorer("allocate", run=str(archived))
    assert len(jobs.started) == 1
    put(jobs, archived, result=document())
    app.run()
    assert not app.exception
    assert [work.documents[0]["verb"] for work in jobs.started] == ["estimate", "estimate"]
    app.run()
    assert len(jobs.started) == 2, "once is enough"


@pytest.mark.parametrize(
    ("beside", "asked", "said"),
    [
        ("none", "inf", "--max-divergence inf"),
        ("own", "0.003", "--max-divergence 0.003"),
        ("default", None, ""),
    ],
)
def test_a_drop_is_bound_together_with_a_divergence_of_ones_own(
    root: Path, jobs: StubJobs, beside: str, asked: Any, said: str
) -> None:
    app = explorer("allocate", run=str(SAMPLE), goal="drop", beside=beside)
    assert not app.exception
    button(app, "Search").click().run()
    assert not app.exception
    assert option(jobs.last, "--max-drop") == "0.01"
    assert option(jobs.last, "--max-divergence") == asked
    open_panel(app)
    assert said in texts(app)


def test_the_lines_of_a_waived_divergence_are_python() -> None:
    words = Search("/runs/x", max_drop=0.01, max_divergence=math.inf, steps=(10,))
    command, lines = shell_text([words]), python_text([words])
    assert "--max-drop 0.01 --max-divergence inf" in command
    assert "max_divergence=float('inf')" in lines
    compile(lines, "snippet", "exec")


def test_a_waived_divergence_is_no_line_in_the_figure(jobs: StubJobs) -> None:
    words = ["search", "/runs/x", "--max-drop", "0.01", "--max-divergence", "inf", "--steps", "10"]
    job = jobs.put(words, state="running")
    assert services.searched(job, (10,)).limits == {"drop": 0.01}
