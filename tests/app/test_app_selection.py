"""One selection for heatmap, table, search box and link; rows for models of any size; changes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from inshrink_app.pages.run.changes import between_runs, between_steps
from inshrink_app.pages.run.heatmap import aggregate
from inshrink_app.pages.run.selection import chosen_cell
from inshrink_app.widgets.modules import default_level, labels, levels, outline, rows_at

from inshrink_core.analysis.profile import Row
from tests.app.builders import sensitivity_table

STEPS = (10, 20, 30)


# Selection


NONSENSE = [None, [], {}, "23", 7, [9, 0], [0, -1], ["a", "b"], [float("nan"), 0], [1.5, 2], [True, 1], [1]]


@pytest.mark.parametrize("said", [*NONSENSE, [1, 2, 3]])
def test_nonsense_from_a_browser_selects_nothing(said):
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


def test_a_deeper_level_splits_rows_that_hold_every_tensor_once():
    known = levels(GPT)
    assert known == ("layer_type", "1", "2", "3", "block", "tensor")
    sizes = []
    for level in known[1:]:
        rows = rows_at(GPT, (), level)
        assert sorted(i for row in rows for i in row.members) == list(range(len(GPT)))
        sizes.append(len(rows))
    assert sizes == [1, 400, 1200, 1600, 1600]
    assert [row.name for row in rows_at(GPT, (), "2")][:2] == ["h.0", "h.1"]


def test_to_begin_with_there_are_a_few_dozen_lines_or_the_next_level_after_a_handful():
    assert default_level(tuple(SMALL)) == "tensor"
    assert default_level(tuple(GPT)) == "2"
    assert default_level(tuple(f"h{i}.{part}" for i in range(14) for part in "wb")) == "block"
    assert default_level(tuple(f"w{i}" for i in range(99))) == "tensor"
    assert default_level(()) == "tensor"


def test_what_is_selected_is_seen_whatever_the_level_and_nothing_else_is_opened():
    assert said(SMALL, "1") == ["conv", "net", "scale"]
    assert said(SMALL, "1", opened=["net.fc.bias"]) == [
        "conv", "net", "net.fc", "net.fc.weight", "net.fc.bias", "scale",
    ]  # fmt: skip
    assert said(GPT, "1", opened=["h.399"])[-3:] == [f"h.399.{part}" for part in PARTS_OF_H]
    # A module that was closed stays so.
    assert said(SMALL, "tensor", closed=["net"]) == ["conv", "conv.weight", "conv.bias", "net", "scale"]
    assert said(SMALL, "1", opened=["net.fc"], closed=["net"]) == ["conv", "net", "scale"]


def test_names_may_be_anything():
    names = ["", ".", "a..b", "a", "a.b", "a" + 5000 * ".x", "a" + 5000 * ".x" + "y", "a\n.<b>"]
    for level in levels(names)[1:]:
        rows = rows_at(names, (), level)
        assert sorted(i for row in rows for i in row.members) == list(range(len(names)))
        assert len(labels(outline(names, level, opened=names))) < 100


def test_a_group_is_the_mean_of_its_tensors_by_their_size():
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


# Changes


def test_changes_between_steps_put_the_largest_first_in_either_direction():
    table = sensitivity_table(4, 3)
    table.values["mean"][:] = [[1, 1, 2], [1, 1, 1], [8, 4, 1], [np.nan, 1, 1]]
    found = between_steps(table, "mean", 10, 30)
    assert found.names[:3] == ["layers.2.weight", "layers.0.weight", "layers.1.weight"]
    np.testing.assert_array_equal(found.table.values["mean"][0], [1, 1 / 2, 1 / 8])
    assert found.table.steps == STEPS
    assert found.names[3] == "layers.3.weight", "which the first step lacks"
    assert np.isnan(found.first[3])


def test_runs_are_matched_by_name_at_their_common_steps():
    mine, other = sensitivity_table(3, 3), sensitivity_table(3, 2)
    rows = (Row("new", "", "linear", "weight", 1, 12, (4, 3)), *mine.rows[1:])
    values = {name: 2 * mine.values[name][:, 1:] for name in mine.values}
    other = dataclasses.replace(other, rows=rows, steps=(20, 30), values=values)
    found = between_runs(mine, other, "mean")
    assert found.table.steps == (20, 30)
    assert found.names[2:] == ["new", "layers.0.weight"], "which one of them lacks"
    np.testing.assert_allclose(found.table.values["mean"][:2], 2.0)
    assert np.isnan(found.table.values["mean"][2:]).all()
    assert np.isnan([found.first[2], found.second[3]]).all()
