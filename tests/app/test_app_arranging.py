"""How rows are laid out: relative values, order, colours around one, and the training loss above."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from inshrink_app.model.sensitivity import METRICS, Sensitivity
from inshrink_app.pages.sensitivity import ahead, cells, drill_figures, heatmap, selection
from inshrink_app.pages.sensitivity.arranging import normalised, ordered
from inshrink_app.pages.sensitivity.drilldown import half_in
from inshrink_app.pages.sensitivity.heatmap import aggregate
from inshrink_app.widgets.modules import Node, outline

from inshrink_core.analysis.anatomy import Places
from inshrink_core.analysis.profile import Row
from inshrink_core.sensitivity import SensitivityMetric
from tests.app.builders import (
    FakeJobs,
    answer,
    button,
    explorer,
    sensitivity_table,
    subject,
    tables,
    texts,
    write_run,
)


def table_of(
    values: list[list[float]], sizes: list[int] | None = None, metric: str = "fisher"
) -> Sensitivity:
    """Return a table of given means."""
    table = sensitivity_table(len(values), len(values[0]), metric=metric)
    rows = tuple(
        row._replace(numel=size) for row, size in zip(table.rows, sizes or [1] * len(values), strict=True)
    )
    array = np.array(values, np.float32)
    return dataclasses.replace(table, rows=rows, values=dict.fromkeys(table.values, array))


def test_shares_of_a_step_add_up_over_all_tensors_whichever_are_shown() -> None:
    whole = table_of([[1, 0], [3, math.nan], [1e30, 0]], [2, 2, 1])
    shares = normalised(whole, "share").values["mean"]
    assert np.nansum(shares[:, 0]) == pytest.approx(1)
    assert np.isnan(shares[:, 1]).all()
    part = dataclasses.replace(whole, rows=whole.rows[:1], values={"mean": whole.values["mean"][:1]})
    assert normalised(part, "share", whole).values["mean"][0, 0] == pytest.approx(2e-30)


def test_as_is_changes_nothing() -> None:
    table = table_of([[1.0]])
    assert normalised(table, "plain") is table


@pytest.mark.parametrize(
    ("by", "order"),
    [
        ("forward", (0, 1, 2)),
        ("sensitivity", (2, 0, 1)),
        ("share", (2, 0, 1)),
        ("size", (1, 0, 2)),
    ],
)
def test_rows_are_sorted_the_largest_first_and_the_unknown_last(by: str, order: tuple[int, ...]) -> None:
    table = table_of([[9, 2], [5, math.nan], [1, 7]], [4, 8, 4])
    values = np.array([[9, 2], [math.nan, math.nan], [1, 7]], np.float32)
    table = dataclasses.replace(table, values={"mean": values})
    assert ordered(table, by, "mean") == order


def test_equal_rows_keep_the_models_order() -> None:
    assert ordered(table_of([[1]] * 4), "sensitivity", "mean") == (0, 1, 2, 3)


def test_quotients_are_coloured_both_ways_from_one() -> None:
    table = table_of([[1, 1.5], [0.25, 1]], metric="fisher")
    _, heat, *_ = heatmap.heatmap_figure(table, "mean", relative="times").data
    assert (heat.zmin + heat.zmax) / 2 == pytest.approx(0.0)


@pytest.mark.parametrize("wild", [math.nan, math.inf, 1e30, -1e30, 0.0])
@pytest.mark.parametrize("relative", ["plain", "times", "share"])
def test_any_value_can_be_drawn(wild: float, relative: str) -> None:
    table = normalised(table_of([[1, wild], [2, 3]], metric="fisher"), relative)
    loss = ("loss", [(10, wild), (20, 1.0)])
    figure = heatmap.heatmap_figure(table, "mean", relative=relative, loss=loss)
    assert math.isfinite(figure.data[1].zmin)
    assert math.isfinite(figure.data[1].zmax)
    figure.to_json()


def test_the_training_loss_stands_above_the_cells_on_their_axis() -> None:
    table = sensitivity_table(3, 3)
    plain = heatmap.heatmap_figure(table, "mean")
    figure = heatmap.heatmap_figure(table, "mean", loss=("<b>loss", [(10, 3.0), (25, 2.0)]))
    line = figure.data[-1]
    assert list(line.x) == ["10", "20", "30"]
    assert line.y[0] == 3.0
    assert math.isnan(line.y[1])
    assert line.y[2] == 2.0
    assert figure.layout.yaxis.domain[1] < figure.layout.yaxis2.domain[0]
    inner = plain.layout.height - figure.layout.margin.t - figure.layout.margin.b
    drawn = figure.layout.height - figure.layout.margin.t - figure.layout.margin.b
    assert drawn * figure.layout.yaxis.domain[1] == pytest.approx(inner)
    assert "&lt;b&gt;" in line.hovertemplate


def test_a_loss_that_says_nothing_takes_no_room() -> None:
    table = sensitivity_table(3, 3)
    for series in ([], [(10, math.nan)], [(999, 1.0)]):
        assert len(heatmap.heatmap_figure(table, "mean", loss=("loss", series)).data) == 2


def test_a_loss_that_falls_by_decades_is_drawn_by_its_logarithm() -> None:
    figure = heatmap.heatmap_figure(sensitivity_table(3, 3), "mean", loss=("l", [(10, 1e3), (30, 1e-3)]))
    assert figure.layout.yaxis2.type == "log"


def test_headline_list_and_table_rank_by_the_share_of_the_total(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "run")
    made = tables(4, 3, metric="fisher")
    made["tensor"].values["mean"][:] = [[1.0], [2.0], [3.0], [4.0]]
    sizes = (1000, 10, 100, 1)
    rows = tuple(row._replace(numel=size) for row, size in zip(made["tensor"].rows, sizes, strict=True))
    made["tensor"] = dataclasses.replace(made["tensor"], rows=rows)
    answer(monkeypatch, FakeJobs(made))
    app = explorer("sensitivity", run=str(root / "run"), by="tensor")
    assert not app.exception
    listed = [
        found.key.removeprefix("largest.") for found in app.button if str(found.key).startswith("largest.")
    ]
    assert listed == [f"layers.{i}.weight" for i in (0, 2, 1, 3)]
    assert (
        "2 of 4 tensors carry at least 80 % of the sensitivity: layers.0.weight and layers.2.weight"
        in texts(app).replace("\\", "").replace("\u2060", "")
    )
    frame = app.dataframe[0].value
    leaves = frame[~frame["Layer"].str.contains("▼")]
    assert list(leaves["Share of the total"].rank(ascending=False)) == [1, 3, 2, 4]
    assert any("75.5 % · 1.00 per weight" in found.label.replace("\\", "") for found in app.button)


def test_movement_is_shown_relative_to_the_learning_rate() -> None:
    table = table_of([[math.nan, 4.0, 2.0]], metric="update")
    paces = np.array([math.nan, 2.0, 1.0])
    assert normalised(table, "rate", None, paces).values["mean"][0, 1:].tolist() == [2.0, 2.0]


def test_a_click_on_the_name_of_a_module_closes_and_opens_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "run")
    answer(monkeypatch, FakeJobs(tables(4, 3)))
    app = explorer("sensitivity", run=str(root / "run"), by="tensor")
    frame = app.dataframe[0].value
    assert frame["Layer"][0] == "▼ layers"
    assert len(frame) == 5
    run = str(root / "run")
    app.session_state["sensitivity.tree"] = (run, (frozenset(), frozenset({"layers"})))
    app.run()
    assert not app.exception
    (row,) = app.dataframe[0].value.to_dict("records")
    assert (row["Layer"], row["Share of the total"]) == ("► layers", pytest.approx(100))


@pytest.mark.parametrize("said", [None, -1, 9, True, "1", [0]])
def test_nonsense_from_a_browser_folds_nothing(said: object, monkeypatch: pytest.MonkeyPatch) -> None:
    folded: list[str] = []
    monkeypatch.setattr(selection, "fold", lambda run, module, **_: folded.append(module))
    view = SimpleNamespace(nodes=outline(["a.x", "a.y"], "tensor"), is_tree=True, shown=subject())
    cells._named(view, said)
    assert not folded
    cells._named(view, 0)
    cells._named(view, 2)
    assert folded == ["a", "a"]


def test_half_of_nothing_sits_nowhere() -> None:
    assert half_in(np.array([np.nan, 0.0])) == 0.0
    assert half_in(np.array([1e308, 1e308])) == 0.0


def test_profiles_are_drawn_whatever_is_in_them() -> None:
    places = Places(np.array([1.0, np.nan, 1e30]), np.array([0.0]), (300, 1))
    figure = drill_figures.profile_figure(places, "<v>")
    assert [note.text for note in figure.layout.annotations] == ["By row (of 300)", "By column (of 1)"]
    assert figure.data[0].width.sum() == 300


def test_the_page_says_in_words_what_the_picture_shows(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(root / "run")
    answer(monkeypatch, FakeJobs(tables(metric="fisher")))
    app = explorer("sensitivity", run=str(root / "run"), by="tensor")
    assert not app.exception
    assert "of the sensitivity" in texts(app)


def test_metrics_that_a_run_cannot_tell_are_off_with_the_reason(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "one", (5,))
    answer(monkeypatch, FakeJobs(tables(3, 1)))
    app = explorer("sensitivity", run=str(root / "one"))
    assert not app.exception
    assert app.selectbox(key="control.metric").options == ["Magnitude"]
    assert "the checkpoints hold none that is known to be a weight's" in texts(app)
    assert "Their optimizer state: none." in texts(app)


def test_a_run_with_momentum_is_not_said_to_hold_no_optimizer_state(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    (root / "sgd").mkdir()
    for step in (1, 2):
        weight.grad = torch.ones(4, 3)
        optimizer.step()
        state = {"model": {"fc.weight": weight.detach()}, "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, root / "sgd" / f"step_{step}.pt")
    answer(monkeypatch, FakeJobs(tables(2, 2, metric="update")))
    app = explorer("sensitivity", run=str(root / "sgd"))
    assert not app.exception
    assert "Their optimizer state: momentum." in texts(app)
    assert "no optimizer state" not in texts(app)


def test_movement_is_nowhere_called_sensitivity(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(root / "run")
    answer(monkeypatch, FakeJobs(tables(metric="update")))
    app = explorer("sensitivity", run=str(root / "run"), by="tensor", metric="update")
    assert not app.exception
    assert "80 % of the movement" in texts(app)
    said = [line for line in texts(app).splitlines() if line != "Sensitivity" and "Fisher off" not in line]
    assert not [line for line in said if "sensitiv" in line.casefold()]
    assert "Sensitivity" not in app.dataframe[0].value.columns
    assert "Sensitivity" not in app.selectbox(key="rows.sort.forward").options


def test_the_words_for_what_is_measured_are_the_engines() -> None:
    told = {str(metric): metric.quantity.capitalize() for metric in SensitivityMetric}
    assert told == {name: metric.quantity for name, metric in METRICS.items() if name in told}


def test_order_and_normalisation_are_in_the_link_and_taken_from_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(root / "run")
    answer(monkeypatch, FakeJobs(tables()))
    app = explorer("sensitivity", run=str(root / "run"), norm="share", sort="size", by="tensor")
    assert not app.exception
    assert (app.query_params["norm"], app.query_params["sort"]) == ("share", "size")


def test_what_is_most_sensitive_can_be_opened_without_a_mouse(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    write_run(root / "run")
    answer(monkeypatch, FakeJobs(tables()))
    monkeypatch.setattr(ahead, "warm_up", lambda _: None)
    app = explorer("sensitivity", run=str(root / "run"), by="tensor")
    first = next(found for found in app.button if found.key and found.key.startswith("largest."))
    first.click().run()
    assert app.query_params["layer"] == first.key.removeprefix("largest.")
    assert button(app, "Close")


def test_a_module_carries_what_its_measured_tensors_carry() -> None:
    rows = tuple(Row(name, "m", "linear", "weight", 1, n, (n,)) for name, n in (("m.a", 30), ("m.b", 10)))
    values = {"mean": np.array([[2.0], [np.nan]], np.float32)}
    table = Sensitivity(metric="fisher", by="tensor", rows=rows, steps=(1,), values=values)
    module = aggregate(table, [Node("m", (0, 1))])
    assert module.values["mean"].tolist() == [[2.0]]
    assert normalised(module, "share", table).values["mean"].tolist() == [[1.0]]
