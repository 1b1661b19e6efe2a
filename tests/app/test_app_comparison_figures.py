"""Original against restored as figures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from inshrink_app.pages.compare import figures as comparison_figures
from inshrink_app.widgets.figures import TOOLBAR

from inshrink_core.evaluate import Comparison, EvaluatedStep
from inshrink_core.metrics import Direction
from inshrink_core.verbs.shared.measured import EvaluatorId, Known
from tests.app.builders import rehearsed


def comparison(*steps: EvaluatedStep) -> Known:
    steps = steps or (
        compared_step(10, 1.0, 1.1, 0.1, 0.0, None, None),
        compared_step(20, 1.0, 1.0, 0.0, 1e-3, 0.2, 0.1),
    )
    return Known(
        archive="<b>a<b>",
        at=0.0,
        evaluator=EvaluatorId("judge.py:f", ""),
        comparison=Comparison.over(steps, "loss", Direction.LOWER),
        standard_errors={},
    )


def compared_step(step: int, original: float, restored: float, *more: float | None) -> EvaluatedStep:
    names = ("drop", "divergence", "stale_drop", "stale_divergence")
    values: dict[str, Any] = dict(zip(names, more, strict=True))
    return EvaluatedStep(step=step, original=original, restored=restored, **values)


def test_figures_write_names_as_text_and_leave_gaps_where_nothing_is_known() -> None:
    found = [comparison()]
    drop = comparison_figures.share_figure(found, "drop", 0.01)
    assert [trace.name for trace in drop.data] == ["Previous checkpoint", "&lt;b&gt;a&lt;b&gt;"]
    assert drop.layout.shapes[0].y0 == 1.0
    assert drop.layout.showlegend
    assert drop.layout.margin.t >= TOOLBAR + 24  # buttons and legend, on touch screens too
    divergence = comparison_figures.divergence_figure(found).data[-1].y
    assert [value == value for value in divergence] == [False, True]


def test_a_previous_checkpoint_that_is_far_worse_does_not_flatten_the_curves() -> None:
    found = [comparison(compared_step(10, 1.0, 1.0, 1e-4, 0.0, 0.9, 0.5))]
    axis = comparison_figures.share_figure(found, "drop").layout.yaxis
    assert 0.01 < axis.range[1] < 0.02
    assert comparison_figures.share_figure(found, "drop", 0.01).layout.yaxis.range[1] < 1.2


def test_the_band_of_a_rehearsal_is_the_range_of_the_uninterrupted_seeds() -> None:
    figure = comparison_figures.rehearsal_figure(rehearsed())
    assert list(figure.data[0].y) == [3.0, 1.0]
    assert list(figure.data[1].y) == [2.0, 1.0]
    assert list(figure.data[2].y) == [2.5, 1.0]


@pytest.mark.parametrize("wild", [math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0])
def test_any_figure_of_a_comparison_and_a_rehearsal_can_be_drawn(wild: float) -> None:
    step = compared_step(10, wild, wild, wild, wild, wild, wild)
    found = [comparison(step, compared_step(20, 1.0, 1.1, 0.1, 0.2, None, None))]
    document = rehearsed()
    for curve in document["curves"]:
        curve["restored"] = [wild, *curve["restored"][1:]]
    for figure in (
        comparison_figures.metric_figure(found),
        comparison_figures.share_figure(found, "drop", 0.01),
        comparison_figures.size_figure(found, [1000], 0.003),
        comparison_figures.divergence_figure(found),
        comparison_figures.rehearsal_figure(document),
    ):
        figure.to_json()
        ends = [end for axis in (figure.layout.yaxis, figure.layout.xaxis) for end in axis.range or ()]
        assert np.isfinite(np.asarray(ends, np.float64)).all()
