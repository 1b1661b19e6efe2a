"""Trials as points: what becomes one, which are best, how they are drawn and what a click on one means."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from inshrink_app import services
from inshrink_app.pages.allocate import figure
from inshrink_app.widgets.figures import TOOLBAR

from tests.app.job_stubs import STEPS, StubJobs, archived, archived_template, jobs
from tests.app.search_builders import document, point, put, trial

__all__ = ["archived", "archived_template", "jobs"]


def test_trials_of_a_configuration_become_one_point_and_the_last_word_counts(jobs: StubJobs) -> None:
    rows = [*document()["trials"], trial(10, 1.0, drop=0.009)]
    found = services.searched(put(jobs, Path("/runs/x"), result=document(trials=rows)), STEPS)
    assert [one.n_steps for one in found.points] == [4, 4, 1]
    assert [one.whole for one in found.points] == [True, True, False]
    assert [one.keeps for one in found.points] == [True, True, False]
    assert found.points[0].drop == 0.009
    assert found.best is found.points[1]


def test_a_trial_of_a_search_of_all_steps_that_has_just_begun_is_not_the_whole_chain(
    archived: Path, jobs: StubJobs
) -> None:
    job = put(jobs, archived, "running", steps=False)
    job.rows = [trial(step, 1.0) for step in STEPS[:2]]
    shown = services.load_subject(str(archived))
    found = services.searched(job, services.steps_of(job, shown))
    assert [(one.n_steps, one.whole) for one in found.points] == [(2, False)]
    assert found.best is None


def test_a_failure_keeps_no_bound_and_a_missing_figure_none_either(jobs: StubJobs) -> None:
    rows = [trial(10, 1.0, failure="NaN", drop=None, divergence=None), trial(10, 2.0, divergence=None)]
    found = services.searched(put(jobs, Path("/runs/x"), result=document(trials=rows, best=None)), STEPS)
    assert [one.keeps for one in found.points] == [False, False]


def test_of_a_search_for_a_ratio_a_point_is_judged_by_it(jobs: StubJobs) -> None:
    told = document(best=None, bounds={"drop": None, "divergence": None})
    left = put(jobs, Path("/runs/x"), "finished", told, "--target-ratio", "15")
    found = services.searched(left, STEPS)
    assert [found.verdict(one) for one in found.points] == [
        "below the ratio",
        "reaches the ratio",
        "reaches the ratio",
    ]
    assert found.best is found.points[1]


@pytest.mark.parametrize("spread", [1.0, 1.8, 30.0, 1e5])
def test_ticks_of_a_logarithmic_axis_are_told_apart(spread: float) -> None:
    points = (point(9, 0.0, divergence=4e-4), point(9 * spread, 0.0, divergence=4e-4 * spread))
    nothing = figure.Here(None, None)
    drawn = figure.allocation_figure(points, None, nothing, "divergence", figure.Marks(), 1e9)
    assert drawn.layout.margin.t >= TOOLBAR + 24  # buttons and legend, on touch screens too
    for axis in (drawn.layout.xaxis, drawn.layout.yaxis):
        assert len(set(axis.ticktext)) == len(axis.tickvals) > 2


@pytest.mark.parametrize(
    "points", [[], [{}], [{"customdata": [7]}], [{"customdata": ["x"]}], [{"customdata": [math.nan]}], ["x"]]
)
def test_a_click_that_makes_no_sense_picks_nothing(points: list[Any]) -> None:
    assert figure.clicked_point(points, 3) is None
