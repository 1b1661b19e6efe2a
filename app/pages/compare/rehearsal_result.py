"""What a rehearsal found, or has found so far: its figures, the curves, and a row a save."""

from __future__ import annotations

import pandas as pd
import streamlit as st
from inshrink_app.pages.compare import figures as comparison_figures
from inshrink_app.pages.compare.tables import RehearsalResult
from inshrink_app.widgets import figures, listing
from inshrink_app.widgets.formatting import (
    count_text,
    counted,
    fixed_format,
    markdown_text,
    percent_text,
    ratio_text,
)

__all__ = ["chart", "show"]


def show(found: RehearsalResult, key: str) -> None:
    """Draw a finished rehearsal.

    Parameters
    ----------
    found
        The rehearsal.
    key
        Tells its widgets from those of another one on the page.
    """
    _facts(found)
    chart(found, key)
    table = pd.DataFrame(
        [
            (curve.seed, step, before, after)
            for curve in found.curves
            for step, before, after in zip(curve.steps, curve.uninterrupted, curve.restored, strict=True)
        ],
        columns=["seed", "step", "uninterrupted", "restored"],
    )
    with st.expander(f"Curves ({counted(len(found.curves), 'pair')})", icon=":material/table_rows:"):
        metric = fixed_format([*table["uninterrupted"], *table["restored"]])
        listing.show(
            table,
            f"rehearsal-{key}",
            alt="Metric of every training at every save",
            formats={"uninterrupted": metric, "restored": metric},
        )


def chart(found: RehearsalResult, key: str) -> None:
    """Draw the curves, and say how to read them."""
    st.plotly_chart(
        comparison_figures.rehearsal_figure(found),
        config=dict(figures.CONFIG),
        key=f"rehearsal.chart.{key}",
        alt=f"{found.metric} by step, with {len(found.restored_at)} restores and without",
    )
    band = (
        "The band is the range of the uninterrupted trainings: what the seed alone does."
        if len(found.curves) > 1
        else "A single pair: how far chance alone moves the curve needs more seeds."
    )
    st.caption(f"{band} Dotted: failures, after which training went on from the archive.")


def _facts(found: RehearsalResult) -> None:
    """Draw the figures of a rehearsal."""
    width = found.excess_half_width
    facts = [
        (
            "Excess at the end",
            percent_text(found.excess),
            "a single seed says little" if width is None else f"± {percent_text(width)} (95 %)",
        ),
        ("Noise of the seeds", percent_text(found.noise), f"{markdown_text(found.metric)}, uninterrupted"),
        ("Failures", count_text(len(found.restored_at)), "each restored from the archive"),
        ("Ratio in all", ratio_text(found.ratio_total), f"weights {ratio_text(found.ratio_weights)}"),
    ]
    with st.container(horizontal=True):
        for label, value, below in facts:
            st.metric(label, value, delta=below, delta_color="off", delta_arrow="off", border=True)
