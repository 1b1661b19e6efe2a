"""Figures: what is drawn from which table, and what untrusted names become."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from inshrink_app.pages.sensitivity import heatmap
from inshrink_app.pages.sensitivity.heatmap import heatmap_figure
from inshrink_app.widgets import figures
from inshrink_app.widgets.figures import log_groups

from inshrink_core.analysis.profile import Row
from tests.app.builders import sensitivity_table


def test_few_steps_stay_a_column_each() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    columns = heatmap.bucket_steps(values, (1, 2, 1000))
    assert columns.values is values
    assert columns.labels == ("1", "2", "1,000")


def test_many_steps_are_merged_by_the_mean_of_what_is_there() -> None:
    values = np.asarray([[1, 3, np.nan, 5, np.nan, np.nan]], dtype=np.float32)
    columns = heatmap.bucket_steps(values, (10, 20, 30, 40, 50, 60), limit=3)
    np.testing.assert_array_equal(columns.values, np.asarray([[2, 5, np.nan]], dtype=np.float32))
    assert columns.labels == ("10 – 20", "30 – 40", "50 – 60")
    assert columns.values.dtype == np.float32


@pytest.mark.parametrize("n_steps", [101, 150, 199, 1000])
def test_no_step_is_lost_by_merging(n_steps: int) -> None:
    columns = heatmap.bucket_steps(np.ones((1, n_steps), np.float32), range(n_steps))
    assert columns.values.shape == (1, heatmap.MAX_COLUMNS)
    assert columns.labels[0].startswith("0")
    assert columns.labels[-1].endswith(f"{n_steps - 1:,}")


def test_heatmap_colours_are_float32_logarithms_and_hovers_tell_the_value() -> None:
    table = sensitivity_table()
    heat = heatmap_figure(table, "mean").data[1]
    assert heat.z.dtype == np.float32
    np.testing.assert_allclose(heat.z[:-1], np.log10(table.values["mean"][:-1]), rtol=1e-5)
    np.testing.assert_array_equal(heat.customdata, table.values["mean"])
    assert "layers.0.weight" in heat.y[0]
    assert "4×3" in heat.y[0]


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["a.b.x", "a.b.y"], ["x", "y"]),
        (["a.b", "a.b.c"], ["b", "b.c"]),
        (["a.b", "c.b"], ["a.b", "c.b"]),
        (["a.b.c"], ["a.b.c"]),
        (["same", "same"], ["same", "same"]),
        ([], []),
    ],
)
def test_row_labels_leave_out_what_all_names_share(names: list[str], labels: list[str]) -> None:
    assert heatmap.row_labels(names) == labels


def test_a_gap_is_drawn_grey_and_not_as_a_value() -> None:
    gaps, heat = heatmap_figure(sensitivity_table(), "mean").data
    assert np.isnan(heat.z[-1, 0])
    assert gaps.z[-1, 0] == 0
    assert np.isfinite(gaps.z).sum() == 1
    assert not gaps.showscale


def test_an_outlier_leaves_the_colour_scale_to_the_others() -> None:
    table = sensitivity_table(30, 30)
    table.values["mean"][0, 0] = 1e9
    assert heatmap_figure(table, "mean").data[1].zmax < 1


@pytest.mark.parametrize("value", [0.0, 1e-30, 1.0, np.inf, np.nan])
def test_a_table_of_one_value_is_drawn_whatever_the_value(value: float) -> None:
    table = sensitivity_table(2, 2)
    table.values["mean"][:] = value
    heat = heatmap_figure(table, "mean").data[1]
    assert heat.zmax > heat.zmin
    assert np.isfinite([heat.zmin, heat.zmax]).all()


def test_zeros_take_the_lower_end_of_the_scale() -> None:
    table = sensitivity_table()
    table.values["mean"][0, 0] = 0
    heat = heatmap_figure(table, "mean").data[1]
    assert heat.z[0, 0] == pytest.approx(heat.zmin)


@pytest.mark.parametrize(
    ("low", "high"),
    [(-9.2, 3.4), (-3.1, -2.9), (-2.5, -0.7), (5.0, 5.3), (0.32, 0.92), (0.01, 0.04), (-44.9, 38.5)],
)
def test_the_colour_scale_has_labels_inside_of_its_ends(low: float, high: float) -> None:
    bar = heatmap.colorbar("|w|", low, high, 300)
    assert 2 <= len(bar["tickvals"]) <= 12
    assert len(set(bar["ticktext"])) == len(bar["tickvals"])
    assert all(low <= tick <= high for tick in bar["tickvals"])


@pytest.mark.parametrize(("n_rows", "n_steps"), [(1, 1), (12, 24), (60, 50), (400, 200)])
def test_labels_of_a_heatmap_never_crowd(n_rows: int, n_steps: int) -> None:
    figure = heatmap_figure(sensitivity_table(n_rows, n_steps), "mean")
    assert sum(note.xanchor == "left" for note in figure.layout.annotations) <= 60
    assert len(figure.layout.xaxis.ticktext) <= 16
    assert figure.layout.height <= 1300


def test_names_of_tensors_are_text_and_never_markup() -> None:
    table = sensitivity_table(1, 1)
    evil = "<a href='javascript:alert(1)'>x</a>\u202e"
    table = dataclasses.replace(table, rows=(Row(evil, "", "linear", "weight", 1, 12, (4, 3)),))
    text = heatmap_figure(table, "mean").to_json()
    text += figures.log_figure({evil: ((1, 1.0),)}, {evil: [evil]}).to_json()
    assert "<a " not in text
    assert "\\u003ca " not in text
    assert "\\u202e" not in text


def test_a_figure_depends_on_its_data_alone() -> None:
    table = sensitivity_table()
    first = heatmap_figure(table, "mean")
    assert first.to_json() == heatmap_figure(table, "mean").to_json()


def test_metrics_that_share_a_scale_share_a_panel() -> None:
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


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["grad_norm", "weight_norm"], {"grad_norm": ["grad_norm"], "weight_norm": ["weight_norm"]}),
        (["train/grad_norm", "val/grad_norm"], {"grad_norm": ["train/grad_norm", "val/grad_norm"]}),
        (["eval_samples_per_second"], {"eval_samples_per_second": ["eval_samples_per_second"]}),
        (["Loss/train", "Loss/test"], {"Loss": ["Loss/train", "Loss/test"]}),
        (["train", "val"], {"train": ["train"], "val": ["val"]}),
    ],
)
def test_panels_of_metrics_bear_whole_names(names, groups) -> None:
    assert log_groups(names) == groups


def test_a_smoothed_curve_stands_before_what_was_logged() -> None:
    log = {"loss": tuple((step, float(step % 2)) for step in range(100))}
    raw, smooth = figures.log_figure(log, {"loss": ["loss"]}, smoothing=0.9).data
    assert raw.opacity < smooth.opacity
    assert np.ptp(smooth.y[50:]) < 0.2 * np.ptp(raw.y)
    gaps = figures.smoothed([1.0, np.nan, 1.0], 0.5)
    assert gaps[0] == gaps[2] == 1.0
    assert np.isnan(gaps[1])


def test_a_log_with_gaps_and_infinities_is_drawn() -> None:
    log = {"loss": ((1, float("nan")), (2, float("inf")), (3, 1.0))}
    groups = {"<loss>": ["loss"]}
    assert len(figures.log_figure(log, groups).data) == 1
    named = figures.log_figure(log, groups, legends=False)
    assert [note.text for note in named.layout.annotations] == ["&lt;loss&gt;"]


def test_frames_are_told_apart_by_kind() -> None:
    frames = [(10, "keyframe", 1_000, " estimated"), (20, "delta", 100, " estimated")]
    keyframes, deltas = figures.frames_figure(frames).data
    assert (list(keyframes.x), list(deltas.x)) == (["10"], ["20"])
    assert keyframes.customdata[0][0] == "1.00 kB estimated"
    assert not figures.frames_figure([]).data


def test_the_last_step_has_its_label() -> None:
    labels = [str(step) for step in range(10, 250, 10)]
    shown = figures.columns_axis(labels)["ticktext"]
    assert (shown[0], shown[-1]) == ("10", "240")
    assert len(shown) <= 13
    assert figures.few_ticks([], [], 5)["ticktext"] == []


def test_names_that_differ_in_their_middle_keep_labels_that_differ() -> None:
    names = [f"model.encoder.{part}.block.self_attention.output.dense.weight" for part in ("left", "right")]
    assert len(set(heatmap.row_labels([*names, "model.head"]))) == 3


def test_above_every_figure_is_room_for_the_buttons_that_touch_screens_always_show() -> None:
    log = {"loss": ((1, 2.0), (2, 1.0))}
    frames = [(10, "keyframe", 1_000, "")]
    drawn = [
        heatmap_figure(sensitivity_table(), "mean"),
        figures.log_figure(log, {"loss": ["loss"]}),
        figures.frames_figure(frames),
    ]
    for figure in drawn:
        above = [note for note in figure.layout.annotations if note.yref == "paper"]
        has_line = bool(figure.layout.showlegend or above)
        assert figure.layout.margin.t >= figures.TOOLBAR + 24 * has_line


@pytest.mark.parametrize(
    "values", [[1e-45, 3.4e38], [1e-320, 1.0], [5e-324], [1e308, 1e-308], [1.02, 1.06], [7.0]]
)
def test_values_at_the_ends_of_what_a_float_holds_have_ticks(values: list[float]) -> None:
    for kind in (np.float64, np.float32):
        ticks = figures.log_ticks(
            kind(value) for value in values if 1e-45 <= value <= 3.4e38 or kind is np.float64
        )
        if ticks:
            assert len(ticks["tickvals"]) == len(set(ticks["ticktext"])) <= 12
            assert all(0 < tick < np.inf for tick in ticks["tickvals"])


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.02, 0.5], {"0.02", "0.1", "0.5"}),
        ([2e-4, 0.5], {"1e-4", "0.01", "1"}),
        ([1e-3, 2e-3], {"1e-3", "1.5e-3", "2e-3"}),
        ([7e-4, 2e-3], {"7e-4", "1e-3", "2e-3"}),
    ],
)
def test_a_logarithmic_axis_writes_its_ticks_out_in_one_way(values: list[float], texts: set[str]) -> None:
    assert texts <= set(figures.log_ticks(values)["ticktext"])
    assert figures.log_ticks([0.0, float("nan")]) == {}
