"""What a search found, or has found so far: the scatter with its front, the facts, and a row a trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.jobs.job import Job
from inshrink_app.pages.search import figure as search_figure
from inshrink_app.pages.search.tables import Searched, SearchPoint
from inshrink_app.widgets import figures, job_card, listing
from inshrink_app.widgets.formatting import (
    count_text,
    counted,
    duration_text,
    elide,
    inked,
    markdown_text,
    percent_text,
    ratio_text,
    value_text,
)

__all__ = ["chart", "facts", "live", "picked", "table"]

_CHART, _TABLE = "search.chart", "search.table"
_PICKED = "search.picked"
_FIGURE = "search.figure"
_FIGURES = {"drop": "Drop", "divergence": "Divergence"}


@st.fragment(run_every=job_card.POLL_SECONDS)
def live(job: Job, compared: Sequence[SearchPoint]) -> None:
    """Draw a search while it runs, each trial as it arrives."""
    current = services.find_job(job.job_id)
    if current is None or not current.is_running:
        st.rerun()
    job_card.progress(current)
    found = services.searched(current)
    left = max(0, current.total - current.done)
    with st.container(horizontal=True, vertical_alignment="center"):
        job_card.cancel_button(current)
        if current.total:
            best = "none yet" if found.best is None else ratio_text(found.best.ratio)
            st.caption(f"Best so far {best} · at most {counted(left, 'evaluation')} left")
    if found.points:
        _figure(found, compared, "live", selectable=False)


def facts(found: Searched) -> None:
    """Draw the figures of the best; all of them measured."""
    best = found.best
    if best is None:
        asked = "reaches the ratio" if found.target_ratio is not None else "keeps the bounds at every step"
        st.warning(
            f"No configuration that was tried {asked}. Loosen what is asked for, search another codec, or "
            "allow more configurations.",
            icon=":material/warning:",
        )
        return
    metric = elide(found.metric, 18) or "the metric"
    shown = [
        ("Ratio, weights", ratio_text(best.ratio), f"measured on {counted(best.n_steps, 'step')}"),
        ("Worst drop", percent_text(best.drop), f"of {markdown_text(metric)}, measured"),
        (
            "Largest divergence",
            "–" if best.divergence is None else value_text(best.divergence),
            "nats, measured",
        ),
    ]
    if best.gain is not None and best.noise is not None:
        shown.append(("Restore gain", f"{best.gain:.3f}", f"noise {value_text(best.noise)}, measured"))
    with st.container(horizontal=True):
        for label, value, below in shown:
            st.metric(label, value, delta=below, delta_color="off", delta_arrow="off", border=True)
    took = f"{counted(found.evaluations, 'evaluation')} in {duration_text(found.seconds)}"
    st.caption(markdown_text(f"Best: {best.label} · {took}"))
    notes = list(found.notes)
    if found.uninformative:
        few, all_steps = counted(len(found.uninformative), "step"), count_text(len(found.steps))
        notes.append(f"at {few} of {all_steps} the stale copy keeps the bounds too: they say nothing there")
    for note in notes:
        st.caption(markdown_text(f"{note[:1].upper()}{note[1:]}."))


def chart(found: Searched, compared: Sequence[SearchPoint]) -> None:
    """Draw the scatter; a click picks a point."""
    _figure(found, compared, _CHART, selectable=True)


def _figure(found: Searched, compared: Sequence[SearchPoint], key: str, *, selectable: bool) -> None:
    """Draw the scatter against what the reader chose."""
    points = (*found.points, *compared)
    options = [name for name in _FIGURES if any(point.figure(name) is not None for point in points)]
    default = "divergence" if found.max_divergence is not None and "divergence" in options else "drop"
    chosen = default
    if len(options) > 1:
        if st.session_state.get(_FIGURE) not in options:
            st.session_state[_FIGURE] = default
        chosen = (
            st.segmented_control(
                "Against",
                options,
                format_func=lambda name: inked(_FIGURES[name]),
                key=f"{_FIGURE}.{key}",
                default=st.session_state[_FIGURE],
            )
            or default
        )
        st.session_state[_FIGURE] = chosen
    selecting: dict[str, Any] = {}
    if selectable:
        selecting = {"on_select": _clicked, "selection_mode": ("points",)}
        st.session_state["search.n_points"] = len(points)
    st.plotly_chart(
        search_figure.search_figure(found, compared, chosen),
        config=dict(figures.CONFIG),
        key=key,
        alt=f"Ratio of the weights against {_FIGURES[chosen].lower()} of {len(points)} configurations",
        **selecting,
    )
    words = _legend_words(points)
    if chosen == "divergence":
        words += " A divergence of zero is not on this axis; the table has it."
    st.caption(words + (" Click a point to load it into the editor." if selectable else ""))


def _legend_words(points: Sequence[SearchPoint]) -> str:
    """Say how the points are to be read, as far as there are such."""
    if all(point.is_estimated for point in points):
        return (
            "Hollow diamonds are estimates: each is one configuration, encoded on a sample of the weights. "
            "Nothing of it was measured; a search measures."
        )
    words = "Every point is one configuration, measured on the chain. Dim: another one is better in both. "
    words += "Hollow circles: measured on some of the steps only; the ratio is not of the whole chain."
    if any(point.is_estimated for point in points):
        words += " Hollow diamonds: estimated, not measured."
    return words


def _clicked() -> None:
    """Take in a click on the scatter."""
    place = search_figure.clicked_point(
        st.session_state[_CHART]["selection"]["points"], st.session_state.get("search.n_points", 0)
    )
    if place is not None:
        st.session_state[_PICKED] = place


def _row_chosen() -> None:
    """Take in a choice in the table."""
    rows = st.session_state[_TABLE]["selection"]["rows"]
    if rows:
        st.session_state[_PICKED] = int(rows[0])


def picked(n_points: int) -> int | None:
    """Return the point that was picked since this was asked last; None for none."""
    place = st.session_state.pop(_PICKED, None)
    return place if isinstance(place, int) and 0 <= place < n_points else None


def table(found: Searched, compared: Sequence[SearchPoint]) -> None:
    """List every configuration; a row picks it, as a click on its point does."""
    points = (*found.points, *compared)
    shares = {place for name in _FIGURES for place in search_figure.front(points, name)}
    rows = [
        (
            point.label,
            point.basis,
            _word(found, point, place in shares),
            point.ratio,
            point.drop,
            point.divergence,
            point.n_steps,
            point.gain,
            point.noise,
        )
        for place, point in enumerate(points)
    ]
    columns = ["configuration", "figures", "is", "ratio", "drop", "divergence", "steps", "gain", "noise"]
    listed = pd.DataFrame(rows, columns=columns)
    listing.show(
        listed,
        "search",
        alt="Configurations with ratio, worst drop, largest divergence and restore gain",
        formats={
            "ratio": listing.RATIO,
            "drop": listing.SHARE,
            "divergence": listing.SMALL,
            "gain": "%.3f",
            "noise": "%.3f",
        },
        key=_TABLE,
        on_select=_row_chosen,
        selection_mode="single-row",
    )


def _word(found: Searched, point: SearchPoint, is_on_front: bool) -> str:
    """Say in a few words where a configuration stands."""
    if point.is_estimated:
        return "not measured"
    if point.baseline:
        return "baseline"
    if point.is_best:
        return "best"
    if not point.whole:
        return "given up" if not point.keeps else "not finished"
    kept = found.verdict(point)
    return f"{kept}, on the front" if is_on_front else kept
