"""Building blocks of pages: sections, charts, rows of figures, and answers that may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, TypeVar

import plotly.graph_objects as go
import streamlit as st
from inshrink_app import state
from inshrink_app.model import ASK_ABOVE_BYTES, ServiceError
from inshrink_app.widgets import fmt, problem
from inshrink_app.widgets.figures import CONFIG, CURVE_PARTS, log_figure

Answer = TypeVar("Answer")

_LEAST_SMOOTHED = 20
"""Curves with fewer values are not smoothed."""


def folded(
    label: str, icon: str | None, key: str, draw: Callable[[], None], *, expanded: bool = False
) -> None:
    """Draw a panel whose content is drawn once it is opened."""
    panel = st.expander(label, icon=icon, key=key, on_change="rerun", expanded=expanded)
    if panel.open:
        with panel:
            draw()


@contextmanager
def section(heading: str) -> Iterator[None]:
    """Draw the following elements within a border, under a heading."""
    with st.container(border=True):
        st.header(heading, anchor=False)
        yield


def chart(figure: go.Figure, key: str, alt: str, **more: Any) -> None:
    """Draw a figure with an alternative text; `more` handles clicks."""
    st.plotly_chart(figure, config=dict(CONFIG), key=key, alt=alt, **more)


def panels(
    log: Mapping[str, Sequence[tuple[int, float]]],
    groups: Mapping[str, Sequence[str]],
    key: str,
    *,
    legends: bool = True,
) -> None:
    """Draw training metrics, one panel per group, with a common cursor and optional smoothing.

    Parameters
    ----------
    log
        Values by step of each metric.
    groups
        The metrics of a panel, by its name.
    key
        Key of the figure.
    legends
        Whether titles list the metrics of a panel; else they are its name.
    """
    drawn = [name for members in groups.values() for name in members]
    smoothing, most = 0.0, max((len(log[name]) for name in drawn), default=0)
    if most >= _LEAST_SMOOTHED:
        smoothing = st.slider(
            "Smoothing",
            0.0,
            0.99,
            0.0,
            0.01,
            key=f"{key}.smoothing",
            width=240,
            help="Weight of what came before in an exponential moving average; what was logged stays faint.",
        )
    figure = log_figure(log, groups, smoothing=smoothing, legends=legends)
    chart(figure, key, "By step: " + ", ".join(drawn))
    if most > 2 * CURVE_PARTS:
        st.caption(
            f"Up to {fmt.count(most)} values a curve: the smallest and the largest are drawn in each of "
            f"{fmt.count(CURVE_PARTS)} parts of its width, and gaps where there is no number."
        )


def answer(ask: Callable[[], Answer], doing: str = "") -> Answer | None:
    """Return the answer of a service; on failure, draw the problem and return None.

    Parameters
    ----------
    ask
        Calls the service.
    doing
        Text shown meanwhile.
    """
    try:
        with st.spinner(doing) if doing else nullcontext():
            return ask()
    except ServiceError as error:
        problem.show(error.problem)
        return None


def allowed(asked: str, cost: int, label: str, icon: str) -> bool:
    """Return whether so many bytes may be read: few, after a click in the session; else draw a button."""

    def allow() -> None:
        state.clicked()
        st.session_state[asked] = True

    if (cost <= ASK_ABOVE_BYTES and state.was_clicked()) or st.session_state.get(asked):
        return True
    st.button(f"{label} (reads up to {fmt.size(cost)})", icon=icon, on_click=allow)
    return False


_MOST_IN_LINE = 6
"""With more figures, the last would take a line as wide as the page."""

Fact = tuple[str, str, str | None] | tuple[str, str, str | None, str | None]
"""A figure: name, value, text below, and optional help text."""


def facts(rows: Iterable[Fact]) -> None:
    """Draw figures side by side."""
    figures = list(rows)
    n_lines = max(1, -(-len(figures) // _MOST_IN_LINE))
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
