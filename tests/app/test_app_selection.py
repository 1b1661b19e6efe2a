"""One selection for heatmap, table, search box and link; rows for models of any size; changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from inshrink_app.model.sensitivity import Sensitivity
from inshrink_app.pages.sensitivity.changes import aligned, between_runs, between_steps, sides_figures
from inshrink_app.pages.sensitivity.heatmap import aggregate
from inshrink_app.pages.sensitivity.selection import (
    Event,
    Selection,
    apply_selection,
    chosen_cell,
    link_event,
    nearest_step,
)
from inshrink_app.widgets.modules import (
    default_level,
    labels,
    levels,
    members_of,
    outline,
    rows_at,
    trail,
)

from inshrink_core.analysis.profile import Row
from tests.app.builders import sensitivity_table

STEPS = (10, 20, 30)
SEEN = Selection("a", 20)


# Selection


@pytest.mark.parametrize(
    ("state", "event", "after"),
    [
        (None, Event("chart", "b", 10), Selection("b", 10)),
        (SEEN, Event("chart", "b", 30), Selection("b", 30)),
        (SEEN, Event("table", "b"), Selection("b", 20)),
        (None, Event("table", "b"), Selection("b", 30)),
        (SEEN, Event("table"), None),
        (SEEN, Event("search", "b"), Selection("b", 20)),
        (SEEN, Event("search"), SEEN),
        (SEEN, Event("step", step=30), Selection("a", 30)),
        (SEEN, Event("step"), SEEN),
        (None, Event("step", step=30), None),
        (SEEN, Event("link"), SEEN),
        (SEEN, Event("link", "b", 29), Selection("b", 30)),
        (None, Event("link", "b"), Selection("b", 30)),
        (SEEN, Event("close"), None),
    ],
)
def test_every_way_to_select_leads_to_the_same_state(
    state: Selection | None, event: Event, after: Selection | None
) -> None:
    assert apply_selection(state, event, STEPS) == after


def test_a_run_without_steps_has_no_selection() -> None:
    assert apply_selection(SEEN, Event("chart", "b", 10), ()) is None


def test_the_earlier_of_two_steps_is_nearest() -> None:
    assert nearest_step(15, STEPS) == 10
    assert nearest_step(10**30, STEPS) == 30


@pytest.mark.parametrize("said", ["-1", "1e3", "<b>", "", "٣", "9" * 40, None])
def test_a_step_of_a_link_that_is_no_number_counts_as_none(said: str | None) -> None:
    assert link_event("a", said).step is None


def test_a_click_is_a_cell_that_there_is() -> None:
    assert chosen_cell([2, 3], 5, 5) == (2, 3)
    assert chosen_cell([4, 0], 5, 5) == (4, 0)


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        {},
        "23",
        7,
        [9, 0],
        [0, -1],
        ["a", "b"],
        [float("nan"), 0],
        [1.5, 2],
        [True, 1],
        [1],
        [1, 2, 3],
    ],
)
def test_nonsense_from_a_browser_selects_nothing(said: object) -> None:
    assert chosen_cell(said, 5, 5) is None


# Rows for models of any size

GPT = [
    f"h.{i}.{part}"
    for i in range(400)
    for part in ("ln_1.weight", "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight")
]


PARTS_OF_H = ("ln_1.weight", "attn", "mlp.c_fc.weight")
SMALL = ["conv.weight", "conv.bias", "net.fc.weight", "net.fc.bias", "scale"]


def said(names: Sequence[str], level: str, **more: Any) -> list[str]:
    return [node.name for node in outline(names, level, **more)]


def test_a_deeper_level_splits_rows_that_hold_every_tensor_once() -> None:
    known = levels(GPT)
    assert known == ("layer_type", "1", "2", "3", "block", "tensor")
    sizes = []
    for level in known[1:]:
        rows = rows_at(GPT, (), level)
        assert sorted(i for row in rows for i in row.members) == list(range(len(GPT)))
        sizes.append(len(rows))
    assert sizes == [1, 400, 1200, 1600, 1600]
    assert [row.name for row in rows_at(GPT, (), "2")][:2] == ["h.0", "h.1"]


def test_to_begin_with_there_are_a_few_dozen_lines_or_the_next_level_after_a_handful() -> None:
    assert default_level(tuple(SMALL)) == "tensor"
    assert default_level(tuple(GPT)) == "2"
    assert default_level(tuple(f"h{i}.{part}" for i in range(13) for part in "wb")) == "tensor"
    assert default_level(tuple(f"h{i}.{part}" for i in range(14) for part in "wb")) == "block"
    assert default_level(tuple(f"w{i}" for i in range(99))) == "tensor"
    assert default_level(()) == "tensor"


def test_rows_are_blocks_tensors_or_layer_types() -> None:
    assert [(row.name, row.members) for row in rows_at(SMALL, (), "block")] == [
        ("conv", (0, 1)),
        ("net.fc", (2, 3)),
        ("scale", (4,)),
    ]
    assert [row.name for row in rows_at(SMALL, (), "tensor")] == SMALL
    types = ["convolution", "vector", "linear", "vector", ""]
    assert [row.name for row in rows_at(SMALL, types, "layer_type")] == [
        "convolution",
        "vector",
        "linear",
        "other",
    ]


def test_a_block_that_holds_modules_is_open_so_that_no_two_rows_share_a_tensor() -> None:
    names = ["attn.in_proj", "attn.out.weight", "attn.out.bias"]
    assert said(names, "block") == ["attn", "attn.in_proj", "attn.out"]
    assert [row.name for row in rows_at(names, (), "block")] == ["attn.in_proj", "attn.out"]


def test_what_is_selected_is_seen_whatever_the_level_and_nothing_else_is_opened() -> None:
    assert said(SMALL, "1") == ["conv", "net", "scale"]
    assert said(SMALL, "1", opened=["net.fc.bias"]) == [
        "conv", "net", "net.fc", "net.fc.weight", "net.fc.bias", "scale",
    ]  # fmt: skip
    assert said(GPT, "1", opened=["h.399"])[-3:] == [f"h.399.{part}" for part in PARTS_OF_H]


def test_a_module_that_was_closed_stays_so_whatever_the_level() -> None:
    assert said(SMALL, "tensor", closed=["net"]) == ["conv", "conv.weight", "conv.bias", "net", "scale"]
    assert said(SMALL, "1", opened=["net.fc"], closed=["net"]) == ["conv", "net", "scale"]


def test_lines_of_the_tree_are_indented_and_say_what_is_open() -> None:
    assert labels(outline(SMALL, "1", opened=["net"])) == ["► conv", "▼ net", "\u2003► fc", "scale"]


def test_the_way_back_leads_through_the_modules_above() -> None:
    assert trail("") == ()
    assert trail("h.0.x") == ("h", "h.0", "h.0.x")


@pytest.mark.parametrize("within", ["nope", "h.[0-1]", "h.", "..", "h.999", "H"])
def test_a_module_that_is_not_there_holds_nothing(within: str) -> None:
    assert members_of(GPT, within) == ()


def test_names_may_be_anything() -> None:
    names = ["", ".", "a..b", "a", "a.b", "a" + 5000 * ".x", "a" + 5000 * ".x" + "y", "a\n.<b>"]
    for level in levels(names)[1:]:
        rows = rows_at(names, (), level)
        assert sorted(i for row in rows for i in row.members) == list(range(len(names)))
        assert len(labels(outline(names, level, opened=names))) < 100


def test_a_group_is_the_mean_of_its_tensors_by_their_size() -> None:
    table = sensitivity_table(4, 3)
    rows = tuple(row._replace(numel=size) for row, size in zip(table.rows, (1, 3, 1, 1), strict=True))
    table = dataclasses.replace(table, rows=rows)
    values = table.values["mean"]
    (group,) = rows_at([row.name for row in table.rows], (), "1")
    found = aggregate(table, (group,))
    expected = (values[0, 1] + 3 * values[1, 1] + values[2, 1] + values[3, 1]) / 6
    assert found.values["mean"][0, 1] == pytest.approx(expected, rel=1e-5)
    # The last row has no value at the first step, and counts for nothing there.
    assert found.values["mean"][0, 0] == pytest.approx(
        (values[0, 0] + 3 * values[1, 0] + values[2, 0]) / 5, rel=1e-5
    )
    assert (found.rows[0].n_tensors, found.rows[0].numel, found.rows[0].shape) == (4, 6, None)


def test_a_module_that_was_measured_whole_keeps_its_own_median() -> None:
    table = sensitivity_table(4, 3)
    names = ["b.x", "b.y", "c.x", "c.y"]
    rows = tuple(row._replace(name=name) for row, name in zip(table.rows, names, strict=True))
    table = dataclasses.replace(table, rows=rows)
    exact = dataclasses.replace(
        sensitivity_table(1, 3, by="block"), rows=(Row("b", "", "linear", "weight", 2, 24, None),)
    )
    found = aggregate(table, rows_at(names, (), "1"), exact)
    np.testing.assert_array_equal(found.values["p50"][0], exact.values["p50"][0])


# Changes


def test_changes_between_steps_put_the_largest_first_in_either_direction() -> None:
    table = sensitivity_table(4, 3)
    table.values["mean"][:] = [[1, 1, 2], [1, 1, 1], [8, 4, 1], [np.nan, 1, 1]]
    found = between_steps(table, "mean", 10, 30)
    assert found.names[:3] == ("layers.2.weight", "layers.0.weight", "layers.1.weight")
    np.testing.assert_array_equal(found.table.values["mean"][0], [1, 1 / 2, 1 / 8])
    assert found.table.steps == STEPS
    assert found.only_second == ("layers.3.weight",)
    assert found.only_first == ()


def test_steps_may_be_compared_backwards() -> None:
    table = sensitivity_table(2, 3)
    table.values["mean"][:] = [[1, 2, 4], [1, 1, 1]]
    found = between_steps(table, "mean", 30, 10)
    np.testing.assert_array_equal(found.table.values["mean"][0], [1 / 4, 1 / 2, 1])
    assert (found.first[0], found.second[0]) == (4, 1)


def test_runs_are_matched_by_name_at_their_common_steps() -> None:
    mine, other = sensitivity_table(3, 3), sensitivity_table(3, 2)
    rows = (Row("new", "", "linear", "weight", 1, 12, (4, 3)), *mine.rows[1:])
    values = {name: 2 * mine.values[name][:, 1:] for name in mine.values}
    other = dataclasses.replace(other, rows=rows, steps=(20, 30), values=values)
    found = between_runs(mine, other, "mean")
    assert found.table.steps == (20, 30)
    assert set(found.names) == {"layers.1.weight", "layers.2.weight"}
    np.testing.assert_allclose(found.table.values["mean"], 2.0)
    assert found.only_first == ("layers.0.weight",)
    assert found.only_second == ("new",)


def test_runs_without_a_common_step_or_tensor_have_nothing_to_draw() -> None:
    mine = sensitivity_table(2, 2)
    later = dataclasses.replace(mine, steps=(1, 2))
    assert between_runs(mine, later, "mean").table.steps == ()
    strangers = dataclasses.replace(mine, rows=tuple(row._replace(name=row.name + "x") for row in mine.rows))
    assert between_runs(mine, strangers, "mean").names == ()


# Side by side


def renamed(n_steps: int, *names: str) -> Sensitivity:
    table = sensitivity_table(len(names), n_steps)
    rows = tuple(row._replace(name=name) for row, name in zip(table.rows, names, strict=True))
    return dataclasses.replace(table, rows=rows)


def test_runs_side_by_side_have_the_same_rows_and_mark_those_of_one_alone() -> None:
    mine, other = renamed(3, "a.w", "b.w", "b.x"), renamed(2, "new", "b.x", "b.w")
    found = aligned(mine, other, "tensor")
    assert [row.name for row in found.tables[0].rows] == ["a.w", "b.w", "b.x", "new"]
    assert [row.name for row in found.tables[1].rows] == ["a.w", "b.w", "b.x", "new"]
    assert found.present == ((True, False), (True, True), (True, True), (False, True))
    left, right = (table.values["mean"] for table in found.tables)
    np.testing.assert_array_equal(left[:3], mine.values["mean"])
    np.testing.assert_array_equal(right[[2, 1]], other.values["mean"][[1, 2]])
    assert np.isnan(left[3]).all()
    assert np.isnan(right[0]).all()
    assert [row.name for row in aligned(mine, other, "block").tables[1].rows] == ["a.w", "b", "new"]


def test_runs_side_by_side_share_colours_and_keep_their_own_steps() -> None:
    mine, other = renamed(3, "a", "<b>"), renamed(2, "<b>", "c")
    other = dataclasses.replace(other, values={name: 1e3 * one for name, one in other.values.items()})
    drawn = sides_figures(aligned(mine, other, "tensor"), "mean")
    left, right = (figure.data[1] for figure in drawn)
    assert (left.zmin, left.zmax) == (right.zmin, right.zmax)
    assert left.zmax > np.nanmax(np.log10(mine.values["mean"]))
    assert (left.showscale, right.showscale) == (False, None)
    assert (list(left.x), list(right.x)) == (["10", "20", "30"], ["10", "20"])
    assert len(left.y) == len(right.y)
    assert drawn[0].layout.height == drawn[1].layout.height
    assert [note.text for note in drawn[0].layout.annotations] == ["◧ a", "&lt;b&gt;", "◨ c"]


@pytest.mark.parametrize("wild", [np.nan, np.inf, 0.0, 1e30])
def test_runs_side_by_side_are_drawn_whatever_they_hold(wild: float) -> None:
    mine = renamed(1, "a")
    mine.values["mean"][:] = wild
    for figure in sides_figures(aligned(mine, renamed(150, "a", "b"), "tensor"), "mean"):
        assert np.isfinite([figure.data[1].zmin, figure.data[1].zmax]).all()
        figure.to_json()
