"""Trials as points: what becomes one, which are best, how they are drawn and what a click on one means."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from inshrink_app import services
from inshrink_app.pages.allocate import figure

from tests.app.job_stubs import STEPS
from tests.app.search_builders import document, put, trial


def test_trials_of_a_configuration_become_one_point_and_the_last_word_counts(jobs):
    rows = [*document()["trials"], trial(10, 1.0, drop=0.009)]
    found = services.searched(put(jobs, Path("/runs/x"), result=document(trials=rows)), STEPS)
    assert [one.n_steps for one in found.points] == [4, 4, 1]
    assert [one.whole for one in found.points] == [True, True, False]
    assert [one.keeps for one in found.points] == [True, True, False]
    assert found.points[0].drop == 0.009
    assert found.best is found.points[1]


def test_a_trial_of_a_search_of_all_steps_that_has_just_begun_is_not_the_whole_chain(archived, jobs):
    job = put(jobs, archived, "running", steps=False)
    job.rows = [trial(step, 1.0) for step in STEPS[:2]]
    shown = services.load_subject(str(archived))
    found = services.searched(job, services.steps_of(job, shown))
    assert [(one.n_steps, one.whole) for one in found.points] == [(2, False)]
    assert found.best is None


def test_a_failure_keeps_no_bound_and_a_missing_figure_none_either(jobs):
    rows = [trial(10, 1.0, failure="NaN", drop=None, divergence=None), trial(10, 2.0, divergence=None)]
    found = services.searched(put(jobs, Path("/runs/x"), result=document(trials=rows, best=None)), STEPS)
    assert [one.keeps for one in found.points] == [False, False]


def test_of_a_search_for_a_ratio_a_point_is_judged_by_it(jobs):
    told = document(best=None, bounds={"drop": None, "divergence": None})
    left = put(jobs, Path("/runs/x"), "finished", told, "--target-ratio", "15")
    found = services.searched(left, STEPS)
    assert [found.verdict(one) for one in found.points] == [
        "below the ratio",
        "reaches the ratio",
        "reaches the ratio",
    ]
    assert found.best is found.points[1]


@pytest.mark.parametrize(
    "points", [[], [{}], [{"customdata": [7]}], [{"customdata": ["x"]}], [{"customdata": [math.nan]}], ["x"]]
)
def test_a_click_that_makes_no_sense_picks_nothing(points):
    assert figure.clicked_point(points, 3) is None
