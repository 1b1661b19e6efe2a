"""Two runs: a second one laid over the one on screen, tensors matched by name."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import pandas as pd
import streamlit as st
from inshrink_app import services, state
from inshrink_app.pages.sensitivity import changes as change_figures
from inshrink_app.pages.sensitivity import differences, measurement
from inshrink_app.pages.sensitivity.changes import Changes, between_runs
from inshrink_app.widgets import figures, listing, problem, snippets
from inshrink_app.widgets.formatting import elide, markdown_text
from inshrink_app.widgets.tables import METRICS, Sensitivity, ServiceError, Subject

__all__ = ["two_runs"]

_OTHER = "other"


def two_runs(shown: Subject, tables: Mapping[str, Sensitivity], metric: str, statistic: str) -> None:
    """Lay a second run over this one: the same metric, tensors matched by name.

    Parameters
    ----------
    shown
        The run or archive on screen.
    tables
        A metric of it by grouping.
    metric, statistic
        What is compared.
    """
    other = _other(shown)
    if other is None:
        return
    second = measurement.measured(other, metric, key=".other")
    if second is None:
        return
    mine, theirs = tables["tensor"], second["tensor"]
    found = between_runs(mine, theirs, statistic)
    if not found.names:
        st.info("The two runs have no tensor of the same name.", icon=":material/info:")
    names = (_short(shown), _short(other))
    with st.container(border=True):
        if found.steps:
            differences.draw(
                found,
                f"to {names[0]}",
                f"{METRICS[metric].label} of the second run, as a multiple of the first",
            )
        elif found.names:
            st.caption(
                "The two runs have no step in common; their courses can still be laid over each other."
            )
        differences.list_names(found.only_first, f"Only in {markdown_text(names[0])}")
        differences.list_names(found.only_second, f"Only in {markdown_text(names[1])}")
    if found.names:
        _overlaid(found, (mine, theirs), names, metric, statistic)
    path = str(other.path)
    told = "update" if METRICS[metric].pooled else metric
    snippets.show(
        f"inshrink sensitivity {shlex.quote(path)} --metric {told} --by tensor --statistic {statistic}",
        "import inshrink_core\n\n"
        "mine, other = (\n"
        f"    inshrink_core.analysis.sensitivity(inshrink_core.open(path), {told!r}).by('tensor')\n"
        f"    for path in ({str(shown.path)!r}, {path!r})\n)\n"
        "for name in set(mine.rows) & set(other.rows):\n"
        f"    print(name, mine.{statistic}[mine.rows.index(name), -1], "
        f"other.{statistic}[other.rows.index(name), -1])",
    )


def _other(shown: Subject) -> Subject | None:
    """Let the reader choose the second run, from recent ones, neighbours and samples."""
    options = [str(path) for path in services.other_runs(shown)]
    if not options:
        with st.container(border=True):
            st.header("There is no second run", anchor=False)
            st.write("Runs that were opened lately, and those in the same folder, can be laid over this one.")
        return None
    widget = f"runs.{_OTHER}"
    if st.session_state.get(widget) not in options:
        linked = state.choice(_OTHER, options, options[0])
        st.session_state[widget] = linked
    chosen = st.selectbox(
        "Second run", options, key=widget, format_func=lambda path: elide(path, 90), width=700
    )
    state.publish(**{_OTHER: chosen})
    try:
        with st.spinner("Reading headers…"):
            return services.load_subject(chosen)
    except ServiceError as error:
        problem.show(error.problem)
        return None


def _short(subject: Subject) -> str:
    return elide(subject.name, 30)


def _overlaid(
    found: Changes,
    tables: tuple[Sensitivity, Sensitivity],
    names: tuple[str, str],
    metric: str,
    statistic: str,
) -> None:
    """Draw one tensor's course in both runs, and list all tensors."""
    tensor = st.selectbox("Tensor", found.names, key="runs.tensor", width=420)
    lines = []
    for table, name in zip(tables, names, strict=True):
        place = [row.name for row in table.rows].index(tensor)
        lines.append(change_figures.Line(name, table.steps, table.values[statistic][place]))
    st.plotly_chart(
        change_figures.overlay_figure(lines, METRICS[metric].symbol, log=METRICS[metric].scale == "log"),
        config=dict(figures.CONFIG),
        key="runs.course",
        alt=f"{METRICS[metric].label} of one tensor in both runs, over the steps",
    )
    frame = pd.DataFrame(
        {
            "tensor": found.names,
            "layer type": found.layers,
            "first run": found.first,
            "second run": found.second,
            "times": found.second / found.first,
        }
    )
    listing.show(
        frame,
        "two-runs",
        alt="Tensors by how much they differ between both runs at the last common step",
        formats={"first run": listing.SMALL, "second run": listing.SMALL, "times": "%.3f"},
        helps={"times": "The value in the second run over that in the first"},
    )
