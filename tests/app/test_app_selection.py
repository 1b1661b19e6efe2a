"""One selection for heatmap, table, search box and link; rows for names of any kind."""

from collections.abc import Sequence
from typing import Any

import pytest
from inshrink_app.pages.run.selection import chosen_cell
from inshrink_app.widgets.modules import labels, levels, outline, rows_at

NONSENSE = [None, [], {}, "23", 7, [9, 0], [0, -1], ["a", "b"], [float("nan"), 0], [1.5, 2], [True, 1], [1]]


@pytest.mark.parametrize("said", [*NONSENSE, [1, 2, 3]])
def test_nonsense_from_a_browser_selects_nothing(said):
    assert chosen_cell(said, 5, 5) is None


SMALL = ["conv.weight", "conv.bias", "net.fc.weight", "net.fc.bias", "scale"]


def said(names: Sequence[str], level: str, **more: Any) -> list[str]:
    return [node.name for node in outline(names, level, **more)]


def test_what_is_selected_is_seen_whatever_the_level_and_nothing_else_is_opened():
    assert said(SMALL, "1") == ["conv", "net", "scale"]
    assert said(SMALL, "1", opened=["net.fc.bias"]) == [
        "conv", "net", "net.fc", "net.fc.weight", "net.fc.bias", "scale",
    ]  # fmt: skip
    # A module that was closed stays so.
    assert said(SMALL, "tensor", closed=["net"]) == ["conv", "conv.weight", "conv.bias", "net", "scale"]
    assert said(SMALL, "1", opened=["net.fc"], closed=["net"]) == ["conv", "net", "scale"]


def test_names_may_be_anything():
    names = ["", ".", "a..b", "a", "a.b", "a" + 5000 * ".x", "a" + 5000 * ".x" + "y", "a\n.<b>"]
    for level in levels(names)[1:]:
        rows = rows_at(names, (), level)
        assert sorted(i for row in rows for i in row.members) == list(range(len(names)))
        assert len(labels(outline(names, level, opened=names))) < 100


# Changes
