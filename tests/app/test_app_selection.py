"""One selection for heatmap, table, search box and link; rows for names of any kind."""

from collections.abc import Sequence
from typing import Any

import pytest
from inshrink_app.pages.run import selection
from inshrink_app.pages.run.heatmap import StepAxis
from inshrink_app.widgets.modules import labels, levels, outline, rows_at

ROWS, STEPS = ["a", "b", "c"], (10, 20, 30)


@pytest.fixture
def session(monkeypatch):
    """The state of a visit in which row b is ticked, and a row that the filter hides."""
    session = {"run.steps": STEPS, "run.ticked": ("run", ["hidden", "b"])}
    monkeypatch.setattr("streamlit.session_state", session)
    return session


def pick(value: object) -> None:
    selection.pick(value, "run", ROWS, STEPS, StepAxis.of(STEPS))


NONSENSE = [
    None, {}, "23", 7, [9, 0], [0, -1], ["a", "b"], [float("nan"), 0], [1.5, 2], [True, 1], [1], [1, 2, 3],
]  # fmt: skip


@pytest.mark.parametrize("said", NONSENSE)
def test_nonsense_from_a_browser_selects_and_ticks_nothing(session, said):
    before = dict(session)
    pick(said)
    pick([1, said, None])
    pick([1, None, [7, -1, 1]])
    pick([1, None, "23"])
    assert {key: session[key] for key in before} == before


def test_a_message_picks_a_cell_and_ticks_and_a_repetition_changes_nothing(session):
    for _ in range(2):
        pick([3, [2, 1], [0, 2]])
        assert session["run.selection"] == selection.Selection("c", 20)
        assert selection.ticked("run") == ("hidden", "a", "c")
        assert session[selection.ANSWERED] == 3


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
