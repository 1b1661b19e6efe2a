"""Building blocks of pages: sections, charts, rows of figures, and answers that may fail."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, TypeVar

import plotly.graph_objects as go
import streamlit as st
from inshrink_app import state
from inshrink_app.model import ASK_ABOVE_BYTES, ServiceError
from inshrink_app.services.inside import reported
from inshrink_app.theme import CATEGORICAL
from inshrink_app.widgets import fmt, problem
from inshrink_app.widgets.figures import CONFIG
from streamlit.elements.lib.mutable_popover_container import PopoverContainer

Answer = TypeVar("Answer")


def folded(
    label: str, icon: str | None, key: str, draw: Callable[[], None], *, expanded: bool = False
) -> None:
    """Draw a panel whose content is drawn once it is opened."""
    panel = st.expander(label, icon=icon, key=key, on_change="rerun", expanded=expanded)
    if panel.open:
        with panel:
            draw()


def panel(label: str, icon: str, key: str, **look: Any) -> PopoverContainer:
    """Draw a button that opens a panel; an open panel stays open when its label changes."""
    # Another label makes another widget, which takes over this state.
    st.session_state[key] = bool(st.session_state.get(key))
    return st.popover(label, icon=icon, key=key, on_change="rerun", **look)


@contextmanager
def section(heading: str) -> Iterator[None]:
    """Draw the following elements within a border, under a heading."""
    with st.container(border=True):
        st.header(heading, anchor=False)
        yield


def chart(figure: go.Figure, key: str, alt: str, **more: Any) -> None:
    """Draw a figure with an alternative text; `more` handles clicks."""
    st.plotly_chart(figure, config=dict(CONFIG), key=key, alt=alt, **more)


def answer(ask: Callable[[], Answer], doing: str = "") -> Answer | None:
    """Return the answer of a service; on failure, draw the problem and return None.

    `doing` is the text shown meanwhile.
    """
    try:
        with reported(), st.spinner(doing) if doing else nullcontext():
            return ask()
    except ServiceError as error:
        problem.show(error.problem)
        return None


def remembered(slot: str, of: object, key: Hashable, make: Callable[[], Answer]) -> Answer:
    """Return the session's last result for the same object and an equal key, or make it."""
    known = st.session_state.get(slot)
    if known is None or known[0] is not of or known[1] != key:
        known = st.session_state[slot] = (of, key, make())
    made: Answer = known[2]
    return made


def allowed(asked: str, cost: int, label: str, icon: str) -> bool:
    """Return whether so many bytes may be read: few, after a click in the session; else draw a button."""

    def allow() -> None:
        state.clicked()
        st.session_state[asked] = True

    if (cost <= ASK_ABOVE_BYTES and state.was_clicked()) or st.session_state.get(asked):
        return True
    st.button(f"{label} (reads up to {fmt.size(cost)})", icon=icon, on_click=allow)
    return False


_MAX_IN_LINE = 6
"""With more figures, the last would take a line as wide as the page."""

Fact = tuple[str, str, str | None] | tuple[str, str, str | None, str | None]
"""A figure: name, value, text below, and optional help text."""


def facts(rows: Iterable[Fact]) -> None:
    """Draw figures side by side."""
    figures = list(rows)
    n_lines = max(1, -(-len(figures) // _MAX_IN_LINE))
    ends = [line * len(figures) // n_lines for line in range(n_lines + 1)]
    for begin, end in pairwise(ends):
        with st.container(horizontal=True, gap="small"):
            for label, value, below, *tip in figures[begin:end]:
                st.metric(
                    label,
                    value,
                    delta=below,
                    delta_color="off",
                    delta_arrow="off",
                    border=True,
                    help=(tip[0] or None) if tip else None,
                )


def archive_colours(run: str, paths: Iterable[str]) -> dict[str, str]:
    """Return the colour of each archive of a run, by its path; all charts use the same.

    An archive keeps its colour when others come or go. Blue, orange-red and grey are reserved for
    measurements of a run, for bounds, and for baselines that store nothing.
    """
    colours = (*CATEGORICAL[1:5], *CATEGORICAL[7:])
    seen: list[str] = st.session_state.setdefault(f"colours.{run}", [])
    seen += sorted(set(paths).difference(seen))
    return {path: colours[seen.index(path) % len(colours)] for path in sorted(paths, key=seen.index)}
