"""Sensitivity: how much the loss minds an error, for every layer at every step, in one view."""

from __future__ import annotations

import shlex

import streamlit as st
from inshrink_app import services, state
from inshrink_app.pages.sensitivity import cells, grouping, measurement
from inshrink_app.pages.sensitivity.two_runs import two_runs
from inshrink_app.pages.sensitivity.two_steps import two_steps
from inshrink_app.widgets import snippets, subject
from inshrink_app.widgets.formatting import inked
from inshrink_app.widgets.tables import METRICS, Subject

_VIEWS = {"steps": "All steps", "diff": "Two steps", "runs": "Two runs"}
_GROUPINGS = {"tensor": "Tensor", "block": "Block", "layer_type": "Layer type"}
_STATISTICS = {"mean": "Mean", "p50": "Median", "p99": "99th percentile"}

_VIEW = "view"
_METRIC_OF = "sensitivity.run"


def render() -> None:
    """Draw the page."""
    shown = subject.require("Sensitivity")
    if shown is None:
        return
    view, metric, by, statistic = _choices(shown)
    state.publish(metric=metric, by=by, stat=statistic)
    if view == "steps":
        state.retract(_VIEW)
    else:
        state.publish(**{_VIEW: view})
    st.caption(f"{METRICS[metric].symbol} — {METRICS[metric].meaning}")
    tables = measurement.measured(shown, metric)
    if tables is not None:
        if view == "diff":
            two_steps(shown, tables, statistic)
        elif view == "runs":
            two_runs(shown, tables, metric, statistic)
        else:
            cells.show(shown, tables, by, statistic)
    if view == "steps" or tables is None:
        _snippets(shown, metric, by, statistic)


def _choices(shown: Subject) -> tuple[str, str, str, str]:
    """Draw the controls, and return view, metric, grouping and statistic."""
    n_weights = len({row.name for row in shown.tensors if row.role == "weight"})
    default_by = "tensor" if n_weights <= grouping.MOST_ROWS else "block"
    view = _control("View", _VIEW, _VIEWS, "steps", named=False)
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
        metric = _metric(shown)
        by = state.choice(state.BY, list(_GROUPINGS), default_by)
        if view == "steps":
            by = _control("Rows", state.BY, _GROUPINGS, default_by)
        statistic = state.choice(state.STATISTIC, list(_STATISTICS), "mean")
        if not METRICS[metric].pooled:
            statistic = _control("Statistic", state.STATISTIC, _STATISTICS, "mean")
    return view, metric, by, statistic


def _metric(shown: Subject) -> str:
    """Draw the choice of a metric; a run is opened on one that it tells, whatever was looked at before."""
    if st.session_state.get(_METRIC_OF) != str(shown.path):
        st.session_state[_METRIC_OF] = str(shown.path)
        told = services.told_metrics(shown)
        wanted = state.choice(state.METRIC, list(METRICS), told[0])
        never_told = set(METRICS) & {"fisher", "taylor", "update"} - set(told)
        st.session_state[f"control.{state.METRIC}"] = told[0] if wanted in never_told else wanted
    return _control("Metric", state.METRIC, {key: m.label for key, m in METRICS.items()}, "magnitude")


def _control(label: str, key: str, options: dict[str, str], default: str, *, named: bool = True) -> str:
    """Draw one control, beginning with what the link or the session says."""
    widget = f"control.{key}"
    if widget not in st.session_state:
        st.session_state[widget] = state.choice(key, list(options), default)
    chosen = st.segmented_control(
        label,
        list(options),
        format_func=lambda name: inked(options[name]),
        key=widget,
        required=True,
        label_visibility="visible" if named else "collapsed",
    )
    return chosen or default


def _snippets(shown: Subject, metric: str, by: str, statistic: str) -> None:
    """Show the command and the lines that give the same figures."""
    path = str(shown.path)
    if METRICS[metric].pooled:
        _gain_snippets(shown, metric)
        return
    snippets.show(
        f"inshrink sensitivity {shlex.quote(path)} --metric {metric} --by {by} --statistic {statistic}",
        f"import inshrink_core\n\nrun = inshrink_core.open({path!r})\n"
        f"measured = inshrink_core.analysis.sensitivity(run, {metric!r}).by({by!r})\n"
        f"print(measured.rows, measured.{statistic}[:, -1])",
    )


def _gain_snippets(shown: Subject, metric: str) -> None:
    """Show how gain and noise are measured elsewhere: of an archive against its run, or of a run."""
    path = str(shown.path)
    lines = f"print({{key: row.{metric} for key, row in measured.by_tensor.items()}})"
    if shown.kind == "run" and shown.archive is None:
        snippets.show(
            f"inshrink inspect {shlex.quote(path)} --gain",
            "import inshrink_core\nfrom inshrink_core.analysis.gain import restore_gain_of_run\n\n"
            f"measured = restore_gain_of_run(inshrink_core.open({path!r}))\n{lines}",
        )
        return
    archive = path if shown.kind == "archive" or shown.archive is None else str(shown.archive.path)
    run = path.removesuffix(".inshrink") if shown.kind == "archive" else path
    snippets.show(
        f"inshrink inspect {shlex.quote(archive)} --gain --against {shlex.quote(run)}",
        "import inshrink_core\n\n"
        f"measured = inshrink_core.analysis.restore_gain({archive!r}, {run!r})\n{lines}",
    )


render()
