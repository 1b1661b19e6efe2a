"""How rows are laid out: relative values, order, colours around one, and the training loss above."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
from inshrink_app.model.sensitivity import Sensitivity
from inshrink_app.pages.run import ahead, heatmap, picture, selection
from inshrink_app.pages.run.rows import normalised
from inshrink_app.widgets.modules import outline

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


def test_shares_of_a_step_add_up_over_all_tensors_whichever_are_shown():
    whole = table_of([[1, 0], [3, math.nan], [1e30, 0]], [2, 2, 1])
    shares = normalised(whole, "share").values["mean"]
    assert np.nansum(shares[:, 0]) == pytest.approx(1)
    assert np.isnan(shares[:, 1]).all()
    part = dataclasses.replace(whole, rows=whole.rows[:1], values={"mean": whole.values["mean"][:1]})
    assert normalised(part, "share", whole).values["mean"][0, 0] == pytest.approx(2e-30)


@pytest.mark.parametrize("wild", [math.nan, math.inf, 1e30, -1e30, 0.0])
@pytest.mark.parametrize("relative", ["plain", "times", "share"])
def test_any_value_can_be_drawn(wild, relative):
    table = normalised(table_of([[1, wild], [2, 3]], metric="fisher"), relative)
    curves = [("loss", [(10, wild), (20, 1.0)]), ("lr", [(10, 1.0), (20, wild)])]
    figure = heatmap.heatmap_figure(table, "mean", relative=relative, curves=curves)
    assert math.isfinite(figure.data[1].zmin)
    assert math.isfinite(figure.data[1].zmax)
    figure.to_json()


def test_headline_list_and_table_rank_by_the_share_of_the_total(root, monkeypatch):
    write_run(root / "run")
    made = tables(4, 3, metric="fisher")
    made["tensor"].values["mean"][:] = [[1.0], [2.0], [3.0], [4.0]]
    sizes = (1000, 10, 100, 1)
    rows = tuple(row._replace(numel=size) for row, size in zip(made["tensor"].rows, sizes, strict=True))
    made["tensor"] = dataclasses.replace(made["tensor"], rows=rows)
    answer(monkeypatch, FakeJobs(made))
    app = explorer("run", run=str(root / "run"), by="tensor", drawer="table")
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


@pytest.mark.parametrize("said", [None, -1, 9, True, "1", [0]])
def test_nonsense_from_a_browser_folds_nothing(said, monkeypatch):
    folded: list[str] = []
    monkeypatch.setattr(selection, "fold", lambda run, module, **_: folded.append(module))
    view = SimpleNamespace(nodes=outline(["a.x", "a.y"], "tensor"), is_tree=True, shown=subject())
    picture._named(view, said)
    assert not folded
    picture._named(view, 0)
    picture._named(view, 2)
    assert folded == ["a", "a"]


def test_metrics_that_a_run_cannot_tell_are_off_with_the_reason(root, monkeypatch):
    write_run(root / "one", (5,))
    answer(monkeypatch, FakeJobs(tables(3, 1)))
    app = explorer("run", run=str(root / "one"))
    assert app.selectbox(key="map.metric").options == ["Magnitude"]
    assert "the checkpoints hold none that is known to be a weight's" in texts(app)
    assert "Their optimizer state: none." in texts(app)


def test_order_and_normalisation_are_in_the_link_and_taken_from_it(root, monkeypatch):
    write_run(root / "run")
    made = tables(3)
    made["tensor"].values["mean"][:] = [[2.0], [math.nan], [7.0]]
    answer(monkeypatch, FakeJobs(made))
    app = explorer("run", run=str(root / "run"), norm="share", sort="share", by="tensor", drawer="table")
    assert (app.query_params["norm"], app.query_params["sort"]) == ("share", "share")
    assert list(app.dataframe[0].value["Layer"]) == [f"layers.{i}.weight" for i in (2, 0, 1)]


def test_what_is_most_sensitive_can_be_opened_without_a_mouse(root, monkeypatch):

    write_run(root / "run")
    answer(monkeypatch, FakeJobs(tables()))
    monkeypatch.setattr(ahead, "warm_up", lambda _: None)
    app = explorer("run", run=str(root / "run"), by="tensor")
    first = next(found for found in app.button if found.key and found.key.startswith("largest."))
    first.click().run()
    assert app.query_params["layer"] == first.key.removeprefix("largest.")
    assert button(app, "Close")
