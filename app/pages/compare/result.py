"""What a comparison found, or has found so far: figures, charts and a row a step."""

from __future__ import annotations

import pandas as pd
import streamlit as st
from inshrink_app import services
from inshrink_app.jobs.job import Job
from inshrink_app.pages.compare import figures as comparison_figures
from inshrink_app.pages.compare.tables import Comparison
from inshrink_app.widgets import figures, job_card, listing
from inshrink_app.widgets.formatting import (
    count_text,
    elide,
    fixed_format,
    html_text,
    markdown_text,
    percent_text,
    value_text,
)

__all__ = ["live", "show"]

_NAME_WIDTH = 40


@st.fragment(run_every=job_card.POLL_SECONDS)
def live(job: Job, bound: float) -> None:
    """Draw a comparison while it runs, each step as it arrives."""
    current = services.find_job(job.job_id)
    if current is None or not current.is_running:
        st.rerun()
    job_card.progress(current)
    job_card.cancel_button(current)
    found = [one for one in services.compared(current) if one.steps]
    if found:
        _charts(found, bound)


def show(job: Job, bound: float) -> None:
    """Draw a finished comparison."""
    found = [one for one in services.compared(job) if one.steps]
    if not found:
        st.caption("No step was compared.")
        return
    for one in found:
        _verdict(one, bound)
    _charts(found, bound)
    _table(found, bound)


def _verdict(one: Comparison, bound: float) -> None:
    """Say how one archive did, against the bound and against doing nothing."""
    worst = one.worst
    facts = [
        (
            "Worst drop",
            "–" if worst is None else percent_text(worst.drop),
            "no step has one"
            if worst is None
            else f"step {count_text(worst.step)}, "
            + ("within the bound" if (worst.drop or 0.0) <= bound else "above the bound"),
        ),
        ("Largest divergence", _value(one.max_divergence), "of the predictions"),
        (
            "Metric",
            elide(one.metric, 18),
            f"{one.direction} is better" + (f", n = {count_text(one.n_samples)}" if one.n_samples else ""),
        ),
        ("Steps", count_text(len(one.steps)), _stale_note(one)),
    ]
    st.caption(markdown_text(elide(one.name, _NAME_WIDTH)))
    with st.container(horizontal=True):
        for label, value, below in facts:
            st.metric(label, value, delta=below, delta_color="off", delta_arrow="off", border=True)


def _value(value: float | None) -> str:
    return "–" if value is None else value_text(value)


def _stale_note(one: Comparison) -> str:
    """Say at how many steps a copy that stores nothing diverges no more: those steps prove little."""
    pairs = [
        (row.divergence, row.stale_divergence)
        for row in one.steps
        if row.divergence is not None and row.stale_divergence is not None
    ]
    if not pairs:
        return "no divergence is known"
    as_good = sum(stale <= own for own, stale in pairs)
    return f"{as_good} no better than stale" if as_good else "all better than stale"


def _charts(found: list[Comparison], bound: float) -> None:
    """Draw metric, drop and divergence by step."""
    names = ", ".join(html_text(one.name) for one in found)
    left, right = st.columns(2, gap="medium")
    config = dict(figures.CONFIG)
    left.plotly_chart(
        comparison_figures.metric_figure(found),
        config=config,
        key="compare.metric",
        alt=f"Metric by step, as trained and as restored from {names}",
    )
    right.plotly_chart(
        comparison_figures.drop_figure(found, bound),
        config=config,
        key="compare.drop",
        alt=f"Drop by step in percent, with the bound and the stale copy, of {names}",
    )
    if any(row.divergence for one in found for row in one.steps):
        st.plotly_chart(
            comparison_figures.divergence_figure(found),
            config=config,
            key="compare.divergence",
            alt=f"Divergence of the predictions by step, with the stale copy, of {names}",
        )
    st.caption(
        "Stale copy: the checkpoint before in this one's place, which stores nothing. A step where it does "
        "as well proves little."
    )


def _table(found: list[Comparison], bound: float) -> None:
    """List every step."""
    rows = [
        (
            one.name,
            row.step,
            row.original,
            row.restored,
            row.drop,
            row.divergence,
            row.stale_drop,
            row.stale_divergence,
            "–" if row.drop is None else "within" if row.drop <= bound else "above",
        )
        for one in found
        for row in one.steps
    ]
    columns = [
        "archive",
        "step",
        "original",
        "restored",
        "drop",
        "divergence",
        "stale drop",
        "stale divergence",
        "bound",
    ]
    table = pd.DataFrame(rows, columns=columns)
    metric = fixed_format([value for one in found for row in one.steps for value in row[1:3]])
    listing.show(
        table,
        "compare",
        alt="Original and restored metric, drop and divergence of every step",
        formats={
            "original": metric,
            "restored": metric,
            "drop": listing.SHARE,
            "stale drop": listing.SHARE,
            "divergence": listing.SMALL,
            "stale divergence": listing.SMALL,
        },
        hidden=[] if len(found) > 1 else ["archive"],
    )
