"""What is on screen of one tensor's inside as files, and the lines that give the same."""

from __future__ import annotations

import json
import shlex

import pandas as pd
import streamlit as st
from inshrink_app.pages.sensitivity.drill_figures import DrillDown
from inshrink_app.widgets import snippets
from inshrink_app.widgets.tables import Subject

__all__ = ["show"]


def show(shown: Subject, seen: DrillDown, way: str, metric: str | None) -> None:
    """Offer what is on screen as files, and the lines that give the same."""
    stem = f"anatomy-step-{seen.step}"
    bins = pd.DataFrame(
        {
            "from": seen.edges[:-1],
            "to": seen.edges[1:],
            **{part.name: counts for part, counts in zip(seen.parts, seen.counts, strict=True)},
        }
    )
    with st.container(horizontal=True, gap="small"):
        for label, content, suffix, mime in (
            ("Histogram as CSV", bins.to_csv(index=False), "csv", "text/csv"),
            ("All as JSON", json.dumps(dict(seen.document), indent=1), "json", "application/json"),
        ):
            st.download_button(
                label,
                content.encode(),
                file_name=f"{stem}.{suffix}",
                mime=mime,
                key=f"drill.{suffix}",
                on_click="ignore",
                type="tertiary",
                icon=":material/download:",
            )
    _snippets(shown, seen, way, metric)


def _snippets(shown: Subject, seen: DrillDown, way: str, metric: str | None) -> None:
    """Show the command nearest to this, and the lines that give it exactly."""
    path = str(shown.path)
    quoted = repr(path)
    arguments = f"run, {seen.step}, {seen.name!r}"
    if way == "archive" and shown.kind == "run" and shown.archive is not None:
        quoted = repr(str(shown.archive.path))
        arguments += f", against={path!r}"
    elif way != "archive":
        arguments += f", {way!r}"
    if metric is not None and seen.sensitivity is not None and seen.sensitivity.metric == metric:
        arguments += f", metric={metric!r}"
    options = f"--metric {metric or 'magnitude'} --by tensor --steps {seen.step}"
    snippets.show(
        f"inshrink sensitivity {shlex.quote(path)} {options}",
        f"import inshrink_core\n\nrun = inshrink_core.open({quoted})\n"
        f"seen = inshrink_core.analysis.anatomy({arguments})\n"
        "print(seen.bits_per_weight, seen.entropy, seen.histogram.parts)\n"
        f"print(inshrink_core.analysis.trajectory(run, {seen.name!r}).relative_movement)",
        key="drill.snippets",
    )
