"""Figures and tables: any value can be drawn, tables look alike on every page, and names are text."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
from inshrink_app.model.sensitivity import Sensitivity
from inshrink_app.pages.archives import compare as comparison_figures
from inshrink_app.pages.run import heatmap, picture, selection
from inshrink_app.pages.run.heatmap import heatmap_figure
from inshrink_app.services import Bound
from inshrink_app.widgets import figures, fmt
from inshrink_app.widgets.modules import outline
from streamlit.testing.v1 import AppTest

from inshrink_core.analysis.profile import Row
from inshrink_core.evaluate import Comparison, EvaluatedStep
from inshrink_core.metrics import Direction
from inshrink_core.verbs.shared.measured import EvaluatorId, Known
from tests.app.builders import button, compared_row, explorer, sensitivity_table, subject, texts, write_run


def test_many_steps_are_merged_by_the_mean_of_what_is_there(monkeypatch):
    monkeypatch.setattr(heatmap, "MAX_COLUMNS", 3)
    values = np.asarray([[1, 3, np.nan, 5, np.nan, np.nan]], dtype=np.float32)
    axis = heatmap.StepAxis.of((10, 20, 30, 40, 50, 60))
    np.testing.assert_array_equal(axis.merged(values), np.asarray([[2, 5, np.nan]], dtype=np.float32))
    assert (axis.steps, axis.place_of(1), axis.column_of(3)) == ((20, 40, 60), 3, 1)
    assert axis.merged(values).dtype == np.float32


def test_steps_stand_side_by_side_with_a_marked_gap_where_the_run_lacks_one():
    steps = (10, 20, 40, 50)
    missing = heatmap.missing_steps(steps, ["broken_60.pt", "other_900.pt"])
    assert missing == (30, 60)
    axis = heatmap.StepAxis.of(steps, missing)
    assert axis.steps == (10, 20, 30, 40, 50, 60)
    assert axis.edges.tolist() == [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    assert [axis.place_of(column) for column in range(6)] == [0, 1, None, 2, 3, None]
    table = dataclasses.replace(sensitivity_table(2, 4), steps=steps)
    drawn = heatmap_figure(table, "mean", missing=missing)
    assert [note.x for note in drawn.layout.annotations if note.text == "×"] == [2, 5]


def test_names_of_tensors_are_text_and_never_markup():
    table = sensitivity_table(1, 1)
    evil = "<a href='javascript:alert(1)'>x</a>\u202e"
    table = dataclasses.replace(table, rows=(Row(evil, "", "linear", "weight", 1, 12, (4, 3)),))
    text = heatmap_figure(table, "mean").to_json()
    text += figures.log_figure({evil: ((1, 1.0),)}, {evil: [evil]}).to_json()
    assert "<a " not in text
    assert "\\u003ca " not in text
    assert "\\u202e" not in text


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


@pytest.mark.parametrize("wild", [math.nan, math.inf, 3.4e38, 1e-45, -1e30, 0.0, 1.0])
@pytest.mark.parametrize("is_ratio", [False, True])
@pytest.mark.parametrize("is_alone", [False, True])
def test_any_value_can_be_drawn(wild, is_ratio, is_alone):
    table = table_of([[wild, wild]] if is_alone else [[1, wild], [2, 3]], metric="fisher")
    curves = [("loss", [(10, wild), (20, 1.0)]), ("lr", [(10, 1.0), (20, wild)])]
    figure = heatmap.heatmap_figure(table, "mean", is_ratio=is_ratio, curves=curves)
    assert -math.inf < figure.data[1].zmin < figure.data[1].zmax < math.inf
    figure.to_json()


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


def test_headline_list_and_table_rank_by_the_share_of_the_total_and_what_has_no_value_is_last(root, jobs):
    made = table_of([[math.nan], [1.0], [2.0], [3.0], [4.0]], [7, 1000, 10, 100, 1])
    jobs.answers["sensitivity"] = dataclasses.replace(made, steps=(10,))
    run = str(write_run(root / "run", (10,)))
    app = explorer("run", run=run, by="tensor", drawer="table", sort="share", metric="magnitude")
    ranked = [f"layers.{i}.weight" for i in (1, 3, 2, 4)]
    keys = [str(found.key) for found in app.button]
    assert [key.removeprefix("largest.") for key in keys if key.startswith("largest.")] == ranked
    told = texts(app).replace("\\", "").replace("\u2060", "")
    assert f"2 of 4 tensors carry at least 80 % of the sensitivity: {ranked[0]} and {ranked[1]}" in told
    assert list(app.dataframe[0].value["Layer"]) == [*ranked, "layers.0.weight"]
    assert any("75.5\xa0% · 1.00 per weight" in found.label.replace("\\", "") for found in app.button)
    # The largest rows open without a mouse.
    app.button(key=f"largest.{ranked[0]}").click().run()
    assert app.query_params["layer"] == ranked[0]
    assert button(app, "Close")


COLOURS = {"<b>a<b>": "#112233"}


def comparison(*steps: EvaluatedStep) -> Known:
    return Known(
        archive="<b>a<b>",
        at=0.0,
        evaluator=EvaluatorId("judge.py:f", ""),
        comparison=Comparison.over(steps, "loss", Direction.LOWER),
        standard_errors={},
    )


def test_figures_write_names_as_text_and_leave_gaps_where_nothing_is_known():
    steps = compared_row(step=10, divergence=0.0), compared_row(previous_drop=0.2, divergence=1e-3)
    found = [comparison(*steps)]
    drop = comparison_figures.cost_figure(found, "drop", COLOURS, Bound("drop", 0.01))
    assert [trace.name for trace in drop.data] == ["Previous checkpoint", "&lt;b&gt;a&lt;b&gt;"]
    assert drop.layout.shapes[0].y0 == 1.0
    assert drop.data[1].line.color == "#112233"
    divergence = comparison_figures.cost_figure(found, "divergence", COLOURS).data[-1].y
    assert list(divergence) == [0.0, 1e-3]


@pytest.mark.parametrize("wild", [math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0])
def test_any_figure_of_a_comparison_can_be_drawn(wild):
    values = ("original", "restored", "drop", "divergence", "previous_drop", "previous_divergence")
    found = [comparison(compared_row(step=10, **dict.fromkeys(values, wild)), compared_row())]
    for figure in (
        comparison_figures.metric_figure(found, COLOURS),
        comparison_figures.cost_figure(found, "drop", COLOURS, Bound("drop", 0.01)),
        comparison_figures.size_figure(found, {"<b>a<b>": 1000}, COLOURS, "drop", Bound("drop", 0.003)),
        comparison_figures.cost_figure(found, "divergence", COLOURS),
    ):
        figure.to_json()
        ends = [end for axis in (figure.layout.yaxis, figure.layout.xaxis) for end in axis.range or ()]
        assert np.isfinite(np.asarray(ends, np.float64)).all()


def test_a_table_has_percent_on_screen_an_alternative_text_and_two_files():
    def script() -> None:
        import pandas as pd
        from inshrink_app.widgets import listing

        table = pd.DataFrame({"step": [1000, 2000], "drop": [0.0123, None], "kind": ["a", "b"]})
        listing.show(table, "two", alt="Two rows", hidden=["kind"], most=1)

    app = AppTest.from_function(script).run()
    drawn = app.dataframe[0].value
    assert list(drawn.columns) == ["step", "drop"]
    assert list(drawn["drop"]) == pytest.approx([1.23])
    assert app.dataframe[0].proto.alt == "Two rows"
    assert [button.proto.label for button in app.get("download_button")] == ["CSV", "JSON"]


@pytest.mark.parametrize(
    "name",
    ["**bold**", "[x](http://evil)", "$x$", ":red[x]", "<b>", "a_b_", "`code`", "# x", "![i](u)", "~~x~~"],
)
def test_markdown_in_a_name_is_escaped(name):
    escaped = fmt.markdown(name)
    for sign in "*[]()$<>_`#~!:":
        assert escaped.count(sign) == escaped.count("\\" + sign)
    assert escaped.replace("\\", "").replace("\u2060", "") == name


@pytest.mark.parametrize("name", ["https://evil.example", "www.evil.example", "a@evil.example", ":smile:"])
def test_links_and_icons_without_brackets_are_broken_up(name):
    assert "\u2060" in fmt.markdown(name)


@pytest.mark.parametrize("sign", ["\u202e", "\x1b", "\0", "\n", "\u200b", "\ud800"])
def test_signs_that_could_forge_a_name_are_replaced(sign):
    assert sign not in fmt.markdown(f"a{sign}b")
    assert sign not in fmt.html(f"a{sign}b")
