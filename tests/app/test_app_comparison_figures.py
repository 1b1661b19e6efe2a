"""Original against restored as figures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from inshrink_app.pages.archives import figures as comparison_figures
from inshrink_app.services import Bound
from inshrink_app.widgets.figures import TOOLBAR

from inshrink_core.evaluate import Comparison, EvaluatedStep
from inshrink_core.metrics import Direction
from inshrink_core.verbs.shared.measured import EvaluatorId, Known
from tests.app.builders import rehearsed

COLOURS = {"<b>a<b>": "#112233"}


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


def test_figures_write_names_as_text_and_leave_gaps_where_nothing_is_known():
    found = [comparison()]
    drop = comparison_figures.cost_figure(found, "drop", COLOURS, Bound("drop", 0.01))
    assert [trace.name for trace in drop.data] == ["Previous checkpoint", "&lt;b&gt;a&lt;b&gt;"]
    assert drop.layout.shapes[0].y0 == 1.0
    assert drop.data[1].line.color == "#112233"
    assert drop.layout.showlegend
    assert drop.layout.margin.t >= TOOLBAR + 24  # buttons and legend, on touch screens too
    divergence = comparison_figures.cost_figure(found, "divergence", COLOURS).data[-1].y
    assert list(divergence) == [0.0, 1e-3]


@pytest.mark.parametrize("wild", [math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0])
def test_any_figure_of_a_comparison_and_a_rehearsal_can_be_drawn(wild):
    step = compared_step(10, wild, wild, wild, wild, wild, wild)
    found = [comparison(step, compared_step(20, 1.0, 1.1, 0.1, 0.2, None, None))]
    document = rehearsed()
    for curve in document["curves"]:
        curve["restored"] = [wild, *curve["restored"][1:]]
    for figure in (
        comparison_figures.metric_figure(found, COLOURS),
        comparison_figures.cost_figure(found, "drop", COLOURS, Bound("drop", 0.01)),
        comparison_figures.size_figure(found, {"<b>a<b>": 1000}, COLOURS, "drop", Bound("drop", 0.003)),
        comparison_figures.cost_figure(found, "divergence", COLOURS),
        comparison_figures.rehearsal_figure(document),
    ):
        figure.to_json()
        ends = [end for axis in (figure.layout.yaxis, figure.layout.xaxis) for end in axis.range or ()]
        assert np.isfinite(np.asarray(ends, np.float64)).all()
