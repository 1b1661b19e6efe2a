"""What every page is built of: sections with a heading, charts, and answers that may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import plotly.graph_objects as go
import streamlit as st
from inshrink_app import state
from inshrink_app.widgets import curves, problem
from inshrink_app.widgets.figures import CONFIG
from inshrink_app.widgets.formatting import count_text
from inshrink_app.widgets.tables import ASK_ABOVE_BYTES, ServiceError

__all__ = ["allow", "answer", "chart", "is_allowed", "panels", "section"]

Answer = TypeVar("Answer")


@contextmanager
def section(heading: str) -> Iterator[None]:
    """Draw what follows within a border, under a heading."""
    with st.container(border=True):
        st.header(heading, anchor=False)
        yield


def chart(figure: go.Figure, key: str, alt: str, **more: Any) -> None:
    """Draw a figure, with what it is for those who do not see it; `more` is what a click does."""
    st.plotly_chart(figure, config=dict(CONFIG), key=key, alt=alt, **more)


def panels(
    log: Mapping[str, Sequence[tuple[int, float]]],
    groups: Mapping[str, Sequence[str]],
    key: str,
    *,
    legends: bool = True,
) -> None:
    """Draw training metrics, one figure a group: side by side, or below each other on a narrow screen.

    Parameters
    ----------
    log
        Of each metric its values by step.
    groups
        The metrics of a figure, by its name.
    key
        Of the figures.
    legends
        Titles tell the metrics of a figure apart; else they are its name.
    """
    for column, (name, members) in zip(st.columns(len(groups)), groups.items(), strict=True):
        figure = curves.log_figure({one: log[one] for one in members}, "" if legends else name)
        with column:
            chart(figure, f"{key}.{name}", "By step: " + ", ".join(members))
    most = max((len(log[one]) for members in groups.values() for one in members), default=0)
    if most > 2 * curves.WIDTH:
        st.caption(
            f"Up to {count_text(most)} values a curve: drawn are the smallest and the largest in each of "
            f"{count_text(curves.WIDTH)} parts of its width, and gaps where there is no number."
        )


def answer(ask: Callable[[], Answer], doing: str = "") -> Answer | None:
    """Return what a service answers; where it cannot, draw why and return None.

    Parameters
    ----------
    ask
        Asks it.
    doing
        What is said meanwhile.
    """
    try:
        with st.spinner(doing) if doing else nullcontext():
            return ask()
    except ServiceError as error:
        problem.show(error.problem)
        return None


def is_allowed(asked: str, cost: int) -> bool:
    """Whether so many bytes may be read: few, in a session that was clicked in, or after `allow`."""
    is_cheap = cost <= ASK_ABOVE_BYTES and state.was_clicked()
    return is_cheap or bool(st.session_state.get(asked))


def allow(asked: str) -> None:
    """Take note that the reader wants it read; a callback of the button that asks."""
    state.clicked()
    st.session_state[asked] = True
