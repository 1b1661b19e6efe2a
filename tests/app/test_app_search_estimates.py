"""Estimates on the scatter before anything is measured, and a drop bound together with a divergence."""

from __future__ import annotations

from typing import Any

from inshrink_app import services

from tests.app.builders import charts, explorer
from tests.app.job_stubs import STEPS, option, work


def guess(i: int) -> dict[str, Any]:
    """Return what ``inshrink estimate --each`` tells of a level, as far as the page asks."""
    figures = {"ratio_weights": 10.0 + i, "drop": 0.001 * i, "divergence": None, "n_steps": 4}
    return {"set": {"codec": "lattice", "settings": {"coarseness": 2.0**i}}, **figures}


def test_estimates_are_drawn_without_an_evaluator_before_anything_is_measured(archived, jobs):
    jobs.rows["estimate"] = [guess(0), guess(1)]
    app = explorer("allocate", run=str(archived), table="measured")
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


def test_estimates_go_from_fine_to_coarse_and_are_there_one_by_one(archived, jobs, tmp_path):
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
