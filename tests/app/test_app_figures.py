"""Figures: what is drawn from which table, and what untrusted names become."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from inshrink_app.pages.run import heatmap
from inshrink_app.pages.run.heatmap import heatmap_figure
from inshrink_app.widgets import figures
from inshrink_app.widgets.figures import log_groups

from inshrink_core.analysis.profile import Row
from tests.app.builders import sensitivity_table


def test_many_steps_are_merged_by_the_mean_of_what_is_there():
    values = np.asarray([[1, 3, np.nan, 5, np.nan, np.nan]], dtype=np.float32)
    axis = heatmap.StepAxis.of((10, 20, 30, 40, 50, 60), limit=3)
    np.testing.assert_array_equal(axis.merged(values), np.asarray([[2, 5, np.nan]], dtype=np.float32))
    assert (axis.steps, axis.place_of(1), axis.column_of(3)) == ((20, 40, 60), 3, 1)
    assert axis.merged(values).dtype == np.float32


def test_steps_stand_where_they_are_with_a_marked_gap_where_the_run_lacks_one():
    steps = (10, 20, 40, 50)
    missing = heatmap.missing_steps(steps, ["broken_60.pt", "other_900.pt"])
    assert missing == (30, 60)
    axis = heatmap.StepAxis.of(steps, missing)
    assert axis.edges.tolist() == [5, 15, 25, 35, 45, 55, 65]
    assert [axis.place_of(column) for column in range(6)] == [0, 1, None, 2, 3, None]
    table = dataclasses.replace(sensitivity_table(2, 4), steps=steps)
    drawn = heatmap_figure(table, "mean", missing=missing)
    assert [note.x for note in drawn.layout.annotations if note.text == "×"] == [30, 60]
    assert not heatmap.StepAxis.of((1, 2, 4, 1000)).is_numeric, (
        "columns of equal width, as steps are far apart"
    )


def test_heatmap_colours_are_float32_logarithms_and_hovers_tell_the_value():
    table = sensitivity_table()
    heat = heatmap_figure(table, "mean").data[1]
    assert heat.z.dtype == np.float32
    np.testing.assert_allclose(heat.z[:-1], np.log10(table.values["mean"][:-1]), rtol=1e-5)
    np.testing.assert_array_equal(heat.customdata[:, :, 0], table.values["mean"])
    assert "layers.0.weight" in heat.y[0]
    assert "4×3" in heat.y[0]


@pytest.mark.parametrize("value", [0.0, 1e-30, 1.0, np.inf, np.nan])
def test_a_table_of_one_value_is_drawn_whatever_the_value(value):
    table = sensitivity_table(2, 2)
    table.values["mean"][:] = value
    heat = heatmap_figure(table, "mean").data[1]
    assert heat.zmax > heat.zmin
    assert np.isfinite([heat.zmin, heat.zmax]).all()


def test_names_of_tensors_are_text_and_never_markup():
    table = sensitivity_table(1, 1)
    evil = "<a href='javascript:alert(1)'>x</a>\u202e"
    table = dataclasses.replace(table, rows=(Row(evil, "", "linear", "weight", 1, 12, (4, 3)),))
    text = heatmap_figure(table, "mean").to_json()
    text += figures.log_figure({evil: ((1, 1.0),)}, {evil: [evil]}).to_json()
    assert "<a " not in text
    assert "\\u003ca " not in text
    assert "\\u202e" not in text


def test_metrics_that_share_a_scale_share_a_panel():
    log = {"train_loss": ((1, 2.0), (2, 1.0)), "eval_loss": ((2, 1.5),), "lr": ((1, 0.1),)}
    groups = log_groups(list(log))
    assert groups == {"loss": ["train_loss", "eval_loss"], "lr": ["lr"]}
    figure = figures.log_figure(log, groups)
    assert [(trace.name, trace.yaxis) for trace in figure.data] == [
        ("train_loss", "y"),
        ("eval_loss", "y"),
        ("lr", "y2"),
    ]
    assert "train_loss" in figure.layout.annotations[0].text
    assert {trace.xaxis for trace in figure.data} == {None}, "one axis of steps, so one cursor"
    assert figure.layout.hoversubplots == "axis"
    assert figure.layout.yaxis.domain[0] > figure.layout.yaxis2.domain[1]


def test_a_smoothed_curve_stands_before_what_was_logged():
    log = {"loss": tuple((step, float(step % 2)) for step in range(100))}
    raw, smooth = figures.log_figure(log, {"loss": ["loss"]}, smoothing=0.9).data
    assert raw.opacity < smooth.opacity
    assert np.ptp(smooth.y[50:]) < 0.2 * np.ptp(raw.y)
    gaps = figures.smoothed([1.0, np.nan, 1.0], 0.5)
    assert gaps[0] == gaps[2] == 1.0
    assert np.isnan(gaps[1])


def test_a_log_with_gaps_and_infinities_is_drawn():
    log = {"loss": ((1, float("nan")), (2, float("inf")), (3, 1.0))}
    groups = {"<loss>": ["loss"]}
    assert len(figures.log_figure(log, groups).data) == 1
    named = figures.log_figure(log, groups, legends=False)
    assert [note.text for note in named.layout.annotations] == ["&lt;loss&gt;"]


@pytest.mark.parametrize(
    "values", [[1e-45, 3.4e38], [1e-320, 1.0], [5e-324], [1e308, 1e-308], [1.02, 1.06], [7.0]]
)
def test_values_at_the_ends_of_what_a_float_holds_have_ticks(values):
    for kind in (np.float64, np.float32):
        ticks = figures.log_ticks(
            kind(value) for value in values if 1e-45 <= value <= 3.4e38 or kind is np.float64
        )
        if ticks:
            assert len(ticks["tickvals"]) == len(set(ticks["ticktext"])) <= 12
            assert all(0 < tick < np.inf for tick in ticks["tickvals"])
